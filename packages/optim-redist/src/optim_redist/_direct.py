"""The direct exchange: one all-to-all in which every missing element comes straight from a holder.

What a rank holds and needs stays. The holders of one source point carry the same elements, so they share what is
asked of that point in equal parts (a share may cut a box); the busiest then sends ceil(demand / holders), which no
plan of one step can beat. With a pending reduction every contribution travels to every needer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from optim_redist.boxes import Box, cut, fair_shares, volume
from optim_redist.moves import Phase, Transfer
from optim_redist.problem import Point, Problem


def direct_phases(problem: Problem) -> list[Phase]:
    """The whole redistribution as one phase."""
    transfers = [*_stays(problem)]
    for point, contribution in problem.holders:
        transfers += _sends(problem, point, contribution)
    return [Phase.of("exchange", transfers)]


def _stays(problem: Problem) -> Iterator[Transfer]:
    reduces = problem.num_contributions > 1
    for rank, dst in problem.dst_points.items():
        src = problem.src_points.get(rank)
        box = None if src is None else problem.common(src, dst)
        if box is not None:
            yield Transfer(rank, rank, box, contribution=problem.contribution[rank] if reduces else -1)


def _sends(problem: Problem, point: Point, contribution: int) -> Iterator[Transfer]:
    """What the holders of one source point send, shared evenly among them."""
    holders = problem.holders[point, contribution]
    number = contribution if problem.num_contributions > 1 else -1
    demands = [
        (receiver, box)
        for dst, box in problem.atoms_from(point)
        for receiver in problem.needers.get(dst, ())
        if receiver not in holders
    ]
    for sender, (receiver, box) in share(demands, holders):
        yield Transfer(sender, receiver, box, contribution=number)


def share(demands: Sequence[tuple[int, Box]], workers: Sequence[int]) -> Iterable[tuple[int, tuple[int, Box]]]:
    """Deal demands out to workers in order, equal element counts each; boxes are cut where a share ends."""
    if len(workers) == 1:
        yield from ((workers[0], demand) for demand in demands)
        return
    shares = fair_shares(sum(volume(box) for _, box in demands), len(workers))
    worker = 0
    for key, box in demands:
        total = volume(box)
        points, takers = [0], []
        while points[-1] < total:
            while not shares[worker]:
                worker += 1
            amount = min(shares[worker], total - points[-1])
            shares[worker] -= amount
            points.append(points[-1] + amount)
            takers.append(workers[worker])
        for taker, parts in zip(takers, cut(box, points) if total else []):
            yield from ((taker, (key, part)) for part in parts)
