"""The two maps of 4 bits that are no integers: NF4 and sixteen steps over six decades.

**NF4** (Dettmers et al., QLoRA, arXiv 2305.14314, appendix E): quantiles of the normal distribution, scaled to [-1, 1].
The nearest to y is found by counting the middles of neighbours, p_k above zero or -q_k below, that |y| has reached; a
number by choosing along the code's bits. A sum on one unit of a GPU replaces a choice on another, half as fast one:

    middle k = p_k + [y < 0] (q_k - p_k)          number = even number + [code is odd] (odd number - even number)

(the differences of the table are such that these sums are exact in fp32).

**Log**: 0 and q**-j for j = 14 ... 0, q = 10**(6/14); the code of q**-j is 15 - j. The middle between q**-j and its
lower neighbour is c q**-j with c = (1 + 1/q) / 2, so j is found as a number of factors q, digit by digit:

    for steps in 8, 4, 2, 1:   if s < c q**-(steps-1):  s <- s q**steps,  j <- j + steps

A table would do too, but a GPU would have to fetch it from the host at each call.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from optim_utils._dynamic_map import fp32

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
_ZERO = 7  # codes count from here, modulo 16
_BEYOND = 2.0  # a middle that is never reached: there is one number less below zero


def _middles(numbers: list[float]) -> list[float]:
    return [fp32(abs(a + b) / 2) for a, b in itertools.pairwise(numbers)]


def _with_differences(firsts: list[float], seconds: list[float]) -> list[tuple[float, float]]:
    return [(fp32(a), fp32(fp32(b) - fp32(a))) for a, b in zip(firsts, seconds)]


_MIDDLES = _with_differences(_middles(_NF4[_ZERO:]), [*_middles(_NF4[_ZERO::-1]), _BEYOND])  # p_k, q_k - p_k
_BY_CODE = _NF4[_ZERO:] + _NF4[:_ZERO]
_PAIRS = _with_differences(_BY_CODE[::2], _BY_CODE[1::2])  # even number, odd number - even number

_LOWEST = 1e-6
_RATIO = _LOWEST ** (-1 / 14)  # q
_MIDDLE = (1 + 1 / _RATIO) / 2  # c


def encode_nf4(y: Tensor) -> Tensor:
    """The code of the nearest NF4 number (int32)."""
    magnitude, negative = y.abs(), (y < 0).to(torch.float32)
    count = torch.zeros_like(y)
    for above, difference in _MIDDLES:
        count = torch.where(magnitude >= above + negative * difference, count + 1, count)
    rank = count.to(torch.int32)
    return torch.where(y < 0, -rank, rank) & 0xF


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
