"""A reduction in two hops: each element is combined at one rank, which hands it on to whoever else needs it.

With m contributions and q needers of an element, sending every contribution to every needer costs m·q transfers, two
hops cost m + q - 1. The owners are chosen among the needers: either those that contribute, since their contributions
need not travel, or all needers; the owners get equal shares. The choice that keeps the busiest rank less busy is taken.
"""

from __future__ import annotations

from collections.abc import Iterator

from optim_redist._methods.direct import share
from optim_redist._methods.relay_volumes import owners_of, relay_volumes
from optim_redist.boxes import Box
from optim_redist.moves import Phase, Transfer
from optim_redist.problem import Point, Problem


def relay_phases(problem: Problem, rank: int | None = None) -> list[Phase]:
    """Two phases, "reduce" at one owner of every element and "share" from there; the better of two owner choices.

    With ``rank``, only the transfers in which it takes part.
    """
    prefer_contributors = relay_volumes(problem)[0]
    reduce: list[Transfer] = []
    hand_on: list[Transfer] = []
    for dst, src, box in _atoms(problem, rank):
        needers = problem.needers[dst]
        owners = owners_of(problem, src, needers, prefer_contributors)
        contributes, needs = rank is not None and problem.src_points.get(rank) == src, rank in needers
        for owner, (_, part) in share([(0, box)], owners):
            if rank is None or rank == owner:
                reduce += _contributions(problem, src, owner, part)
                hand_on += (Transfer(owner, other, part, "dst") for other in needers if other != owner)
                continue
            if contributes:
                reduce += (
                    t for t in _contribution(problem, src, problem.contribution[rank], owner, part) if t.sender == rank
                )
            if needs:
                hand_on.append(Transfer(owner, rank, part, "dst"))
    return [Phase.of("reduce", reduce), Phase.of("share", hand_on)]


def _atoms(problem: Problem, rank: int | None) -> Iterator[tuple[Point, Point, Box]]:
    """(target point, source point, shared box) for all points that meet, or only for pairs with ``rank`` at a point."""
    points = problem.needers if rank is None else [problem.dst_points[rank]] if rank in problem.dst_points else []
    for dst in points:
        yield from ((dst, src, box) for src, box in problem.atoms_to(dst))
    if rank is not None and rank in problem.src_points:
        src = problem.src_points[rank]
        yield from ((dst, src, box) for dst, box in problem.atoms_from(src) if dst not in points)


def _contributions(problem: Problem, src: Point, owner: int, box: Box) -> Iterator[Transfer]:
    """All contributions to a box."""
    for c in range(problem.num_contributions):
        yield from _contribution(problem, src, c, owner, box)


def _contribution(problem: Problem, src: Point, number: int, owner: int, box: Box) -> Iterator[Transfer]:
    """One contribution to a box, from its holders in equal shares, the owner's own from itself."""
    holders = problem.holders[src, number]
    if owner in holders:
        yield Transfer(owner, owner, box, contribution=number)
        return
    for sender, (_, part) in share([(0, box)], holders):
        yield Transfer(sender, owner, part, contribution=number)
