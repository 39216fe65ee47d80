"""Convert tensors of numbers to blocks of codes and back: scales, layouts, packing.

For one block x of B numbers, with ``peak``, ``encode`` and ``decode`` of its code (:mod:`optim_utils._low_bit.codes`):

    symmetric and one-sided:  a = max |x|,  scale = min(a (1 / peak), largest fp32)
                              code = encode((x u) (peak (1 / (a u)))),  u = 2**100 if a < 2**-80 else 1
                              x ~ decode(code) scale
    companding "sqrt":        the same for sqrt(x); x ~ (decode(code) scale)**2
    affine, 8 bits:           h = max x / 2 - min x / 2,  scale = h (1 / 127.5),  offset = min x
                              code = rint(((x / 2 - offset / 2) / h) 255),  x ~ 2 (code (scale / 2) + offset / 2)

u keeps ``1 / a`` finite (a root is never so small). In one-sided formats a positive number gets at least code 1, and a
number that underflows on decoding becomes the smallest fp32 number, so a second moment never turns into zero. A block
with a NaN or an infinity has the scale NaN, and meaningless codes. A last block that is not full is filled up with
copies of its last number.

Shapes, B = block size: flat: x [...] -> codes [...] (4 bits: [ceil(n / 2)]), scale [ceil(n / B)];
rows: x [..., k] -> codes [..., k] (4 bits: [..., ceil(k / 2)]), scale [..., ceil(k / B)].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from optim_utils._low_bit.codes import code_of
from optim_utils._low_bit.formats import LowBitFormat
from optim_utils._low_bit.fp32 import fp32

__all__ = ["Blocks", "check_blocks", "codes_shape", "decode_blocks", "encode_blocks", "scale_shape"]

_FP32_MAX = torch.finfo(torch.float32).max
_FP32_TINY = 2.0**-149
_STEP = fp32(1 / 127.5)
_SMALL, _RAISE = 2.0**-80, 2.0**100


class Blocks(NamedTuple):
    """What a quantized tensor stores: uint8 codes, fp32 scales and, for affine formats, fp32 offsets."""

    codes: Tensor
    scale: Tensor
    offset: Tensor | None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Blocks:
        """The blocks after ``change`` is applied to each tensor."""
        return Blocks(change(self.codes), change(self.scale), None if self.offset is None else change(self.offset))


def scale_shape(shape: Sequence[int], fmt: LowBitFormat) -> tuple[int, ...]:
    """Shape of the scales of a tensor of the given shape."""
    if fmt.layout == "flat":
        return (-(-math.prod(shape) // fmt.block_size),)
    *lead, last = shape or (1,)
    return (*lead, -(-last // fmt.block_size))


def codes_shape(shape: Sequence[int], fmt: LowBitFormat) -> tuple[int, ...]:
    """Shape of the uint8 codes of a tensor of the given shape."""
    if fmt.bits == 8:
        return tuple(shape)
    if fmt.layout == "flat":
        return (-(-math.prod(shape) // 2),)
    *lead, last = shape or (1,)
    return (*lead, -(-last // 2))


def check_blocks(blocks: Blocks, fmt: LowBitFormat, shape: Sequence[int]) -> None:
    """Raise TypeError or ValueError unless the parts are tensors of this format's dtypes and of this shape's shapes.

    They have to be on one device, too: from a scale on meta nothing could be decoded.
    """
    if (blocks.offset is not None) != fmt.has_offset:
        need = "need an offset, got none" if fmt.has_offset else "have no offset, got one"
        raise ValueError(f"{fmt.code} codes {need}")
    shape_of_scale = scale_shape(shape, fmt)
    expected = {
        "codes": (blocks.codes, torch.uint8, codes_shape(shape, fmt)),
        "scale": (blocks.scale, fmt.scale_dtype, shape_of_scale),
        "offset": (blocks.offset, fmt.scale_dtype, shape_of_scale),
    }
    for name, (tensor, dtype, size) in expected.items():
        if name == "offset" and tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a {dtype} tensor of shape {size}, got a {type(tensor).__name__}")
        if tensor.dtype != dtype:
            raise ValueError(
                f"{name} of a {fmt.code} format must be {dtype}, found {tensor.dtype}: something cast them, as "
                "torch.optim.Optimizer.load_state_dict does; see attach_state_dict_hooks"
            )
        if tuple(tensor.shape) != size:
            raise ValueError(
                f"{name} of a tensor of shape {tuple(shape)} in blocks of {fmt.block_size} ({fmt.layout}, "
                f"{fmt.bits} bits) must have shape {size}, found {tuple(tensor.shape)}"
            )
        if tensor.device != blocks.codes.device:
            raise ValueError(f"{name} must be on {blocks.codes.device}, as the codes are, found {tensor.device}")


def _runs_shape(shape: Sequence[int], fmt: LowBitFormat) -> tuple[int, int]:
    """(runs, length) of the runs of adjacent elements that are cut into blocks: one run in all, or one per row."""
    if fmt.layout == "flat" or not shape:
        return (1, math.prod(shape))
    return (math.prod(shape[:-1]), shape[-1])


def _filled_size(length: int, fmt: LowBitFormat) -> int:
    """Elements that a block is filled up to; of much shorter runs, no more than one has (4 bits: in pairs).

    Rows of a convolution's weight have a few elements, and filled up to 256 they would take a hundred times as long.
    """
    # not just any shorter run: while sizes are symbols, a compiler that is told `length >= block_size` of a run of one
    # block concludes that no other length would do
    if length > fmt.block_size // 2:
        return fmt.block_size
    shared_by = 8 // fmt.bits
    return max(1, -(-length // shared_by)) * shared_by


def _to_blocks(runs: Tensor, block_size: int) -> Tensor:
    """[runs, length] -> [runs, blocks, block_size], the last block filled up with copies of its last element."""
    num_runs, length = runs.shape
    num_blocks = -(-length // block_size)
    missing = num_blocks * block_size - length
    if missing:
        runs = torch.cat((runs, runs[:, -1:].expand(num_runs, missing)), dim=1)
    return runs.view(num_runs, num_blocks, block_size)


def _from_blocks(blocks: Tensor, length: int) -> Tensor:
    """[runs, blocks, block_size] -> [runs, length]."""
    return blocks.flatten(1)[:, :length]


def _unpack(packed: Tensor, length: int) -> Tensor:
    """[runs, bytes] -> [runs, length] of 4-bit codes."""
    shifts = 4 * torch.arange(2, dtype=torch.int32, device=packed.device)
    return ((packed.to(torch.int32)[:, :, None] >> shifts) & 0xF).flatten(1)[:, :length]


def encode_blocks(x: Tensor, fmt: LowBitFormat, *, uniform: Tensor | None) -> Blocks:
    """The codes, scales and offsets of x.

    Args:
        uniform: fp32 numbers in [0, 1) shaped like x, which choose at random between the two neighbours of each number,
            so that the mean of the decoded number is x. Without them a number goes to the nearest code.
    """
    shape = x.shape
    runs = x.to(torch.float32).reshape(_runs_shape(shape, fmt))
    filled_size = _filled_size(runs.shape[1], fmt)
    blocks = _to_blocks(runs, filled_size)
    if uniform is not None:
        uniform = _to_blocks(uniform.reshape(runs.shape), filled_size)
    if fmt.has_offset:
        codes, scale, offset = _encode_affine(blocks, uniform)
    else:
        codes, scale, offset = *_encode_scaled(blocks, fmt, uniform), None
    codes = _from_blocks(codes.to(torch.uint8), -(-runs.shape[1] * fmt.bits // 8))
    shape_of_scale = scale_shape(shape, fmt)
    return Blocks(
        codes.reshape(codes_shape(shape, fmt)),
        scale.view(shape_of_scale),
        None if offset is None else offset.view(shape_of_scale),
    )


def _encode_scaled(x: Tensor, fmt: LowBitFormat, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """[..., B] -> the bytes of the codes [..., B or B / 2] and the scales [...]."""
    numbers = [_companded(part, fmt) for part in _by_place_in_byte(x, fmt)]
    largest = functools.reduce(torch.maximum, [part.abs() for part in numbers]).amax(dim=-1, keepdim=True)
    finite = largest <= _FP32_MAX
    code = code_of(fmt)
    up = torch.where(largest < _SMALL, _RAISE, torch.ones_like(largest))  # two numbers would give the default dtype
    factor = torch.where(finite & (largest > 0), code.peak * (largest * up).reciprocal(), 0.0)

    def codes_of(x: Tensor, uniform: Tensor | None) -> Tensor:
        y = torch.where(finite, x, 0.0) * up * factor
        # decoding squares the roots, so the mean has to be right for the squares
        squared = fmt.companding == "sqrt"
        codes = code.encode(y) if uniform is None else code.encode_at_random(y, uniform, squared=squared)
        return torch.where(x > 0, codes.clamp(min=1), 0) if fmt.unsigned else codes

    uniforms = [None, None] if uniform is None else _by_place_in_byte(uniform, fmt)
    codes = [codes_of(part, chances) for part, chances in zip(numbers, uniforms)]
    packed = codes[0] if fmt.bits == 8 else codes[0] | codes[1] << 4
    scale = torch.where(finite, (largest * (1 / code.peak)).clamp(max=_FP32_MAX), math.nan)
    return packed, scale.squeeze(-1)


def _by_place_in_byte(x: Tensor, fmt: LowBitFormat) -> list[Tensor]:
    """[x] for 8 bits; for 4 bits, of the pairs that share a byte, [all first elements, all second elements]."""
    # Split before encoding, so that a compiler makes one kernel that reads pairs and writes bytes.
    return [x] if fmt.bits == 8 else [x[..., 0::2], x[..., 1::2]]


def _companded(x: Tensor, fmt: LowBitFormat) -> Tensor:
    if fmt.unsigned:
        # a negative infinity makes its block NaN too; clamping alone would turn it into zero
        x = torch.where(x == -math.inf, math.nan, x.clamp(min=0))
    if fmt.companding == "none":
        return x
    # torch's fp32 square root on a CPU is not always correctly rounded; one computed in fp64 and rounded is
    return x.double().sqrt().float() if x.device.type == "cpu" else x.sqrt()


def _encode_affine(x: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
    half_range = high * 0.5 - low * 0.5
    finite = half_range <= _FP32_MAX
    steps = torch.where(finite & (half_range > 0), (x * 0.5 - low * 0.5) / half_range * 255, 0.0)
    codes = steps.round() if uniform is None else (steps + uniform).floor().clamp(max=255)
    scale = torch.where(finite, half_range * _STEP, math.nan)
    return codes, scale.squeeze(-1), torch.where(finite, low, math.nan).squeeze(-1)


def decode_blocks(
    codes: Tensor, scale: Tensor, offset: Tensor | None, fmt: LowBitFormat, shape: Sequence[int]
) -> Tensor:
    """The fp32 numbers, of the given shape, that codes, scales and offsets stand for."""
    num_runs, length = _runs_shape(shape, fmt)
    codes = codes.reshape(num_runs, -(-length * fmt.bits // 8))
    if fmt.bits == 4:
        codes = _unpack(codes, length)
    filled_size = _filled_size(length, fmt)
    codes = _to_blocks(codes, filled_size)
    scale = scale.reshape(num_runs, codes.shape[1], 1)
    if fmt.has_offset:
        assert offset is not None
        half = codes.to(torch.float32) * (scale * 0.5) + offset.reshape(scale.shape) * 0.5
        # rounded up, half of the largest fp32 number would double to infinity
        numbers = half.clamp(-_FP32_MAX / 2, _FP32_MAX / 2) * 2
    else:
        numbers = code_of(fmt).look_up(codes) * scale
        if fmt.companding == "sqrt":
            numbers = numbers * numbers
        if fmt.unsigned:
            numbers = torch.where((numbers == 0) & (codes != 0), _FP32_TINY, numbers)
    if length % filled_size and numbers.device.type == "cpu":
        # fused with what follows, inductor (seen in torch 2.13) cuts a CPU's loop over the run into blocks, and leaves
        # the end unwritten; a view by strides is a view of memory, so that numbers are stored first
        numbers = numbers.as_strided((num_runs, length), (numbers.shape[1] * filled_size, 1))
    else:
        numbers = _from_blocks(numbers, length)
    # rows that are filled up have gaps between them
    return numbers.reshape(tuple(shape)).contiguous()
