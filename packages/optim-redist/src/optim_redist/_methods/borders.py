"""How much one exchange straight from holders brings across every border, computed without listing transfers.

Each group serves its own ranks first, level by level from the innermost, as far as its holders have room below a
limit. If ranks of group g that do not hold part i ask for A_i(g) elements of it, of which its holders in g serve
S_i(g), then

    In(g)  = Σ_r (what r lacks) - Σ_i S_i(g)          Out(g) = Σ_i ( what holders in g send - S_i(g) )

If all holders of every part lie in one innermost group, S = A. If they lie in several, demands are dealt out level by
level, as ``direct`` deals out boxes.
"""

from __future__ import annotations

from collections.abc import Sequence

from optim_redist._inside import Part
from optim_redist._methods.direct import take_more
from optim_redist.cost import Topology
from optim_redist.moves import FINISHED, Phase, Volumes
from optim_redist.problem import Problem


def crossings(problem: Problem, topology: Topology, limit: int | None) -> tuple[dict[str, int], int]:
    """Traffic across borders in the direct exchange in which no rank sends more than ``limit`` (None: any amount).

    Returns, for every level with traffic across borders, the elements into or out of the group where most cross; and
    what the busiest rank sends of parts whose holders lie in several groups.
    """
    divided = problem.groups(topology)
    levels = divided.levels
    inbound = [[group.direct_inbound for group in groups] for groups in levels.values()]
    busiest = 0
    if not divided.spread:
        outbound = [[group.direct_outbound for group in groups] for groups in levels.values()]
    else:
        outbound = [[0] * len(groups) for groups in levels.values()]
        places: dict[Part, list[_Place]] = {part: [] for part in problem.holders}
        for depth, groups in enumerate(levels.values()):
            for k, group in enumerate(groups):
                for part, asked in group.demand_here.items():
                    places[part].append((depth, k, group.holders[part], asked))
        for part, of_part in places.items():
            demand = problem.demand(part)
            if _served_at_once(of_part, demand, limit):
                busiest = max(busiest, *[-(-asked // len(ranks)) for _, _, ranks, asked in of_part])
                continue
            even = _even_rest(of_part, demand, limit) if len(levels) == 1 else None
            if even is not None:
                busiest = max(busiest, demand // len(problem.holders[part]))
                for depth, k, _, _ in of_part:
                    outbound[depth][k] += even
                continue
            taken, served = _deal(problem.holders[part], demand, of_part, limit)
            busiest = max(busiest, *taken.values())
            for (depth, k, ranks, asked), inside in zip(of_part, served):
                inbound[depth][k] += asked - inside
                outbound[depth][k] += sum(map(taken.__getitem__, ranks)) - inside
    widest = [max(*into, *out) for into, out in zip(inbound, outbound)]
    return {name: most for name, most in zip(levels, widest) if most}, busiest


# where a part has holders: depth of the level, number of the group, holders in it, elements that the group asks of them
_Place = tuple[int, int, list[int], int]


def _served_at_once(places: Sequence[_Place], demand: int, limit: int | None) -> bool:
    """Whether the innermost groups alone ask for a part, and their holders have room for it."""
    inner = [(len(ranks), asked) for depth, _, ranks, asked in places if depth == 0]
    within = limit is None or all(asked <= limit * count for count, asked in inner)
    return within and sum(asked for _, asked in inner) == demand


def _even_rest(places: Sequence[_Place], demand: int, limit: int | None) -> int | None:
    """What holders in each group send outside it, if all holders send equal whole amounts outside, and inside."""
    _, _, ranks, asked = places[0]
    count, rest = len(ranks), demand - asked * len(places)
    if asked % count or rest % (count * len(places)) or (limit is not None and demand > limit * count * len(places)):
        return None
    if any(len(ranks) != count or other != asked for _, _, ranks, other in places):
        return None
    return rest // len(places)


def _deal(
    holders: Sequence[int], demand: int, places: Sequence[_Place], limit: int | None
) -> tuple[dict[int, int], list[int]]:
    """What every holder of a part sends, and what the holders at each place send inside their group."""
    taken = dict.fromkeys(holders, 0)
    served = []
    for _, _, ranks, asked in places:
        before = sum(map(taken.__getitem__, ranks))
        if asked > before:
            before += sum(take_more(taken, ranks, asked - before, limit))
        served.append(before)
    left = demand - sum(taken.values())
    if left:
        take_more(taken, holders, left, limit)
    return taken, served


def volumes_of(phase: Phase, topology: Topology) -> Volumes:
    """The volumes of a phase, from its transfers."""
    borders: dict[str, int] = {}
    for (level, _), crossing in border_volumes(phase, topology).items():
        borders[level] = max(borders.get(level, 0), *crossing)
    reduces = any(transfer.contribution != FINISHED for transfer in phase.transfers)
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
