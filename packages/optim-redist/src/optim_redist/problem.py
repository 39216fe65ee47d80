"""A redistribution as numbers: source and target of one shape, laid over each other dimension by dimension.

Source coordinates i = (i₁, …, i_d) and target coordinates j = (j₁, …, j_d) divide the tensor into boxes

    B(i, j) = A₁(i₁, j₁) × … × A_d(i_d, j_d),      A_k(i, j) = source set i of dimension k ∩ target set j,

the atoms: all elements of one have the same holders (the ranks at i) and the same needers (the ranks at j). Everything
that bounds and planners ask is a sum of products of the one-dimensional sizes n_k(i, j) = |A_k(i, j)|.

Pending reductions. An axis that is partial on both sides with the same operation keeps its contributions: they are
elements of their own, along an extra dimension as long as the axis. The other partial axes of the source are reduced:
every element has ``num_contributions`` contributions, each with its own holders. The other partial axes of the target
start anew: coordinate 0 gets the value, the ranks elsewhere need nothing and fill in the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from optim_redist._mesh import grid_points
from optim_redist.boxes import Box
from optim_redist.errors import LayoutError
from optim_redist.index_sets import IndexSet, intersect, interval, size
from optim_redist.layout import Block, Kind, Layout

Point = tuple[int, ...]
_NOTHING = (0, 0)
_Division = tuple[Kind | None, tuple[int, ...]]


class Overlap:
    """One dimension: what the source's and the target's coordinates hold of it, and what they have in common.

    Attributes:
        n: size of the dimension.
        src, dst: index set of every source and target coordinate.
        src_sizes, dst_sizes: their sizes.
        even_src, even_dst: whether all coordinates of a side hold equally much.
        common: ``common[i][j]`` is the number of indices that source coordinate i and target coordinate j share.
    """

    def __init__(self, n: int, src: tuple[IndexSet, ...], dst: tuple[IndexSet, ...]) -> None:
        self.n, self.src, self.dst = n, src, dst
        self.src_sizes = [size(held) for held in src]
        self.dst_sizes = [size(held) for held in dst]
        self.even_src = len(set(self.src_sizes)) == 1
        self.even_dst = len(set(self.dst_sizes)) == 1
        self.common = self._common()

    def _common(self) -> list[list[int]]:
        if len(self.src) == 1:
            return [self.dst_sizes]
        if len(self.dst) == 1:
            return [[n] for n in self.src_sizes]
        if self.src is self.dst or self.src == self.dst:
            return [[n if i == j else 0 for j in range(len(self.dst))] for i, n in enumerate(self.src_sizes)]
        found = [[0] * len(self.dst) for _ in self.src]
        if _is_contiguous(self.src) and _is_contiguous(self.dst):
            # one sweep over both lists of cut points
            i = j = 0
            while i < len(self.src) and j < len(self.dst):
                if self.src[i] and self.dst[j]:
                    (x,), (y,) = self.src[i], self.dst[j]
                    found[i][j] = max(0, min(x.start + x.length, y.start + y.length) - max(x.start, y.start))
                    if x.start + x.length < y.start + y.length:
                        i += 1
                    else:
                        j += 1
                else:
                    i, j = i + (not self.src[i]), j + (not self.dst[j])
            return found
        for i, a in enumerate(self.src):
            for j, b in enumerate(self.dst):
                if a and b and a[0].start < b[-1].stop and b[0].start < a[-1].stop:
                    found[i][j] = size(intersect(a, b))
        return found

    @cached_property
    def from_src(self) -> list[list[tuple[int, IndexSet]]]:
        """For every source coordinate, the target coordinates it meets and where."""
        return [
            [(j, intersect(held, self.dst[j])) for j, n in enumerate(row) if n]
            for held, row in zip(self.src, self.common)
        ]

    @cached_property
    def from_dst(self) -> list[list[tuple[int, IndexSet]]]:
        """For every target coordinate, the source coordinates it meets and where."""
        found: list[list[tuple[int, IndexSet]]] = [[] for _ in self.dst]
        for i, row in enumerate(self.from_src):
            for j, common in row:
                found[j].append((i, common))
        return found


def _is_contiguous(table: tuple[IndexSet, ...]) -> bool:
    """Whether the coordinates hold intervals in ascending order, or nothing."""
    stop = 0
    for held in table:
        if held:
            if len(held) > 1 or held[0].repeats > 1 or held[0].start < stop:
                return False
            stop = held[0].start + held[0].length
    return True


@lru_cache(maxsize=4096)
def _sets(n: int, division: _Division) -> tuple[IndexSet, ...]:
    kind, axis_sizes = division
    return (interval(0, n),) if kind is None else kind.index_sets(n, axis_sizes)


@lru_cache(maxsize=4096)
def _overlap(n: int, src: _Division, dst: _Division) -> Overlap:
    return Overlap(n, _sets(n, src), _sets(n, dst))


class Problem:
    """One redistribution: who holds, who needs, and how much they share.

    Attributes:
        overlaps: one per tensor dimension, then one per kept partial axis.
        src_points, dst_points: for each rank its coordinates on these dimensions; the target's only of ranks that
            need anything.
        contribution: for each source rank, which of the ``num_contributions`` contributions it holds.
        reduced: the operations of the reduced source axes, with the number of contributions of each.
        started: the partial axes of the target that start anew.
    """

    def __init__(self, shape: Sequence[int], src: Layout, dst: Layout) -> None:
        self.shape, self.src, self.dst = tuple(shape), src, dst
        src.check_shape(self.shape)
        dst.check_shape(self.shape)
        if any(n < 0 for n in self.shape):
            raise LayoutError(f"sizes are not negative, got shape {self.shape}")
        src_axes = [() if split is None else split.axes for split in src.dims]
        dst_axes = [() if split is None else split.axes for split in dst.dims]
        self.overlaps = [
            _overlap(
                n,
                (None, ()) if a is None else (a.kind, src.axis_sizes(k)),
                (None, ()) if b is None else (b.kind, dst.axis_sizes(k)),
            )
            for k, (n, a, b) in enumerate(zip(self.shape, src.dims, dst.dims))
        ]
        kept = _kept_axes(src, dst) if src.partial and dst.partial else []
        for a, b in kept:
            length = src.mesh.sizes[a]
            division = (Block(), (length,))
            self.overlaps.append(_overlap(length, division, division))
            src_axes.append((a,))
            dst_axes.append((b,))
        kept_src, kept_dst = {a for a, _ in kept}, {b for _, b in kept}
        reduced_axes = [(axis, op) for axis, op in src.partial if axis not in kept_src and src.mesh.sizes[axis] > 1]
        self.started = tuple(
            (axis, op) for axis, op in dst.partial if axis not in kept_dst and dst.mesh.sizes[axis] > 1
        )
        self.reduced = tuple((op, src.mesh.sizes[axis]) for axis, op in reduced_axes)
        self.num_contributions = prod(count for _, count in self.reduced)

        self.src_points = _points(src, src_axes)
        self.contribution = (
            {
                rank: src.linear(point, [axis for axis, _ in reduced_axes])
                for rank, point in src.mesh.coordinates.items()
            }
            if reduced_axes
            else dict.fromkeys(src.mesh.ranks, 0)
        )
        self._all_dst_points = self.dst_points = _points(dst, dst_axes)
        if self.started:
            points = dst.mesh.coordinates
            self.dst_points = {
                rank: point
                for rank, point in self.dst_points.items()
                if not any(points[rank][axis] for axis, _ in self.started)
            }
        self.src_replicas = prod(src.mesh.sizes[axis] for axis in src.replicated_axes)
        self.dst_replicas = prod(dst.mesh.sizes[axis] for axis in dst.replicated_axes)

    @cached_property
    def num_elements(self) -> int:
        """Elements of the tensor, kept contributions counted one by one."""
        return prod(overlap.n for overlap in self.overlaps)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of the source or the target, ascending."""
        return tuple(sorted({*self.src.mesh.ranks, *self.dst.mesh.ranks}))

    @cached_property
    def holders(self) -> dict[tuple[Point, int], list[int]]:
        """The ranks at each source point with each contribution, ascending."""
        found: dict[tuple[Point, int], list[int]] = {}
        for rank in sorted(self.src_points):
            found.setdefault((self.src_points[rank], self.contribution[rank]), []).append(rank)
        return found

    @cached_property
    def needers(self) -> dict[Point, list[int]]:
        """The ranks at each target point, ascending."""
        found: dict[Point, list[int]] = {}
        for rank in sorted(self.dst_points):
            found.setdefault(self.dst_points[rank], []).append(rank)
        return found

    @cached_property
    def held_sizes(self) -> dict[Point, int]:
        """``num_held`` of every source point."""
        points = self.src_points.values()
        if all(overlap.even_src for overlap in self.overlaps):
            return dict.fromkeys(points, prod([overlap.src_sizes[0] for overlap in self.overlaps]))
        return {point: self.num_held(point) for point in set(points)}

    @cached_property
    def needed_sizes(self) -> dict[Point, int]:
        """``num_needed`` of every target point, also of ranks that only fill in the identity."""
        points = self._all_dst_points.values()
        if all(overlap.even_dst for overlap in self.overlaps):
            return dict.fromkeys(points, prod([overlap.dst_sizes[0] for overlap in self.overlaps]))
        return {point: self.num_needed(point) for point in set(points)}

    def num_held(self, point: Point) -> int:
        """Elements at a source point."""
        return prod([overlap.src_sizes[i] for overlap, i in zip(self.overlaps, point)])

    def num_needed(self, point: Point) -> int:
        """Elements at a target point."""
        return prod([overlap.dst_sizes[j] for overlap, j in zip(self.overlaps, point)])

    def num_common(self, src: Point, dst: Point) -> int:
        """Elements of the atom B(src, dst)."""
        found = 1
        for overlap, i, j in zip(self.overlaps, src, dst):
            found *= overlap.common[i][j]
            if not found:
                return 0
        return found

    @cached_property
    def num_kept(self) -> dict[int, int]:
        """Elements each rank both holds and needs, for ranks on both sides."""
        src = self.src_points
        known: dict[tuple[Point, Point], int] = {}
        found = {}
        for rank, dst in self.dst_points.items():
            if rank in src:
                pair = src[rank], dst
                if pair not in known:
                    known[pair] = self.num_common(*pair)
                found[rank] = known[pair]
        return found

    def common(self, src: Point, dst: Point) -> Box | None:
        """The atom B(src, dst), None if it is empty."""
        if not self.num_common(src, dst):
            return None
        return tuple(intersect(o.src[i], o.dst[j]) for o, i, j in zip(self.overlaps, src, dst))

    def atoms_from(self, src: Point) -> list[tuple[Point, Box]]:
        """The target points that meet a source point, in ascending order, with what they share."""
        choices = [overlap.from_src[i] for overlap, i in zip(self.overlaps, src)]
        return [(tuple(j for j, _ in atom), tuple(held for _, held in atom)) for atom in product(*choices)]

    def atoms_to(self, dst: Point) -> list[tuple[Point, Box]]:
        """The source points that meet a target point, in ascending order, with what they share."""
        choices = [overlap.from_dst[j] for overlap, j in zip(self.overlaps, dst)]
        return [(tuple(i for i, _ in atom), tuple(held for _, held in atom)) for atom in product(*choices)]

    @cached_property
    def num_stored(self) -> dict[int, tuple[int, int]]:
        """Elements of each rank's source and target tensors, also where it only fills in the identity."""
        held, needed = self.held_sizes, self.needed_sizes
        stored = {rank: (held[point], 0) for rank, point in self.src_points.items()}
        for rank, point in self._all_dst_points.items():
            stored[rank] = stored.get(rank, _NOTHING)[0], needed[point]
        return stored

    def held(self, rank: int) -> Box | None:
        """What the rank holds of the source, None outside its mesh."""
        point = self.src_points.get(rank)
        return None if point is None else tuple(overlap.src[i] for overlap, i in zip(self.overlaps, point))

    def needed(self, rank: int) -> Box | None:
        """What the rank must hold in the end, None if nothing has to come."""
        point = self.dst_points.get(rank)
        return None if point is None else tuple(overlap.dst[j] for overlap, j in zip(self.overlaps, point))


@lru_cache(maxsize=1024)
def _linear_points(sizes: tuple[int, ...], axes: tuple[tuple[int, ...], ...]) -> tuple[Point, ...]:
    """For every point of a grid its linear coordinate on each group of axes."""
    columns = []
    for used in axes:
        column = [0] * prod(sizes)
        for axis in used:
            size = sizes[axis]
            column = [c * size + point[axis] for c, point in zip(column, grid_points(sizes))]
        columns.append(column)
    return tuple(zip(*columns)) if columns else ((),) * prod(sizes)


def _points(layout: Layout, axes: Sequence[tuple[int, ...]]) -> dict[int, Point]:
    """The linear coordinate on every dimension's axes, rank by rank."""
    return dict(zip(layout.mesh.ranks, _linear_points(layout.mesh.sizes, tuple(axes))))


def _kept_axes(src: Layout, dst: Layout) -> list[tuple[int, int]]:
    """Partial axes whose contributions stay what they are: pairs of equal operation and size, same axis preferred."""
    free = dict(dst.partial)
    kept: list[tuple[int, int]] = []
    for same_axis in (True, False):
        for a, op in src.partial:
            if any(a == taken for taken, _ in kept):
                continue
            for b in [a] if same_axis else list(free):
                if free.get(b) == op and src.mesh.sizes[a] == dst.mesh.sizes[b]:
                    kept.append((a, b))
                    del free[b]
                    break
    return sorted(kept)
