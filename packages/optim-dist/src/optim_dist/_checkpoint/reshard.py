"""From the pieces that files hold to the pieces that ranks own: by exchanges of ``optim_redist``.

All parameters of a state key and dtype are one long flat tensor, in the order of the manifest. Each saved rank's file
is read by one rank; what a rank has read and what it is to own are sets of intervals of that tensor:

    source   rows[r] = intervals of the files that r reads        target   rows[r] = intervals that r owns

Every element is read once from disk and sent at most once. If every rank has read exactly the pieces that it is to own,
as after a restart of the same ranks, a tensor takes no exchange and no copy. Batches of bounded size, one after the
other, keep what is in flight small, however large the checkpoint is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from optim_dist._checkpoint.codes import Flat, blocks_of
from optim_dist._checkpoint.manifest import SavedParameter, SavedState
from optim_dist._reduction.collectives import Communicator
from optim_dist.plan import Piece
from optim_redist import Intervals, Item, Layout, Mesh, redistribute_many

VALUE = "value"
ROOM = 64 * 2**20  # most bytes that a rank reads, and that it gets, in a batch; an exchange takes as much of each again

# the sides of an exchange
Side = Literal["before", "after"]


class Segment(NamedTuple):
    """Elements ``[start, stop)`` of a parameter's tensor that ``rank`` holds, in its piece that begins at ``base``.

    Before the exchange ``file`` is the saved rank whose file has them.
    """

    rank: int
    start: int
    stop: int
    base: int
    file: int = -1

    def within(self, start: int, stop: int) -> Segment:
        return self._replace(start=max(self.start, start), stop=min(self.stop, stop))


@dataclass(frozen=True)
class Extent:
    """Elements ``[start, stop)`` of a parameter's tensor, and which rank holds which of them before and after.

    ``is_last``: whether the tensor ends with them.
    """

    name: str
    start: int
    stop: int
    before: Sequence[Segment]
    after: Sequence[Segment]
    is_last: bool = True

    def held(self, side: Side) -> list[Segment]:
        """The segments of one side that are not empty."""
        return [part for part in (self.before if side == "before" else self.after) if part.start < part.stop]

    def cut(self, numel: int) -> Iterator[Extent]:
        """The same elements in extents of ``numel`` elements at most."""
        if self.stop - self.start <= numel:
            yield self
            return
        for start in range(self.start, self.stop, numel):
            stop = min(start + numel, self.stop)
            before, after = ([part.within(start, stop) for part in parts] for parts in (self.before, self.after))
            yield replace(self, start=start, stop=stop, before=before, after=after, is_last=stop == self.stop)


@dataclass
class Stream:
    """One flat tensor: many parameters' tensors of one state key and dtype."""

    key: str
    dtype: torch.dtype
    extents: list[Extent] = field(default_factory=list)

    def rows(self, side: Side, world_size: int) -> list[list[tuple[int, int]]]:
        """Each rank's intervals of the flat tensor."""
        rows: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
        offset = 0
        for extent in self.extents:
            for part in extent.held(side):
                rows[part.rank].append((offset + part.start - extent.start, offset + part.stop - extent.start))
            offset += extent.stop - extent.start
        return rows

    @property
    def numel(self) -> int:
        return sum(extent.stop - extent.start for extent in self.extents)

    @property
    def stays(self) -> bool:
        """Whether every rank is to own exactly the pieces that it has read."""

        def pieces(side: Side) -> list[list[tuple[int, int, int]]]:
            return [[(p.rank, p.start, p.stop) for p in extent.held(side)] for extent in self.extents]

        return pieces("before") == pieces("after")

    def own(self, side: Side, rank: int) -> Iterator[tuple[str, Segment]]:
        """The parts of ``rank``, in order, each with its parameter's name."""
        for extent in self.extents:
            for part in extent.held(side):
                if part.rank == rank:
                    yield extent.name, part


class Arrival(NamedTuple):
    """Consecutive elements of this rank's piece of a parameter's tensor, from its element ``start`` on."""

    name: str
    key: str
    start: int
    part: Tensor


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
        pieces: a parameter's new pieces, by its name, if it is read.
        with_values: whether to include the parameters' values, beside their state.
    """
    found: dict[tuple[str, str], Stream] = {}
    for entry in saved:
        values = {VALUE: SavedState(entry.dtype, entry.shape, in_pieces=True)} if with_values else {}
        for key, state in {**values, **entry.state}.items():
            stream = found.setdefault((key, state.dtype), Stream(key, getattr(torch, state.dtype)))
            numel = prod(state.shape)
            if state.in_pieces:
                parts = [(rank, *blocks_of(state, *part)) for rank, *part in entry.pieces]
                before = [Segment(readers[rank], start, stop, start, rank) for rank, start, stop in parts]
                own = [(piece.rank, *blocks_of(state, piece.start, piece.stop)) for piece in pieces(entry.name)]
                after = [Segment(rank, start, stop, start) for rank, start, stop in own]
            else:
                owner = entry.pieces[0][0]
                before = [Segment(readers[owner], 0, numel, 0, owner)]
                after = [Segment(piece.rank, 0, numel, 0) for piece in pieces(entry.name)[:1]]
            stream.extents.append(Extent(entry.name, 0, numel, before, after))
    return [found[key] for key in sorted(found)]


def in_batches(wanted: Iterable[Stream], room: int) -> Iterator[list[Stream]]:
    """The same elements in batches, in order, in each of which a rank has at most ``room`` bytes on either side."""
    batch: list[Stream] = []
    used: Counter[tuple[Side, int]] = Counter()
    for stream in wanted:
        for extent in (part for whole in stream.extents for part in whole.cut(max(1, room // stream.dtype.itemsize))):
            more: Counter[tuple[Side, int]] = Counter()
            for side in ("before", "after"):
                for part in extent.held(side):
                    more[side, part.rank] += (part.stop - part.start) * stream.dtype.itemsize
            if any(used[end] + size > room for end, size in more.items()):
                yield batch
                batch, used = [], Counter()
            used.update(more)
            if not batch or (batch[-1].key, batch[-1].dtype) != (stream.key, stream.dtype):
                batch.append(Stream(stream.key, stream.dtype))
            batch[-1].extents.append(extent)
    if batch:
        yield batch


def exchange(
    wanted: Sequence[Stream], read: Callable[[int, str, str], Flat], communicator: Communicator
) -> Iterator[Arrival]:
    """Yield what this rank owns, as flat parts; ``read(file, name, key)`` gives a piece that it has read.

    Collective: every rank has to iterate to the end. Parts of a stream that ``stays`` may be what was read, not a copy;
    which streams these are is the same on all ranks.
    """

    def part_read(stream: Stream, name: str, part: Segment) -> Tensor:
        return read(part.file, name, stream.key)[part.start - part.base : part.stop - part.base]

    rank, world_size, device = communicator.rank, communicator.world_size, communicator.device
    mesh = Mesh(world_size, ranks=list(communicator.ranks))
    items: dict[str, Item] = {}
    moved: list[Stream] = []
    for stream in wanted:
        mine = (part_read(stream, name, part) for name, part in stream.own("before", rank))
        if stream.stays:
            for (name, part), found in zip(stream.own("after", rank), mine):
                yield Arrival(name, stream.key, part.start - part.base, found.to(device))
            continue
        before, after = (
            Layout(mesh, [((0,), Intervals(stream.rows(side, world_size)))]) for side in ("before", "after")
        )
        source = _joined(mine, stream.dtype, device)
        items[f"{len(moved):04d}"] = Item(source, (stream.numel,), before, after)
        del source
        moved.append(stream)
    arrived = redistribute_many(items, group=communicator.group) if items else {}
    items.clear()
    for stream, target in zip(moved, arrived.values()):
        assert target is not None, "every rank is in the mesh"
        own = list(stream.own("after", rank))
        for (name, part), found in zip(own, target.split([part.stop - part.start for _, part in own])):
            yield Arrival(name, stream.key, part.start - part.base, found)


def _joined(parts: Iterable[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Flat parts, all in files or all on ``device``, concatenated on ``device``."""
    found = list(parts)
    return torch.cat(found).to(device) if found else torch.empty(0, dtype=dtype, device=device)
