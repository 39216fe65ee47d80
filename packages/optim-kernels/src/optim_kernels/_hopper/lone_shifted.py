"""A product of two matrices in `lone_kernel` where it is BANDED: tiles shifted by a block, and what they leave out.

Of a step the ring has two blocks of B, one below the other, and up to three more: A's, or for programs of kind 2
(`_kernels.lone_places.shifted_place`) the last row of A and two more blocks of B. The first consumer has the upper 64
rows of a tile, or two blocks that tiles leave out; the second one has the lower 64 rows, or two blocks of the last row.
C comes, and D and its mirror image leave, in the place of a slot's two blocks of B.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from optim_kernels._hopper.lone_producer import load_blocks, open_ring
from optim_kernels._hopper.lone_tiles import (
    SIDE,
    await_free,
    await_place,
    await_ready,
    block,
    finish,
    multiply_rows,
    release,
    send,
    symmetrize,
    tall,
    wide,
    with_scale,
    zeros,
)
from optim_kernels._hopper.overlap import wait_for_previous
from optim_kernels._hopper.ring import barrier, load


@gluon.jit
def _load(descs, ring, where, slot, k):
    """Request a step's blocks of a program as `shifted_place` has it: two of B, then one to three."""
    a_blocks, b_blocks, all_ready = ring[0], ring[1], ring[2]
    a_desc, b_desc = descs[0], descs[1]
    SIZE: gl.constexpr = a_desc.block_type.nbytes
    ready = all_ready.index(slot)
    batch, b_batch, row, column, kind, _, second = where
    if kind == 0:
        mbarrier.expect(ready, 4 * SIZE)
    else:
        mbarrier.expect(ready, 5 * SIZE)
    load_blocks(b_desc, (b_batch, column, k), 1, True, ready, b_blocks, 2 * slot)
    load_blocks(b_desc, (b_batch, second, k), 1, True, ready, b_blocks, 2 * slot + 1)
    load_blocks(a_desc, (batch, row, k), 1, True, ready, a_blocks, 3 * slot)
    if kind == 0:
        load_blocks(a_desc, (batch, row + SIDE, k), 1, True, ready, a_blocks, 3 * slot + 1)
    elif kind == 1:
        load_blocks(a_desc, (batch, column, k), 1, True, ready, a_blocks, 3 * slot + 1)
        load_blocks(a_desc, (batch, second, k), 1, True, ready, a_blocks, 3 * slot + 2)
    else:
        load_blocks(b_desc, (b_batch, column + 4 * SIDE, k), 1, True, ready, a_blocks, 3 * slot + 1)
        load_blocks(b_desc, (b_batch, second + 4 * SIDE, k), 1, True, ready, a_blocks, 3 * slot + 2)


@gluon.jit
def _load_c(c_desc, ring, step, where, flags: gl.constexpr):
    """Request C for both consumers, each into a slot of its own."""
    b_blocks, all_ready = ring[1], ring[2]
    SIZE: gl.constexpr = c_desc.block_type.nbytes
    batch, _b_batch, row, column, kind, _, second = where
    for me in gl.static_range(2):
        slot = (step + me) % flags.stages
        ready = all_ready.index(slot)
        await_free(ring, step + me, flags.stages)
        mbarrier.expect(ready, 2 * SIZE)
        if kind == 0:
            load_blocks(c_desc, (batch, row + me * SIDE, column), 2, False, ready, b_blocks, 2 * slot)
        elif me == 1:
            load_blocks(c_desc, (batch, row, column), 1, False, ready, b_blocks, 2 * slot)
            load_blocks(c_desc, (batch, row, second), 1, False, ready, b_blocks, 2 * slot + 1)
        elif kind == 1:
            load(c_desc, [batch, column, column], ready, b_blocks.index(2 * slot))
            load(c_desc, [batch, second, second], ready, b_blocks.index(2 * slot + 1))
        else:
            load_blocks(c_desc, (batch, row, column + 4 * SIDE), 1, False, ready, b_blocks, 2 * slot)
            load_blocks(c_desc, (batch, row, second + 4 * SIDE), 1, False, ready, b_blocks, 2 * slot + 1)


@gluon.jit
def produce_shifted(descs, ring, where, K, flags: gl.constexpr):
    open_ring(ring, flags)
    if flags.overlap and not flags.early:
        wait_for_previous(K)
    step = 0
    for k in range(0, K, SIDE):
        await_free(ring, step, flags.stages)
        _load(descs, ring, where, step % flags.stages, k)
        step += 1
    if flags.has_c:
        _load_c(descs[2], ring, step, where, flags)


@gluon.jit
def _multiply_two(ON_DIAGONAL: gl.constexpr, ring, K, flags: gl.constexpr):
    """The sums of two blocks, and the steps taken."""
    a_blocks, b_blocks = ring[0], ring[1]
    acc = zeros(SIDE)
    other = zeros(SIDE)
    step = 0
    for k in range(0, K, SIDE):
        slot = step % flags.stages
        await_ready(ring, step, flags.stages)
        second, third = block(a_blocks, 3 * slot + 1), block(a_blocks, 3 * slot + 2)
        if ON_DIAGONAL:
            acc = warpgroup_mma(second, block(b_blocks, 2 * slot).permute((1, 0)), acc, is_async=True)
            other = warpgroup_mma(third, block(b_blocks, 2 * slot + 1).permute((1, 0)), other, is_async=True)
        else:
            last_row = block(a_blocks, 3 * slot)
            acc = warpgroup_mma(last_row, second.permute((1, 0)), acc, is_async=True)
            other = warpgroup_mma(last_row, third.permute((1, 0)), other, is_async=True)
        acc, other = warpgroup_mma_wait(2, deps=(acc, other))
        release(ring, step - 1, flags.stages, k > 0)
        step += 1
    acc, other = warpgroup_mma_wait(0, deps=(acc, other))
    release(ring, step - 1, flags.stages)
    return acc, other, step


@gluon.jit
def _tile(ME: gl.constexpr, where, descs, ring, K, numbers, flags: gl.constexpr):
    blocks = ring[1]
    d_result = descs[3]
    batch, _b_batch, row, column, kind, _, second = where
    is_tile = kind == 0
    acc, step = multiply_rows(ring[0], 3, gl.where(is_tile, ME, 0), blocks, ring, K, flags)
    numbers = with_scale(numbers, batch, K, flags)
    # a tile's second consumer has the rows below; neither it nor the last row here has a block on the diagonal
    row = gl.where(is_tile, row + ME * SIDE, row)
    slot, mirror = (step + ME) % flags.stages, (step + ME + 2) % flags.stages
    await_place(ring, step + ME, flags.has_c, flags.stages)
    d, _low = finish(acc, wide(blocks, slot, 2 * SIDE, flags.stages), numbers, flags)
    if ME == 0:  # noqa: SIM102
        if row == second:
            symmetrize(block(blocks, 2 * slot + 1))
    await_free(ring, step + ME + 2, flags.stages)
    tall(blocks, mirror, flags.stages).permute((1, 0)).store(d)
    fence_async_shared()
    barrier()
    send(flags, d_result, blocks, 2 * slot, batch, row, column)
    send(flags, d_result, blocks, 2 * slot + 1, batch, row, second)
    send(flags, d_result, blocks, 2 * mirror, batch, column, row)
    if row != second:
        send(flags, d_result, blocks, 2 * mirror + 1, batch, second, row)


@gluon.jit
def _left_out(ON_DIAGONAL: gl.constexpr, where, descs, ring, K, numbers, flags: gl.constexpr):
    blocks = ring[1]
    d_result = descs[3]
    batch, _b_batch, row, column, _kind, _, second = where
    acc, other, step = _multiply_two(ON_DIAGONAL, ring, K, flags)
    numbers = with_scale(numbers, batch, K, flags)
    place, mirror = 2 * (step % flags.stages), 2 * ((step + 2) % flags.stages)
    await_place(ring, step, flags.has_c, flags.stages)
    d, _low = finish(acc, block(blocks, place), numbers, flags)
    e, _low = finish(other, block(blocks, place + 1), numbers, flags)
    if ON_DIAGONAL:
        symmetrize(block(blocks, place))
        symmetrize(block(blocks, place + 1))
        fence_async_shared()
        barrier()
        send(flags, d_result, blocks, place, batch, column, column)
        send(flags, d_result, blocks, place + 1, batch, second, second)
    else:
        column += 4 * SIDE
        second += 4 * SIDE
        if row == second:
            symmetrize(block(blocks, place + 1))
        await_free(ring, step + 2, flags.stages)
        block(blocks, mirror).permute((1, 0)).store(d)
        block(blocks, mirror + 1).permute((1, 0)).store(e)
        fence_async_shared()
        barrier()
        send(flags, d_result, blocks, place, batch, row, column)
        send(flags, d_result, blocks, place + 1, batch, row, second)
        send(flags, d_result, blocks, mirror, batch, column, row)
        if row != second:
            send(flags, d_result, blocks, mirror + 1, batch, second, row)


@gluon.jit
def consume_shifted(ME: gl.constexpr, where, descs, ring, K, numbers, flags: gl.constexpr):
    kind = where[4]
    # in branches, whose sums do not meet
    if ME == 1:  # noqa: SIM114
        _tile(ME, where, descs, ring, K, numbers, flags)
    elif kind == 0:
        _tile(ME, where, descs, ring, K, numbers, flags)
    elif kind == 1:
        _left_out(True, where, descs, ring, K, numbers, flags)
    else:
        _left_out(False, where, descs, ring, K, numbers, flags)
