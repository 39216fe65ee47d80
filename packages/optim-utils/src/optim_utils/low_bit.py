"""Tensors in 8 or 4 bits: formats, `quantize`, `dequantize`, and the plain form that checkpoints keep.

    q = quantize(x, MOMENT8)        a LowBitTensor: uint8 codes and an fp32 scale for each block of 256
    dequantize(q)                   the numbers again

Which format for what (bytes per element with the default block; ``tests/test_low_bit.py`` and
``tests/test_low_bit_figures.py`` hold their errors):

    INT8 1.063          matrices, eigenvectors, roots: even steps; small numbers are lost, so not second moments
    UINT8_AFFINE 1.031  one-sided data: even steps from the block's minimum to its maximum
    CUBIC8, QUINTIC8_UNSIGNED 1.016  first and second moments of new states: the smallest errors, few instructions
    DYNAMIC8 1.016      first moments: steps that grow with the number, over seven decades
    MOMENT8 1.016       second moments: their roots in DYNAMIC8_UNSIGNED; what is positive stays positive
    OCTAL8, OCTAL_MOMENT8 1.016  the two above with the same errors and fewer instructions; kept so that states load
    FP8_E4M3, FP8_E5M2 1.016     what tensor cores take: ``codes.view(torch.float8_e4m3fn)`` times ``scale / 448``, or
                                 ``codes.view(torch.float8_e5m2)`` times ``scale / 57344`` (the largest of the type)
    DYNAMIC8_UNSIGNED, OCTAL8_UNSIGNED 1.016  what MOMENT8 and OCTAL_MOMENT8 store roots in
    INT4, NF4, LOG4_UNSIGNED 0.531  momentum; second moments (LOG4_UNSIGNED) at four bits

The maps are defined in closed form in `optim_utils._low_bit.codes`, blocks and scales in `optim_utils._low_bit.blocks`,
so that every device and a kernel can give the same bits. (``torch.compile`` divides with an error of 2 ulp on a GPU:
about one code in a million then goes to the other neighbour, as ``benchmarks/utils_benchmark.py`` shows.) Precision
does not depend on sharding: a block-aligned part of the quantized tensor equals the quantized part of the tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from optim_utils._dtensors import is_dtensor
from optim_utils._low_bit.formats import (
    CUBIC8,
    DYNAMIC8,
    DYNAMIC8_UNSIGNED,
    FP8_E4M3,
    FP8_E5M2,
    INT4,
    INT8,
    LOG4_UNSIGNED,
    MOMENT8,
    NF4,
    OCTAL8,
    OCTAL8_UNSIGNED,
    OCTAL_MOMENT8,
    QUINTIC8_UNSIGNED,
    UINT8_AFFINE,
    LowBitFormat,
    check_format,
    non_negative_int,
)
from optim_utils._low_bit.tensor import DTYPES, LowBitTensor, check_dtype, encode_tensor
from optim_utils._low_bit.tensor import rebuild_low_bit_tensor as rebuild_low_bit_tensor  # pickles name it here
from optim_utils.rounding import random_bits

__all__ = [
    "CUBIC8",
    "DYNAMIC8",
    "DYNAMIC8_UNSIGNED",
    "FP8_E4M3",
    "FP8_E5M2",
    "INT4",
    "INT8",
    "LOG4_UNSIGNED",
    "MOMENT8",
    "NF4",
    "OCTAL8",
    "OCTAL8_UNSIGNED",
    "OCTAL_MOMENT8",
    "QUINTIC8_UNSIGNED",
    "UINT8_AFFINE",
    "LowBitFormat",
    "LowBitTensor",
    "aligned_bounds",
    "dequantize",
    "from_plain",
    "quantize",
    "quantize_into",
    "to_plain",
]


def quantize(
    x: Tensor,
    fmt: LowBitFormat,
    *,
    dtype: torch.dtype | None = None,
    stochastic: bool = False,
    seed: int | Tensor | None = None,
    generator: torch.Generator | None = None,
    validate: bool = False,
) -> LowBitTensor:
    """x in a low-bit format; for a DTensor, codes and scales are DTensors with its placements.

    Args:
        x: float32, bfloat16, float16 or float64, of any shape.
        fmt: a preset of this module, such as ``INT8``.
        dtype: the dtype that the result reports and decodes to, one of float32, bfloat16, float16 and float64; by
            default that of x (but float32 for float64, which is converted to float32 first).
        stochastic: choose between the two neighbouring codes at random, so that the mean of the decoded number is x.
            (In one-sided formats this holds only above the lowest code, as a positive number never becomes zero, and in
            ``DYNAMIC8``, which has no -1, only down to -0.993 of the block's largest magnitude.)
        seed: seed of the plain stream of :mod:`optim_utils.rounding`; a rank's part of a DTensor takes the bits that
            its elements have in the whole tensor. Without a seed the bits come from ``generator`` or from torch's
            default generator, of which each rank has its own.
        validate: refuse negative numbers in a one-sided format, instead of clamping them to zero. Reads the result
            back, so it waits for the device.

    Raises:
        TypeError: if x is not floating-point, not dense, or is quantized already, or ``dtype`` is none of the four.
        ValueError: for a seed or generator without ``stochastic``; if a replicated DTensor is rounded at random without
            either, as its replicas would not stay alike; for what ``validate`` refuses.
    """
    check_format(fmt)
    fmt = fmt.specialized()
    _check_input(x, fmt, validate)
    if dtype is None:
        dtype = torch.float32 if x.dtype == torch.float64 else x.dtype
    check_dtype(dtype)
    blocks = encode_tensor(x.detach(), fmt, uniform=_uniform(x, stochastic, seed, generator))
    return LowBitTensor(*blocks, fmt, x.shape, dtype)


def _check_input(x: Tensor, fmt: LowBitFormat, validate: bool) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"quantize takes a floating tensor, got a {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"quantize takes a dense tensor, got {x.layout} of shape {tuple(x.shape)}; give x.to_dense()")
    if not x.is_floating_point():
        raise TypeError(f"quantize takes a floating tensor, got {x.dtype} of shape {tuple(x.shape)}")
    if isinstance(x, LowBitTensor):
        raise TypeError(
            f"the tensor of shape {tuple(x.shape)} is quantized already ({x.fmt.code}); dequantize it first"
        )
    if validate and fmt.unsigned and bool((x < 0).any()):
        raise ValueError(
            f"{fmt.code} codes hold no negative numbers, but the tensor of shape {tuple(x.shape)} has some"
        )


def _uniform(
    x: Tensor, stochastic: bool, seed: int | Tensor | None, generator: torch.Generator | None
) -> Tensor | None:
    if not stochastic:
        if seed is not None or generator is not None:
            raise ValueError("a seed or generator is of use with stochastic=True only")
        return None
    if is_dtensor(x):
        from optim_utils._low_bit.sharded import random_bits_of_part

        bits = random_bits_of_part(x, seed=seed, generator=generator)
    else:
        bits = random_bits(x.shape, x.device, seed=seed, generator=generator)
    return bits.to(torch.float32) * 2.0**-16


def quantize_into(codes: Tensor, scale: Tensor, x: Tensor, fmt: LowBitFormat, *, offset: Tensor | None = None) -> None:
    """Fill ``codes`` and ``scale`` (affine formats: ``offset`` too) with those of x.

    Raises:
        TypeError: if one of them or x is no tensor, or x is complex or not dense.
        ValueError: if they have other dtypes or shapes than those of a `LowBitTensor` of this format and of x's shape.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"quantize_into takes a tensor x, got a {type(x).__name__}")
    check_format(fmt)
    target = LowBitTensor(codes, scale, offset, fmt.specialized(), x.shape)
    target.copy_(x.detach())


def dequantize(t: LowBitTensor, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """The numbers of t in ``dtype`` (by default that of t), or written into ``out``, of any dtype.

    Raises:
        TypeError: if t is not quantized, or ``out`` is no tensor of its kind: a DTensor if the codes of t are.
        ValueError: if ``out`` has another shape, or another dtype than a given ``dtype``.
    """
    _check_low_bit(t, "dequantize")
    if out is None:
        return t.dequantize(dtype)
    if not isinstance(out, Tensor) or is_dtensor(out) != is_dtensor(t.codes):
        kind = "DTensor" if is_dtensor(t.codes) else "plain tensor"
        raise TypeError(f"out must be a {kind}, as the codes of t are, got a {type(out).__name__}")
    if out.shape != t.shape or (dtype is not None and out.dtype != dtype):
        raise ValueError(
            f"out must be {dtype or 'a tensor'} of shape {tuple(t.shape)}, got {out.dtype} {tuple(out.shape)}"
        )
    return out.copy_(t.dequantize(out.dtype))


def _check_low_bit(t: object, function: str) -> None:
    if not isinstance(t, LowBitTensor):
        what = f"{t.dtype} tensor of shape {tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"{function} takes a LowBitTensor, got a {what}; quantize(x, fmt) makes one")


def to_plain(t: LowBitTensor) -> dict[str, Any]:
    """``{"codes", "scale", "offset"?, "format": ints only}``, the tensors sharing memory.

    The format is ints, because strings inside a state do not survive ``torch.optim.Optimizer.load_state_dict``.
    """
    _check_low_bit(t, "to_plain")
    plain: dict[str, Any] = {"codes": t.codes.detach(), "scale": t.scale.detach()}
    if t.offset is not None:
        plain["offset"] = t.offset.detach()
    sizes = {f"size_{dim}": size for dim, size in enumerate(t.shape)}
    plain["format"] = {**t.fmt.specialized().to_ints(), "dtype": DTYPES.index(t.dtype), "dims": t.dim(), **sizes}
    return plain


def from_plain(plain: dict[str, Any], fmt: LowBitFormat | None = None) -> LowBitTensor:
    """The tensor whose plain form this is, sharing its memory.

    Raises:
        TypeError: if it is no dict, or ``fmt`` no format.
        ValueError: if it is not of format ``fmt`` (when given), or if codes or scales were cast or reshaped.
    """
    if not isinstance(plain, Mapping):
        raise TypeError(f"from_plain takes the dict that to_plain makes, got a {type(plain).__name__}")
    missing = [key for key in ("codes", "scale", "format") if key not in plain]
    if missing:
        raise ValueError(
            f"a plain form has codes, scale and format; found {sorted(map(str, plain))}, without {missing}"
        )
    for name in ("codes", "scale", "offset"):
        part = plain.get(name)
        if not (isinstance(part, Tensor) or (part is None and name == "offset")):
            raise ValueError(f"{name} of a plain form must be a tensor, found a {type(part).__name__}")
    ints = plain["format"]
    if not isinstance(ints, Mapping):
        raise ValueError(f"format of a plain form must be a dict of ints, found a {type(ints).__name__}")
    found = LowBitFormat.from_ints(ints)
    if fmt is not None:
        check_format(fmt)
    if fmt is not None and found != fmt:
        expected, saved = fmt.to_ints(), found.to_ints()
        differ = ", ".join(
            f"{name} {getattr(found, name)!r}, expected {getattr(fmt, name)!r}"
            for name in saved
            if saved[name] != expected[name]
        )
        raise ValueError(f"the saved tensor has another format: found {differ}")
    try:
        shape = [non_negative_int(ints[f"size_{dim}"]) for dim in range(non_negative_int(ints["dims"]))]
        dtype = DTYPES[non_negative_int(ints["dtype"])]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"the saved format lacks its shape or dtype: {ints!r} ({error})") from error
    return LowBitTensor(plain["codes"], plain["scale"], plain.get("offset"), found, shape, dtype)


def aligned_bounds(numel: int, parts: int, block_size: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of ``parts`` consecutive ranges that cover ``numel`` elements and begin between blocks.

    The ranges differ by at most one block; with fewer blocks than parts the last ones are empty.
    """
    for name, value in (("numel", numel), ("parts", parts), ("block_size", block_size)):
        if not isinstance(value, Integral):
            raise TypeError(f"{name} of aligned_bounds must be an integer, got a {type(value).__name__}")
    # products of numpy's integers would wrap around
    numel, parts, block_size = int(numel), int(parts), int(block_size)
    if numel < 0 or parts < 1 or block_size < 1:
        raise ValueError(
            f"aligned_bounds takes numel >= 0, parts >= 1, block_size >= 1, got {numel}, {parts}, {block_size}"
        )
    num_blocks = -(-numel // block_size)
    each, more = divmod(num_blocks, parts)
    starts = [min(numel, (part * each + min(part, more)) * block_size) for part in range(parts + 1)]
    return tuple(itertools.pairwise(starts))
