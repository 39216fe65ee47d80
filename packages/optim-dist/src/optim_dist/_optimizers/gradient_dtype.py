"""The dtype in which autograd keeps and adds up gradients: ``Tensor.grad_dtype``, while an optimizer has set it.

Autograd casts arriving gradients to it and adds them in place, so that micro-batches of 16-bit parameters add up in
fp32. It belongs to the parameter, not to its bucket: one rank, which has no buckets, adds up the same way.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from optim_dist.plan import DTYPES

# since torch 2.10
IS_SUPPORTED = hasattr(Tensor, "grad_dtype")


def check_grad_dtype(dtype: object) -> None:
    """Refuse dtypes that gradients cannot have, or cannot have with this version of torch."""
    if dtype is None:
        return
    if dtype not in DTYPES:
        raise ValueError(f"grad_dtype must be None (the parameter's) or one of {DTYPES}, got {dtype!r}")
    if not IS_SUPPORTED:
        raise RuntimeError(
            f"grad_dtype={dtype} needs torch 2.10 or newer, whose tensors have a grad_dtype, and this is "
            f"{torch.__version__}; leave it out, or update torch"
        )


class GradientDtypes:
    """The parameters whose ``grad_dtype`` one optimizer has set to ``dtype``, and what it was before."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._before: list[tuple[Tensor, torch.dtype | None]] = []

    @property
    def differ(self) -> bool:
        """Whether ``set`` has changed the ``grad_dtype`` of any parameter."""
        return bool(self._before)

    def set(self, parameters: Iterable[Tensor]) -> None:
        """Set the parameters' ``grad_dtype``, and convert the gradients that they have."""
        if self._dtype is None:
            return
        for parameter in parameters:
            before = grad_dtype(parameter)
            if before != self._dtype:
                self._before.append((parameter, before))
                _convert(parameter, self._dtype)

    def put_back(self) -> None:
        """Undo ``set``, except where somebody else has changed ``grad_dtype`` since."""
        for parameter, before in self._before:
            if grad_dtype(parameter) == self._dtype:
                _convert(parameter, before)
        self._before.clear()


def grad_dtype(parameter: Tensor) -> torch.dtype | None:
    """The dtype in which autograd keeps a parameter's gradients; None: that in which they arrive."""
    found: torch.dtype | None = getattr(parameter, "grad_dtype", parameter.dtype)
    return found


def _convert(parameter: Tensor, dtype: torch.dtype | None) -> None:
    # torch refuses a grad_dtype that differs from the dtype of an existing gradient
    gradient, parameter.grad = parameter.grad, None
    setattr(parameter, "grad_dtype", dtype)  # noqa: B010  torch 2.9 does not know the name
    if gradient is not None:
        parameter.grad = gradient.to(dtype or parameter.dtype)
