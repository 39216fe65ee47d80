"""Two hops where one keeps a holder too busy: needers forward what several of them want.

In one exchange the holders of a source point send each of its elements once to every needer. Where that is more than
the bound LB allows, some elements that q >= 2 ranks need are sent to one of them only, which forwards them in a second
exchange. Each such element saves the holders q - 1 transfers and costs its forwarder as many; every rank receives what
it needs, once, as before. Forwarders are the needers with room left below LB, in equal parts.
"""

from __future__ import annotations

from optim_redist._direct import Demand, even_shares, share, stays
from optim_redist.boxes import Box, cut, volume
from optim_redist.moves import Phase, Transfer
from optim_redist.problem import Point, Problem


def forward_phases(problem: Problem, target: int) -> list[Phase]:
    """The exchange with holders sending no more than ``target`` elements each, as far as forwarders have room."""
    atoms = {point: _asked(problem, point) for point, _ in problem.holders}
    demand = {point: sum(volume(box) * len(ranks) for box, ranks in found) for point, found in atoms.items()}
    room: dict[int, int] = dict.fromkeys(problem.ranks, target)
    for (point, _), holders in problem.holders.items():
        for rank in holders:
            room[rank] = max(0, target - -(-demand[point] // len(holders)))

    first: list[Transfer] = [*stays(problem)]
    second: list[Transfer] = []
    for (point, _), holders in problem.holders.items():
        excess = demand[point] - target * len(holders)
        demands: list[Demand] = []
        for box, ranks in atoms[point]:
            saved_each = len(ranks) - 1
            wanted = min(volume(box), -(-excess // saved_each)) if saved_each and excess > 0 else 0
            shares = even_shares(wanted, [room[rank] // saved_each for rank in ranks]) if wanted else []
            excess -= sum(shares) * saved_each
            for forwarder, part in _parts(box, ranks, shares):
                if forwarder is None:
                    demands += ((rank, part) for rank in ranks)
                    continue
                room[forwarder] -= volume(part) * saved_each
                demands.append((forwarder, part))
                second += (Transfer(forwarder, rank, part, "dst") for rank in ranks if rank != forwarder)
        first += (Transfer(sender, receiver, box) for sender, (receiver, box) in share(demands, holders))
    return [Phase.of("exchange", first), Phase.of("forward", second)]


def _asked(problem: Problem, point: Point) -> list[tuple[Box, list[int]]]:
    """The boxes that others need of a source point, with these ranks."""
    holders = problem.holders[point, 0]
    found = []
    for dst, box in problem.atoms_from(point):
        ranks = [rank for rank in problem.needers.get(dst, ()) if rank not in holders]
        if ranks:
            found.append((box, ranks))
    return found


def _parts(box: Box, ranks: list[int], shares: list[int]) -> list[tuple[int | None, Box]]:
    """What each rank forwards of a box, and with None what goes to all of them straight from the source."""
    points = [0]
    for amount in shares:
        points.append(points[-1] + amount)
    points.append(volume(box))
    takers: list[int | None] = [*ranks[: len(shares)], None]
    return [(taker, part) for taker, parts in zip(takers, cut(box, points)) for part in parts]
