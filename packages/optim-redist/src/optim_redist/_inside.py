"""What the ranks of a group hold, need, and have of what they need, from one-dimensional sums.

Notation: B(i, j) the elements that source point i and target point j share, a product over the dimensions of n_k. The
ranks of a node usually hold and need grids of points, I = I₁ × I₂ × … and J = J₁ × J₂ × …. Then

    Σ_{j in J} |B(i, j)|            =  Π_k  Σ_{j_k in J_k} n_k(i_k, j_k)
    Σ_{i in I} Σ_{j in J} |B(i, j)| =  Π_k  Σ_{i_k in I_k} Σ_{j_k in J_k} n_k(i_k, j_k)

and no pair of points is visited. Sets of points that are no grid are summed pair by pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optim_redist.cost import Topology
    from optim_redist.problem import Point, Problem

Part = tuple["Point", int]  # a source point, and which of the pending contributions


class Inside:
    """Some ranks of a redistribution.

    Attributes:
        holders: the source parts that are held here, each with the ranks that hold it here.
        needers: the target points that are needed here, each with the ranks that need it here.
        sources: the source points that are held here.
        held, needed: elements of all parts held here, and of all target points needed here.
    """

    def __init__(self, problem: Problem, ranks: tuple[int, ...]) -> None:
        self.problem, self.ranks = problem, ranks
        self.holders: dict[Part, list[int]] = {}
        self.needers: dict[Point, list[int]] = {}
        src, dst, contribution = problem.src_points, problem.dst_points, problem.contribution
        for rank in ranks:
            if rank in src:
                self.holders.setdefault((src[rank], contribution[rank]), []).append(rank)
            if rank in dst:
                self.needers.setdefault(dst[rank], []).append(rank)
        self.sources: Collection[Point] = [point for point, _ in self.holders]
        self.held, self.needed = problem.sum_held(self.sources), problem.sum_needed(self.needers)
        if problem.num_contributions > 1:
            self.sources = dict.fromkeys(self.sources)
        # target points by the number of ranks here that need them
        self._needed_by: dict[int, list[Point]] = {}
        for point, needing in self.needers.items():
            self._needed_by.setdefault(len(needing), []).append(point)

    @cached_property
    def common(self) -> int:
        """Elements that the source points held here and the target points needed here share."""
        return total_shared(self.problem, self.sources, self.needers)

    @cached_property
    def wanted(self) -> dict[Point, int]:
        """For every source point held here, how many of its elements some rank here needs, by target points."""
        return shared(self.problem, self.sources, self.needers)

    @cached_property
    def asked(self) -> dict[Part, int]:
        """For every part held here, how many of its elements ranks here need that do not hold it, rank by rank."""
        kept, wanted = self.problem.num_kept, self._wanted_by_ranks
        return {
            part: wanted[part[0]] - sum(kept.get(rank, 0) for rank in ranks) for part, ranks in self.holders.items()
        }

    @cached_property
    def had(self) -> dict[Point, int]:
        """For every target point needed here, how many of its elements some rank here holds; nothing is pending."""
        return shared(self.problem, self.needers, self.sources, from_targets=True)

    @cached_property
    def lacking(self) -> int:
        """Elements that ranks here need and no rank here holds, by ranks and contributions."""
        by_ranks = [n * self.problem.sum_needed(points) for n, points in self._needed_by.items()]
        return self.problem.num_contributions * sum(by_ranks) - self._found_here

    @property
    def leaving(self) -> int:
        """Elements that ranks elsewhere need of what is held only here, by ranks."""
        return self.problem.dst_replicas * self.held - self._found_here

    @cached_property
    def _found_here(self) -> int:
        """Elements that ranks here need and find here, by ranks and contributions."""
        if self.problem.num_contributions > 1:
            return sum(self._wanted_by_ranks[point] for point, _ in self.holders)
        return sum(n * self._common(self.sources, points) for n, points in self._needed_by.items())

    @cached_property
    def _wanted_by_ranks(self) -> dict[Point, int]:
        """``wanted`` with every element counted once for each rank here that needs it."""
        found = dict.fromkeys(self.sources, 0)
        for n, points in self._needed_by.items():
            for point, more in shared(self.problem, self.sources, points).items():
                found[point] += n * more
        return found

    def crossing(self) -> tuple[int, int]:
        """(In, Out): elements that must enter these ranks and that must leave them, however they are moved.

        In(g)  = Σ_{j needed in g} ( |D_j| - Σ_{i wholly held in g} |B(i, j)| )
        Out(g) = Σ_{i not wholly held outside} ( |S_i| - Σ_{j needed only in g} |B(i, j)| )
        """
        problem = self.problem
        whole = only_here = self.sources
        if problem.num_contributions > 1:
            counts = Counter(point for point, _ in self.holders)
            whole = [point for point, count in counts.items() if count == problem.num_contributions]
        if problem.src_replicas > 1 or problem.num_contributions > 1:
            all_here = [part for part, ranks in self.holders.items() if len(ranks) == problem.src_replicas]
            only_here = dict.fromkeys([point for point, _ in all_here])
        stays = self._needed_by.get(problem.dst_replicas, ())
        leaving = problem.sum_held(only_here) - self._common(only_here, stays)
        return self.needed - self._common(whole, self.needers), leaving

    def _common(self, sources: Collection[Point], targets: Collection[Point]) -> int:
        if len(sources) == len(self.sources) and len(targets) == len(self.needers):
            return self.common
        return total_shared(self.problem, sources, targets)


class Groups:
    """The groups of a topology that divide the ranks of a problem.

    Attributes:
        levels: the groups of every level, innermost level first.
        spread: whether some part of the source has holders in several of the innermost groups.
    """

    def __init__(self, problem: Problem, topology: Topology) -> None:
        self.levels: dict[str, list[Inside]] = {}
        for level, ranks, _ in topology.groups(problem.ranks):
            self.levels.setdefault(level, []).append(Inside(problem, ranks))
        replicas = problem.src_replicas
        innermost: Sequence[Inside] = next(iter(self.levels.values()), ())
        self.spread = replicas > 1 and any(
            len(ranks) < replicas for group in innermost for ranks in group.holders.values()
        )

    def __bool__(self) -> bool:
        return bool(self.levels)


def total_shared(problem: Problem, sources: Collection[Point], targets: Collection[Point]) -> int:
    """Elements that some source points and some target points share."""
    if not sources or not targets:
        return 0
    here, there = _grid_axes(sources), _grid_axes(targets)
    if here is None or there is None:
        return sum(shared(problem, sources, targets).values())
    found = 1
    for overlap, rows, columns in zip(problem.overlaps, here, there):
        if overlap.alike is not None:
            found *= overlap.alike * len(rows) * len(columns)
        else:
            common = overlap.common
            found *= sum(n for i in rows for j, n in common[i].items() if j in columns)
    return found


def shared(
    problem: Problem, points: Collection[Point], others: Collection[Point], *, from_targets: bool = False
) -> dict[Point, int]:
    """For every point of one side, how many of its elements points of the other side have together.

    ``points`` are source points and ``others`` target points, the other way round with ``from_targets``.
    """
    axes = _grid_axes(others)
    if axes is None:
        pairs = (lambda a, b: problem.num_common(b, a)) if from_targets else problem.num_common
        return {point: sum(pairs(point, other) for other in others) for point in points}
    factor = 1
    rows: list[tuple[int, dict[int, int]]] = []
    for k, (overlap, there) in enumerate(zip(problem.overlaps, axes)):
        if overlap.alike is not None:
            factor *= overlap.alike * len(there)
            continue
        common, here = overlap.common, {point[k] for point in points}
        if from_targets:
            row = {j: sum(common[i].get(j, 0) for i in there) for j in here}
        else:
            row = {i: sum(n for j, n in common[i].items() if j in there) for i in here}
        rows.append((k, row))
    found = dict.fromkeys(points, factor)
    for k, row in rows:
        for point in found:
            found[point] *= row[point[k]]
    return found


def _grid_axes(points: Collection[Point]) -> list[set[int]] | None:
    """The coordinates on every dimension if the points are all their combinations, else None."""
    axes = list(map(set, zip(*points)))
    return axes if prod(map(len, axes)) == len(points) else None
