"""Which moments are 8-bit codes, and how numbers that were codes before become the same codes again.

    exp_avg     CUBIC8               256 elements from the parameter's start on have one fp32 scale
    exp_avg_sq  QUINTIC8_UNSIGNED

A state that other programs read holds the numbers x = decode(code) scale. Encoding them finds the same codes, but the
scale may come out as a neighbour of the original: (decode(largest code) scale) / peak is rounded twice. So of that
scale and its two neighbours `encoded` takes the one with which a block's codes give its numbers to the last bit. If
none does, the numbers were no codes before, and the block keeps the scale that `quantize` found.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from optim_utils.low_bit import CUBIC8, QUINTIC8_UNSIGNED, LowBitFormat, LowBitTensor, quantize

FORMATS: dict[str, LowBitFormat] = {"exp_avg": CUBIC8, "exp_avg_sq": QUINTIC8_UNSIGNED}
_LEAST_CODES = 4096  # elements; in smaller tensors the bytes saved are not worth a scale and coarser numbers


def has_codes(param: Tensor) -> bool:
    """Whether 8-bit moments of ``param`` are codes: if it is large enough, and in row-major order as blocks are."""
    return param.numel() >= _LEAST_CODES and param.is_contiguous()


def encoded(numbers: Tensor, fmt: LowBitFormat) -> LowBitTensor:
    """``numbers`` as codes with one scale per block; if they were codes before, the same codes and scales."""
    nearest = quantize(numbers, fmt)
    scale, found = nearest.scale, _blocks_that_are(nearest, numbers)
    for neighbour in (1, -1):
        other = (nearest.scale.view(torch.int32) + neighbour).view(torch.float32)
        matches = _blocks_that_are(_with_scale(nearest, other), numbers)
        scale = torch.where(matches & ~found, other, scale)
        found |= matches
    return _with_scale(nearest, scale)


def _with_scale(coded: LowBitTensor, scale: Tensor) -> LowBitTensor:
    return LowBitTensor(coded.codes, scale, None, coded.fmt, coded.shape, coded.dtype)


def _blocks_that_are(coded: LowBitTensor, numbers: Tensor) -> Tensor:
    """For each block, whether its codes decode to exactly its numbers."""
    equal = (coded.dequantize() == numbers).flatten()
    size = coded.fmt.block_size
    return nn.functional.pad(equal, (0, -len(equal) % size), value=True).view(-1, size).all(dim=1)
