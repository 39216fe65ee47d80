"""The power maps: evenly spaced numbers to the third power (cubic, signed) or to the fifth (quintic, without signs).

Code m stands for f**q with f = m / 2**D: q = 3 and D = 7 for each sign, q = 5 and D = 8 without signs. A number goes to
the code whose f is nearest to the number's q-th root, so steps grow with the number, and no code needs a case of its
own:

    decode:  f f f    or    (f f) (f f) f
    encode:  the m with T(m) <= y < T(m + 1), where T(m) is what decode would give for m - 1/2, and T(0) = 0

An estimate of 2**D y**(1/q) that is too low by less than one determines m with one comparison. Its rounding may differ
between devices: a kernel that takes a GPU's approximate instructions for the logarithm and the power still gives these
codes. Here the logarithm is read off the bit pattern of y = 2**e (1 + u), which is 2**23 (e + 127 + u) as an integer:

    log2 y ~ e + u + u (1 - u) / 3          too large by 0.006 at most, too small by 0.010

Less 0.006, this makes the estimate too low by at most 0.6 of a code, and never too large.

The largest numbers are (127 / 128)**3 and (255 / 256)**5; a block's largest magnitude is scaled to that, so it is
stored exactly and both signs are alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["cube", "decode_power", "encode_power", "fifth_power"]

Power = Callable[[Tensor], Tensor]


def cube(f: Tensor) -> Tensor:
    return f * f * f


def fifth_power(f: Tensor) -> Tensor:
    square = f * f
    return square * square * f


# adding and then subtracting this constant rounds to an integer, faster than the instructions for rounding
_TO_INTEGER = 1.5 * 2**23
_EXPONENTS: dict[Power, int] = {cube: 3, fifth_power: 5}


def encode_power(y: Tensor, power: Power, digits: int) -> Tensor:
    """The m (int32) whose number has the q-th root nearest to that of each y in [0, 1)."""
    q = _EXPONENTS[power]
    pattern = y.view(torch.int32)
    t = ((pattern & 0x7FFFFF) | 0x3F800000).view(torch.float32)  # 1 + u, and u (1 - u) = 3 t - t t - 2
    excess = 127 + 2 / 3 + 0.006
    exponent = pattern.to(torch.float32) * (2.0**-23 / q) + (t * (3 - t) * (1 / (3 * q)) + (digits - excess / q))
    m = (exponent.exp2() + _TO_INTEGER) - _TO_INTEGER
    return m.to(torch.int32) + (y >= power((m + 0.5) * 2.0**-digits)).to(torch.int32)


def decode_power(m: Tensor, power: Power, digits: int) -> Tensor:
    """The number that m stands for."""
    return power(m.to(torch.float32) * 2.0**-digits)
