"""The codes of low-bit formats: from a number in [-1, 1] to a code and back, in closed form.

A code has three parts: ``peak``, the number that a block's largest magnitude is scaled to; ``encode(y)``, the code
(int32 in [0, 2**bits)) of the nearest number of its map; ``decode(code)``, that number (fp32). Signed codes are two's
complement, so that code 0 is zero in every map. All arithmetic is elementwise IEEE fp32 in the order written here, and
no sum takes a rounded product, so a kernel gets the same bits whether or not its compiler fuses multiply-adds.

**Dynamic** (Dettmers et al., arXiv 2110.02861). For i = 0 ... 6 the decade 10**(i-6) [0.1, 1] is cut into n = 2**i
(signed, for each sign) or 2**(i+1) (unsigned) equal intervals; their midpoints, 0 and 1 are the map. Let interval k of
decade i have the number m = n + k; then m is the signed code's magnitude and the unsigned code plus one, and m = 2 n at
the end of decade 6 is the number 1. With P = the power of two at or below m (its exponent bits):

    decode:  (18 m - 16 P + 9) c,  c = 10**(i-7) / (2 n)           numerators up to 2551, exact in fp32
    encode:  i from y >= t_1, ..., y >= t_6, where t_i is half way between the neighbouring midpoints of decades i-1, i;
             m = n + min(floor((y - 10**(i-7)) (n / (9 10**(i-7)))), n - 1)

**Octal**: the same idea in powers of 8 and with the ends of the intervals instead of their midpoints, which takes
less than half the instructions at the same error: all constants but 1/7 are powers of two, segments are found by an
integer operation on the exponent, and neither end needs a special case. It is the cube root, linear between powers of
8:

    decode:  (7 m - 6 P) P**2 / 8**D                                exact in fp32; 0 gives 0; D = 7 signed, 8 unsigned
    encode:  y in [8**(i-D), 8**(i-D+1)), i >= 0:  m = (2**(i+1) + floor((y - 8**(i-D)) (2 8**D / (7 4**i))) + 1) >> 1,
             which is 2**i plus the number of intervals rounded half up; y below half the first number gives 0

Its largest number is below 1 (0.986 signed, 0.993 unsigned); ``peak`` is that number, so a block's largest magnitude is
stored exactly and both signs are alike.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from optim_utils._low_bit_formats import LowBitFormat

__all__ = ["Code", "code_of"]


@dataclass(frozen=True)
class Code:
    """One map between codes and numbers; see the module docstring.

    Attributes:
        peak: the number a block's largest magnitude is scaled to.
        encode: fp32 numbers in [-peak, peak] to int32 codes, the nearest.
        decode: int32 codes to fp32 numbers.
        count: how many codes there are, some of which may go unused.
    """

    peak: float
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    count: int = 256

    @functools.cached_property
    def ascending(self) -> tuple[list[float], list[int]]:
        """The map as two lists, its numbers in ascending order and the code of each."""
        code_of_number: dict[float, int] = {}
        for code, number in enumerate(self.numbers):
            if abs(number) <= self.peak:  # false for NaN
                code_of_number.setdefault(number, code)
        order = sorted(code_of_number)
        return order, [code_of_number[number] for number in order]

    @functools.cached_property
    def numbers(self) -> list[float]:
        """The number of each code."""
        return self.decode(torch.arange(self.count, dtype=torch.int32, device="cpu")).tolist()

    def look_up(self, codes: Tensor) -> Tensor:
        """``decode`` of uint8 codes: by a table where a pass over memory costs more than an instruction, on a CPU."""
        codes = codes.to(torch.int32)
        if torch.compiler.is_compiling() or codes.device.type != "cpu":
            return self.decode(codes)
        table = torch.tensor(self.numbers, dtype=torch.float32)
        return table.index_select(0, codes.flatten()).view(codes.shape)

    def encode_at_random(self, y: Tensor, uniform: Tensor) -> Tensor:
        """The code of one of y's two neighbours: the upper one if ``uniform < (y - lower) / (upper - lower)``."""
        numbers, codes = self.ascending
        table = torch.tensor(numbers, dtype=torch.float32, device=y.device)
        upper = torch.bucketize(y.contiguous(), table).clamp(1, len(numbers) - 1)
        below, above = table[upper - 1], table[upper]
        rank = torch.where(uniform < (y - below) / (above - below), upper, upper - 1)
        return torch.tensor(codes, dtype=torch.int32, device=y.device)[rank]


def code_of(fmt: LowBitFormat) -> Code:
    """The code of a format with a symmetric or one-sided map (every format but the affine ones)."""
    return _CODES[fmt.code, fmt.bits]


def _fp32(value: Fraction | float) -> float:
    """The fp32 number nearest to an exact one."""
    return struct.unpack("f", struct.pack("f", value))[0]


# --- dynamic ---------------------------------------------------------------------------------------------------------

_DECADES = 7


def _power_of_two_below(m: Tensor) -> Tensor:
    """The largest power of two that is at most m, for fp32 m >= 1; 0 for 0."""
    return (m.view(torch.int32) & 0x7F800000).view(torch.float32)


@dataclass(frozen=True)
class _Decade:
    """Constants of one decade: where it starts, when y belongs to it, its intervals and its two fp32 factors."""

    start: float
    threshold: float
    intervals: int
    to_interval: float
    to_number: float


def _decades(first: int) -> tuple[list[_Decade], float]:
    """The seven decades of the map with ``first`` intervals in the lowest, and the threshold of the number 1."""
    decades = []
    below = Fraction(0)  # the largest number of the map below this decade
    for i in range(_DECADES):
        start, n = Fraction(10) ** (i - 7), first * 2**i
        lowest = start + 9 * start / (2 * n)
        decades.append(
            _Decade(_fp32(start), _fp32((below + lowest) / 2), n, _fp32(n / (9 * start)), _fp32(start / (2 * n)))
        )
        below = 10 * start - 9 * start / (2 * n)
    return decades, _fp32((below + 1) / 2)


_DECADES_FROM = {first: _decades(first) for first in (1, 2)}


def _dynamic_encode(y: Tensor, first: int) -> Tensor:
    """The number m of the interval nearest to each y in [0, 1] (int32); below the middle of the first, 0."""
    decades, one = _DECADES_FROM[first]
    start = torch.full_like(y, decades[0].start)
    to_interval = torch.full_like(y, decades[0].to_interval)
    n = torch.full_like(y, decades[0].intervals)
    for decade in decades[1:]:
        reached = y >= decade.threshold
        start = torch.where(reached, decade.start, start)
        to_interval = torch.where(reached, decade.to_interval, to_interval)
        n = torch.where(reached, float(decade.intervals), n)
    # y between the end of a decade and the next threshold is nearest to the decade's last interval: the minimum.
    k = torch.minimum(((y - start) * to_interval).floor(), n - 1).clamp(min=0)
    m = torch.where(y >= one, float(first << _DECADES), n + k)
    return torch.where(y >= decades[0].threshold, m, 0.0).to(torch.int32)


def _dynamic_decode(m: Tensor, first: int) -> Tensor:
    """The number of interval m; of ``first * 2**7``, 1; below ``first``, 0."""
    decades, _ = _DECADES_FROM[first]
    m = m.to(torch.float32)
    power = _power_of_two_below(m)
    to_number = torch.full_like(m, decades[0].to_number)
    for decade in decades[1:]:
        to_number = torch.where(m >= decade.intervals, decade.to_number, to_number)
    number = (18 * m - 16 * power + 9) * to_number
    number = torch.where(m >= first << _DECADES, 1.0, number)
    return torch.where(m >= first, number, 0.0)


# --- octal -----------------------------------------------------------------------------------------------------------


_PATTERN_OF_ONE_SEVENTH = 0x3E124925


def _octal_encode(y: Tensor, digits: int) -> Tensor:
    """The magnitude m nearest to each y in [0, peak] (int32)."""
    # (exponent of y + 3 digits) // 3 by a multiplication: 43 / 128 is close enough to 1 / 3 below 64.
    exponent = (y.view(torch.int32) >> 23) - (127 - 3 * digits)
    i = (exponent.clamp(min=0) * 43) >> 7
    start = ((i * 3 + (127 - 3 * digits)) << 23).view(torch.float32)
    # 2**(3 digits + 1 - 2 i) / 7: the mantissa of 1/7 under another exponent.
    to_half_interval = (((3 * digits + 1 - 2 * i) << 23) + _PATTERN_OF_ONE_SEVENTH).view(torch.float32)
    m = ((2 << i) + ((y - start) * to_half_interval).to(torch.int32) + 1) >> 1
    return torch.where(y < 0.5 * 8.0**-digits, 0, m)


def _octal_decode(m: Tensor, digits: int) -> Tensor:
    """The number of magnitude m."""
    m = m.to(torch.float32)
    power = _power_of_two_below(m)
    return (7 * 8.0**-digits * m - 6 * 8.0**-digits * power) * power * power


# --- signs -----------------------------------------------------------------------------------------------------------


def _with_sign(encode: Callable[[Tensor], Tensor], largest_negative: int) -> Callable[[Tensor], Tensor]:
    """Two's complement of the magnitude that ``encode`` gives; negative ones reach only to ``largest_negative``."""

    def signed(y: Tensor) -> Tensor:
        magnitude = encode(y.abs())
        return torch.where(y < 0, -magnitude.clamp(max=largest_negative), magnitude) & 0xFF

    return signed


def _from_sign(decode: Callable[[Tensor], Tensor], largest_negative: int) -> Callable[[Tensor], Tensor]:
    def signed(code: Tensor) -> Tensor:
        negative = code > 255 - largest_negative
        number = decode(torch.where(negative, 256 - code, code))
        return torch.where(negative, -number, number)

    return signed


def _dynamic_signed() -> Code:
    # The map has 1 but no -1: its byte 0x80 is +1, magnitude 128, and negative magnitudes end at 127.
    encode = _with_sign(functools.partial(_dynamic_encode, first=1), largest_negative=127)
    return Code(1.0, encode, _from_sign(functools.partial(_dynamic_decode, first=1), largest_negative=127))


def _dynamic_unsigned() -> Code:
    def encode(y: Tensor) -> Tensor:
        return (_dynamic_encode(y, first=2) - 1).clamp(min=0)

    def decode(code: Tensor) -> Tensor:
        return _dynamic_decode(code + 1, first=2)

    return Code(1.0, encode, decode)


def _octal_signed() -> Code:
    digits, largest = 7, 127
    peak = _octal_decode(torch.tensor([largest], device="cpu"), digits).item()
    encode = _with_sign(functools.partial(_octal_encode, digits=digits), largest)
    return Code(peak, encode, _from_sign(functools.partial(_octal_decode, digits=digits), largest))


def _octal_unsigned() -> Code:
    digits, largest = 8, 255
    peak = _octal_decode(torch.tensor([largest], device="cpu"), digits).item()
    return Code(peak, functools.partial(_octal_encode, digits=digits), functools.partial(_octal_decode, digits=digits))


# --- integers, floats and small tables -------------------------------------------------------------------------------


def _integer(bits: int) -> Code:
    largest, mask = 2 ** (bits - 1) - 1, 2**bits - 1

    def encode(y: Tensor) -> Tensor:
        return (y * largest).round().to(torch.int32) & mask

    def decode(code: Tensor) -> Tensor:
        return torch.where(code > largest, code - (mask + 1), code).to(torch.float32) / largest

    return Code(1.0, encode, decode, count=mask + 1)


def _float8(dtype: torch.dtype) -> Code:
    largest = torch.finfo(dtype).max

    def encode(y: Tensor) -> Tensor:
        return (y * largest).to(dtype).view(torch.uint8).to(torch.int32)

    def decode(code: Tensor) -> Tensor:
        return code.to(torch.uint8).view(dtype).to(torch.float32) / largest

    return Code(1.0, encode, decode)


def _table(numbers: list[float], zero: int) -> Code:
    """Codes of a short ascending table, counted from its zero and modulo its length.

    By comparisons, not by gathering: a table on a GPU would be copied there at each call.
    """
    count = len(numbers)
    middles = [_fp32((a + b) / 2) for a, b in itertools.pairwise(numbers)]
    by_code = [_fp32(number) for number in numbers[zero:] + numbers[:zero]]

    def encode(y: Tensor) -> Tensor:
        rank = torch.zeros_like(y, dtype=torch.int32)
        for middle in middles:
            rank = rank + (y >= middle)
        return (rank - zero) % count

    def decode(code: Tensor) -> Tensor:
        decoded = torch.full_like(code, by_code[0], dtype=torch.float32)
        for other, number in enumerate(by_code[1:], start=1):
            decoded = torch.where(code == other, number, decoded)
        return decoded

    return Code(1.0, encode, decode, count=count)


# Quantiles of the normal distribution, scaled to [-1, 1] (Dettmers et al., QLoRA, arXiv 2305.14314, appendix E).
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
# Zero and 15 numbers in equal ratios from 1e-6 to 1.
_LOG4 = [0.0] + [10 ** (-6 * (15 - step) / 14) for step in range(1, 16)]

_CODES: dict[tuple[str, int], Code] = {
    ("int", 8): _integer(8),
    ("int", 4): _integer(4),
    ("dynamic", 8): _dynamic_signed(),
    ("dynamic_unsigned", 8): _dynamic_unsigned(),
    ("octal", 8): _octal_signed(),
    ("octal_unsigned", 8): _octal_unsigned(),
    ("e4m3", 8): _float8(torch.float8_e4m3fn),
    ("e5m2", 8): _float8(torch.float8_e5m2),
    ("nf4", 4): _table(_NF4, zero=7),
    ("log_unsigned", 4): _table(_LOG4, zero=0),
}
