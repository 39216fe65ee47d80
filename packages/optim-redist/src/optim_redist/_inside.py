"""How much a group of ranks holds, needs, and already has of what it needs, from one-dimensional sums.

Notation: source point i and target point j share the elements B(i, j), a number |B(i, j)| = Π_k n_k(i_k, j_k). The
ranks of a node usually hold and need grids of points, I = I₁ × I₂ × … and J = J₁ × J₂ × …. Then

    Σ_{j in J} |B(i, j)|            =  Π_k  Σ_{j_k in J_k} n_k(i_k, j_k)
    Σ_{i in I} Σ_{j in J} |B(i, j)| =  Π_k  Σ_{i_k in I_k} Σ_{j_k in J_k} n_k(i_k, j_k)

so no pair of points is visited. A dimension on which all pairs share equally much contributes one factor. Where the
points form no grid on the remaining dimensions, the sum runs over pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, TypeVar

from optim_redist._tools.lazy import lazy

if TYPE_CHECKING:
    from optim_redist.cost import Topology
    from optim_redist.problem import Point, Problem

Part = tuple["Point", int]  # a source point and the number of a pending contribution
Place = TypeVar("Place", bound=Hashable)


class Inside:
    """A group of ranks of a redistribution; "here" means by ranks of this group.

    Attributes:
        sources: the source points held here, each with the number of ranks here that hold it.
        targets: the target points needed here, each with the number of ranks here that need it.
        held, needed: elements of all parts held here, and of all target points needed here.
    """

    def __init__(self, problem: Problem, ranks: tuple[int, ...]) -> None:
        self.problem, self.ranks = problem, ranks
        src_points, dst_points = problem.src_points, problem.dst_points
        self.sources = Counter([src_points[rank] for rank in ranks if rank in src_points])
        self.targets = Counter([dst_points[rank] for rank in ranks if rank in dst_points])
        held: Collection[Point] = self.sources
        if problem.num_contributions > 1:
            held = [point for point, _ in self.holders]
        self.held, self.needed = problem.sum_held(held), problem.sum_needed(self.targets)
        # target points, keyed by the number of ranks here that need them
        self._targets_by_count: dict[int, Collection[Point]] = {}
        for n in set(self.targets.values()):
            self._targets_by_count[n] = [point for point, count in self.targets.items() if count == n]

    @lazy
    def holders(self) -> dict[Part, list[int]]:
        """The source parts that are held here, each with the ranks that hold it here."""
        return ranks_at(self.problem.part_of, self.ranks)

    @lazy
    def needers(self) -> dict[Point, list[int]]:
        """The target points that are needed here, each with the ranks that need it here."""
        return ranks_at(self.problem.dst_points, self.ranks)

    @property
    def is_split(self) -> bool:
        """Whether some part that is held here is held elsewhere too."""
        problem = self.problem
        if problem.num_contributions > 1:
            return any(len(ranks) < problem.src_replicas for ranks in self.holders.values())
        return min(self.sources.values(), default=problem.src_replicas) < problem.src_replicas

    @lazy
    def common(self) -> int:
        """Elements that the source points held here and the target points needed here share."""
        return total_shared(self.problem, self.sources, self.targets)

    @lazy
    def needed_of_source(self) -> dict[Point, int]:
        """For every source point held here, how many of its elements are needed here, by however many ranks."""
        return shared(self.problem, self.sources, self.targets)

    @lazy
    def demand_here(self) -> dict[Part, int]:
        """For every part held here, its elements needed by ranks here that do not hold it, summed over these ranks."""
        kept, needed = self.problem.num_kept, self._needed_of_source_by_ranks
        return {
            part: needed[part[0]] - sum(kept.get(rank, 0) for rank in ranks) for part, ranks in self.holders.items()
        }

    @lazy
    def held_of_target(self) -> dict[Point, int]:
        """For every target point needed here, how many of its elements are held here, by however many ranks."""
        assert self.problem.num_contributions == 1, "contributions may be held in part"
        return shared(self.problem, self.targets, self.sources, from_targets=True)

    @lazy
    def direct_inbound(self) -> int:
        """What enters in a direct exchange: elements needed and not held here, summed over ranks and contributions."""
        by_ranks = [n * self.problem.sum_needed(points) for n, points in self._targets_by_count.items()]
        return self.problem.num_contributions * sum(by_ranks) - self._found_here

    @property
    def direct_outbound(self) -> int:
        """What leaves in a direct exchange: elements held here that ranks elsewhere need, summed over these ranks."""
        assert self.problem.src_replicas == 1 or not self.is_split, "holders elsewhere send some of it"
        return self.problem.dst_replicas * self.held - self._found_here

    @lazy
    def _found_here(self) -> int:
        """Elements that ranks here need and find here, summed over ranks and contributions."""
        if self.problem.num_contributions > 1:
            return sum(self._needed_of_source_by_ranks[point] for point, _ in self.holders)
        return sum(n * self._common(self.sources, points) for n, points in self._targets_by_count.items())

    @lazy
    def _needed_of_source_by_ranks(self) -> dict[Point, int]:
        """``needed_of_source`` with every element counted once for each rank here that needs it."""
        found = dict.fromkeys(self.sources, 0)
        for n, points in self._targets_by_count.items():
            for point, more in shared(self.problem, self.sources, points).items():
                found[point] += n * more
        return found

    def crossing(self) -> tuple[int, int]:
        """(In, Out): the elements that must enter and that must leave this group in every plan.

        In(g)  = Σ_{j needed in g} ( |D_j| - Σ_{i wholly held in g} |B(i, j)| )
        Out(g) = Σ_{i not wholly held outside} ( |S_i| - Σ_{j needed only in g} |B(i, j)| )
        """
        problem = self.problem
        whole: Collection[Point] = self.sources
        only_here: Collection[Point] = self.sources
        if problem.num_contributions > 1:
            counts = Counter(point for point, _ in self.holders)
            whole = [point for point, count in counts.items() if count == problem.num_contributions]
            all_here = [part for part, ranks in self.holders.items() if len(ranks) == problem.src_replicas]
            only_here = dict.fromkeys([point for point, _ in all_here])
        elif problem.src_replicas > 1:
            only_here = [point for point, count in self.sources.items() if count == problem.src_replicas]
        stays = self._targets_by_count.get(problem.dst_replicas, ())
        leaving = problem.sum_held(only_here) - self._common(only_here, stays)
        return self.needed - self._common(whole, self.targets), leaving

    def _common(self, sources: Collection[Point], targets: Collection[Point]) -> int:
        if len(sources) == len(self.sources) and len(targets) == len(self.targets):
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
        innermost: Sequence[Inside] = next(iter(self.levels.values()), ())
        self.spread: bool = problem.src_replicas > 1 and any(group.is_split for group in innermost)

    def __bool__(self) -> bool:
        return bool(self.levels)


def ranks_at(places: Mapping[int, Place], ranks: Iterable[int]) -> dict[Place, list[int]]:
    """The ranks at each place, in their order; those that are nowhere are left out."""
    found: dict[Place, list[int]] = {}
    for rank in ranks:
        if rank in places:
            found.setdefault(places[rank], []).append(rank)
    return found


def total_shared(problem: Problem, sources: Collection[Point], targets: Collection[Point]) -> int:
    """Elements that some source points and some target points share."""
    if not sources or not targets:
        return 0
    keys, found = _shared(problem, sources, targets, from_targets=False)
    return sum(map(found.__getitem__, keys))


def shared(
    problem: Problem, points: Collection[Point], others: Collection[Point], *, from_targets: bool = False
) -> dict[Point, int]:
    """For every point of one side, how many elements it shares with all given points of the other side together.

    ``points`` are source points and ``others`` target points; with ``from_targets`` it is the other way round.
    """
    keys, found = _shared(problem, points, others, from_targets)
    return dict(zip(points, map(found.__getitem__, keys)))


def _shared(
    problem: Problem, points: Collection[Point], others: Collection[Point], from_targets: bool
) -> tuple[list[Point], dict[Point, int]]:
    """Each point's key, its coordinates on the dimensions where they matter, and what ``shared`` returns by key."""
    alike, dims = problem.alike
    keys = _on_dims(points, dims)
    if not dims:
        return keys, {(): alike * len(others)}
    weights = Counter(_on_dims(others, dims))
    axes = list(map(set, zip(*weights)))
    if prod(map(len, axes)) == len(weights) and len(set(weights.values())) == 1:
        found = dict.fromkeys(keys, alike * next(iter(weights.values())))
        for place, (k, there) in enumerate(zip(dims, axes)):
            common, here = problem.overlaps[k].common, {key[place] for key in found}
            if from_targets:
                sizes = dict.fromkeys(here, 0)
                for i in there:
                    for j in common[i].keys() & here:
                        sizes[j] += common[i][j]
            else:
                sizes = {i: sum(map(common[i].__getitem__, common[i].keys() & there)) for i in here}
            for key in found:
                found[key] *= sizes[key[place]]
        return keys, found
    rows = [problem.overlaps[k].common for k in dims]
    found = dict.fromkeys(keys, 0)
    for key in found:
        for other, weight in weights.items():
            size = alike * weight
            for common, i, j in zip(rows, other if from_targets else key, key if from_targets else other):
                size *= common[i].get(j, 0)
            found[key] += size
    return keys, found


def _on_dims(points: Collection[Point], dims: Sequence[int]) -> list[Point]:
    """The coordinates of points on some dimensions."""
    if not dims or not points:
        return [()] * len(points)
    columns = list(zip(*points))
    return list(zip(*[columns[k] for k in dims]))
