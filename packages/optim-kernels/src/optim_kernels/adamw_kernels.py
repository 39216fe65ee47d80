"""One AdamW step over a list of tensors in one launch.

For element i of a tensor at step t = steps + 1 (the mathematics and its roundings: ``optim_kernels.reference.adamw``):

    g <- s · g,  s = ±clip_factor / grad_scale
    m <- β1 m + (1 − β1) g
    v <- β2 v + (1 − β2) g²;  w <- max(w, v) with amsgrad, else w = v
    p <- p − (lr λ p + lr/(1 − β1^t) · m / (sqrt(w)/sqrt(1 − β2^t) + eps))

Tensors are cut into chunks of ``CHUNK`` elements, one program each (``multi_tensor.ChunkMap``). Full chunks of aligned
tensors are read and written 16 bytes a thread; what is left over, tails and unaligned views, comes last in the chunk
list and is masked. A program finds its tensor in ``owners``, and in the tensor's record the addresses and everything
that stays between steps; gradients and hyperparameters change, so they have tables of their own.

Step counts live on the device. A program announces that it has read its count (``counters``); the last one to do so
stores the next count and clears the counter. So the whole step, counts included, is one launch.
"""

from __future__ import annotations

from typing import NamedTuple

from optim_kernels._triton import (
    arrive,
    div_rn,
    narrow,
    rcp_approx,
    rsqrt_approx,
    tl,
    triton,
)
from optim_kernels.reference.adamw import STREAM_EXP_AVG, STREAM_EXP_AVG_SQ, STREAM_PARAM


class Record(NamedTuple):
    """A tensor's row in the record table: addresses (0: none) and what stays between steps, as int64."""

    param: int
    exp_avg: int
    exp_avg_sq: int
    max_exp_avg_sq: int
    master: int
    step: int
    present: int
    numel: int
    # first chunk among the full ones; and what to subtract from the number of a masked one
    first_full: int
    first_masked: int
    slot: int
    slot_chunks: int
    group: int
    # of the random bits: the parameter's place, the first element's index in it, and the key
    place: int
    start: int
    seed: int


class Hyperparameters(NamedTuple):
    """A group's row in the scalar table, as fp64; an address of 0 stands for a learning rate given on the host."""

    lr: float
    lr_address: int
    beta1: float
    beta2: float
    log2_beta1: float
    log2_beta2: float
    eps: float
    weight_decay: float
    sign: float


RECORD_SIZE = len(Record._fields)
HYPERPARAMETERS_SIZE = len(Hyperparameters._fields)

# Positions in the rows, for the kernel.
(
    _PARAM,
    _EXP_AVG,
    _EXP_AVG_SQ,
    _MAX_EXP_AVG_SQ,
    _MASTER,
    _STEP,
    _PRESENT,
    _NUMEL,
    _FIRST_FULL,
    _FIRST_MASKED,
    _SLOT,
    _SLOT_CHUNKS,
    _GROUP,
    _INDEX,
    _START,
    _SEED,
) = map(tl.constexpr, range(RECORD_SIZE))
_LR, _LR_ADDRESS, _BETA1, _BETA2, _LOG2_BETA1, _LOG2_BETA2, _EPS, _WEIGHT_DECAY, _SIGN = map(
    tl.constexpr, range(HYPERPARAMETERS_SIZE)
)
_RECORD_SIZE = tl.constexpr(RECORD_SIZE)
_HYPERPARAMETERS_SIZE = tl.constexpr(HYPERPARAMETERS_SIZE)
_STREAM_PARAM = tl.constexpr(STREAM_PARAM)
_STREAM_EXP_AVG = tl.constexpr(STREAM_EXP_AVG)
_STREAM_EXP_AVG_SQ = tl.constexpr(STREAM_EXP_AVG_SQ)

# How a parameter's full precision is kept.
NO_MASTER, FP32_MASTER, SPLIT16 = 0, 1, 2
_FP32_MASTER, _SPLIT16 = tl.constexpr(FP32_MASTER), tl.constexpr(SPLIT16)

_SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)
_BF16_MAX = tl.constexpr(3.3895313892515355e38)


@triton.jit
def _pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The address as a pointer; a table says nothing of alignment, so the 16 bytes are promised here."""
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load(pointer, offsets, mask, MASKED: tl.constexpr, STREAMED: tl.constexpr = False):
    """fp32 values; ``STREAMED`` ones are not wanted again, so they leave the cache first."""
    policy: tl.constexpr = "evict_first" if STREAMED else ""
    if MASKED:
        x = tl.load(pointer + offsets, mask=mask, other=0.0, eviction_policy=policy)
    else:
        x = tl.load(pointer + offsets, eviction_policy=policy)
    return x


@triton.jit
def _store(pointer, offsets, x, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + offsets, x, mask=mask)
    else:
        tl.store(pointer + offsets, x)


@triton.jit
def _random_bits(first, COUNT: tl.constexpr, seed, index, stream: tl.constexpr, step, MASKED: tl.constexpr):
    """16 random bits for ``COUNT`` elements from ``first`` on: the packed stream of ``optim_utils.rounding``.

    One Philox call serves eight elements that start at a multiple of eight, as those of a full chunk do; in a masked
    one every element calls for itself and keeps its share.
    """
    if MASKED:
        element = first + tl.arange(0, COUNT)
        block = element // 8
    else:
        block = first // 8 + tl.arange(0, COUNT // 8)
    low = (block & 0xFFFFFFFF).to(tl.uint32)
    high = (block >> 32).to(tl.uint32)
    key = (index.to(tl.uint64) << 32) | (seed.to(tl.uint64) & 0xFFFFFFFF)
    zero = low * 0
    r0, r1, r2, r3 = tl.philox(key, low, high, zero + stream, zero + step.to(tl.uint32))
    if MASKED:
        half = element % 8
        word = tl.where(half < 4, tl.where(half < 2, r0, r1), tl.where(half < 6, r2, r3))
        bits = tl.where(half % 2 == 0, word & 0xFFFF, word >> 16)
    else:
        # [block, j // 2, j % 2, half] of word j is element 2 j + half
        words = tl.join(tl.join(r0, r2), tl.join(r1, r3))
        bits = tl.reshape(tl.join(words & 0xFFFF, words >> 16), [COUNT])
    return bits


@triton.jit
def _rounded(x, dtype: tl.constexpr, bits, STOCHASTIC: tl.constexpr):
    """fp32 ``x`` in ``dtype``: to nearest, or up or down by the random bits."""
    if STOCHASTIC and dtype == tl.bfloat16:
        pattern = (x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
        finite = tl.abs(x) <= _BF16_MAX
        return narrow(tl.where(finite, pattern.to(tl.float32, bitcast=True), x), dtype)
    return narrow(x, dtype)


@triton.jit
def _join16(parameter, low):
    """The fp32 master of a bf16 parameter and its int16 low half (``optim_utils.rounding.join_master``)."""
    high = parameter.to(tl.int16, bitcast=True).to(tl.int32)
    remainder = low.to(tl.int32)
    remainder = tl.where((high & 0x7FFF) == 0, tl.maximum(remainder, 0), remainder)
    return ((high << 16) + remainder).to(tl.float32, bitcast=True)


@triton.jit
def _split16(master):
    """The bf16 parameter and int16 low half of an fp32 master (``optim_utils.rounding.split_master``)."""
    pattern = tl.where(master == master, master.to(tl.int32, bitcast=True), 0x7FC00000)
    parameter = ((pattern + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return parameter, pattern.to(tl.int16)


@triton.jit
def _scalars(row, t, scale):
    """What the update of a tensor needs at step t, from its group's row: formed in fp64, rounded to fp32 once."""
    lr = tl.load(row + _LR)
    lr_address = tl.load(row + _LR_ADDRESS).to(tl.int64, bitcast=True)
    if lr_address != 0:
        lr = tl.load(lr_address.to(tl.pointer_type(tl.float32))).to(tl.float64)
    beta1 = tl.load(row + _BETA1)
    beta2 = tl.load(row + _BETA2)
    t = t.to(tl.float64)
    bias1 = 1.0 - tl.exp2(t * tl.load(row + _LOG2_BETA1))
    bias2 = 1.0 - tl.exp2(t * tl.load(row + _LOG2_BETA2))
    step_size = div_rn(lr.to(tl.float32), bias1.to(tl.float32))
    decay = lr * tl.load(row + _WEIGHT_DECAY)
    return (
        scale * tl.load(row + _SIGN).to(tl.float32),
        beta1.to(tl.float32),
        (1.0 - beta1).to(tl.float32),
        beta2.to(tl.float32),
        (1.0 - beta2).to(tl.float32),
        tl.load(row + _EPS).to(tl.float32),
        decay.to(tl.float32),
        step_size,
        tl.rsqrt(bias2).to(tl.float32),
    )


@triton.jit
def _ratio(m, w, correction, eps):
    """``m / (sqrt(w) · correction + eps)``, rounded at each operation, without the branches of ``div_rn``, ``sqrt_rn``.

    An approximation and one Newton step each: s = w y with y ≈ 1/sqrt(w), then s + (w − s²) y/2; q = m z with
    z ≈ 1/d, then q + (m − q d) z. A w below the smallest normal number counts as that: nothing beside any eps > 0.
    """
    bounded = tl.maximum(w, _SMALLEST_NORMAL)
    y = rsqrt_approx(bounded)
    s = bounded * y
    s = tl.fma(tl.fma(-s, s, bounded), 0.5 * y, s)
    d = tl.fma(s, correction, eps)
    z = rcp_approx(d)
    q = m * z
    q = tl.fma(tl.fma(-q, d, m), z, q)
    # w overflows before m does; what is finite over inf is zero
    return tl.where(w < float("inf"), q, m * 0.0)


@triton.jit
def _adamw(p, g, m, v, w, scalars, AMSGRAD: tl.constexpr):
    """The new ``(p, m, v, w)`` of the module's formula. Explicit multiply-adds: all variants round alike."""
    scale, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, step_size, correction = scalars
    g = g * scale
    m = tl.fma(m, beta1, g * one_minus_beta1)
    v = tl.fma(v, beta2, g * one_minus_beta2 * g)
    if AMSGRAD:
        w = tl.maximum(w, v, propagate_nan=tl.PropagateNan.ALL)
    else:
        w = v
    p = p - tl.fma(p, decay, step_size * _ratio(m, w, correction, eps))
    return p, m, v, w


@triton.jit
def _load_tile(
    places,
    offset,
    mask,
    TILE: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MASTER: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """``(p, g, m, v, w)`` of the elements from ``offset`` on, in fp32."""
    p_address, g_address, slice_stride, m_address, v_address, w_address, master_address = places
    ALIGNED: tl.constexpr = not MASKED
    lanes = tl.arange(0, TILE)
    g_pointer = _pointer(g_address, G, ALIGNED) + offset
    g = _load(g_pointer, lanes, mask, MASKED, True).to(tl.float32)
    for _ in range(1, NUM_SLICES):
        g_pointer += slice_stride
        if ALIGNED:
            g_pointer = tl.multiple_of(g_pointer, 16)
        g += _load(g_pointer, lanes, mask, MASKED, True).to(tl.float32)
    m = _load(_pointer(m_address, M, ALIGNED) + offset, lanes, mask, MASKED).to(tl.float32)
    v = _load(_pointer(v_address, V, ALIGNED) + offset, lanes, mask, MASKED).to(tl.float32)
    w = v
    if AMSGRAD:
        w = _load(_pointer(w_address, V, ALIGNED) + offset, lanes, mask, MASKED).to(tl.float32)
    if MASTER == _FP32_MASTER:
        p = _load(_pointer(master_address, tl.float32, ALIGNED) + offset, lanes, mask, MASKED)
    else:
        p = _load(_pointer(p_address, P, ALIGNED) + offset, lanes, mask, MASKED)
        if MASTER == _SPLIT16:
            p = _join16(p, _load(_pointer(master_address, tl.int16, ALIGNED) + offset, lanes, mask, MASKED))
        else:
            p = p.to(tl.float32)
    return p, g, m, v, w


@triton.jit
def _store_tile(
    places,
    offset,
    mask,
    p,
    m,
    v,
    w,
    random,
    TILE: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Round the new values once and write them."""
    p_address, _, _, m_address, v_address, w_address, master_address = places
    ALIGNED: tl.constexpr = not MASKED
    lanes = tl.arange(0, TILE)
    p_pointer = _pointer(p_address, P, ALIGNED) + offset
    p_bits = 0
    m_bits = 0
    v_bits = 0
    if STOCHASTIC:
        seed, index, start, step = random
        first = start + offset
        if tl.bfloat16 == P and MASTER == 0:
            p_bits = _random_bits(first, TILE, seed, index, _STREAM_PARAM, step, MASKED)
        if tl.bfloat16 == M:
            m_bits = _random_bits(first, TILE, seed, index, _STREAM_EXP_AVG, step, MASKED)
        if tl.bfloat16 == V:
            v_bits = _random_bits(first, TILE, seed, index, _STREAM_EXP_AVG_SQ, step, MASKED)
    _store(_pointer(m_address, M, ALIGNED) + offset, lanes, _rounded(m, M, m_bits, STOCHASTIC), mask, MASKED)
    _store(_pointer(v_address, V, ALIGNED) + offset, lanes, _rounded(v, V, v_bits, STOCHASTIC), mask, MASKED)
    if AMSGRAD:
        _store(_pointer(w_address, V, ALIGNED) + offset, lanes, narrow(w, V), mask, MASKED)
    if MASTER == _FP32_MASTER:
        _store(_pointer(master_address, tl.float32, ALIGNED) + offset, lanes, p, mask, MASKED)
        _store(p_pointer, lanes, narrow(p, P), mask, MASKED)
    elif MASTER == _SPLIT16:
        high, low = _split16(p)
        _store(_pointer(master_address, tl.int16, ALIGNED) + offset, lanes, low, mask, MASKED)
        _store(p_pointer, lanes, high, mask, MASKED)
    else:
        _store(p_pointer, lanes, _rounded(p, P, p_bits, STOCHASTIC), mask, MASKED)


@triton.jit(do_not_specialize=["clip_factor", "grad_scale", "found_inf", "num_chunks", "num_full"])
def adamw_kernel(
    owners,
    records,
    grads,
    hyperparameters,
    counters,
    clip_factor,
    grad_scale,
    found_inf,
    num_chunks,
    num_full,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    PRESENCE: tl.constexpr,
):
    """Update one chunk; the last ones go first, for clipping has just read their gradients and L2 still has them.

    What can be loaded without knowing anything else is loaded before the first wait: the way from chunk to tensor to
    addresses to elements is a chain of latencies, and the only one a small model feels.
    """
    chunk = num_chunks - 1 - tl.program_id(0)
    tensor = tl.load(owners + chunk).to(tl.int64)
    skip = tl.load(found_inf)
    scale = tl.load(clip_factor) * div_rn(1.0, tl.load(grad_scale))
    record = records + tensor * _RECORD_SIZE
    places = (
        tl.load(record + _PARAM),
        tl.load(grads + tensor * 2),
        tl.load(grads + tensor * 2 + 1),
        tl.load(record + _EXP_AVG),
        tl.load(record + _EXP_AVG_SQ),
        tl.load(record + _MAX_EXP_AVG_SQ),
        tl.load(record + _MASTER),
    )
    is_full = chunk < num_full
    first = (chunk - tl.load(record + (_FIRST_MASKED - is_full.to(tl.int32)))) * CHUNK
    end = tl.minimum(first + CHUNK, tl.load(record + _NUMEL))
    step_pointer = tl.load(record + _STEP).to(tl.pointer_type(tl.float32))
    counter = counters + tl.load(record + _SLOT)
    last = tl.load(record + _SLOT_CHUNKS) - 1
    row = hyperparameters + tl.load(record + _GROUP) * _HYPERPARAMETERS_SIZE
    if PRESENCE and tl.load(tl.load(record + _PRESENT).to(tl.pointer_type(tl.float32))) == 0.0:
        skip += 1.0
    if skip != 0.0:
        return
    t = tl.load(step_pointer) + 1.0
    random = (tl.load(record + _SEED), tl.load(record + _INDEX), tl.load(record + _START), t.to(tl.int64))
    if is_full:
        p, g, m, v, w = _load_tile(places, first, 0, TILE, P, G, M, V, AMSGRAD, MASTER, NUM_SLICES, False)
        arrived = arrive(counter)
        scalars = _scalars(row, t, scale)
        p, m, v, w = _adamw(p, g, m, v, w, scalars, AMSGRAD)
        _store_tile(places, first, 0, p, m, v, w, random, TILE, P, M, V, AMSGRAD, MASTER, STOCHASTIC, False)
        if CHUNK > TILE:
            for offset in range(first + TILE, end, TILE):
                p, g, m, v, w = _load_tile(places, offset, 0, TILE, P, G, M, V, AMSGRAD, MASTER, NUM_SLICES, False)
                p, m, v, w = _adamw(p, g, m, v, w, scalars, AMSGRAD)
                _store_tile(places, offset, 0, p, m, v, w, random, TILE, P, M, V, AMSGRAD, MASTER, STOCHASTIC, False)
    else:
        arrived = arrive(counter)
        scalars = _scalars(row, t, scale)
        for offset in range(first, end, TAIL_TILE):
            mask = offset + tl.arange(0, TAIL_TILE) < end
            p, g, m, v, w = _load_tile(places, offset, mask, TAIL_TILE, P, G, M, V, AMSGRAD, MASTER, NUM_SLICES, True)
            p, m, v, w = _adamw(p, g, m, v, w, scalars, AMSGRAD)
            _store_tile(places, offset, mask, p, m, v, w, random, TAIL_TILE, P, M, V, AMSGRAD, MASTER, STOCHASTIC, True)
    # true in one thread of one program
    tl.store(counter, 0, mask=arrived == last)
    tl.store(step_pointer, t, mask=arrived == last)
