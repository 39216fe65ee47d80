"""Products of Newton–Schulz for Hopper in Gluon, one tile per program: for products that fill the chip at most once.

    D = s (α A Bᵀ + β C),  Q = D + ω I     SYMMETRIC: tiles on and below the diagonal, mirrored
    D = s (α A B + β C)                    otherwise

With SYMMETRIC, B may be a shorter batch, which is repeated.

A tile has TALL × BROAD blocks of 64×64:

    SYMMETRIC     1×1, 2×2, and 1×2: halves of square tiles, one of two on the diagonal half above it
    otherwise     1×2, 2×2, 3×2, 2×4

A program has a multiprocessor to itself: a producer copies A and B for each step along K into a ring in shared memory,
and TALL consumers multiply 64 rows each (`lone_tiles`). A tile waits for what a multiprocessor can read, TALL + BROAD
blocks a step. Nothing hides the start and the end of a tile, so they are kept short: the producer alone prepares the
ring, C comes as one more step of it, and results leave from slots that have been read, so no buffers of their own take
room from the ring. With OVERLAP a program of the next launch waits for any free multiprocessor, not for all: two
programs never share one, as the ring takes more than half of its memory. With EARLY, where only the scale comes from
the launch before, a program even multiplies before the scale is there. With AHEAD, where A is older than the launch
before, it copies as much of A as the ring has room for while that one still runs. That one must be LATE: it lets the
next start when its own wait is over, so that whatever came before it is complete. With PARTS the scale is 1/N², which a
program finds when its sums are done, from squares of parts of the matrix (`_kernels.normalize`): a launch for that in
between would take longer.

Tiles on the diagonal need less work, and where every program counts (BANDED, for A Aᵀ alone) they are combined:

    TALL 1    two tiles to a program, which reads as much for them as for one below the diagonal
    TALL 2    consumer 1 computes the lower half [64, 128] of a tile and consumer 0 the upper left quarter, which leaves
              it half idle: so four tiles go to three programs, each of which computes one of them, and a quarter of the
              fourth

T = 16 tiles a side then make 128 or 132 programs in place of 136, and an H100 has 132 multiprocessors. These programs
are the first: the last ones start when one of the launch before ends, and all others wait for them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from optim_kernels._hopper.flags import lone_flags
from optim_kernels._hopper.lone_tiles import SIDE, await_free, corner, half_tile, lower_half, whole_tile
from optim_kernels._hopper.overlap import computed_here, let_next_start, wait_for_previous
from optim_kernels._hopper.ring import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    barriers,
    blocks_of,
    initialise,
    load,
    room_for_barriers,
)
from optim_kernels._kernels.lone_places import lone_place, quotient

# Registers of a thread where TALL is 1, consumer or producer: a program starts sooner where none change hands.
REGISTERS = gl.constexpr(128)
# Of three consumers, the second and third.
_CONSUMER_REGISTERS_OF_THREE = gl.constexpr(152)


@gluon.jit
def _place(T, num_b, flags: gl.constexpr):
    """The matrix, and B's of ``num_b``; the tile's first row and column; a quarter beside it, its row and column."""
    i, j, quarter, other = lone_place(gl.program_id(0), T, flags.symmetric, flags.banded, flags.tall, flags.broad)
    batch = computed_here(gl.program_id(1))
    b_batch = batch
    if flags.symmetric and not flags.same:
        b_batch = computed_here(batch - quotient(batch, num_b) * num_b)
    row, column = computed_here(i * flags.tall * SIDE), computed_here(j * flags.broad * SIDE)
    if not flags.banded:
        return batch, b_batch, row, column, 0, 0, 0
    other *= flags.tall * SIDE
    other_row, other_column = other + (quarter + 1) // 2 * SIDE, other + quarter // 2 * SIDE
    return batch, b_batch, row, column, computed_here(quarter), computed_here(other_row), computed_here(other_column)


@gluon.jit
def _load(desc, where, NUM: gl.constexpr, DOWN: gl.constexpr, ready, blocks, first):
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
    _load(descs[0], place, flags.tall, True, ring[2].index(slot), ring[0], flags.tall * (flags.deep * slot + i))


@gluon.jit
def _load_b(descs, ring, where, step, i: gl.constexpr, k, flags: gl.constexpr):
    """Request B's blocks at ``k``, the i-th along K of their step."""
    slot = step % flags.stages
    batch, column = where[1], where[3]
    number = flags.broad * (flags.deep * slot + i)
    if flags.symmetric:
        _load(descs[1], (batch, column, k), flags.broad, True, ring[2].index(slot), ring[1], number)
    else:
        _load(descs[1], (batch, k, column), flags.broad, False, ring[2].index(slot), ring[1], number)


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
def _open(ring, flags: gl.constexpr):
    """Initialise the ring's barriers, by the producer: all warps of a program would have to meet for each of them."""
    _a_blocks, _b_blocks, ready, empty, opened = ring
    initialise(ready, flags.stages)
    initialise(empty, flags.stages, flags.tall)
    fence_async_shared()
    mbarrier.arrive(opened)


@gluon.jit
def _produce(descs, ring, where, K, flags: gl.constexpr):
    b_blocks, all_ready = ring[1], ring[2]
    SIZE: gl.constexpr = descs[0].block_type.nbytes
    DEPTH: gl.constexpr = flags.deep * SIDE
    batch, _b_batch, row, column, quarter, other_row, other_column = where
    _open(ring, flags)
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
                _load(descs[0], (batch, other_row, k), 1, True, ready, b_blocks, 2 * slot + i)
                if quarter == 1:
                    _load(descs[0], (batch, other_column, k), 1, True, ready, b_blocks, 2 * slot + 1)
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
                _load(c_desc, (batch, row, column), flags.tall, False, ready, a_blocks, 2 * slot)
            elif flags.banded:
                mbarrier.expect(ready, 2 * flags.tall * SIZE)
                load(c_desc, [batch, row, row], ready, a_blocks.index(2 * slot))
                load(c_desc, [batch, other_row, other_column], ready, a_blocks.index(2 * slot + 1))
            else:
                mbarrier.expect(ready, (2 * flags.tall - 1) * SIZE)
                load(c_desc, [batch, row, row], ready, a_blocks.index(2 * slot))
            if flags.tall == 2:
                _load(c_desc, (batch, row + SIDE, column), 2, False, ready, b_blocks, 2 * slot)
        else:
            for me in gl.static_range(flags.tall):
                slot = (step + me) % flags.stages
                ready = all_ready.index(slot)
                await_free(ring, step + me, flags.stages)
                mbarrier.expect(ready, flags.broad * SIZE)
                place = flags.deep * flags.broad * slot
                _load(c_desc, (batch, row + me * SIDE, column), flags.broad, False, ready, b_blocks, place)


@gluon.jit
def _consume(ME: gl.constexpr, descs, ring, where, K, numbers, flags: gl.constexpr):
    # so that no path goes around the loop: from Triton 3.7 on, such a path writes the zeros of sums without steps once
    # more where it ends, and the compiler makes every product wait for the one before
    gl.assume(K > 0)
    if flags.overlap and ME == 0:
        if flags.late:
            wait_for_previous(K)
        let_next_start(K)
    mbarrier.wait(ring[4], 0)
    if flags.halved:
        half_tile(where, descs, ring, K, numbers, flags)
    elif flags.symmetric:
        # the sums of the branches must not meet, or the compiler makes one product wait for the other
        if where[2] != where[3]:
            whole_tile(ME, where, descs, ring, K, numbers, flags)
        else:
            if ME == 0:
                corner(where, descs, ring, K, numbers, flags)
            else:
                lower_half(where, descs, ring, K, numbers, flags)
    else:
        whole_tile(ME, where, descs, ring, K, numbers, flags)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "K", "parts"])
def lone_kernel(
    a_desc,
    b_desc,
    c_desc,
    d_desc,
    q_desc,
    d,
    q,
    scale,
    inverses,
    T,
    K,
    alpha,
    beta,
    omega,
    parts,
    norm_scale,
    eps,
    SYMMETRIC: gl.constexpr,
    SAME: gl.constexpr,
    HAS_C: gl.constexpr,
    HAS_Q: gl.constexpr,
    HAS_SCALE: gl.constexpr,
    BANDED: gl.constexpr,
    PARTS: gl.constexpr,
    ADD_EPS: gl.constexpr,
    AHEAD: gl.constexpr,
    LATE: gl.constexpr,
    IN_EIGHTS: gl.constexpr,
    STAGES: gl.constexpr,
    TALL: gl.constexpr,
    BROAD: gl.constexpr,
    OVERLAP: gl.constexpr,
    EARLY: gl.constexpr,
):
    """A grid of programs and matrices; T tiles a side, or rows of tiles.

    With PARTS, at least as many as ``parts``, ``scale`` is their squares, and 1/N and 1/N² are left in ``inverses``.
    """
    flags: gl.constexpr = lone_flags(
        SYMMETRIC,
        SAME,
        HAS_C,
        HAS_Q,
        HAS_SCALE,
        BANDED,
        PARTS,
        ADD_EPS,
        AHEAD,
        LATE,
        IN_EIGHTS,
        STAGES,
        TALL,
        BROAD,
        OVERLAP,
        EARLY,
    )
    # before the warps part: what each computes for itself, the compiler puts behind its wait for the launch before
    where = _place(T, b_desc.shape[0], flags)
    a_blocks = blocks_of(a_desc, flags.deep * TALL * STAGES)
    b_blocks = blocks_of(b_desc, flags.deep * BROAD * STAGES)
    ring = (a_blocks, b_blocks, room_for_barriers(STAGES), room_for_barriers(STAGES), barriers(1).index(0))
    descs = (a_desc, b_desc, c_desc, (d_desc, d), (q_desc, q))
    numbers = (alpha, beta, omega, (scale, inverses, a_desc.shape[0], parts, norm_scale, eps))
    if TALL == 1:
        gl.warp_specialize(
            [
                (_consume, (0, descs, ring, where, K, numbers, flags)),
                (_produce, (descs, ring, where, K, flags)),
            ],
            [1],
            [REGISTERS],
        )
    elif TALL == 2:
        gl.warp_specialize(
            [
                (_consume, (0, descs, ring, where, K, numbers, flags)),
                (_consume, (1, descs, ring, where, K, numbers, flags)),
                (_produce, (descs, ring, where, K, flags)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, descs, ring, where, K, numbers, flags)),
                (_consume, (1, descs, ring, where, K, numbers, flags)),
                (_consume, (2, descs, ring, where, K, numbers, flags)),
                (_produce, (descs, ring, where, K, flags)),
            ],
            [4, 4, 1],
            [_CONSUMER_REGISTERS_OF_THREE, _CONSUMER_REGISTERS_OF_THREE, PRODUCER_REGISTERS],
        )
