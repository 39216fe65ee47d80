"""Which implementation updates a tensor: the Triton kernels or plain torch, and why.

The choice is made once, from what the tensor is, and never changes silently: ``impl="triton"`` where the kernels
cannot run is an error that says what stands in the way.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

Impl = Literal["auto", "torch", "triton"]

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_impl(impl: str) -> None:
    """Raise ``ValueError`` unless ``impl`` is one of the three choices."""
    if impl not in get_args(Impl):
        raise ValueError(f"impl must be one of {get_args(Impl)}, got {impl!r}")


@cache
def has_triton() -> bool:
    """Whether Triton can be imported here."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on tensors of the CPU (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def why_not_triton(tensor: Tensor, *, dtypes: tuple[torch.dtype, ...] = KERNEL_DTYPES) -> str | None:
    """What keeps the kernels from updating ``tensor``, in a few words; ``None`` where they can."""
    if not has_triton():
        return "triton is not installed"
    if not (tensor.is_cuda or (is_interpreted() and tensor.device.type == "cpu")):
        return f"it is on {tensor.device.type}"
    if tensor.dtype not in dtypes:
        return f"its dtype is {tensor.dtype}"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}"
    return None


def use_triton(impl: Impl, tensor: Tensor, name: str, *, dtypes: tuple[torch.dtype, ...] = KERNEL_DTYPES) -> bool:
    """Whether the kernels update ``tensor``, which ``name`` names in errors.

    ``"auto"`` takes them on CUDA only: the interpreter is for tests, so it has to be asked for with ``"triton"``.

    Raises:
        RuntimeError: ``impl="triton"`` and the kernels cannot run.
    """
    if impl == "torch" or (impl == "auto" and not tensor.is_cuda):
        return False
    reason = why_not_triton(tensor, dtypes=dtypes)
    if reason is not None and impl == "triton":
        raise RuntimeError(f"impl='triton' cannot update {name}: {reason}; use impl='auto' or 'torch'")
    return reason is None
