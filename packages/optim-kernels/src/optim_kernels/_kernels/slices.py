"""One Triton kernel: the sum of slices in their order, element by element, rounded once."""

from __future__ import annotations

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


def launch_sum(slices: Tensor, out: Tensor, divisor: float) -> None:
    """Launch it for ``slices [S, N]`` whose rows are contiguous."""
    count, numel = slices.shape
    options: dict[str, Any] = {"num_warps": NUM_WARPS, **FUSED}
    arguments = (slices.stride(0), numel, count, float(divisor), divisor != 1, BLOCK)
    # Triton launches on the current device, whichever that of its arguments is
    with torch.cuda.device_of(slices):
        sum_kernel[(triton.cdiv(numel, BLOCK),)](slices, out, *arguments, **options)
