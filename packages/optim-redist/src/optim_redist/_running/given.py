"""Tensors as callers give them: which are refused, their values in memory, and freeing those that are given up."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from optim_redist.errors import LayoutError, UnsupportedError


def waited_for(tensor: Tensor | None) -> Tensor | None:
    """The tensor, waited for if it is the result of a functional collective of torch.

    Until it is waited for, such a result is a wrapper without memory of its own to read in place or to give up.
    """
    return cast(Any, tensor).wait() if _is_arriving(tensor) else tensor


def _is_arriving(tensor: Tensor | None) -> bool:
    return _is_of("torch.distributed._functional_collectives", "AsyncCollectiveTensor", tensor)


def _is_of(module: str, name: str, tensor: object) -> bool:
    """Whether the tensor is of a class of torch that takes seconds to import; unless it is imported, none is."""
    # while another thread imports the module, it lacks the class
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(tensor, kind)


def refuse_other_than_values(tensor: Tensor | None, what: str) -> None:
    """Raise for what is more, or less, than a rank's part in memory: its values would move, and the rest be lost.

    Raises:
        LayoutError: for a DTensor, whose shape is that of the whole tensor, not of the rank's part that is needed.
        UnsupportedError: for what is no tensor, sparse and nested tensors, those that are made of other tensors, as
            low-bit tensors are, those inside of transforms of torch.func, which stand for several tensors, and those
            with a tangent of forward-mode differentiation.
    """
    if tensor is None:
        return
    if not isinstance(tensor, Tensor):
        raise UnsupportedError(f"{what} is a {type(tensor).__name__}, this takes a torch.Tensor or None")
    if tensor.is_nested:
        raise UnsupportedError(f"{what} is nested, of tensors of several shapes; move each of them")
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
    if _is_of("torch.distributed.tensor", "DTensor", tensor):
        raise LayoutError(f"{what} is a DTensor, this takes its part: give .to_local(), or the DTensor to redistribute")
    if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__") and not _is_arriving(tensor):
        raise UnsupportedError(
            f"{what} is a {type(tensor).__name__}, which is made of other tensors and has no memory of its own: move "
            "these, or what its values are as a plain tensor"
        )


def refuse_other_kinds(**options: tuple[object, type]) -> None:
    """Raise ``UnsupportedError`` for an option that is given and not of its type; keywords are the options' names."""
    for name, (value, kind) in options.items():
        if value is not None and not isinstance(value, kind):
            raise UnsupportedError(f"{name} must be a torch.{kind.__name__} or None, got {value!r}")


def is_plain(tensor: Tensor) -> bool:
    """Whether ``waited_for``, ``refuse_other_than_values`` and ``resolved`` have nothing to do; in fewer steps."""
    functorch = torch._C._functorch
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        and forward_ad._current_level < 0
        and not (functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor))
    )


def is_pending(tensor: Tensor | None) -> bool:
    """Whether the tensor's values have to be conjugated or negated before its memory has them."""
    return tensor is not None and (tensor.is_conj() or tensor.is_neg())


def resolved(tensor: Tensor | None) -> Tensor | None:
    """The tensor with its values in its memory and without autograd history.

    A view of a complex tensor may have a conjugation or negation pending, and torch refuses to combine contributions
    of which one requires a gradient.
    """
    if tensor is None:
        return None
    if tensor.requires_grad:
        tensor = tensor.detach()
    if is_pending(tensor):
        # dense, so that a collective reads this copy and takes none of its own
        return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)
    return tensor


def resolved_donated(tensor: Tensor | None) -> Tensor | None:
    """As ``resolved``; a copy takes the place of the donated tensor, which is not read again and given up."""
    found = resolved(tensor)
    if is_pending(tensor):
        give_up(tensor)
    return found


def refuse_unwritable(out: Tensor, what: str) -> None:
    """Raise LayoutError for a tensor with several elements in one place, or whose memory holds other values."""
    # one without elements has none in one place, whatever its strides
    if out.numel() and any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride())):
        raise LayoutError(f"{what} is expanded, with several of its elements in one place; give memory for each")
    if is_pending(out):
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


def refuse_freed(tensor: Tensor | None, what: str) -> None:
    """Raise LayoutError for a tensor whose memory is gone; reading it would end the process."""
    # other types of tensors need no storage of their own
    if tensor is None or type(tensor) not in (Tensor, Parameter) or tensor.is_meta:
        return
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise LayoutError(
            f"{what} has no memory: it was donated before, or its owner has freed it, as FSDP does with gathered "
            "parameters; give a tensor that has its values"
        )


def refuse_undonatable(tensor: Tensor, what: str) -> None:
    """Raise LayoutError for a tensor whose memory is also another's, or is not torch's to free."""
    refuse_freed(tensor, what)
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.numel() * tensor.element_size():
        raise LayoutError(
            f"{what} that is donated has to be all of its storage, this one is a view; clone it, or leave donate out"
        )
    if not storage.resizable():
        raise LayoutError(
            f"{what} that is donated is freed by torch, and this one's memory is not torch's own (NumPy's, perhaps); "
            "clone it, or leave donate out"
        )


def give_up(tensor: Tensor | None) -> None:
    """Free the memory of a tensor that is not needed any more, whoever still refers to it."""
    if tensor is not None:
        tensor.untyped_storage().resize_(0)
