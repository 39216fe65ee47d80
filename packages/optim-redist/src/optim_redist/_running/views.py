"""Views of tensors' memory: sizes, strides and an offset relative to a tensor's first element.

Tensors are copied as integers of their elements' width, so that every bit arrives.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from optim_redist.errors import LayoutError, UnsupportedError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WIDE = 16  # bytes, the most that a thread copies at once

View = tuple[tuple[int, ...], tuple[int, ...], int]
Form = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides of a tensor
FLAT: Form = ((WIDE,), (1,))  # stands for any buffer


def as_bits(tensor: Tensor) -> Tensor:
    """The ``resolved`` tensor as integers of its width, so that copies keep every bit; 16-byte elements stay."""
    bits = bits_type(tensor.dtype)
    return tensor if tensor.dtype == bits else tensor.view(bits)


def arrived(tensor: Tensor | None) -> Tensor | None:
    """The tensor, waited for if it is the result of a functional collective of torch.

    Until it is waited for, such a result is a wrapper without memory of its own to read in place or to give up.
    """
    # there is no such tensor unless its class has been imported
    package = sys.modules.get("torch.distributed._functional_collectives")
    if package is not None and isinstance(tensor, package.AsyncCollectiveTensor):
        return cast(Tensor, tensor.wait())
    return tensor


def refuse_other_than_values(tensor: Tensor | None, what: str) -> None:
    """Raise for what is more, or less, than a rank's part in memory: its values would move, and the rest be lost.

    Raises:
        LayoutError: for a DTensor, whose shape is that of the whole tensor, not of the rank's part that is needed.
        UnsupportedError: for what is no tensor, sparse tensors, those inside of transforms of torch.func, which stand
            for several tensors, and those with a tangent of forward-mode differentiation.
    """
    if tensor is None:
        return
    if not isinstance(tensor, Tensor):
        raise UnsupportedError(f"{what} is a {type(tensor).__name__}, this takes a torch.Tensor or None")
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"{what} is {tensor.layout}, and only strided tensors move; give .to_dense()")
    functorch = torch._C._functorch
    # batched gradients are of the older kind
    if functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor):
        raise UnsupportedError(
            f"{what} is inside of a transform of torch.func, such as vmap, grad or jvp, or of batched gradients, which "
            "moves do not follow; call outside of it, and let torch.autograd differentiate"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise UnsupportedError(
            f"{what} has a tangent of forward-mode differentiation, which would not move; move primal and tangent by "
            "calls of their own, as a redistribution is linear"
        )
    # there is no DTensor unless its class has been imported, which takes seconds
    package = sys.modules.get("torch.distributed.tensor")
    if package is not None and isinstance(tensor, package.DTensor):
        raise LayoutError(f"{what} is a DTensor, this takes its part: give .to_local(), or the DTensor to redistribute")


def is_plain(tensor: Tensor) -> bool:
    """Whether ``arrived``, ``refuse_other_than_values`` and ``resolved`` have nothing to do; in fewer steps."""
    functorch = torch._C._functorch
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        and forward_ad._current_level < 0
        and not (functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor))
    )


def resolved(tensor: Tensor | None) -> Tensor | None:
    """The tensor with its values in its memory and without autograd history.

    A view of a complex tensor may have a conjugation or negation pending, and torch refuses to combine contributions
    of which one requires a gradient.
    """
    if tensor is None:
        return None
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def refuse_unwritable(out: Tensor, what: str) -> None:
    """Raise LayoutError for a tensor with several elements in one place, or whose memory holds other values."""
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride())):
        raise LayoutError(f"{what} is expanded, with several of its elements in one place; give memory for each")
    if out.is_conj() or out.is_neg():
        raise LayoutError(
            f"{what} is a view with a pending conjugation or negation, which cannot be written through; give the "
            "tensor it views"
        )


def extent(tensor: Tensor) -> tuple[int, int] | None:
    """The addresses of the tensor's first byte and of the byte behind its last; None if it has no bytes."""
    if tensor.is_meta or not tensor.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


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
        step *= max(1, size)
    return tuple(reversed(strides))


def form_of(tensor: Tensor | None) -> Form:
    """Shape and strides of a tensor, empty if there is none."""
    return ((), ()) if tensor is None else (tuple(tensor.shape), tensor.stride())


def view_of(tensor: Tensor, view: View) -> Tensor:
    """The view, given relative to the tensor's first element."""
    sizes, strides, offset = view
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)
