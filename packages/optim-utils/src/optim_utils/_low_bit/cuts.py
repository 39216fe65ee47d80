"""Cutting a quantized tensor: which codes and scales belong to a range of its indices. Nothing is copied."""

from __future__ import annotations

import math

from torch import Tensor

from optim_utils._low_bit.blocks import Blocks
from optim_utils._low_bit.formats import LowBitFormat

__all__ = ["cut_blocks"]


def cut_blocks(blocks: Blocks, fmt: LowBitFormat, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Blocks:
    """The blocks of elements start to stop along ``dim`` of a tensor of the given shape, sharing memory.

    Raises:
        ValueError: if a block would be cut in two, or flat blocks run across ``dim``.
    """
    if (start, stop) == (0, shape[dim]):
        # not by `narrow`: torch 2.13 would ask each rank's part of a DTensor for the whole length
        return blocks.mapped(Tensor.detach)
    if fmt.layout == "rows" and dim < len(shape) - 1:
        return blocks.mapped(lambda part: part.narrow(dim, start, stop - start))
    # Blocks lie along this dimension, of which each index has `unit` adjacent elements; 0 for an empty flat tensor.
    unit = math.prod(shape[dim + 1 :]) if fmt.layout == "rows" or 0 not in shape else 0
    if unit and fmt.layout == "flat" and math.prod(shape[:dim]) > 1:
        raise ValueError(
            f"flat blocks of a tensor of shape {shape} run across dimension {dim}: cut it along dimension 0, or use "
            'layout="rows"'
        )
    for index in (start, stop):
        if index < shape[dim] and index * unit % fmt.block_size:
            raise ValueError(_not_aligned(shape, dim, index, unit, fmt.block_size))

    def change(part: Tensor) -> Tensor:
        if part is blocks.codes and fmt.bits == 8:
            return part.narrow(dim, start, stop - start)
        shared_by = 2 if part is blocks.codes else fmt.block_size
        first, end = -(-start * unit // shared_by), -(-stop * unit // shared_by)
        return part.narrow(-1, first, end - first)

    return blocks.mapped(change)


def _not_aligned(shape: tuple[int, ...], dim: int, index: int, unit: int, block_size: int) -> str:
    offset = index * unit
    next_offset = -(-offset // block_size) * block_size
    step = block_size // math.gcd(unit, block_size)
    next_index = min(-(-index // step) * step, shape[dim])
    return (
        f"cutting a tensor of shape {shape} at index {index} of dimension {dim} divides a block: element {offset} is "
        f"no multiple of the block size {block_size}; the next aligned offset is {next_offset}, the next aligned "
        f"index {next_index}"
    )
