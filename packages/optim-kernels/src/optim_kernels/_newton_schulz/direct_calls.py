"""Which calls of Newton–Schulz and its products compute directly, without the operators that torch has registered."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from optim_kernels._impl import PLAIN_TYPES

NO_TANGENTS = (
    "Newton–Schulz and its products have no forward-mode derivative (jvp), and one of their tensors has a tangent; use "
    "reverse mode (backward), or detach it"
)


def can_compute_directly(*tensors: Tensor | None) -> bool:
    """Whether a function of ``tensors`` may compute directly: nothing is traced and no gradient is wanted.

    Otherwise the call goes through the function's registered operator, which costs tens of microseconds.
    """
    if torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0:
        _refuse_tangents(*tensors)
    wants_grad = torch.is_grad_enabled()
    return all(x is None or (type(x) in PLAIN_TYPES and not (wants_grad and x.requires_grad)) for x in tensors)


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether one of ``tensors`` is a wrapper in a transform of ``torch.func`` (``vmap``, ``grad``): without memory."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return not torch.compiler.is_compiling() and any(x is not None and is_wrapped(x) for x in tensors)


def _refuse_tangents(*tensors: Tensor | None) -> None:
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(NO_TANGENTS)
