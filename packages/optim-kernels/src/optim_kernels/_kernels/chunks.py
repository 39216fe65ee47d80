"""The word of a chunk (``multi_tensor.ChunkMap``) as kernels read it."""

from __future__ import annotations

from optim_kernels._triton import tl, triton
from optim_kernels.multi_tensor import SIZE_SHIFT, TENSOR_SHIFT, UNIT

_UNIT = tl.constexpr(UNIT)
_TENSOR_SHIFT, _SIZE_SHIFT = tl.constexpr(TENSOR_SHIFT), tl.constexpr(SIZE_SHIFT)
_SIZE_MASK, _START_MASK = tl.constexpr((1 << TENSOR_SHIFT - SIZE_SHIFT) - 1), tl.constexpr((1 << SIZE_SHIFT) - 1)


@triton.jit
def read_chunk(chunks, number):
    """A chunk's tensor, first element and number of elements (rounded up to units), as int64."""
    return fields_of_chunk(tl.load(chunks + number))


@triton.jit
def fields_of_chunk(word):
    """The same as ``read_chunk``, from a word that has been loaded."""
    size = (word >> _SIZE_SHIFT) & _SIZE_MASK
    return word >> _TENSOR_SHIFT, (word & _START_MASK) * _UNIT, size * _UNIT
