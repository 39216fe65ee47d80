"""One program's part of an AdamW step: a chunk of one tensor, tile by tile.

A full chunk of an aligned tensor is read and written 16 bytes a thread, and its elements are requested before the
program waits for anything: the step's number, the scalars, whether the step is to be kept. So a step that is skipped
computes too, but writes nothing. Other chunks are masked.
"""

from __future__ import annotations

from optim_kernels._kernels.adamw_tiles import (
    read_tile,
    scales_of_chunk,
    store_scales,
    store_tile,
    widened,
    with_underflow,
)
from optim_kernels._kernels.adamw_update import adamw, leave_memo, read_group, scalars_of_step
from optim_kernels._kernels.step_counts import advance, arrive, arrive_above
from optim_kernels._triton import div_rn, no_load_across, tl, triton
from optim_kernels.reference.storage import NO_MASTER

_NO_MASTER = tl.constexpr(NO_MASTER)


@triton.jit
def update_chunk(
    places,
    scale_addresses,
    first,
    end,
    is_full,
    is_last,
    flags,
    factors,
    row,
    rates,
    step_pointer,
    stream,
    memo,
    counter,
    above,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    F: tl.constexpr,
    MEMO: tl.constexpr,
    ELEMENTS_FIRST: tl.constexpr,
):
    """Update the elements from ``first`` up to ``end``, unless told to skip them.

    Args:
        is_full: whether there are ``CHUNK`` elements, or with a CHUNK of 0 whole tiles (in lists an even number), all
            aligned.
        is_last: whether to leave a memo, which the next step reads with ``MEMO``.
        flags: pointers to ``found_inf`` and to the tensor's presence.
        factors: pointers to the clip factor and to the gradient scale.
        row, rates: as for ``read_group``.
        ELEMENTS_FIRST: whether a full chunk's elements are asked for before scalars, which L1 then returns after them.
        counter, above: where the program arrives (``step_counts``), and where its group does, if there are groups: with
            ``MEMO`` and a CHUNK of 0. The last program stores the next step count.
    """
    GROUPED: tl.constexpr = MEMO and CHUNK == 0
    stored_scales = scales_of_chunk(scale_addresses, first, end, F)
    if is_full:
        offset = first
        tile = read_tile(places, offset, True, TILE, F, False)
        if ELEMENTS_FIRST:
            no_load_across()
        keep, t, random, scalars, arrived = _start(
            step_pointer, flags, factors, row, rates, stream, memo, counter, F, MEMO, MEMO or CHUNK == TILE
        )
        scales = with_underflow(stored_scales, F)
        # the next tile is on its way while this one is worked on
        if CHUNK == 0 and not MEMO:
            num_tiles = ((end - first) // TILE).to(tl.int32)
            for i in range(0, num_tiles, 2):
                following = read_tile(places, offset + TILE, True, TILE, F, False)
                scales = _update_tile(tile, places, offset, keep, scales, i, scalars, random, F, False)
                if i + 2 < num_tiles:
                    tile = read_tile(places, offset + 2 * TILE, True, TILE, F, False)
                scales = _update_tile(following, places, offset + TILE, keep, scales, i + 1, scalars, random, F, False)
                offset += 2 * TILE
        else:
            last = ((end - first) // TILE).to(tl.int32) - 1 if CHUNK == 0 else CHUNK // TILE - 1
            for i in range(last):
                following = read_tile(places, offset + TILE, True, TILE, F, False)
                scales = _update_tile(tile, places, offset, keep, scales, i, scalars, random, F, False)
                tile = following
                offset += TILE
            if GROUPED:
                arrived = arrive_above(above, arrived, counter, keep)
            scales = _update_tile(tile, places, offset, keep, scales, last, scalars, random, F, False)
        store_scales(scale_addresses, first, tl.where(keep, end, first), scales, F)
        _finish(row, memo, step_pointer, t, arrived, above if GROUPED else counter, keep, is_last)
    else:
        keep, t, random, scalars, arrived = _start(
            step_pointer, flags, factors, row, rates, stream, memo, counter, F, MEMO, MEMO or CHUNK == TILE
        )
        scales = with_underflow(stored_scales, F)
        for offset in range(first, tl.where(keep, end, first), TAIL_TILE):
            i = (offset - first) // TAIL_TILE
            mask = offset + tl.arange(0, TAIL_TILE) < end
            tile = read_tile(places, offset, mask, TAIL_TILE, F, True)
            scales = _update_tile(tile, places, offset, mask, scales, i, scalars, random, F, True)
        if GROUPED:
            arrived = arrive_above(above, arrived, counter, keep)
        store_scales(scale_addresses, first, tl.where(keep, end, first), scales, F)
        _finish(row, memo, step_pointer, t, arrived, above if GROUPED else counter, keep, is_last)


@triton.jit
def _update_tile(tile, places, offset, mask, scales, i, scalars, random, F: tl.constexpr, MASKED: tl.constexpr):
    """Update tile ``i`` of a chunk, given as read, and return the chunk's scales; ``mask`` is as for ``store_tile``."""
    ROUNDED: tl.constexpr = F.master == _NO_MASTER and F.param.primitive_bitwidth == 16
    p, g, m, v, w = widened(tile, scales, i, F)
    p, m, v, w = adamw(p, g, m, v, w, scalars, F.amsgrad, ROUNDED)
    return store_tile(places, offset, mask, scales, i, p, m, v, w, random, F, MASKED)


@triton.jit
def _start(
    step_pointer,
    flags,
    factors,
    row,
    rates,
    stream,
    memo,
    counter,
    F: tl.constexpr,
    MEMO: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Load what a program needs before it computes: whether to keep the step, its number, random stream, scalars."""
    found_inf, present = flags
    clip_factor, grad_scale = factors
    seed, place, start = stream
    group = read_group(row, rates, memo, MEMO)
    t = tl.load(step_pointer) + 1.0
    keep = (tl.load(found_inf) == 0.0) & (tl.load(present) != 0.0)
    scale = tl.load(clip_factor) * div_rn(1.0, tl.load(grad_scale))
    # ``arrive`` waits for t, during which no load is issued, and then begins the counter's round trip. Where tiles do
    # not hide that round trip (EARLY), the scalars do; elsewhere the scalars' loads go first
    if EARLY:
        arrived = arrive(counter, keep, t)
    scalars = scalars_of_step(group, row, t, scale, MEMO)
    if not EARLY:
        arrived = arrive(counter, keep, t)
    return keep, t, (seed, place, start, t.to(tl.int64)), scalars, arrived


@triton.jit
def _finish(row, memo, step_pointer, t, arrived, counter, keep, is_last):
    """End a program whose elements are done: leave the memo for the next step, advance the count."""
    if is_last & keep:
        leave_memo(row, t + 1.0, memo)
    advance(step_pointer, t, arrived, counter, keep)
