"""Who holds which elements.

Rank r holds the elements  I₁(r) × I₂(r) × … , one index set per dimension; with a pending reduction it holds one
contribution to each of them. Two layouts have the same ownership of a shape when every rank holds the same elements
in both, and when the same ranks share a contribution. How a layout is written (axes, their order, the kind) does
not matter here: ``{(0, 1)}`` on a 2×4 mesh equals ``{0}`` on a mesh of 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import eq, index
from typing import Any

from optim_redist._mesh import as_shape, grid_points, int_tuple
from optim_redist.boxes import Box
from optim_redist.errors import LayoutError, NotRepresentableError
from optim_redist.index_sets import IndexSet, Run, from_intervals, interval, intervals
from optim_redist.layout import Block, Chunk, Cyclic, Intervals, Kind, Layout, Mesh, Ragged, Split, check_layouts


def normal_form(indices: IndexSet) -> IndexSet:
    """The set in a form that equal sets share: maximal intervals, those of equal length and spacing as one run."""
    if len(indices) < 2:
        return indices
    if len(indices) == 2:
        body, tail = indices
        if body.repeats > 1 and tail.repeats == 1 and tail.start > body.stop and tail.length < body.length:
            return indices
    runs: list[Run] = []
    for start, stop in intervals(indices):
        length = stop - start
        if runs and runs[-1].length == length:
            last = runs[-1]
            if last.repeats == 1 or start == last.start + last.repeats * last.stride:
                stride = start - last.start if last.repeats == 1 else last.stride
                runs[-1] = Run(last.start, length, stride, last.repeats + 1)
                continue
        runs.append(Run(start, length, length, 1))
    return tuple(runs)


@dataclass(frozen=True)
class Ownership:
    """What every rank holds, as a value: equal exactly when the ownership is.

    Attributes:
        holdings: (rank, what it holds or None if nothing), by ascending rank.
        contributions: for every rank, which of the pending contributions it holds. Those to the same elements are
            numbered in the order of the smallest ranks that hold them; 0 without a reduction or if it holds nothing.
        pending: the operations and how many contributions each combines.
    """

    holdings: tuple[tuple[int, Box | None], ...]
    contributions: tuple[int, ...]
    pending: tuple[tuple[str, int], ...]


def ownership(layout: Layout, shape: Sequence[int]) -> Ownership:
    """Who holds which elements of a tensor of this shape."""
    tables = [[normal_form(held) for held in sets] for sets in layout.index_sets(shape)]
    axes = [() if split is None else split.axes for split in layout.dims]
    partial_axes = [axis for axis, _ in layout.partial]

    holdings: list[tuple[int, Box | None]] = []
    contributions: list[int] = []
    seen: dict[Box, dict[int, int]] = {}
    for rank, point in sorted(layout.mesh.coordinates.items()):
        holding = tuple(table[layout.linear(point, used)] for table, used in zip(tables, axes))
        if all(holding):
            numbers = seen.setdefault(holding, {})
            contributions.append(numbers.setdefault(layout.linear(point, partial_axes), len(numbers)))
            holdings.append((rank, holding))
        else:
            contributions.append(0)
            holdings.append((rank, None))
    return Ownership(tuple(holdings), tuple(contributions), pending_of(layout) if seen else ())


def pending_of(layout: Layout) -> tuple[tuple[str, int], ...]:
    """The pending operations, and how many contributions each combines."""
    found: dict[str, int] = {}
    for axis, op in layout.partial:
        if layout.mesh.sizes[axis] > 1:
            found[op] = found.get(op, 1) * layout.mesh.sizes[axis]
    return tuple(sorted(found.items()))


def same_ownership(a: Layout, b: Layout, shape: Sequence[int]) -> bool:
    """Whether every rank holds the same elements, and the same contributions to them, in both layouts.

    A rank outside a mesh holds nothing, like one whose shard is empty.
    """
    check_layouts(a=a, b=b)
    a.check_shape(shape)
    b.check_shape(shape)
    if a.dims == b.dims and a.mesh == b.mesh and a.partial == b.partial:
        return True
    return _without_idle(ownership(a, shape)) == _without_idle(ownership(b, shape))


def _without_idle(owned: Ownership) -> tuple[object, ...]:
    active = tuple(
        (rank, holding, number)
        for (rank, holding), number in zip(owned.holdings, owned.contributions)
        if holding is not None
    )
    return active, owned.pending


def simplest_kind(sets: Sequence[IndexSet], n: int, axis_sizes: Sequence[int]) -> Kind:
    """The simplest kind that gives the coordinates these index sets, in normal form.

    It is the first of Block, Chunk, Cyclic, Ragged and Intervals that does.
    """
    points = _cut_points(sets)
    if points is None:
        # if blocks are dealt out in turn, the first coordinate's second one comes after one of every coordinate
        first, *more = sets[0] or (None,)
        turn = None if first is None else first.stride if first.repeats > 1 else more[0].start if more else None
        if first is not None and turn == first.length * len(sets):
            cyclic = Cyclic(first.length)
            if all(map(eq, map(normal_form, cyclic.index_sets(n, axis_sizes)), sets)):
                return cyclic
        return Intervals.of_sets(sets)
    return simplest_contiguous_kind(points, n, axis_sizes)


def simplest_contiguous_kind(points: list[int], n: int, axis_sizes: Sequence[int]) -> Kind:
    """The first of Block, Chunk, Cyclic and Ragged that gives each coordinate what is between two of these points."""
    kinds: list[Kind] = [Block(), Chunk()]
    if points[1]:
        kinds.append(Cyclic(points[1]))
    return next((kind for kind in kinds if list(kind.cut_points(n, axis_sizes) or ()) == points), Ragged(points))


def _cut_points(sets: Sequence[IndexSet]) -> list[int] | None:
    """The points between which coordinates hold one interval each, in order; None if not contiguous."""
    points = [0]
    for held in sets:
        if held and (len(held) > 1 or held[0].repeats > 1 or held[0].start != points[-1]):
            return None
        points.append(held[0].stop if held else points[-1])
    return points


def from_slices(mesh: Mesh, shape: Sequence[int], slices: Mapping[int, Sequence[Iterable[tuple[int, int]]]]) -> Layout:
    """The layout in which every rank holds the given half-open intervals, one list per dimension.

    Raises:
        LayoutError: if ``slices`` lacks a rank or a dimension, or has something else than whole numbers.
        NotRepresentableError: if parts of a dimension overlap without being equal, or leave a gap, or if two dimensions
            depend on the same mesh axis.
    """
    if not isinstance(mesh, Mesh):
        raise LayoutError(f"mesh must be a Mesh, got {mesh!r}")
    if not isinstance(slices, Mapping):
        raise LayoutError(f"slices must map every rank to its intervals, got {slices!r}")
    shape = int_tuple(as_shape(shape), "sizes")
    dims: list[Split | None] = []
    told = {rank: _told(slices.get(rank), rank, len(shape)) for rank in mesh.ranks}
    for k, n in enumerate(shape):
        held = {rank: sets[k] for rank, sets in told.items()}
        axes = tuple(axis for axis in range(mesh.num_axes) if _varies(mesh, held, axis))
        if not axes:
            if held[mesh.ranks[0]] != interval(0, n):
                raise NotRepresentableError(f"no rank holds all of dimension {k} of size {n}: {held[mesh.ranks[0]]}")
            dims.append(None)
            continue
        sizes = [mesh.sizes[axis] for axis in axes]
        by_point = {tuple(point[axis] for axis in axes): held[rank] for rank, point in mesh.coordinates.items()}
        table = [by_point[point] for point in grid_points(tuple(sizes))]
        try:
            kind = simplest_kind(table, n, sizes)
            kind.index_sets(n, sizes)
        except ValueError as error:
            raise NotRepresentableError(f"dimension {k} over axes {axes} is no division of it: {error}") from error
        dims.append(Split(axes, kind))
    try:
        return Layout(mesh, dims)
    except ValueError as error:
        raise NotRepresentableError(f"two dimensions depend on the same mesh axis: {error}") from error


def _told(slices: Any, rank: int, num_dims: int) -> list[IndexSet]:
    """What ``slices`` tell a rank to hold, dimension by dimension."""
    try:
        found = [from_intervals(sorted([(index(start), index(stop)) for start, stop in held])) for held in slices]
        if len(found) == num_dims:
            return list(map(normal_form, found))
    except (TypeError, ValueError):
        pass
    what = f"of rank {rank} a list of (start, stop) for each of {num_dims} dimensions"
    raise LayoutError(f"slices must have {what}, got {slices!r}")


def _varies(mesh: Mesh, held: Mapping[int, IndexSet], axis: int) -> bool:
    first: dict[tuple[int, ...], IndexSet] = {}
    for rank, point in mesh.coordinates.items():
        others = point[:axis] + point[axis + 1 :]
        if first.setdefault(others, held[rank]) != held[rank]:
            return True
    return False
