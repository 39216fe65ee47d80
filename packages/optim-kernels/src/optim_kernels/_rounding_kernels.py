"""`optim_utils.rounding` inside Triton kernels, bit for bit: split16 masters and stochastic rounding."""

from __future__ import annotations

from optim_kernels._triton import narrow, tl, triton

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
    """The four random words of each block of eight elements (the packed stream)."""
    low, high = (block & 0xFFFFFFFF).to(tl.uint32), (block >> 32).to(tl.uint32)
    key = (place.to(tl.uint64) << 32) | (seed.to(tl.uint64) & 0xFFFFFFFF)
    zero = low * 0
    return tl.philox(key, low, high, zero + stream, zero + step.to(tl.uint32))


@triton.jit
def bits_of_elements(element, seed, place, stream: tl.constexpr, step):
    """16 random bits for each element by its index, a Philox call each."""
    r0, r1, r2, r3 = _words(element // 8, seed, place, stream, step)
    half = element % 8
    word = tl.where(half < 4, tl.where(half < 2, r0, r1), tl.where(half < 6, r2, r3))
    return tl.where(half % 2 == 0, word & 0xFFFF, word >> 16)


@triton.jit
def bits_of_blocks(block, seed, place, stream: tl.constexpr, step):
    """16 random bits for the eight elements of each block [M, N] -> [M, 8 N], a Philox call a block."""
    r0, r1, r2, r3 = _words(block, seed, place, stream, step)
    # [..., j // 2, j % 2, half] of word j is element 2 j + half
    words = tl.join(tl.join(r0, r2), tl.join(r1, r3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, [block.shape[0], block.shape[1] * 8])
