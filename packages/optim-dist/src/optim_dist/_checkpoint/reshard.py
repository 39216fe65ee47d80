"""From the pieces that files hold to the pieces that ranks own: one exchange by ``optim_redist``.

All parameters of a state key and dtype are one long flat tensor, in the order of the manifest. Each saved rank's file
is read by one rank; what a rank has read and what it is to own are sets of intervals of that tensor:

    source   rows[r] = intervals of the files that r reads        target   rows[r] = intervals that r owns

Every element is read once from disk and sent at most once. What each rank has read piece by piece as it is to own it,
as after a restart of the same ranks, takes no exchange and no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from optim_dist._checkpoint.codes import blocks_of
from optim_dist._checkpoint.manifest import SavedParameter, SavedState
from optim_dist.plan import Piece
from optim_redist import Intervals, Item, Layout, Mesh, redistribute_many

VALUE = "value"


@dataclass(frozen=True)
class Segment:
    """Elements ``[start, stop)`` of a parameter's tensor, held by ``rank``; before the exchange, from file ``file``."""

    rank: int
    start: int
    stop: int
    file: int = -1


@dataclass
class Stream:
    """One flat tensor of many parameters: where each begins, and who holds what before and after."""

    key: str
    dtype: torch.dtype
    names: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    before: list[list[Segment]] = field(default_factory=list)
    after: list[list[Segment]] = field(default_factory=list)

    def rows(self, segments: Sequence[Sequence[Segment]], world_size: int) -> list[list[tuple[int, int]]]:
        """Each rank's intervals."""
        rows: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
        offset = 0
        for size, parts in zip(self.sizes, segments):
            for part in parts:
                if part.start < part.stop:
                    rows[part.rank].append((offset + part.start, offset + part.stop))
            offset += size
        return rows

    @property
    def stays(self) -> bool:
        """Whether every rank owns the pieces that it has read."""

        def pieces(segments: Sequence[Sequence[Segment]]) -> list[list[tuple[int, int, int]]]:
            return [[(p.rank, p.start, p.stop) for p in parts if p.start < p.stop] for parts in segments]

        return pieces(self.before) == pieces(self.after)

    def own(self, segments: Sequence[Sequence[Segment]], rank: int) -> Iterator[tuple[str, Segment]]:
        """This rank's parts, in order."""
        for name, parts in zip(self.names, segments):
            for part in parts:
                if part.rank == rank and part.start < part.stop:
                    yield name, part


def streams(
    saved: Sequence[SavedParameter],
    readers: Sequence[int],
    pieces: Callable[[str], Sequence[Piece]] = lambda name: (),
    *,
    with_values: bool = True,
) -> list[Stream]:
    """The flat tensors of a checkpoint, the same on every rank.

    State that is not in pieces goes to the first piece's rank.

    Args:
        readers: which rank reads, or has, each saved rank's file.
        pieces: a parameter's new ones, if it is read.
        with_values: whether parameters are among them, beside their state.
    """
    found: dict[tuple[str, str], Stream] = {}
    for entry in saved:
        values = {VALUE: SavedState(entry.dtype, entry.shape, in_pieces=True)} if with_values else {}
        for key, state in {**values, **entry.state}.items():
            stream = found.setdefault((key, state.dtype), Stream(key, getattr(torch, state.dtype)))
            numel = prod(state.shape)
            if state.in_pieces:
                before = [Segment(readers[rank], *blocks_of(state, *part), rank) for rank, *part in entry.pieces]
                after = [Segment(p.rank, *blocks_of(state, p.start, p.stop)) for p in pieces(entry.name)]
            else:
                owner = entry.pieces[0][0]
                before = [Segment(readers[owner], 0, numel, owner)]
                after = [Segment(piece.rank, 0, numel) for piece in pieces(entry.name)[:1]]
            stream.names.append(entry.name)
            stream.sizes.append(numel)
            stream.before.append(before)
            stream.after.append(after)
    return [found[key] for key in sorted(found)]


def exchange(
    wanted: Sequence[Stream],
    read: Callable[[int, str, str], Tensor],
    rank: int,
    ranks: Sequence[int],
    group: ProcessGroup | None,
    device: torch.device,
) -> dict[str, dict[str, Tensor]]:
    """``{parameter: {key: flat part}}`` that this rank owns; ``read(file, name, key)`` is a part it has read.

    What stays may be what was read itself. Which streams take part in the exchange all ranks know alike.
    """
    mesh = Mesh(len(ranks), ranks=list(ranks))
    parts: dict[str, dict[str, Tensor]] = {}
    moved: list[Stream] = []
    items = {}
    for stream in wanted:
        if stream.stays:
            for name, part in stream.own(stream.before, rank):
                parts.setdefault(name, {})[stream.key] = read(part.file, name, stream.key).to(device)
            continue
        mine = [read(part.file, name, stream.key) for name, part in stream.own(stream.before, rank)]
        source = torch.cat(mine) if mine else torch.empty(0, dtype=stream.dtype)
        before, after = (
            Layout(mesh, [((0,), Intervals(stream.rows(segments, len(ranks))))])
            for segments in (stream.before, stream.after)
        )
        items[f"{len(moved):04d}"] = Item(source.to(device), (sum(stream.sizes),), before, after)
        moved.append(stream)
    arrived = redistribute_many(items, group=group) if items else {}
    for stream, target in zip(moved, arrived.values()):
        assert target is not None, "every rank is in the mesh"
        own = list(stream.own(stream.after, rank))
        for (name, _), part in zip(own, target.split([part.stop - part.start for _, part in own])):
            parts.setdefault(name, {})[stream.key] = part
    return parts
