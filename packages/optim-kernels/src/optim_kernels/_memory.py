"""How tensors lie in memory: whether kernels may go through them in its order, and which share it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes


def why_not_in_place(tensor: Tensor) -> str | None:
    """What keeps a kernel from going through a tensor in the order of memory; ``None`` where it can."""
    if tensor.is_neg():
        return "it is negated lazily, as imaginary parts of conjugates are"
    return None if is_dense(tensor) else "its elements are not dense in memory"


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a range of memory without gap or overlap, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def has_overlaps(tensor: Tensor) -> bool:
    """Whether elements of a tensor share their place in memory, as in one that is expanded; it cannot be written."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape))


def sharing_memory(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """The places of two tensors of which one begins inside the other; one with gaps counts as its first element."""
    spans = []
    for place, tensor in enumerate(tensors):
        if tensor.numel() and not tensor.is_meta:
            begin, numel = tensor.data_ptr(), tensor.numel() if is_dense(tensor) else 1
            spans.append((str(tensor.device), begin, begin + numel * tensor.element_size(), place))
    for (device, _, end, one), (next_device, begin, _, other) in pairwise(sorted(spans)):
        if device == next_device and begin < end:
            return min(one, other), max(one, other)
    return None


def is_aligned(*addresses: int) -> bool:
    """Whether all addresses are multiples of 16 bytes."""
    return all(address % ALIGNMENT == 0 for address in addresses)
