"""The one door to Triton: what kernels need beside ``triton.language``, compiled and interpreted alike.

Kernel modules import ``triton`` and ``tl`` from here, and nothing imports them before a kernel is wanted: the package
works without Triton. The interpreter (``TRITON_INTERPRET=1``, kernels on a machine without a GPU) lacks three things,
and each has one helper: products of bf16 (``dot``), autotuning (``tuned``), and rounding when a value is narrowed
(``narrow``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from optim_kernels._impl import is_interpreted

__all__ = [
    "INTERPRETED",
    "TRITON_DTYPES",
    "Launch",
    "after_previous",
    "current_stream",
    "div_rn",
    "dot",
    "narrow",
    "sqrt_rn",
    "tl",
    "triton",
    "tuned",
]

INTERPRETED = tl.constexpr(is_interpreted())

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.uint8: tl.uint8,
}


@triton.jit
def div_rn(x, y):
    """``x / y`` correctly rounded in fp32, where ``/`` is an approximation good to 2 ulp."""
    return tl.div_rn(x, y)


@triton.jit
def sqrt_rn(x):
    """The square root correctly rounded in fp32, where ``tl.sqrt`` is an approximation."""
    return tl.sqrt_rn(x)


@triton.jit
def after_previous(OVERLAP: tl.constexpr):
    """Wait until the launch before this one is complete, and let the next one get ready in the meantime.

    For launches with ``launch_pdl=True`` (Hopper and newer), which may start under the end of the one before. Every
    such kernel calls this before it touches memory.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b``, accumulated in fp32; fp32 operands are multiplied exactly, never as tf32."""
    # triton#11584: the interpreter multiplies the bit patterns of bf16 operands, so they are widened there
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 ``x`` rounded to the nearest value of ``dtype``, ties to even."""
    # the interpreter truncates fp32 to bf16; integer arithmetic on the pattern rounds (NaN stays NaN)
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True).to(tl.bfloat16)
    return x.to(dtype)


def tuned(configs: Sequence[Any], key: Sequence[str]) -> Callable[[Any], Any]:
    """``triton.autotune(configs, key)`` on a GPU; in the interpreter, which cannot time, the first configuration."""
    if not INTERPRETED.value:
        return triton.autotune(configs=list(configs), key=list(key))
    first = configs[0].kwargs
    return triton.heuristics({name: lambda _, value=value: value for name, value in first.items()})


def current_stream(device: torch.device) -> int:
    """The handle of the device's current stream, by the short way that Triton takes at every launch."""
    stream: int = triton.runtime.driver.active.get_current_stream(device.index)
    return stream


class Launch:
    """A kernel with its grid and compile-time arguments, launched again and again.

    Triton binds and specialises arguments on every launch, which costs tens of microseconds; here only the first launch
    does, later ones hand addresses to the compiled kernel. So arguments keep their types from launch to launch, and
    tensors that are not always aligned to 16 bytes are named in the kernel's ``do_not_specialize``.
    """

    def __init__(self, kernel: Any, grid: int, constants: Sequence[Any], **options: Any) -> None:
        self._kernel = kernel
        self._grid = (grid, 1, 1)
        self._constants = tuple(constants)
        self._options = options
        # the compiled kernel, bound to the grid; the device it was loaded on
        self._run: Any = None
        self._device = -1

    def __call__(self, tensors: Sequence[torch.Tensor], numbers: Sequence[float] = ()) -> None:
        """Launch with the kernel's tensors, then its numbers, on the current stream of the tensors' device."""
        if self._run is None:
            self._first(tensors, numbers)
        elif torch.cuda.current_device() == self._device:
            self._run(*map(torch.Tensor.data_ptr, tensors), *numbers, *self._constants)
        else:
            with torch.cuda.device(self._device):
                self._run(*map(torch.Tensor.data_ptr, tensors), *numbers, *self._constants)

    def _first(self, tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> None:
        if INTERPRETED.value:
            self._kernel[self._grid](*tensors, *numbers, *self._constants, **self._options)
            return
        self._device = tensors[0].device.index
        with torch.cuda.device(self._device):
            compiled = self._kernel[self._grid](*tensors, *numbers, *self._constants, **self._options)
        self._run = compiled[self._grid]
