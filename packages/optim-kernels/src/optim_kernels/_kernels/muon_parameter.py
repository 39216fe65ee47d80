"""A parameter's elements inside Muon's kernels: read at full precision, updated, stored.

    plain       p <- p (1 − lr λ) − lr' O
    cautious    p <- p − lr' O − lr' λ p [O p ≥ 0],        lr' = lr · scale of the matrix

With a master the parameter is the master's rounded copy. With stochastic rounding a bf16 parameter is rounded by the
packed stream of `optim_utils.rounding`, whose bits are indexed by an element's place in the parameter's memory.
"""

from __future__ import annotations

from optim_kernels._kernels.muon_table import (
    FP32_MASTER,
    GROUP,
    LR,
    MASTER,
    NO_MASTER,
    NUM_HYPER,
    PLACE,
    SEED,
    SPLIT16,
    START,
    STEP,
    WEIGHT_DECAY,
    P,
)
from optim_kernels._kernels.muon_tiles import pointer_in, stride_of, tile_offsets
from optim_kernels._kernels.rounding import bits_of_blocks, bits_of_elements, join_master, round_with_bits, split_master
from optim_kernels._triton import narrow, tl, triton
from optim_kernels.reference.storage import STREAM_PARAM

_STREAM = tl.constexpr(STREAM_PARAM)


@triton.jit
def _random_bits(record, first_outer, first_inner, ALIGNED: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr):
    """16 random bits for each element of a tile [LINES, LENGTH]."""
    seed, place, start = tl.load(record + SEED), tl.load(record + PLACE), tl.load(record + START)
    step = tl.load(tl.load(record + STEP).to(tl.pointer_type(tl.float32)))
    line = start + (first_outer + tl.arange(0, LINES)).to(tl.int64) * stride_of(record, ALIGNED) + first_inner
    if ALIGNED:
        block = line[:, None] // 8 + tl.arange(0, LENGTH // 8)[None, :]
        bits = bits_of_blocks(block, seed, place, _STREAM, step)
    else:
        bits = bits_of_elements(line[:, None] + tl.arange(0, LENGTH)[None, :], seed, place, _STREAM, step)
    return bits


@triton.jit
def read_parameter(record, offsets, mask, P_DTYPE: tl.constexpr, MASTER_KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Elements of the parameter in fp32, or of its master."""
    if MASTER_KIND == FP32_MASTER:
        p = tl.load(pointer_in(record, MASTER, tl.float32, ALIGNED) + offsets, mask=mask, other=0.0)
    else:
        p = tl.load(pointer_in(record, P, P_DTYPE, ALIGNED) + offsets, mask=mask, other=0.0)
        if MASTER_KIND == SPLIT16:
            low = tl.load(pointer_in(record, MASTER, tl.int16, ALIGNED) + offsets, mask=mask, other=0)
            p = join_master(p, low)
        else:
            p = p.to(tl.float32)
    return p


@triton.jit
def updated(record, hyper, scale, p, o, CAUTIOUS: tl.constexpr):
    """The parameter's elements ``p`` after the update ``o``; ``scale`` multiplies the learning rate."""
    row = hyper + tl.load(record + GROUP) * NUM_HYPER
    lr, weight_decay = tl.load(row + LR), tl.load(row + WEIGHT_DECAY)
    step_size = lr * scale
    if CAUTIOUS:
        decay = tl.where(o * p >= 0.0, step_size * weight_decay * p, 0.0)
        p = p - step_size * o - decay
    else:
        p = p * (1.0 - lr * weight_decay) - step_size * o
    return p


@triton.jit
def write_parameter(record, offsets, mask, p, P_DTYPE: tl.constexpr, MASTER_KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Store elements of the parameter, rounded to nearest, and of its master."""
    if MASTER_KIND == SPLIT16:
        rounded, low = split_master(p)
        tl.store(pointer_in(record, MASTER, tl.int16, ALIGNED) + offsets, low, mask=mask)
    else:
        rounded = narrow(p, P_DTYPE)
    if MASTER_KIND == FP32_MASTER:
        tl.store(pointer_in(record, MASTER, tl.float32, ALIGNED) + offsets, p, mask=mask)
    tl.store(pointer_in(record, P, P_DTYPE, ALIGNED) + offsets, rounded, mask=mask)


@triton.jit
def update_tile(
    record,
    hyper,
    scale,
    first_outer,
    first_inner,
    o,
    P_DTYPE: tl.constexpr,
    MASTER_KIND: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Subtract the update ``o``, a tile in the storage's order, from the parameter."""
    offsets, mask = tile_offsets(record, first_outer, first_inner, ALIGNED, o.shape[0], o.shape[1])
    p = read_parameter(record, offsets, mask, P_DTYPE, MASTER_KIND, ALIGNED)
    p = updated(record, hyper, scale, p, o, CAUTIOUS)
    if STOCHASTIC and MASTER_KIND == NO_MASTER and tl.bfloat16 == P_DTYPE:
        bits = _random_bits(record, first_outer, first_inner, ALIGNED, o.shape[0], o.shape[1])
        tl.store(pointer_in(record, P, P_DTYPE, ALIGNED) + offsets, round_with_bits(p, bits), mask=mask)
    else:
        write_parameter(record, offsets, mask, p, P_DTYPE, MASTER_KIND, ALIGNED)
