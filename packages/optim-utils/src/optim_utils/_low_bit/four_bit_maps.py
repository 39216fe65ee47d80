"""The two 4-bit maps besides the integers: NF4, and sixteen steps over six decades.

**NF4** (Dettmers et al., QLoRA, arXiv 2305.14314, appendix E): quantiles of the normal distribution, scaled to [-1, 1].
Encoding counts the middles between neighbouring numbers that y has reached: first the eighth of the 15 middles, then
the seven below or above it. Decoding chooses along the code's bits. In both, a sum replaces a choice between two
constants, because a GPU's unit for choices is half as fast as the one for sums:

    middle = lower one + [y has reached the eighth] (upper one - lower one)
    number = even number + [code is odd] (odd number - even number)

These sums are exact in fp32: middles are rounded to multiples of 2**-24, and the differences of the table's numbers
happen to be exact.

**Log**: 0 and q**-j for j = 14 ... 0, q = 10**(6/14); the code of q**-j is 15 - j. The middle between q**-j and its
lower neighbour is c q**-j with c = (1 + 1/q) / 2, so encoding finds j as a number of factors q, one binary digit at a
time:

    for steps in 8, 4, 2, 1:   if s < c q**-(steps-1):  s <- s q**steps,  j <- j + steps

A table would do too, but a GPU would have to fetch it from the host at each call.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from optim_utils._low_bit.fp32 import fp32

__all__ = ["decode_log", "decode_nf4", "encode_log", "encode_nf4"]

_NF4 = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]
_ZERO = 7  # the index of 0.0; codes count from here, modulo 16


def _with_differences(firsts: list[float], seconds: list[float]) -> list[tuple[float, float]]:
    return [(fp32(a), fp32(fp32(b) - fp32(a))) for a, b in zip(firsts, seconds)]


_MIDDLES = [round((a + b) / 2 * 2**24) / 2**24 for a, b in itertools.pairwise(_NF4)]
_EIGHTH = _MIDDLES[7]
_OTHERS = _with_differences(_MIDDLES[:7], _MIDDLES[8:])  # lower one, upper one - lower one
_BY_CODE = _NF4[_ZERO:] + _NF4[:_ZERO]
_PAIRS = _with_differences(_BY_CODE[::2], _BY_CODE[1::2])  # even number, odd number - even number

_LOWEST = 1e-6
_RATIO = _LOWEST ** (-1 / 14)  # q
_MIDDLE = (1 + 1 / _RATIO) / 2  # c


def encode_nf4(y: Tensor) -> Tensor:
    """The code of the nearest NF4 number (int32)."""
    reached = (y >= _EIGHTH).to(torch.float32)
    rank = reached * 8 - _ZERO
    for lower, difference in _OTHERS:
        rank = torch.where(y >= lower + reached * difference, rank + 1, rank)
    return rank.to(torch.int32) & 0xF


def decode_nf4(code: Tensor) -> Tensor:
    """The NF4 number of a code."""
    odd = (code & 1).to(torch.float32)
    choices = [even + odd * difference for even, difference in _PAIRS]
    for bit in (2, 4, 8):
        is_set = (code & bit) != 0
        choices = [torch.where(is_set, second, first) for first, second in zip(choices[::2], choices[1::2])]
    return choices[0]


def encode_log(y: Tensor) -> Tensor:
    """The code of the nearest of 0 and q**-14 ... 1 (int32)."""
    s, code = y, torch.full_like(y, 15)
    for steps in (8, 4, 2, 1):
        below = s < _MIDDLE * _RATIO ** (1 - steps)
        s = torch.where(below, s * _RATIO**steps, s)
        code = torch.where(below, code - steps, code)
    return torch.where(y >= _LOWEST / 2, code.to(torch.int32).clamp(min=1), 0)


def decode_log(code: Tensor) -> Tensor:
    """The number of a code."""
    number = torch.ones_like(code, dtype=torch.float32)
    for digit in (8, 4, 2, 1):
        number = torch.where((code & digit) == 0, number * _RATIO**-digit, number)
    return torch.where(code == 0, 0.0, number)
