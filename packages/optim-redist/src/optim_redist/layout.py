"""What a layout is: a mesh of ranks, and for every tensor dimension which mesh axes split it and how.

A dimension of size n is split over an ordered tuple of mesh axes, major to minor, of sizes p₁, p₂, …; the coordinate

    c = ((c₁·p₂ + c₂)·p₃ + c₃) …,   P = p₁·p₂·p₃ …

of a rank on those axes says which of P disjoint index sets it holds. A rank holds the product of its index sets over
the dimensions; mesh axes that split nothing replicate. ``partial`` names axes along which the local values are
contributions that are still to be combined.

This module only states layouts; ``ownership`` says who holds which elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Literal, get_args

from optim_redist.errors import LayoutError
from optim_redist.index_sets import EMPTY, IndexSet, from_intervals, interval, strided

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from optim_redist.dtensor import Placements
    from optim_redist.multi_axis import MultiAxisDist
    from optim_redist.pictures import PictureFormat

ReduceOp = Literal["sum", "avg", "min", "max", "product"]
Axis = int | str

_FORMAT = "optim-redist.layout"
_VERSION = 1


def _int_tuple(values: int | Iterable[int], what: str) -> tuple[int, ...]:
    if isinstance(values, int):
        return (values,)
    found = tuple(values)
    for value in found:
        if not isinstance(value, int) or isinstance(value, bool):
            raise LayoutError(f"{what} must be integers, got {value!r} in {found!r}")
    return found


@lru_cache(maxsize=256)
def grid_points(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The points of a grid, row-major."""
    return tuple(product(*map(range, sizes)))


def _flatten(values: Any) -> Iterable[int]:
    if isinstance(values, int):
        yield values
    else:
        for value in values:
            yield from _flatten(value)


@dataclass(frozen=True, init=False)
class Mesh:
    """A grid of global ranks, row-major: the last axis varies fastest.

    ``Mesh(8)``, ``Mesh((4, 2), names=("x", "y"))``, ``Mesh((2, 2), ranks=[[0, 4], [1, 5]])``. Without ``ranks`` the
    grid is numbered 0, 1, 2, …
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...] | None
    ranks: tuple[int, ...]

    def __init__(
        self,
        sizes: int | Sequence[int],
        names: Sequence[str] | None = None,
        ranks: Sequence[Any] | None = None,
    ) -> None:
        shape = _int_tuple(sizes, "mesh sizes")
        if any(size < 1 for size in shape):
            raise LayoutError(f"every mesh axis needs at least one rank, got sizes {shape}")
        total = prod(shape)
        if names is not None:
            names = tuple(names)
            if len(names) != len(shape) or len(set(names)) != len(names):
                raise LayoutError(f"a mesh of {len(shape)} axes needs as many different names, got {names}")
        order = tuple(range(total)) if ranks is None else tuple(_flatten(ranks))
        if len(order) != total or len(set(order)) != total or min(order, default=0) < 0:
            raise LayoutError(f"a mesh of sizes {shape} needs {total} different ranks >= 0, got {order}")
        object.__setattr__(self, "sizes", shape)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "ranks", order)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.sizes, self.ranks))

    def __eq__(self, other: object) -> bool:
        # names are for people: they change nothing that a rank holds
        if not isinstance(other, Mesh):
            return NotImplemented
        return self is other or (self.sizes == other.sizes and self.ranks == other.ranks)

    @property
    def num_axes(self) -> int:
        return len(self.sizes)

    @cached_property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @cached_property
    def coordinates(self) -> dict[int, tuple[int, ...]]:
        """The grid coordinates of every rank, in grid order."""
        return dict(zip(self.ranks, grid_points(self.sizes)))

    def axis(self, axis: Axis) -> int:
        """The number of an axis given by number or name."""
        if isinstance(axis, str):
            if self.names is None or axis not in self.names:
                raise LayoutError(f"the mesh has no axis {axis!r}; its axes are {self.names or self.num_axes}")
            return self.names.index(axis)
        if not 0 <= axis < self.num_axes:
            raise LayoutError(f"mesh axis {axis} is outside a mesh of {self.num_axes} axes")
        return axis

    def axis_name(self, axis: int) -> str:
        """The axis' name, or its number."""
        return str(axis) if self.names is None else self.names[axis]

    def __str__(self) -> str:
        sizes = (
            f"{name}={size}" if self.names else str(size)
            for name, size in zip(self.names or [""] * self.num_axes, self.sizes)
        )
        shown = "" if self.ranks == tuple(range(self.num_ranks)) else f" ranks={list(self.ranks)}"
        return f"[{','.join(sizes)}]{shown}"

    def to_json(self) -> dict[str, Any]:
        numbered = self.ranks == tuple(range(self.num_ranks))
        return {
            "sizes": list(self.sizes),
            "names": None if self.names is None else list(self.names),
            "ranks": None if numbered else list(self.ranks),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Mesh:
        return cls(data["sizes"], data.get("names"), data.get("ranks"))


@dataclass(frozen=True)
class Kind:
    """How a dimension is divided among the P coordinates of its axes."""

    def index_sets(self, n: int, axis_sizes: Sequence[int]) -> tuple[IndexSet, ...]:
        """What each of the ``prod(axis_sizes)`` coordinates holds of a dimension of size ``n``."""
        raise NotImplementedError


@dataclass(frozen=True)
class Block(Kind):
    """Contiguous blocks of ceil(n / P); trailing ones are short or empty."""

    def index_sets(self, n: int, axis_sizes: Sequence[int]) -> tuple[IndexSet, ...]:
        total = prod(axis_sizes)
        block = -(-n // total)
        return tuple(interval(c * block, min(n, (c + 1) * block)) for c in range(total))


@dataclass(frozen=True)
class Chunk(Kind):
    """``torch.chunk`` axis after axis: ceil(n / p) of what the axes before have left."""

    def index_sets(self, n: int, axis_sizes: Sequence[int]) -> tuple[IndexSet, ...]:
        pieces = [(0, n)]
        for p in axis_sizes:
            pieces = [
                (min(stop, start + c * block), min(stop, start + (c + 1) * block))
                for start, stop in pieces
                for block in (-(-(stop - start) // p),)
                for c in range(p)
            ]
        return tuple(interval(start, stop) for start, stop in pieces)


@dataclass(frozen=True)
class Strided(Kind):
    """Axis after axis like ``Chunk``, but an axis with split factor s cuts what is left into s pieces first.

    Each piece is cut into p chunks, and coordinate c takes the c-th of every piece, one behind the other: torch's
    ``_StridedShard``. Factors of 1 throughout are ``Chunk``.
    """

    split_factors: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(factor < 1 for factor in self.split_factors):
            raise LayoutError(f"split factors are 1 or more, got {self.split_factors}")

    def index_sets(self, n: int, axis_sizes: Sequence[int]) -> tuple[IndexSet, ...]:
        if len(self.split_factors) != len(axis_sizes):
            raise LayoutError(f"{len(axis_sizes)} mesh axes need as many split factors, got {self.split_factors}")
        held = [[(0, n)] if n else []]
        for p, factor in zip(axis_sizes, self.split_factors):
            taken: list[list[tuple[int, int]]] = []
            for pieces in held:
                parts = [_cut_in_chunks(piece, p) for piece in _cut_in_chunks(pieces, factor)]
                taken += ([run for part in parts for run in part[c]] for c in range(p))
            held = taken
        return tuple(from_intervals(pieces) for pieces in held)


def _cut_in_chunks(pieces: list[tuple[int, int]], count: int) -> list[list[tuple[int, int]]]:
    """``torch.chunk`` of the indices that the intervals list: ``count`` lists of intervals, the last short or empty."""
    total = sum(stop - start for start, stop in pieces)
    length = -(-total // count)
    chunks: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    done = 0
    for start, stop in pieces:
        while start < stop:
            chunk, used = divmod(done, length)
            taken = min(stop - start, length - used)
            chunks[chunk].append((start, start + taken))
            start, done = start + taken, done + taken
    return chunks


@dataclass(frozen=True)
class Cyclic(Kind):
    """Blocks of ``block`` indices dealt out in turn: block j belongs to coordinate j mod P."""

    block: int = 1

    def __post_init__(self) -> None:
        if self.block < 1:
            raise LayoutError(f"Cyclic needs a block of at least 1 index, got {self.block}")

    def index_sets(self, n: int, axis_sizes: Sequence[int]) -> tuple[IndexSet, ...]:
        b, total = self.block, prod(axis_sizes)
        whole, tail = divmod(n, b)
        sets = []
        for c in range(total):
            held = strided(c * b, b, total * b, (whole - c + total - 1) // total)
            if tail and whole % total == c:
                held += interval(whole * b, n)
            sets.append(from_intervals((r.start, r.stop) for r in held) if all(r.repeats == 1 for r in held) else held)
        return tuple(sets)


@dataclass(frozen=True)
class Ragged(Kind):
    """Contiguous pieces between P + 1 non-decreasing cut points, the first 0 and the last n."""

    cuts: tuple[int, ...]

    def __init__(self, cuts: Iterable[int]) -> None:
        points = _int_tuple(cuts, "cut points")
        if len(points) < 2 or points[0] != 0 or list(points) != sorted(points):
            raise LayoutError(f"cut points start at 0 and never decrease, got {points}")
        object.__setattr__(self, "cuts", points)

    def index_sets(self, n: int, axis_sizes: Sequence[int]) -> tuple[IndexSet, ...]:
        total = prod(axis_sizes)
        if len(self.cuts) != total + 1 or self.cuts[-1] != n:
            raise LayoutError(
                f"a dimension of size {n} cut for {total} coordinates needs {total + 1} cut points from 0 to {n}, "
                f"got {self.cuts}"
            )
        return tuple(interval(start, stop) for start, stop in zip(self.cuts, self.cuts[1:]))


@dataclass(frozen=True)
class Intervals(Kind):
    """Any sorted disjoint intervals per coordinate; together they cover the dimension."""

    table: tuple[tuple[tuple[int, int], ...], ...]

    def __init__(self, table: Iterable[Iterable[Sequence[int]]]) -> None:
        rows = tuple(tuple((int(start), int(stop)) for start, stop in row) for row in table)
        for row in rows:
            ends = [end for piece in row for end in piece]
            if ends != sorted(ends):
                raise LayoutError(f"the intervals of a coordinate are sorted and disjoint, got {row}")
        object.__setattr__(self, "table", rows)

    @cached_property
    def _pieces(self) -> list[tuple[int, int]]:
        return sorted((start, stop) for row in self.table for start, stop in row if start < stop)

    def index_sets(self, n: int, axis_sizes: Sequence[int]) -> tuple[IndexSet, ...]:
        total = prod(axis_sizes)
        if len(self.table) != total:
            raise LayoutError(f"{total} coordinates need as many rows of intervals, got {len(self.table)}")
        ends = [0] + [end for piece in self._pieces for end in piece] + [n]
        if any(ends[k] != ends[k + 1] for k in range(0, len(ends), 2)):
            raise LayoutError(f"the intervals must cover 0 … {n} once, got {self._pieces}")
        return tuple(from_intervals(row) for row in self.table)


KINDS: dict[str, type[Kind]] = {
    "block": Block,
    "chunk": Chunk,
    "strided": Strided,
    "cyclic": Cyclic,
    "ragged": Ragged,
    "intervals": Intervals,
}


@dataclass(frozen=True)
class Split:
    """One tensor dimension divided over mesh axes, major to minor."""

    axes: tuple[int, ...]
    kind: Kind = field(default_factory=Block)


DimSpec = None | Axis | Split | Sequence[Any]


@dataclass(frozen=True, init=False)
class Layout:
    """Where the elements of a tensor live.

    ``dims`` has one entry a tensor dimension: ``None`` (not split), an axis, a tuple of axes major to minor (both
    ``Block``), or ``(axes, kind)``. Axes are numbers or names. ``partial`` maps axes to the operation that combines
    the contributions lying along them.

    >>> mesh = Mesh((4, 2), names=("x", "y"))
    >>> str(Layout(mesh, [("x", "y"), None]))
    '[x.y, -]'
    >>> str(Layout(mesh, [("y", Cyclic(2)), None], partial={"x": "sum"}))
    '[y~2, -]+sum(x)'
    """

    mesh: Mesh
    dims: tuple[Split | None, ...]
    partial: tuple[tuple[int, ReduceOp], ...]

    def __init__(self, mesh: Mesh, dims: Sequence[DimSpec], partial: Mapping[Axis, str] | None = None) -> None:
        splits = tuple(_as_split(mesh, spec) for spec in dims)
        ops = tuple(sorted((mesh.axis(axis), _as_op(op)) for axis, op in (partial or {}).items()))
        used = [axis for split in splits if split for axis in split.axes] + [axis for axis, _ in ops]
        if len(set(used)) != len(used):
            raise LayoutError(
                f"a mesh axis splits one dimension or is partial, once; got dims {dims}, partial {partial}"
            )
        kinds = {op for _, op in ops}
        if len(kinds) > 1 and not kinds <= {"sum", "avg"}:
            raise LayoutError(f"only sum and avg may be pending together, got {sorted(kinds)}; reduce one first")
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "dims", splits)
        object.__setattr__(self, "partial", ops)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.dims, self.partial))

    @property
    def num_dims(self) -> int:
        return len(self.dims)

    @cached_property
    def replicated_axes(self) -> tuple[int, ...]:
        """The mesh axes that neither split a dimension nor hold contributions."""
        used = {axis for split in self.dims if split for axis in split.axes} | {axis for axis, _ in self.partial}
        return tuple(axis for axis in range(self.mesh.num_axes) if axis not in used)

    def axis_sizes(self, tensor_dim: int) -> tuple[int, ...]:
        """The sizes of the axes that split a dimension, major to minor."""
        split = self.dims[tensor_dim]
        return () if split is None else tuple(self.mesh.sizes[axis] for axis in split.axes)

    def coordinate(self, rank: int, tensor_dim: int) -> int:
        """The rank's linear coordinate on the axes that split a dimension."""
        split = self.dims[tensor_dim]
        return 0 if split is None else self.linear(self.mesh.coordinates[rank], split.axes)

    def linear(self, point: Sequence[int], axes: Sequence[int]) -> int:
        """A grid point's row-major coordinate on some axes, the first axis most significant."""
        found = 0
        for axis in axes:
            found = found * self.mesh.sizes[axis] + point[axis]
        return found

    def index_sets(self, shape: Sequence[int]) -> tuple[tuple[IndexSet, ...], ...]:
        """For every dimension, what each coordinate holds of it."""
        self.check_shape(shape)
        return tuple(
            (interval(0, n),) if split is None else split.kind.index_sets(n, self.axis_sizes(k))
            for k, (n, split) in enumerate(zip(shape, self.dims))
        )

    def indices(self, shape: Sequence[int], rank: int) -> tuple[IndexSet, ...]:
        """What a rank holds, dimension by dimension; nothing at all if it is not in the mesh."""
        sets = self.index_sets(shape)
        if rank not in self.mesh.coordinates:
            return tuple(EMPTY for _ in shape)
        return tuple(sets[k][self.coordinate(rank, k)] for k in range(len(shape)))

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of the rank's local tensor."""
        return tuple(sum(run.length * run.repeats for run in held) for held in self.indices(shape, rank))

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) != len(self.dims):
            raise LayoutError(f"layout {self} is for {len(self.dims)} dimensions, the shape is {tuple(shape)}")

    def canonical(self, shape: Sequence[int]) -> Layout:
        """The one layout that stands for all with the same ownership of a tensor of this shape."""
        from optim_redist.ownership import canonical

        return canonical(self, shape)

    @classmethod
    def from_placements(
        cls,
        device_mesh: DeviceMesh | Mesh,
        placements: Sequence[Any],
        shape: Sequence[int],
        shard_order: Any = None,
        *,
        strided: Literal["replay", "ordered"] = "replay",
    ) -> Layout:
        """The layout that DTensor's placements give a tensor of ``shape``; see ``optim_redist.dtensor``."""
        from optim_redist.dtensor import from_placements

        return from_placements(device_mesh, placements, shape, shard_order, strided=strided)

    @classmethod
    def from_dtensor(cls, dtensor: DTensor, *, strided: Literal["replay", "ordered"] = "replay") -> Layout:
        """The layout of a DTensor, checked against the shape of its local tensor."""
        from optim_redist.dtensor import from_dtensor

        return from_dtensor(dtensor, strided=strided)

    def to_placements(self, shape: Sequence[int]) -> Placements:
        """torch's placements, one per mesh axis, with the orders of axes in their ``shard_order``."""
        from optim_redist.dtensor import to_placements

        return to_placements(self, shape)

    def to_multi_axis(self, shape: Sequence[int] | None = None) -> MultiAxisDist:
        """The notebook's notation of this layout; ``shape`` is needed for all kinds but ``Cyclic``."""
        from optim_redist._multi_axis_layout import from_layout

        return from_layout(self, shape)

    def picture(self, shape: Sequence[int], dims: Sequence[int] = (0, 1), fmt: PictureFormat = "ascii") -> Any:
        """Which rank owns which cell of a tensor of ``shape``: text, SVG text or a matplotlib figure."""
        from optim_redist.pictures import layout_picture

        return layout_picture(self, shape, dims, fmt)

    def __str__(self) -> str:
        items = ", ".join("-" if split is None else self._split_text(split) for split in self.dims)
        ops: dict[str, list[str]] = {}
        for axis, op in self.partial:
            ops.setdefault(op, []).append(self.mesh.axis_name(axis))
        return f"[{items}]" + "".join(f"+{op}({','.join(names)})" for op, names in ops.items())

    def _split_text(self, split: Split) -> str:
        names = [self.mesh.axis_name(axis) for axis in split.axes]
        match split.kind:
            case Chunk():
                return "/".join(names) if len(names) > 1 else f"{names[0]}/"
            case Strided(factors):
                return "/".join(f"{name}@{factor}" for name, factor in zip(names, factors))
            case Cyclic(block):
                return f"{'.'.join(names)}~{block}"
            case Ragged(cuts):
                return f"{'.'.join(names)}!{':'.join(map(str, cuts))}"
            case Intervals(table):
                rows = "|".join(",".join(f"{start}:{stop}" for start, stop in row) for row in table)
                return f"{'.'.join(names)}{{{rows}}}"
            case _:
                return ".".join(names)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": f"{_FORMAT}/{_VERSION}",
            "mesh": self.mesh.to_json(),
            "dims": [None if split is None else _split_json(split) for split in self.dims],
            "partial": {str(axis): op for axis, op in self.partial},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        name, _, version = str(data.get("format", f"{_FORMAT}/{_VERSION}")).partition("/")
        if name != _FORMAT or not version.isdecimal() or int(version) > _VERSION:
            raise LayoutError(f"a layout of format {_FORMAT}/{_VERSION} or older is readable, got {data.get('format')}")
        dims = [None if item is None else _split_from_json(item) for item in data["dims"]]
        partial: dict[Axis, str] = {int(axis): op for axis, op in data.get("partial", {}).items()}
        return cls(Mesh.from_json(data["mesh"]), dims, partial)


def _as_split(mesh: Mesh, spec: DimSpec) -> Split | None:
    axes: Any = spec
    kind: Kind = Block()
    if isinstance(spec, Split):
        axes, kind = spec.axes, spec.kind
    elif isinstance(spec, Sequence) and len(spec) == 2 and isinstance(spec[1], Kind):
        axes, kind = spec[0], spec[1]
    if isinstance(axes, Kind) or not isinstance(axes, int | str | Iterable | None):
        raise LayoutError(f"a dimension is None, an axis, a tuple of axes or (axes, kind), got {spec!r}")
    numbers = tuple(mesh.axis(axis) for axis in ((axes,) if isinstance(axes, int | str) else axes or ()))
    return Split(numbers, kind) if numbers else None


def _as_op(op: str) -> ReduceOp:
    if op not in get_args(ReduceOp):
        raise LayoutError(f"a pending reduction is one of {get_args(ReduceOp)}, got {op!r}")
    return op  # type: ignore[return-value]


def _split_json(split: Split) -> dict[str, Any]:
    item: dict[str, Any] = {"axes": list(split.axes), "kind": type(split.kind).__name__.lower()}
    match split.kind:
        case Strided(factors):
            item["split_factors"] = list(factors)
        case Cyclic(block):
            item["block"] = block
        case Ragged(cuts):
            item["cuts"] = list(cuts)
        case Intervals(table):
            item["table"] = [[list(piece) for piece in row] for row in table]
    return item


def _split_from_json(item: Mapping[str, Any]) -> Split:
    name = item["kind"]
    if name not in KINDS:
        raise LayoutError(f"a dimension's kind is one of {sorted(KINDS)}, got {name!r}")
    parameters = {key: value for key, value in item.items() if key not in ("axes", "kind")}
    if "split_factors" in parameters:
        parameters["split_factors"] = tuple(parameters["split_factors"])
    return Split(tuple(item["axes"]), KINDS[name](**parameters))
