"""Layouts divided further: mesh axes that split nothing, pending or replicating, come to split dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optim_redist._methods.collective_states import prime_factors
from optim_redist.index_sets import same
from optim_redist.layout import Chunk, Layout, Mesh, Split


def free_axes(layout: Layout) -> list[int]:
    """The axes of several ranks that split no dimension."""
    used = {axis for split in layout.dims if split for axis in split.axes}
    return [axis for axis in range(layout.mesh.num_axes) if axis not in used and layout.mesh.sizes[axis] > 1]


def split_further(shape: tuple[int, ...], layout: Layout, tensor_dim: int, mesh_axes: Sequence[int]) -> Layout | None:
    """The layout with a dimension split further over ``mesh_axes``, no longer pending; None if it is not in chunks."""
    split, n = layout.dims[tensor_dim], shape[tensor_dim]
    axes = split.axes if split else ()
    if split:
        sizes = [layout.mesh.sizes[axis] for axis in axes]
        if not all(map(same, Chunk().index_sets(n, sizes), split.kind.index_sets(n, sizes))):
            return None
    dims = list(layout.dims)
    dims[tensor_dim] = Split((*axes, *mesh_axes), Chunk())
    return Layout(layout.mesh, dims, {axis: op for axis, op in layout.partial if axis not in mesh_axes})


def cut_axes(layout: Layout) -> Layout:
    """The same layout on a mesh whose axes that split nothing are cut into prime factors."""
    free = set(free_axes(layout))
    sizes: list[int] = []
    place: list[list[int]] = []
    for axis, size in enumerate(layout.mesh.sizes):
        parts = prime_factors(size) if axis in free else [size]
        place.append(list(range(len(sizes), len(sizes) + len(parts))))
        sizes += parts
    dims = [split and Split(tuple(place[axis][0] for axis in split.axes), split.kind) for split in layout.dims]
    # along an axis of one rank nothing is pending
    partial: dict[int | str, str] = {new: op for axis, op in layout.partial if axis in free for new in place[axis]}
    if len(sizes) == layout.mesh.num_axes and len(partial) == len(layout.partial):
        return layout
    return Layout(Mesh(sizes, ranks=layout.mesh.ranks), dims, partial)


def divided(
    shape: tuple[int, ...], layout: Layout, mesh_axes: Sequence[int], cost: Callable[[Layout], tuple[int, int]]
) -> Layout | None:
    """The layout with these axes splitting dimensions, one after the other, each the one that then costs least.

    Of dimensions that cost equally much it is the first; None if an axis can split none.
    """
    for axis in mesh_axes:
        found = [split_further(shape, layout, tensor_dim, [axis]) for tensor_dim in range(len(shape))]
        possible = [split for split in found if split is not None]
        if not possible:
            return None
        layout = min(possible, key=cost)
    return layout
