"""Two hops where one keeps a holder too busy: needers forward what several of them want.

In one exchange the h holders of a source point send each of its elements once to every needer. Where that is more than
h·L, L being the bound, some elements that q >= 2 ranks need are sent to one of them only, which forwards them in a
second exchange: the holders save q - 1 transfers, the forwarder makes as many, and every rank receives what it needs,
once, as before. A forwarder may be a holder of other elements and have to pass on some of its own sending in turn, so
who forwards how much is a maximum flow, in transfers:

    holders that send too much → what is asked of them → its needers → the holders that these are → room below h·L
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from optim_redist._direct import Demand, deal, level_shares, stays
from optim_redist._flow import Network, add_edge, saturate
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
        """Transfers that the holders save for every element that one of the ranks forwards."""
        return len(self.ranks) - 1


def forward_phases(problem: Problem, target: int) -> list[Phase]:
    """The exchange with every rank sending no more than ``target`` elements, as far as forwarding allows."""
    asked = [found for point, _ in problem.holders for found in _asked_of(problem, point)]
    first, second = relieved(asked, target, dict.fromkeys(problem.ranks, 0))
    return [Phase.of("exchange", [*stays(problem), *first]), Phase.of("forward", second)]


def _asked_of(problem: Problem, point: Point) -> Iterable[Asked]:
    holders = tuple(problem.holders[point, 0])
    for dst, box in problem.atoms_from(point):
        ranks = tuple(rank for rank in problem.needers.get(dst, ()) if rank not in holders)
        if ranks:
            yield Asked(holders, box, ranks)


def relieved(asked: Sequence[Asked], target: int, sending: dict[int, int]) -> tuple[list[Transfer], list[Transfer]]:
    """Transfers from the holders, and behind them those of forwarders, with no rank sending more than ``target``.

    Args:
        asked: sets of holders are equal or disjoint.
        target: what a rank may send, as far as forwarding allows.
        sending: what every rank sends besides; what it sends here is added.
    """
    first: list[Transfer] = []
    second: list[Transfer] = []
    demands: dict[Holders, list[Demand]] = {item.holders: [] for item in asked}
    for item, flows in zip(asked, _flows(asked, target, sending)):
        for forwarder, served, part in _split(item, flows):
            demands[item.holders] += ((rank, part) for rank in item.ranks if rank not in served)
            second += (Transfer(forwarder, rank, part, "dst") for rank in served)
            sending[forwarder] += volume(part) * len(served)
    for holders, found in demands.items():
        total = sum(volume(box) for _, box in found)
        shares = level_shares(total, [sending[rank] for rank in holders])
        dealt = [(holders[0], demand) for demand in found] if len(holders) == 1 else deal(found, holders, shares)[0]
        first += (Transfer(sender, receiver, box) for sender, (receiver, box) in dealt)
        for rank, amount in zip(holders, shares):
            sending[rank] += amount
    return first, second


def _flows(asked: Sequence[Asked], target: int, sending: Mapping[int, int]) -> list[list[int]]:
    """For every box, how many transfers each of its needers takes over."""
    demand: dict[Holders, int] = {}
    for item in asked:
        demand[item.holders] = demand.get(item.holders, 0) + volume(item.box) * len(item.ranks)
    network: Network = {}
    for holders, amount in demand.items():
        room = target * len(holders) - amount - sum(sending[rank] for rank in holders)
        if room < 0:
            add_edge(network, _SOURCE, holders, -room)
        else:
            add_edge(network, holders, _SINK, room)
    for k, item in enumerate(asked):
        if item.saved:
            add_edge(network, item.holders, k, volume(item.box) * item.saved)
            for rank in item.ranks:
                add_edge(network, k, ("rank", rank), volume(item.box) * item.saved)
    # a rank that nothing is asked of has all its room for forwarding
    holders_of: dict[int, Hashable] = {rank: holders for holders in demand for rank in holders}
    for rank, amount in sending.items():
        add_edge(network, ("rank", rank), holders_of.get(rank, _SINK), max(0, target - amount))
    saturate(network, _SOURCE, _SINK)
    # what flows into a rank is the room that has appeared behind it
    return [[network["rank", rank].get(k, 0) for rank in item.ranks] for k, item in enumerate(asked)]


def _split(item: Asked, flows: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...], Box]]:
    """Who forwards which part of a box to whom; the parts that nobody forwards come with no one to serve.

    A forwarder takes all other needers of as many elements as its transfers allow, and some of them of one more.
    """
    if not any(flows):
        yield item.ranks[0], (), item.box
        return
    points, roles = [0], []
    for k, (rank, flow) in enumerate(zip(item.ranks, flows)):
        others = item.ranks[k + 1 :] + item.ranks[:k]
        whole, rest = divmod(flow, item.saved) if flow else (0, 0)
        for amount, served in ((whole, others), (min(rest, 1), others[:rest])):
            points.append(min(points[-1] + amount, volume(item.box)))
            roles.append((rank, served))
    points.append(volume(item.box))
    roles.append((item.ranks[0], ()))
    for (rank, served), parts in zip(roles, cut(item.box, points)):
        yield from ((rank, served, part) for part in parts)
