"""The sum of slices (that ranks have sent, say) in their order: ``out = (s₀ + s₁ + s₂ + …) / divisor``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optim_kernels._dtensors import is_wrapper
from optim_kernels._impl import KERNEL_DTYPES, Impl, check_impl, use_triton
from optim_kernels._options import check_scalars

# The most slices that may lie apart, since each is an argument of the kernel.
MOST_APART = 64


def sum_slices(slices: Tensor | Sequence[Tensor], out: Tensor, *, divisor: float = 1.0, impl: Impl = "auto") -> Tensor:
    """Add the ``slices [S, N]`` up in their order, in fp32 (fp64 for fp64), and round once, into ``out [N]``.

    The bits are those of S - 1 additions and a division in plain torch. On CUDA one launch reads each slice once.

    Args:
        slices: of a real floating dtype, one at least; one tensor ``[S, N]``, or S tensors ``[N]`` of one dtype.
        out: of any real floating dtype, on the same device; it may be one of the slices.
        divisor: what the sum is divided by before it is rounded.
        impl: ``"auto"`` takes the kernel on CUDA, for fp32, fp16 and bf16 in rows of consecutive elements (up to 64
            tensors); ``"torch"`` plain torch, ``"triton"`` the kernel or an error.

    Returns:
        ``out``.

    Raises:
        TypeError: for slices or an ``out`` that are no tensors, and a divisor that is no number.
        ValueError: for slices and an ``out`` of other shapes, dtypes or devices than those above.
        RuntimeError: ``impl="triton"`` where the kernel cannot run.
    """
    check_impl(impl)
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a tensor [N], got a {type(out).__name__}")
    check_scalars(divisor=divisor)
    divisor, given = float(divisor), _given(slices)
    _check(slices, given, out, divisor)
    reason = _why_not(given, out)
    if impl == "triton" and reason is not None:
        raise RuntimeError(
            "impl='triton' adds rows of consecutive elements into a contiguous fp32, fp16 or bf16 out, got "
            f"{reason}; use impl='auto' or 'torch'"
        )
    if reason is None and out.numel() and use_triton(impl, slices[0], "slices"):
        from optim_kernels._kernels.slices import launch_sum

        launch_sum(slices, out, divisor)
        # tell autograd, which then refuses to differentiate through the overwritten values
        torch.autograd.graph.increment_version(out)
        return out
    return _sum_in_torch(slices, out, divisor)


def _given(slices: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The tensors that hold the slices: one ``[S, N]``, or S of them ``[N]``."""
    if isinstance(slices, Tensor):
        return [slices]
    if isinstance(slices, Sequence) and slices and all(isinstance(each, Tensor) for each in slices):
        return [*slices]
    raise TypeError(f"slices must be one tensor [S, N], or tensors [N], got {_kind_of(slices)}")


def _check(slices: Tensor | Sequence[Tensor], given: Sequence[Tensor], out: Tensor, divisor: float) -> None:
    """Raise ``ValueError`` for shapes, dtypes or devices that do not fit, and for a divisor of 0."""
    shapes = [list(each.shape) for each in given]
    num_dims = 2 if isinstance(slices, Tensor) else 1
    if any(len(shape) != num_dims or shape[-1:] != list(out.shape) for shape in shapes) or not len(slices):
        raise ValueError(
            f"slices [S, N] with S > 0 make an out [N], got {', '.join(map(str, shapes))} and {list(out.shape)}"
        )
    kinds = dict.fromkeys((each.dtype, each.device) for each in given)
    first = given[0]
    if len(kinds) > 1 or not (first.is_floating_point() and out.is_floating_point()) or first.device != out.device:
        found = ", ".join(f"{dtype} on {device}" for dtype, device in kinds)
        raise ValueError(
            "slices and out must be real floating-point tensors on one device, slices of one dtype, got "
            f"{found} and {out.dtype} on {out.device}"
        )
    if divisor == 0:
        raise ValueError("divisor is 0; give what the sum is to be divided by, 1 for the sum itself")


@torch.no_grad()
def _sum_in_torch(slices: Tensor | Sequence[Tensor], out: Tensor, divisor: float) -> Tensor:
    """The sum in plain torch, into ``out``."""
    first = slices[0]
    total = first.to(torch.promote_types(torch.float32, first.dtype), copy=True)
    for each in slices[1:]:
        total += each
    if divisor != 1:
        # by a tensor: on CUDA the quotient by a Python number is a product with its inverse, and so rounded twice
        total /= torch.full((), divisor, dtype=total.dtype, device=total.device)
    return out.copy_(total)


def _kind_of(slices: object) -> str:
    if isinstance(slices, Sequence):
        kinds = dict.fromkeys(type(each).__name__ for each in slices)
        return f"a {type(slices).__name__} of {', '.join(kinds) or 'nothing'}"
    return f"a {type(slices).__name__}"


def _why_not(given: Sequence[Tensor], out: Tensor) -> str | None:
    """What keeps the kernel from reading these slices and writing ``out``; ``None`` if nothing does."""
    for name, tensor in (*(("slices", each) for each in given), ("out", out)):
        if is_wrapper(tensor):
            return f"{name}, an {type(tensor).__name__}"
        if tensor.is_neg():
            return f"{name}, negated lazily"
    if len(given) > MOST_APART:
        return f"{len(given)} slices"
    if all(each.stride(-1) == 1 for each in given) and out.is_contiguous() and out.dtype in KERNEL_DTYPES:
        return None
    strides = ", ".join(dict.fromkeys(str(list(each.stride())) for each in given))
    return f"strides {strides} and {list(out.stride())} ({out.dtype})"
