"""Redistributions that one collective of a library does: for the programs that call it, and for what it costs.

With P ranks and a buffer of S bytes on each, a rank receives

    all_gather, reduce_scatter   (P - 1)/P · S,
    all_reduce                   2(P - 1)/P · S.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from optim_redist.overlap import Side
from optim_redist.problem import Point, Problem

Collective = Literal["all_gather", "all_reduce", "reduce_scatter"]


def library_collective(problem: Problem) -> Collective | None:
    """The collective that does the whole redistribution if its ranks are all of a group, and its dtype and operations
    are the library's."""
    ranks = problem.src.mesh.ranks
    num_ranks = len(ranks)
    if problem.started or num_ranks < 2 or set(ranks) != set(problem.dst.mesh.ranks):
        return None
    if problem.num_contributions == num_ranks:
        if problem.dst_replicas == num_ranks:
            return "all_reduce"
        sizes = set(problem.needed_sizes.values())
        return "reduce_scatter" if problem.dst_replicas == 1 and len(sizes) == 1 and 0 not in sizes else None
    gathers = problem.num_contributions == problem.src_replicas == 1 and problem.dst_replicas == num_ranks
    sides = [o.src for o in problem.overlaps]
    if gathers and problem.num_elements and _lie_in_order(problem.shape, sides, problem.src_points):
        return "all_gather"
    return None


def scattered_in_order(problem: Problem) -> bool:
    """Whether what the ranks get in a reduce-scatter lies in the whole tensor one part after the other."""
    return _lie_in_order(problem.shape, [o.dst for o in problem.overlaps], problem.dst_points)


def bytes_received(collective: Collective, problem: Problem, itemsize: int) -> float:
    """What a rank receives in a collective."""
    num_ranks = len(problem.src.mesh.ranks)
    # only one buffer is whole: the gathered one, or that of a contribution
    whole = problem.num_elements * itemsize
    return (2 if collective == "all_reduce" else 1) * (num_ranks - 1) / num_ranks * whole


def _lie_in_order(shape: Sequence[int], sides: Sequence[Side], points: Mapping[int, Point]) -> bool:
    """Whether the ranks' parts are equal, and lie in the whole tensor one after the other."""
    divided = [k for k, side in enumerate(sides) if len(side.sizes) > 1]
    if len(divided) != 1:
        return False
    (dim,) = divided
    if sides[dim].cuts is None or not sides[dim].is_even or any(n > 1 for n in shape[:dim]):
        return False
    return [points[rank][dim] for rank in sorted(points)] == list(range(len(points)))
