"""A reduction scattered over its contributors: each combines a part, and finished parts move on.

Notation: S elements on a rank, k contributions to each, n elements that a rank needs. If contributions go straight to
the needers, a rank receives up to k·n elements. If they are scattered, a contributor receives (k-1)·S/k and a needer
then n, and no rank sends more than (k-1)·S/k + S/k = S, which its part of the source demands anyway. So scattering pays
if needers are few, or have nothing to contribute. If contributions are replicated, their holders may share the
combining, too.

Axes are cut into their prime factors. Each factor splits the dimension that stays most even; among equally even ones,
the dimension that leaves the neediest rank least to fetch. Contributions that the target keeps are identified by the
axes along which they lie. So axes stay whole if the way through cut axes would bring these contributions to other
ranks, or reduce them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from optim_redist._methods.dividing import cut_axes, divided
from optim_redist.layout import Layout
from optim_redist.problem import Point, Problem

# reduced axes, replicating axes -> for every way, the axes that come to split dimensions
_Choices = Callable[[tuple[int, ...], tuple[int, ...]], list[tuple[int, ...]]]


def scattered(problem: Problem) -> list[Layout]:
    """Layouts in which the source's reduced axes split dimensions, first alone, then with its replicating axes."""

    def axes(reduced: tuple[int, ...], replicating: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [reduced, (*reduced, *replicating)] if replicating else [reduced]

    return _divisions(problem, axes)


def sliced(problem: Problem) -> list[Layout]:
    """The layout in which the source's replicating axes split dimensions and contributions stay; none without any."""
    return _divisions(problem, lambda reduced, replicating: [replicating] if replicating else [])


def _divisions(problem: Problem, choices: _Choices) -> list[Layout]:
    """The source divided further, in as many ways as ``choices`` makes of its reduced and its replicating axes."""
    found = _divided_over(problem, cut_axes(problem.src), choices)
    if not all(_keeps_alike(problem, layout) for layout in found):
        found = _divided_over(problem, problem.src, choices)
    return found


def _divided_over(problem: Problem, start: Layout, choices: _Choices) -> list[Layout]:
    reduced = problem.between(start, problem.dst).reduced_axes
    replicating = tuple(axis for axis in start.replicated_axes if start.mesh.sizes[axis] > 1)
    cost = partial(_largest_and_missing, problem)
    found = [divided(problem.shape, start, axes, cost) for axes in choices(reduced, replicating)]
    return [layout for layout in found if layout is not None]


def _keeps_alike(problem: Problem, layout: Layout) -> bool:
    """Whether the way through ``layout`` keeps the same contributions, on the same ranks, as the way without it."""
    if not problem.dst.partial:
        return True
    there, onwards = problem.between(problem.src, layout), problem.between(layout, problem.dst)
    pairs = (
        (problem.src_points, there.src_points),
        (there.dst_points, onwards.src_points),
        (onwards.dst_points, problem.dst_points),
    )
    return all(_kept_places(problem, a) == _kept_places(problem, b) for a, b in pairs)


def _kept_places(problem: Problem, points: dict[int, Point]) -> dict[int, Point]:
    """Which kept contribution each rank has: its coordinates behind those of the tensor dimensions."""
    return {rank: point[len(problem.shape) :] for rank, point in points.items()}


def _largest_and_missing(problem: Problem, layout: Layout) -> tuple[int, int]:
    """What the fullest rank holds of a layout, and what the neediest of the target then lacks."""
    onwards = problem.between(layout, problem.dst)
    stored, kept = onwards.num_stored, onwards.num_kept
    missing = max(needed - kept.get(rank, 0) for rank, (_, needed) in stored.items())
    return max(held for held, _ in stored.values()), missing
