"""Triton kernels: the sum of slices in their order, element by element, rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from optim_kernels._triton import Launch, div_rn, narrow, tl, triton

# Elements and warps of a program: a thread asks for 16 bytes of a 16-bit slice at a time.
BLOCK, NUM_WARPS = 1024, 4
# Kinds and sizes of sums whose launches are kept.
NUM_LAUNCHES = 256


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


class SumLaunch(Launch):
    """A kept launch of one of these kernels, for sums of the same kind and size."""

    def add(self, slices: Tensor | Sequence[Tensor], out: Tensor, numbers: Sequence[float]) -> None:
        """Launch with ``slices``, ``out`` and the kernel's numbers."""
        if self._run is None:
            self._first(out.device, (slices if isinstance(slices, Tensor) else tuple(slices), out, *numbers))
        elif isinstance(slices, Tensor):
            self.again((slices.data_ptr(), out.data_ptr(), *numbers))
        else:
            self.again((tuple(map(Tensor.data_ptr, slices)), out.data_ptr(), *numbers))


def launch_sum(slices: Tensor | Sequence[Tensor], out: Tensor, divisor: float) -> None:
    """Launch the sum of ``slices [S, N]``, whose rows are contiguous, or of S separate rows."""
    numel, divides = out.numel(), divisor != 1
    if isinstance(slices, Tensor):
        stride = slices.stride(0)
        numbers: tuple[float, ...] = (stride, numel, len(slices), float(divisor))
        launch = _launch(numel, divides, stride, (_kind(slices), _kind(out)))
    else:
        numbers = (numel, float(divisor))
        launch = _launch(numel, divides, None, (*map(_kind, slices), _kind(out)))
    launch.add(slices, out, numbers)


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device, bool]:
    """What a kernel may be compiled for."""
    return tensor.dtype, tensor.device, tensor.data_ptr() % 16 == 0


@lru_cache(maxsize=NUM_LAUNCHES)
def _launch(numel: int, divides: bool, stride: int | None, kinds: tuple[Any, ...]) -> SumLaunch:
    """The launch for an ``out [numel]`` of the last kind and slices of the others, ``stride`` apart or separate."""
    kernel = sum_apart_kernel if stride is None else sum_kernel
    return SumLaunch(kernel, triton.cdiv(numel, BLOCK), (divides, BLOCK), num_warps=NUM_WARPS)
