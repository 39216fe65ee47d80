"""A reduction in two hops: each element is combined at one rank, which hands it on to whoever else needs it.

With m contributions and q needers of an element, sending every contribution to every needer costs m·q transfers, two
hops cost m + q - 1. The owner is chosen among the needers: those that contribute, since theirs need not travel, or
all of them in equal shares, whichever keeps the busiest rank less busy.
"""

from __future__ import annotations

from optim_redist._methods.direct import share
from optim_redist.boxes import Box
from optim_redist.moves import Phase, Transfer, added_up
from optim_redist.problem import Problem


def relay_phases(problem: Problem) -> list[Phase]:
    """Two phases, "reduce" at one owner of every element and "share" from there; the better of two owner choices."""
    choices = [_phases(problem, prefer_contributors) for prefer_contributors in (True, False)]
    return min(choices, key=busiest)


def busiest(phases: list[Phase]) -> int:
    """Elements that the busiest rank sends or receives over all phases."""
    sent, received = added_up(map(Phase.sent, phases)), added_up(map(Phase.received, phases))
    return max([*sent.values(), *received.values()], default=0)


def _phases(problem: Problem, prefer_contributors: bool) -> list[Phase]:
    reduce: list[Transfer] = []
    hand_on: list[Transfer] = []
    for dst, needers in problem.needers.items():
        for src, box in problem.atoms_to(dst):
            contributing = [rank for rank in needers if problem.src_points.get(rank) == src]
            owners = contributing if prefer_contributors and contributing else needers
            for owner, (_, part) in share([(0, box)], owners):
                reduce += _contributions(problem, src, owner, part)
                hand_on += (Transfer(owner, other, part, "dst") for other in needers if other != owner)
    return [Phase.of("reduce", reduce), Phase.of("share", hand_on)]


def _contributions(problem: Problem, src: tuple[int, ...], owner: int, box: Box) -> list[Transfer]:
    """All contributions to a box, each from its holders in equal shares, the owner's own from itself."""
    found = []
    for c in range(problem.num_contributions):
        holders = problem.holders[src, c]
        if owner in holders:
            found.append(Transfer(owner, owner, box, contribution=c))
        else:
            found += (Transfer(s, owner, part, contribution=c) for s, (_, part) in share([(0, box)], holders))
    return found
