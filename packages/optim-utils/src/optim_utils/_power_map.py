"""The power maps: evenly spaced numbers to the third power (cubic, signed) or to the fifth (quintic, without signs).

Code m stands for f**q with f = m / 2**D: q = 3 and D = 7 for each sign, q = 5 and D = 8 without signs. A number goes to
the code whose q-th root is nearest to its own, so steps grow with the number, and no code needs a case of its own:

    decode:  f f f    or    (f f) (f f) f
    encode:  the m with T(m) <= y < T(m + 1), where T(m) is what decode would give for m - 1/2, and T(0) = 0

Any estimate of 2**D y**(1/q) that is off by less than a half settles m by one comparison. A kernel may therefore take
the approximate logarithm and power that a GPU has instructions for, and still gives these codes: about 22 instructions
an element for a first and a second moment together, decoded and encoded, where the dynamic map takes 80.

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


_EXPONENTS: dict[Power, int] = {cube: 3, fifth_power: 5}


def encode_power(y: Tensor, power: Power, digits: int) -> Tensor:
    """The m whose root is nearest to that of each y in [0, 1) (int32)."""
    # a little low, so that the estimate is m or m - 1; a power by itself would take four times the instructions
    root = (y.log2() * (1 / _EXPONENTS[power])).exp2() * (2**digits * (1 - 2.0**-16))
    m = (root + 0.5).floor()
    m = m + (y >= power((m + 0.5) * 2.0**-digits))
    return m.to(torch.int32)


def decode_power(m: Tensor, power: Power, digits: int) -> Tensor:
    """The number that m stands for."""
    return power(m.to(torch.float32) * 2.0**-digits)
