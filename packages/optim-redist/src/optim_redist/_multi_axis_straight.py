"""Sequences of moves that cost no more than the least that is possible: most pairs have one, which needs no search.

From a state only moves are tried that bring axes to where the target has them, or out of their way, and of those only
the ones after which cost so far and bound of the rest are still no more than the bound from the start. What arrives at
the target is then a cheapest sequence. If nothing does, or too many states were looked at, nothing is known.

    split      an unused axis comes to its home, or anywhere if the rest is cheaper with it in use
    alltoall   the last axis of a dimension comes home, or all of them do; or blocks become those of the target
    allgather  the first or the last axis of a dimension leaves
    permute    two axes of equal size change places

An axis comes home to an unsplit dimension in blocks of its stride there, else only at the end where that is its stride.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import NamedTuple

from optim_redist._multi_axis_estimate import Estimate
from optim_redist._multi_axis_floor import Prices
from optim_redist._multi_axis_moves import (
    UNSPLIT,
    Axes,
    Move,
    State,
    axes_size,
    local_length,
    split_fits,
    swapped_axes,
)
from optim_redist._multi_axis_names import name_of

# a search is the better choice after so many states
_MOST_STATES = 10


class Split(NamedTuple):
    """How a dimension is split: axes, block, their processes, elements of the most loaded rank, digits of the axes."""

    axes: Axes
    block: int
    n_procs: int
    share: int
    code: int


Splits = tuple[Split, ...]
# (dimension, axes, block, processes) to be
Change = tuple[int, Axes, int, int]
# collective, processes of a group, what it changes
Attempt = tuple[str, int, tuple[Change, ...]]


class StraightPath:
    """A path from one distribution to another on which nothing is lost, if there is one.

    Args:
        memory_limit, wanted, max_depth: as in ``cheapest_moves``.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        sizes: tuple[int, ...],
        target: State,
        prices: Prices,
        estimate: Estimate,
        memory_limit: float,
        wanted: Callable[[State], bool] | None,
        max_depth: int | None,
    ) -> None:
        self._shape, self._sizes, self._target = shape, sizes, target
        self._prices, self._estimate = prices, estimate
        self._memory_limit, self._wanted, self._max_depth = memory_limit, wanted, max_depth
        self._seen: set[Splits] = set()
        self._moves: list[Move] = []

    def find(self, start: State) -> list[Move]:
        """The moves from ``start``, which must be within the limit; none if there is no such path."""
        nowhere: Splits = (Split((), UNSPLIT, 1, 1, 0),) * len(start.mapping)
        splits = self._changed(
            nowhere, [(d, axes, block, axes_size(self._sizes, axes)) for d, (axes, block) in enumerate(zip(*start))]
        )
        assert splits is not None
        code, floor = _code(splits), -1.0
        # often the floor, which takes no search over codes, is the bound; it does not know of axes that wait for others
        bounds = (self._estimate.floor.__call__, self._estimate.__call__)
        for left in bounds[1:] if self._estimate.waits(code) else bounds:
            bound = left(code, self._estimate.cap)
            if bound > floor:
                self._seen.clear()
                if self._follow(splits, code, 0.0, bound, left):
                    return self._moves[::-1]
            floor = bound
        return []

    def _follow(
        self, splits: Splits, code: int, cost: float, bound: float, left: Callable[[int, float], float], depth: int = 1
    ) -> bool:
        """Whether the target can be reached; then the moves are known, the last one first."""
        self._seen.add(splits)
        elements = prod([split.share for split in splits])
        for collective, n_procs, changes in self._attempts(splits, code):
            through = cost
            if n_procs:
                through += self._prices[collective, n_procs, elements]
                if through > bound:
                    continue
            after = self._changed(splits, changes)
            if after is None or after in self._seen:
                continue
            after_code = _code(after)
            if through + left(after_code, bound - through) > bound:
                continue
            arrived = after_code == self._estimate.goal and _state(after) == self._target
            if arrived or (
                self._allowed(after, depth) and self._follow(after, after_code, through, bound, left, depth + 1)
            ):
                state = _state(after)
                self._moves.append(Move(name_of(collective, _state(splits), state), collective, state, n_procs))
                return True
        return False

    def _allowed(self, splits: Splits, depth: int) -> bool:
        """Whether a state may be on the way after ``depth`` moves."""
        return (
            len(self._seen) < _MOST_STATES
            and (self._max_depth is None or depth < self._max_depth)
            and prod([split.share for split in splits]) <= self._memory_limit
            and (self._wanted is None or self._wanted(_state(splits)))
        )

    def _attempts(self, splits: Splits, code: int) -> Iterator[Attempt]:
        """The moves that bring an axis nearer to its home or out of use; those that are free and lead home first."""
        sizes, home = self._sizes, self._estimate.home
        unused = [axis for axis in range(len(sizes)) if not code >> 2 * axis & 3]
        for axis in unused:
            if axis in home:
                d, stride = home[axis]
                for change in _entering(d, splits[d], (axis,), sizes[axis], stride):
                    yield "split", 0, (change,)
        for d, split in enumerate(splits):
            if split.code & self._estimate.all:
                yield from self._departures(d, splits)
        for i, j in self._estimate.equal_axes:
            if (code >> 2 * i | code >> 2 * j) & 1:
                swapped = [
                    (d, swapped_axes(axes, i, j), block, n_procs)
                    for d, (axes, block, n_procs, *_) in enumerate(splits)
                    if i in axes or j in axes
                ]
                yield "permute", 2, tuple(swapped)
        for axis in unused:
            for d, split in enumerate(splits):
                for change in _entering(d, split, (axis,), sizes[axis]):
                    yield "split", 0, (change,)

    def _departures(self, d: int, splits: Splits) -> Iterator[Attempt]:
        """Moves of axes of a dimension, not all of which are at home."""
        axes, block, n_procs, _, code = splits[d]
        if axes == self._target.mapping[d]:
            new = self._target.blocks[d]
            if new != block and (new % block == 0 or block % new == 0):
                yield "alltoall", n_procs, ((d, axes, new, n_procs),)
        last, first = axes[-1], axes[0]
        if code >> 2 * last & 1:
            size = self._sizes[last]
            groups = [(axes[-1:], size), (axes, n_procs)][: len(axes)]
            to, stride = self._estimate.home.get(last, (d, 0))
            for moved, together in groups if to != d else ():
                left = d, axes[: -len(moved)], block * together, n_procs // together
                for came in _entering(to, splits[to], moved, together, stride):
                    yield "alltoall", together, (left, came)
            yield "allgather", size, ((d, axes[:-1], block * size, n_procs // size),)
        if len(axes) > 1 and code >> 2 * first & 1:
            size = self._sizes[first]
            yield "allgather", size, ((d, axes[1:], block, n_procs // size),)

    def _changed(self, splits: Splits, changes: Iterable[Change]) -> Splits | None:
        """The state after changes of dimensions, if it leaves no process empty."""
        after = list(splits)
        for d, axes, block, n_procs in changes:
            length = self._shape[d]
            if not axes:
                after[d] = Split((), UNSPLIT, 1, length, 0)
            elif split_fits(length, n_procs, block):
                share = local_length(length, n_procs, block)
                after[d] = Split(axes, block, n_procs, share, self._estimate.code_of(d, axes, (block,)))
            else:
                return None
        return tuple(after)


def _entering(d: int, split: Split, moved: Axes, size: int, stride: int | None = None) -> Iterator[Change]:
    """A dimension with axes that come to it, the last of them at ``stride`` or wherever it can be."""
    axes, block, n_procs, *_ = split
    if not axes:
        yield d, moved, stride or 1, size
        return
    if stride is None or stride == block * n_procs:
        yield d, (*moved, *axes), block, n_procs * size
    if block % size == 0 and (stride is None or stride == block // size):
        yield d, (*axes, *moved), block // size, n_procs * size


def _code(splits: Splits) -> int:
    return sum(split.code for split in splits)


def _state(splits: Splits) -> State:
    return State(tuple([split.axes for split in splits]), tuple([split.block for split in splits]))
