"""The direct exchange: one all-to-all in which every missing element comes straight from a holder.

What a rank both holds and needs stays there. The holders of one source point carry the same elements, so they share
the demand on that point equally (a share may cut a box); the busiest holder then sends ceil(demand / holders), which no
plan of one step can beat. With a topology the nearest holders are asked first, as long as no rank has to send more
than that optimum. With a pending reduction every contribution travels to every needer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from optim_redist.boxes import Box, cut, fair_shares, volume
from optim_redist.cost import Topology
from optim_redist.moves import FINISHED, Phase, Transfer
from optim_redist.problem import Point, Problem

Demand = tuple[int, Box]  # the rank that needs it, and the box


def direct_phases(problem: Problem, topology: Topology | None = None, *, nearest: bool = False) -> list[Phase]:
    """The whole redistribution as one phase; with ``nearest``, the nearest holders send whatever is asked of them."""
    demands = {key: demands_of(problem, *key) for key in problem.holders}
    near = topology if topology is not None and topology.levels and problem.src_replicas > 1 else None
    limit = max((-(-_total(demands[key]) // len(ranks)) for key, ranks in problem.holders.items()), default=0)
    room = None if nearest else limit
    transfers = [*stays(problem)]
    for (point, contribution), holders in problem.holders.items():
        asked = demands[point, contribution]
        dealt = share(asked, holders) if near is None else _share_near(asked, holders, near, room)
        number = contribution if problem.num_contributions > 1 else FINISHED
        transfers += (Transfer(sender, receiver, box, contribution=number) for sender, (receiver, box) in dealt)
    return [Phase.of("exchange", transfers)]


def stays(problem: Problem, ranks: Iterable[int] | None = None) -> Iterator[Transfer]:
    """What each of ``ranks`` keeps, by default every rank."""
    reduces = problem.num_contributions > 1
    for rank in problem.dst_points if ranks is None else ranks:
        src, dst = problem.src_points.get(rank), problem.dst_points.get(rank)
        box = None if src is None or dst is None else problem.common(src, dst)
        if box is not None:
            yield Transfer(rank, rank, box, contribution=problem.contribution[rank] if reduces else FINISHED)


def demands_of(problem: Problem, point: Point, contribution: int) -> list[Demand]:
    """What is asked of the holders of one source point."""
    holders = problem.holders[point, contribution]
    return [
        (receiver, box)
        for dst, box in problem.atoms_from(point)
        for receiver in problem.needers.get(dst, ())
        if receiver not in holders
    ]


def _total(demands: Sequence[Demand]) -> int:
    return sum(volume(box) for _, box in demands)


def share(demands: Sequence[Demand], workers: Sequence[int]) -> list[tuple[int, Demand]]:
    """Deal demands out to workers in order, in equal element counts."""
    if len(workers) == 1:
        return [(workers[0], demand) for demand in demands]
    dealt, rest = deal(demands, workers, fair_shares(_total(demands), len(workers)))
    assert not rest, "fair shares cover all demands"
    return dealt


def deal(
    demands: Sequence[Demand], workers: Sequence[int], shares: Sequence[int]
) -> tuple[list[tuple[int, Demand]], list[Demand]]:
    """Deal demands out to workers in order, ``shares`` elements each; returns what is dealt and what is left over.

    A box is cut where shares end, into all its parts at once.
    """
    left = list(shares)
    dealt: list[tuple[int, Demand]] = []
    rest: list[Demand] = []
    worker = 0
    for key, box in demands:
        total = volume(box)
        points, takers = [0], []
        while points[-1] < total:
            while worker < len(workers) and not left[worker]:
                worker += 1
            if worker == len(workers):
                points.append(total)
                break
            amount = min(left[worker], total - points[-1])
            left[worker] -= amount
            points.append(points[-1] + amount)
            takers.append(workers[worker])
        parts = cut(box, points)
        dealt += ((taker, (key, part)) for taker, boxes in zip(takers, parts) for part in boxes)
        rest += ((key, part) for boxes in parts[len(takers) :] for part in boxes)
    return dealt, rest


def _share_near(
    demands: Sequence[Demand], holders: Sequence[int], topology: Topology, limit: int | None
) -> list[tuple[int, Demand]]:
    """Deal demands out to the nearest holders that still have room below ``limit``, evenly among equally near ones.

    Receivers of one group have the same near holders, so serving level after level, innermost first, keeps as much
    traffic as possible inside every level.
    """
    taken = dict.fromkeys(holders, 0)
    dealt: list[tuple[int, Demand]] = []
    rest = list(demands)
    # outside of the outermost level all are near
    for group_of in [*(level.group_of for level in topology.levels), lambda _: 0]:
        inside: dict[int, list[int]] = {}
        for holder in holders:
            inside.setdefault(group_of(holder), []).append(holder)
        groups: dict[tuple[int, ...], list[Demand]] = {}
        for demand in rest:
            groups.setdefault(tuple(inside.get(group_of(demand[0]), ())), []).append(demand)
        rest = groups.pop((), [])
        for near, asked in groups.items():
            served, unserved = deal(asked, near, take_more(taken, near, _total(asked), limit))
            dealt += served
            rest += unserved
    assert not rest, "the limit leaves room for every demand"
    return dealt


def take_more(taken: dict[int, int], ranks: Sequence[int], amount: int, limit: int | None = None) -> list[int]:
    """Add ``amount`` to what ``ranks`` have ``taken``, so that the largest sum is smallest; returns each rank's share.

    With a limit the shares themselves are as equal as possible, no sum is above the limit, and what does not fit is not
    dealt out.
    """
    before = [taken[rank] for rank in ranks]
    if before.count(before[0]) == len(before):
        room = amount if limit is None else (limit - before[0]) * len(before)
        shares = fair_shares(min(amount, room), len(before))
    elif limit is None:
        shares = level_shares(amount, before)
    else:
        shares = even_shares(amount, [limit - already for already in before])
    for rank, more in zip(ranks, shares):
        taken[rank] += more
    return shares


def even_shares(total: int, rooms: Sequence[int]) -> list[int]:
    """Shares as equal as ``rooms`` allow; their sum is ``total``, or all rooms together if that is less."""
    shares = [0] * len(rooms)
    left = min(total, sum(rooms))
    while left:
        open_ones = [k for k, room in enumerate(rooms) if shares[k] < room]
        for k, more in zip(open_ones, fair_shares(left, len(open_ones))):
            taken = min(more, rooms[k] - shares[k])
            shares[k] += taken
            left -= taken
    return shares


def level_shares(total: int, taken: Sequence[int]) -> list[int]:
    """Shares of ``total`` with which the largest sum of a share and what is already taken is smallest."""
    level = -(-(total + sum(taken)) // len(taken))
    return even_shares(total, [max(0, level - amount) for amount in taken])
