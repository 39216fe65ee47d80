"""The dynamic map (Dettmers et al., arXiv 2110.02861): steps that grow tenfold from decade to decade.

For i = 0 ... 6 the decade 10**(i-6) [0.1, 1] is cut into n = 2**i (signed, for each sign) or 2**(i+1) (unsigned) equal
intervals; their midpoints, 0 and 1 are the map. Interval k of decade i is numbered m = n + k. The signed code's
magnitude is m, the unsigned code is m - 1, and m = 2 n after the last interval of decade 6 stands for the number 1.

**From m.** With P = the power of two at or below m (its exponent bits, which hold i too):

    number = (18 m - 16 P + 9) 5**i / (2 first 10**7)         numerators up to 2551, first = 1 signed, 2 unsigned

where 5**i is the product of those of 5, 25 and 625 whose binary digit in i is 1.

**To m.** Factors 10**4, 10**2, 10 bring y to the top decade, while n is multiplied by 2**-4, 2**-2, 2**-1:

    z = (s - 0.1) n / 0.9,  s = y 10**(6-i)                   floor(z) is the interval if y lies between two midpoints

The middle between the last midpoint of a decade and the first of the next lies at z = 0.2 of the next decade. An
interval of the lower decade is 0.2 of one of the next, so the two midpoints lie at z = -0.1 and z = 0.5. Only the
middle below the lowest decade is another one: the one between its first midpoint and 0.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from optim_utils._low_bit.fp32 import fp32, power_of_two_below

__all__ = ["decode_dynamic", "encode_dynamic"]

_DECADES = 7


class _Constants(NamedTuple):
    bottom: float  # the middle between 0 and the lowest midpoint
    top: float  # the middle between the highest midpoint and 1
    unit: float  # 1 / (2 first 10**7)


def _constants(first: int) -> _Constants:
    unit = Fraction(1, 2 * first * 10**_DECADES)
    highest = 1 - Fraction(9, 20 * (first << (_DECADES - 1)))
    return _Constants(fp32((2 * first + 9) * unit / 2), fp32((highest + 1) / 2), fp32(unit))


_CONSTANTS = {first: _constants(first) for first in (1, 2)}


def encode_dynamic(y: Tensor, first: int) -> Tensor:
    """The number m of the midpoint nearest to each y in [0, 1] (int32): ``first - 1`` for 0, ``2**7 first`` for 1."""
    bottom, top, _ = _CONSTANTS[first]
    s, n = y, torch.full_like(y, first << (_DECADES - 1))
    for decades in (4, 2, 1):
        below = s < 10.0**-decades
        s = torch.where(below, s * 10.0**decades, s)
        n = torch.where(below, n * 0.5**decades, n)
    z = (s - 0.1) * (n * (10 / 9))
    m = n.to(torch.int32) + z.to(torch.int32) - (z < 0.2).to(torch.int32)
    m = torch.where(y >= bottom, m.clamp(min=first), first - 1)
    return torch.where(y >= top, first << _DECADES, m)


def decode_dynamic(m: Tensor, first: int) -> Tensor:
    """The number that m stands for: 0 below ``first``, 1 for ``2**7 first``."""
    m = m.to(torch.float32)
    # For first = 1 the exponent field of 2 m, for first = 2 that of m, is 128 + i.
    decade = (m * (2 // first)).view(torch.int32) >> 23
    number = 18 * m - 16 * power_of_two_below(m) + 9
    for digit in (1, 2, 4):
        number = torch.where((decade & digit) != 0, number * 5.0**digit, number)
    number = number * _CONSTANTS[first].unit
    number = torch.where(m >= first << _DECADES, 1.0, number)
    return torch.where(m >= first, number, 0.0)
