"""Stochastic rounding to bf16 and fp16, and a bf16 parameter that keeps its fp32 master.

**Rounding.** With ``lo <= x <= hi`` the two neighbours of x in the target format, the result is ``hi`` with
probability ``(x - lo) / (hi - lo)`` and ``lo`` otherwise, so its mean is x. An average such as
``v <- beta v + (1 - beta) g**2`` stays right in bf16, where rounding to nearest loses every step smaller than half an
ulp. Let r be 16 uniform bits:

    bf16:            pattern(x) + r, low 16 bits cleared (fp32 has exactly 16 more mantissa bits)
    fp16, normal:    pattern(x) + (r >> 3), low 13 bits cleared
    fp16, subnormal: (floor(|x| 2**40) + r) >> 16 multiples of 2**-24, with the sign of x

Values beyond the largest finite one, infinities and NaN are converted as by ``.to(dtype)``.

**Random bits** come from `optim_utils._philox`, whose functions can be imported from here. With a seed they are a
stream in which an element's bits depend on its position alone (plain, or packed as kernels draw it); without a seed
they come from torch's generator.

**split16.** With b the pattern of an fp32 master: parameter = ``(b + 0x8000) >> 16`` as bf16 (the nearest; halves go
away from zero), low = the low half of b as signed int16, and b = ``(parameter << 16) + low``: four bytes hold both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optim_utils._dtensors import is_dtensor
from optim_utils._philox import Word, packed_philox_uint16, philox_2x32, philox_4x32, philox_uint32, random_bits

__all__ = [
    "join_master",
    "packed_philox_uint16",
    "philox_2x32",
    "philox_4x32",
    "philox_uint32",
    "random_bits",
    "round_with_bits",
    "split_master",
    "stochastic_round",
    "stochastic_round_",
]

_BF16_MAX = torch.finfo(torch.bfloat16).max
_FP16_MAX = torch.finfo(torch.float16).max
_FP16_SMALLEST_NORMAL = torch.finfo(torch.float16).smallest_normal


def round_with_bits(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """x rounded to ``dtype`` (bf16 or fp16) by the given random bits: int32 values in [0, 2**16), shaped like x.

    This is the rule of the module docstring without a generator of its own: a reference for kernels and their tests.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"round_with_bits takes a tensor x, got a {type(x).__name__}")
    if x.is_complex() or x.layout != torch.strided:
        raise TypeError(f"round_with_bits takes a dense tensor x of real numbers, got {x.dtype} in layout {x.layout}")
    if _dtype_of(bits) not in (torch.int32, torch.int64):
        raise TypeError(f"bits must be an int32 tensor, of values in [0, 2**16), got {_dtype_of(bits)}")
    if bits.shape != x.shape:
        raise ValueError(f"bits must be of x's shape {tuple(x.shape)}, got {tuple(bits.shape)}")
    x = x.detach().resolve_neg().to(torch.float32)
    if dtype == torch.bfloat16:
        rounded = ((x.view(torch.int32) + bits) & ~0xFFFF).view(torch.float32)
        largest = _BF16_MAX
    elif dtype == torch.float16:
        normal = ((x.view(torch.int32) + (bits >> 3)) & ~0x1FFF).view(torch.float32)
        tiny = x.abs().clamp(max=_FP16_SMALLEST_NORMAL)
        multiples = ((tiny * 2.0**40).to(torch.int32) + bits) >> 16
        subnormal = (multiples.to(torch.float32) * 2.0**-24).copysign(x)
        rounded = torch.where(x.abs() < _FP16_SMALLEST_NORMAL, subnormal, normal)
        largest = _FP16_MAX
    else:
        raise TypeError(f"stochastic rounding is defined for torch.bfloat16 and torch.float16, got {dtype!r}")
    # The comparison is false for NaN, so NaN, infinities and what overflows take torch's own conversion.
    return torch.where(x.abs() <= largest, rounded, x).to(dtype)


def stochastic_round(
    x: Tensor,
    dtype: torch.dtype,
    *,
    generator: torch.Generator | None = None,
    seed: Word | None = None,
    offset: Word = 0,
    out: Tensor | None = None,
) -> Tensor:
    """x rounded to ``dtype`` (bf16 or fp16), up or down at random so that its mean is x.

    With ``seed`` the bits are the plain stream from element ``offset`` on: the same for every device, chunking and
    shard, and compiled without a graph break. Without it they come from ``generator`` or torch's default one.
    Float64 input is rounded to fp32 first, which moves the probability by at most 2**-17 (bf16) or 2**-14 (fp16). The
    result has no gradient.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"stochastic_round takes a floating tensor, got a {type(x).__name__}")
    if not x.is_floating_point() or x.layout != torch.strided:
        raise TypeError(f"stochastic_round takes a dense floating tensor, got {x.dtype} in layout {x.layout}")
    if is_dtensor(x) or is_dtensor(out):
        raise TypeError(
            "stochastic_round takes plain tensors, got a DTensor: give this rank's part, .to_local(), with the place "
            "of its first element as offset"
        )
    if not (out is None or isinstance(out, Tensor)):
        raise TypeError(f"out must be a {dtype} tensor of shape {tuple(x.shape)}, got a {type(out).__name__}")
    if out is not None and (out.dtype != dtype or out.shape != x.shape):
        raise ValueError(f"out must be {dtype} of shape {tuple(x.shape)}, got {out.dtype} of shape {tuple(out.shape)}")
    bits = random_bits(x.shape, x.device, generator=generator, seed=seed, offset=offset)
    rounded = round_with_bits(x, dtype, bits)
    return rounded if out is None else out.copy_(rounded)


def stochastic_round_(
    dst: Tensor,
    src: Tensor,
    *,
    generator: torch.Generator | None = None,
    seed: Word | None = None,
    offset: Word = 0,
) -> Tensor:
    """dst, filled with src rounded to its dtype; the arguments are those of :func:`stochastic_round`."""
    if not isinstance(dst, Tensor):
        raise TypeError(f"dst must be a bfloat16 or float16 tensor, got a {type(dst).__name__}")
    if isinstance(src, Tensor) and src.shape != dst.shape:
        raise ValueError(f"dst must be of src's shape {tuple(src.shape)}, got {tuple(dst.shape)}")
    return stochastic_round(src, dst.dtype, generator=generator, seed=seed, offset=offset, out=dst)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest bf16 parameter of an fp32 master and the int16 low half that restores it (split16).

    NaN is stored as the pattern 0x7fc00000: the 0x7fffffff that GPUs produce would carry into the sign and read as -0.
    """
    if _dtype_of(master) != torch.float32:
        raise TypeError(f"split_master takes a float32 master, got {_dtype_of(master)}")
    master = master.resolve_neg()
    pattern = torch.where(master.isnan(), 0x7FC00000, master.view(torch.int32))
    parameter = ((pattern + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    low = (pattern << 16 >> 16).to(torch.int16)
    return parameter, low


def join_master(parameter: Tensor, low: Tensor) -> Tensor:
    """The fp32 master of a bf16 parameter and its low half; exact inverse of :func:`split_master`.

    To a finite parameter that was overwritten from outside, ``low`` still adds at most half an ulp. A negative ``low``
    of a zero is dropped: ``(0 << 16) + low`` would be a NaN. `split_master` never gives such a pair.
    """
    if _dtype_of(parameter) != torch.bfloat16 or _dtype_of(low) != torch.int16:
        raise TypeError(f"join_master takes bfloat16 and int16, got {_dtype_of(parameter)} and {_dtype_of(low)}")
    if parameter.shape != low.shape:
        raise ValueError(f"parameter and low must be of one shape, got {tuple(parameter.shape)} and {tuple(low.shape)}")
    high = parameter.resolve_neg().view(torch.int16).to(torch.int32)
    remainder = torch.where((high & 0x7FFF) == 0, low.clamp(min=0), low)
    return ((high << 16) + remainder).view(torch.float32)


def _dtype_of(given: object) -> torch.dtype | str:
    """The dtype of a tensor; of what is none, its class."""
    return given.dtype if isinstance(given, Tensor) else f"a {type(given).__name__}"
