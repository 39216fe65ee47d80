"""The least that a path between multi-axis distributions can cost, from their mappings alone.

The estimate forgets block lengths. What is left of a state is its mapping, and a mesh of a few axes has only hundreds
of mappings; the least a rank can hold under a mapping is the product of ceil(N/P) over the dimensions. Charging every
move for that many elements gives a small graph, and the cost h(mapping) of its cheapest path to the target's mapping
never exceeds the true one, provided that no collective gets cheaper with more elements. h is found by Dijkstra's
algorithm run backwards from the target, no further than it is asked for: mappings not reached cost more than those
that are.

Two moves lead from every mapping to the target, ``exchange_*`` and ``allgather_*`` followed by free splits. They count
from the radius on that the cheapest of them could have.
"""

from __future__ import annotations

from collections.abc import Mapping as Table
from heapq import heappop, heappush
from math import inf, nextafter, prod

from optim_redist._multi_axis_mappings import MappingGraph, all_mappings
from optim_redist._multi_axis_moves import Axes, Mapping, axes_size

# (collective, n_procs, elements of the most loaded rank before) -> scalar cost
Prices = Table[tuple[str, int, int], float]


class Estimate:
    """A lower bound of the cost from any mapping to the target's."""

    def __init__(
        self,
        shape: tuple[int, ...],
        sizes: tuple[int, ...],
        target: Mapping,
        target_size: int,
        prices: Prices,
        memory_limit: float,
        enough: float,
    ) -> None:
        self._shape, self._sizes, self._prices, self._limit = shape, sizes, prices, memory_limit
        self._graph = MappingGraph(sizes)
        self._shares: dict[tuple[int, Axes], tuple[int, int, bool]] = {}
        self._least: dict[Mapping, tuple[int, int]] = {}
        self._settled: dict[Mapping, float] = {}
        self._distance = {target: 0.0}
        self._queue = [(0.0, target)]
        self._radius = 0.0  # no mapping that is not settled is nearer
        self._target_size = target_size
        self._enough = nextafter(enough, inf)
        self._leap = self._least_leap()  # leaps are in the queue once the radius is that of the cheapest

    def __call__(self, mapping: Mapping, enough: float) -> float:
        """The bound from ``mapping``, exact if it is at most ``enough``."""
        while mapping not in self._settled and self._radius <= enough and self._radius < inf:
            self._settle_next()
        return self._settled.get(mapping, self._radius)

    def _least_leap(self) -> float:
        """The least that an exchange or a gathering of everything can cost."""
        leaps = [self._prices["alltoall", prod(self._sizes), self._target_size]]
        total = prod(self._shape)
        if total <= self._limit:
            factors = {1}
            for size in self._sizes:
                factors |= {factor * size for factor in factors}
            leaps += [self._prices["allgather", n_procs, -(-total // n_procs)] for n_procs in factors]
        return min(leaps)

    def _settle_next(self) -> None:
        while self._queue and self._queue[0][1] in self._settled:
            heappop(self._queue)
        if not self._queue or self._queue[0][0] >= self._leap:
            self._leap_from_everywhere()
        if not self._queue:
            self._radius = inf
            return
        self._radius, mapping = cost, _ = heappop(self._queue)
        if mapping in self._settled:
            return
        settled, distance, prices = self._settled, self._distance, self._prices
        settled[mapping] = cost
        least = self._least
        for before, collective, n_procs in self._graph.leading_to(mapping):
            if before not in settled:
                size = least.get(before) or self._least_local_size(before)
                if size is not None:
                    through = cost + prices[collective, n_procs, size[0]]
                    if through < distance.get(before, self._enough):
                        distance[before] = through
                        heappush(self._queue, (through, before))

    def _leap_from_everywhere(self) -> None:
        self._leap = inf
        prices, distance, target_size = self._prices, self._distance, self._target_size
        n_procs_all, gathers = prod(self._sizes), prod(self._shape) <= self._limit
        for mapping in all_mappings(len(self._sizes), len(self._shape)):
            if mapping not in self._settled:
                size = self._least.get(mapping) or self._least_local_size(mapping)
                if size is not None:
                    elements, n_procs = size
                    leap = prices["alltoall", n_procs_all, elements if elements > target_size else target_size]
                    if gathers:
                        leap = min(leap, prices["allgather", n_procs, elements])
                    if leap < distance.get(mapping, self._enough):
                        distance[mapping] = leap
                        heappush(self._queue, (leap, mapping))

    def _least_local_size(self, mapping: Mapping) -> tuple[int, int] | None:
        """The least the most loaded rank can hold, and how many processes share the tensor.

        None if a process stays empty or the limit is broken.
        """
        least = total = 1
        for place in enumerate(mapping):
            found = self._shares.get(place)
            if found is None:
                length, n_procs = self._shape[place[0]], axes_size(self._sizes, place[1])
                found = self._shares[place] = -(-length // n_procs), n_procs, length >= n_procs
            share, n_procs, fits = found
            if not fits:
                return None
            least *= share
            total *= n_procs
        if least > self._limit:
            return None
        self._least[mapping] = result = least, total
        return result
