"""Triton kernels: the sum of slices in their order, element by element, rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from optim_kernels._triton import FUSED, div_rn, narrow, tl, triton

# Elements and warps of a program: a thread asks for 16 bytes of a 16-bit slice at a time.
BLOCK, NUM_WARPS = 1024, 4


@triton.jit(do_not_specialize=["count", "divisor"])
def sum_kernel(slices, out, stride, numel, count, divisor, DIVIDES: tl.constexpr, BLOCK: tl.constexpr):
    """``out [numel] = (Σ slices [count, numel]) / divisor``, rows ``stride`` elements apart."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < numel
    total = tl.load(slices + places, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    row = slices
    for _ in range(1, count):
        row += stride
        total += tl.load(row + places, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if DIVIDES:
        total = div_rn(total, divisor)
    tl.store(out + places, narrow(total, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["divisor"])
def sum_apart_kernel(slices, out, numel, divisor, DIVIDES: tl.constexpr, BLOCK: tl.constexpr):
    """As ``sum_kernel``, of ``slices`` that lie apart: a tuple of their addresses."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < numel
    total = tl.load(slices[0] + places, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    for number in tl.static_range(1, len(slices)):
        total += tl.load(slices[number] + places, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if DIVIDES:
        total = div_rn(total, divisor)
    tl.store(out + places, narrow(total, out.dtype.element_ty), mask=mask)


def launch_sum(slices: Tensor | Sequence[Tensor], out: Tensor, divisor: float) -> None:
    """Launch it for ``slices [S, N]`` whose rows are contiguous, or S such rows."""
    numel = out.numel()
    options: dict[str, Any] = {"num_warps": NUM_WARPS, **FUSED}
    arguments = (float(divisor), divisor != 1, BLOCK)
    grid = (triton.cdiv(numel, BLOCK),)
    # Triton launches on the current device, whichever that of its arguments is
    with torch.cuda.device_of(out):
        if isinstance(slices, Tensor):
            sum_kernel[grid](slices, out, slices.stride(0), numel, len(slices), *arguments, **options)
        else:
            sum_apart_kernel[grid](tuple(slices), out, numel, *arguments, **options)
