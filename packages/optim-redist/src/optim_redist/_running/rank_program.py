"""One rank's part of a plan: which views of its tensors go into which message, and where arriving pieces belong.

A phase of a plan becomes, on one rank, a list of messages out, a list of messages in and a list of local copies.
Everything that depends on layouts is decided here once; what depends on the strides of tensors is decided at the first
call with such strides.

The same code packs and unpacks for a process group and for a simulation of all ranks in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

from optim_redist._running.buffers import Buffers, Part, buffers_of
from optim_redist._running.copies import Copies, Pair
from optim_redist._running.message import LOCAL, Message, Piece
from optim_redist._running.views import FLAT, WIDE, Form
from optim_redist.boxes import Box
from optim_redist.index_sets import aligned_runs
from optim_redist.moves import Phase, Transfer, Which
from optim_redist.problem import Problem

# bytes of what stays above which a copy beside the exchange is quicker than NCCL's (4×H200: 7 % at 512 MiB)
_MOST_TO_ITSELF = 1 << 27
# bytes of a message from which on it pays to copy what does not begin at a multiple of 16 bytes: NCCL is slower there
# (4×H200, µs of an exchange, both ends aligned / the receiver's / the sender's / none: messages of 32 MiB 350 / 467 /
# 579 / 608, of 4 MiB 69 / 85 / 96 / 110, of 1 MiB all the same; a copy of 96 MiB takes 82)
_LEAST_ALIGNED = 1 << 21


@dataclass(frozen=True)
class PhaseViews:
    """Every buffer and view that one phase needs for tensors of given shapes and strides.

    Attributes:
        sends, receives: the exchange's buffers.
        packs: copies into our own buffer for sending.
        unpacks: copies out of our own buffer for receiving.
        stays: copies from source to target; none if what stays is a message of the rank to itself, or is combined.
        sent, received: elements, keyed by the rank that they go to, and come from, in the order of the buffers.
        packs_at_once: whether one copy fills our own buffer for sending.
    """

    sends: Buffers
    receives: Buffers
    packs: Copies
    unpacks: Copies
    stays: Copies
    sent: dict[int, int]
    received: dict[int, int]
    packs_at_once: bool

    @property
    def num_copies(self) -> int:
        """How many copies the rank makes, each a kernel on a GPU."""
        return len(self.packs.pairs) + len(self.unpacks.pairs) + len(self.stays.pairs)

    @property
    def num_copied(self) -> int:
        """Elements of buffers of our own."""
        return self.sends.num_elements + self.receives.num_elements


class Buffering(NamedTuple):
    """What an exchange takes as buffers.

    Attributes:
        itemsize: bytes of an element.
        separate: whether every message has a buffer of its own, and a message whose pieces are one piece of memory is
            sent and received there without a copy; else all messages share one buffer.
        aligned: whether large messages that have buffers of their own begin at multiples of 16 bytes, for which our own
            memory may have to be some bytes larger.
    """

    itemsize: int
    separate: bool
    aligned: bool


@dataclass
class RankPhase:
    """One phase on one rank: messages by ascending peer, and what it copies within the rank.

    Attributes:
        combines: whether the phase brings contributions to any rank, even if not to this one; what arrives, or stays,
            is then combined into the target.
    """

    name: str
    rank: int
    combines: bool
    buffering: Buffering
    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    stays_from: Message = field(default_factory=lambda: Message(LOCAL))
    stays_to: Message = field(default_factory=lambda: Message(LOCAL))
    _known: dict[tuple[Form, Form, bool], PhaseViews] = field(default_factory=dict)

    def views_for(self, src: Form, dst: Form, *, to_itself: bool = False) -> PhaseViews:
        """The phase's buffers and views for a source and a target of these shapes and strides.

        With ``to_itself`` the rank may send itself what stays, which it does where that saves copies: then the blocks
        of all ranks are alike, and one copy packs them.
        """
        key = src, dst, to_itself
        found = self._known.get(key)
        if found is None:
            found = self._make_views(src, dst)
            if to_itself and self._stays_like_a_message():
                other = self._make_views(src, dst, to_itself=True)
                if other.num_copied <= self._num_moved:
                    found = min(found, other, key=lambda views: views.num_copies)
            self._known[key] = found
        return found

    @property
    def _num_moved(self) -> int:
        """Elements that the rank sends and receives: what plans count for its buffers."""
        return sum(message.num_elements for message in (*self.sends, *self.receives))

    @property
    def _largest(self) -> int:
        """Elements of the largest message."""
        return max((message.num_elements for message in (*self.sends, *self.receives)), default=0)

    def _stays_like_a_message(self) -> bool:
        """Whether what stays is copied, and no more than what travels to or from some rank: it arrives no later."""
        most = min(self._largest, _MOST_TO_ITSELF // self.buffering.itemsize)
        return not self.combines and 0 < self.stays_from.num_elements <= most

    def _make_views(self, src: Form, dst: Form, *, to_itself: bool = False) -> PhaseViews:
        itemsize, separate, aligned = self.buffering
        sending, receiving = self.sends, self.receives
        stays: list[Pair] = []
        if to_itself:
            sending = _with(self.stays_from, self.rank, sending)
            receiving = _with(self.stays_to, self.rank, receiving)
        elif not self.combines:
            views = zip(self.stays_from.views(src[1]), self.stays_to.views(dst[1]))
            stays = [Pair("src", here, there) for here, there in views]
        strides: dict[Which, tuple[int, ...]] = {"src": src[1], "dst": dst[1]}
        outgoing: list[list[Part]] = [
            [(read, message.views(strides[read])[k]) for k, read in enumerate(message.read)] for message in sending
        ]
        incoming: list[list[Part]] = [[("dst", view) for view in message.views(dst[1])] for message in receiving]
        is_large = self._largest * itemsize >= _LEAST_ALIGNED
        lane = max(1, WIDE // itemsize) if aligned and separate and is_large else 1
        sends = buffers_of(outgoing, separate=separate, in_place=True, shared=True, lane=lane)
        # what is combined is looked for side by side
        receives = buffers_of(
            incoming, separate=separate, in_place=not self.combines, lane=1 if self.combines else lane
        )
        forms: dict[Which, Form] = {"src": src, "dst": dst}
        packs = Copies(sends.packing, itemsize, [FLAT, *(forms[which] for which in {p.which for p in sends.packing})])
        return PhaseViews(
            sends,
            receives,
            packs=packs,
            unpacks=Copies(receives.unpacking(), itemsize, [FLAT, dst]),
            stays=Copies(stays, itemsize, [src, dst]),
            sent={message.peer: message.num_elements for message in sending},
            received={message.peer: message.num_elements for message in receiving},
            packs_at_once=packs.fills(sends.num_elements),
        )


def _with(stays: Message, rank: int, messages: Sequence[Message]) -> list[Message]:
    """The messages with one more, of the rank to itself, by ascending peer."""
    return sorted([*messages, replace(stays, peer=rank)], key=lambda message: message.peer)


def rank_phases(
    problem: Problem, phases: Sequence[Phase], rank: int, *, reducing: Sequence[bool], buffering: Buffering
) -> list[RankPhase]:
    """What one rank does in every phase; ``reducing``: which phases bring contributions to any rank."""
    made = []
    for phase, combines in zip(phases, reducing, strict=True):
        made.append(RankPhase(phase.name, rank, combines, buffering))
        _add_transfers(made[-1], problem, phase)
    return made


def _stored(problem: Problem, rank: int, which: Which) -> Box | None:
    """Index sets of the rank's source or target tensor, its own dimensions only."""
    box = problem.held(rank) if which == "src" else problem.needed(rank)
    return None if box is None else box[: len(problem.shape)]


def _add_transfers(found: RankPhase, problem: Problem, phase: Phase) -> None:
    """Add what the rank sends, receives and keeps in a phase of a plan."""
    rank = found.rank
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


def _pieces(problem: Problem, transfer: Transfer) -> list[tuple[Piece, Piece]]:
    """The transfer's box as evenly spaced pieces: places at the sender and at the receiver, in one common order."""
    held = _stored(problem, transfer.sender, transfer.read)
    needed = _stored(problem, transfer.receiver, "dst")
    assert held is not None, "senders hold what they send"
    assert needed is not None, "receivers need what they get"
    runs = [aligned_runs(part, a, b) for part, a, b in zip(transfer.box, held, needed)]
    return [(tuple(pair[0] for pair in choice), tuple(pair[1] for pair in choice)) for choice in product(*runs)]
