"""Consecutive elements of one tensor in registers: read, widened to fp32, rounded once and written.

    parameter    fp32, fp16, bf16; with an fp32 master it is only written
    master       fp32, or the int16 half that a bf16 parameter lacks (``optim_utils.rounding``, split16)

A full tile of an aligned tensor is read and written 16 bytes a thread; other tiles are masked.
"""

from __future__ import annotations

from optim_kernels._kernels.rounding import bits_of_blocks, bits_of_elements, join_master, round_with_bits, split_master
from optim_kernels._triton import narrow, tl, triton
from optim_kernels.reference.storage import FP32_MASTER, SPLIT16, STREAM_PARAM

_STREAM_PARAM = tl.constexpr(STREAM_PARAM)
_FP32_MASTER, _SPLIT16 = map(tl.constexpr, (FP32_MASTER, SPLIT16))


@triton.jit
def pointer_to(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The address as a pointer; addresses from a table carry no alignment, so ``ALIGNED`` promises it here."""
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        # 8 bytes for codes, so that a thread has as many of them as of 16-bit numbers
        pointer = tl.multiple_of(pointer, 8 if dtype == tl.uint8 else 16)
    return pointer


@triton.jit
def load_tile(
    pointer, mask, TILE: tl.constexpr, MASKED: tl.constexpr, WORDS: tl.constexpr, STREAMED: tl.constexpr = False
):
    """Load a tile of elements, or of 32-bit words; ``STREAMED`` ones, which are not read again, leave caches first.

    ``mask`` has a bit per element if ``MASKED``, else it is one bit that says whether to load at all.
    """
    policy: tl.constexpr = "evict_first" if STREAMED else ""
    if MASKED:
        x = tl.load(pointer + tl.arange(0, TILE), mask=mask, other=0, eviction_policy=policy)
    else:
        IN_WORD: tl.constexpr = 32 // pointer.dtype.element_ty.primitive_bitwidth if WORDS else 1
        if WORDS:
            pointer = tl.multiple_of(pointer.to(tl.pointer_type(tl.uint32), bitcast=True), 32 // IN_WORD)
        wanted = tl.full([TILE // IN_WORD], mask, tl.int32) != 0
        x = tl.load(pointer + tl.arange(0, TILE // IN_WORD), mask=wanted, eviction_policy=policy)
    return x


@triton.jit
def widened_tile(x, dtype: tl.constexpr):
    """Numbers of ``dtype``, one by one or in words, in fp32."""
    if x.dtype == tl.uint32:
        if dtype == tl.bfloat16:
            # bf16 is the upper half of an fp32 number: one instruction each
            low = (x << 16).to(tl.float32, bitcast=True)
            high = (x & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            low = x.to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
            high = (x >> 16).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        x = tl.reshape(tl.join(low, high), [2 * x.shape[0]])
    return x.to(tl.float32)


@triton.jit
def load_parameter(
    p_address,
    master_address,
    offset,
    mask,
    TILE: tl.constexpr,
    dtype: tl.constexpr,
    MASTER: tl.constexpr,
    MASKED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Load a parameter's elements, or its fp32 master's, and their low halves, as stored, for ``full_parameter``.

    Where there are no low halves the elements are returned in their place. Nothing here waits for memory.
    """
    if MASTER == _FP32_MASTER:
        p = load_tile(pointer_to(master_address, tl.float32, not MASKED) + offset, mask, TILE, MASKED, False)
    else:
        p = load_tile(pointer_to(p_address, dtype, not MASKED) + offset, mask, TILE, MASKED, WORDS)
    low = p
    if MASTER == _SPLIT16:
        low = load_tile(pointer_to(master_address, tl.int16, not MASKED) + offset, mask, TILE, MASKED, False)
    return p, low


@triton.jit
def full_parameter(p, low, dtype: tl.constexpr, MASTER: tl.constexpr):
    """The parameter at full precision, in fp32, from what ``load_parameter`` has read."""
    if MASTER == _SPLIT16:
        p = join_master(p, low)
    else:
        p = widened_tile(p, dtype)
    return p


@triton.jit
def store_parameter(
    p_address,
    master_address,
    offset,
    mask,
    p,
    random,
    dtype: tl.constexpr,
    MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MASKED: tl.constexpr,
    STREAMED: tl.constexpr = False,
):
    """Store a tile of fp32 values to the parameter, rounded once, and to its master; ``mask`` has a bit per element.

    ``STREAMED`` is as for ``load_tile``: what is written beside elements that leave caches first would stay there.
    """
    modifier: tl.constexpr = ".cs" if STREAMED else ""
    lanes = tl.arange(0, p.shape[0])
    p_pointer = pointer_to(p_address, dtype, not MASKED) + offset
    if MASTER == _FP32_MASTER:
        tl.store(
            pointer_to(master_address, tl.float32, not MASKED) + offset + lanes, p, mask=mask, cache_modifier=modifier
        )
        tl.store(p_pointer + lanes, narrow(p, dtype), mask=mask, cache_modifier=modifier)
    elif MASTER == _SPLIT16:
        high, low = split_master(p)
        tl.store(
            pointer_to(master_address, tl.int16, not MASKED) + offset + lanes, low, mask=mask, cache_modifier=modifier
        )
        tl.store(p_pointer + lanes, high, mask=mask, cache_modifier=modifier)
    else:
        p = rounded(p, dtype, random, offset, _STREAM_PARAM, STOCHASTIC, MASKED)
        tl.store(p_pointer + lanes, p, mask=mask, cache_modifier=modifier)


@triton.jit
def rounded(
    x, dtype: tl.constexpr, random, offset, stream: tl.constexpr, STOCHASTIC: tl.constexpr, MASKED: tl.constexpr
):
    """fp32 ``x`` in ``dtype``, rounded to nearest, or with ``STOCHASTIC`` in bf16 up or down by random bits.

    Args:
        random: seed, the parameter's number, the index in it of the tensor's first element, and the step.
    """
    if STOCHASTIC and dtype == tl.bfloat16:
        COUNT: tl.constexpr = x.shape[0]
        seed, place, start, step = random
        first = start + offset
        if MASKED:
            bits = bits_of_elements(first + tl.arange(0, COUNT), seed, place, stream, step)
        else:
            # a full tile starts at a multiple of eight of the parameter's elements
            bits = bits_of_blocks(first // 8 + tl.arange(0, COUNT // 8), seed, place, stream, step)
        x = round_with_bits(x, bits)
    else:
        x = narrow(x, dtype)
    return x
