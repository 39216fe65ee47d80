"""Layouts from and to DTensor's device meshes and placements.

What a rank owns is found by replaying torch's own splitting (see ``placements``), not by trusting a shortcut, so that
uneven and strided shards are read as torch stores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args

from optim_redist._mesh import as_shape
from optim_redist.errors import LayoutError, UnsupportedError
from optim_redist.layout import Layout, Mesh, ReduceOp
from optim_redist.placements import (
    AxisOrder,
    Placement,
    ShardOrder,
    StridedReading,
    as_shard_order,
    layout_from,
    placements_of,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement


class Placements(tuple[Any, ...]):
    """torch's placements, one per mesh axis, with the orders of axes that they cannot express.

    Attributes:
        shard_order: keyed by tensor dimension, where axes do not cut from left to right: its axes in cutting order.
    """

    shard_order: ShardOrder

    def __new__(cls, placements: Sequence[Any], shard_order: ShardOrder | None = None) -> Placements:
        made = super().__new__(cls, placements)
        made.shard_order = dict(shard_order or {})
        return made


def mesh_from(device_mesh: DeviceMesh | Mesh) -> Mesh:
    """The grid of ranks of a device mesh."""
    if isinstance(device_mesh, Mesh):
        return device_mesh
    if not hasattr(device_mesh, "mesh_dim_names"):
        raise LayoutError(f"device_mesh must be a DeviceMesh or a Mesh, got {device_mesh!r}")
    return _grid(device_mesh)


# a device mesh computes its tensor of ranks at every access
@lru_cache(maxsize=256)
def _grid(device_mesh: DeviceMesh) -> Mesh:
    ranks = device_mesh.mesh
    return Mesh(tuple(ranks.shape), names=device_mesh.mesh_dim_names, ranks=ranks.flatten().tolist())


def from_placements(
    device_mesh: DeviceMesh | Mesh,
    placements: Sequence[TorchPlacement],
    shape: Sequence[int],
    shard_order: Mapping[int, Sequence[int]] | Sequence[tuple[int, Sequence[int]]] | None = None,
    *,
    strided: StridedReading = "replay",
) -> Layout:
    """The layout of a tensor of ``shape`` that has these placements on this mesh.

    Args:
        shard_order: for tensor dimensions whose axes do not cut from left to right, the axes in cutting order: a
            dictionary, or torch's tuple of (tensor_dim, mesh_dims).
        strided: "replay" reads ``_StridedShard`` as torch's splitting does; "ordered" reads it as the order of axes
            that its split factor encodes, as FSDP means it for a parameter that was tensor-parallel before.
    """
    if isinstance(placements, str) or not isinstance(placements, Iterable):
        raise LayoutError(f"placements is {placements!r}; give a list of them, one for each axis of the mesh")
    if strided not in ("replay", "ordered"):
        raise LayoutError(f'strided is "replay" or "ordered", got {strided!r}')
    order = as_shard_order(shard_order)
    if order is None and isinstance(placements, Placements):
        order = placements.shard_order
    ours = [_ours(placement) for placement in placements]
    flat = any(placement.split_factor > 1 for placement in ours) and _cuts_flat()
    return layout_from(mesh_from(device_mesh), ours, len(as_shape(shape)), order, strided, flat=flat)


def known_layout(
    device_mesh: DeviceMesh,
    placements: Sequence[TorchPlacement],
    shape: tuple[int, ...],
    order: AxisOrder = (),
    strided: StridedReading = "replay",
) -> Layout:
    """As ``from_placements``, kept for the next call."""
    # keyed with their types: in torch 2.9 Shard(0) == _StridedShard(0, split_factor=2)
    return _known_layout(device_mesh, tuple((type(p), p) for p in placements), shape, order, strided)


@lru_cache(maxsize=4096)
def _known_layout(
    device_mesh: DeviceMesh,
    placements: tuple[tuple[type[TorchPlacement], TorchPlacement], ...],
    shape: tuple[int, ...],
    order: AxisOrder,
    strided: StridedReading,
) -> Layout:
    return from_placements(device_mesh, [placement for _, placement in placements], shape, order, strided=strided)


def from_dtensor(dtensor: DTensor, *, strided: StridedReading = "replay") -> Layout:
    """The layout of a DTensor, checked against the shape of its local tensor.

    Raises:
        LayoutError: if this rank's local tensor has another shape than its placements give in this reading.
    """
    if not hasattr(dtensor, "placements"):
        raise LayoutError(
            f"dtensor must be a DTensor, got {type(dtensor).__name__}; Layout.from_placements takes a mesh, placements "
            "and a shape"
        )
    shape, order = tuple(dtensor.shape), shard_order_of(dtensor)
    layout = known_layout(dtensor.device_mesh, dtensor.placements, shape, order, strided)
    rank = dtensor.device_mesh.get_rank()
    if rank in layout.mesh.coordinates:
        found = tuple(dtensor._local_tensor.shape)
        expected = layout.local_shape(shape, rank)
        if found != expected:
            other = "ordered" if strided == "replay" else "replay"
            raise LayoutError(
                f"rank {rank}: the local tensor has shape {found}, but {tuple(dtensor.placements)} of "
                f"{shape} gives {expected}; if it holds a _StridedShard, read it by "
                f"Layout.from_dtensor(…, strided={other!r}) and give the part to redistribute_local; if it "
                "was built from uneven parts describe it with Ragged"
            )
    return layout


def shard_order_of(dtensor: DTensor) -> AxisOrder:
    """The order of axes stored with a DTensor; none if this torch stores none or split factors encode it."""
    if any(type(placement).__name__ == "_StridedShard" for placement in dtensor.placements):
        return ()
    return tuple((as_shard_order(getattr(getattr(dtensor, "_spec", None), "shard_order", None)) or {}).items())


def to_placements(layout: Layout, shape: Sequence[int]) -> Placements:
    """torch's placements for ``layout``, one per mesh axis; orders of axes are in their ``shard_order``.

    Raises:
        NotRepresentableError: if no placements of torch express the layout. Strided shards are found of what is
            written as ``Strided``, and of ``Block`` and ``Cyclic`` over even sizes.
    """
    placements, order = placements_of(layout, shape, flat=_cuts_flat())
    return Placements([_theirs(placement) for placement in placements], order)


@lru_cache(maxsize=1)
def _cuts_flat() -> bool:
    """Whether the installed torch cuts a strided shard into all its chunks at once, as 2.9 does."""
    import torch
    from torch.distributed.tensor import placement_types

    # two indices, split factor 2, two ranks: ([0], []) flat, ([0, 1], []) nested
    parts, _ = placement_types._StridedShard(0, split_factor=2)._split_tensor(torch.arange(2), 2, with_padding=False)
    return len(parts[0]) == 1


def _ours(placement: TorchPlacement) -> Placement:
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

    name = type(placement).__name__
    if type(placement) is Shard:
        return Placement(placement.dim)
    if name == "_StridedShard":
        return Placement(placement.dim, int(placement.split_factor))  # type: ignore[attr-defined]
    if type(placement) is Replicate:
        return Placement()
    if type(placement) is Partial:
        if placement.reduce_op not in get_args(ReduceOp):
            raise UnsupportedError(
                f"{placement}: a pending {placement.reduce_op!r} cannot be reduced here; reduce it first"
            )
        return Placement(op=placement.reduce_op)
    if isinstance(placement, Partial):
        why = "a masked partial needs the mask" if name == "_MaskPartial" else f"a {name} is finished by the formula"
        raise UnsupportedError(
            f"{placement}: {why} of its operation; let DTensor redistribute it to Replicate() or Shard(dim) before it "
            "comes here"
        )
    raise UnsupportedError(f"{placement!r} of type {name} is not known here; use Shard, Replicate or Partial")


def _theirs(placement: Placement) -> TorchPlacement:
    from torch.distributed.tensor import Partial, Replicate, Shard, placement_types

    if placement.op is not None:
        return Partial(placement.op)
    if placement.tensor_dim is None:
        return Replicate()
    if placement.split_factor == 1:
        return Shard(placement.tensor_dim)
    return placement_types._StridedShard(placement.tensor_dim, split_factor=placement.split_factor)
