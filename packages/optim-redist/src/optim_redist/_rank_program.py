"""One rank's part of a plan: which views of its tensors go into which message, and where what arrives belongs.

A phase of a plan becomes, on one rank, a list of messages out, a list of messages in and a list of local copies. A
message is a list of pieces; a piece is evenly spaced in the tensor, so it is one ``as_strided`` view and one slot of
the flat buffer, and packing is one copy a piece. Everything that depends on layouts is decided here once; what depends
on the strides of the tensors that come is decided at the first call with such strides.

The same code packs and unpacks for a process group and for a simulation of all ranks in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Literal, cast

import torch
from torch import Tensor

from optim_redist.index_sets import Run, aligned_runs
from optim_redist.moves import Phase, Transfer
from optim_redist.ownership import Holding
from optim_redist.problem import Problem

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Piece = tuple[Run, ...]
View = tuple[tuple[int, ...], tuple[int, ...], int]


def as_bits(tensor: Tensor) -> Tensor:
    """The ``resolved`` tensor as integers of its width, so that copies keep every bit; 16-byte elements stay."""
    tensor = tensor.detach()
    bits = bits_type(tensor.dtype)
    return tensor if tensor.dtype == bits else tensor.view(bits)


def resolved(tensor: Tensor | None) -> Tensor | None:
    """The tensor with its values in its memory: conjugation or negation may be pending on a view of a complex one."""
    return None if tensor is None else tensor.resolve_conj().resolve_neg()


def bits_type(dtype: torch.dtype) -> torch.dtype:
    """The integer type of the same width; the type itself if there is none."""
    return _BITS.get(dtype.itemsize, dtype)


def _view_of(piece: Piece, strides: Sequence[int]) -> View:
    """Sizes, strides and offset of a piece in a tensor of these strides."""
    sizes: list[int] = []
    steps: list[int] = []
    offset = 0
    for run, stride in zip(piece, strides):
        offset += run.start * stride
        if run.repeats > 1:
            sizes.append(run.repeats)
            steps.append(run.stride * stride)
        sizes.append(run.length)
        steps.append(stride)
    return tuple(sizes), tuple(steps), offset


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def view_of(tensor: Tensor, view: View) -> Tensor:
    """The view, given relative to the tensor's first element."""
    sizes, strides, offset = view
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)


@dataclass
class Message:
    """What travels between this rank and one other in one phase; with ``peer`` this rank itself, a local copy.

    Attributes:
        pieces: places in the tensor, in the order in which they lie in the buffer.
        read: which of the sender's tensors the pieces lie in, for each piece.
        contributions: which contribution each piece carries, -1 for finished values.
        num_elements: elements of all pieces.
    """

    peer: int
    pieces: list[Piece] = field(default_factory=list)
    read: list[Literal["src", "dst"]] = field(default_factory=list)
    contributions: list[int] = field(default_factory=list)
    num_elements: int = 0
    _bound: dict[tuple[int, ...], list[View]] = field(default_factory=dict)

    def add(self, piece: Piece, read: Literal["src", "dst"], contribution: int) -> None:
        self.pieces.append(piece)
        self.read.append(read)
        self.contributions.append(contribution)
        self.num_elements += prod(run.length * run.repeats for run in piece)

    def views(self, strides: tuple[int, ...]) -> list[View]:
        """The pieces' views in a tensor of these strides."""
        if strides not in self._bound:
            self._bound[strides] = [_view_of(piece, strides) for piece in self.pieces]
        return self._bound[strides]


Which = Literal["src", "dst"]


class Copies:
    """Strided copies from tensors into one target, as wide as their alignment allows.

    Copying 16 bytes at a time, whatever the element type, keeps strided copies at the speed of the memory. That is
    possible where rows, strides and offsets are whole multiples of 16 bytes.
    """

    def __init__(self, pairs: list[tuple[Which, View, View]], itemsize: int, rows: Sequence[_Rows]) -> None:
        self.pairs = pairs
        self.lane = _WIDE // itemsize
        self.wide: list[tuple[Which, View, View]] | None = None
        if pairs and self.lane > 1 and all(_is_wide(*row, self.lane) for row in rows):
            found = [(which, _widened(a, self.lane), _widened(b, self.lane)) for which, a, b in pairs]
            if all(a is not None and b is not None for _, a, b in found):
                self.wide = found  # type: ignore[assignment]

    def run(self, sources: Mapping[Which, Tensor | None], target: Tensor | None) -> None:
        """Make the copies; the tensors are given as bits."""
        if not self.pairs:
            return
        assert target is not None, "copies have a target"
        used = {which: cast(Tensor, sources[which]) for which in {which for which, _, _ in self.pairs}}
        pairs = self.pairs
        if self.wide is not None and all(_is_aligned(tensor) for tensor in (*used.values(), target)):
            pairs = self.wide
            used = {which: tensor.view(torch.complex128) for which, tensor in used.items()}
            target = target.view(torch.complex128)
        copy_views([view_of(target, view) for _, _, view in pairs], [view_of(used[w], view) for w, view, _ in pairs])


_WIDE = 16  # bytes
_Rows = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides of a tensor
FLAT: _Rows = ((_WIDE,), (1,))  # stands for any buffer


def _is_wide(shape: tuple[int, ...], strides: tuple[int, ...], lane: int) -> bool:
    """Whether a tensor of this shape and strides can be seen as one of elements ``lane`` times as wide."""
    if not shape:
        return False
    return shape[-1] % lane == 0 and strides[-1] == 1 and all(stride % lane == 0 for stride in strides[:-1])


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % _WIDE == 0 and tensor.storage_offset() * tensor.element_size() % _WIDE == 0


def _widened(view: View, lane: int) -> View | None:
    sizes, strides, offset = view
    if not sizes or strides[-1] != 1 or sizes[-1] % lane or offset % lane or any(s % lane for s in strides[:-1]):
        return None
    return (*sizes[:-1], sizes[-1] // lane), (*(s // lane for s in strides[:-1]), 1), offset // lane


@dataclass(frozen=True)
class Bound:
    """One phase for tensors of given shapes and strides: every buffer and view it needs.

    Attributes:
        sends, receives: for every buffer that goes to the exchange, the tensor whose memory it is (None: one of the
            phase's own) and its flat view there.
        packs, num_packed: copies into the phase's own buffer for sending, and its elements.
        unpacks, num_unpacked: copies out of its buffer for receiving, and its elements.
        stays: copies from source to target.
    """

    sends: list[tuple[Which | None, View]]
    receives: list[tuple[Which | None, View]]
    packs: Copies
    num_packed: int
    unpacks: Copies
    num_unpacked: int
    stays: Copies


@dataclass
class RankPhase:
    """One phase on one rank: messages by ascending peer, local copies, and the phase's name."""

    name: str
    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    stays_from: Message = field(default_factory=lambda: Message(-1))
    stays_to: Message = field(default_factory=lambda: Message(-1))
    _bound: dict[tuple[_Rows, _Rows, bool, bool], Bound] = field(default_factory=dict)

    def bind(self, src: _Rows, dst: _Rows, itemsize: int, *, separate: bool, in_place: bool) -> Bound:
        """The phase's buffers and views for a source and a target of these shapes and strides.

        With ``separate`` every message may have a buffer of its own, so that each one that lies in a piece of memory
        travels from there and to there; else all of them share one. ``in_place`` allows receiving in the target.
        """
        known = self._bound.get((src, dst, separate, in_place))
        if known is None:
            known = self._bound[src, dst, separate, in_place] = self._bind(src, dst, itemsize, separate, in_place)
        return known

    def _bind(self, src: _Rows, dst: _Rows, itemsize: int, separate: bool, in_place: bool) -> Bound:
        strides: dict[Which, tuple[int, ...]] = {"src": src[1], "dst": dst[1]}
        outgoing = [
            [(read, message.views(strides[read])[k]) for k, read in enumerate(message.read)] for message in self.sends
        ]
        incoming: list[list[tuple[Which, View]]] = [[("dst", view) for view in m.views(dst[1])] for m in self.receives]
        sends, packed, num_packed = buffers_of(outgoing, separate=separate, in_place=True, shared=True)
        receives, unpacked, num_unpacked = buffers_of(incoming, separate=separate, in_place=in_place)
        return Bound(
            sends=sends,
            receives=receives,
            packs=Copies(packed, itemsize, [FLAT, *({"src": src, "dst": dst}[w] for w in {p[0] for p in packed})]),
            num_packed=num_packed,
            # from the buffer, which takes the place of the source, to the target
            unpacks=Copies([("src", slot, view) for _, view, slot in unpacked], itemsize, [FLAT, dst]),
            num_unpacked=num_unpacked,
            stays=Copies(
                [("src", a, b) for a, b in zip(self.stays_from.views(src[1]), self.stays_to.views(dst[1]))],
                itemsize,
                [src, dst],
            ),
        )


def buffers_of(
    messages: Sequence[Sequence[tuple[Which, View]]], *, separate: bool, in_place: bool, shared: bool = False
) -> tuple[list[tuple[Which | None, View]], list[tuple[Which, View, View]], int]:
    """The exchange's buffers for these messages; copies (tensor, view there, slot) into or out of our own; its size.

    Groups of messages that already are one piece of memory stay where they are. ``separate`` makes every message a
    group, else all of them are one. With ``shared``, groups of the same views share a buffer: what several replicas get
    is packed once. Contributions to one place arrive in the same views, each in a buffer of its own.
    """
    groups = [list(message) for message in messages] if separate else [[part for m in messages for part in m]]
    buffers: list[tuple[Which | None, View]] = []
    copies: list[tuple[Which, View, View]] = []
    known: dict[tuple[tuple[Which, View], ...], tuple[Which | None, View]] = {}
    place = 0
    for parts in groups:
        if shared and tuple(parts) in known:
            buffers.append(known[tuple(parts)])
            continue
        span = (
            _dense_span([view for _, view in parts]) if in_place and len({which for which, _ in parts}) == 1 else None
        )
        if span is not None:
            buffers.append((parts[0][0], span))
            continue
        start = place
        for which, view in parts:
            copies.append((which, view, (view[0], _dense_strides(view[0]), place)))
            place += prod(view[0])
        buffers.append((None, ((place - start,), (1,), start)))
        known[tuple(parts)] = buffers[-1]
    return buffers, copies, place


def _dense_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _dense_span(views: Sequence[View]) -> View | None:
    """The one flat view that all views together are, if they lie in memory in their order."""
    if not views:
        return None
    end = start = views[0][2]
    for sizes, strides, offset in views:
        if offset != end or not _is_dense(sizes, strides):
            return None
        end = offset + prod(sizes)
    return (end - start,), (1,), start


def copy_views(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy view by view, in one call if there are several."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(list(targets), list(sources))


Copy = tuple[Tensor, Tensor]  # to, from


def copy_together(copies: Iterable[Copy]) -> None:
    """Make copies between views of one shape each, in a call or two for all dense ones of a dtype."""
    dense: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in copies:
        if target.is_contiguous() and source.is_contiguous():
            targets, sources = dense.setdefault(target.dtype, ([], []))
            targets.append(target.view(-1))
            sources.append(source.view(-1))
        else:
            target.copy_(source)
    for targets, sources in dense.values():
        copy_views(targets, sources)


def rank_phases(problem: Problem, phases: Sequence[Phase], rank: int) -> list[RankPhase]:
    """What one rank does in every phase."""
    return [_rank_phase(problem, phase, rank) for phase in phases]


def _stored(problem: Problem, rank: int, which: Literal["src", "dst"]) -> Holding | None:
    """Index sets of the rank's source or target tensor, its own dimensions only."""
    box = problem.held(rank) if which == "src" else problem.needed(rank)
    return None if box is None else box[: len(problem.shape)]


def _rank_phase(problem: Problem, phase: Phase, rank: int) -> RankPhase:
    found = RankPhase(phase.name)
    sends: dict[int, Message] = {}
    receives: dict[int, Message] = {}
    for transfer in phase.transfers:
        if rank not in (transfer.sender, transfer.receiver):
            continue
        for here, there in _pieces(problem, transfer):
            if transfer.sender == transfer.receiver:
                found.stays_from.add(here, transfer.read, transfer.contribution)
                found.stays_to.add(there, "dst", transfer.contribution)
            elif transfer.sender == rank:
                message = sends.setdefault(transfer.receiver, Message(transfer.receiver))
                message.add(here, transfer.read, transfer.contribution)
            else:
                message = receives.setdefault(transfer.sender, Message(transfer.sender))
                message.add(there, "dst", transfer.contribution)
    found.sends = [sends[peer] for peer in sorted(sends)]
    found.receives = [receives[peer] for peer in sorted(receives)]
    return found


def _pieces(problem: Problem, transfer: Transfer) -> list[tuple[Piece, Piece]]:
    """The transfer's box as evenly spaced pieces: places at the sender and at the receiver, in one common order."""
    held = _stored(problem, transfer.sender, transfer.read)
    needed = _stored(problem, transfer.receiver, "dst")
    assert held is not None, "senders hold what they send"
    assert needed is not None, "receivers need what they get"
    runs = [aligned_runs(part, a, b) for part, a, b in zip(transfer.box, held, needed)]
    return [(tuple(pair[0] for pair in choice), tuple(pair[1] for pair in choice)) for choice in product(*runs)]
