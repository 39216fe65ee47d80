"""Approximate functions that a GPU has instructions for; the interpreter takes the exact ones."""

from __future__ import annotations

from optim_kernels._triton import INTERPRETED, tl, triton


@triton.jit
def _approximation(instruction: tl.constexpr, x):
    return tl.inline_asm_elementwise(instruction, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def rcp_approx(x):
    """``1 / x`` in one instruction, good to 1 ulp; subnormal numbers count as zero."""
    if INTERPRETED:
        y = 1.0 / x
    else:
        y = _approximation("rcp.approx.ftz.f32 $0, $1;", x)
    return y


@triton.jit
def sqrt_approx(x):
    """The square root in one instruction, good to 2 ulp; subnormal numbers count as zero."""
    if INTERPRETED:
        y = tl.sqrt(x)
    else:
        y = _approximation("sqrt.approx.ftz.f32 $0, $1;", x)
    return y


@triton.jit
def power_approx(x, exponent: tl.constexpr):
    """``x**exponent`` for ``0 <= x <= 1`` in three instructions.

    Good to 1e-6 for exponents up to 1/3 and ``x >= 2**-45``.
    """
    if INTERPRETED:
        # numpy warns of the logarithm of zero
        y = tl.exp2(tl.log2(tl.maximum(x, 2.0**-126)) * exponent)
    else:
        log2 = _approximation("lg2.approx.ftz.f32 $0, $1;", x)
        y = _approximation("ex2.approx.ftz.f32 $0, $1;", log2 * exponent)
    return y


@triton.jit
def known_again(x):
    """``x`` as a new number to the compiler, which recomputes what depends on it instead of keeping it in registers."""
    return x if INTERPRETED else _approximation("mov.b32 $0, $1;", x)
