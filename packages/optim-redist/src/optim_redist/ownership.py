"""Who holds which elements, and the one layout that stands for all layouts with the same answer.

Rank r holds the elements  I₁(r) × I₂(r) × … , one index set a dimension; with a pending reduction it holds one
contribution to each of them. Two layouts have the same ownership of a shape when every rank holds the same elements
in both, and when the same ranks share a contribution. How a layout is written (axes, their order, the kind) is
forgotten here: ``{(0, 1)}`` on a 2×4 mesh equals ``{0}`` on a mesh of 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from optim_redist._mesh import grid_points
from optim_redist.errors import NotRepresentableError
from optim_redist.index_sets import EMPTY, IndexSet, Run, from_intervals, interval, intervals
from optim_redist.layout import Block, Chunk, Cyclic, Intervals, Kind, Layout, Mesh, Ragged, Split

Holding = tuple[IndexSet, ...]


def normal_form(indices: IndexSet) -> IndexSet:
    """The set written in the one way that equal sets share: maximal intervals, evenly spaced equal ones as one run."""
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
        holdings: rank and what it holds, by ascending rank; None if it holds nothing.
        contributions: for ranks that hold something, which of the pending contributions, numbered by the smallest
            rank that holds it among the ranks with the same elements; 0 without a reduction.
        pending: the operations and how many contributions each combines.
    """

    holdings: tuple[tuple[int, Holding | None], ...]
    contributions: tuple[int, ...]
    pending: tuple[tuple[str, int], ...]


def ownership(layout: Layout, shape: Sequence[int]) -> Ownership:
    """Who holds which elements of a tensor of this shape."""
    tables = [[normal_form(held) for held in sets] for sets in layout.index_sets(shape)]
    axes = [() if split is None else split.axes for split in layout.dims]
    pending: dict[str, int] = {}
    for axis, op in layout.partial:
        if layout.mesh.sizes[axis] > 1:
            pending[op] = pending.get(op, 1) * layout.mesh.sizes[axis]
    partial_axes = [axis for axis, _ in layout.partial]

    holdings: list[tuple[int, Holding | None]] = []
    contributions: list[int] = []
    seen: dict[Holding, dict[int, int]] = {}
    for rank, point in sorted(layout.mesh.coordinates.items()):
        holding = tuple(table[layout.linear(point, used)] for table, used in zip(tables, axes))
        if all(holding):
            numbers = seen.setdefault(holding, {})
            contributions.append(numbers.setdefault(layout.linear(point, partial_axes), len(numbers)))
            holdings.append((rank, holding))
        else:
            contributions.append(0)
            holdings.append((rank, None))
    if not seen:
        pending = {}
    return Ownership(tuple(holdings), tuple(contributions), tuple(sorted(pending.items())))


def same_ownership(a: Layout, b: Layout, shape: Sequence[int]) -> bool:
    """Whether every rank holds the same elements, and the same contributions to them, in both layouts.

    A rank outside a mesh holds nothing, like one whose shard is empty.
    """
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


def canonical(layout: Layout, shape: Sequence[int]) -> Layout:
    """The one layout that stands for all with this ownership on these ranks; it is its own canonical form.

    Every dimension gets one axis per evenly strided group of ranks, the simplest kind that says the same
    (unsplit, Block, Chunk, Cyclic, Ragged, Intervals), and coordinates ordered by what they hold. Ranks stay in
    ascending order when the grid allows it and are listed otherwise.
    """
    owned = ownership(layout, shape)
    num_ranks = len(owned.holdings)
    idle = [rank for rank, holding in owned.holdings if holding is None]
    if len(idle) == num_ranks:
        return Layout(Mesh(num_ranks, ranks=sorted(layout.mesh.ranks)), [None] * len(shape))

    # one coordinate per different index set of each dimension, in ascending order of their first index
    numbers: list[dict[IndexSet, int]] = []
    for k in range(len(shape)):
        found = sorted({holding[k] for _, holding in owned.holdings if holding is not None}, key=lambda s: s[0].start)
        numbers.append({held: c for c, held in enumerate(found)})
    num_contributions = prod(count for _, count in owned.pending)
    groups: dict[tuple[int, ...], list[int]] = {}
    for (rank, holding), number in zip(owned.holdings, owned.contributions):
        if holding is not None:
            point = tuple(numbers[k][held] for k, held in enumerate(holding))
            groups.setdefault(point + (number,), []).append(rank)
    replicas = len(next(iter(groups.values())))

    # the grid: dimensions, contributions, replicas; idle ranks fill the coordinates that hold nothing, in order
    sizes = _grid_with_idle([len(n) for n in numbers], num_ranks // (num_contributions * replicas))
    grid = (*sizes, num_contributions, replicas)
    spare = iter(idle)
    order = []
    for point in grid_points(tuple(grid)):
        group = groups.get(point[:-1])
        order.append(next(spare) if group is None else group[point[-1]])

    mesh, factors = _as_mesh(grid, order)
    dims: list[Split | None] = []
    for k, n in enumerate(shape):
        table = [*numbers[k], *[EMPTY] * (sizes[k] - len(numbers[k]))]
        axes = factors[k]
        kind = simplest_kind(table, n, [mesh.sizes[axis] for axis in axes])
        dims.append(Split(axes, kind) if axes else None)
    return Layout(mesh, dims, _spread_pending(owned.pending, mesh, factors[len(shape)]))


def _spread_pending(pending: Sequence[tuple[str, int]], mesh: Mesh, axes: Sequence[int]) -> dict[int | str, str]:
    """Which axis holds which operation: the only one, or sum first while its number of contributions lasts."""
    if len(pending) == 1:
        return dict.fromkeys(axes, pending[0][0])
    found: dict[int | str, str] = {}
    left = dict(pending)
    for axis in axes:
        op = next((op for op in sorted(left, reverse=True) if left[op] % mesh.sizes[axis] == 0), None)
        if op is None:
            raise NotRepresentableError(f"pending {dict(pending)} do not divide over axes of sizes {mesh.sizes}")
        left[op] //= mesh.sizes[axis]
        found[axis] = op
    return found


def _grid_with_idle(used: list[int], total: int) -> list[int]:
    """The first grid, in lexicographic order, with ``total`` points and at least ``used`` coordinates an axis."""

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


def _as_mesh(grid: Sequence[int], order: Sequence[int]) -> tuple[Mesh, list[tuple[int, ...]]]:
    """A mesh over the ranks of ``order`` (row-major over ``grid``) and the mesh axes of every grid axis.

    If a rank's place among the sorted ranks is a sum of one evenly strided term per axis, the mesh has these terms as
    axes, in the order of their strides, and its ranks ascend. Else its axes are those of the grid.
    """
    place = {rank: k for k, rank in enumerate(sorted(order))}
    steps, step = [], len(order)
    for size in grid:
        step //= size
        steps.append(step)
    terms: list[tuple[int, int, int]] = []  # (stride, size, grid axis)
    if order[0] == min(order):
        for axis, (size, step) in enumerate(zip(grid, steps)):
            terms += ((stride, n, axis) for stride, n in _strided_terms([place[order[c * step]] for c in range(size)]))
    terms.sort(reverse=True)
    mesh = Mesh([n for _, n, _ in terms], ranks=sorted(order)) if prod(n for _, n, _ in terms) == len(order) else None
    if mesh is not None:
        factors = [tuple(j for j, term in enumerate(terms) if term[2] == axis) for axis in range(len(grid))]
        # major to minor within a grid axis is the order in which its coordinate counts, not that of the strides
        factors = [_by_weight(axes, terms, grid[k], steps[k], order, place) for k, axes in enumerate(factors)]
        if _matches(mesh, factors, grid, order):
            return mesh, factors
    mesh = Mesh([n for n in grid if n > 1], ranks=order)
    numbers = iter(range(len(grid)))
    return mesh, [(next(numbers),) if n > 1 else () for n in grid]


def _strided_terms(places: list[int]) -> list[tuple[int, int]]:
    """(stride, size) of the mixed-radix digits of a coordinate, minor first; empty if it has none."""
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
        terms.append((stride, size))
        unit *= size
    return terms


def _by_weight(
    axes: tuple[int, ...],
    terms: list[tuple[int, int, int]],
    size: int,
    step: int,
    order: Sequence[int],
    place: Mapping[int, int],
) -> tuple[int, ...]:
    """The mesh axes of one grid axis, major to minor in its coordinate."""
    weight = {place[order[c * step]]: c for c in reversed(range(size))}
    return tuple(sorted(axes, key=lambda j: -weight.get(terms[j][0], 0)))


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


def simplest_kind(table: Sequence[IndexSet], n: int, axis_sizes: Sequence[int]) -> Kind:
    """The simplest kind that gives the coordinates these index sets: Block, Chunk, Cyclic, Ragged, else Intervals."""
    sets = [normal_form(held) for held in table]
    candidates: list[Kind] = [Block(), Chunk()]
    if sets[0]:
        candidates.append(Cyclic(sets[0][0].length))
    for kind in candidates:
        if [normal_form(held) for held in kind.index_sets(n, axis_sizes)] == sets:
            return kind
    if all(len(held) <= 1 and (not held or held[0].repeats == 1) for held in sets):
        cuts = [0]
        for held in sets:
            if held and held[0].start != cuts[-1]:
                break
            cuts.append(held[0].stop if held else cuts[-1])
        else:
            return Ragged(cuts)
    return Intervals([list(intervals(held)) for held in sets])


def from_slices(mesh: Mesh, shape: Sequence[int], slices: Mapping[int, Sequence[Iterable[tuple[int, int]]]]) -> Layout:
    """The layout in which every rank holds the given half-open intervals, one list a dimension.

    Raises:
        NotRepresentableError: if what ranks hold of a dimension overlaps without being equal, leaves a gap, or does
            not depend on mesh axes of its own.
    """
    dims: list[Split | None] = []
    for k, n in enumerate(shape):
        held = {rank: normal_form(from_intervals(sorted(slices[rank][k]))) for rank in mesh.ranks}
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


def _varies(mesh: Mesh, held: Mapping[int, IndexSet], axis: int) -> bool:
    first: dict[tuple[int, ...], IndexSet] = {}
    for rank, point in mesh.coordinates.items():
        others = point[:axis] + point[axis + 1 :]
        if first.setdefault(others, held[rank]) != held[rank]:
            return True
    return False
