"""Sequences of moves that cost no more than the lower bound: most pairs have one, and it is found without a search.

From a state only moves are tried that bring axes to where the target has them, or out of the way, and of those only
moves after which the cost so far and the bound of the rest are still no more than the bound from the start. A sequence
that arrives at the target is then a cheapest one. If none does, or too many states were looked at, nothing is known.

    split      an unused axis comes to its home, or anywhere if the rest is cheaper with it in use
    alltoall   the last axis of a dimension comes home, or all of them do; or blocks become those of the target
    allgather  the first or the last axis of a dimension leaves
    permute    two axes of equal size change places

An axis comes home to an unsplit dimension in blocks of its stride at home; to a split one, only at an end where it gets
that stride.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

from optim_redist._multi_axis.codes import Codes
from optim_redist._multi_axis.estimate import Estimate
from optim_redist._multi_axis.floor import Prices
from optim_redist._multi_axis.moves import (
    UNSPLIT,
    Axes,
    Move,
    State,
    axes_size,
    local_length,
    max_block_size,
    swapped_axes,
)
from optim_redist._multi_axis.names import name_of

# after so many states a search is the better choice
_MOST_STATES = 8


class DimSplit(NamedTuple):
    """How a dimension is split; ``share``: elements of the most loaded rank, ``code``: digits of the axes."""

    axes: Axes
    block: int
    n_procs: int
    share: int
    code: int


# (dimension, its new axes, its new block)
Change = tuple[int, Axes, int]
# collective, processes of a group, what it changes
Attempt = tuple[str, int, tuple[Change, ...]]


class StraightPath:
    """A path from one distribution to another that costs no more than the bound, if there is one.

    Args:
        memory_limit, wanted, max_depth: as in ``cheapest_moves``.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        target: State,
        codes: Codes,
        prices: Prices,
        estimate: Estimate,
        *,
        memory_limit: float,
        wanted: Callable[[State], bool] | None,
        max_depth: int | None,
    ) -> None:
        self._shape, self._sizes, self._target, self._codes = shape, codes.sizes, target, codes
        self._prices, self._estimate = prices, estimate
        self._memory_limit, self._wanted, self._max_depth = memory_limit, wanted, max_depth
        self._seen: set[State] = set()
        self._moves: list[Move] = []

    def find(self, start: State, elements: int) -> list[Move]:
        """The moves from ``start``, whose ``elements`` must be within the limit; none if there is no such path."""
        found = [self._split(d, axes, block) for d, (axes, block) in enumerate(zip(*start))]
        splits = [split for split in found if split is not None]
        code, floor = sum(split.code for split in splits), -1.0
        # the floor takes no search over codes and is often equal to the bound, but ignores axes that wait for others
        bounds = (self._estimate.floor.__call__, self._estimate.__call__)
        for left in bounds[1:] if self._codes.waits(code) else bounds:
            bound = left(code, self._estimate.cap)
            if bound > floor:
                self._seen.clear()
                if self._follow(splits, start, elements, code, 0.0, bound, left):
                    return self._moves[::-1]
            floor = bound
        return []

    def _follow(
        self,
        splits: list[DimSplit],
        state: State,
        elements: int,
        code: int,
        cost: float,
        bound: float,
        left: Callable[[int, float], float],
        depth: int = 1,
    ) -> bool:
        """Whether the target can be reached; if so, ``_moves`` has the moves, the last one first."""
        self._seen.add(state)
        for collective, n_procs, changes in self._attempts(splits, code):
            through = cost
            if n_procs:
                through += self._prices[collective, n_procs, elements]
                if through > bound:
                    continue
            made, made_code = list(splits), code
            for d, axes, block in changes:
                new = self._split(d, axes, block)
                if new is None:
                    break
                made_code += new.code - made[d].code
                made[d] = new
            else:
                if through + left(made_code, bound - through) > bound:
                    continue
                mapping, blocks, _, shares, _ = zip(*made)
                after, held = State(mapping, blocks), prod(shares)
                if after == self._target or (
                    after not in self._seen
                    and self._allowed(after, held, depth)
                    and self._follow(made, after, held, made_code, through, bound, left, depth + 1)
                ):
                    self._moves.append(Move(name_of(collective, state, after), collective, after, n_procs, held))
                    return True
        return False

    def _split(self, d: int, axes: Axes, block: int) -> DimSplit | None:
        """A dimension with these axes and block, if that leaves no process empty."""
        length = self._shape[d]
        if not axes:
            return DimSplit(axes, UNSPLIT, 1, length, 0)
        n_procs = axes_size(self._sizes, axes)
        if length < n_procs or block > max_block_size(length, n_procs):
            return None
        share = local_length(length, n_procs, block)
        return DimSplit(axes, block, n_procs, share, self._codes.code_of(d, axes, (block,)))

    def _allowed(self, state: State, elements: int, depth: int) -> bool:
        """Whether a state may be on the way after ``depth`` moves."""
        return (
            len(self._seen) < _MOST_STATES
            and (self._max_depth is None or depth < self._max_depth)
            and elements <= self._memory_limit
            and (self._wanted is None or self._wanted(state))
        )

    def _attempts(self, splits: list[DimSplit], code: int) -> Iterator[Attempt]:
        """The moves that bring an axis nearer to its home or out of use; those that are free and lead home first."""
        sizes, home = self._sizes, self._codes.home
        unused = [axis for axis in range(len(sizes)) if not code >> 3 * axis & 7]
        for axis in unused:
            if axis in home:
                d, stride = home[axis]
                for change in _entering(d, splits[d], (axis,), sizes[axis], stride):
                    yield "split", 0, (change,)
        for d, split in enumerate(splits):
            if split.code & self._codes.all:
                yield from self._departures(d, splits)
        for i, j in self._codes.equal_axes:
            if (code >> 3 * i | code >> 3 * j) & 1:
                swapped = [
                    (d, swapped_axes(axes, i, j), block)
                    for d, (axes, block, *_) in enumerate(splits)
                    if i in axes or j in axes
                ]
                yield "permute", 2, tuple(swapped)
        for axis in unused:
            for d, split in enumerate(splits):
                for change in _entering(d, split, (axis,), sizes[axis]):
                    yield "split", 0, (change,)

    def _departures(self, d: int, splits: list[DimSplit]) -> Iterator[Attempt]:
        """Moves out of a dimension whose axes are not all at home."""
        axes, block, n_procs, _, code = splits[d]
        if axes == self._target.mapping[d]:
            new = self._target.blocks[d]
            if new != block and (new % block == 0 or block % new == 0):
                yield "alltoall", n_procs, ((d, axes, new),)
        last, first = axes[-1], axes[0]
        if code >> 3 * last & 1:
            size = self._sizes[last]
            groups = [(axes[-1:], size), (axes, n_procs)][: len(axes)]
            to, stride = self._codes.home.get(last, (d, 0))
            for moved, together in groups if to != d else ():
                left = d, axes[: -len(moved)], block * together
                for came in _entering(to, splits[to], moved, together, stride):
                    yield "alltoall", together, (left, came)
            yield "allgather", size, ((d, axes[:-1], block * size),)
        if len(axes) > 1 and code >> 3 * first & 1:
            size = self._sizes[first]
            yield "allgather", size, ((d, axes[1:], block),)


def _entering(d: int, split: DimSplit, moved: Axes, size: int, stride: int | None = None) -> Iterator[Change]:
    """The ways in which axes can come to a dimension, the last of them at ``stride`` or, if None, at either end."""
    axes, block, n_procs, *_ = split
    if not axes:
        yield d, moved, stride or 1
        return
    if stride is None or stride == block * n_procs:
        yield d, (*moved, *axes), block
    if block % size == 0 and (stride is None or stride == block // size):
        yield d, (*axes, *moved), block // size
