"""Reading and writing a tile of AdamW: parameter, gradient, moments and master, in every storage format.

    parameter    fp32, fp16, bf16; with an fp32 master it is only written
    master       fp32, or the int16 half that a bf16 parameter lacks (``optim_utils.rounding``, split16)
    gradient     one tensor, or slices at a stride that are summed in order in fp32
    moments      fp32, fp16, bf16, or 8-bit codes with a scale a block of 256 (``moment_codes``); amsgrad's maximum is
                 stored like the second moment, beside codes in fp32

A full tile of an aligned tensor is read and written 16 bytes a thread; other tiles are masked. Where nothing is wider
than 16 bits a full tile is read as 32-bit words: they go from one turn of a loop to the next as they are, where single
16-bit numbers and codes would be taken apart and put together again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from optim_kernels._kernels.moment_codes import (
    codes_in_words,
    codes_one_by_one,
    decode_first,
    decode_second,
    encode,
)
from optim_kernels._kernels.moment_scales import (
    may_underflow,
    read_scales,
    scale_of,
    scales_of_largest,
    with_scale,
    write_scales,
)
from optim_kernels._kernels.rounding import bits_of_blocks, bits_of_elements, join_master, round_with_bits, split_master
from optim_kernels._triton import INTERPRETED, narrow, tl, triton
from optim_kernels.reference.adamw import STREAM_EXP_AVG, STREAM_EXP_AVG_SQ, STREAM_PARAM

_STREAM_PARAM = tl.constexpr(STREAM_PARAM)
_STREAM_EXP_AVG = tl.constexpr(STREAM_EXP_AVG)
_STREAM_EXP_AVG_SQ = tl.constexpr(STREAM_EXP_AVG_SQ)

# How a parameter's full precision is kept.
NO_MASTER, FP32_MASTER, SPLIT16 = 0, 1, 2
_NO_MASTER, _FP32_MASTER, _SPLIT16 = map(tl.constexpr, (NO_MASTER, FP32_MASTER, SPLIT16))


class Format(NamedTuple):
    """How the tensors of a launch are stored: dtypes (``tl.uint8``: codes), and what there is beside them."""

    param: Any
    grad: Any
    exp_avg: Any
    exp_avg_sq: Any
    amsgrad: bool
    master: int
    stochastic: bool
    num_slices: int


@triton.jit
def _pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The address as a pointer; a table says nothing of alignment, so it is promised here."""
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        # 8 bytes for codes, so that a thread has as many of them as of 16-bit numbers
        pointer = tl.multiple_of(pointer, 8 if dtype == tl.uint8 else 16)
    return pointer


@triton.jit
def _load(pointer, mask, TILE: tl.constexpr, MASKED: tl.constexpr, WORDS: tl.constexpr, STREAMED: tl.constexpr = False):
    """A tile of elements, or of 32-bit words of them; ``STREAMED`` ones, not wanted again, leave caches first.

    The mask is one of elements if ``MASKED``; else one bit that says whether to load at all.
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
def _widened(x, dtype: tl.constexpr):
    """Numbers of ``dtype``, one by one or in words, in fp32."""
    if x.dtype == tl.uint32:
        if dtype == tl.bfloat16:
            # the upper half of an fp32 number: an instruction each
            low = (x << 16).to(tl.float32, bitcast=True)
            high = (x & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            low = x.to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
            high = (x >> 16).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        x = tl.reshape(tl.join(low, high), [2 * x.shape[0]])
    return x.to(tl.float32)


@triton.jit
def read_tile(
    places,
    offset,
    mask,
    TILE: tl.constexpr,
    F: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The elements from ``offset`` on as they are stored, for ``widened``: nothing here waits for memory."""
    p_address, g_address, slice_stride, m_address, v_address, w_address, master_address = places
    ALIGNED: tl.constexpr = not MASKED
    W: tl.constexpr = tl.float32 if F.exp_avg_sq == tl.uint8 else F.exp_avg_sq
    COMPILED: tl.constexpr = ALIGNED and not INTERPRETED
    CODES: tl.constexpr = F.exp_avg == tl.uint8 or F.exp_avg_sq == tl.uint8
    # each by itself: Triton 3.5 does not compile max() of max()
    NARROW_VALUES: tl.constexpr = F.param.primitive_bitwidth <= 16 and F.grad.primitive_bitwidth <= 16
    NARROW_STATES: tl.constexpr = F.exp_avg.primitive_bitwidth <= 16 and F.exp_avg_sq.primitive_bitwidth <= 16
    PLAIN: tl.constexpr = F.num_slices == 1 and not F.amsgrad and F.master == _NO_MASTER
    WORDS: tl.constexpr = COMPILED and PLAIN and NARROW_VALUES and NARROW_STATES
    M_WORDS: tl.constexpr = WORDS or (COMPILED and F.exp_avg == tl.uint8)
    V_WORDS: tl.constexpr = WORDS or (COMPILED and F.exp_avg_sq == tl.uint8)
    g_pointer = _pointer(g_address, F.grad, ALIGNED) + offset
    # the policy takes six instructions, which codes cannot spare
    g = _load(g_pointer, mask, TILE, MASKED, WORDS, not CODES)
    if F.num_slices > 1:
        g = g.to(tl.float32)
        for _ in range(1, F.num_slices):
            g_pointer += slice_stride
            if ALIGNED:
                g_pointer = tl.multiple_of(g_pointer, 16)
            g += _load(g_pointer, mask, TILE, MASKED, False, True).to(tl.float32)
    m = _load(_pointer(m_address, F.exp_avg, ALIGNED) + offset, mask, TILE, MASKED, M_WORDS)
    v = _load(_pointer(v_address, F.exp_avg_sq, ALIGNED) + offset, mask, TILE, MASKED, V_WORDS)
    # what there is not is not read: any value stands for it
    w, low = v, v
    if F.amsgrad:
        w = _load(_pointer(w_address, W, ALIGNED) + offset, mask, TILE, MASKED, False)
    if F.master == _FP32_MASTER:
        p = _load(_pointer(master_address, tl.float32, ALIGNED) + offset, mask, TILE, MASKED, False)
    else:
        p = _load(_pointer(p_address, F.param, ALIGNED) + offset, mask, TILE, MASKED, WORDS)
    if F.master == _SPLIT16:
        low = _load(_pointer(master_address, tl.int16, ALIGNED) + offset, mask, TILE, MASKED, False)
    return p, low, g, m, v, w


@triton.jit
def widened(
    tile,
    scales,
    number,
    F: tl.constexpr,
):
    """``(p, g, m, v, w)`` of a tile in fp32; with codes it is tile ``number`` of the chunk."""
    p, low, g, m, v, w = tile
    m_scales, v_scales, underflows = scales
    if F.master == _SPLIT16:
        p = join_master(p, low)
    else:
        p = _widened(p, F.param)
    if F.exp_avg == tl.uint8:
        m = decode_first(m, scale_of(m_scales, number))
    else:
        m = _widened(m, F.exp_avg)
    if F.exp_avg_sq == tl.uint8:
        v = decode_second(v, scale_of(v_scales, number), underflows)
    else:
        v = _widened(v, F.exp_avg_sq)
    if F.amsgrad:
        w = w.to(tl.float32)
    else:
        w = v
    return p, _widened(g, F.grad), m, v, w


@triton.jit
def store_tile(
    places,
    offset,
    mask,
    scales,
    number,
    p,
    m,
    v,
    w,
    random,
    F: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Round the new values once and write those that ``mask`` says. The chunk's scales with those of tile ``number``.

    The mask is one of elements if ``MASKED``; else one bit for all, so that stores stay wide.
    """
    p_address, _, _, m_address, v_address, w_address, master_address = places
    m_scales, v_scales, underflows = scales
    ALIGNED: tl.constexpr = not MASKED
    lanes = tl.arange(0, p.shape[0])
    keep = mask
    if ALIGNED:
        mask = tl.full([p.shape[0]], keep, tl.int32) != 0
    p_pointer = _pointer(p_address, F.param, ALIGNED) + offset
    if F.master == _FP32_MASTER:
        tl.store(_pointer(master_address, tl.float32, ALIGNED) + offset + lanes, p, mask=mask)
        tl.store(p_pointer + lanes, narrow(p, F.param), mask=mask)
    elif F.master == _SPLIT16:
        high, low = split_master(p)
        tl.store(_pointer(master_address, tl.int16, ALIGNED) + offset + lanes, low, mask=mask)
        tl.store(p_pointer + lanes, high, mask=mask)
    else:
        p = _rounded(p, F.param, random, offset, _STREAM_PARAM, F.stochastic, MASKED)
        tl.store(p_pointer + lanes, p, mask=mask)
    if F.exp_avg == tl.uint8 or F.exp_avg_sq == tl.uint8:
        m_words, v_words, m_largest, v_largest = encode(m, v, F.exp_avg == tl.uint8, F.exp_avg_sq == tl.uint8)
    if F.exp_avg == tl.uint8:
        m_scales = with_scale(m_scales, number, m_largest)
        _store_codes(m_address, offset, keep, m_words, MASKED)
    else:
        m = _rounded(m, F.exp_avg, random, offset, _STREAM_EXP_AVG, F.stochastic, MASKED)
        tl.store(_pointer(m_address, F.exp_avg, ALIGNED) + offset + lanes, m, mask=mask)
    if F.exp_avg_sq == tl.uint8:
        v_scales = with_scale(v_scales, number, v_largest)
        _store_codes(v_address, offset, keep, v_words, MASKED)
    else:
        v = _rounded(v, F.exp_avg_sq, random, offset, _STREAM_EXP_AVG_SQ, F.stochastic, MASKED)
        tl.store(_pointer(v_address, F.exp_avg_sq, ALIGNED) + offset + lanes, v, mask=mask)
    if F.amsgrad:
        W: tl.constexpr = tl.float32 if F.exp_avg_sq == tl.uint8 else F.exp_avg_sq
        tl.store(_pointer(w_address, W, ALIGNED) + offset + lanes, narrow(w, W), mask=mask)
    return m_scales, v_scales, underflows


@triton.jit
def _store_codes(address, offset, mask, words, MASKED: tl.constexpr):
    """Write a tile's codes that ``mask`` says, as ``store_tile`` has it."""
    pointer = _pointer(address, tl.uint8, not MASKED) + offset
    if MASKED:
        codes = codes_one_by_one(words)
    else:
        pointer = tl.multiple_of(pointer.to(tl.pointer_type(tl.uint32), bitcast=True), 8)
        codes = codes_in_words(words)
        mask = tl.full([codes.shape[0]], mask, tl.int32) != 0
    tl.store(pointer + tl.arange(0, codes.shape[0]), codes, mask=mask)


@triton.jit
def scales_of_chunk(scale_addresses, first, end, WARPS: tl.constexpr, F: tl.constexpr):
    """The scales of a chunk's codes, first moments' and second ones', and whether one of the last is very small."""
    m_scales, v_scales, underflows = 0.0, 0.0, False
    if F.exp_avg == tl.uint8:
        m_scales = read_scales(scale_addresses[0], first, end, WARPS)
    if F.exp_avg_sq == tl.uint8:
        v_scales = read_scales(scale_addresses[1], first, end, WARPS)
        underflows = may_underflow(v_scales)
    return m_scales, v_scales, underflows


@triton.jit
def store_scales(scale_addresses, first, end, scales, F: tl.constexpr):
    """Write the chunk's new scales, of which ``store_tile`` left the largest magnitudes."""
    if F.exp_avg == tl.uint8:
        write_scales(scale_addresses[0], first, end, scales_of_largest(scales[0], True))
    if F.exp_avg_sq == tl.uint8:
        write_scales(scale_addresses[1], first, end, scales_of_largest(scales[1], False))


@triton.jit
def _rounded(
    x, dtype: tl.constexpr, random, offset, stream: tl.constexpr, STOCHASTIC: tl.constexpr, MASKED: tl.constexpr
):
    """fp32 ``x`` in ``dtype``: to nearest, or in bf16 up or down by random bits."""
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
