"""What one program of an AdamW step does: it goes through a chunk of one tensor, tile by tile.

A full chunk of an aligned tensor is read and written 16 bytes a thread, and its elements are asked for before anything
that has to be waited for: the step's number, the scalars, whether the step is to be kept. Other chunks are masked.
"""

from __future__ import annotations

from optim_kernels._adamw_tiles import NO_MASTER, read_tile, scales_of_chunk, store_scales, store_tile, widened
from optim_kernels._adamw_update import adamw, leave_memo, read_group, scalars_of_step
from optim_kernels._step_counts import advance, arrive
from optim_kernels._triton import div_rn, tl, triton

_NO_MASTER = tl.constexpr(NO_MASTER)


@triton.jit
def update_chunk(
    places,
    scale_addresses,
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
        scales = scales_of_chunk(scale_addresses, first, end, M, V)
        keep, t, random, scalars, arrived = _start(
            step_pointer, flags, factors, row, stream, memo, counter, PRESENCE, MEMO
        )
        # all lanes alike, so that stores stay wide
        mask = tl.zeros([TILE], tl.int32) + keep.to(tl.int32) != 0
        if CHUNK > TILE:
            # the next tile is on its way while this one is worked on; two turns at once spare moving codes about
            for i in tl.range(CHUNK // TILE - 1, loop_unroll_factor=2 if tl.uint8 == M else 1):
                following = read_tile(places, offset + TILE, 0, TILE, P, G, M, V, AMSGRAD, MASTER, NUM_SLICES, False)
                scales = _update_tile(
                    tile,
                    places,
                    offset,
                    mask,
                    scales,
                    i,
                    scalars,
                    random,
                    P,
                    G,
                    M,
                    V,
                    AMSGRAD,
                    MASTER,
                    STOCHASTIC,
                    False,
                )
                tile = following
                offset += TILE
        i = CHUNK // TILE - 1
        scales = _update_tile(
            tile, places, offset, mask, scales, i, scalars, random, P, G, M, V, AMSGRAD, MASTER, STOCHASTIC, False
        )
        store_scales(scale_addresses, first, tl.where(keep, end, first), scales, M, V)
        _finish(row, memo, step_pointer, t, counter, arrived, last, keep, is_last)
    else:
        scales = scales_of_chunk(scale_addresses, first, end, M, V)
        keep, t, random, scalars, arrived = _start(
            step_pointer, flags, factors, row, stream, memo, counter, PRESENCE, MEMO
        )
        for offset in range(first, tl.where(keep, end, first), TAIL_TILE):
            i = (offset - first) // TAIL_TILE
            mask = offset + tl.arange(0, TAIL_TILE) < end
            tile = read_tile(places, offset, mask, TAIL_TILE, P, G, M, V, AMSGRAD, MASTER, NUM_SLICES, True)
            scales = _update_tile(
                tile, places, offset, mask, scales, i, scalars, random, P, G, M, V, AMSGRAD, MASTER, STOCHASTIC, True
            )
        store_scales(scale_addresses, first, tl.where(keep, end, first), scales, M, V)
        _finish(row, memo, step_pointer, t, counter, arrived, last, keep, is_last)


@triton.jit
def _update_tile(
    tile,
    places,
    offset,
    mask,
    scales,
    i,
    scalars,
    random,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MASTER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Update tile ``i`` of a chunk, which has been read; the chunk's scales."""
    ROUNDED: tl.constexpr = MASTER == _NO_MASTER and P.primitive_bitwidth == 16
    p, g, m, v, w = widened(tile, scales, i, P, G, M, V, AMSGRAD, MASTER)
    p, m, v, w = adamw(p, g, m, v, w, scalars, AMSGRAD, ROUNDED)
    return store_tile(places, offset, mask, scales, i, p, m, v, w, random, P, M, V, AMSGRAD, MASTER, STOCHASTIC, MASKED)


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
