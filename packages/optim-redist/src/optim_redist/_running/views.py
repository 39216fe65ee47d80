"""Views of tensors' memory: sizes, strides and an offset relative to a tensor's first element.

Tensors are copied as integers of their elements' width, so that every bit arrives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WIDE = 16  # bytes, the most that a thread copies at once

View = tuple[tuple[int, ...], tuple[int, ...], int]
Form = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides of a tensor
FLAT: Form = ((WIDE,), (1,))  # stands for any buffer


def as_bits(tensor: Tensor) -> Tensor:
    """The ``resolved`` tensor as integers of its width, so that copies keep every bit; 16-byte elements stay."""
    bits = bits_type(tensor.dtype)
    return tensor if tensor.dtype == bits else tensor.view(bits)


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    # not view(-1), which keeps the stride of a tensor of one element: torch views that as bytes only if it is 1
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def bits_type(dtype: torch.dtype) -> torch.dtype:
    """The integer type of the same width; the type itself if there is none."""
    return _BITS.get(dtype.itemsize, dtype)


def is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a view of these sizes and strides is one piece of memory in its order."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def dense_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of these sizes."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        # as in torch
        step *= max(1, size)
    return tuple(reversed(strides))


def form_of(tensor: Tensor | None) -> Form:
    """Shape and strides of a tensor, empty if there is none."""
    return ((), ()) if tensor is None else (tuple(tensor.shape), tensor.stride())


def view_of(tensor: Tensor, view: View) -> Tensor:
    """The view, given relative to the tensor's first element."""
    sizes, strides, offset = view
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)
