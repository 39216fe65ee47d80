"""The sum of slices in their order, as ranks have sent them, say: ``out = (s₀ + s₁ + s₂ + …) / divisor``."""

from __future__ import annotations

import torch
from torch import Tensor

from optim_kernels._dtensors import is_wrapper
from optim_kernels._impl import KERNEL_DTYPES, Impl, check_impl, use_triton


@torch.no_grad()
def sum_slices(slices: Tensor, out: Tensor, *, divisor: float = 1.0, impl: Impl = "auto") -> Tensor:
    """Add the ``slices [S, N]`` up in their order, in fp32 (fp64 for fp64), and round once, into ``out [N]``.

    The bits are those of S - 1 additions and a division in plain torch. On CUDA one launch reads each slice once.

    Args:
        slices: of a real floating dtype, one at least.
        out: of any real floating dtype, on the same device; it may be one of the slices.
        divisor: of the sum, before it is rounded.
        impl: ``"auto"`` takes the kernel on CUDA, for fp32, fp16 and bf16 in rows of consecutive elements; ``"torch"``
            plain torch, ``"triton"`` the kernel or an error.

    Returns:
        ``out``.

    Raises:
        TypeError: for slices that are no tensor.
        ValueError: for slices and an ``out`` of other shapes, dtypes or devices than these.
        RuntimeError: ``impl="triton"`` where the kernel cannot run.
    """
    check_impl(impl)
    if not isinstance(slices, Tensor):
        raise TypeError(f"slices must be one tensor [S, N], got a {type(slices).__name__}; give their torch.stack()")
    if slices.ndim != 2 or len(slices) == 0 or out.shape != slices.shape[1:]:
        raise ValueError(f"slices [S, N] with S > 0 make an out [N], got {list(slices.shape)} and {list(out.shape)}")
    if not (slices.is_floating_point() and out.is_floating_point()) or slices.device != out.device:
        raise ValueError(
            f"slices and out must be real floating-point tensors on one device, got {slices.dtype} on {slices.device} "
            f"and {out.dtype} on {out.device}"
        )
    if divisor == 0:
        raise ValueError("divisor is 0; give what the sum is to be divided by, 1 for the sum itself")
    reason = _why_not(slices, out)
    if impl == "triton" and reason is not None:
        raise RuntimeError(
            "impl='triton' adds rows of consecutive elements into a contiguous fp32, fp16 or bf16 out, got "
            f"{reason}; use impl='auto' or 'torch'"
        )
    if reason is None and out.numel() and use_triton(impl, slices, "slices"):
        from optim_kernels._kernels.slices import launch_sum

        launch_sum(slices, out, divisor)
        return out
    total = slices[0].to(torch.promote_types(torch.float32, slices.dtype), copy=True)
    for each in slices[1:]:
        total += each
    if divisor != 1:
        total /= divisor
    return out.copy_(total)


def _why_not(slices: Tensor, out: Tensor) -> str | None:
    """What keeps the kernel from reading and writing them, if anything."""
    for name, tensor in {"slices": slices, "out": out}.items():
        if is_wrapper(tensor):
            return f"{name}, an {type(tensor).__name__}"
        if tensor.is_neg():
            return f"{name}, negated lazily"
    if slices.stride(1) == 1 and out.is_contiguous() and out.dtype in KERNEL_DTYPES:
        return None
    return f"strides {list(slices.stride())} and {list(out.stride())} ({out.dtype})"
