"""A redistribution as numbers: source and target of one shape, laid over each other dimension by dimension.

Source coordinates i = (i₁, …, i_d) and target coordinates j = (j₁, …, j_d) divide the tensor into boxes

    B(i, j) = A₁(i₁, j₁) × … × A_d(i_d, j_d),      A_k(i, j) = source set i of dimension k ∩ target set j,

the atoms: all elements of an atom have the same holders (the ranks at i) and the same needers (the ranks at j). Every
number that bounds and planners need is a sum of products of the one-dimensional sizes n_k(i, j) = |A_k(i, j)|.

Pending reductions. An axis that is partial on both sides with the same operation keeps its contributions: they are
elements of their own, along an extra dimension as long as the axis. The other partial axes of the source are reduced:
every element has ``num_contributions`` contributions, each with its own holders. The other partial axes of the target
start anew: coordinate 0 gets the value, ranks at other coordinates need nothing and fill in the identity. An average
has no identity, so all coordinates of its axis get the value, which is the average of its copies. With
``partial_init="divide"`` all coordinates of a sum need the value v, too, and each keeps v / n of it, where n is the
number of coordinates along all axes on which a sum starts. So every rank's part is as those of the other ranks along
these axes, and what bounds and planners count is the same as for a target that is replicated along them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, get_args

from optim_redist._inside import Groups, Part, ranks_at
from optim_redist._mesh import coordinates
from optim_redist._tools.lazy import lazy
from optim_redist.boxes import Box
from optim_redist.errors import UnsupportedError
from optim_redist.index_sets import intersect
from optim_redist.layout import Block, Layout, Mesh, PartialInit
from optim_redist.overlap import Division, overlap

if TYPE_CHECKING:
    from optim_redist.cost import Topology

Point = tuple[int, ...]
_NOTHING = (0, 0)
_WHOLE: Division = (None, ())


_PARTIAL_INITS = get_args(PartialInit)


def check_partial_init(partial_init: object) -> None:
    """Raise ``UnsupportedError`` if this is no way to start a pending reduction."""
    if partial_init not in _PARTIAL_INITS:
        raise UnsupportedError(f'partial_init is "owner" or "divide", got {partial_init!r}')


class Problem:
    """One redistribution: who holds, who needs, and how much they share.

    Attributes:
        overlaps: one per tensor dimension, then one per kept partial axis.
        contribution: for each source rank, which of the ``num_contributions`` contributions it holds.
        reduced, reduced_axes: (operation, number of contributions) of each source axis that is reduced, and the axes.
        started: the partial axes of the target that start anew at coordinate 0 alone, which averages never do.
        started_ops: the operations that start anew, averages included.
        divisor: what every rank divides its part of the target by, 1 unless a sum starts anew by division.
        is_even: whether all ranks hold equally much, ``held_by_all``, and need equally much, ``needed_by_all``.
        src_replicas, dst_replicas: how many ranks hold each contribution to an element, and how many need an element.
    """

    def __init__(self, shape: Sequence[int], src: Layout, dst: Layout, partial_init: PartialInit = "owner") -> None:
        self.shape, self.src, self.dst, self.partial_init = tuple(shape), src, dst, partial_init
        src.check_shape(self.shape)
        dst.check_shape(self.shape)
        src_axes, src_divisions = _divisions(src)
        dst_axes, dst_divisions = _divisions(dst)
        self.overlaps = list(map(overlap, self.shape, src_divisions, dst_divisions))
        self.reduced: tuple[tuple[str, int], ...] = ()
        self.reduced_axes: tuple[int, ...] = ()
        self.started: tuple[tuple[int, str], ...] = ()
        self.started_ops: frozenset[str] = frozenset()
        self.num_contributions = num_started = self.divisor = 1
        self.contribution = dict.fromkeys(src.mesh.ranks, 0)
        if src.partial or dst.partial:
            num_started = self._lay_out_contributions(src_axes, dst_axes)
        self._src_axes, self._dst_axes = src_axes, dst_axes
        self._groups: tuple[Topology, Groups] | None = None
        self.is_even = src.mesh.ranks == dst.mesh.ranks
        self.held_by_all = self.needed_by_all = 1
        num_src_points, num_dst_points = self.num_contributions, num_started
        for o in self.overlaps:
            held, needed = o.src.sizes, o.dst.sizes
            self.is_even = self.is_even and o.src.is_even and o.dst.is_even
            self.held_by_all *= held[0]
            self.needed_by_all *= needed[0]
            num_src_points *= len(held)
            num_dst_points *= len(needed)
        self.src_replicas: int = len(src.mesh.ranks) // num_src_points
        self.dst_replicas: int = len(dst.mesh.ranks) // num_dst_points

    def _lay_out_contributions(self, src_axes: list[tuple[int, ...]], dst_axes: list[tuple[int, ...]]) -> int:
        """Set what describes contributions, if a side is partial; returns the product of the started axes' sizes."""
        src, dst = self.src, self.dst
        kept = _kept_axes(src, dst)
        for a, b in kept:
            division = (Block(), (src.mesh.sizes[a],))
            self.overlaps.append(overlap(src.mesh.sizes[a], division, division))
            src_axes.append((a,))
            dst_axes.append((b,))
        kept_src, kept_dst = {a for a, _ in kept}, {b for _, b in kept}
        reduced = [(axis, op) for axis, op in src.partial if axis not in kept_src and src.mesh.sizes[axis] > 1]
        self.reduced = tuple((op, src.mesh.sizes[axis]) for axis, op in reduced)
        self.reduced_axes = tuple(axis for axis, _ in reduced)
        self.num_contributions = prod(count for _, count in self.reduced)
        self.contribution = dict(zip(src.mesh.ranks, coordinates(src.mesh.sizes, self.reduced_axes)))
        started = [(a, op) for a, op in dst.partial if a not in kept_dst and dst.mesh.sizes[a] > 1]
        self.started_ops = frozenset(op for _, op in started)
        self.started = tuple((a, op) for a, op in started if op != "avg")
        if self.partial_init == "divide" and self.started:
            if others := sorted(self.started_ops - {"sum", "avg"}):
                raise UnsupportedError(
                    f'partial_init="divide" divides sums, and the target starts a pending {others[0]}, which has no '
                    "n-th parts; leave partial_init out"
                )
            self.divisor = prod(dst.mesh.sizes[axis] for axis, _ in self.started)
            self.started = ()
        return prod(dst.mesh.sizes[axis] for axis, _ in self.started)

    def between(self, src: Layout, dst: Layout) -> Problem:
        """A part of the way from one layout to another."""
        return Problem(self.shape, src, dst, self.partial_init)

    @lazy
    def src_points(self) -> dict[int, Point]:
        """Each source rank's coordinates on the dimensions."""
        return _by_rank(self.src, self._src_axes)

    @lazy
    def part_of(self) -> dict[int, Part]:
        """What each source rank holds: the point, and which contribution."""
        return {rank: (point, self.contribution[rank]) for rank, point in self.src_points.items()}

    @lazy
    def _all_dst_points(self) -> dict[int, Point]:
        return _by_rank(self.dst, self._dst_axes)

    @lazy
    def dst_points(self) -> dict[int, Point]:
        """Each target rank's coordinates on the dimensions; only for ranks that need anything."""
        if not self.started:
            return self._all_dst_points
        places = self.dst.mesh.coordinates
        return {
            rank: point
            for rank, point in self._all_dst_points.items()
            if not any(places[rank][axis] for axis, _ in self.started)
        }

    @lazy
    def num_elements(self) -> int:
        """Elements of the tensor, kept contributions counted one by one."""
        return prod([o.n for o in self.overlaps])

    @lazy
    def alike(self) -> tuple[int, list[int]]:
        """Elements that any two points share on dimensions where all pairs share equally, and the other dimensions."""
        factor, others = 1, []
        for k, o in enumerate(self.overlaps):
            if o.alike is None:
                others.append(k)
            else:
                factor *= o.alike
        return factor, others

    @lazy
    def ranks(self) -> tuple[int, ...]:
        """Every rank of the source or the target, ascending."""
        src, dst = self.src.mesh, self.dst.mesh
        if src.ranks == dst.ranks and src.is_ascending:
            return src.ranks
        return tuple(sorted({*src.ranks, *dst.ranks}))

    @lazy
    def holders(self) -> dict[Part, list[int]]:
        """The ranks at each source point with each contribution, ascending."""
        return ranks_at(self.part_of, sorted(self.part_of))

    @lazy
    def needers(self) -> dict[Point, list[int]]:
        """The ranks at each target point, ascending."""
        return ranks_at(self.dst_points, sorted(self.dst_points))

    @lazy
    def held_sizes(self) -> dict[Point, int]:
        """``num_held`` of every source point."""
        points = self.src_points.values()
        if all(o.src.is_even for o in self.overlaps):
            return dict.fromkeys(points, prod([o.src.sizes[0] for o in self.overlaps]))
        return {point: self.num_held(point) for point in set(points)}

    @lazy
    def needed_sizes(self) -> dict[Point, int]:
        """``num_needed`` of every target point, also of ranks that only fill in the identity."""
        points = self._all_dst_points.values()
        if all(o.dst.is_even for o in self.overlaps):
            return dict.fromkeys(points, prod([o.dst.sizes[0] for o in self.overlaps]))
        return {point: self.num_needed(point) for point in set(points)}

    def num_held(self, point: Point) -> int:
        """Elements at a source point."""
        return prod([o.src.sizes[i] for o, i in zip(self.overlaps, point)])

    def num_needed(self, point: Point) -> int:
        """Elements at a target point."""
        return prod([o.dst.sizes[j] for o, j in zip(self.overlaps, point)])

    def sum_held(self, points: Collection[Point]) -> int:
        """Elements at some source points together."""
        if self.is_even:
            return len(points) * self.held_by_all
        return sum(map(self.held_sizes.__getitem__, points))

    def sum_needed(self, points: Collection[Point]) -> int:
        """Elements at some target points together."""
        if self.is_even:
            return len(points) * self.needed_by_all
        return sum(map(self.needed_sizes.__getitem__, points))

    def demand(self, part: Part) -> int:
        """Elements of a part that ranks need without holding the part, counted once for each such rank."""
        kept, held = self.num_kept, self.held_by_all if self.is_even else self.held_sizes[part[0]]
        return held * self.dst_replicas - sum(kept.get(rank, 0) for rank in self.holders[part])

    def groups(self, topology: Topology) -> Groups:
        """The groups of a topology; computed once."""
        if self._groups is None or self._groups[0] is not topology:
            self._groups = topology, Groups(self, topology)
        return self._groups[1]

    def num_common(self, src: Point, dst: Point) -> int:
        """Elements of the atom B(src, dst)."""
        found = 1
        for o, i, j in zip(self.overlaps, src, dst):
            found *= o.common[i].get(j, 0)
            if not found:
                return 0
        return found

    @lazy
    def num_kept(self) -> dict[int, int]:
        """Elements each rank both holds and needs, for ranks on both sides."""
        here, there = self.src.mesh, self.dst.mesh
        ranks: Sequence[int] = here.ranks
        moved = ranks != there.ranks or bool(self.started)
        if moved:
            ranks = [rank for rank in self.dst_points if rank in self.src_points]
            src_places, dst_places = _places(here, ranks), _places(there, ranks)
        factor, dims = self.alike
        found: list[int] | None = None
        for k in dims:
            rows = self.overlaps[k].common
            src_at, dst_at = coordinates(here.sizes, self._src_axes[k]), coordinates(there.sizes, self._dst_axes[k])
            if moved:
                src_at, dst_at = [src_at[place] for place in src_places], [dst_at[place] for place in dst_places]
            common = [rows[i].get(j, 0) for i, j in zip(src_at, dst_at)]
            found = common if found is None else [n * more for n, more in zip(found, common)]
        if found is None:
            return dict.fromkeys(ranks, factor)
        return dict(zip(ranks, found if factor == 1 else [n * factor for n in found]))

    def common(self, src: Point, dst: Point) -> Box | None:
        """The atom B(src, dst), None if it is empty."""
        if not self.num_common(src, dst):
            return None
        return tuple(intersect(o.src.sets[i], o.dst.sets[j]) for o, i, j in zip(self.overlaps, src, dst))

    def atoms_from(self, src: Point) -> list[tuple[Point, Box]]:
        """The target points that meet a source point, in ascending order, with what they share."""
        choices = [o.from_src[i] for o, i in zip(self.overlaps, src)]
        return [(tuple(j for j, _ in atom), tuple(held for _, held in atom)) for atom in product(*choices)]

    def atoms_to(self, dst: Point) -> list[tuple[Point, Box]]:
        """The source points that meet a target point, in ascending order, with what they share."""
        choices = [o.from_dst[j] for o, j in zip(self.overlaps, dst)]
        return [(tuple(i for i, _ in atom), tuple(held for _, held in atom)) for atom in product(*choices)]

    @lazy
    def num_stored(self) -> dict[int, tuple[int, int]]:
        """Elements of each rank's source and target tensors, also where it only fills in the identity."""
        held, needed = self.held_sizes, self.needed_sizes
        stored = {rank: (held[point], 0) for rank, point in self.src_points.items()}
        for rank, point in self._all_dst_points.items():
            stored[rank] = stored.get(rank, _NOTHING)[0], needed[point]
        return stored

    def stays_whole(self, rank: int) -> bool:
        """Whether the rank's part of the source is its part of the target, with nothing to combine or to divide."""
        held, needed = self.num_stored[rank]
        return held == needed == self.num_kept.get(rank, 0) and self.num_contributions == self.divisor == 1

    def held(self, rank: int) -> Box | None:
        """What the rank holds of the source, None outside its mesh."""
        point = self.src_points.get(rank)
        return None if point is None else tuple(o.src.sets[i] for o, i in zip(self.overlaps, point))

    def needed(self, rank: int) -> Box | None:
        """What the rank must hold in the end, None if it needs nothing."""
        point = self.dst_points.get(rank)
        return None if point is None else tuple(o.dst.sets[j] for o, j in zip(self.overlaps, point))


def _divisions(layout: Layout) -> tuple[list[tuple[int, ...]], list[Division]]:
    """The axes that split every dimension, and how."""
    sizes = layout.mesh.sizes
    axes: list[tuple[int, ...]] = []
    divisions: list[Division] = []
    for split in layout.dims:
        if split is None:
            axes.append(())
            divisions.append(_WHOLE)
        else:
            axes.append(split.axes)
            divisions.append((split.kind, tuple([sizes[axis] for axis in split.axes])))
    return axes, divisions


def _by_rank(layout: Layout, axes: Sequence[tuple[int, ...]]) -> dict[int, Point]:
    """The coordinates on every dimension's axes, rank by rank."""
    mesh = layout.mesh
    points = zip(*[coordinates(mesh.sizes, used) for used in axes]) if axes else [()] * mesh.num_ranks
    return dict(zip(mesh.ranks, points))


def _places(mesh: Mesh, ranks: Sequence[int]) -> list[int]:
    """The places of ranks in the row-major order of their mesh."""
    if mesh.ranks[-1] == mesh.num_ranks - 1 and mesh.is_ascending:
        return list(ranks)
    place = {rank: k for k, rank in enumerate(mesh.ranks)}
    return [place[rank] for rank in ranks]


def _kept_axes(src: Layout, dst: Layout) -> list[tuple[int, int]]:
    """(source, target) partial axes whose contributions are kept: equal operation and size, same axis preferred."""
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
