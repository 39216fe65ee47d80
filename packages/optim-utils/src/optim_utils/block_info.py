"""A block of a parameter: which one it is, and how to allocate tensors that live where it lives.

A preconditioner keeps one state per block. It asks the block for its tensors instead of calling ``torch.zeros``, so
the same code works for plain tensors (`BlockInfo`) and sharded ones (`DTensorBlockInfo`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from optim_utils._dtensors import is_dtensor
from optim_utils._dtensors import to_local as _to_local  # blocks that were pickled ask for it by this name

__all__ = ["BlockInfo", "DTensorBlockInfo"]


def _identity(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(eq=False)
class BlockInfo:
    """A block and its allocators.

    Two blocks are equal if they are of one class, have the same ids, and have the same parameter or equal values in it.

    Attributes:
        param: the parameter the block belongs to.
        composable_block_ids: the parameter's number and the block's name, unique over all blocks.
        allocate_zeros_tensor: called as ``(size=, dtype=, device=)``.
        allocate_ones_tensor: called as ``(size=, dtype=, device=)``.
        allocate_eye_tensor: called as ``(n, dtype=, device=)``.
        get_tensor: maps a tensor that was allocated here to its part on this rank.
    """

    param: Tensor
    composable_block_ids: tuple[int, str]
    allocate_zeros_tensor: Callable[..., Tensor] = torch.zeros
    allocate_ones_tensor: Callable[..., Tensor] = field(init=False, repr=False)
    allocate_eye_tensor: Callable[..., Tensor] = field(init=False, repr=False)
    get_tensor: Callable[[Tensor], Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # on the instance: a function that is a class attribute would be called with the block as its first argument
        self.allocate_ones_tensor = torch.ones
        self.allocate_eye_tensor = torch.eye
        self.get_tensor = _identity

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, BlockInfo)
        return self.composable_block_ids == other.composable_block_ids and _same_values(self.param, other.param)

    def __hash__(self) -> int:
        return hash(self.composable_block_ids)


@dataclass(eq=False)
class DTensorBlockInfo(BlockInfo):
    """A block whose tensors are DTensors: ``allocate_zeros_tensor`` decides their mesh and placements.

    Ones and the identity are made from its zeros, each rank filling its own part, so nothing is communicated.
    """

    def __post_init__(self) -> None:
        self.allocate_ones_tensor = partial(_ones, self.allocate_zeros_tensor)
        self.allocate_eye_tensor = partial(_eye, self.allocate_zeros_tensor)
        self.get_tensor = _to_local


def _zeros(allocate_zeros: Callable[..., Tensor], size: object, **options: object) -> Tensor:
    tensor = allocate_zeros(size=size, **options)
    if is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"a block's tensors must be sharded or replicated, got placements {tensor.placements}")
    return tensor


def _ones(allocate_zeros: Callable[..., Tensor], size: object, **options: object) -> Tensor:
    tensor = _zeros(allocate_zeros, size, **options)
    _to_local(tensor).fill_(1)
    return tensor


def _eye(allocate_zeros: Callable[..., Tensor], n: int, **options: object) -> Tensor:
    """The identity matrix; each rank writes ones where its global row and column indices agree."""
    tensor = _zeros(allocate_zeros, (n, n), **options)
    local = _to_local(tensor)
    # on a rank outside of the mesh the local tensor is empty and has one dimension
    if local.numel():
        rows, columns = (_global_indices(tensor, dim) for dim in (0, 1))
        local.copy_(rows[:, None] == columns)
    return tensor


def _global_indices(tensor: Tensor, dim: int) -> Tensor:
    """The global indices along ``dim`` of this rank's part, in the order of the part."""
    index = torch.arange(tensor.shape[dim], device=tensor.device)
    if not is_dtensor(tensor):
        return index
    # lay the indices along `dim`, the dimension that placements split
    index = index.view([1] * dim + [-1])
    placement: Any
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate() and placement.dim % tensor.ndim == dim:
            # torch's own rule: the indices of a part need not be adjacent
            parts, _ = placement._split_tensor(index, tensor.device_mesh.size(axis), with_padding=False)
            index = parts[tensor.device_mesh.get_local_rank(axis)]
    index = index.flatten()
    if len(index) != (size := _to_local(tensor).shape[dim]):
        raise ValueError(
            f"of {tensor.shape[dim]} indices of dimension {dim}, placements {tensor.placements} give this rank "
            f"{len(index)}, its part has {size}; allocate it with Shard placements"
        )
    return index


def _same_values(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    a, b = _to_local(a), _to_local(b)
    # torch.equal raises across devices and dtypes, and on meta, where there are no values to be equal
    return a.device == b.device and a.dtype == b.dtype and not a.is_meta and torch.equal(a, b)
