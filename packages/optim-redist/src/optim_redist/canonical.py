"""The canonical layout: the one that stands for all layouts with the same ownership.

Layouts over ascending ranks in which every coordinate holds something need no list of ranks. Their axes fall into
groups: those that split one dimension, major to minor, and those that replicate. Axes of one rank are dropped. Then
two axes a, b that follow each other in their group are joined if b also follows a in the mesh, since

    rank = Σ c_a · stride_a,        stride_a = size_b · stride_b        for neighbours a, b of the mesh.

Other layouts are brought to the same form from the list of what every rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from optim_redist._mesh import coordinates, grid_points
from optim_redist.index_sets import EMPTY, IndexSet
from optim_redist.layout import Block, Cyclic, Kind, Layout, Mesh, Split
from optim_redist.ownership import normal_form, pending_of, simplest_contiguous_kind, simplest_kind


def canonical(layout: Layout, shape: Sequence[int]) -> Layout:
    """The one layout that stands for all with this ownership on these ranks; it is its own canonical form.

    Every dimension gets one axis per evenly strided group of ranks, the first kind of (unsplit, Block, Chunk, Cyclic,
    Ragged, Intervals) that gives the same index sets, and coordinates ordered by what they hold. Ranks ascend if the
    grid allows it and are listed otherwise.
    """
    layout.check_shape(shape)
    found = _by_strides(layout, shape)
    return found if found is not None else _by_holdings(layout, shape)


def _by_strides(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """The canonical form from the axes alone; None if that takes the list of what every rank holds."""
    mesh = layout.mesh
    if layout.partial or not mesh.is_ascending or 0 in shape:
        return None
    sizes, number = _joined(layout)
    joins = sizes != mesh.sizes
    dims: list[Split | None] = []
    changed = joins
    for n, split in zip(shape, layout.dims):
        if split is None:
            dims.append(None)
            continue
        used = split.axes
        if joins:
            used = tuple(dict.fromkeys([number[axis] for axis in used if axis in number]))
        kind = _ascending_kind(n, split.kind, [mesh.sizes[axis] for axis in split.axes], [sizes[axis] for axis in used])
        if kind is None:
            return None
        if joins or kind is not split.kind:
            changed = True
            split = Split(used, kind) if used else None
        dims.append(split)
    if not changed:
        return layout
    return Layout.of_splits(Mesh.ascending(sizes, mesh.ranks) if joins else mesh, tuple(dims))


def _joined(layout: Layout) -> tuple[tuple[int, ...], dict[int, int]]:
    """Sizes of the joined axes, and the number of the joined axis that each mesh axis of several ranks is part of."""
    mesh_sizes = layout.mesh.sizes
    before: dict[int, int] = {}  # keyed by axis that splits a dimension: the axis before it in its group, or -1
    for split in layout.dims:
        last = -1
        for axis in () if split is None else split.axes:
            if mesh_sizes[axis] > 1:
                before[axis] = last
                last = axis
    sizes: list[int] = []
    number: dict[int, int] = {}
    last = replicating = -1
    for axis, n in enumerate(mesh_sizes):
        if n == 1:
            continue
        if axis in before:
            follows = before[axis]
        else:
            follows, replicating = replicating, axis
        if sizes and follows == last:
            sizes[-1] *= n
        else:
            sizes.append(n)
        number[axis] = len(sizes) - 1
        last = axis
    return tuple(sizes), number


def _ascending_kind(n: int, kind: Kind, axis_sizes: Sequence[int], joined: Sequence[int]) -> Kind | None:
    """The simplest kind over the joined axes that gives the same index sets.

    None if some coordinate holds nothing, or if coordinates are not in the order of their first indices.
    """
    num_parts = prod(axis_sizes)
    if isinstance(kind, Block):
        # no kind is simpler
        return kind if (num_parts - 1) * -(-n // num_parts) < n else None
    cuts = kind.cut_points(n, axis_sizes)
    if cuts is None and isinstance(kind, Cyclic):
        # blocks are dealt out in more than one round, so every coordinate gets one
        return kind
    if cuts is None:
        sets = kind.index_sets(n, axis_sizes)
        starts = [held[0].start if held else -1 for held in sets]
        if not all(map(int.__lt__, [-1, *starts], starts)):
            return None
        return simplest_kind(list(map(normal_form, sets)), n, joined)
    points = list(cuts)
    if not all(map(int.__lt__, points, points[1:])):
        return None
    return simplest_contiguous_kind(points, n, joined)


def _by_holdings(layout: Layout, shape: Sequence[int]) -> Layout:
    """The canonical form from what every rank holds."""
    # for each dimension one coordinate per non-empty index set, in ascending order of first indices
    tables: list[list[IndexSet]] = []
    columns: list[list[int]] = []  # for every dimension the coordinate of each rank, -1 if it holds nothing
    for sets, split in zip(layout.index_sets(shape), layout.dims):
        normal = [normal_form(held) for held in sets]
        order = sorted([(held[0].start, c) for c, held in enumerate(normal) if held])
        numbers = [-1] * len(normal)
        for number, (_, c) in enumerate(order):
            numbers[c] = number
        tables.append([normal[c] for _, c in order])
        columns.append([numbers[c] for c in coordinates(layout.mesh.sizes, () if split is None else split.axes)])
    ranks = layout.mesh.ranks
    points = dict(zip(ranks, zip(*columns) if columns else [()] * len(ranks)))
    idle = sorted([rank for rank, point in points.items() if -1 in point])
    if len(idle) == len(ranks):
        return Layout(Mesh(len(ranks), ranks=sorted(ranks)), [None] * len(shape))
    groups = _parts(layout, points)
    # if sums and averages are pending together, the axis of the sum is the major one
    pending = pending_of(layout)[::-1]
    counts = [count for _, count in pending]
    num_contributions = prod(counts)
    replicas = len(next(iter(groups.values())))

    # the grid: dimensions, contributions, replicas; idle ranks fill the coordinates that hold nothing, in order
    sizes = _grid_with_idle([len(table) for table in tables], len(ranks) // (num_contributions * replicas))
    grid = (*sizes, *counts, replicas)
    spare = iter(idle)
    placed: list[int] = []
    for place in grid_points((*sizes, num_contributions)):
        placed += groups[place] if place in groups else [next(spare) for _ in range(replicas)]
    mesh, factors = _as_mesh(grid, placed)
    dims: list[Split | None] = []
    for k, n in enumerate(shape):
        table = [*tables[k], *[EMPTY] * (sizes[k] - len(tables[k]))]
        axes = factors[k]
        kind = simplest_kind(table, n, [mesh.sizes[axis] for axis in axes])
        dims.append(Split(axes, kind) if axes else None)
    ops = zip(pending, factors[len(shape) :])
    return Layout(mesh, dims, {axis: op for (op, _), axes in ops for axis in axes})


def _parts(layout: Layout, points: Mapping[int, tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
    """The ranks that hold each part, ascending, keyed by the part's coordinates and its contribution's number.

    Contributions to the same elements are numbered in the order of the smallest ranks that hold them.
    """
    axes = [axis for axis, _ in layout.partial]
    contribution = dict(zip(layout.mesh.ranks, coordinates(layout.mesh.sizes, tuple(axes))))
    found: dict[tuple[int, ...], list[int]] = {}
    numbers: dict[tuple[int, ...], dict[int, int]] = {}
    for rank in layout.mesh.ranks if layout.mesh.is_ascending else sorted(points):
        point = points[rank]
        if -1 not in point:
            known = numbers.setdefault(point, {})
            found.setdefault((*point, known.setdefault(contribution[rank], len(known))), []).append(rank)
    return found


def _grid_with_idle(used: list[int], total: int) -> list[int]:
    """The first grid, in lexicographic order, with ``total`` points and at least ``used[k]`` coordinates on axis k."""

    def search(k: int, left: int) -> list[int] | None:
        if k == len(used):
            return [] if left == 1 else None
        for size in range(used[k], left + 1):
            if left % size == 0:
                rest = search(k + 1, left // size)
                if rest is not None:
                    return [size, *rest]
        return None

    found = search(0, total)
    assert found is not None, "the layout's own grid is a solution"
    return found


class _Term(NamedTuple):
    """A digit of the coordinate on a grid axis, whose steps lie ``stride`` places apart."""

    stride: int
    size: int
    axis: int


def _as_mesh(grid: Sequence[int], order: Sequence[int]) -> tuple[Mesh, list[tuple[int, ...]]]:
    """A mesh over the ranks of ``order`` (row-major over ``grid``) and the mesh axes of every grid axis.

    If a rank's place among the sorted ranks is a sum of evenly strided terms, each of one grid axis, the mesh has these
    terms as axes, in the order of their strides, and its ranks ascend. Else its axes are those of the grid.
    """
    place = {rank: k for k, rank in enumerate(sorted(order))}
    steps, step = [], len(order)
    for size in grid:
        step //= size
        steps.append(step)
    # for every grid axis, the place of the rank at each of its coordinates, all others being 0
    places = [[place[order[c * step]] for c in range(size)] for size, step in zip(grid, steps)]
    terms: list[_Term] = []
    if order[0] == min(order):
        terms = [term for axis, at in enumerate(places) for term in _strided_terms(axis, at)]
    terms.sort(reverse=True)
    sizes = [term.size for term in terms]
    if prod(sizes) == len(order):
        mesh, factors = Mesh(sizes, ranks=sorted(order)), []
        for axis, at in enumerate(places):
            # within a grid axis, major to minor is the order in which its coordinate counts, not the order of strides
            own = [j for j, term in enumerate(terms) if term.axis == axis]
            factors.append(tuple(sorted(own, key=lambda j: -at.index(terms[j].stride))))
        if _matches(mesh, factors, grid, order):
            return mesh, factors
    mesh = Mesh([n for n in grid if n > 1], ranks=order)
    numbers = iter(range(len(grid)))
    return mesh, [(next(numbers),) if n > 1 else () for n in grid]


def _strided_terms(axis: int, places: list[int]) -> list[_Term]:
    """The mixed-radix digits of a grid axis with coordinates at these places, minor first; empty if it has none."""
    terms, unit = [], 1
    while unit < len(places):
        stride = places[unit]
        size = 1
        while (size + 1) * unit <= len(places) and places[size * unit] == size * stride:
            size += 1
        while len(places) % (size * unit):
            size -= 1
        if size == 1:
            return []
        terms.append(_Term(stride, size, axis))
        unit *= size
    return terms


def _matches(mesh: Mesh, factors: list[tuple[int, ...]], grid: Sequence[int], order: Sequence[int]) -> bool:
    rank_at = {point: rank for rank, point in mesh.coordinates.items()}
    for point, rank in zip(grid_points(tuple(grid)), order):
        where = [0] * mesh.num_axes
        for coordinate, axes in zip(point, factors):
            for axis in reversed(axes):
                coordinate, where[axis] = divmod(coordinate, mesh.sizes[axis])
        if rank_at[tuple(where)] != rank:
            return False
    return True
