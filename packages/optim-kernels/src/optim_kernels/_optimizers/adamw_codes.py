"""Which moments are 8-bit codes, and the codes of numbers that were codes before.

    exp_avg     CUBIC8               256 elements from the parameter's start on have one fp32 scale
    exp_avg_sq  QUINTIC8_UNSIGNED

Where other programs read a state it holds the numbers x = decode(code) scale. Encoding those finds the same codes, but
a scale that may be a neighbour of the one that was: (decode(largest code) scale) / peak is rounded twice. So of that
scale and its two neighbours the one is taken by which a block's codes give its numbers to the last bit. If none does,
they were no such numbers, and the scale is that of any numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from optim_utils.low_bit import CUBIC8, QUINTIC8_UNSIGNED, LowBitFormat, LowBitTensor, quantize

FORMATS: dict[str, LowBitFormat] = {"exp_avg": CUBIC8, "exp_avg_sq": QUINTIC8_UNSIGNED}
_LEAST_CODES = 4096  # elements; below, a scale and the coarser numbers are not worth the bytes saved


def has_codes(param: Tensor) -> bool:
    """Whether 8-bit moments of ``param`` are codes: it is large enough, and in row-major order as their blocks are."""
    return param.numel() >= _LEAST_CODES and param.is_contiguous()


def encoded(numbers: Tensor, fmt: LowBitFormat) -> LowBitTensor:
    """``numbers`` as codes of a format with a scale a block: those they were, if they were some."""
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
    """For each block whether it stands for exactly its numbers."""
    equal = (coded.dequantize() == numbers).flatten()
    size = coded.fmt.block_size
    return nn.functional.pad(equal, (0, -len(equal) % size), value=True).view(-1, size).all(dim=1)
