"""Cheapest sequences of moves between two multi-axis distributions: A* with an estimate that is nearly exact.

The estimate forgets block lengths. What is left of a state is its mapping, and a mesh of a few axes has only hundreds
of mappings; the least a rank can hold under a mapping is the product of ceil(N/P) over the dimensions. Charging every
move for that many elements gives a small graph, and the cost h(mapping) of its cheapest path to the target's mapping
never exceeds the true one, provided that no collective gets cheaper with more elements. h is found for all mappings at
once by Dijkstra's algorithm run backwards. Then states are expanded in the order of f = g + h, where g is the cost
so far: the first time the target is expanded its path is a cheapest one.

Two moves can lead straight to the target: ``allgather_*`` followed by free splits, which the small graph collapses
into one edge, and ``exchange_*``. An exchange is charged for what a rank holds before it, which is what it really moves
only if the target is no larger; so that the search cannot buy a growing one for the price of a small one, it is
proposed only where nothing grows. It also guarantees a plan: if no other sequence stays inside the limits, it is
the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import chain, combinations, count
from math import inf, prod

from optim_redist._multi_axis_moves import (
    Axes,
    Move,
    MoveSet,
    State,
    axes_size,
    max_local_size,
    swap_axes,
)

Mapping = tuple[Axes, ...]
# collective, n_procs, elements of the most loaded rank before -> scalar cost
Price = Callable[[str, int, int], float]
# a mesh with more mappings than this (five axes on four dimensions, say) is searched without the estimate
MAX_MAPPINGS = 20_000


def _all_mappings(num_axes: int, num_dims: int) -> list[Mapping]:
    """Every way to put distinct axes, in order, on the dimensions; axes may stay unused."""
    mappings: list[Mapping] = [((),) * num_dims]
    for axis in range(num_axes):
        mappings += [
            _with(mapping, tensor_dim, (*axes[:place], axis, *axes[place:]))
            for mapping in mappings
            for tensor_dim, axes in enumerate(mapping)
            for place in range(len(axes) + 1)
        ]
    return mappings


def _with(mapping: Mapping, tensor_dim: int, axes: Axes) -> Mapping:
    """The mapping with other axes on one dimension."""
    return (*mapping[:tensor_dim], axes, *mapping[tensor_dim + 1 :])


def _num_mappings(num_axes: int, num_dims: int) -> int:
    """How many mappings there are: for k used axes, choose and order them, then cut the row into dimensions."""
    total, term = 0, 1
    for used in range(num_axes + 1):
        total += term
        term = term * (num_axes - used) * (used + num_dims) // (used + 1)
    return total


@lru_cache(maxsize=65536)
def _leading_to(sizes: tuple[int, ...], mapping: Mapping) -> list[tuple[Mapping, str, int]]:
    """The (mapping, collective, n_procs) from which one move other than a leap leads to ``mapping``."""
    found: list[tuple[Mapping, str, int]] = []
    used = set(chain.from_iterable(mapping))
    for tensor_dim, axes in enumerate(mapping):
        # a gather has freed the first or the last axis
        for axis, size in enumerate(sizes):
            if axis not in used:
                found.append((_with(mapping, tensor_dim, (axis, *axes)), "allgather", size))
                if axes:
                    found.append((_with(mapping, tensor_dim, (*axes, axis)), "allgather", size))
        if not axes:
            continue
        # a split has added the first or the last axis
        for rest in {axes[1:], axes[:-1]}:
            found.append((_with(mapping, tensor_dim, rest), "split", 0))
        # an all-to-all has brought the first or the last axes: all that another dimension had, or its last one
        for moved, rest in _ends_of(axes):
            before = _with(mapping, tensor_dim, rest)
            for source, there in enumerate(mapping):
                if source != tensor_dim and (not there or len(moved) == 1):
                    found.append((_with(before, source, (*there, *moved)), "alltoall", axes_size(sizes, moved)))
    for first, second in combinations(range(len(sizes)), 2):
        if sizes[first] == sizes[second] and (first in used or second in used):
            found.append((swap_axes(State(mapping, ()), first, second).mapping, "permute", 2))
    return found


def _ends_of(axes: Axes) -> set[tuple[Axes, Axes]]:
    """The first or last axes, any number of them, each with the rest."""
    cuts = range(1, len(axes) + 1)
    return {(axes[:n], axes[n:]) for n in cuts} | {(axes[-n:], axes[:-n]) for n in cuts}


SEARCH_CACHES = (_leading_to, max_local_size)


class Estimate:
    """A lower bound of the cost from any mapping to the target's; infinite where the memory limit forbids a mapping.

    Bounds above ``enough``, the cost of a plan that is known, are only known to be above it.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        sizes: tuple[int, ...],
        target: State,
        price: Price,
        memory_limit: float,
        enough: float,
    ) -> None:
        self._shape, self._sizes, self._limit = shape, sizes, memory_limit
        self._shares: dict[tuple[int, Axes], tuple[float, int]] = {}
        self._known: dict[Mapping, float] | None = None
        if _num_mappings(len(sizes), len(shape)) <= MAX_MAPPINGS:
            self._known = self._backwards(target.mapping, max_local_size(shape, sizes, target), price, enough)

    def __call__(self, mapping: Mapping) -> float:
        return 0.0 if self._known is None else self._known.get(mapping, inf)

    def _least_local_size(self, mapping: Mapping) -> tuple[float, int]:
        """The least the most loaded rank can hold, and how many processes share the tensor.

        It is infinite if a process stays empty or the limit is broken.
        """
        least: float = 1
        total = 1
        for place in enumerate(mapping):
            if place not in self._shares:
                length, n_procs = self._shape[place[0]], axes_size(self._sizes, place[1])
                self._shares[place] = inf if length < n_procs else -(-length // n_procs), n_procs
            share, n_procs = self._shares[place]
            least *= share
            total *= n_procs
        return (least if least <= self._limit else inf), total

    def _backwards(self, target: Mapping, target_size: int, price: Price, enough: float) -> dict[Mapping, float]:
        least: dict[Mapping, int] = {}
        n_procs_all = prod(self._sizes)
        distance = {target: 0.0}
        for mapping in _all_mappings(len(self._sizes), len(self._shape)):
            size, used = self._least_local_size(mapping)
            if size < inf:
                elements = least[mapping] = int(size)
                if mapping != target:
                    exchange = price("alltoall", n_procs_all, max(elements, target_size))
                    distance[mapping] = min(exchange, price("allgather", used, elements))
        queue = [(cost, mapping) for mapping, cost in distance.items() if cost <= enough]
        heapify(queue)
        while queue:
            cost, mapping = heappop(queue)
            if cost > distance[mapping]:
                continue
            for predecessor, collective, n_procs in _leading_to(self._sizes, mapping):
                if predecessor in least:
                    through = cost
                    if collective != "split":
                        through += price(collective, n_procs, least[predecessor])
                    if through < distance[predecessor] and through <= enough:
                        distance[predecessor] = through
                        heappush(queue, (through, predecessor))
        return distance


def cheapest_moves(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    start: State,
    target: State,
    price: Price,
    *,
    memory_limit: float = inf,
    wanted: Callable[[State], bool] = lambda state: True,
    max_depth: int | None = None,
) -> Sequence[Move]:
    """A cheapest sequence of at most ``max_depth`` moves through wanted states of at most ``memory_limit`` elements.

    Block lengths of a dimension are 1, those of its two ends, and their multiples and divisors by sizes of mesh axes.
    No others are worth trying: as long as a dimension is split, its block changes by factors that are sizes of axes,
    and of the lengths that allow the same steps the shortest leaves no rank with more.
    The target itself is always wanted.
    """
    if start == target:
        return []
    move_set = MoveSet(shape, sizes, list(zip(start.blocks, target.blocks)))
    leap = Move("exchange_*", "alltoall", target, prod(sizes))
    start_size, target_size = max_local_size(shape, sizes, start), max_local_size(shape, sizes, target)
    # the cost of the cheapest plan that is known so far
    cheapest = price(leap.collective, leap.n_procs, start_size) if start_size >= target_size else inf
    estimate = Estimate(shape, sizes, target, price, memory_limit, cheapest)

    def admitted(state: State) -> bool:
        return state == target or (max_local_size(shape, sizes, state) <= memory_limit and wanted(state))

    cost, elements = 0.0, start_size

    def promising(mapping: Mapping, collective: str, n_procs: int) -> bool:
        """Whether a move from the state at hand can be part of a plan that is no dearer than the cheapest known."""
        through = cost if collective == "split" else cost + price(collective, n_procs, elements)
        left = estimate(mapping)
        return left < inf and through + left <= cheapest

    # An entry is (f, h, tie-break: latest first, cost so far, moves so far, state, trail): of equal f the one that is
    # estimated nearest to the target goes first.
    order = count()
    queue: list[tuple[float, float, int, float, int, State, Trail]] = [(0.0, 0.0, 0, 0.0, 0, start, None)]
    reached: dict[State, list[tuple[float, int]]] = {start: [(0.0, 0)]}
    while queue:
        _, _, _, cost, depth, state, trail = heappop(queue)
        if state == target:
            return _moves_of(trail)
        if (cost, depth) not in reached[state] or depth == max_depth:
            continue
        elements = max_local_size(shape, sizes, state)
        moves = move_set.moves(state, admitted, promising)
        if elements >= target_size:
            moves.append(leap)
        for move in moves:
            through = cost if move.collective == "split" else cost + price(move.collective, move.n_procs, elements)
            if _improves(reached.setdefault(move.state, []), through, depth + 1, max_depth is not None):
                left = 0.0 if move.state == target else estimate(move.state.mapping)
                if move.state == target:
                    cheapest = min(cheapest, through)
                if through + left <= cheapest and left < inf:
                    entry = (through + left, left, -next(order), through, depth + 1, move.state, (move, trail))
                    heappush(queue, entry)
    return [leap]


Trail = tuple[Move, "Trail"] | None


def _improves(front: list[tuple[float, int]], cost: float, depth: int, depth_counts: bool) -> bool:
    """Enter (cost, depth) in a state's front of best arrivals, unless one there is as good in both."""
    if any(known <= cost and (not depth_counts or steps <= depth) for known, steps in front):
        return False
    front[:] = [(known, steps) for known, steps in front if known < cost or (depth_counts and steps < depth)]
    front.append((cost, depth))
    return True


def _moves_of(trail: Trail) -> list[Move]:
    moves = []
    while trail is not None:
        move, trail = trail
        moves.append(move)
    return moves[::-1]
