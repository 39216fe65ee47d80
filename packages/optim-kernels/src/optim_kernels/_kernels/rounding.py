"""`optim_utils.rounding` inside Triton kernels, bit for bit: split16 masters and stochastic rounding."""

from __future__ import annotations

from optim_kernels._triton import narrow, tl, triton

# multipliers and key increments of Philox 4x32-10
_MULTIPLIER_0, _MULTIPLIER_1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_WEYL_0, _WEYL_1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
_BF16_MAX = tl.constexpr(3.3895313892515355e38)


@triton.jit
def join_master(parameter, low):
    """The fp32 master of a bf16 parameter and its int16 low half."""
    high = parameter.to(tl.int16, bitcast=True).to(tl.int32)
    remainder = low.to(tl.int32)
    # a zero has no room below: see optim_utils.rounding.join_master
    remainder = tl.where((high & 0x7FFF) == 0, tl.maximum(remainder, 0), remainder)
    return ((high << 16) + remainder).to(tl.float32, bitcast=True)


@triton.jit
def split_master(master):
    """The bf16 parameter and int16 low half of an fp32 master."""
    pattern = tl.where(master == master, master.to(tl.int32, bitcast=True), 0x7FC00000)
    parameter = ((pattern + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return parameter, pattern.to(tl.int16)


@triton.jit
def round_with_bits(x, bits):
    """fp32 ``x`` in bf16, up or down by 16 random bits; infinities and NaN are converted."""
    pattern = (x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
    is_finite = tl.abs(x) <= _BF16_MAX
    return narrow(tl.where(is_finite, pattern.to(tl.float32, bitcast=True), x), tl.bfloat16)


@triton.jit
def _words(block, seed, place, stream: tl.constexpr, step):
    """The four random words of each block of eight elements (the packed stream).

    Ten rounds of two products, 32 by 32 bits, and two exclusive ors of three words. The keys are the same for all
    elements, so a GPU computes them once a warp.
    """
    c0, c1 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    c2, c3 = c0 * 0 + stream, c0 * 0 + step.to(tl.uint32)
    k0, k1 = seed.to(tl.uint32), place.to(tl.uint32)
    for _ in tl.static_range(10):
        product_0 = c0.to(tl.uint64) * _MULTIPLIER_0
        product_1 = c2.to(tl.uint64) * _MULTIPLIER_1
        c0 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product_1.to(tl.uint32)
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product_0.to(tl.uint32)
        k0 = k0 + _WEYL_0
        k1 = k1 + _WEYL_1
    return c0, c1, c2, c3


@triton.jit
def bits_of_elements(element, seed, place, stream: tl.constexpr, step):
    """16 random bits for each element by its index, a Philox call each."""
    r0, r1, r2, r3 = _words(element // 8, seed, place, stream, step)
    half = element % 8
    word = tl.where(half < 4, tl.where(half < 2, r0, r1), tl.where(half < 6, r2, r3))
    return tl.where(half % 2 == 0, word & 0xFFFF, word >> 16)


@triton.jit
def bits_of_blocks(block, seed, place, stream: tl.constexpr, step):
    """16 random bits for eight elements of each block, [N] -> [8 N] or [M, N] -> [M, 8 N], a Philox call a block."""
    r0, r1, r2, r3 = _words(block, seed, place, stream, step)
    # [..., j // 2, j % 2, half] of word j is element 2 j + half
    words = tl.join(tl.join(r0, r2), tl.join(r1, r3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    if len(block.shape) == 1:
        bits = tl.reshape(halves, [block.shape[0] * 8])
    else:
        bits = tl.reshape(halves, [block.shape[0], block.shape[1] * 8])
    return bits
