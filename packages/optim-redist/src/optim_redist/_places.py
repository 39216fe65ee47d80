"""What moves of DTensors need to know of where they come from and go to, kept for the next call.

A move costs the host some hundred microseconds if layouts are read from placements and specifications are made anew at
each call, as long as torch's own redistribution takes. All of it depends on meshes, placements, shape and dtype alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed import tensor as dtensor_package
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from optim_redist._running.views import dense_strides
from optim_redist.canonical import canonical
from optim_redist.dtensor import from_dtensor, known_layout, shard_order_of
from optim_redist.layout import Layout, PartialInit
from optim_redist.placements import AxisOrder
from optim_redist.shares import shared_out


class Place(NamedTuple):
    """Where a DTensor is to be, the dtype in which it is exchanged, that of the result if it is another, and how."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    order: AxisOrder
    dtype: torch.dtype | None
    arrives_as: torch.dtype | None = None
    partial_init: PartialInit = "owner"


class Ends(NamedTuple):
    """The two ends of a move.

    Attributes:
        source, target: their layouts.
        moved_to: the target, or where gradients begin sums, the shares that stand for it.
        stays: whether every rank's part is the same in both, so that no rank has to copy.
        local_shape: of this rank's part of the source, None outside of it.
    """

    source: Layout
    target: Layout
    moved_to: Layout
    stays: bool
    local_shape: tuple[int, ...] | None


def ends_of(dtensor: DTensor, place: Place, read_as: tuple[Placement, ...] | None) -> Ends:
    """The ends of a move of the DTensor, whose local tensor is checked.

    Args:
        read_as: placements that the tensor has in truth, where it is a gradient.

    Raises:
        LayoutError: if this rank's local tensor has another shape than its placements give.
    """
    mesh, placements = dtensor.device_mesh, dtensor.placements
    order = shard_order_of(dtensor)
    types = tuple(map(type, (*placements, *place.placements, *(read_as or ()))))
    ends = _ends(mesh, placements, order, dtensor.shape, place, read_as, types, mesh.get_rank())
    if ends.local_shape is not None and dtensor._local_tensor.shape != ends.local_shape:
        # it says what is wrong
        from_dtensor(dtensor)
    return ends


@lru_cache(maxsize=4096)
def _ends(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    order: AxisOrder,
    shape: torch.Size,
    place: Place,
    read_as: tuple[Placement, ...] | None,
    # in torch 2.9 Shard(0) == _StridedShard(0, split_factor=2)
    types: tuple[type[Placement], ...],
    rank: int,
) -> Ends:
    del types
    sizes = tuple(shape)
    source = known_layout(mesh, placements, sizes, order)
    local_shape = source.local_shape(sizes, rank) if rank in source.mesh.coordinates else None
    if read_as is not None:
        pending = [
            (axis, placement.reduce_op) for axis, placement in enumerate(read_as) if isinstance(placement, Partial)
        ]
        source = Layout(source.mesh, source.dims, pending)
    target = known_layout(place.mesh, place.placements, sizes, place.order)
    # a gradient is no sum that one rank has to begin with all of it
    moved_to = target if read_as is None else shared_out(sizes, source, target)
    return Ends(source, target, moved_to, _stays(source, target, sizes), local_shape)


def _stays(source: Layout, target: Layout, shape: tuple[int, ...]) -> bool:
    if source == target:
        return True
    ranks = source.mesh.ranks
    # equal ownership is not enough for contributions: their axes decide which of them are kept
    if source.partial or target.partial or set(ranks) != set(target.mesh.ranks):
        return False
    if any(source.local_shape(shape, rank) != target.local_shape(shape, rank) for rank in ranks):
        return False
    return canonical(source, shape) == canonical(target, shape)


def specification(place: Place, shape: torch.Size, stride: tuple[int, ...] | None, dtype: torch.dtype) -> Any:
    """torch's description of a DTensor at the place, with the strides of a contiguous one by default."""
    return _specification(place.mesh, place.placements, place.order, shape, stride, dtype, *map(type, place.placements))


@lru_cache(maxsize=4096)
def _specification(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    order: AxisOrder,
    shape: torch.Size,
    stride: tuple[int, ...] | None,
    dtype: torch.dtype,
    *types: type[Placement],
) -> Any:
    del types
    if stride is None:
        stride = dense_strides(shape)
    private = dtensor_package._dtensor_spec
    meta = private.TensorMeta(shape, stride, dtype)
    if not order:
        return private.DTensorSpec(mesh, placements, tensor_meta=meta)
    entries = tuple(private.ShardOrderEntry(dim, axes) for dim, axes in sorted(order))
    return private.DTensorSpec(mesh, placements, tensor_meta=meta, shard_order=entries)
