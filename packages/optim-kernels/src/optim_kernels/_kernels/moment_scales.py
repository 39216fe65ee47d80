"""The scales of 8-bit moments: one for each block of 256 elements; a thread holds one scale of a chunk or none.

A tile has one block per warp, so a warp holds the scales of its own blocks and needs none of another's. Values come per
warp ``[warps]``, per thread ``[32 * warps]``, or per element ``[256 * warps]``, eight to a thread.
"""

from __future__ import annotations

from optim_kernels._triton import INTERPRETED, tl, triton

BLOCK = tl.constexpr(256)  # elements that share a scale
_LOG2_BLOCK = tl.constexpr(8)
_WARP = tl.constexpr(32)  # threads
MOST_BLOCKS = tl.constexpr(32)  # of a chunk, for each warp
FIRST_PEAK = tl.constexpr(127.0**3 / 2.0**21)
SECOND_PEAK = tl.constexpr(0.9806207418441772)  # (255 / 256)**5, multiplied in fp32
FP32_MAX = tl.constexpr(3.4028234663852886e38)
_LEAST_SCALE = tl.constexpr(2.0**-100)


@triton.jit
def _blocks(WARPS: tl.constexpr):
    """For each thread the block of a chunk whose scale it keeps: a warp has every ``WARPS``-th."""
    threads = tl.arange(0, _WARP * WARPS)
    return threads % _WARP * WARPS + threads // _WARP


@triton.jit
def read_scales(address, first, end, WARPS: tl.constexpr):
    """The scales of the blocks from element ``first`` up to ``end``, at most 32 for each warp: a thread has one."""
    blocks = _blocks(WARPS)
    pointer = address.to(tl.pointer_type(tl.float32)) + (first >> _LOG2_BLOCK)
    return tl.load(pointer + blocks, mask=blocks < (end - first + BLOCK - 1) >> _LOG2_BLOCK, other=0.0)


@triton.jit
def write_scales(address, first, end, scales):
    """Store what ``read_scales`` read."""
    blocks = _blocks(scales.shape[0] // _WARP)
    pointer = address.to(tl.pointer_type(tl.float32)) + (first >> _LOG2_BLOCK)
    tl.store(pointer + blocks, scales, mask=blocks < (end - first + BLOCK - 1) >> _LOG2_BLOCK)


@triton.jit
def of_warps(x):
    """A thread's number (of ``[32 * warps]``) by warps: ``[warps, 32]``."""
    return tl.reshape(x, [x.shape[0] // _WARP, _WARP])


@triton.jit
def for_threads(x):
    """A warp's number (of ``[warps]``) for each of its threads."""
    return tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], _WARP]), [x.shape[0] * _WARP])


@triton.jit
def for_elements(x):
    """A thread's number (of ``[32 * warps]``) for each of its elements."""
    return tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], BLOCK // _WARP]), [x.shape[0] * (BLOCK // _WARP)])


@triton.jit
def scale_of(scales, tile):
    """The scales of one tile's blocks, for each of their elements."""
    if INTERPRETED:
        own = tl.where(tl.arange(0, _WARP)[None, :] == tile, of_warps(scales.to(tl.int32, bitcast=True)), 0)
        scale = for_threads(tl.sum(own, axis=1)).to(tl.float32, bitcast=True)
    else:
        scale = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
            "=f,f,r",
            [scales, tl.full([scales.shape[0]], tile, tl.int32)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return for_elements(scale)


@triton.jit
def may_underflow(scales):
    """Whether products of fractions and one of these scales may underflow."""
    return tl.max(((scales < _LEAST_SCALE) & (scales > 0.0)).to(tl.int32), axis=0) != 0


@triton.jit
def with_scale(scales, tile, largest):
    """``scales`` with those of one tile's blocks replaced."""
    return tl.where(tl.arange(0, scales.shape[0]) % _WARP == tile, largest, scales)


@triton.jit
def scales_of_largest(largest, FIRST: tl.constexpr):
    """The scales of blocks with these largest magnitudes."""
    PEAK: tl.constexpr = FIRST_PEAK if FIRST else SECOND_PEAK
    return tl.where(largest <= FP32_MAX, tl.minimum(largest * (1 / PEAK), FP32_MAX), float("nan"))
