"""Buckets: which of many tensors travel together, and in how many rounds, so that no rank holds more than a limit.

Tensors travel in their order, bucket after bucket. While a bucket is under way, a rank holds

    sources + targets + max_k (sent_k + received_k + partial_k)    bytes:

the sources of all tensors, or, if they are donated, those of this bucket and of later ones; the targets of this bucket
and of earlier ones; and the buffers of the bucket's exchange k, with the largest partial results that a reduction in it
has. As a bucket begins, all this depends on the tensors before it alone, not on the buckets that they were in. So
filling one bucket after the other, each as long as every rank stays below the limit, never makes a later one worse. A
tensor that does not fit by itself runs alone, in rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from optim_redist._methods.candidates import exchanges_of, from_phases, partial_bytes
from optim_redist._methods.chunked import CHUNK
from optim_redist._tools.lazy import lazy
from optim_redist.cost import CommModel
from optim_redist.errors import PlanInfeasibleError
from optim_redist.moves import Request, added_up

if TYPE_CHECKING:
    from optim_redist.plans import Plan

ALIGNMENT = 16  # bytes; the size of the widest element

_Bytes = Mapping[int, int]  # by rank


class Bucket(NamedTuple):
    """Tensors that travel together.

    Attributes:
        numbers: their numbers, consecutive.
        peak: the most bytes that each rank holds meanwhile; empty without a limit.
        rounds: parts in which every exchange runs; 1 for several tensors.
        alignment: messages begin at multiples of so many bytes.
    """

    numbers: tuple[int, ...]
    peak: _Bytes
    rounds: int = 1
    alignment: int = ALIGNMENT


def buckets_of(
    plans: Sequence[Plan], bucket_bytes: int, memory_limit: int | None = None, *, donate: bool = False
) -> list[Bucket]:
    """Buckets of consecutive plans, one or more in each, whose busiest ranks together move at most ``bucket_bytes``.

    Args:
        plans: of one stage and one round each; the same on every rank, so that all ranks choose the same buckets.
        memory_limit: bytes that no rank may exceed with sources, targets and buffers together.
        donate: a source is freed when its bucket is done.

    Raises:
        PlanInfeasibleError: if some rank would hold more, however many rounds a tensor takes.
    """
    if memory_limit is not None:
        return _limited(plans, bucket_bytes, memory_limit, donate)
    found: list[list[int]] = []
    room = -1
    for number, made in enumerate(plans):
        size = _size(made)
        if size > room:
            found.append([])
            room = bucket_bytes
        found[-1].append(number)
        room -= size
    return [Bucket(tuple(numbers), {}) for numbers in found]


def _size(plan: Plan) -> int:
    """Bytes that the busiest ranks of a plan's exchanges move."""
    return sum(step.bytes for step in plan.steps)


def _limited(plans: Sequence[Plan], bucket_bytes: int, limit: int, donate: bool) -> list[Bucket]:
    known: dict[int, _Load] = {}
    for made in plans:
        if id(made) not in known:
            known[id(made)] = _Load(made)
    loads = [known[id(made)] for made in plans]
    found: list[Bucket] = []
    shared: _Shared | None = None
    room = 0
    for number, (load, held) in enumerate(zip(loads, _held_before(loads, donate))):
        if shared is not None and load.size <= room:
            joined = shared.joined_by(load)
            peak = joined.peaks()
            if max(peak.values()) <= limit:
                shared = joined
                found[-1] = Bucket((*found[-1].numbers, number), peak, alignment=shared.alignment)
                room -= load.size
                continue
        rounds, peak = load.alone(held.all, limit)
        if max(peak.values()) > limit:
            raise _infeasible(loads, limit, donate)
        found.append(Bucket((number,), peak, rounds, load.width))
        shared = None if rounds > 1 else _Shared(held.all, load.target, load.buffers, load.width)
        room = bucket_bytes - load.size
    return found


class _Held(NamedTuple):
    """Bytes that ranks hold of sources and of targets."""

    sources: _Bytes
    targets: _Bytes

    @property
    def all(self) -> _Bytes:
        return added_up(self)


def _held_before(loads: Sequence[_Load], donate: bool) -> Iterator[_Held]:
    """What ranks hold before each of the tensors if it begins a bucket."""
    sources, targets = dict(added_up(load.source for load in loads)), dict.fromkeys(_ranks(loads), 0)
    for load in loads:
        yield _Held(dict(sources), dict(targets))
        for rank, size in load.target.items():
            targets[rank] += size
            if donate:
                sources[rank] -= load.source[rank]


def _ranks(loads: Sequence[_Load]) -> list[int]:
    return sorted({rank for load in loads for rank in load.source})


def _infeasible(loads: Sequence[_Load], limit: int, donate: bool) -> PlanInfeasibleError:
    """The certificate: what the fullest rank holds in any case, and the buffers that rounds need besides.

    No method holds less than all sources and then all targets; nor, where sources are kept, than both together, but for
    parts that stay as they are, which may be their own targets.
    """
    sources = added_up(load.source for load in loads)
    targets = added_up(load.target if donate else load.changing for load in loads)
    both = max if donate else int.__add__
    needs = {rank: both(sources[rank], targets[rank]) for rank in _ranks(loads)}
    rank = max(needs, key=lambda rank: (needs[rank], -rank))
    if limit < needs[rank]:
        terms = {"sources": sources[rank], "targets": targets[rank]}
        return PlanInfeasibleError(
            rank, {"larger of sources and targets": needs[rank]} if donate else terms, limit, proven=True
        )
    worst: tuple[int, int, dict[str, int]] | None = None
    for load, held in zip(loads, _held_before(loads, donate)):
        fixed = added_up([held.all, load.target])
        _, peak = load.alone(held.all, max(fixed.values()) + CHUNK)
        rank = max(peak, key=lambda rank: (peak[rank], -rank))
        if worst is None or peak[rank] > worst[0]:
            terms = {"sources": held.sources[rank], "targets": fixed[rank] - held.sources[rank]}
            if buffers := peak[rank] - fixed[rank]:
                terms["one chunk" if buffers == CHUNK else "buffers"] = buffers
            worst = peak[rank], rank, terms
    assert worst is not None, "without tensors there is nothing to hold"
    return PlanInfeasibleError(worst[1], worst[2], limit, proven=False)


class _Load:
    """What one tensor adds to what ranks hold.

    Attributes:
        size: bytes that the busiest ranks of its exchanges move.
        width: bytes of an element.
        source, target: bytes of the rank's parts.
        changing: ``target``, without parts that stay as they are.
    """

    def __init__(self, plan: Plan) -> None:
        (self._problem,), (self._stage,) = plan.problems, plan.stages
        self.width = plan.itemsize
        self._request = Request(
            self._problem,
            self.width,
            CommModel("of any speed", plan.topology),
            of_complex_halves=plan.dtype == "complex32",
        )
        self._exchanges = exchanges_of(self._problem, self._stage.method, plan.topology)
        self.size = _size(plan)
        stored = self._problem.num_stored
        self.source = {rank: held * self.width for rank, (held, _) in stored.items()}
        self.target = {rank: needed * self.width for rank, (_, needed) in stored.items()}
        self.changing = {r: 0 if self._problem.stays_whole(r) else size for r, size in self.target.items()}

    @lazy
    def buffers(self) -> list[_Buffers]:
        """What ranks hold in buffers while the tensor's exchanges run in one round each.

        A rank has at most one message for every other rank, and no empty ones.
        """
        others, found = len(self._problem.ranks) - 1, []
        for exchange, partial in zip(self._exchanges, self._partial(1), strict=True):
            sides = exchange.volumes.sent, exchange.volumes.received
            messages = added_up({rank: min(count, others) for rank, count in counts.items()} for counts in sides)
            beyond = {rank: (count - messages[rank]) * self.width for rank, count in added_up(sides).items()}
            found.append(_Buffers(beyond, messages, partial))
        return found

    def _in_bytes(self, counts: Mapping[int, int]) -> _Bytes:
        return {rank: count * self.width for rank, count in counts.items()}

    def _partial(self, rounds: int) -> list[_Bytes]:
        """For every exchange, bytes of the partial results of one round."""
        points = self._problem.dst_points
        known = {}
        if any(exchange.volumes.reduces for exchange in self._exchanges):
            known = {point: partial_bytes(self._request, rounds, (point,)) for point in set(points.values())}
        by_rank = {rank: known.get(point, 0) for rank, point in points.items()}
        return [by_rank if exchange.volumes.reduces else {} for exchange in self._exchanges]

    def alone(self, held: _Bytes, limit: int) -> tuple[int, _Bytes]:
        """The rounds with which the tensor alone stays below the limit, or comes nearest to it, and every rank's peak.

        ``held``: bytes of all sources, this one's too, and of earlier targets.
        """
        peaks = self._peaks(held, 1)
        if max(peaks.values()) <= limit or not self.size:
            return 1, peaks
        # rounded up to whole elements, which takes less than one of them from the buffers
        aside = {rank: -(-(held[rank] - size) // self.width) for rank, size in self.source.items()}
        request = replace(self._request, memory_limit=limit, aside=aside)
        (stage,) = from_phases(self._stage.method, request).stages
        return stage.rounds, self._peaks(held, stage.rounds)

    def _peaks(self, held: _Bytes, rounds: int) -> _Bytes:
        buffers = [
            added_up([self._in_bytes(exchange.fullest_round(rounds)), partial])
            for exchange, partial in zip(self._exchanges, self._partial(rounds), strict=True)
        ]
        return added_up([held, self.target, _largest(buffers)])


class _Buffers(NamedTuple):
    """What every rank holds in buffers during an exchange.

    Attributes:
        beyond: bytes of what it sends and receives, without one element of each message.
        messages: how many it sends and receives.
        partial: bytes of the largest partial results.
    """

    beyond: _Bytes
    messages: Mapping[int, int]
    partial: _Bytes

    def shared_with(self, other: _Buffers) -> _Buffers:
        """The buffers of one exchange in which the messages of both go, while reductions run one after the other."""
        return _Buffers(
            added_up([self.beyond, other.beyond]),
            added_up([self.messages, other.messages]),
            _largest([self.partial, other.partial]),
        )

    def in_bytes(self, alignment: int) -> _Bytes:
        """Bytes, where every message is filled up to a multiple of ``alignment``."""
        filled = {rank: count * alignment for rank, count in self.messages.items()}
        return added_up([self.beyond, filled, self.partial])


_NO_BUFFERS = _Buffers({}, {}, {})


class _Shared(NamedTuple):
    """A bucket that is being filled.

    Attributes:
        held: bytes of sources and earlier targets as it begins.
        targets: bytes of its own targets.
        buffers: one for every exchange.
        alignment: the width of the widest element in it, which keeps messages of every width aligned.
    """

    held: _Bytes
    targets: _Bytes
    buffers: list[_Buffers]
    alignment: int

    def joined_by(self, load: _Load) -> _Shared:
        """The bucket with one tensor more."""
        pairs = zip_longest(self.buffers, load.buffers, fillvalue=_NO_BUFFERS)
        buffers = [own.shared_with(more) for own, more in pairs]
        return _Shared(self.held, added_up([self.targets, load.target]), buffers, max(self.alignment, load.width))

    def peaks(self) -> _Bytes:
        """The most bytes that every rank holds."""
        buffers = _largest([buffers.in_bytes(self.alignment) for buffers in self.buffers])
        return added_up([self.held, self.targets, buffers])


def _largest(counts: Iterable[_Bytes]) -> _Bytes:
    """The largest of several counts, rank by rank."""
    found: dict[int, int] = {}
    for of_one in counts:
        for rank, count in of_one.items():
            found[rank] = max(found.get(rank, 0), count)
    return found
