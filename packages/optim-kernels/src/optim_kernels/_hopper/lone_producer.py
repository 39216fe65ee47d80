"""The producer of `lone_kernel`: requests a tile's blocks of A and B step by step, and C as one more step."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from optim_kernels._hopper.lone_tiles import SIDE, await_free
from optim_kernels._hopper.overlap import wait_for_previous
from optim_kernels._hopper.ring import initialise, load


@gluon.jit
def load_blocks(desc, where, NUM: gl.constexpr, DOWN: gl.constexpr, ready, blocks, first):
    """Request NUM blocks, below one another or side by side.

    A block wholly outside the matrix would take the copy engine longer than one inside, and nothing of the result that
    is stored comes of it: the last one inside takes its place.
    """
    batch, row, column = where
    last = (desc.shape[1 if DOWN else 2] - 1) // SIDE * SIDE
    for i in gl.static_range(NUM):
        if DOWN:
            load(desc, [batch, gl.minimum(row + i * SIDE, last), column], ready, blocks.index(first + i))
        else:
            load(desc, [batch, row, gl.minimum(column + i * SIDE, last)], ready, blocks.index(first + i))


@gluon.jit
def _load_a(descs, ring, where, step, i: gl.constexpr, k, flags: gl.constexpr):
    """Request A's blocks at ``k``, the i-th along K of their step."""
    slot = step % flags.stages
    place = (where[0], where[2], k)
    load_blocks(descs[0], place, flags.tall, True, ring[2].index(slot), ring[0], flags.tall * (flags.deep * slot + i))


@gluon.jit
def _load_b(descs, ring, where, step, i: gl.constexpr, k, flags: gl.constexpr):
    """Request B's blocks at ``k``, the i-th along K of their step."""
    slot = step % flags.stages
    batch, column = where[1], where[3]
    number = flags.broad * (flags.deep * slot + i)
    if flags.symmetric:
        load_blocks(descs[1], (batch, column, k), flags.broad, True, ring[2].index(slot), ring[1], number)
    else:
        load_blocks(descs[1], (batch, k, column), flags.broad, False, ring[2].index(slot), ring[1], number)


@gluon.jit
def _fill_ahead(descs, ring, where, K, flags: gl.constexpr):
    """Fill the ring, with A before the launch before is complete; return how many steps along K are in it."""
    SIZE: gl.constexpr = descs[0].block_type.nbytes
    DEPTH: gl.constexpr = flags.deep * SIDE
    steps = gl.minimum((K + DEPTH - 1) // DEPTH, flags.stages)
    for step in range(steps):
        mbarrier.expect(ring[2].index(step), flags.deep * (flags.tall + flags.broad) * SIZE)
        for i in gl.static_range(flags.deep):
            _load_a(descs, ring, where, step, i, step * DEPTH + i * SIDE, flags)
    wait_for_previous(K)
    for step in range(steps):
        for i in gl.static_range(flags.deep):
            _load_b(descs, ring, where, step, i, step * DEPTH + i * SIDE, flags)
    return steps


@gluon.jit
def open_ring(ring, flags: gl.constexpr):
    """Initialise the ring's barriers, by the producer: all warps of a program would have to meet for each of them."""
    _a_blocks, _b_blocks, ready, empty, opened = ring
    initialise(ready, flags.stages)
    initialise(empty, flags.stages, flags.tall)
    fence_async_shared()
    mbarrier.arrive(opened)


@gluon.jit
def produce(descs, ring, where, K, flags: gl.constexpr):
    b_blocks, all_ready = ring[1], ring[2]
    SIZE: gl.constexpr = descs[0].block_type.nbytes
    DEPTH: gl.constexpr = flags.deep * SIDE
    batch, _b_batch, row, column, quarter, other_row, other_column = where
    open_ring(ring, flags)
    step = 0
    if flags.ahead:
        step = _fill_ahead(descs, ring, where, K, flags)
    elif flags.overlap and not flags.early:
        wait_for_previous(K)
    for first in range(step * DEPTH, K, DEPTH):
        slot = step % flags.stages
        ready = all_ready.index(slot)
        await_free(ring, step, flags.stages)
        if not flags.symmetric or flags.halved or not flags.same or row != column:
            mbarrier.expect(ready, flags.deep * (flags.tall + flags.broad) * SIZE)
        elif not flags.banded:
            mbarrier.expect(ready, 2 * SIZE)
        elif quarter == 1 or flags.tall == 1:
            mbarrier.expect(ready, 4 * SIZE)
        else:
            mbarrier.expect(ready, 3 * SIZE)
        for i in gl.static_range(flags.deep):
            k = first + i * SIDE
            _load_a(descs, ring, where, step, i, k, flags)
            if not flags.symmetric or flags.halved or not flags.same or row != column:
                _load_b(descs, ring, where, step, i, k, flags)
            elif flags.banded:
                load_blocks(descs[0], (batch, other_row, k), 1, True, ready, b_blocks, 2 * slot + i)
                if quarter == 1:
                    load_blocks(descs[0], (batch, other_column, k), 1, True, ready, b_blocks, 2 * slot + 1)
        step += 1
    _produce_c(descs[2], ring, step, (batch, row, column, other_row, other_column), flags)


@gluon.jit
def _produce_c(c_desc, ring, step, where, flags: gl.constexpr):
    """Request C, into the slots where D will be."""
    a_blocks, b_blocks, all_ready = ring[0], ring[1], ring[2]
    SIZE: gl.constexpr = c_desc.block_type.nbytes
    batch, row, column, other_row, other_column = where
    if flags.has_c:
        if flags.symmetric and not flags.halved:
            slot = step % flags.stages
            ready = all_ready.index(slot)
            await_free(ring, step, flags.stages)
            if row != column:
                mbarrier.expect(ready, flags.tall * flags.tall * SIZE)
                load_blocks(c_desc, (batch, row, column), flags.tall, False, ready, a_blocks, 2 * slot)
            elif flags.banded:
                mbarrier.expect(ready, 2 * flags.tall * SIZE)
                load(c_desc, [batch, row, row], ready, a_blocks.index(2 * slot))
                load(c_desc, [batch, other_row, other_column], ready, a_blocks.index(2 * slot + 1))
            else:
                mbarrier.expect(ready, (2 * flags.tall - 1) * SIZE)
                load(c_desc, [batch, row, row], ready, a_blocks.index(2 * slot))
            if flags.tall == 2:
                load_blocks(c_desc, (batch, row + SIDE, column), 2, False, ready, b_blocks, 2 * slot)
        else:
            for me in gl.static_range(flags.tall):
                slot = (step + me) % flags.stages
                ready = all_ready.index(slot)
                await_free(ring, step + me, flags.stages)
                mbarrier.expect(ready, flags.broad * SIZE)
                place = flags.deep * flags.broad * slot
                load_blocks(c_desc, (batch, row + me * SIDE, column), flags.broad, False, ready, b_blocks, place)
