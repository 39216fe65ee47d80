"""fp32 as the maps of low-bit codes need it: a constant rounded once, and the power of two in a bit pattern."""

from __future__ import annotations

import struct
from fractions import Fraction

import torch
from torch import Tensor

__all__ = ["fp32", "power_of_two_below"]


def fp32(value: Fraction | float) -> float:
    """The fp32 number nearest to an exact one."""
    return struct.unpack("f", struct.pack("f", value))[0]


def power_of_two_below(m: Tensor) -> Tensor:
    """The largest power of two that is at most m, for fp32 m >= 1; 0 for 0."""
    return (m.view(torch.int32) & 0x7F800000).view(torch.float32)
