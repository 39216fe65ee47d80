"""The scales of 8-bit moments: one for each block of 256 elements; a thread holds one scale of a chunk or none.

A tile is one block and a program one warp, so nobody waits for another warp, and a block's largest magnitude is one
instruction. Values come per thread ``[32]``, or per element ``[256]``, eight to a thread.
"""

from __future__ import annotations

from optim_kernels._triton import INTERPRETED, tl, triton

BLOCK = tl.constexpr(256)  # elements that share a scale
_LOG2_BLOCK = tl.constexpr(8)
MOST_BLOCKS = tl.constexpr(32)  # of a chunk, one for each thread
FIRST_PEAK = tl.constexpr(127.0**3 / 2.0**21)
SECOND_PEAK = tl.constexpr(0.9806207418441772)  # (255 / 256)**5, multiplied in fp32
FP32_MAX = tl.constexpr(3.4028234663852886e38)
_LEAST_SCALE = tl.constexpr(2.0**-100)


@triton.jit
def read_scales(address, first, end):
    """The scales of the blocks from element ``first`` up to ``end``, at most 32: a thread has one."""
    blocks = tl.arange(0, MOST_BLOCKS)
    pointer = address.to(tl.pointer_type(tl.float32)) + (first >> _LOG2_BLOCK)
    return tl.load(pointer + blocks, mask=blocks < (end - first + BLOCK - 1) >> _LOG2_BLOCK, other=0.0)


@triton.jit
def write_scales(address, first, end, scales):
    """Store what ``read_scales`` read."""
    blocks = tl.arange(0, MOST_BLOCKS)
    pointer = address.to(tl.pointer_type(tl.float32)) + (first >> _LOG2_BLOCK)
    tl.store(pointer + blocks, scales, mask=blocks < (end - first + BLOCK - 1) >> _LOG2_BLOCK)


@triton.jit
def scale_of(scales, tile):
    """The scale of one tile, for each of its elements."""
    THREADS: tl.constexpr = scales.shape[0]
    if INTERPRETED:
        own = tl.where(tl.arange(0, THREADS) == tile, scales.to(tl.int32, bitcast=True), 0)
        scale = tl.full([BLOCK], tl.sum(own), tl.int32).to(tl.float32, bitcast=True)
    else:
        scale = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
            "=f,f,r",
            [scales, tl.full([THREADS], tile, tl.int32)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        scale = tl.reshape(tl.broadcast_to(scale[:, None], [THREADS, BLOCK // THREADS]), [BLOCK])
    return scale


@triton.jit
def may_underflow(scales):
    """Whether products of fractions and one of these scales may underflow."""
    return tl.max(((scales < _LEAST_SCALE) & (scales > 0.0)).to(tl.int32), axis=0) != 0


@triton.jit
def with_scale(scales, tile, largest):
    """``scales`` with that of one tile replaced."""
    return tl.where(tl.arange(0, scales.shape[0]) == tile, largest, scales)


@triton.jit
def scales_of_largest(largest, FIRST: tl.constexpr):
    """The scales of blocks with these largest magnitudes."""
    PEAK: tl.constexpr = FIRST_PEAK if FIRST else SECOND_PEAK
    return tl.where(largest <= FP32_MAX, tl.minimum(largest * (1 / PEAK), FP32_MAX), float("nan"))
