"""Filling a live tensor from a loaded one: first the check whether that is possible, then the copy.

The live tensor keeps its identity, storage, device, dtype and sharding; the loaded tensor is brought to them:

    live      loaded    what happens
    plain     DTensor   the loaded one is gathered
    DTensor   plain     of the global shape: each rank takes its own part, nothing is communicated
    DTensor   DTensor   redistributed if mesh or placements differ
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from optim_utils._dtensors import is_dtensor, to_local

Mismatch = Literal["type", "shape", "dtype", "device"]


def find_mismatch(live: Tensor, loaded: Tensor, *, cast: bool) -> Mismatch | None:
    """Why ``live`` cannot be filled from ``loaded``, or None.

    Shapes are never broadcast; with ``cast`` a dtype may differ from floating-point to floating-point.
    """
    if live.shape != loaded.shape:
        return "shape"
    if live.layout != loaded.layout:
        return "type"
    # copying from or to a tensor without memory would silently do nothing
    if live.is_meta != loaded.is_meta:
        return "device"
    return None if fits_dtype(live, loaded, cast=cast) else "dtype"


def fits_dtype(live: Tensor, loaded: Tensor, *, cast: bool) -> bool:
    """Whether both have the same dtype, or with ``cast`` both have floating-point dtypes."""
    return live.dtype == loaded.dtype or (cast and live.is_floating_point() and loaded.is_floating_point())


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def why_unwritable(live: Tensor, loaded: Tensor) -> str | None:
    """Why ``copy_`` could not write ``loaded`` into the memory of ``live``, whose shape and dtype fit, or None."""
    local = to_local(live)
    if local.is_inference() and not torch.is_inference_mode_enabled():
        return "an inference tensor, which is written in torch.inference_mode() only"
    if is_expanded(local):
        return "an expanded tensor, whose elements share memory; clone it"
    if live.layout in _COMPRESSED and live.values().shape != loaded.values().shape:
        return f"memory for values of shape {tuple(live.values().shape)}, got {tuple(loaded.values().shape)}"
    return None


def is_expanded(tensor: Tensor) -> bool:
    """Whether elements of ``tensor`` share memory, so that it cannot be written."""
    # a tensor without elements shares nothing, and may have strides of 0, as one from a reduction has
    has_elements = tensor.layout == torch.strided and tensor.numel() > 0
    return has_elements and any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride()))


@torch.no_grad()
def fill_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Fill the live tensor of each (live, loaded) pair. Collective on the mesh's ranks if one of them is a DTensor.

    The loaded tensors may be the live ones in another order.
    """
    for (live, _), source in zip(pairs, lasting_sources(pairs)):
        _fill(live, source)


def lasting_sources(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The loaded tensor of each (live, loaded) pair; a copy where writing another live tensor could change it."""
    if torch.compiler.is_compiling():
        # a compiler cannot see storages; its program leaves out the copies that it does not need
        return [loaded.clone() for _, loaded in pairs]
    written = {storage_key(live) for live, _ in pairs}
    return [
        loaded.clone() if storage_key(loaded) in written and _memory_key(loaded) != _memory_key(live) else loaded
        for live, loaded in pairs
    ]


def sharded_like(live: Tensor, loaded: Tensor) -> Tensor:
    """``loaded``, with the mesh and placements of ``live`` if that is a DTensor and ``loaded`` a plain tensor."""
    if not is_dtensor(live) or is_dtensor(loaded):
        return loaded
    from torch.distributed.tensor import distribute_tensor

    # every rank holds the whole: no source rank has to send it
    mesh = live.device_mesh
    return distribute_tensor(loaded.detach().to(mesh.device_type), mesh, live.placements, src_data_rank=None)


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that share a storage (of values if compressed); unique for COO: `copy_` gives it new memory."""
    local = to_local(tensor)
    if local.layout in _COMPRESSED:
        local = local.values()
    return local.untyped_storage()._cdata if local.layout == torch.strided else -id(tensor)


def _memory_key(tensor: Tensor) -> tuple[int, ...]:
    """Equal for tensors that cover the same elements of one storage."""
    local = to_local(tensor)
    if local.layout != torch.strided:
        return (-id(tensor),)
    return (storage_key(local), local.storage_offset(), *local.shape, *local.stride())


def _fill(live: Tensor, loaded: Tensor) -> None:
    if is_dtensor(loaded):
        if is_dtensor(live) and loaded.device_mesh == live.device_mesh:
            loaded = loaded.redistribute(placements=live.placements)
        else:
            loaded = loaded.full_tensor()
    to_local(live).copy_(to_local(sharded_like(live, loaded)))
