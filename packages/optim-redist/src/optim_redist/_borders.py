"""How much one exchange straight from holders brings across every border, without listing a transfer.

Each group serves its own ranks first, level by level from the innermost, as far as its holders have room below a
limit. Of a part i with demand A(g) from ranks of group g that do not hold it, its holders in g serve S(g), so

    In(g)  = Σ_r (what r lacks) - Σ_i S_i(g)          Out(g) = Σ_i ( what holders in g send - S_i(g) )

Where all holders of every part lie in one innermost group S = A. Where they lie in several, they are dealt with one
level at a time, as ``_direct`` deals out boxes.
"""

from __future__ import annotations

from collections.abc import Sequence

from optim_redist._direct import take_more
from optim_redist._inside import Inside, Part
from optim_redist.cost import Topology
from optim_redist.moves import Phase, Volumes
from optim_redist.problem import Problem


def crossings(problem: Problem, topology: Topology, limit: int | None) -> tuple[dict[str, int], int]:
    """What crosses borders in the direct exchange in which no rank sends more than ``limit``, None for any amount.

    Returns, for every level with traffic across it, the elements into or out of the group where most cross; and what
    the busiest rank sends of parts whose holders lie in several groups.
    """
    divided = problem.groups(topology)
    levels = divided.levels
    inbound = [[group.lacking for group in groups] for groups in levels.values()]
    busiest = 0
    if not divided.spread:
        outbound = [[group.leaving for group in groups] for groups in levels.values()]
    else:
        outbound = [[0] * len(groups) for groups in levels.values()]
        kept, held = problem.num_kept, problem.held_sizes
        places: dict[Part, list[list[tuple[int, Inside]]]] = {part: [[] for _ in levels] for part in problem.holders}
        for depth, groups in enumerate(levels.values()):
            for k, group in enumerate(groups):
                for part in group.holders:
                    places[part][depth].append((k, group))
        for part, holders in problem.holders.items():
            demand = held[part[0]] * problem.dst_replicas - sum(kept.get(rank, 0) for rank in holders)
            taken, served = _deal(part, holders, demand, places[part], limit)
            busiest = max(busiest, *taken.values())
            for depth, k, ranks, asked, inside in served:
                inbound[depth][k] += asked - inside
                outbound[depth][k] += sum(taken[rank] for rank in ranks) - inside
    widest = [max(*into, *out) for into, out in zip(inbound, outbound)]
    return {name: most for name, most in zip(levels, widest) if most}, busiest


def _deal(
    part: Part, holders: Sequence[int], demand: int, places: Sequence[Sequence[tuple[int, Inside]]], limit: int | None
) -> tuple[dict[int, int], list[tuple[int, int, list[int], int, int]]]:
    """What every holder of a part sends; and for each level and group its holders, what it asks for and gets inside."""
    taken = dict.fromkeys(holders, 0)
    served = []
    left = demand
    for depth, of_level in enumerate(places):
        for k, group in of_level:
            ranks, asked = group.holders[part], group.asked[part]
            before = sum(taken[rank] for rank in ranks)
            more = sum(take_more(taken, ranks, asked - before, limit)) if asked > before else 0
            served.append((depth, k, ranks, asked, before + more))
            left -= more
    if left:
        take_more(taken, holders, left, limit)
    return taken, served


def listed(phase: Phase, topology: Topology) -> Volumes:
    """What a list of transfers moves."""
    borders: dict[str, int] = {}
    for (level, _), crossing in border_volumes(phase, topology).items():
        borders[level] = max(borders.get(level, 0), *crossing)
    reduces = any(transfer.contribution >= 0 for transfer in phase.transfers)
    return Volumes(phase.name, phase.sent(), phase.received(), borders, reduces)


def border_volumes(phase: Phase, topology: Topology) -> dict[tuple[str, int], list[int]]:
    """[inbound, outbound] elements of every group of every level in one phase."""
    found: dict[tuple[str, int], list[int]] = {}
    for (sender, receiver), count in phase.traffic.items():
        for level in topology.levels:
            a, b = level.group_of(sender), level.group_of(receiver)
            if a != b:
                found.setdefault((level.name, b), [0, 0])[0] += count
                found.setdefault((level.name, a), [0, 0])[1] += count
    return found
