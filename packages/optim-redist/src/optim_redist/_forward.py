"""Two hops where one keeps a holder too busy: needers forward what several of them want.

In one exchange the h holders of a source point send each of its elements once to every needer. Where that is more than
h·L, L being the bound, some elements that q >= 2 ranks need are sent to one of them only, which forwards them in a
second exchange: the holders save q - 1 transfers, the forwarder makes as many, and every rank receives what it needs,
once, as before. A forwarder may be a holder of other elements and have to pass on some of its own sending in turn, so
who forwards how much is a maximum flow, in transfers:

    points that send too much → what is asked of them → its needers → the points that these hold → room below h·L
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from optim_redist._direct import Demand, deal, even_shares, stays
from optim_redist._flow import Network, add_edge, saturate
from optim_redist.boxes import Box, cut, volume
from optim_redist.moves import Phase, Transfer
from optim_redist.problem import Point, Problem

_SOURCE, _SINK = "source", "sink"


@dataclass(frozen=True)
class _Asked:
    """A box of one source point, and the ranks outside of it that need the box."""

    point: Point
    box: Box
    ranks: tuple[int, ...]

    @property
    def saved(self) -> int:
        """Transfers that the holders save for every element that one of the ranks forwards."""
        return len(self.ranks) - 1


def forward_phases(problem: Problem, target: int) -> list[Phase]:
    """The exchange with every rank sending no more than ``target`` elements, as far as forwarding allows."""
    asked = [found for point, _ in problem.holders for found in _asked_of(problem, point)]
    first: list[Transfer] = [*stays(problem)]
    second: list[Transfer] = []
    demands: dict[Point, list[Demand]] = {point: [] for point, _ in problem.holders}
    taken = dict.fromkeys(problem.ranks, 0)
    for item, flows in zip(asked, _flows(problem, asked, target)):
        for forwarder, served, part in _split(item, flows):
            demands[item.point] += ((rank, part) for rank in item.ranks if rank not in served)
            second += (Transfer(forwarder, rank, part, "dst") for rank in served)
            taken[forwarder] += volume(part) * len(served)
    for (point, _), holders in problem.holders.items():
        if len(holders) == 1:
            dealt = [(holders[0], demand) for demand in demands[point]]
        else:
            total = sum(volume(box) for _, box in demands[point])
            dealt, _ = deal(demands[point], holders, _level_shares(total, [taken[rank] for rank in holders]))
        first += (Transfer(sender, receiver, box) for sender, (receiver, box) in dealt)
    return [Phase.of("exchange", first), Phase.of("forward", second)]


def _asked_of(problem: Problem, point: Point) -> Iterable[_Asked]:
    holders = problem.holders[point, 0]
    for dst, box in problem.atoms_from(point):
        ranks = tuple(rank for rank in problem.needers.get(dst, ()) if rank not in holders)
        if ranks:
            yield _Asked(point, box, ranks)


def _flows(problem: Problem, asked: Sequence[_Asked], target: int) -> list[list[int]]:
    """For every box, how many transfers each of its needers takes over."""
    demand: dict[Point, int] = {point: 0 for point, _ in problem.holders}
    for item in asked:
        demand[item.point] += volume(item.box) * len(item.ranks)
    network: Network = {}
    for (point, _), holders in problem.holders.items():
        room = target * len(holders) - demand[point]
        if room < 0:
            add_edge(network, _SOURCE, point, -room)
        else:
            add_edge(network, point, _SINK, room)
    for k, item in enumerate(asked):
        if item.saved:
            add_edge(network, item.point, k, volume(item.box) * item.saved)
            for rank in item.ranks:
                add_edge(network, k, ("rank", rank), volume(item.box) * item.saved)
    for rank in problem.ranks:
        # a rank without a part of the source has all its room for forwarding
        held: Hashable = problem.src_points.get(rank, _SINK)
        add_edge(network, ("rank", rank), held, target)
    saturate(network, _SOURCE, _SINK)
    # what flows into a rank is the room that has appeared behind it
    return [[network["rank", rank].get(k, 0) for rank in item.ranks] for k, item in enumerate(asked)]


def _split(item: _Asked, flows: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...], Box]]:
    """Who forwards which part of a box to whom; the parts that nobody forwards come with no one to serve.

    A forwarder takes all other needers of as many elements as its transfers allow, and some of them of one more.
    """
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


def _level_shares(total: int, taken: Sequence[int]) -> list[int]:
    """Shares of a total that make all sums of share and what is taken already as equal as they can be."""
    level = -(-(total + sum(taken)) // len(taken))
    while True:
        rooms = [max(0, level - amount) for amount in taken]
        if sum(rooms) >= total:
            return even_shares(total, rooms)
        level += -(-(total - sum(rooms)) // len(taken))
