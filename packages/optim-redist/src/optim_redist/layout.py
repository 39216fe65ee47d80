"""What a layout is: a mesh of ranks, and for every tensor dimension which mesh axes split it and how.

A dimension of size n is split over an ordered tuple of mesh axes, major to minor, of sizes p₁, p₂, …; the coordinate

    c = ((c₁·p₂ + c₂)·p₃ + c₃) …,   P = p₁·p₂·p₃ …

of a rank on those axes says which of P disjoint index sets it holds. A rank holds the product of its index sets over
the dimensions; mesh axes that split nothing replicate. ``partial`` names axes along which the local values are
contributions that are still to be combined.

This module only describes layouts; ``ownership`` works out who holds which elements.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from optim_redist._kinds import KINDS, Block, Chunk, Cyclic, Intervals, Kind, Ragged, Strided
from optim_redist._mesh import Axis, Mesh
from optim_redist._tools.files import check_object, undamaged
from optim_redist._tools.lazy import lazy
from optim_redist.errors import LayoutError
from optim_redist.index_sets import EMPTY, IndexSet, interval, intervals, size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement

    from optim_redist.dtensor import Placements
    from optim_redist.multi_axis import MultiAxisDist
    from optim_redist.pictures import PictureFormat

__all__ = [
    "Axis",
    "Block",
    "Chunk",
    "Cyclic",
    "Intervals",
    "Kind",
    "Layout",
    "Mesh",
    "PartialInit",
    "Ragged",
    "ReduceOp",
    "Split",
    "Strided",
]

ReduceOp = Literal["sum", "avg", "min", "max", "product"]
PartialInit = Literal["owner", "divide"]  # how a pending reduction of a target begins: see ``problem``

_FORMAT = "optim-redist.layout"
_VERSION = 1
# torch counts up to 2**63. Volumes are sums over contributions and needers, of up to 2**20 ranks each, and where rounds
# are counted they have 128 bits.
_MOST_ELEMENTS = 2**80


class Split(NamedTuple):
    """One tensor dimension divided over mesh axes, major to minor."""

    axes: tuple[int, ...]
    kind: Kind = Block()


DimSpec = None | Axis | Split | Sequence[Any]


@dataclass(frozen=True, init=False)
class Layout:
    """Where the elements of a tensor live.

    ``dims`` has one entry per tensor dimension: ``None`` (not split), an axis, a tuple of axes major to minor (both
    ``Block``), or ``(axes, kind)``. Axes are numbers or names. ``partial`` maps axes to the operation that combines
    the contributions lying along them: "sum", "avg", "min", "max" or "product". An axis that the mesh does not have, or
    that is named twice, is a ``LayoutError``. Another layout's ``dims`` and ``partial`` may be given, too.

    >>> mesh = Mesh((4, 2), names=("x", "y"))
    >>> str(Layout(mesh, [("x", "y"), None]))
    '[x.y, -]'
    >>> str(Layout(mesh, [("y", Cyclic(2)), None], partial={"x": "sum"}))
    '[y~2, -]+sum(x)'
    """

    mesh: Mesh
    dims: tuple[Split | None, ...]
    partial: tuple[tuple[int, ReduceOp], ...]
    _hash: int = field(repr=False, compare=False)

    def __init__(
        self,
        mesh: Mesh,
        dims: Sequence[DimSpec],
        # Any: to type checkers a dict[str, str] is no Mapping[Axis, str]
        partial: Mapping[Any, str] | Iterable[tuple[Axis, str]] | None = None,
    ) -> None:
        if not isinstance(mesh, Mesh):
            raise LayoutError(
                f"a layout's mesh is a Mesh, got {mesh!r}; make one by Mesh(sizes, names, ranks), or the layout from a "
                "DeviceMesh by Layout.from_placements"
            )
        if not isinstance(dims, Iterable):
            raise LayoutError(f"dims has one entry for each tensor dimension, as in [None, 0], got {dims!r}")
        splits = tuple(_as_split(mesh, spec) for spec in dims)
        ops = tuple(sorted((mesh.axis(axis), _as_op(op)) for axis, op in _pairs(partial)))
        used = [axis for split in splits if split for axis in split.axes] + [axis for axis, _ in ops]
        if len(set(used)) != len(used):
            raise LayoutError(
                f"a mesh axis splits one dimension or is partial, once; got dims {dims}, partial {partial}"
            )
        kinds = {op for _, op in ops}
        if len(kinds) > 1 and not kinds <= {"sum", "avg"}:
            raise LayoutError(f"only sum and avg may be pending together, got {sorted(kinds)}; reduce one first")
        # layouts are in the keys of every cache, so their hash is computed once
        vars(self).update(mesh=mesh, dims=splits, partial=ops, _hash=hash((mesh, splits, ops)))

    @classmethod
    def of_splits(cls, mesh: Mesh, dims: tuple[Split | None, ...]) -> Layout:
        """The layout with these splits and without contributions; that they fit the mesh is not checked."""
        made = cls.__new__(cls)
        vars(made).update(mesh=mesh, dims=dims, partial=(), _hash=hash((mesh, dims, ())))
        return made

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # not by its attributes, since a hash may differ in another process
        return Layout, (self.mesh, self.dims, self.partial)

    @property
    def num_dims(self) -> int:
        return len(self.dims)

    @lazy
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
        """What a rank holds, dimension by dimension; empty sets if it is not in the mesh."""
        sets = self.index_sets(shape)
        if rank not in self.mesh.coordinates:
            if not isinstance(rank, int):
                raise LayoutError(f"a rank is a whole number, got {rank!r}")
            return tuple(EMPTY for _ in shape)
        return tuple(sets[k][self.coordinate(rank, k)] for k in range(len(shape)))

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of the rank's local tensor."""
        return tuple(map(size, self.indices(shape, rank)))

    def slices(self, shape: Sequence[int]) -> dict[int, list[list[tuple[int, int]]]]:
        """For every rank the half-open intervals that it holds, one list per dimension; ``from_slices`` reads them."""
        return {rank: [list(intervals(held)) for held in self.indices(shape, rank)] for rank in self.mesh.ranks}

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ``LayoutError`` unless these are sizes, one for each dimension of the layout."""
        try:
            # numbers of other types divide into parts that are none
            list(map(index, shape))
        except TypeError:
            raise LayoutError(f"shape must be a sequence of whole sizes, got {shape!r}") from None
        if len(shape) != len(self.dims):
            raise LayoutError(f"layout {self} is for {len(self.dims)} dimensions, the shape is {tuple(shape)}")
        if min(shape, default=0) < 0:
            raise LayoutError(f"sizes are not negative, got shape {tuple(shape)}")
        if prod(shape) > _MOST_ELEMENTS:
            raise LayoutError(f"a tensor has at most 2**80 elements, got shape {tuple(shape)}")

    def canonical(self, shape: Sequence[int]) -> Layout:
        """The one layout that stands for all with the same ownership of a tensor of this shape."""
        from optim_redist.canonical import canonical

        return canonical(self, shape)

    @classmethod
    def from_slices(
        cls, mesh: Mesh, shape: Sequence[int], slices: Mapping[int, Sequence[Iterable[tuple[int, int]]]]
    ) -> Layout:
        """The layout in which every rank holds the given half-open intervals, one list per dimension."""
        from optim_redist.ownership import from_slices

        return from_slices(mesh, shape, slices)

    @classmethod
    def from_placements(
        cls,
        device_mesh: DeviceMesh | Mesh,
        placements: Sequence[TorchPlacement],
        shape: Sequence[int],
        shard_order: Mapping[int, Sequence[int]] | Sequence[tuple[int, Sequence[int]]] | None = None,
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
        from optim_redist._multi_axis.layout import from_layout

        return from_layout(self, shape)

    def picture(self, shape: Sequence[int], dims: Sequence[int] = (0, 1), fmt: PictureFormat = "ascii") -> Any:
        """Which rank owns which cell of a tensor of ``shape``: text, SVG text or a matplotlib figure."""
        from optim_redist.pictures import layout_picture

        return layout_picture(self, shape, dims, fmt)

    def __str__(self) -> str:
        return self._text

    @lazy
    def _text(self) -> str:
        names = self.mesh.axis_names
        items = [split.kind.text([names[axis] for axis in split.axes]) if split else "-" for split in self.dims]
        ops: dict[str, list[str]] = {}
        for axis, op in self.partial:
            ops.setdefault(op, []).append(names[axis])
        return f"[{', '.join(items)}]" + "".join([f"+{op}({','.join(found)})" for op, found in ops.items()])

    def to_json(self) -> dict[str, Any]:
        return {
            "format": f"{_FORMAT}/{_VERSION}",
            "mesh": self.mesh.to_json(),
            "dims": [None if split is None else _split_json(split) for split in self.dims],
            "partial": {str(axis): op for axis, op in self.partial},
        }

    def to_text(self) -> str:
        """``to_json`` in one line; empty for what a compiler has in place of a layout that it traces the making of."""
        return json.dumps(self.to_json()) if vars(self) else ""

    @classmethod
    @undamaged("the JSON of a layout", LayoutError)
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        check_object(data, "a layout", LayoutError)
        name, _, version = str(data.get("format", f"{_FORMAT}/{_VERSION}")).partition("/")
        if name != _FORMAT or not version.isdecimal() or int(version) > _VERSION:
            raise LayoutError(f"a layout of format {_FORMAT}/{_VERSION} or older is readable, got {data.get('format')}")
        dims = [None if item is None else _split_from_json(item) for item in data["dims"]]
        partial: dict[Axis, str] = {int(axis): op for axis, op in data.get("partial", {}).items()}
        return cls(Mesh.from_json(data["mesh"]), dims, partial)


def check_layouts(**given: object) -> None:
    """Raise ``LayoutError`` if any argument is not a ``Layout``, but a text, for example; keywords are their names."""
    for name, layout in given.items():
        if not isinstance(layout, Layout):
            raise LayoutError(f"{name} must be a Layout, got {layout!r}; parse_layout(text, mesh) makes one of a text")


def _as_split(mesh: Mesh, spec: DimSpec) -> Split | None:
    axes: Any = spec
    kind: Kind = Block()
    if isinstance(spec, Split):
        axes, kind = spec.axes, spec.kind
    elif isinstance(spec, Sequence) and len(spec) == 2 and isinstance(spec[1], Kind):
        axes, kind = spec[0], spec[1]
    if isinstance(axes, AbstractSet):
        raise LayoutError(f"the axes of a dimension are in order, major to minor, and {axes!r} has none; give a tuple")
    if isinstance(axes, Kind) or not isinstance(axes, int | str | Iterable | None):
        raise LayoutError(f"a dimension is None, an axis, a tuple of axes or (axes, kind), got {spec!r}")
    numbers = tuple(mesh.axis(axis) for axis in ((axes,) if isinstance(axes, int | str) else axes or ()))
    return Split(numbers, kind) if numbers else None


def _pairs(partial: Any) -> list[tuple[Axis, str]]:
    try:
        return [(axis, op) for axis, op in (partial.items() if isinstance(partial, Mapping) else partial or ())]
    except (TypeError, ValueError):
        raise LayoutError(f'partial maps axes to operations, as in {{"dp": "sum"}}, got {partial!r}') from None


def _as_op(op: str) -> ReduceOp:
    if op not in get_args(ReduceOp):
        raise LayoutError(f"a pending reduction is one of {get_args(ReduceOp)}, got {op!r}")
    return op  # type: ignore[return-value]


def _split_json(split: Split) -> dict[str, Any]:
    item: dict[str, Any] = {"axes": list(split.axes), "kind": type(split.kind).__name__.lower()}
    match split.kind:
        case Strided(factors, flat):
            item["split_factors"] = list(factors)
            if flat:
                item["flat"] = True
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
