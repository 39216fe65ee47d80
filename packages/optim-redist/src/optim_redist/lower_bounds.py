"""What no plan can beat.

Let H(e) be the holders of an element e and N(e) its needers; with a pending reduction e has several contributions,
each with its own holders. For any set of ranks g

    In(g)  = |{ e : some rank of g needs e, and some contribution of e has no holder in g }|
    Out(g) = In(all other ranks)

elements must enter and leave g. The busiest rank therefore moves at least

    LB = max( R, U, reduction ),     R = max_r In({r}),     U = max_g Out(g) / |g|,

where g is the set of all holders of one part of the source: what only they have, they have to send, one of them at
least the mean. (No other set gives more: In and Out of a union are at most the sums over the sets in it, and a set has
nothing of a part to itself unless it contains all holders of the part.)

Reductions without arithmetic in the network: an element with k >= 2 contributions of one holder each and q needers
takes at least k + q - 1 transfers, one less if a needer contributes; the sum over elements divided by the number of
ranks bounds what the busiest rank moves.

A plan in one step sends every element straight from a holder. All holders of one source point (and contribution)
share the same demand, so the least possible largest send is the largest of ceil(demand / holders).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from optim_redist._inside import Inside, Part
from optim_redist._mesh import as_shape, int_tuple
from optim_redist._tools.files import record, undamaged
from optim_redist.cost import Topology, check_topology
from optim_redist.errors import RedistError
from optim_redist.layout import Layout, PartialInit, check_layouts
from optim_redist.problem import Problem, check_partial_init

BoundKind = Literal["receive", "send", "reduction"]


class Cut(NamedTuple):
    """What must cross the border of one group of ranks.

    Attributes:
        level: name of the topology level the group belongs to, or "source" / "target".
        ranks: the group.
        inbound, outbound: elements that must enter and leave it.
        bandwidth: bytes per second through its border, None if the border is no bottleneck.
    """

    level: str
    ranks: tuple[int, ...]
    inbound: int
    outbound: int
    bandwidth: float | None = None


class Bounds(NamedTuple):
    """Lower bounds on a redistribution, in elements unless a name says otherwise.

    Attributes:
        recv: what the neediest rank must receive.
        send: what only the holders of one part have and others need, divided by the number of these holders.
        reduction: what the busiest rank must move to reduce, 0 without a reduction.
        lb: the largest of the three; ``lb_kind`` says which.
        direct_recv, direct_send: what the busiest ranks receive and send in the best plan of one step.
        cuts: the borders of the topology's groups, of the source's ranks and of the target's.
        memory: elements that the fullest rank holds of source and target together.
        live: elements of source or target, whichever is larger, on the rank where that is most.
        live_src: elements of the source on the fullest rank.
        seconds: least time, latency plus bytes over bandwidth of the busiest rank or the busiest border; 0 without a
            topology.
    """

    recv: int
    send: int
    reduction: int
    lb: int
    lb_kind: BoundKind
    direct_recv: int
    direct_send: int
    cuts: tuple[Cut, ...]
    memory: int
    live: int
    live_src: int
    seconds: float = 0.0

    @property
    def single_hop(self) -> int:
        """The busiest rank's volume in the best plan of one step."""
        return max(self.direct_recv, self.direct_send)

    def to_json(self) -> dict[str, Any]:
        """The bounds as plain data."""
        return {**self._asdict(), "cuts": [cut._asdict() for cut in self.cuts]}

    @classmethod
    @undamaged("the JSON of bounds")
    def from_json(cls, data: Mapping[str, Any]) -> Bounds:
        """The bounds that ``to_json`` wrote."""
        cuts = tuple(record(Cut, {**cut, "ranks": tuple(cut["ranks"])}) for cut in data["cuts"])
        return record(cls, {**data, "cuts": cuts})


def bounds(
    shape: Sequence[int],
    src: Layout,
    dst: Layout,
    topology: Topology | None = None,
    *,
    itemsize: int = 2,
    partial_init: PartialInit = "owner",
) -> Bounds:
    """Lower bounds that no plan from ``src`` to ``dst`` can beat.

    ``itemsize`` is the size of an element in bytes; only ``seconds`` depends on it. ``partial_init`` is as for
    ``plan``: with "divide" every rank needs the values of which it keeps a part, with "owner" one coordinate does.

    Raises:
        LayoutError: if a layout does not fit the shape, or is no ``Layout``.
        UnsupportedError: for an unknown ``partial_init``, or one that the target's pending reductions do not have.
        RedistError: if ``topology`` is none, or ``itemsize`` is no size.
    """
    check_layouts(src=src, dst=dst)
    check_partial_init(partial_init)
    check_topology(topology)
    if not isinstance(itemsize, int) or itemsize < 1:
        raise RedistError(f"itemsize must be a whole number of bytes, at least 1, got {itemsize!r}")
    return bounds_of(Problem(int_tuple(as_shape(shape), "sizes"), src, dst, partial_init), topology, itemsize=itemsize)


def bounds_of(problem: Problem, topology: Topology | None = None, *, itemsize: int = 2) -> Bounds:
    """The bounds of a problem that is already laid out."""
    recv, direct_recv = _receives(problem)
    send, direct_send = _sends(problem)
    memory, live = _stored(problem)
    reduction = _reduction_bound(problem)
    lb = max(recv, send, reduction)
    kind: BoundKind = "receive" if lb == recv else "send" if lb == send else "reduction"
    cuts = tuple(
        [
            # where no rank lacks anything, nothing has to cross a border, and it takes no counting
            Cut(level, group.ranks, *(group.crossing() if lb else (0, 0)), bandwidth)
            for level, group, bandwidth in _borders(problem, topology)
        ]
    )
    seconds = 0.0 if topology is None or not lb else _least_seconds(lb * itemsize, cuts, topology, itemsize)
    live_src = max(problem.held_sizes.values()) if not problem.is_even else problem.held_by_all
    return Bounds(recv, send, reduction, lb, kind, direct_recv, direct_send, cuts, memory, live, live_src, seconds)


def _least_seconds(num_bytes: int, cuts: Sequence[Cut], topology: Topology, itemsize: int) -> float:
    """What the busiest rank, or any border, needs for its bytes after the latency of its own level."""
    seconds = topology.latency + num_bytes / topology.rank_bandwidth
    latencies = {level.name: level.latency for level in topology.levels}
    for cut in cuts:
        crossing = max(cut.inbound, cut.outbound)
        if cut.bandwidth and crossing:
            seconds = max(seconds, latencies[cut.level] + crossing * itemsize / cut.bandwidth)
    return seconds


def _stored(problem: Problem) -> tuple[int, int]:
    """The most that any rank holds of source and target together, and of the larger of the two."""
    if problem.is_even:
        here, there = problem.held_by_all, problem.needed_by_all
        return here + there, max(here, there)
    stored = problem.num_stored.values()
    return max(map(sum, stored)), max(map(max, stored))


def _receives(problem: Problem) -> tuple[int, int]:
    """The largest In({r}), and what the busiest rank receives in a plan of one step."""
    if problem.is_even and problem.num_contributions == 1 and not problem.started:
        missing = problem.needed_by_all - min(problem.num_kept.values())
        return missing, missing
    needed, kept = problem.needed_sizes, problem.num_kept
    wanted = [needed[point] for point in problem.dst_points.values()]
    own = [kept.get(rank, 0) for rank in problem.dst_points]
    if problem.num_contributions == 1:
        missing = max(map(int.__sub__, wanted, own), default=0)
        return missing, missing
    contributed = [n * problem.num_contributions - part for n, part in zip(wanted, own)]
    return max(wanted, default=0), max(contributed, default=0)


def _sends(problem: Problem) -> tuple[int, int]:
    """The largest Out(g) / |g| over the holders g of a part, and what the busiest rank sends in a plan of one step.

    Holders of one part share its demand: what its needers want, less what holders among them have.
    """
    kept, needers, replicas = problem.num_kept, problem.dst_replicas, problem.src_replicas
    if problem.is_even and not problem.started and (needers == 1 or needers > replicas):
        # the demand for all parts is equal but for what their holders keep
        demand = problem.held_by_all * needers - min(kept.values() if replicas == 1 else _kept_by_holders(problem))
        direct = -(-demand // replicas)
        return direct if needers == 1 else -(-problem.held_by_all // replicas), direct
    held = problem.held_sizes
    if problem.src_replicas == 1:
        demands = [held[point] * needers - kept.get(rank, 0) for rank, point in problem.src_points.items()]
        direct = max(demands)
        # with two or more needers of every element, one of them is another rank
        return direct if needers == 1 else max(held.values()), direct
    least = direct = 0
    for (point, _), ranks in problem.holders.items():
        demand = held[point] * needers - sum(kept.get(rank, 0) for rank in ranks)
        leaving = demand if needers == 1 else held[point]
        if 1 < needers <= len(ranks):
            targets = Counter(problem.dst_points[rank] for rank in ranks if rank in problem.dst_points)
            leaving -= sum(problem.num_common(point, target) for target, n in targets.items() if n == needers)
        least = max(least, -(-leaving // len(ranks)))
        direct = max(direct, -(-demand // len(ranks)))
    return least, direct


def _kept_by_holders(problem: Problem) -> Collection[int]:
    """For every part, the elements that its holders keep, summed over them."""
    found = Counter[Part]()
    for rank, n in problem.num_kept.items():
        found[problem.part_of[rank]] += n
    return found.values()


def _reduction_bound(problem: Problem) -> int:
    """Transfers that a reduction takes, per rank, rounded up; 0 where contributions have several holders."""
    if problem.num_contributions == 1 or problem.src_replicas > 1:
        return 0
    contributing = {
        (problem.src_points[rank], point) for rank, point in problem.dst_points.items() if rank in problem.src_points
    }
    transfers = problem.num_elements * (problem.num_contributions + problem.dst_replicas - 1)
    transfers -= sum(problem.num_common(src, dst) for src, dst in contributing)
    return -(-transfers // len(problem.ranks))


def _borders(problem: Problem, topology: Topology | None) -> list[tuple[str, Inside, float | None]]:
    """(level, group, bandwidth) of the topology's groups, and of source and target if their ranks differ."""
    found: list[tuple[str, Inside, float | None]] = []
    if topology is not None and topology.levels:
        bandwidths = {level.name: level.bandwidth for level in topology.levels}
        for level, groups in problem.groups(topology).levels.items():
            found += [(level, group, bandwidths[level]) for group in groups]
    sources, targets = problem.src.mesh.ranks, problem.dst.mesh.ranks
    if sources != targets and set(sources) != set(targets):
        for side, ranks in (("source", sources), ("target", targets)):
            found.append((side, Inside(problem, tuple(sorted(ranks))), None))
    return found


def crossing(problem: Problem, ranks: Sequence[int]) -> tuple[int, int]:
    """(In, Out) of a group: elements that must enter it and that must leave it."""
    return Inside(problem, tuple(ranks)).crossing()


def least_inside_groups(problem: Problem, group_of: Callable[[int], int]) -> int:
    """What the busiest rank moves at least if no element enters a group that has it.

    Then a rank that lacks an element gets it from its own group if some rank there holds it. So the holders of a part
    in one group together send, at least once, what other ranks of the group need of it.
    """
    found = 0
    for (point, _), holders in problem.holders.items():
        inside: dict[int, list[int]] = {}
        for rank in holders:
            inside.setdefault(group_of(rank), []).append(rank)
        for group, ranks in inside.items():
            wanted = sum(
                problem.num_common(point, target)
                for target, needers in problem.needers.items()
                if any(group_of(rank) == group and rank not in holders for rank in needers)
            )
            found = max(found, -(-wanted // len(ranks)))
    return found
