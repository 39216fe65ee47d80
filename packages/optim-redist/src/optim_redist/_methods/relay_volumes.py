"""What a reduction in two hops moves, computed without its transfers.

Notation: source point i and target point j share |B| elements with m contributions and q needers. An owner o receives
its share f(o) of them from every contributor and hands it on to every needer, itself excepted. With f(g) the sum of f
over owners in group g, and m(g) and q(g) the numbers of contributors and needers in g, this moves

    reduce    f(g)·(m - m(g))  into g,    m(g)·(|B| - f(g))  out of it
    share     q(g)·(|B| - f(g)),          f(g)·(q - q(g)).

Where h ranks hold each contribution, the k-th of them sends the k-th of h parts of every box of f(o), and an owner
receives nothing of the contribution that it holds itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from optim_redist.boxes import cut, fair_shares, volume
from optim_redist.cost import Topology
from optim_redist.index_sets import interval
from optim_redist.moves import Volumes, added_up
from optim_redist.problem import Point, Problem

_FLAT = Topology()


def relay_volumes(problem: Problem, topology: Topology = _FLAT) -> tuple[bool, list[Volumes]]:
    """The better choice of owners: whether contributors are preferred, and what the two exchanges then move."""
    choices = [(choice, _volumes(problem, topology, choice)) for choice in (True, False)]
    return min(choices, key=lambda found: most_moved([v.sent for v in found[1]], [v.received for v in found[1]]))


def most_moved(sent: Sequence[Mapping[int, int]], received: Sequence[Mapping[int, int]]) -> int:
    """What the busiest rank sends or receives in several exchanges together."""
    return max([*added_up(sent).values(), *added_up(received).values()], default=0)


def owners_of(problem: Problem, src: Point, needers: Sequence[int], prefer_contributors: bool) -> Sequence[int]:
    """The ranks that combine what a source point and a target point share."""
    if not prefer_contributors:
        return needers
    points = problem.src_points
    return [rank for rank in needers if points.get(rank) == src] or needers


def _volumes(problem: Problem, topology: Topology, prefer_contributors: bool) -> list[Volumes]:
    count, replicas, points = problem.num_contributions, problem.src_replicas, problem.src_points
    contributed, combined, shared, arrived = (Counter[int]() for _ in range(4))
    # into and out of each group of each level
    borders = [[[Counter[int](), Counter[int]()] for _ in topology.levels] for _ in ("reduce", "share")]
    givers = {src: [problem.holders[src, c] for c in range(count)] for src, _ in problem.holders}
    # by level, source point and k: how many of the k-th holders of its contributions are in each group
    grouped = [
        {src: [Counter(map(level.group_of, ranks)) for ranks in zip(*giving)] for src, giving in givers.items()}
        for level in topology.levels
    ]
    for dst, needers in problem.needers.items():
        needing = [Counter(map(level.group_of, needers)) for level in topology.levels]
        for src, _ in problem.atoms_to(dst):
            giving = givers[src]
            owners = owners_of(problem, src, needers, prefer_contributors)
            sizes = tuple([o.common[i][j] for o, i, j in zip(problem.overlaps, src, dst)])
            sent, amounts, parts = _parts(sizes, len(owners), replicas)
            shares, total = dict(zip(owners, amounts)), sum(sent)
            own = [(o, parts[k], giving[problem.contribution[o]]) for k, o in enumerate(owners) if points.get(o) == src]
            for owner, amount in shares.items():
                combined[owner] += amount * count
                shared[owner] += amount * (len(needers) - 1)
            for holders in giving:
                for rank, amount in zip(holders, sent):
                    contributed[rank] += amount
            for owner, part, holders in own:
                combined[owner] -= shares[owner]
                for rank, amount in zip(holders, part):
                    contributed[rank] -= amount
            for rank in needers:
                arrived[rank] += total - shares.get(rank, 0)
            for level, held, needed, reducing, sharing in zip(topology.levels, grouped, needing, *borders):
                groups = list(map(level.group_of, owners))
                for k, amount in enumerate(sent):
                    _cross(reducing, _summed(groups, [part[k] for part in parts]), held[src][k], amount)
                for owner, part, holders in own:
                    here = level.group_of(owner)
                    for rank, amount in zip(holders, part):
                        if (there := level.group_of(rank)) != here:
                            reducing[0][here] -= amount
                            reducing[1][there] -= amount
                # owners send here, so into and out of are exchanged
                _cross(sharing[::-1], _summed(groups, shares.values()), needed, total)
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


@lru_cache(maxsize=64)
def _parts(sizes: tuple[int, ...], num_owners: int, replicas: int) -> tuple[list[int], list[int], list[list[int]]]:
    """Of a box: what each holder of a contribution sends, what each owner gets, and what it gets from each holder."""
    box = tuple(interval(0, size) for size in sizes)
    shares = cut(box, [0, *accumulate(fair_shares(volume(box), num_owners))])
    # a share may be several boxes, and each of these is dealt out
    dealt = [[fair_shares(volume(part), replicas) for part in boxes] for boxes in shares]
    parts = [list(map(sum, zip([0] * replicas, *boxes))) for boxes in dealt]
    return list(map(sum, zip(*parts))), list(map(sum, parts)), parts


def _summed(groups: Iterable[int], amounts: Iterable[int]) -> Counter[int]:
    found = Counter[int]()
    for group, amount in zip(groups, amounts):
        found[group] += amount
    return found


def _cross(crossing: Sequence[Counter[int]], owned: Counter[int], others: Counter[int], total: int) -> None:
    """Record what crosses borders if each of ``others``, counted by group, sends every owner its part of ``total``."""
    into, out = crossing
    count = sum(others.values())
    for group, amount in owned.items():
        into[group] += amount * (count - others[group])
    for group, number in others.items():
        out[group] += number * (total - owned[group])
