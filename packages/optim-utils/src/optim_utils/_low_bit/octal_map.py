"""The octal maps: a cube root that is linear between powers of 8; kept so that saved states load.

They are the dynamic map in powers of 8, with the ends of the intervals instead of their midpoints. This takes fewer
instructions at the same error: all constants but 1/7 are powers of two, segments are found by an integer operation on
the exponent, and neither end needs a special case. With P the power of two at or below m:

    decode:  (7 m - 6 P) P**2 / 8**D                                exact in fp32; 0 gives 0; D = 7 signed, 8 unsigned
    encode:  y in [8**(i-D), 8**(i-D+1)), i >= 0:  m = (2**(i+1) + floor((y - 8**(i-D)) (2 8**D / (7 4**i))) + 1) >> 1,
             which is 2**i plus the number of intervals rounded half up; y below half the first number gives 0

The largest number is below 1 (0.986 signed, 0.993 unsigned); a block's largest magnitude is scaled to that number, so
it is stored exactly and both signs are alike. The power maps are more accurate and as fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optim_utils._low_bit.fp32 import power_of_two_below

__all__ = ["decode_octal", "encode_octal"]

_PATTERN_OF_ONE_SEVENTH = 0x3E124925


def encode_octal(y: Tensor, digits: int) -> Tensor:
    """The magnitude m nearest to each y in [0, peak] (int32)."""
    # (exponent of y + 3 digits) // 3 by a multiplication: 43 / 128 is close enough to 1 / 3 below 64.
    exponent = (y.view(torch.int32) >> 23) - (127 - 3 * digits)
    i = (exponent.clamp(min=0) * 43) >> 7
    start = ((i * 3 + (127 - 3 * digits)) << 23).view(torch.float32)
    # 2**(3 digits + 1 - 2 i) / 7: the mantissa of 1/7 under another exponent.
    to_half_interval = (((3 * digits + 1 - 2 * i) << 23) + _PATTERN_OF_ONE_SEVENTH).view(torch.float32)
    m = ((2 << i) + ((y - start) * to_half_interval).to(torch.int32) + 1) >> 1
    return torch.where(y < 0.5 * 8.0**-digits, 0, m)


def decode_octal(m: Tensor, digits: int) -> Tensor:
    """The number of magnitude m."""
    m = m.to(torch.float32)
    power = power_of_two_below(m)
    return (7 * 8.0**-digits * m - 6 * 8.0**-digits * power) * power * power
