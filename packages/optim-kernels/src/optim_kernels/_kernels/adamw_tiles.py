"""Reading and writing a tile of AdamW: parameter, gradient, moments and master, in every storage format.

    parameter, master    as in ``flat_tiles``
    gradient     one tensor, or slices at a stride that are summed in order in fp32
    moments      fp32, fp16, bf16, or 8-bit codes with a scale per block of 256 (``moment_codes``); amsgrad's maximum is
                 stored like the second moment, but in fp32 where that is in codes

Where nothing is wider than 16 bits a full tile is read as 32-bit words: words go unchanged from one turn of a loop to
the next, where the compiler would unpack and repack single 16-bit numbers and codes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from optim_kernels._kernels.flat_tiles import (
    full_parameter,
    load_parameter,
    load_tile,
    pointer_to,
    rounded,
    store_parameter,
    widened_tile,
)
from optim_kernels._kernels.moment_codes import codes_in_words, codes_one_by_one, decode_first, decode_second, encode
from optim_kernels._kernels.moment_scales import (
    may_underflow,
    read_scales,
    scale_of,
    scales_of_largest,
    with_scale,
    write_scales,
)
from optim_kernels._triton import INTERPRETED, narrow, tl, triton
from optim_kernels.reference.storage import NO_MASTER, STREAM_EXP_AVG, STREAM_EXP_AVG_SQ

_STREAM_EXP_AVG = tl.constexpr(STREAM_EXP_AVG)
_STREAM_EXP_AVG_SQ = tl.constexpr(STREAM_EXP_AVG_SQ)

_NO_MASTER = tl.constexpr(NO_MASTER)


class Format(NamedTuple):
    """How the tensors of a launch are stored: dtypes (``tl.uint8``: codes), amsgrad, masters, rounding, slices."""

    param: Any
    grad: Any
    exp_avg: Any
    exp_avg_sq: Any
    amsgrad: bool
    master: int
    stochastic: bool
    num_slices: int


@triton.jit
def read_tile(
    places,
    offset,
    mask,
    TILE: tl.constexpr,
    F: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load the elements from ``offset`` on as they are stored, for ``widened``; nothing here waits for memory."""
    p_address, g_address, slice_stride, m_address, v_address, w_address, master_address = places
    ALIGNED: tl.constexpr = not MASKED
    W: tl.constexpr = tl.float32 if F.exp_avg_sq == tl.uint8 else F.exp_avg_sq
    COMPILED: tl.constexpr = ALIGNED and not INTERPRETED
    CODES: tl.constexpr = F.exp_avg == tl.uint8 or F.exp_avg_sq == tl.uint8
    # one comparison each: Triton 3.5 does not compile max() of max()
    NARROW_VALUES: tl.constexpr = F.param.primitive_bitwidth <= 16 and F.grad.primitive_bitwidth <= 16
    NARROW_STATES: tl.constexpr = F.exp_avg.primitive_bitwidth <= 16 and F.exp_avg_sq.primitive_bitwidth <= 16
    PLAIN: tl.constexpr = F.num_slices == 1 and not F.amsgrad and F.master == _NO_MASTER
    WORDS: tl.constexpr = COMPILED and PLAIN and NARROW_VALUES and NARROW_STATES
    M_WORDS: tl.constexpr = WORDS or (COMPILED and F.exp_avg == tl.uint8)
    V_WORDS: tl.constexpr = WORDS or (COMPILED and F.exp_avg_sq == tl.uint8)
    g_pointer = pointer_to(g_address, F.grad, ALIGNED) + offset
    # the eviction policy takes six instructions, too many for kernels of codes
    g = load_tile(g_pointer, mask, TILE, MASKED, WORDS, not CODES)
    if F.num_slices > 1:
        g = g.to(tl.float32)
        for _ in range(1, F.num_slices):
            g_pointer += slice_stride
            if ALIGNED:
                g_pointer = tl.multiple_of(g_pointer, 16)
            g += load_tile(g_pointer, mask, TILE, MASKED, False, True).to(tl.float32)
    m = load_tile(pointer_to(m_address, F.exp_avg, ALIGNED) + offset, mask, TILE, MASKED, M_WORDS)
    v = load_tile(pointer_to(v_address, F.exp_avg_sq, ALIGNED) + offset, mask, TILE, MASKED, V_WORDS)
    # a tensor that does not exist is not read: any value stands for it
    w = v
    if F.amsgrad:
        w = load_tile(pointer_to(w_address, W, ALIGNED) + offset, mask, TILE, MASKED, False)
    p, low = load_parameter(p_address, master_address, offset, mask, TILE, F.param, F.master, MASKED, WORDS)
    return p, low, g, m, v, w


@triton.jit
def widened(
    tile,
    scales,
    number,
    F: tl.constexpr,
):
    """``(p, g, m, v, w)`` of a tile in fp32; ``number`` is the tile's number in the chunk, for the scales of codes."""
    p, low, g, m, v, w = tile
    m_scales, v_scales, underflows = scales
    p = full_parameter(p, low, F.param, F.master)
    if F.exp_avg == tl.uint8:
        m = decode_first(m, scale_of(m_scales, number))
    else:
        m = widened_tile(m, F.exp_avg)
    if F.exp_avg_sq == tl.uint8:
        v = decode_second(v, scale_of(v_scales, number), underflows)
    else:
        v = widened_tile(v, F.exp_avg_sq)
    if F.amsgrad:
        w = w.to(tl.float32)
    else:
        w = v
    return p, widened_tile(g, F.grad), m, v, w


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
    """Round the new values once, write those that ``mask`` selects; return the chunk's scales with tile ``number``'s.

    ``mask`` has a bit per element if ``MASKED``, else one bit for all of them, so that stores stay wide.
    """
    p_address, _, _, m_address, v_address, w_address, master_address = places
    m_scales, v_scales, underflows = scales
    ALIGNED: tl.constexpr = not MASKED
    # as the gradients are read: where both leave caches first, neither stays in the place of what is still to be read
    STREAMED: tl.constexpr = F.exp_avg != tl.uint8 and F.exp_avg_sq != tl.uint8
    modifier: tl.constexpr = ".cs" if STREAMED else ""
    lanes = tl.arange(0, p.shape[0])
    keep = mask
    if ALIGNED:
        mask = tl.full([p.shape[0]], keep, tl.int32) != 0
    store_parameter(
        p_address, master_address, offset, mask, p, random, F.param, F.master, F.stochastic, MASKED, STREAMED
    )
    if F.exp_avg == tl.uint8 or F.exp_avg_sq == tl.uint8:
        m_words, v_words, m_largest, v_largest = encode(m, v, F.exp_avg == tl.uint8, F.exp_avg_sq == tl.uint8)
    if F.exp_avg == tl.uint8:
        m_scales = with_scale(m_scales, number, m_largest)
        _store_codes(m_address, offset, keep, m_words, MASKED)
    else:
        m = rounded(m, F.exp_avg, random, offset, _STREAM_EXP_AVG, F.stochastic, MASKED)
        tl.store(pointer_to(m_address, F.exp_avg, ALIGNED) + offset + lanes, m, mask=mask, cache_modifier=modifier)
    if F.exp_avg_sq == tl.uint8:
        v_scales = with_scale(v_scales, number, v_largest)
        _store_codes(v_address, offset, keep, v_words, MASKED)
    else:
        v = rounded(v, F.exp_avg_sq, random, offset, _STREAM_EXP_AVG_SQ, F.stochastic, MASKED)
        tl.store(pointer_to(v_address, F.exp_avg_sq, ALIGNED) + offset + lanes, v, mask=mask, cache_modifier=modifier)
    if F.amsgrad:
        W: tl.constexpr = tl.float32 if F.exp_avg_sq == tl.uint8 else F.exp_avg_sq
        tl.store(pointer_to(w_address, W, ALIGNED) + offset + lanes, narrow(w, W), mask=mask, cache_modifier=modifier)
    return m_scales, v_scales, underflows


@triton.jit
def _store_codes(address, offset, mask, words, MASKED: tl.constexpr):
    """Write a tile's codes where ``mask``, as for ``store_tile``, selects them."""
    pointer = pointer_to(address, tl.uint8, not MASKED) + offset
    if MASKED:
        codes = codes_one_by_one(words)
    else:
        pointer = tl.multiple_of(pointer.to(tl.pointer_type(tl.uint32), bitcast=True), 8)
        codes = codes_in_words(words)
        mask = tl.full([codes.shape[0]], mask, tl.int32) != 0
    tl.store(pointer + tl.arange(0, codes.shape[0]), codes, mask=mask)


@triton.jit
def scales_of_chunk(scale_addresses, first, end, F: tl.constexpr):
    """Load the scales of a chunk's codes, of first and second moments, for ``with_underflow``."""
    m_scales, v_scales = 0.0, 0.0
    if F.exp_avg == tl.uint8:
        m_scales = read_scales(scale_addresses[0], first, end)
    if F.exp_avg_sq == tl.uint8:
        v_scales = read_scales(scale_addresses[1], first, end)
    return m_scales, v_scales


@triton.jit
def with_underflow(scales, F: tl.constexpr):
    """These scales, and whether a second moment's is very small, for which all of them have to have come."""
    m_scales, v_scales = scales
    underflows = False
    if F.exp_avg_sq == tl.uint8:
        underflows = may_underflow(v_scales)
    return m_scales, v_scales, underflows


@triton.jit
def store_scales(scale_addresses, first, end, scales, F: tl.constexpr):
    """Write the chunk's new scales, from the largest magnitudes that ``store_tile`` returned in ``scales``."""
    if F.exp_avg == tl.uint8:
        write_scales(scale_addresses[0], first, end, scales_of_largest(scales[0], True))
    if F.exp_avg_sq == tl.uint8:
        write_scales(scale_addresses[1], first, end, scales_of_largest(scales[1], False))
