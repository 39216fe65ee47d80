"""Several hops where a single one keeps a holder too busy: needers forward what several of them need.

In one exchange the h holders of a source point send each of its elements once to every needer. If that is more than
h·L, with L the bound, some of an element's q needers get it from other needers: it travels along a tree whose root is
a holder. It still takes q transfers in all, a needer with c children saves the holders c of them, and every rank
receives what it needs once, as before. Any out-degrees that leave the root one child or more belong to some tree, so a
maximum flow decides how many transfers each rank makes,

    holders that send too much → box asked of them → its needers → the holder sets they belong to → room below h·L

since a forwarder may itself hold other elements and have to leave some of its own sending to others in turn. If the
flow cannot bring every rank down to L, L is raised to the least volume that it can reach: in no plan where only needers
forward is the busiest rank less busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from optim_redist._methods.direct import Demand, deal, level_shares, stays
from optim_redist._methods.flow import Network, add_edge, saturate
from optim_redist.boxes import Box, cut, volume
from optim_redist.moves import Phase, Transfer
from optim_redist.problem import Point, Problem

_SOURCE, _SINK = "source", "sink"
Holders = tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """A box that some ranks hold alike, and the other ranks that need it from them."""

    holders: Holders
    box: Box
    ranks: tuple[int, ...]

    @property
    def saved(self) -> int:
        """Transfers that the holders save for every element that one of the ranks forwards to all others."""
        return len(self.ranks) - 1


def forward_phases(problem: Problem, target: int) -> list[Phase]:
    """The exchange with every rank sending no more than ``target`` elements, or as few as forwarding allows."""
    asked = [found for point, _ in problem.holders for found in _asked_of(problem, point)]
    first, *later = relieved(asked, target, dict.fromkeys(problem.ranks, 0))
    return [Phase.of("exchange", [*stays(problem), *first]), *(Phase.of("forward", hop) for hop in later)]


def _asked_of(problem: Problem, point: Point) -> Iterable[Asked]:
    holders = tuple(problem.holders[point, 0])
    for dst, box in problem.atoms_from(point):
        ranks = tuple(rank for rank in problem.needers.get(dst, ()) if rank not in holders)
        if ranks:
            yield Asked(holders, box, ranks)


def relieved(asked: Sequence[Asked], target: int, sending: dict[int, int]) -> list[list[Transfer]]:
    """The transfers of each hop, first those of holders, then of forwarders, with no rank sending more than ``target``.

    Args:
        asked: boxes with their needers; any two sets of holders are equal or disjoint.
        target: elements that a rank may send; exceeded by as little as possible if forwarding is not enough.
        sending: what every rank sends besides; what it sends here is added.
    """
    hops: list[list[Transfer]] = [[]]
    demands: dict[Holders, list[Demand]] = {item.holders: [] for item in asked}
    for item, flows in zip(asked, _least_flows(asked, target, sending)):
        for part, degrees in _parts(item, flows):
            for sender, receiver, hop in _tree(item.ranks, degrees):
                if sender is None:
                    demands[item.holders].append((receiver, part))
                    continue
                while len(hops) <= hop:
                    hops.append([])
                hops[hop].append(Transfer(sender, receiver, part, "dst"))
        for rank, flow in zip(item.ranks, flows):
            sending[rank] += flow
    for holders, found in demands.items():
        total = sum(volume(box) for _, box in found)
        shares = level_shares(total, [sending[rank] for rank in holders])
        dealt = [(holders[0], demand) for demand in found] if len(holders) == 1 else deal(found, holders, shares)[0]
        hops[0] += (Transfer(sender, receiver, box) for sender, (receiver, box) in dealt)
        for rank, amount in zip(holders, shares):
            sending[rank] += amount
    return hops


def _least_flows(asked: Sequence[Asked], target: int, sending: Mapping[int, int]) -> list[list[int]]:
    """For every box, how many transfers each of its needers takes over, for the least reachable target.

    Targets are searched by bisection, to whole elements or to one in a hundred.
    """
    demand: dict[Holders, int] = {}
    for item in asked:
        demand[item.holders] = demand.get(item.holders, 0) + volume(item.box) * len(item.ranks)
    found = _flows(asked, demand, target, sending)
    if found is not None:
        return found
    too_low = target
    loads = [-(-(n + sum(sending[rank] for rank in holders)) // len(holders)) for holders, n in demand.items()]
    reached = max(*loads, *sending.values())
    flows = [[0] * len(item.ranks) for item in asked]
    while reached - too_low > max(1, too_low // 100):
        middle = (too_low + reached) // 2
        found = _flows(asked, demand, middle, sending)
        if found is None:
            too_low = middle
        else:
            reached, flows = middle, found
    return flows


def _flows(
    asked: Sequence[Asked], demand: Mapping[Holders, int], target: int, sending: Mapping[int, int]
) -> list[list[int]] | None:
    """For every box, how many transfers each of its needers takes over; None if that leaves a rank above the target."""
    network: Network = {}
    excess = 0
    for holders, amount in demand.items():
        room = target * len(holders) - amount - sum(sending[rank] for rank in holders)
        if room < 0:
            add_edge(network, _SOURCE, holders, -room)
            excess -= room
        else:
            add_edge(network, holders, _SINK, room)
    if not excess:
        return [[0] * len(item.ranks) for item in asked]
    for k, item in enumerate(asked):
        if item.saved:
            add_edge(network, item.holders, k, volume(item.box) * item.saved)
            for rank in item.ranks:
                add_edge(network, k, ("rank", rank), volume(item.box) * item.saved)
    # a rank of which nothing is asked has all its room for forwarding
    holders_of: dict[int, Hashable] = {rank: holders for holders in demand for rank in holders}
    for rank, amount in sending.items():
        add_edge(network, ("rank", rank), holders_of.get(rank, _SINK), max(0, target - amount))
    if saturate(network, _SOURCE, _SINK) < excess:
        return None
    # the flow from k into a rank is the capacity that has appeared from the rank back to k
    return [[network["rank", rank].get(k, 0) for rank in item.ranks] for k, item in enumerate(asked)]


def _parts(item: Asked, flows: Sequence[int]) -> Iterator[tuple[Box, dict[int, int]]]:
    """A box cut into parts, each with the number of transfers that forwarders make for every element of it.

    A forwarder serves all other needers for as many elements as its flow allows, and some of them for one more element.
    If there are too few elements for that, the remaining elements have several forwarders.
    """
    if not any(flows):
        yield item.box, {}
        return
    counts: list[int] = []
    degrees: list[dict[int, int]] = []
    rests: list[tuple[int, int]] = []
    for rank, flow in zip(item.ranks, flows):
        whole, rest = divmod(flow, item.saved)
        if whole:
            counts.append(whole)
            degrees.append({rank: item.saved})
        if rest:
            rests.append((rank, rest))
    left = volume(item.box) - sum(counts)
    shared = [dict([rest]) for rest in rests] if len(rests) <= left else _fill(rests, item.saved)
    counts += [1] * len(shared) + [left - len(shared)]
    degrees += [*shared, {}]
    for parts, degree in zip(cut(item.box, [0, *accumulate(counts)]), degrees):
        yield from ((part, degree) for part in parts)


def _fill(rests: Sequence[tuple[int, int]], room: int) -> list[dict[int, int]]:
    """The forwarders' remaining transfers, packed into as few elements as possible, at most ``room`` per element."""
    found: list[dict[int, int]] = [{}]
    left = room
    for rank, rest in rests:
        while rest:
            if not left:
                found.append({})
                left = room
            taken = min(rest, left)
            found[-1][rank] = taken
            rest, left = rest - taken, left - taken
    return found


def _tree(ranks: Sequence[int], degrees: Mapping[int, int]) -> Iterator[tuple[int | None, int, int]]:
    """(sender, receiver, hop) for every rank of a shallow tree with these out-degrees; a sender None is a holder."""
    slots: deque[tuple[int | None, int]] = deque([(None, 0)] * (len(ranks) - sum(degrees.values())))
    for rank in sorted(ranks, key=lambda rank: -degrees.get(rank, 0)):
        sender, hop = slots.popleft()
        yield sender, rank, hop
        slots.extend([(rank, hop + 1)] * degrees.get(rank, 0))
