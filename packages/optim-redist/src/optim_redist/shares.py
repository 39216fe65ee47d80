"""A tensor as contributions to a sum, without a rank that needs all of it: each has some elements, and zeros elsewhere.

A layout with a sum pending may begin it at one rank, which then needs every element. If instead the elements are shared
out over the axes of the sum, each rank needs its share alone. The shares are a layout without a pending sum: the index
set I of one dimension becomes I_1 ∪ … ∪ I_n, one for each of the n ranks along an axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from optim_redist._kinds import Block, Intervals, Kind
from optim_redist.index_sets import IndexSet, elements, from_intervals, intersect, intervals, positions, size, take
from optim_redist.layout import Layout, Split
from optim_redist.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor


@lru_cache(maxsize=1024)
def shared_out(shape: tuple[int, ...], src: Layout, dst: Layout) -> Layout:
    """``dst`` with every sum shared out that a move from ``src`` would begin; scalars have nothing to share out.

    An axis that divides a dimension of ``src`` on the same mesh divides it likewise, so that what a rank has of its
    part stays there. Another divides the dimension of which ranks have most, evenly.
    """
    started = [axis for axis, _ in Problem(shape, src, dst).started] if shape else []
    same_mesh = src.mesh == dst.mesh
    for k, split in enumerate(src.dims if same_mesh else ()):
        if split is not None and dst.dims[k] is None and set(split.axes) <= set(started):
            dst = _divided(dst, k, split)
    for axis in started:
        if axis in dict(dst.partial):
            divides = [k for k, split in enumerate(src.dims) if split is not None and axis in split.axes]
            alike = divides[0] if divides and same_mesh else None
            dst = _divided_by(shape, src, dst, axis, alike)
    return dst


def _divided_by(shape: Sequence[int], src: Layout, dst: Layout, axis: int, alike: int | None) -> Layout:
    """``dst`` with a sum along an axis shared out: as in dimension ``alike`` of ``src``, or evenly."""
    count = dst.mesh.sizes[axis]
    k = alike
    if k is None:
        # of dimensions that are equally long on the ranks, the first
        k = max(range(len(shape)), key=lambda d: (shape[d] / prod(dst.axis_sizes(d)), -d))
    split, sets = dst.dims[k], dst.index_sets(shape)[k]
    kind: Kind = Block()
    if alike is not None:
        others = _along(shape, src, k, axis)
        kind = Intervals.of_sets(intersect(held, other) for held in sets for other in others)
    elif split is not None:
        cuts = [(held, size(held) * c // count, size(held) * (c + 1) // count) for held in sets for c in range(count)]
        kind = Intervals.of_sets(take(*cut) for cut in cuts)
    return _divided(dst, k, Split((*(split.axes if split is not None else ()), axis), kind))


def _divided(layout: Layout, tensor_dim: int, split: Split) -> Layout:
    """The layout with a dimension divided so, and without the sums that were pending along its axes."""
    dims = [split if k == tensor_dim else other for k, other in enumerate(layout.dims)]
    return Layout(layout.mesh, dims, [(axis, op) for axis, op in layout.partial if axis not in split.axes])


def _along(shape: Sequence[int], layout: Layout, tensor_dim: int, axis: int) -> list[IndexSet]:
    """For every coordinate on the axis, all that ranks with this coordinate have of the dimension."""
    split = layout.dims[tensor_dim]
    assert split is not None, "the axis divides the dimension"
    sizes, place = layout.axis_sizes(tensor_dim), split.axes.index(axis)
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(sizes[place])]
    for c, held in enumerate(layout.index_sets(shape)[tensor_dim]):
        pieces[c // prod(sizes[place + 1 :]) % sizes[place]] += intervals(held)
    return [from_intervals(sorted(found)) for found in pieces]


def put_back(part: Tensor, shape: Sequence[int], shares: Layout, whole: Layout, rank: int) -> Tensor:
    """The rank's part of ``whole``: its share at its elements, and zeros elsewhere; differentiable."""
    import torch

    if shares is whole or rank not in whole.mesh.coordinates:
        return part
    for k, (all_held, held) in enumerate(zip(whole.indices(shape, rank), shares.indices(shape, rank))):
        if size(held) < size(all_held):
            places = torch.tensor(elements(positions(all_held, held)), dtype=torch.int64, device=part.device)
            zeros = part.new_zeros([*part.shape[:k], size(all_held), *part.shape[k + 1 :]])
            # in place, so that no second one is held
            part = zeros.index_copy_(k, places, part)
    return part
