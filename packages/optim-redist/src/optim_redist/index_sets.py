"""Sets of indices of one tensor dimension, small whatever the dimension's size.

A set is a tuple of runs. A run ``(start, length, stride, repeats)`` stands for ``repeats`` intervals of ``length``
indices whose starts are ``stride`` apart:

    { start + k·stride + t :  0 <= k < repeats,  0 <= t < length },     length <= stride when repeats > 1

An interval is a run of one repeat (its stride is then its length). What one coordinate owns of a block-cyclic dimension
is one run and a short tail, so a dimension of a million indices dealt out one by one costs as much as one cut in two.
Runs of one set are disjoint and sorted by start; they may interleave.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from math import gcd
from typing import NamedTuple

_MANY = 16  # intervals from which on it pays to search them by bisection


class Run(NamedTuple):
    """``repeats`` intervals of ``length`` indices, ``stride`` apart, from ``start`` on."""

    start: int
    length: int
    stride: int
    repeats: int

    @property
    def stop(self) -> int:
        """One past the last index."""
        return self.start + (self.repeats - 1) * self.stride + self.length


IndexSet = tuple[Run, ...]
EMPTY: IndexSet = ()


def interval(start: int, stop: int) -> IndexSet:
    """The indices ``start, …, stop - 1``."""
    return (Run(start, stop - start, stop - start, 1),) if stop > start else EMPTY


def strided(start: int, length: int, stride: int, repeats: int) -> IndexSet:
    """One run, written as an interval where its pieces touch."""
    if length <= 0 or repeats <= 0:
        return EMPTY
    if repeats == 1 or stride == length:
        return (Run(start, length * repeats, length * repeats, 1),)
    return (Run(start, length, stride, repeats),)


def from_intervals(pieces: Iterable[tuple[int, int]]) -> IndexSet:
    """Sorted disjoint half-open intervals as a set: neighbours joined, empty ones dropped."""
    joined: list[tuple[int, int]] = []
    for start, stop in pieces:
        if stop <= start:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(Run(start, stop - start, stop - start, 1) for start, stop in joined)


def size(indices: IndexSet) -> int:
    """The number of indices."""
    if len(indices) == 1:
        return indices[0].length * indices[0].repeats
    return sum(run.length * run.repeats for run in indices)


def intervals(indices: IndexSet) -> Iterator[tuple[int, int]]:
    """The maximal half-open intervals in ascending order."""
    pieces = sorted(
        (run.start + k * run.stride, run.start + k * run.stride + run.length)
        for run in indices
        for k in range(run.repeats)
    )
    if not pieces:
        return
    start, stop = pieces[0]
    for next_start, next_stop in pieces[1:]:
        if next_start > stop:
            yield start, stop
            start = next_start
        stop = next_stop
    yield start, stop


def elements(indices: IndexSet) -> list[int]:
    """Every index in ascending order."""
    return [index for start, stop in intervals(indices) for index in range(start, stop)]


def same(a: IndexSet, b: IndexSet) -> bool:
    """Whether both hold the same indices, however they are written."""
    return a == b or (size(a) == size(b) and size(intersect(a, b)) == size(a))


def intersect(a: IndexSet, b: IndexSet) -> IndexSet:
    """The indices in both sets."""
    if len(a) == len(b) == 1 and a[0].repeats == b[0].repeats == 1:
        start = max(a[0].start, b[0].start)
        length = min(a[0].start + a[0].length, b[0].start + b[0].length) - start
        return (Run(start, length, length, 1),) if length > 0 else EMPTY
    if len(a) > 1 and len(b) > 1 and all(run.repeats == 1 for run in a) and all(run.repeats == 1 for run in b):
        return _intersect_intervals(a, b)
    found = [run for x in a for y in b if x.start < y.stop and y.start < x.stop for run in _intersect_runs(x, y)]
    return tuple(sorted(found)) if len(found) > 1 else tuple(found)


def _intersect_intervals(a: IndexSet, b: IndexSet) -> IndexSet:
    """The intersection of two sets of plain intervals, in one sweep over both."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i].start, b[j].start), min(a[i].stop, b[j].stop)
        if start < stop:
            found.append(Run(start, stop - start, stop - start, 1))
        if a[i].stop <= b[j].stop:
            i += 1
        else:
            j += 1
    return tuple(found)


def _intersect_runs(a: Run, b: Run) -> Iterable[Run]:
    if a.repeats == 1:
        return _clip(b, a.start, a.stop)
    if b.repeats == 1:
        return _clip(a, b.start, b.stop)
    # Interval i of ``a`` begins at ``distance`` behind interval j of ``b``, and both meet, where
    #
    #     i·a.stride - j·b.stride = distance + b.start - a.start,      -a.length < distance < b.length.
    #
    # A distance leaves a remainder of the common divisor, and so is solved by one run of common periods, or by none.
    step = gcd(a.stride, b.stride)
    distances = range((a.start - b.start + a.length - 1) % step + 1 - a.length, b.length, step)
    few, many = (a, b) if a.repeats <= b.repeats else (b, a)
    if len(distances) > few.repeats:
        starts = range(few.start, few.stop, few.stride)
        return [run for start in starts for run in _clip(many, start, start + few.length)]
    return [run for distance in distances for run in _at_distance(a, b, distance, step)]


def _at_distance(a: Run, b: Run, distance: int, step: int) -> IndexSet:
    """What intervals of ``a`` share with those of ``b`` that begin ``distance`` before them."""
    # the least i >= 0 that solves the equation, and its j, which may be negative
    i_period, j_period = b.stride // step, a.stride // step
    shift = distance + b.start - a.start
    i = shift // step * pow(j_period, -1, i_period) % i_period
    j = (i * a.stride - shift) // b.stride
    skipped = max(0, -(j // j_period))
    i, j = i + skipped * i_period, j + skipped * j_period
    repeats = min(-((i - a.repeats) // i_period), -((j - b.repeats) // j_period))
    start = a.start + i * a.stride
    stop = min(start + a.length, start - distance + b.length)
    start = max(start, start - distance)
    return strided(start, stop - start, a.stride * i_period, repeats)


def _clip(run: Run, start: int, stop: int) -> IndexSet:
    """The part of the run inside ``[start, stop)``: whole intervals, and at most one cut one at each end."""
    if run.repeats == 1:
        return interval(max(run.start, start), min(run.stop, stop))
    # intervals first … last - 1 lie wholly inside
    first = max(0, -(-(start - run.start) // run.stride))
    last = min(run.repeats, (stop - run.start - run.length) // run.stride + 1)
    head: IndexSet = EMPTY
    tail: IndexSet = EMPTY
    # with first > repeats, the window starts behind the last interval and cuts none
    if 0 < first <= run.repeats:
        before = run.start + (first - 1) * run.stride
        head = interval(max(before, start), min(before + run.length, stop))
    if 0 <= last < run.repeats and last >= first:
        after = run.start + last * run.stride
        tail = interval(max(after, start), min(after + run.length, stop))
    return head + strided(run.start + first * run.stride, run.length, run.stride, last - first) + tail


def num_below(indices: IndexSet, bound: int) -> int:
    """How many indices of the set are smaller than ``bound``: the local position of a global index."""
    total = 0
    for start, length, stride, repeats in indices:
        if bound > start:
            whole, rest = divmod(bound - start, stride) if repeats > 1 else (0, bound - start)
            total += repeats * length if whole >= repeats else whole * length + min(rest, length)
    return total


def positions(held: IndexSet, part: IndexSet) -> IndexSet:
    """The local positions, counted from 0, that the indices of ``part``, a subset of ``held``, have in ``held``.

    Positions come in the order in which the runs of ``part`` list the indices, so that all holders of ``part``
    enumerate it alike; a run whose positions are not evenly spaced is given interval by interval.
    """
    below = _counting(held)
    return tuple(found for run in part for found in _positions(held, run, below))


def _positions(held: IndexSet, run: Run, below: Callable[[int], int]) -> list[Run]:
    """``positions`` of one run; ``below`` counts indices of ``held``."""
    start = below(run.start)
    step = below(run.start + run.stride) - start if run.repeats > 1 else run.length
    if run.repeats == 1 or _keeps_spacing(held, run):
        return [Run(start, run.length, step, run.repeats)]
    return [Run(below(run.start + k * run.stride), run.length, run.length, 1) for k in range(run.repeats)]


def _counting(indices: IndexSet) -> Callable[[int], int]:
    """``num_below`` of the set, as a function that is called for many bounds."""
    if len(indices) < _MANY or any(run.repeats > 1 for run in indices):
        return partial(num_below, indices)
    starts = [run.start for run in indices]
    before = list(accumulate([run.length for run in indices], initial=0))

    def below(bound: int) -> int:
        k = bisect_left(starts, bound)
        return min(before[k], before[k - 1] + bound - starts[k - 1]) if k else 0

    return below


def _keeps_spacing(held: IndexSet, part: Run) -> bool:
    """Whether the first run of ``held`` alone contains ``part``, whose stride is a multiple of that run's stride."""
    first = held[0]
    alone = len(held) == 1 or first.stop <= held[1].start
    inside = first.start <= part.start and part.stop <= first.stop
    return alone and inside and (first.repeats == 1 or part.stride % first.stride == 0)


def take(indices: IndexSet, start: int, stop: int) -> IndexSet:
    """The indices at places ``start … stop - 1`` of the set's enumeration run by run."""
    found: IndexSet = EMPTY
    for run in indices:
        total = run.length * run.repeats
        if start < total and stop > 0:
            found += _take_run(run, max(start, 0), min(stop, total))
        start, stop = start - total, stop - total
    return found


def _take_run(run: Run, start: int, stop: int) -> IndexSet:
    if run.repeats == 1:
        return interval(run.start + start, run.start + stop)
    (first, head), (last, tail) = divmod(start, run.length), divmod(stop, run.length)

    def piece(k: int, a: int, b: int) -> IndexSet:
        return interval(run.start + k * run.stride + a, run.start + k * run.stride + b)

    if first == last:
        return piece(first, head, tail)
    whole = first + (head > 0)
    return (
        (piece(first, head, run.length) if head else EMPTY)
        + strided(run.start + whole * run.stride, run.length, run.stride, last - whole)
        + (piece(last, 0, tail) if tail else EMPTY)
    )


def aligned_runs(part: IndexSet, *held: IndexSet) -> list[tuple[Run, ...]]:
    """The runs of ``part`` as local positions in each set of ``held``, cut into pieces evenly spaced in all of them.

    Each tuple is one piece: its run of positions in the first set of ``held``, in the second, …
    """
    count = size(part)
    in_order = all(run.stop <= following.start for run, following in pairwise(part))
    if in_order and count and all(size(indices) == count for indices in held):
        # all that each set has: one run of positions, whatever runs the indices are written in
        return [(Run(0, count, count, 1),) * len(held)]
    pieces: list[tuple[Run, ...]] = []
    counts = [_counting(indices) for indices in held]
    for run in part:
        places = [_positions(indices, run, below) for indices, below in zip(held, counts)]
        if all(len(place) == 1 for place in places):
            pieces.append(tuple(place[0] for place in places))
        else:
            for k in range(run.repeats):
                single = Run(run.start + k * run.stride, run.length, run.length, 1)
                pieces.append(tuple(_positions(indices, single, below)[0] for indices, below in zip(held, counts)))
    return pieces
