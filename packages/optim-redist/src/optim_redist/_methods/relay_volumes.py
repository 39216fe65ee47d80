"""What a reduction in two hops moves, without listing a transfer, where every contribution has one holder.

Notation: source point i and target point j share |B| elements with m contributions and q needers. An owner o receives
its share f(o) of them from every contributor and hands it on to every needer, itself excepted. With f(g), m(g) and q(g)
summed and counted in group g, this brings

    reduce    f(g)·(m - m(g))  into g,    m(g)·(|B| - f(g))  out of it
    share     q(g)·(|B| - f(g)),          f(g)·(q - q(g)).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from optim_redist.boxes import fair_shares
from optim_redist.cost import Topology
from optim_redist.moves import Volumes, added_up
from optim_redist.problem import Point, Problem

_FLAT = Topology()


def relay_volumes(problem: Problem, topology: Topology = _FLAT) -> tuple[bool, list[Volumes]]:
    """The better choice of owners, whether contributors are preferred, and what its two exchanges move."""
    choices = [(choice, _volumes(problem, topology, choice)) for choice in (True, False)]
    return min(choices, key=lambda found: most_moved([v.sent for v in found[1]], [v.received for v in found[1]]))


def most_moved(sent: Sequence[Mapping[int, int]], received: Sequence[Mapping[int, int]]) -> int:
    """What the busiest rank sends or receives in several exchanges together."""
    return max([*added_up(sent).values(), *added_up(received).values()], default=0)


def owners_of(problem: Problem, src: Point, needers: Sequence[int], prefer_contributors: bool) -> Sequence[int]:
    """Who combines what a source point and a target point share."""
    if not prefer_contributors:
        return needers
    return [rank for rank in needers if problem.src_points.get(rank) == src] or needers


def _volumes(problem: Problem, topology: Topology, prefer_contributors: bool) -> list[Volumes]:
    assert problem.src_replicas == 1, "several holders share what is asked of each box"
    contributors: dict[Point, list[int]] = {}
    for (src, _), (holder,) in problem.holders.items():
        contributors.setdefault(src, []).append(holder)
    contributed, combined, shared, arrived = (Counter[int]() for _ in range(4))
    # into and out of each group of each level
    borders = [[[Counter[int](), Counter[int]()] for _ in topology.levels] for _ in ("reduce", "share")]
    for dst, needers in problem.needers.items():
        for src, _ in problem.atoms_to(dst):
            total, giving = problem.num_common(src, dst), contributors[src]
            owners = owners_of(problem, src, needers, prefer_contributors)
            shares = dict(zip(owners, fair_shares(total, len(owners))))
            for owner, amount in shares.items():
                combined[owner] += amount * len(giving)
                shared[owner] += amount * (len(needers) - 1)
            for rank in giving:
                own = shares.get(rank, 0)
                contributed[rank] += total - own
                combined[rank] -= own
            for rank in needers:
                arrived[rank] += total - shares.get(rank, 0)
            for level, reducing, sharing in zip(topology.levels, *borders):
                owned = Counter[int]()
                for owner, amount in shares.items():
                    owned[level.group_of(owner)] += amount
                _cross(reducing, owned, Counter(map(level.group_of, giving)), total)
                # from owners, the other way
                _cross(sharing[::-1], owned, Counter(map(level.group_of, needers)), total)
    widest = [
        {
            level.name: max(max(counts.values(), default=0) for counts in both)
            for level, both in zip(topology.levels, of)
        }
        for of in borders
    ]
    reduce_borders, share_borders = ({name: most for name, most in found.items() if most} for found in widest)
    return [
        Volumes("reduce", contributed, combined, reduce_borders, reduces=True),
        Volumes("share", shared, arrived, share_borders),
    ]


def _cross(crossing: Sequence[Counter[int]], owned: Counter[int], others: Counter[int], total: int) -> None:
    """Enter what goes from others, counted by group, to owners in other groups, what is owned being ``total``."""
    into, out = crossing
    count = sum(others.values())
    for group, amount in owned.items():
        into[group] += amount * (count - others[group])
    for group, number in others.items():
        out[group] += number * (total - owned[group])
