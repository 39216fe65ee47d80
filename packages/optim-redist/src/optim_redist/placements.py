"""Layouts as one placement per mesh axis, the way torch's DTensor writes them; plain Python, without torch.

A placement says what its mesh axis does: replicate, hold contributions to a pending reduction, or split a tensor
dimension. Axes that split the same dimension are applied from left to right, or in an explicit order; each cuts the
parts that the axes before it have made:

    Shard(d)                            into p chunks, as torch.chunk does
    _StridedShard(d, split_factor=s)    into s chunks, each of these into p; a coordinate takes one of p from each
                                        (torch 2.9, "flat": into s·p chunks at once)

With even sizes a strided shard only encodes the order in which axes cut: the axis cuts after axes to its right whose
sizes multiply to s. With uneven sizes the two readings differ, so they are kept apart: ``Strided`` is what torch's
splitting gives, ``Chunk`` over axes in another order is the ordered reading. (Of 9 indices over a 4×2 mesh with s = 2,
the last two ranks hold [8] and [] as ``Strided``, [] and [8] as ``Chunk``.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Literal

from optim_redist.errors import LayoutError, NotRepresentableError
from optim_redist.index_sets import IndexSet, same
from optim_redist.layout import Axis, Block, Chunk, Cyclic, Kind, Layout, Mesh, Split, Strided

StridedReading = Literal["replay", "ordered"]
# for each tensor dimension that is split over several axes, the axes in the order in which they cut
ShardOrder = dict[int, tuple[int, ...]]
AxisOrder = tuple[tuple[int, tuple[int, ...]], ...]  # the same as pairs, to be hashed
# larger split factors are not tried: torch lists every piece, and so would this module
_MOST_PIECES = 2**20


@dataclass(frozen=True)
class Placement:
    """What one mesh axis does: replicate, or split ``tensor_dim``, or hold contributions that ``op`` combines."""

    tensor_dim: int | None = None
    split_factor: int = 1
    op: str | None = None

    def __str__(self) -> str:
        if self.tensor_dim is None:
            return "R" if self.op is None else f"Partial({self.op})"
        return f"S({self.tensor_dim})" if self.split_factor == 1 else f"_S({self.tensor_dim},{self.split_factor})"


REPLICATE = Placement()


def layout_from(
    mesh: Mesh,
    placements: Sequence[Placement],
    num_dims: int,
    shard_order: Mapping[int, Sequence[int]] | None = None,
    strided: StridedReading = "replay",
    *,
    flat: bool = False,
) -> Layout:
    """The layout that the placements, one per mesh axis, describe.

    Args:
        num_dims: dimensions of the tensor.
        shard_order: for each tensor dimension whose axes do not cut from left to right, the axes in cutting order.
        strided: "replay" reads split factors as torch's splitting does, "ordered" as the order of axes they encode.
        flat: whether torch's splitting cuts strided shards flat.
    """
    if len(placements) != mesh.num_axes:
        raise LayoutError(f"a mesh of {mesh.num_axes} axes needs as many placements, got {len(placements)}")
    partial: dict[Axis, str] = {}
    axes_of: dict[int, list[int]] = {}
    for axis, placement in enumerate(placements):
        if placement.op is not None:
            partial[axis] = placement.op
        elif placement.tensor_dim is not None:
            if not -num_dims <= placement.tensor_dim < num_dims:
                raise LayoutError(f"{placement} on axis {axis}: the tensor has {num_dims} dimensions")
            axes_of.setdefault(placement.tensor_dim % num_dims, []).append(axis)
    orders: ShardOrder = {}
    for tensor_dim, axes in (shard_order or {}).items():
        if not -num_dims <= tensor_dim < num_dims:
            raise LayoutError(f"shard_order names dimension {tensor_dim}, the tensor has {num_dims} dimensions")
        _add_order(orders, tensor_dim % num_dims, tuple(axes))
    for tensor_dim, cutting in orders.items():
        if sorted(cutting) != axes_of.get(tensor_dim, []):
            raise LayoutError(
                f"shard_order lists axes {cutting} for dimension {tensor_dim}, the placements split it over "
                f"{axes_of.get(tensor_dim, [])}"
            )
    dims: list[Split | None] = [None] * num_dims
    for tensor_dim, axes in axes_of.items():
        factors = [placements[axis].split_factor for axis in axes]
        order = orders.get(tensor_dim)
        if all(factor == 1 for factor in factors):
            # over one axis chunks are blocks, which print shorter
            dims[tensor_dim] = Split(tuple(order or axes), Chunk() if len(axes) > 1 else Block())
        elif order is not None:
            raise LayoutError(f"dimension {tensor_dim} has both split factors and a shard_order; give one of them")
        elif strided == "replay":
            dims[tensor_dim] = Split(tuple(axes), Strided(tuple(factors), flat))
        else:
            dims[tensor_dim] = Split(_order_of_factors(axes, factors, mesh), Chunk())
    return Layout(mesh, dims, partial)


def _order_of_factors(axes: Sequence[int], factors: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """The order of axes that split factors encode: each cuts after axes to its right that multiply to its factor."""
    order: list[int] = []
    for axis, factor in zip(reversed(axes), reversed(factors)):
        places = [place for place in range(len(order) + 1) if prod(mesh.sizes[a] for a in order[:place]) == factor]
        if not places:
            raise NotRepresentableError(
                f"split factor {factor} of mesh axis {axis} is no product of the sizes of axes behind it, so it "
                'says no order of axes; read it with strided="replay"'
            )
        order.insert(places[0], axis)
    return tuple(order)


def placements_of(layout: Layout, shape: Sequence[int], *, flat: bool = False) -> tuple[list[Placement], ShardOrder]:
    """One placement per mesh axis, and the orders of axes that are not left to right.

    ``flat`` says how strided shards are cut, as for ``layout_from``.

    Raises:
        NotRepresentableError: if torch's splitting cannot give this layout, or only in millions of pieces. Strided
            shards are found of what is written as ``Strided``, and of ``Block`` and ``Cyclic`` over even sizes.
    """
    layout.check_shape(shape)
    placements = [REPLICATE] * layout.mesh.num_axes
    for axis, op in layout.partial:
        placements[axis] = Placement(op=op)
    order: ShardOrder = {}
    for tensor_dim, split in enumerate(layout.dims):
        if split is not None:
            factors, cutting = _notation(layout, tensor_dim, shape[tensor_dim], flat)
            for axis in split.axes:
                placements[axis] = Placement(tensor_dim, factors.get(axis, 1))
            if list(cutting) != sorted(cutting):
                order[tensor_dim] = cutting
    return placements, order


def _notation(layout: Layout, tensor_dim: int, n: int, flat: bool) -> tuple[dict[int, int], tuple[int, ...]]:
    """Split factors by axis, and the cutting order of the axes, that give this split of a dimension of size n."""
    split = layout.dims[tensor_dim]
    assert split is not None
    axes, left_to_right = split.axes, tuple(sorted(split.axes))
    if isinstance(split.kind, Strided) and axes == left_to_right and split.kind.flat == flat:
        return dict(zip(axes, split.kind.split_factors)), axes
    if isinstance(split.kind, Chunk) or (isinstance(split.kind, Block) and len(axes) == 1):
        return {}, axes
    held = split.kind.index_sets(n, layout.axis_sizes(tensor_dim))

    def gives(kind: Kind, cutting: tuple[int, ...]) -> bool:
        found = kind.index_sets(n, [layout.mesh.sizes[axis] for axis in cutting])
        return all(map(same, _rearranged(found, cutting, axes, layout.mesh), held))

    if gives(Chunk(), left_to_right):
        return {}, left_to_right
    factors = _split_factors(split, layout.mesh, n)
    strided = Strided(tuple(factors[axis] for axis in left_to_right), flat)
    if max(factors.values()) <= _MOST_PIECES and gives(strided, left_to_right):
        return factors, left_to_right
    for cutting in [axes, *permutations(left_to_right)]:
        if gives(Chunk(), cutting):
            return {}, cutting
    raise NotRepresentableError(
        f"dimension {tensor_dim} of {layout}, {n} indices over mesh axes {axes}, is no sequence of torch's chunks; "
        "redistribute it to a layout that is, or keep it as a plain local tensor"
    )


def _split_factors(split: Split, mesh: Mesh, n: int) -> dict[int, int]:
    """The split factors by axis that express this split if sizes are even.

    A cyclic split in blocks of b over P coordinates first cuts the dimension into n / (b·P) pieces. An axis that cuts
    after axes to its right has the product of their sizes as a further factor.
    """
    if isinstance(split.kind, Strided):
        # cut by the other rule (flat or nested), or with its axes in another order
        return dict(zip(split.axes, split.kind.split_factors))
    factors = {}
    for place, axis in enumerate(split.axes):
        factors[axis] = prod(mesh.sizes[before] for before in split.axes[:place] if before > axis)
        if isinstance(split.kind, Cyclic):
            factors[axis] *= max(1, -(-n // (split.kind.block * prod(mesh.sizes[a] for a in split.axes))))
    return factors


def _rearranged(
    sets: Sequence[IndexSet], given: Sequence[int], wanted: Sequence[int], mesh: Mesh
) -> Iterable[IndexSet]:
    """``sets``, listed by linear coordinate on the axes ``given``, in the order of linear coordinates on ``wanted``."""
    for linear in range(len(sets)):
        at: dict[int, int] = {}
        for axis in reversed(wanted):
            linear, at[axis] = divmod(linear, mesh.sizes[axis])
        place = 0
        for axis in given:
            place = place * mesh.sizes[axis] + at[axis]
        yield sets[place]


def as_shard_order(
    order: Mapping[int, Sequence[int]] | Sequence[tuple[int, Sequence[int]]] | None,
) -> ShardOrder | None:
    """A shard order as a dictionary, from a dictionary or torch's tuple of (tensor_dim, mesh_dims) pairs."""
    if order is None:
        return None
    pairs = order.items() if isinstance(order, Mapping) else order
    try:
        given = [(int(tensor_dim), tuple(int(axis) for axis in axes)) for tensor_dim, axes in pairs]
    except (TypeError, ValueError):
        raise LayoutError(f"shard_order is {{tensor_dim: axes}}, or pairs of them, got {order!r}") from None
    orders: ShardOrder = {}
    for tensor_dim, axes in given:
        _add_order(orders, tensor_dim, axes)
    return orders


def _add_order(orders: ShardOrder, tensor_dim: int, axes: tuple[int, ...]) -> None:
    """Add the order of a dimension's axes; a dimension has one, also if it is counted from the last, too."""
    if orders.setdefault(tensor_dim, axes) != axes:
        raise LayoutError(f"shard_order has two orders for dimension {tensor_dim}: {orders[tensor_dim]} and {axes}")
