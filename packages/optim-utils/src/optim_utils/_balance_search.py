"""The heuristics behind `optim_utils.balance.partition`: longest first, best fit, moves and swaps.

Each heuristic works on plain numbers, looks at nothing but its arguments and breaks ties by the lowest index, so that
every rank of a job finds the same answer without talking to the others. Ranks hold cost (what is balanced) and memory
(what is bounded); without a bound ``cap`` is infinite.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from optim_utils._ranks_in_order import Entry, RanksInOrder

__all__ = ["Problem", "best_owners", "largest_load", "longest_first", "loads_of", "lower_bound"]

# Work limits, in steps rather than seconds: the answer must not depend on the speed of the rank that computes it.
_MAX_SWAPS = 2_000
_MAX_LOOKS = 400_000
_FIT_ROUNDS = 12
# A gap this small is left alone.
_CLOSE_ENOUGH = 1e-4


@dataclass(frozen=True)
class Problem:
    """Items with costs and memory, ranks with loads they have already, and the most memory a rank may hold."""

    costs: Sequence[float]
    num_ranks: int
    initial_load: Sequence[float]
    memory: Sequence[float]
    cap: float = math.inf
    order: list[int] = field(init=False)

    def __post_init__(self) -> None:
        both = enumerate(zip(self.costs, self.memory, strict=True))
        keys = [(-cost, -memory, item) for item, (cost, memory) in both]
        object.__setattr__(self, "order", [item for *_, item in sorted(keys)])

    def swapped(self) -> Problem:
        """The same items with memory as what is balanced, and no bound."""
        return Problem(self.memory, self.num_ranks, [0] * self.num_ranks, self.costs)


def loads_of(weights: Sequence[float], owner: Sequence[int], initial: Sequence[float]) -> list[float]:
    """What each rank holds of ``weights``."""
    loads = list(initial)
    for weight, rank in zip(weights, owner, strict=True):
        loads[rank] += weight
    return loads


def largest_load(problem: Problem, owner: Sequence[int]) -> float:
    """The cost of the fullest rank."""
    return max(loads_of(problem.costs, owner, problem.initial_load))


def lower_bound(costs: Sequence[float], num_ranks: int, initial_load: Sequence[float]) -> float:
    """A load that no partition can undercut: the greatest of the mean, the largest item and the pigeonhole bounds.

    For each k, with m ranks, some rank holds k + 1 of the k m + 1 largest items, which cost at least as much as the
    k + 1 smallest of them.
    """
    ordered = sorted(costs, reverse=True)
    sums = [0.0, *ordered]
    for i, cost in enumerate(ordered):
        sums[i + 1] = sums[i] + cost
    total = sums[-1] + sum(initial_load)
    largest = ordered[0] + min(initial_load) if ordered else 0
    pigeonholes = (
        sums[k * num_ranks + 1] - sums[k * num_ranks - k] for k in range(1, (len(ordered) - 1) // num_ranks + 1)
    )
    return max(total / num_ranks, largest, max(initial_load), *pigeonholes)


def longest_first(problem: Problem) -> list[int] | None:
    """LPT: from the largest item down, each to the rank that holds least; None if no rank has room for an item."""
    ranks = RanksInOrder(problem.initial_load, problem.cap)
    return _placed(problem, problem.order, ranks, lambda cost, memory: ranks.take_first(memory))


def _placed(
    problem: Problem,
    items: Iterable[int],
    ranks: RanksInOrder,
    take: Callable[[float, float], Entry | None],
    sign: int = 1,
) -> list[int] | None:
    """The owners if each item goes to the rank that ``take`` takes out of ``ranks`` for its cost and memory.

    The key of the rank grows by the cost, or falls with sign -1. None if ``take`` finds no rank for an item.
    """
    owner = [0] * len(problem.costs)
    for item in items:
        cost, memory = problem.costs[item], problem.memory[item]
        taken = take(cost, memory)
        if taken is None:
            return None
        key, owner[item], held = taken
        ranks.put((key + sign * cost, owner[item], held + memory))
    return owner


def best_owners(problem: Problem) -> list[int] | None:
    """The best of several starts, improved; None if no start respects the cap."""
    bound = lower_bound(problem.costs, problem.num_ranks, problem.initial_load)
    makers = [longest_first]
    if problem.cap < math.inf:
        makers += [_both_at_once, _smallest_memory]
    best: list[int] | None = None
    best_load = math.inf
    for make in makers:
        if best_load <= bound * (1 + _CLOSE_ENOUGH):
            break
        # balancing memory alone leaves cost to chance; repairing it takes an exchange per rank at least
        if make is _smallest_memory and best is not None and problem.num_ranks > _MAX_SWAPS:
            break
        start = make(problem)
        if start is None:
            continue
        improved = _improve(problem, start, bound)
        if (load := largest_load(problem, improved)) < best_load:
            best, best_load = improved, load
    if best is not None and best_load > bound * (1 + _CLOSE_ENOUGH):
        fitted = _multifit(problem, bound, best_load)
        if fitted is not None:
            fitted = _improve(problem, fitted, bound)
            if largest_load(problem, fitted) < best_load:
                best = fitted
    return best


def _smallest_memory(problem: Problem) -> list[int] | None:
    """Owners that balance memory alone; if the cap can be kept at all, these often keep it. None if they do not."""
    owner = best_owners(problem.swapped())
    assert owner is not None
    return owner if max(loads_of(problem.memory, owner, [0] * problem.num_ranks)) <= problem.cap else None


def _both_at_once(problem: Problem) -> list[int] | None:
    """Longest first by whichever of cost and memory is scarcer for the item, each to the rank that is least full."""
    mean_cost = max(sum(problem.costs) / problem.num_ranks, math.ulp(0.0))
    relative = [
        max(cost / mean_cost, memory / problem.cap) for cost, memory in zip(problem.costs, problem.memory, strict=True)
    ]
    ranks = RanksInOrder(problem.initial_load, problem.cap)
    order = sorted(range(len(relative)), key=lambda item: (-relative[item], item))
    return _placed(problem, order, ranks, lambda cost, memory: ranks.take_least_full(cost, memory, mean_cost))


def _multifit(problem: Problem, low: float, high: float) -> list[int] | None:
    """Bisect the largest load, packing by best fit decreasing; the best packing strictly below ``high``, if any."""
    best = None
    for _ in range(_FIT_ROUNDS):
        middle = (low + high) / 2
        owner = _best_fit(problem, middle)
        if owner is None:
            low = middle
        else:
            best, high = owner, middle
    return best


def _best_fit(problem: Problem, limit: float) -> list[int] | None:
    """From the largest item down, each to the fullest rank whose load stays within ``limit``, and memory in the cap."""
    rooms = RanksInOrder([limit - load for load in problem.initial_load], problem.cap)
    return _placed(problem, problem.order, rooms, lambda cost, memory: rooms.take_first(memory, cost), sign=-1)


class _Assignment:
    """The owner of each item, each rank's cost and memory, and each rank's (cost, item) pairs by increasing cost."""

    def __init__(self, problem: Problem, owner: Sequence[int]) -> None:
        self.problem, self.owner = problem, list(owner)
        self.loads = loads_of(problem.costs, owner, problem.initial_load)
        self.memory_loads = loads_of(problem.memory, owner, [0] * problem.num_ranks)
        self.items: list[list[tuple[float, int]]] = [[] for _ in range(problem.num_ranks)]
        for item, rank in enumerate(owner):
            self.items[rank].append((problem.costs[item], item))
        for row in self.items:
            row.sort()

    def move(self, item: int, target: int) -> None:
        """Give an item to another rank."""
        source, cost, memory = self.owner[item], self.problem.costs[item], self.problem.memory[item]
        self.owner[item] = target
        self.items[source].remove((cost, item))
        insort(self.items[target], (cost, item))
        self.loads[source] -= cost
        self.loads[target] += cost
        self.memory_loads[source] -= memory
        self.memory_loads[target] += memory


def _improve(problem: Problem, start: Sequence[int], bound: float) -> list[int]:
    """Owners after moves and swaps off the fullest rank, as long as one lowers it without filling another as much."""
    found = _Assignment(problem, start)
    loads = found.loads
    ordered = sorted((load, rank) for rank, load in enumerate(loads))
    looks = 0
    for _ in range(_MAX_SWAPS):
        largest = ordered[-1][0]
        if largest <= bound * (1 + _CLOSE_ENOUGH) or looks > _MAX_LOOKS:
            break
        full = ordered[bisect_left(ordered, (largest, -1))][1]
        best: tuple[_Exchange, int] | None = None
        for load, rank in ordered:
            difference = largest - load
            # no exchange gains more than half the difference, and the ranks to come differ less
            if difference <= 0 or (best is not None and best[0].gain >= difference / 2):
                break
            exchange, looked = _best_exchange(found, full, rank)
            looks += looked
            if exchange is not None and (best is None or exchange.gain > best[0].gain):
                best = exchange, rank
        if best is None:
            break
        exchange, rank = best
        for changed in (full, rank):
            del ordered[bisect_left(ordered, (loads[changed], changed))]
        found.move(exchange.given, rank)
        if exchange.taken is not None:
            found.move(exchange.taken, full)
        for changed in (full, rank):
            insort(ordered, (loads[changed], changed))
    return found.owner


class _Exchange(NamedTuple):
    """An item that the fuller of two ranks gives, the one it takes in return, and by how much the larger load falls."""

    gain: float
    given: int
    taken: int | None


def _best_exchange(assignment: _Assignment, full: int, other: int) -> tuple[_Exchange | None, int]:
    """The exchange that most lowers the larger load, that of ``full``, and how many exchanges were looked at.

    Giving cost a for b changes the larger load from L to max(L - (a - b), L - difference + (a - b)): the gain is
    min(a - b, difference - (a - b)), at most half the difference.
    """
    memory, cap = assignment.problem.memory, assignment.problem.cap
    memory_full, memory_other = assignment.memory_loads[full], assignment.memory_loads[other]
    others = assignment.items[other]
    difference = assignment.loads[full] - assignment.loads[other]
    # the two neighbours of the ideal partner, and with a cap some further ones
    reach = 1 if cap == math.inf else 8
    best: _Exchange | None = None
    looks = 0
    previous = None
    for cost, item in reversed(assignment.items[full]):
        given_memory = memory[item]
        if (cost, given_memory) == previous:
            continue
        previous = (cost, given_memory)
        middle = bisect_left(others, (cost - difference / 2, -1))
        partners: list[tuple[float, int | None]] = [(0.0, None), *others[max(0, middle - reach) : middle + reach]]
        for partner_cost, partner in partners:
            looks += 1
            moved = cost - partner_cost
            gain = min(moved, difference - moved)
            if gain <= 0 or (best is not None and gain <= best.gain):
                continue
            taken_memory = 0 if partner is None else memory[partner]
            if memory_other + given_memory - taken_memory > cap or memory_full - given_memory + taken_memory > cap:
                continue
            best = _Exchange(gain, item, partner)
    return best, looks
