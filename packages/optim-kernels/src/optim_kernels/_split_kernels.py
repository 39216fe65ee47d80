"""Products of Newton–Schulz for Hopper in Gluon where tiles do not come in full rounds: the sums over K are split.

    D = s (α A Bᵀ + β C),  Q = D + ω I     SYMMETRIC: one triangle of tiles is computed, and mirrored
    D = s (α A B + β C)                    otherwise

136 tiles on 132 multiprocessors take two rounds, the second almost empty. Here all steps along K of all tiles form one
line, tile by tile, and of P programs the r-th takes the steps [rS/P, (r+1)S/P): all end together. A program's part of
the line is the rest of one tile, some whole tiles and the beginning of another. Who has a tile's first step owns it:
the others write their fp32 sums to their place in `partials` and raise their flag, the owner adds them to its own in the
line's order, so that the result is the same in every run, and lowers the flags for the next launch.

The rest of a tile comes first in a program's part, so an owner rarely waits. It waits for programs of larger r, which
are started earlier (r counts down): one that waits never keeps out one that is waited for.

A producer warp copies A [128, 64] and B into a ring in shared memory; two consumers of four warps share each tile,
64 rows each, and store their results by blocks of 64 × 64: those below the diagonal twice, those above not at all.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from optim_kernels._hopper_kernels import BLOCK, CONSUMER_REGISTERS, PRODUCER_REGISTERS, _place, barrier, load, store

# Rows of a consumer, and the side of the blocks in which it stores.
HALF = gl.constexpr(64)


@gluon.jit
def _part(steps, total):
    """This program's number along the line, how many there are, and its first and last step."""
    programs = gl.num_programs(0)
    r = programs - 1 - gl.program_id(0)
    return r, programs, r * (total * steps) // programs, (r + 1) * (total * steps) // programs


@gluon.jit
def _produce(a_desc, b_desc, ring, schedule, flags: gl.constexpr):
    SYMMETRIC: gl.constexpr = flags[0]
    GROUP: gl.constexpr = flags[5]
    DEPTH: gl.constexpr = flags[6]
    STAGES: gl.constexpr = flags[7]
    a_ring, b_ring, ready, empty = ring
    total, tiles, T, columns, K = schedule
    steps = gl.cdiv(K, DEPTH)
    _, _, position, end = _part(steps, total)
    step = 0
    while position < end:
        tile = position // steps
        first = position - tile * steps
        last = gl.minimum(steps, first + end - position)
        batch, row, column = _place(tile, tiles, T, columns, SYMMETRIC, GROUP)
        for k in range(first * DEPTH, last * DEPTH, DEPTH):
            slot = step % STAGES
            full = ready.index(slot)
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            load(a_desc, [batch, row, k], full, a_ring.index(slot))
            if SYMMETRIC:
                load(b_desc, [batch, column, k], full, b_ring.index(slot))
            else:
                load(b_desc, [batch, k, column], full, b_ring.index(slot))
            step += 1
        position += last - first


@gluon.jit
def _halves(x):
    """The left and the right half of x [64, 128], which lie in the same threads."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left, right = x.reshape([HALF, 2, HALF]).permute(0, 2, 1).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def _consume(
    ME: gl.constexpr,
    results,
    ring,
    buffers,
    c_ready,
    exchange,
    schedule,
    numbers,
    flags: gl.constexpr,
):
    SYMMETRIC: gl.constexpr = flags[0]
    SAME: gl.constexpr = flags[1]
    HAS_C: gl.constexpr = flags[2]
    HAS_Q: gl.constexpr = flags[3]
    HAS_SCALE: gl.constexpr = flags[4]
    GROUP: gl.constexpr = flags[5]
    DEPTH: gl.constexpr = flags[6]
    STAGES: gl.constexpr = flags[7]
    c_desc, d_desc, q_desc = results
    alpha, beta, omega, scale = numbers
    partials, raised = exchange
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    block: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    dtype: gl.constexpr = d_desc.dtype
    a_ring, b_ring, ready, empty = ring
    total, tiles, T, columns, K = schedule
    rows = gl.arange(0, HALF, gl.SliceLayout(1, block))[:, None]
    cols = gl.arange(0, HALF, gl.SliceLayout(0, block))[None, :]
    places = gl.arange(0, HALF, gl.SliceLayout(1, layout))[:, None] * BLOCK
    places += gl.arange(0, BLOCK, gl.SliceLayout(0, layout))[None, :]
    steps = gl.cdiv(K, DEPTH)
    r, programs, position, end = _part(steps, total)
    step = 0
    owned = 0
    while position < end:
        tile = position // steps
        first = position - tile * steps
        last = gl.minimum(steps, first + end - position)
        batch, row, column = _place(tile, tiles, T, columns, SYMMETRIC, GROUP)
        row += ME * HALF
        if HAS_C:
            if first == 0:
                # the copy engine has read the last tile's results
                tma.store_wait(0)
                barrier()
                mbarrier.expect(c_ready.index(ME), 2 * c_desc.block_type.nbytes)
                for n in gl.static_range(2):
                    load(c_desc, [batch, row, column + HALF * n], c_ready.index(ME), buffers.index(4 * ME + n))
        acc = gl.zeros([HALF, BLOCK], gl.float32, layout)
        for k in range(first, last):
            slot = step % STAGES
            mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
            a = a_ring.index(slot).reshape([BLOCK, DEPTH]).slice(ME * HALF, HALF)
            if SYMMETRIC:
                b = b_ring.index(slot).reshape([BLOCK, DEPTH]).permute((1, 0))
            else:
                b = b_ring.index(slot).reshape([DEPTH, BLOCK])
            acc = warpgroup_mma(a, b, acc, is_async=True)
            # all but this step's product are done
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > first)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        position += last - first
        if first > 0:
            gl.store(partials + (2 * r + ME) * (HALF * BLOCK) + places, acc)
            barrier()
            gl.atomic_xchg(raised + 2 * r + ME, 1, sem="release")
        else:
            other = r + 1
            while last < steps:
                while gl.atomic_cas(raised + 2 * other + ME, 1, 0, sem="acquire") == 0:
                    pass
                acc += gl.load(partials + (2 * other + ME) * (HALF * BLOCK) + places, cache_modifier=".cg")
                last += (other + 1) * (total * steps) // programs - other * (total * steps) // programs
                other += 1
            if HAS_C:
                mbarrier.wait(c_ready.index(ME), owned & 1)
            else:
                tma.store_wait(0)
                barrier()
            owned += 1
            parts = _halves(acc * alpha)
            for n in gl.static_range(2):
                col = column + HALF * n
                direct = buffers.index(4 * ME + n).reshape([HALF, HALF])
                mirror = buffers.index(4 * ME + 2 + n).reshape([HALF, HALF])
                part = parts[n]
                if HAS_C:
                    part += beta * direct.load(block).to(gl.float32)
                if HAS_SCALE:
                    part *= gl.load(scale + batch)
                d = part.to(dtype)
                direct.store(d)
                if SYMMETRIC and not SAME:  # noqa: SIM102
                    if col == row:
                        barrier()
                        mirrored = direct.permute((1, 0)).load(block)
                        barrier()
                        d = gl.where(rows >= cols, d, mirrored)
                        direct.store(d)
                if SYMMETRIC:
                    if HAS_Q:
                        if col == row:
                            wide = d.to(gl.float32)
                            mirror.store(gl.where(rows == cols, wide + omega, wide).to(dtype))
                        else:
                            mirror.permute((1, 0)).store(d)
                    else:
                        mirror.permute((1, 0)).store(d)
            fence_async_shared()
            barrier()
            for n in gl.static_range(2):
                col = column + HALF * n
                direct = buffers.index(4 * ME + n)
                mirror = buffers.index(4 * ME + 2 + n)
                if SYMMETRIC:
                    if col <= row:
                        store(d_desc, [batch, row, col], direct)
                    if col < row:
                        store(d_desc, [batch, col, row], mirror)
                    if HAS_Q:
                        if col < row:
                            store(q_desc, [batch, row, col], direct)
                        if col <= row:
                            store(q_desc, [batch, col, row], mirror)
                else:
                    store(d_desc, [batch, row, col], direct)
    tma.store_wait(0)


@gluon.jit
def split_kernel(
    a_desc,
    b_desc,
    c_desc,
    d_desc,
    q_desc,
    scale,
    partials,
    raised,
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
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    buffers = gl.allocate_shared_memory(d_desc.dtype, [8] + d_desc.block_type.shape, d_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    c_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    for consumer in gl.static_range(2):
        mbarrier.init(c_ready.index(consumer), count=1)
    fence_async_shared()
    ring = (a_ring, b_ring, ready, empty)
    schedule = (total, tiles, T, columns, K)
    results = (c_desc, d_desc, q_desc)
    exchange = (partials, raised)
    numbers = (alpha, beta, omega, scale)
    flags: gl.constexpr = (SYMMETRIC, SAME, HAS_C, HAS_Q, HAS_SCALE, GROUP, DEPTH, STAGES)
    gl.warp_specialize(
        [
            (_consume, (0, results, ring, buffers, c_ready, exchange, schedule, numbers, flags)),
            (_consume, (1, results, ring, buffers, c_ready, exchange, schedule, numbers, flags)),
            (_produce, (a_desc, b_desc, ring, schedule, flags)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
