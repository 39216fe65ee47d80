"""Cheapest sequences of moves between two multi-axis distributions, by A*.

States are expanded in the order of f = g + h, where g is the cost so far and h a lower bound of what is left
(``_multi_axis_estimate``): the first time the target is expanded its path is a cheapest one. The bound is computed as
far as needed; where it was not yet exact a state comes up again with the exact one.

``exchange_*`` straight to the target is charged for what a rank holds before it, which is what it really moves
only if the target is no larger; so that the search cannot buy a growing one for the price of a small one, it is
proposed only where nothing grows. It also guarantees a plan: if no other sequence stays inside the limits, it is
the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf, prod

from optim_redist._multi_axis_estimate import Estimate, Prices
from optim_redist._multi_axis_moves import Move, MoveSet, Part, Parts, State, Way, max_local_size, state_of

Trail = tuple[Way, Part, "Trail"] | None


def cheapest_moves(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    start: State,
    target: State,
    prices: Prices,
    *,
    memory_limit: float = inf,
    wanted: Callable[[State], bool] | None = None,
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
    goal = move_set.parts(target)
    leap = Way(("exchange", "*"), "alltoall", prod(sizes), target.mapping, goal, 0, goal[:1], None)
    start_size, target_size = max_local_size(shape, sizes, start), max_local_size(shape, sizes, target)
    # the cost of the cheapest plan that is known so far
    cheapest = prices[leap.collective, leap.n_procs, start_size] if start_size >= target_size else inf
    estimate = Estimate(shape, sizes, target.mapping, target_size, prices, memory_limit, cheapest)

    # An entry is (f, h, tie-break: latest first, cost so far, moves so far, state, its elements, trail): of equal f the
    # one that is estimated nearest to the target goes first.
    order = count()
    first = move_set.parts(start)
    left = estimate(start.mapping, cheapest)
    if left == inf:  # the start itself is above the memory limit
        left = 0.0
    queue: list[tuple[float, float, int, float, int, Parts, int, Trail]] = [
        (left, left, 0, 0.0, 0, first, start_size, None)
    ]
    reached: dict[Parts, list[tuple[float, int]]] = {first: [(0.0, 0)]}
    while queue:
        f, _, _, cost, depth, state, elements, trail = heappop(queue)
        if state == goal:
            return _moves_of(trail)
        if (cost, depth) not in reached[state] or depth == max_depth:
            continue
        left = estimate(tuple([part.axes for part in state]), f - cost)
        if cost + left > f and depth:
            if cost + left <= cheapest and left < inf:
                heappush(queue, (cost + left, left, -next(order), cost, depth, state, elements, trail))
            continue
        ways = move_set.ways(state)
        if elements >= target_size:
            ways.append(leap)
        for way in ways:
            through = cost + prices[way.collective, way.n_procs, elements]
            left = estimate(way.mapping, f - through)
            if through + left > cheapest or left == inf:
                continue
            others = prod([part.share for part in way.base]) // way.base[way.tensor_dim].share
            for part in way.parts or move_set.parts_of(way):
                after = way.state(part)
                size = others * part.share
                if after == goal:
                    cheapest = min(cheapest, through)
                elif size > memory_limit:
                    continue
                if _improves(reached, after, through, depth + 1, max_depth) and (
                    wanted is None or after == goal or wanted(state_of(after))
                ):
                    h = 0.0 if after == goal else left
                    heappush(queue, (through + h, h, -next(order), through, depth + 1, after, size, (way, part, trail)))
    return [leap.move(goal[0])]


def _improves(
    reached: dict[Parts, list[tuple[float, int]]], state: Parts, cost: float, depth: int, max_depth: int | None
) -> bool:
    """Enter (cost, depth) in a state's front of best arrivals, unless one there is as good in both."""
    front = reached.get(state)
    if front is None:
        reached[state] = [(cost, depth)]
        return True
    depth_counts = max_depth is not None
    if any(known <= cost and (not depth_counts or steps <= depth) for known, steps in front):
        return False
    front[:] = [(known, steps) for known, steps in front if known < cost or (depth_counts and steps < depth)]
    front.append((cost, depth))
    return True


def _moves_of(trail: Trail) -> list[Move]:
    moves = []
    while trail is not None:
        way, part, trail = trail
        moves.append(way.move(part))
    return moves[::-1]
