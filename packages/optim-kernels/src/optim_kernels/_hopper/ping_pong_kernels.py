"""Products of Newton–Schulz for Hopper in Gluon: the two of `_kernels.product`, on a persistent ping-pong schedule.

    D = s (α A Bᵀ + β C),  Q = D + ω I     SYMMETRIC: one triangle of tiles is computed, and mirrored
    D = s (α A B + β C)                    otherwise

One program a multiprocessor walks over tiles p, p + P, p + 2P, … (P programs). Its warps have three roles:

    producer    one warp: copies A [128, 64] and B for each step of each tile, in order, into a ring in shared memory
    consumer 0  four warps: the 1st, 3rd, 5th … tile of the program
    consumer 1  four warps: the 2nd, 4th, 6th … tile

A consumer multiplies through its whole tile at the full rate of the tensor cores, hands the turn to the other, and
while that one multiplies, it rounds, stores and mirrors its own result: at K = 1280 that end of a tile costs a quarter
of its time where nothing hides it.

A barrier of the ring (`ring`) knows only the parity of a slot's round, so a consumer may look at the ring only when the
other one has taken all its steps: that is what `turn` says.

The tile's own buffer [128, 128] first receives C (copied while the other consumer multiplies), then D, then D's mirror
image. Exact symmetry is needed and kept as in `_kernels.symmetric`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from optim_kernels._hopper.flags import product_flags
from optim_kernels._hopper.ring import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    allocate_ring,
    barrier,
    barriers,
    blocks_of,
    fill,
    load,
    store,
)
from optim_kernels._hopper.turns import BLOCK, add, begin, end
from optim_kernels._kernels.product import rectangle_tile, triangle_tile, with_c


@gluon.jit
def place_of(tile, tiles, T, columns, SYMMETRIC: gl.constexpr, GROUP: gl.constexpr):
    """(batch, first row, first column) of a tile."""
    batch = tile // tiles
    if SYMMETRIC:
        i, j = triangle_tile(tile % tiles, T, GROUP)
    else:
        i, j = rectangle_tile(tile % tiles, T, columns, GROUP)
    return batch, i * BLOCK, j * BLOCK


@gluon.jit
def produce(a_desc, b_desc, ring, schedule, flags: gl.constexpr):
    total, tiles, T, columns, K = schedule
    step = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        place = place_of(tile, tiles, T, columns, flags.symmetric, flags.group)
        step = fill(a_desc, b_desc, ring, step, place, K, flags.symmetric, flags.depth, flags.stages)


@gluon.jit
def multiply(
    ME: gl.constexpr,
    ring,
    turn,
    step,
    turns,
    K,
    SYMMETRIC: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The sum of products of a consumer's tile, at its turn number ``turns``, from the ring's step ``step`` on."""
    acc = begin(ME, turn, turns)
    acc, step = add(acc, ring, step, 0, K, 0, False, not SYMMETRIC, DEPTH, STAGES)
    return end(ME, acc, ring[3], turn, step, STAGES)


@gluon.jit
def _consume(
    ME: gl.constexpr,
    results,
    ring,
    buffers,
    c_ready,
    turn,
    schedule,
    numbers,
    flags: gl.constexpr,
):
    c_desc, d_desc, q_desc = results
    alpha, beta, omega, scale = numbers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    dtype: gl.constexpr = d_desc.dtype
    total, tiles, T, columns, K = schedule
    buffer = buffers.index(ME)
    matrix = buffer.reshape([BLOCK, BLOCK])
    rows = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))[None, :]
    steps = gl.cdiv(K, flags.depth)
    step = ME * steps
    turns = 0
    for tile in range(gl.program_id(0) + ME * gl.num_programs(0), total, 2 * gl.num_programs(0)):
        batch, row, column = place_of(tile, tiles, T, columns, flags.symmetric, flags.group)
        # the copy engine has read the buffer's last content
        tma.store_wait(0)
        barrier()
        if flags.has_c:
            mbarrier.expect(c_ready.index(ME), c_desc.block_type.nbytes)
            load(c_desc, [batch, row, column], c_ready.index(ME), buffer)
        acc = multiply(ME, ring, turn, step, turns, K, flags.symmetric, flags.depth, flags.stages)
        # past its own steps, and those of the other consumer's next tile
        step += 2 * steps
        acc = acc * alpha
        if flags.has_c:
            mbarrier.wait(c_ready.index(ME), turns & 1)
            acc = with_c(acc, beta, matrix.load(layout).to(gl.float32))
        if flags.has_scale:
            acc *= gl.load(scale + batch)
        turns += 1  # noqa: SIM113
        d = acc.to(dtype)
        matrix.store(d)
        # constants and values are in separate conditions, so that what a constant excludes is not compiled
        if flags.symmetric and not flags.same:  # noqa: SIM102
            if row == column:
                barrier()
                mirrored = matrix.permute((1, 0)).load(layout)
                barrier()
                d = gl.where(rows >= cols, d, mirrored)
                matrix.store(d)
        fence_async_shared()
        barrier()
        store(d_desc, [batch, row, column], buffer)
        if flags.symmetric:
            if flags.has_q:  # noqa: SIM102
                if row != column:
                    store(q_desc, [batch, row, column], buffer)
            tma.store_wait(0)
            barrier()
            if row != column:
                matrix.permute((1, 0)).store(d)
                fence_async_shared()
                barrier()
                store(d_desc, [batch, column, row], buffer)
                if flags.has_q:
                    store(q_desc, [batch, column, row], buffer)
            elif flags.has_q:
                wide = d.to(gl.float32)
                matrix.store(gl.where(rows == cols, wide + omega, wide).to(dtype))
                fence_async_shared()
                barrier()
                store(q_desc, [batch, row, column], buffer)
    tma.store_wait(0)


@gluon.jit
def allocate(a_desc, b_desc, d_desc, STAGES: gl.constexpr):
    """The ring, both consumers' buffers, and the barriers of C's arrival and of the turn."""
    ring = allocate_ring(a_desc, b_desc, STAGES, 1)
    buffers = blocks_of(d_desc, 2)
    c_ready, turn = barriers(2), barriers(2)
    fence_async_shared()
    return ring, buffers, c_ready, turn


@gluon.jit(do_not_specialize=["total", "tiles", "T", "columns", "K"])
def product_kernel(
    a_desc,
    b_desc,
    c_desc,
    d_desc,
    q_desc,
    scale,
    total,
    tiles,
    T,
    columns,
    K,
    alpha,
    beta,
    omega,
    SYMMETRIC: gl.constexpr,
    SAME: gl.constexpr,
    HAS_C: gl.constexpr,
    HAS_Q: gl.constexpr,
    HAS_SCALE: gl.constexpr,
    GROUP: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    ring, buffers, c_ready, turn = allocate(a_desc, b_desc, d_desc, STAGES)
    schedule = (total, tiles, T, columns, K)
    results = (c_desc, d_desc, q_desc)
    numbers = (alpha, beta, omega, scale)
    flags: gl.constexpr = product_flags(SYMMETRIC, SAME, HAS_C, HAS_Q, HAS_SCALE, GROUP, DEPTH, STAGES)
    gl.warp_specialize(
        [
            (_consume, (0, results, ring, buffers, c_ready, turn, schedule, numbers, flags)),
            (_consume, (1, results, ring, buffers, c_ready, turn, schedule, numbers, flags)),
            (produce, (a_desc, b_desc, ring, schedule, flags)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
