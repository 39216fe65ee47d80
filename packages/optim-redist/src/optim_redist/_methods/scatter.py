"""A reduction scattered over its contributors: each combines a part, and finished parts move on.

Notation: S elements on a rank, k contributions to each, n elements that a rank needs. Straight to the needers, a rank
receives up to k·n elements. Scattered, a contributor receives (k-1)·S/k of them and a needer then n, and nobody sends
more than (k-1)·S/k + S/k = S, what its part of the source demands anyway. So scattering pays where needers are few, or
have nothing to contribute. Where contributions are replicated, their holders may share the combining too.

Axes are cut into their prime factors, each of which divides the dimension that stays most even; of equal ones, that
which leaves the neediest rank least to fetch. Contributions that the target keeps are told by the axes along which they
lie, so that axes stay whole where the way through cut ones would take them elsewhere, or reduce them.
"""

from __future__ import annotations

from optim_redist._methods.reduce_inside import cut_axes, split_further
from optim_redist.layout import Layout
from optim_redist.problem import Point, Problem


def scattered(problem: Problem) -> list[Layout]:
    """The layouts with the reduced axes of the source splitting dimensions, without and with its replicating axes."""
    found = _scattered_from(problem, cut_axes(problem.src))
    return found if all(_keeps_alike(problem, layout) for layout in found) else _scattered_from(problem, problem.src)


def _scattered_from(problem: Problem, start: Layout) -> list[Layout]:
    reduced = Problem(problem.shape, start, problem.dst).reduced_axes
    replicating = [axis for axis in start.replicated_axes if start.mesh.sizes[axis] > 1]
    found = []
    for axes in [reduced, (*reduced, *replicating)] if replicating else [reduced]:
        layout: Layout | None = start
        for axis in axes:
            layout = None if layout is None else _divided(problem, layout, axis)
        if layout is not None:
            found.append(layout)
    return found


def _keeps_alike(problem: Problem, layout: Layout) -> bool:
    """Whether on the way through a layout the target keeps what it keeps without it, at the same ranks."""
    if not problem.dst.partial:
        return True
    there, onwards = Problem(problem.shape, problem.src, layout), Problem(problem.shape, layout, problem.dst)
    pairs = (
        (problem.src_points, there.src_points),
        (there.dst_points, onwards.src_points),
        (onwards.dst_points, problem.dst_points),
    )
    return all(_kept_places(problem, a) == _kept_places(problem, b) for a, b in pairs)


def _kept_places(problem: Problem, points: dict[int, Point]) -> dict[int, Point]:
    """Which of the contributions that stay each rank has: the coordinates behind those of tensor dimensions."""
    return {rank: point[len(problem.shape) :] for rank, point in points.items()}


def _divided(problem: Problem, layout: Layout, mesh_axis: int) -> Layout | None:
    """The layout with the best dimension divided over one more axis; None if none can be divided so."""
    best: tuple[int, int, Layout] | None = None
    for tensor_dim in range(len(problem.shape)):
        split = split_further(problem.shape, layout, tensor_dim, [mesh_axis])
        if split is not None:
            onwards = Problem(problem.shape, split, problem.dst)
            stored, kept = onwards.num_stored, onwards.num_kept
            missing = max(needed - kept.get(rank, 0) for rank, (_, needed) in stored.items())
            score = -max(held for held, _ in stored.values()), -missing
            if best is None or score > best[:2]:
                best = (*score, split)
    return None if best is None else best[2]
