"""The codes of low-bit formats: from a number in [-1, 1] to a code and back, in closed form.

A code has three parts: ``peak``, the number that a block's largest magnitude is scaled to; ``encode(y)``, the code
(int32 in [0, 2**bits)) of the nearest number of its map (in the power maps: of the nearest root); ``decode(code)``,
that number (fp32). Signed codes are two's complement, so that code 0 is zero in every map. All arithmetic is
elementwise IEEE fp32 in the order written here, and no result depends on whether a product is rounded before it is
added, so a kernel gets the same bits whether or not its compiler fuses multiply-adds.

The maps: integers and fp8 below; dynamic in `dynamic_map`, octal in `octal_map`, cubic and quintic in `power_map`, NF4
and log in `four_bit_maps`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optim_utils._low_bit.dynamic_map import decode_dynamic, encode_dynamic
from optim_utils._low_bit.formats import LowBitFormat
from optim_utils._low_bit.four_bit_maps import decode_log, decode_nf4, encode_log, encode_nf4
from optim_utils._low_bit.fp32 import fp32
from optim_utils._low_bit.octal_map import decode_octal, encode_octal
from optim_utils._low_bit.power_map import cube, decode_power, encode_power, fifth_power

__all__ = ["Code", "code_of"]

Elementwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Code:
    """One map between codes and numbers; see the module docstring.

    The rank of a code is its place in the ascending map, counted from zero: the code itself, as a signed integer.

    Attributes:
        peak: the number a block's largest magnitude is scaled to.
        encode: fp32 numbers in [-peak, peak] to int32 codes, the nearest.
        decode: int32 codes to fp32 numbers.
        lowest: rank of the lowest number.
        highest: rank of the highest number.
        count: how many codes there are, some of which may go unused.
        sign_magnitude: negative codes are a sign bit and the magnitude's code, instead of two's complement.
        numbers: the number of each code.
    """

    peak: float
    encode: Elementwise
    decode: Elementwise
    lowest: int
    highest: int
    count: int = 256
    sign_magnitude: bool = False
    numbers: list[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # at construction, because a table can't be read off fake tensors, such as a compiler traces with
        codes = torch.arange(self.count, dtype=torch.int32, device="cpu")
        object.__setattr__(self, "numbers", self.decode(codes).tolist())

    @functools.cached_property
    def ascending(self) -> tuple[list[float], list[int]]:
        """The map as two lists, its numbers in ascending order and the code of each."""
        codes = self.code_of_rank(torch.arange(self.lowest, self.highest + 1, dtype=torch.int32, device="cpu")).tolist()
        return [self.numbers[code] for code in codes], codes

    def look_up(self, codes: Tensor) -> Tensor:
        """``decode`` of codes; on a CPU by a table, as a pass over memory costs more than an instruction there."""
        codes = codes.to(torch.int32)
        if torch.compiler.is_compiling() or codes.device.type != "cpu":
            return self.decode(codes)
        table = torch.tensor(self.numbers, dtype=torch.float32, device="cpu")
        return table.index_select(0, codes.flatten()).view(codes.shape)

    def rank_of_code(self, code: Tensor) -> Tensor:
        """The rank of each code."""
        if self.sign_magnitude:
            return torch.where(code > self.highest, self.count // 2 - code, code)
        return torch.where(code > self.highest, code - self.count, code)

    def code_of_rank(self, rank: Tensor) -> Tensor:
        """The code of each rank."""
        if self.sign_magnitude:
            return torch.where(rank < 0, self.count // 2 - rank, rank)
        return rank & (self.count - 1)

    def encode_at_random(self, y: Tensor, uniform: Tensor, *, squared: bool = False) -> Tensor:
        """The code of one of y's two neighbouring numbers, chosen so that the mean of the number is y.

        It is the upper one if ``uniform < (y - lower) / (upper - lower)``. With ``squared`` the mean of the number's
        square is y**2: y, lower and upper are squared in this formula.
        """
        nearest = self.encode(y)
        lower = self.rank_of_code(nearest) - (y < self.look_up(nearest)).to(torch.int32)
        lower = lower.clamp(self.lowest, self.highest - 1)
        below, above = (self.look_up(self.code_of_rank(rank)) for rank in (lower, lower + 1))
        chance = (y - below) / (above - below)
        if squared:
            chance = chance * ((y + below) / (above + below))
        return self.code_of_rank(lower + (uniform < chance).to(torch.int32))


def code_of(fmt: LowBitFormat) -> Code:
    """The code of a format with a symmetric or one-sided map (every format but the affine ones)."""
    return _CODES[fmt.code, fmt.bits]


def _both_with(
    encode: Callable[..., Tensor], decode: Callable[..., Tensor], **options: object
) -> tuple[Elementwise, Elementwise]:
    """Both directions of a map that comes in several sizes."""
    return functools.partial(encode, **options), functools.partial(decode, **options)


def _encode_signed(encode: Elementwise) -> Elementwise:
    """Two's complement of the magnitude that ``encode`` gives; negative magnitudes end at 127."""

    def signed(y: Tensor) -> Tensor:
        magnitude = encode(y.abs())
        return torch.where(y < 0, -magnitude.clamp(max=127), magnitude) & 0xFF

    return signed


def _decode_signed(decode: Elementwise) -> Elementwise:
    def signed(code: Tensor) -> Tensor:
        negative = code > 128
        number = decode(torch.where(negative, 256 - code, code))
        return torch.where(negative, -number, number)

    return signed


def _dynamic_signed() -> Code:
    # The map has 1 but no -1: its byte 0x80 is +1, magnitude 128, and negative magnitudes end at 127.
    encode, decode = _both_with(encode_dynamic, decode_dynamic, first=1)
    return Code(1.0, _encode_signed(encode), _decode_signed(decode), lowest=-127, highest=128)


def _dynamic_unsigned() -> Code:
    def encode(y: Tensor) -> Tensor:
        return encode_dynamic(y, first=2) - 1

    def decode(code: Tensor) -> Tensor:
        return decode_dynamic(code + 1, first=2)

    return Code(1.0, encode, decode, lowest=0, highest=255)


def _signed(encode: Elementwise, decode: Elementwise) -> Code:
    """Magnitudes 0 to 127 with a sign, both signs alike; the peak is the number of the largest."""
    peak = decode(torch.tensor([127], device="cpu")).item()
    return Code(peak, _encode_signed(encode), _decode_signed(decode), lowest=-127, highest=127)


def _unsigned(encode: Elementwise, decode: Elementwise) -> Code:
    """Magnitudes 0 to 255; the peak is the number of the largest."""
    return Code(decode(torch.tensor([255], device="cpu")).item(), encode, decode, lowest=0, highest=255)


def _integer(bits: int) -> Code:
    largest, mask = 2 ** (bits - 1) - 1, 2**bits - 1
    step = fp32(1 / largest)  # a factor, as torch on a GPU divides by a number in this way

    def encode(y: Tensor) -> Tensor:
        return (y * largest).round().to(torch.int32) & mask

    def decode(code: Tensor) -> Tensor:
        return torch.where(code > largest, code - (mask + 1), code).to(torch.float32) * step

    return Code(1.0, encode, decode, lowest=-largest, highest=largest, count=mask + 1)


def _float8(dtype: torch.dtype) -> Code:
    largest = torch.finfo(dtype).max
    step = fp32(1 / largest)
    highest = torch.tensor(largest, device="cpu").to(dtype).view(torch.uint8).item()

    def encode(y: Tensor) -> Tensor:
        return (y * largest).to(dtype).view(torch.uint8).to(torch.int32)

    def decode(code: Tensor) -> Tensor:
        return code.to(torch.uint8).view(dtype).to(torch.float32) * step

    return Code(1.0, encode, decode, lowest=-int(highest), highest=int(highest), sign_magnitude=True)


_CODES: dict[tuple[str, int], Code] = {
    ("int", 8): _integer(8),
    ("int", 4): _integer(4),
    ("dynamic", 8): _dynamic_signed(),
    ("dynamic_unsigned", 8): _dynamic_unsigned(),
    ("octal", 8): _signed(*_both_with(encode_octal, decode_octal, digits=7)),
    ("octal_unsigned", 8): _unsigned(*_both_with(encode_octal, decode_octal, digits=8)),
    ("cubic", 8): _signed(*_both_with(encode_power, decode_power, power=cube, digits=7)),
    ("quintic_unsigned", 8): _unsigned(*_both_with(encode_power, decode_power, power=fifth_power, digits=8)),
    ("e4m3", 8): _float8(torch.float8_e4m3fn),
    ("e5m2", 8): _float8(torch.float8_e5m2),
    ("nf4", 4): Code(1.0, encode_nf4, decode_nf4, lowest=-7, highest=8, count=16),
    ("log_unsigned", 4): Code(1.0, encode_log, decode_log, lowest=0, highest=15, count=16),
}
