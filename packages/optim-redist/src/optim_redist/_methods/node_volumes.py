"""What the hierarchical exchange moves between and inside the groups of one level, computed without its transfers.

Notation: m ranks of group g need target point j, and of its |D_j| elements h are held in g. Then

    fetched into g    |D_j| - h, in equal shares by the m ranks                           first exchange
    shared inside     each share again, by its fetcher to the m - 1 others                second exchange
    from inside g     h less what a needer has itself, from the holders in g              first exchange

and of source part i its holders send, once for every target point and group without a holder,

    Σ_{j} (groups that need j)·|B(i, j)| - Σ_{g with a holder} Σ_{j needed in g} |B(i, j)|.

Holders even out what they send, counting what they share later, as in ``hierarchical``'s lists of transfers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from optim_redist._inside import Inside, shared
from optim_redist._methods.direct import take_more
from optim_redist.boxes import fair_shares
from optim_redist.cost import Topology
from optim_redist.moves import Volumes
from optim_redist.problem import Point, Problem


class Nodes(NamedTuple):
    """The exchanges of a hierarchical plan, and for every group the elements that go into it and out of it."""

    exchanges: list[Volumes]
    crossed: list[tuple[Inside, int, int]]


def node_volumes(problem: Problem, topology: Topology, target: int) -> Nodes | None:
    """What the hierarchical plan moves; None if only its list of transfers tells.

    That is so with several levels, and if holders inside a group would send more than ``target``, so that needers
    forward for them.
    """
    levels = problem.groups(topology).levels
    if len(levels) != 1:
        return None
    ((level, groups),) = levels.items()
    sending = dict.fromkeys(problem.ranks, 0)
    fetch, share = Volumes("fetch", {}, {}, {}), Volumes("share", {}, {}, {})
    inbound = [_fetch(problem, group, fetch, share, sending) for group in groups]
    for group in groups:
        for part, ranks in group.holders.items():
            asked = group.demand_here[part]
            if asked:
                if asked + sum(sending[rank] for rank in ranks) > target * len(ranks):
                    return None
                _send(fetch, sending, ranks, asked)
    leaving: dict[int, int] = {}
    for point, demand in _asked_from_outside(problem, groups).items():
        if demand:
            holders = problem.holders[point, 0]
            leaving.update(zip(holders, _send(fetch, sending, holders, demand)))
    outbound = [sum(leaving.get(rank, 0) for rank in group.ranks) for group in groups]
    widest = max(*inbound, *outbound)
    if widest:
        fetch.borders[level] = widest
    return Nodes([fetch, share] if share.sent else [fetch], list(zip(groups, inbound, outbound)))


def _fetch(problem: Problem, group: Inside, fetch: Volumes, share: Volumes, sending: dict[int, int]) -> int:
    """Record what the ranks of a group receive and share; returns the elements that enter the group."""
    kept, needed, held = problem.num_kept, problem.needed_sizes, group.held_of_target
    entering = 0
    for point, members in group.needers.items():
        missing = needed[point] - held[point]
        entering += missing
        others = len(members) - 1
        for rank, amount in zip(members, fair_shares(missing, len(members))):
            fetch.received[rank] = amount + held[point] - kept.get(rank, 0)
            if missing and others:
                share.received[rank] = missing - amount
                share.sent[rank] = amount * others
                sending[rank] += amount * others
    return entering


def _send(exchange: Volumes, sending: dict[int, int], ranks: Sequence[int], amount: int) -> list[int]:
    """Deal ``amount`` out to senders so that their sums are as even as possible; returns each one's share."""
    shares = take_more(sending, ranks, amount)
    for rank, more in zip(ranks, shares):
        exchange.sent[rank] = exchange.sent.get(rank, 0) + more
    return shares


def _asked_from_outside(problem: Problem, groups: Sequence[Inside]) -> dict[Point, int]:
    """For every source point, the elements that go to groups in which no rank holds it."""
    times = Counter(point for group in groups for point in group.targets)
    found = dict.fromkeys(problem.held_sizes, 0)
    for count in set(times.values()):
        alike = [point for point, n in times.items() if n == count]
        for point, size in shared(problem, found, alike).items():
            found[point] += count * size
    for group in groups:
        for point, size in group.needed_of_source.items():
            found[point] -= size
    return found
