"""One AdamW step over a list of tensors in one launch.

The formula is in ``_adamw_update``, the storage formats in ``_adamw_tiles``; here is which program does what. Tensors
are cut into chunks of ``CHUNK`` elements, one program each (``multi_tensor.ChunkMap``), which goes through its chunk
tile by tile. Full chunks of aligned tensors are read and written 16 bytes a thread; what is left over, tails and
unaligned views, comes last in the chunk list and is masked. A program finds its tensor in ``owners``, and in the
tensor's record the addresses and everything that stays between steps; gradients and hyperparameters change, so they
have tables of their own. A list of one tensor needs no table: ``adamw_kernel_of_one`` takes the record as arguments.

Step counts live on the device. A program announces that it has read its count (``counters``); the last one to do so
stores the next count and clears the counter. So the whole step, counts included, is one launch.

What can be loaded without knowing anything else is loaded before the first wait: the way from chunk to tensor to
addresses to elements is a chain of latencies, and the only one a small model feels.
"""

from __future__ import annotations

from typing import NamedTuple

from optim_kernels._adamw_tiles import FP32_MASTER, NO_MASTER, SPLIT16, read_tile, store_tile, widened
from optim_kernels._adamw_update import (
    HYPERPARAMETERS_SIZE,
    MEMO_SIZE,
    Hyperparameters,
    adamw,
    leave_memo,
    read_group,
    scalars_of_step,
)
from optim_kernels._step_counts import advance, arrive
from optim_kernels._triton import after_previous, div_rn, tl, triton

__all__ = [
    "FP32_MASTER",
    "MEMOS_SIZE",
    "NO_MASTER",
    "RECORD_SIZE",
    "SPLIT16",
    "Hyperparameters",
    "Record",
    "adamw_kernel",
    "adamw_kernel_of_one",
]


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
    # where the scales of 8-bit moments are
    exp_avg_scale: int = 0
    exp_avg_sq_scale: int = 0


RECORD_SIZE = len(Record._fields)
# fp64 numbers of a slot that carry bias corrections from step to step
MEMOS_SIZE = 2 * MEMO_SIZE

# Positions in the row, for the kernel.
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
    _PLACE,
    _START,
    _SEED,
    _EXP_AVG_SCALE,
    _EXP_AVG_SQ_SCALE,
) = map(tl.constexpr, range(RECORD_SIZE))
_RECORD_SIZE = tl.constexpr(RECORD_SIZE)
_HYPERPARAMETERS_SIZE = tl.constexpr(HYPERPARAMETERS_SIZE)
_MEMOS_SIZE = tl.constexpr(MEMOS_SIZE)


@triton.jit(do_not_specialize=["clip_factor", "grad_scale", "found_inf", "num_chunks", "num_full"])
def adamw_kernel(
    owners,
    records,
    grads,
    hyperparameters,
    counters,
    memos,
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
    OVERLAP: tl.constexpr,
):
    """Update one chunk; the last ones go first, for clipping has just read their gradients and L2 still has them."""
    after_previous(OVERLAP)
    chunk = num_chunks - 1 - tl.program_id(0)
    tensor = tl.load(owners + chunk).to(tl.int64)
    record = records + tensor * _RECORD_SIZE
    places = (
        tl.load(record + _PARAM),
        tl.load(grads + tensor * 2),
        tl.load(grads + tensor * 2 + 1),
        tl.load(record + _EXP_AVG),
        tl.load(record + _EXP_AVG_SQ),
        tl.load(record + _MAX_EXP_AVG_SQ),
        tl.load(record + _MASTER),
        tl.load(record + _EXP_AVG_SCALE),
        tl.load(record + _EXP_AVG_SQ_SCALE),
    )
    is_full = chunk < num_full
    first = (chunk - tl.load(record + (_FIRST_MASKED - is_full.to(tl.int32)))) * CHUNK
    numel = tl.load(record + _NUMEL)
    slot = tl.load(record + _SLOT)
    flags = (found_inf, found_inf)
    if PRESENCE:
        flags = (found_inf, tl.load(record + _PRESENT).to(tl.pointer_type(tl.float32)))
    _update_chunk(
        places,
        first,
        numel,
        is_full,
        flags,
        (clip_factor, grad_scale),
        hyperparameters + tl.load(record + _GROUP) * _HYPERPARAMETERS_SIZE,
        tl.load(record + _STEP).to(tl.pointer_type(tl.float32)),
        (tl.load(record + _SEED), tl.load(record + _PLACE), tl.load(record + _START)),
        memos + slot * _MEMOS_SIZE,
        counters + slot,
        tl.load(record + _SLOT_CHUNKS) - 1,
        CHUNK,
        TILE,
        TAIL_TILE,
        P,
        G,
        M,
        V,
        AMSGRAD,
        MASTER,
        STOCHASTIC,
        NUM_SLICES,
        PRESENCE,
        False,
    )


_NUMBERS = [
    "clip_factor",
    "grad_scale",
    "found_inf",
    "num_chunks",
    "num_full",
    "param",
    "grad",
    "slice_stride",
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "master",
    "exp_avg_scale",
    "exp_avg_sq_scale",
    "step",
    "numel",
    "group",
    "seed",
    "place",
    "start",
]


@triton.jit(do_not_specialize=_NUMBERS)
def adamw_kernel_of_one(
    hyperparameters,
    counters,
    memos,
    clip_factor,
    grad_scale,
    found_inf,
    num_chunks,
    num_full,
    param: tl.int64,
    grad: tl.int64,
    slice_stride: tl.int64,
    exp_avg: tl.int64,
    exp_avg_sq: tl.int64,
    max_exp_avg_sq: tl.int64,
    master: tl.int64,
    exp_avg_scale: tl.int64,
    exp_avg_sq_scale: tl.int64,
    step: tl.int64,
    numel: tl.int64,
    group: tl.int64,
    seed: tl.int64,
    place: tl.int64,
    start: tl.int64,
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
    OVERLAP: tl.constexpr,
):
    """As ``adamw_kernel`` for a list of one tensor, whose elements can be asked for at once."""
    after_previous(OVERLAP)
    chunk = num_chunks - 1 - tl.program_id(0)
    first = chunk.to(tl.int64) * CHUNK
    _update_chunk(
        (param, grad, slice_stride, exp_avg, exp_avg_sq, max_exp_avg_sq, master, exp_avg_scale, exp_avg_sq_scale),
        first,
        numel,
        chunk < num_full,
        (found_inf, found_inf),
        (clip_factor, grad_scale),
        hyperparameters + group * _HYPERPARAMETERS_SIZE,
        step.to(tl.pointer_type(tl.float32)),
        (seed, place, start),
        memos,
        counters,
        num_chunks - 1,
        CHUNK,
        TILE,
        TAIL_TILE,
        P,
        G,
        M,
        V,
        AMSGRAD,
        MASTER,
        STOCHASTIC,
        NUM_SLICES,
        False,
        True,
    )


@triton.jit
def _update_chunk(
    places,
    first,
    numel,
    is_full,
    flags,
    factors,
    row,
    step_pointer,
    stream,
    memo,
    counter,
    last,
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
    MEMO: tl.constexpr,
):
    """Update a chunk, from ``first`` on, unless told to skip it; the ``last`` program to come here stores the count.

    The elements are asked for before anything that has to be waited for. So a step that is to be skipped computes too,
    and writes nothing.
    """
    end = tl.minimum(first + CHUNK, numel)
    # the tensor's last chunk is its first in the launch, so nobody waits for what it leaves
    is_last = (end == numel) & MEMO
    if is_full:
        offset = first
        tile = read_tile(places, offset, 0, TILE, P, G, M, V, AMSGRAD, MASTER, NUM_SLICES, False)
        keep, t, random, scalars, arrived = _start(
            step_pointer, flags, factors, row, stream, memo, counter, PRESENCE, MEMO
        )
        # all lanes alike, so that stores stay wide
        mask = tl.zeros([TILE], tl.int32) + keep.to(tl.int32) != 0
        if CHUNK > TILE:
            # the next tile is on its way while this one is worked on
            for _ in range(CHUNK // TILE - 1):
                following = read_tile(places, offset + TILE, 0, TILE, P, G, M, V, AMSGRAD, MASTER, NUM_SLICES, False)
                p, g, m, v, w = widened(tile, M, V, AMSGRAD, MASTER)
                p, m, v, w = adamw(p, g, m, v, w, scalars, AMSGRAD)
                store_tile(places, offset, mask, keep, p, m, v, w, random, P, M, V, AMSGRAD, MASTER, STOCHASTIC, False)
                tile = following
                offset += TILE
        p, g, m, v, w = widened(tile, M, V, AMSGRAD, MASTER)
        p, m, v, w = adamw(p, g, m, v, w, scalars, AMSGRAD)
        store_tile(places, offset, mask, keep, p, m, v, w, random, P, M, V, AMSGRAD, MASTER, STOCHASTIC, False)
        _finish(row, memo, step_pointer, t, counter, arrived, last, keep, is_last)
    else:
        keep, t, random, scalars, arrived = _start(
            step_pointer, flags, factors, row, stream, memo, counter, PRESENCE, MEMO
        )
        for offset in range(first, tl.where(keep, end, first), TAIL_TILE):
            mask = offset + tl.arange(0, TAIL_TILE) < end
            tile = read_tile(places, offset, mask, TAIL_TILE, P, G, M, V, AMSGRAD, MASTER, NUM_SLICES, True)
            p, g, m, v, w = widened(tile, M, V, AMSGRAD, MASTER)
            p, m, v, w = adamw(p, g, m, v, w, scalars, AMSGRAD)
            store_tile(places, offset, mask, keep, p, m, v, w, random, P, M, V, AMSGRAD, MASTER, STOCHASTIC, True)
        _finish(row, memo, step_pointer, t, counter, arrived, last, keep, is_last)


@triton.jit
def _start(step_pointer, flags, factors, row, stream, memo, counter, PRESENCE: tl.constexpr, MEMO: tl.constexpr):
    """What a program has to know before it computes: whether to keep the step, its number, random stream, scalars."""
    found_inf, present = flags
    clip_factor, grad_scale = factors
    seed, place, start = stream
    group = read_group(row, memo, MEMO)
    t = tl.load(step_pointer) + 1.0
    keep = tl.load(found_inf) == 0.0
    if PRESENCE:
        keep = keep & (tl.load(present) != 0.0)
    scale = tl.load(clip_factor) * div_rn(1.0, tl.load(grad_scale))
    arrived = arrive(counter, keep.to(tl.int32))
    scalars = scalars_of_step(group, row, t.to(tl.float64), scale, MEMO)
    return keep, t, (seed, place, start, t.to(tl.int64)), scalars, arrived


@triton.jit
def _finish(row, memo, step_pointer, t, counter, arrived, last, keep, is_last_chunk):
    """What a program does when its elements are done: the count, and a memo for the next step."""
    if is_last_chunk & keep:
        leave_memo(row, t.to(tl.float64) + 1.0, memo)
    advance(step_pointer, t, counter, arrived, last, keep)
