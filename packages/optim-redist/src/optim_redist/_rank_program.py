"""One rank's part of a plan: which views of its tensors go into which message, and where what arrives belongs.

A phase of a plan becomes, on one rank, a list of messages out, a list of messages in and a list of local copies. A
message is a list of pieces; a piece is evenly spaced in the tensor, so it is one ``as_strided`` view and one slot of
the flat buffer, and packing is one copy a piece. Everything that depends on layouts is decided here once; what depends
on the strides of the tensors that come is decided at the first call with such strides.

The same code packs and unpacks for a process group and for a simulation of all ranks in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import Literal

import torch
from torch import Tensor

from optim_redist.index_sets import Run, aligned_runs
from optim_redist.moves import Phase, Transfer
from optim_redist.ownership import Holding
from optim_redist.problem import Problem

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Piece = tuple[Run, ...]
_View = tuple[tuple[int, ...], tuple[int, ...], int]


def as_bits(tensor: Tensor) -> Tensor:
    """The tensor as integers of its width, so that copies keep every bit; 16-byte elements stay what they are."""
    tensor = tensor.detach()
    if tensor.is_complex():
        # conjugation and negation may be pending on a view
        tensor = tensor.resolve_conj().resolve_neg()
    bits = bits_type(tensor.dtype)
    return tensor if tensor.dtype == bits else tensor.view(bits)


def bits_type(dtype: torch.dtype) -> torch.dtype:
    """The integer type of the same width; the type itself if there is none."""
    return _BITS.get(dtype.itemsize, dtype)


def _view_of(piece: Piece, strides: Sequence[int]) -> _View:
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


def view_of(tensor: Tensor, view: _View) -> Tensor:
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
    _bound: dict[tuple[int, ...], list[_View]] = field(default_factory=dict)

    def add(self, piece: Piece, read: Literal["src", "dst"], contribution: int) -> None:
        self.pieces.append(piece)
        self.read.append(read)
        self.contributions.append(contribution)
        self.num_elements += prod(run.length * run.repeats for run in piece)

    def views(self, strides: tuple[int, ...]) -> list[_View]:
        """The pieces' views in a tensor of these strides."""
        if strides not in self._bound:
            self._bound[strides] = [_view_of(piece, strides) for piece in self.pieces]
        return self._bound[strides]


@dataclass(frozen=True)
class Bound:
    """One phase for tensors of given strides: every view it needs.

    Attributes:
        sent, received: the part of a tensor that already is the buffer, None if a buffer has to be packed or unpacked.
        packs: (tensor read, its view, the buffer's view).
        unpacks: (the buffer's view, the target's view).
        stays: (the source's view, the target's view).
    """

    sent: _View | None
    received: _View | None
    packs: list[tuple[Literal["src", "dst"], _View, _View]]
    unpacks: list[tuple[_View, _View]]
    stays: list[tuple[_View, _View]]


@dataclass
class RankPhase:
    """One phase on one rank: messages by ascending peer, local copies, and the phase's name."""

    name: str
    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    stays_from: Message = field(default_factory=lambda: Message(-1))
    stays_to: Message = field(default_factory=lambda: Message(-1))
    _bound: dict[tuple[tuple[int, ...], tuple[int, ...]], Bound] = field(default_factory=dict)

    @cached_property
    def num_sent(self) -> int:
        return sum(message.num_elements for message in self.sends)

    @cached_property
    def num_received(self) -> int:
        return sum(message.num_elements for message in self.receives)

    def bind(self, src: tuple[int, ...], dst: tuple[int, ...]) -> Bound:
        """The phase's views in a source and a target of these strides."""
        known = self._bound.get((src, dst))
        if known is not None:
            return known
        strides = {"src": src, "dst": dst}
        packs = [
            (read, message.views(strides[read])[k], slot)
            for message, slots in zip(self.sends, _slots(self.sends))
            for k, (read, slot) in enumerate(zip(message.read, slots))
        ]
        unpacks = [
            (slot, view)
            for message, slots in zip(self.receives, _slots(self.receives))
            for slot, view in zip(slots, message.views(dst))
        ]
        from_source = all(read == "src" for read, _, _ in packs)
        made = Bound(
            sent=_dense_span([view for _, view, _ in packs]) if from_source else None,
            received=_dense_span([view for _, view in unpacks]),
            packs=packs,
            unpacks=unpacks,
            stays=list(zip(self.stays_from.views(src), self.stays_to.views(dst))),
        )
        self._bound[src, dst] = made
        return made


def _slots(messages: Sequence[Message]) -> list[list[_View]]:
    """For every message the views of its pieces in the flat buffer of all of them."""
    found, place = [], 0
    for message in messages:
        slots = []
        for piece in message.pieces:
            sizes = _view_of(piece, [0] * len(piece))[0]
            slots.append((sizes, _dense_strides(sizes), place))
            place += prod(sizes)
        found.append(slots)
    return found


def _dense_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _dense_span(views: Sequence[_View]) -> _View | None:
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
