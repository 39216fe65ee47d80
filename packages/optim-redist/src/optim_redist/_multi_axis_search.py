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
from itertools import chain, count
from math import inf, prod

from optim_redist._multi_axis_moves import (
    Axes,
    Move,
    MoveSet,
    State,
    axes_size,
    max_local_size,
    replace_dims,
    swap_axes,
)

Mapping = tuple[Axes, ...]
# collective, n_procs, elements of the most loaded rank before -> scalar cost
Price = Callable[[str, int, int], float]
# a mesh with more mappings than this (five axes on four dimensions, say) is searched without the estimate
MAX_MAPPINGS = 20_000


def _all_mappings(num_axes: int, num_dims: int) -> list[Mapping]:
    """Every way to put distinct axes, in order, on the dimensions; axes may stay unused."""
    mappings: set[Mapping] = {((),) * num_dims}
    for axis in range(num_axes):
        grown = set()
        for mapping in mappings:
            for tensor_dim, axes in enumerate(mapping):
                for place in range(len(axes) + 1):
                    placed = (*axes[:place], axis, *axes[place:])
                    grown.add((*mapping[:tensor_dim], placed, *mapping[tensor_dim + 1 :]))
        mappings |= grown
    return sorted(mappings)


def _num_mappings(num_axes: int, num_dims: int) -> int:
    """How many mappings there are: for k used axes, choose and order them, then cut the row into dimensions."""
    total, term = 0, 1
    for used in range(num_axes + 1):
        total += term
        term = term * (num_axes - used) * (used + num_dims) // (used + 1)
    return total


@lru_cache(maxsize=256)
def _predecessors(sizes: tuple[int, ...], num_dims: int) -> dict[Mapping, list[tuple[Mapping, str, int]]]:
    """For each mapping, the (mapping, collective, n_procs) that lead to it by one move other than a leap."""
    edges: dict[Mapping, list[tuple[Mapping, str, int]]] = {
        mapping: [] for mapping in _all_mappings(len(sizes), num_dims)
    }
    for mapping in edges:
        for successor, collective, n_procs in _successors(sizes, mapping):
            edges[successor].append((mapping, collective, n_procs))
    return edges


SEARCH_CACHES = (_predecessors, max_local_size)


def _successors(sizes: tuple[int, ...], mapping: Mapping) -> set[tuple[Mapping, str, int]]:
    """One move away from ``mapping``, whatever the blocks."""
    state = State(mapping, (0,) * len(mapping))
    used = set(chain.from_iterable(mapping))
    found: set[tuple[Mapping, str, int]] = set()

    def add(collective: str, n_procs: int, *changes: tuple[int, Axes]) -> None:
        found.add((replace_dims(state, *((i, axes, 0) for i, axes in changes)).mapping, collective, n_procs))

    for tensor_dim, axes in enumerate(mapping):
        for axis in range(len(sizes)):
            if axis not in used:
                add("split", 0, (tensor_dim, (axis, *axes)))
                add("split", 0, (tensor_dim, (*axes, axis)))
        if not axes:
            continue
        add("allgather", sizes[axes[-1]], (tensor_dim, axes[:-1]))
        add("allgather", sizes[axes[0]], (tensor_dim, axes[1:]))
        for moved in (axes, axes[-1:]):
            left = axes[: len(axes) - len(moved)]
            for target, there in enumerate(mapping):
                if target != tensor_dim:
                    add("alltoall", axes_size(sizes, moved), (tensor_dim, left), (target, (*moved, *there)))
                    add("alltoall", axes_size(sizes, moved), (tensor_dim, left), (target, (*there, *moved)))
    for first in range(len(sizes)):
        for second in range(first):
            if sizes[first] == sizes[second] and (first in used or second in used):
                found.add((swap_axes(state, first, second).mapping, "permute", 2))
    return found


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
        self._known: dict[Mapping, float] | None = None
        if _num_mappings(len(sizes), len(shape)) <= MAX_MAPPINGS:
            self._known = self._backwards(target.mapping, max_local_size(shape, sizes, target), price, enough)

    def __call__(self, mapping: Mapping) -> float:
        return 0.0 if self._known is None else self._known.get(mapping, inf)

    def _least_local_size(self, mapping: Mapping) -> float:
        """The least the most loaded rank can hold; infinite if a process stays empty or the limit is broken."""
        least = 1
        for length, axes in zip(self._shape, mapping):
            n_procs = axes_size(self._sizes, axes)
            if length < n_procs:
                return inf
            least *= -(-length // n_procs)
        return least if least <= self._limit else inf

    def _backwards(self, target: Mapping, target_size: int, price: Price, enough: float) -> dict[Mapping, float]:
        predecessors = _predecessors(self._sizes, len(self._shape))
        least = {mapping: self._least_local_size(mapping) for mapping in predecessors}
        n_procs_all = prod(self._sizes)
        distance = {target: 0.0}
        for mapping, elements in least.items():
            if elements < inf and mapping != target:
                used = axes_size(self._sizes, chain.from_iterable(mapping))
                exchange = price("alltoall", n_procs_all, max(int(elements), target_size))
                distance[mapping] = min(exchange, price("allgather", used, int(elements)))
        queue = [(cost, mapping) for mapping, cost in distance.items()]
        heapify(queue)
        while queue:
            cost, mapping = heappop(queue)
            if cost > enough:
                break
            if cost > distance[mapping]:
                continue
            for predecessor, collective, n_procs in predecessors[mapping]:
                elements = least[predecessor]
                if elements < inf:
                    through = cost if collective == "split" else cost + price(collective, n_procs, int(elements))
                    if through < distance[predecessor]:
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
