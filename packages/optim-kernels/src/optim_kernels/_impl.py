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
_IMPLS = get_args(Impl)

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Tensors of other classes (DTensors, fake tensors) may hold no values of their own.
PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def check_impl(impl: str) -> None:
    """Raise ``ValueError`` unless ``impl`` is one of the three choices."""
    # asked of every call; an array of names cannot be compared with them
    if not isinstance(impl, str) or impl not in _IMPLS:
        raise ValueError(f"impl must be one of {_IMPLS}, got {impl!r}")


@cache
def has_triton() -> bool:
    """Whether Triton can be imported here."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on tensors of the CPU (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@cache
def multiplies_fp64_fast(device: torch.device) -> bool:
    """Whether products of fp64 matrices take only twice the time of fp32 ones: on CPUs, and GPUs made for it."""
    if device.type != "cuda":
        return device.type == "cpu"
    # A100, H100 and H200, B200; other GPUs have 1/32 or 1/64 as many fp64 units as fp32 units
    return torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0))


def why_not_on(device: torch.device) -> str | None:
    """What keeps the kernels from running on ``device``, in a few words; ``None`` where they can."""
    if not has_triton():
        return "triton is not installed"
    if device.type == "cuda":
        return _why_not_on_gpu(device)
    return None if device.type == "cpu" and is_interpreted() else f"it is on {device.type}"


@cache
def _why_not_on_gpu(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "its GPU is one of AMD's, and the kernels have instructions of NVIDIA's"
    # fake tensors are on GPUs that need not be there
    if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"its GPU has compute capability {_words(capability)}, and Triton needs 8.0"
    return None


@cache
def why_not_products(device: torch.device) -> str | None:
    """Why cuBLAS multiplies matrices on ``device`` faster than the kernels where both can; ``None`` where it does not.

    The kernels read blocks of matrices by the bulk copy engine of Hopper and newer GPUs. For older ones Triton makes
    loads of one number each of that.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability >= (9, 0):
        return None
    return f"its GPU has compute capability {_words(capability)}, and products need the bulk copy engine of 9.0"


def why_not_grouped_on(impl: Impl, device: torch.device) -> str | None:
    """What keeps Muon's grouped launches from ``device``, or leaves it to others; ``None`` where they are taken."""
    if impl == "torch":
        return "impl='torch'"
    if impl == "auto" and device.type != "cuda":
        return f"it is on {device.type}"
    return why_not_on(device) or (why_not_products(device) if impl == "auto" else None)


def _words(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def why_not_triton(tensor: Tensor) -> str | None:
    """What keeps the kernels from updating ``tensor``, in a few words; ``None`` where they can."""
    reason = why_not_on(tensor.device)
    if reason is not None:
        return reason
    if tensor.dtype not in KERNEL_DTYPES:
        return f"its dtype is {tensor.dtype}"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}"
    return None


def use_triton(impl: Impl, tensor: Tensor, name: str) -> bool:
    """Whether the kernels update ``tensor``, which ``name`` names in errors.

    ``"auto"`` takes them on CUDA only: the interpreter is for tests, so it has to be asked for with ``"triton"``.

    Raises:
        RuntimeError: ``impl="triton"`` and the kernels cannot run.
    """
    if impl == "torch" or (impl == "auto" and not tensor.is_cuda):
        return False
    reason = why_not_triton(tensor)
    if reason is not None and impl == "triton":
        raise RuntimeError(f"impl='triton' cannot update {name}: {reason}; use impl='auto' or 'torch'")
    return reason is None
