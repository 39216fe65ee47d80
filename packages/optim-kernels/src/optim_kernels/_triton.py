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

from optim_kernels._impl import is_interpreted

__all__ = ["INTERPRETED", "TRITON_DTYPES", "div_rn", "dot", "narrow", "sqrt_rn", "tl", "triton", "tuned"]

INTERPRETED = tl.constexpr(is_interpreted())

TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

# Correctly rounded in fp32, where `/` and `tl.sqrt` are approximations good to 2 ulp.
div_rn = tl.div_rn
sqrt_rn = tl.sqrt_rn


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
