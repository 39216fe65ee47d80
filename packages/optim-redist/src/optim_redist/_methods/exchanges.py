"""What exchanges move, in all and in their fullest round; for the direct exchange, computed without its transfers.

Notation: m contributions to every element, q needers, B(i, j) what source point i and target point j share. If every
part has one holder, a rank at source point i and target point j

    receives  m·|B(·, j)| - |B(i, j)|        sends  q·|B(i, ·)| - |B(i, j)|

Rounds of a reduction cut what j holds along one dimension, so these sums stay products of sums over one dimension.
Rounds of finished values cut each transfer, whose number decides which rounds get the larger parts; senders of the
same sizes to the same receivers, with numbers that are equal modulo the number of rounds, are counted together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import cache
from math import prod

from optim_redist._methods.borders import crossings, volumes_of
from optim_redist._methods.chunked import RoundSizes, fullest_round, grid_of, over_grid, part_sizes, steps_of
from optim_redist._methods.direct import direct_phases
from optim_redist._methods.own import Receivers, is_in_order
from optim_redist._methods.relay import relay_phases
from optim_redist._methods.relay_volumes import relay_volumes
from optim_redist.boxes import fair_shares
from optim_redist.cost import Topology
from optim_redist.moves import Phase, Volumes
from optim_redist.problem import Point, Problem


class Exchange:
    """An exchange with known volumes, whose transfers are made when first asked for."""

    def __init__(self, problem: Problem, volumes: Volumes, phase: Callable[[], Phase]) -> None:
        self._problem, self.volumes, self._made = problem, volumes, cache(phase)
        self._known: dict[int, dict[int, int]] = {}

    @classmethod
    def of(cls, problem: Problem, phase: Phase, topology: Topology) -> Exchange:
        return cls(problem, volumes_of(phase, topology), lambda: phase)

    def fullest_round(self, num_rounds: int) -> dict[int, int]:
        """For every rank, the most elements that it sends and receives in any one round; computed once."""
        if num_rounds == 1:
            sent, received = self.volumes.sent, self.volumes.received
            return {rank: sent.get(rank, 0) + received.get(rank, 0) for rank in {*sent, *received}}
        found = self._known.get(num_rounds)
        if found is None:
            found = self._known[num_rounds] = self._fullest_of(num_rounds)
        return found

    def _fullest_of(self, num_rounds: int) -> dict[int, int]:
        return fullest_round(self._problem, self._made(), num_rounds)


class DirectExchange(Exchange):
    """The direct exchange dealt out in order, listed only for rounds in which several holders share a part."""

    def __init__(self, problem: Problem, topology: Topology) -> None:
        assert is_in_order(problem, "direct", topology), "who is asked depends on who is near"
        super().__init__(problem, _volumes(problem, topology), lambda: direct_phases(problem)[0])

    def _fullest_of(self, num_rounds: int) -> dict[int, int]:
        # a scalar is not cut
        if self._problem.src_replicas == 1 and self._problem.overlaps:
            reduces = self._problem.num_contributions > 1
            return (_fullest_of_reduction if reduces else _fullest_of_values)(self._problem, num_rounds)
        return super()._fullest_of(num_rounds)


def relayed(problem: Problem, topology: Topology) -> list[Exchange]:
    """The two exchanges of a relay."""
    made = cache(lambda: relay_phases(problem))
    reduce, hand_on = relay_volumes(problem, topology)[1]
    return [Exchange(problem, reduce, lambda: made()[0]), Exchange(problem, hand_on, lambda: made()[1])]


def moved_in_order(problem: Problem) -> tuple[dict[int, int], dict[int, int]]:
    """(sent, received): elements by rank, in the direct exchange dealt out in order."""
    kept, needed, contributions = problem.num_kept, problem.needed_sizes, problem.num_contributions
    received = {r: contributions * needed[point] - kept.get(r, 0) for r, point in problem.dst_points.items()}
    sent: dict[int, int] = {}
    for part, ranks in problem.holders.items():
        sent.update(zip(ranks, fair_shares(problem.demand(part), len(ranks))))
    return sent, received


def _volumes(problem: Problem, topology: Topology) -> Volumes:
    sent, received = moved_in_order(problem)
    borders = crossings(problem, topology, None)[0] if topology.levels else {}
    return Volumes("exchange", sent, received, borders, problem.num_contributions > 1)


def _fullest_of_reduction(problem: Problem, num_rounds: int) -> dict[int, int]:
    """``fullest_round`` of contributions with one holder each, where rounds cut every target into equal parts."""
    grid = grid_of(problem, num_rounds)
    dims = [dim for dim, _ in grid]
    others = [(k, o) for k, o in enumerate(problem.overlaps) if k not in dims]
    # along every dimension of the grid: the parts of what coordinates i and j share, and their sums over j and over i
    shared: list[list[dict[int, list[int]]]] = []
    by_src: list[list[list[int]]] = []
    by_dst: list[list[list[int]]] = []
    for dim, count in grid:
        divided = problem.overlaps[dim]
        parts = [{j: part_sizes(divided.dst.sets[j], part, count) for j, part in row} for row in divided.from_src]
        from_src, to_dst = [[0] * count for _ in parts], [[0] * count for _ in divided.dst.sizes]
        for i, row in enumerate(parts):
            for j, part in row.items():
                _add(from_src[i], part)
                _add(to_dst[j], part)
        shared.append(parts)
        by_src.append(from_src)
        by_dst.append(to_dst)

    @cache
    def most(src: Point | None, sent: int, dst: Point | None, received: int, kept: int) -> int:
        total = [0] * num_rounds
        if src is not None:
            _add(total, over_grid([along[i] for along, i in zip(by_src, src)], num_rounds), sent)
        if dst is not None:
            _add(total, over_grid([along[j] for along, j in zip(by_dst, dst)], num_rounds), received)
        if src is not None and dst is not None and kept:
            # what a rank keeps is neither sent nor received
            _add(total, over_grid([along[i][j] for along, i, j in zip(shared, src, dst)], num_rounds), -2 * kept)
        return max(total)

    moved = {}
    for rank in problem.ranks:
        src, dst = problem.src_points.get(rank), problem.dst_points.get(rank)
        sent = 0 if src is None else problem.dst_replicas * prod(o.src.sizes[src[k]] for k, o in others)
        received = 0 if dst is None else problem.num_contributions * prod(o.dst.sizes[dst[k]] for k, o in others)
        kept = 0
        if src is not None and dst is not None and all(dst[dim] in along[src[dim]] for dim, along in zip(dims, shared)):
            kept = prod(o.common[src[k]].get(dst[k], 0) for k, o in others)
        on_src = None if src is None else tuple([src[dim] for dim in dims])
        on_dst = None if dst is None else tuple([dst[dim] for dim in dims])
        moved[rank] = most(on_src, sent, on_dst, received, kept)
    return moved


def _fullest_of_values(problem: Problem, num_rounds: int) -> dict[int, int]:
    """``fullest_round`` of finished values with one holder each, where a transfer's number decides how it is cut."""
    rows = Receivers(problem)
    sizes = [[tuple(row.items()) for row in o.common] for o in problem.overlaps]
    sizes_of, totals = RoundSizes(num_rounds), dict.fromkeys(problem.ranks, 0)
    alike: dict[tuple[object, int], list[int]] = {}
    for rank, point in problem.src_points.items():
        key = tuple([rows_of[i] for rows_of, i in zip(sizes, point)])
        alike.setdefault((key, rows.first_number[rank] % num_rounds), []).append(rank)
    for senders in alike.values():
        point, first = problem.src_points[senders[0]], rows.first_number[senders[0]]
        receivers = rows.of(point)
        steps = [_steps(problem, point, problem.dst_points[receiver], num_rounds) for receiver in receivers]
        parts = [sizes_of(*found, (first + number) % num_rounds) for number, found in enumerate(steps)]
        for receiver, part in zip(receivers, parts):
            totals[receiver] += part * len(senders)
        sent = sum(parts)
        for rank in senders:
            totals[rank] += sent
            number = bisect_left(receivers, rank)
            if number < len(receivers) and receivers[number] == rank:
                # what a rank keeps is neither sent nor received
                totals[rank] -= 2 * parts[number]
    return {rank: sizes_of.largest(total) for rank, total in totals.items()}


def _steps(problem: Problem, src: Point, dst: Point, num_rounds: int) -> tuple[int, int]:
    return steps_of([o.common[i][j] for o, i, j in zip(problem.overlaps, src, dst)], num_rounds)


def _add(total: list[int], more: Iterable[int], times: int = 1) -> None:
    """Add ``times`` times ``more`` to ``total``, entry by entry."""
    total[:] = [n + times * other for n, other in zip(total, more)]
