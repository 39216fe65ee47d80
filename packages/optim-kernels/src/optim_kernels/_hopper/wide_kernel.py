"""Products of Newton–Schulz for Hopper in Gluon, in tiles of 128×256: for large matrices, limited by power.

    D = s (α A Aᵀ + β C)     SYMMETRIC: the tiles of one triangle of 256×256 blocks are computed, and mirrored
    D = s (α A B + β C)      otherwise; APART: with a β for each row, in fp32 [batch, M]

One program a multiprocessor walks over tiles p, p + P, p + 2P, … (P programs). Both of its consumers multiply the same
slots of the ring, each its own 64 rows of A with all 256 columns of B. Compared with two tiles of 128×128
(`ping_pong_kernels`) a quarter fewer bytes come from L2, and a sixth fewer are read from shared memory. The other
consumer's products do not hide the end of a tile, so most of it happens during the next tile, at two points along K:

    after the first steps     D has left shared memory: its mirror image, which was kept in registers, takes its place
    after as many more        the mirror image has left too: C is requested

A block on the diagonal is computed whole, and is symmetric to the last bit because the tensor cores add in one order.
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

from optim_kernels._hopper.flags import wide_flags
from optim_kernels._hopper.ring import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    allocate_ring,
    as_blocks,
    barrier,
    barriers,
    blocks_of,
    fill,
    load,
    store,
)
from optim_kernels._kernels.product import rectangle_tile, triangle_tile, with_c

ROWS = gl.constexpr(128)
COLUMNS = gl.constexpr(256)
# Rows of a consumer.
HALF = gl.constexpr(64)
# Steps along K between the points at which shared memory changes hands.
PAUSE = gl.constexpr(4)


@gluon.jit
def _place(tile, tiles, T, columns, SYMMETRIC: gl.constexpr, GROUP: gl.constexpr):
    """(batch, first row, first column) of a tile."""
    inside = tile % tiles
    if SYMMETRIC:
        i, j = triangle_tile(inside // 2, T, GROUP)
        i = 2 * i + inside % 2
    else:
        i, j = rectangle_tile(inside, T, columns, GROUP)
    return tile // tiles, i * ROWS, j * COLUMNS


@gluon.jit
def _produce(a_desc, b_desc, ring, schedule, flags: gl.constexpr):
    total, tiles, T, columns, K = schedule
    step = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        place = _place(tile, tiles, T, columns, flags.symmetric, flags.group)
        step = fill(a_desc, b_desc, ring, step, place, K, flags.symmetric, flags.depth, flags.stages)


@gluon.jit
def _multiply(ME: gl.constexpr, ring, acc, step, first, end, flags: gl.constexpr):
    """Add the products from ``first`` to ``end`` along K; the last one may still be under way."""
    a_ring, b_ring, ready, empty = ring
    for k in range(first, end, flags.depth):
        slot = step % flags.stages
        mbarrier.wait(ready.index(slot), (step // flags.stages) & 1)
        a = a_ring.index(slot).reshape([ROWS, flags.depth]).slice(ME * HALF, HALF)
        if flags.symmetric:
            b = b_ring.index(slot).reshape([COLUMNS, flags.depth]).permute((1, 0))
        else:
            b = b_ring.index(slot).reshape([flags.depth, COLUMNS])
        acc = warpgroup_mma(a, b, acc, is_async=True)
        # all but this step's product are done
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((step + flags.stages - 1) % flags.stages), pred=k > 0)
        step += 1
    return acc, step


@gluon.jit
def _store_mirrored(mirror_desc, place, d, buffer):
    """Store the transpose of ``d``, once the buffer's last content has been read."""
    tma.store_wait(0)
    barrier()
    mirror = as_blocks(buffer, mirror_desc, 0)
    mirror.reshape([COLUMNS, HALF]).permute((1, 0)).store(d)
    fence_async_shared()
    barrier()
    batch, row, column = place
    store(mirror_desc, [batch, column, row], mirror)


@gluon.jit
def _consume(ME: gl.constexpr, results, ring, buffers, c_ready, schedule, numbers, flags: gl.constexpr):
    c_desc, d_desc, mirror_desc = results
    alpha, beta, scale, betas = numbers
    empty = ring[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    total, tiles, T, columns, K = schedule
    buffer = buffers.index(ME)
    matrix = buffer.reshape([HALF, COLUMNS])
    step = 0
    turns = 0
    # the tile before, and whether it has a mirror image elsewhere
    d = gl.zeros([HALF, COLUMNS], d_desc.dtype, layout)
    last_batch = 0
    last_row = 0
    last_column = 0
    is_mirrored = False
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        batch, row, column = _place(tile, tiles, T, columns, flags.symmetric, flags.group)
        acc = gl.zeros([HALF, COLUMNS], gl.float32, layout)
        if flags.symmetric:
            acc, step = _multiply(ME, ring, acc, step, 0, PAUSE * flags.depth, flags)
            if is_mirrored:
                _store_mirrored(mirror_desc, (last_batch, last_row, last_column), d, buffer)
            acc, step = _multiply(ME, ring, acc, step, PAUSE * flags.depth, 2 * PAUSE * flags.depth, flags)
        else:
            acc, step = _multiply(ME, ring, acc, step, 0, 2 * PAUSE * flags.depth, flags)
        # the copy engine has read the buffer's last content
        tma.store_wait(0)
        barrier()
        if flags.has_c:
            mbarrier.expect(c_ready.index(ME), c_desc.block_type.nbytes)
            load(c_desc, [batch, row + ME * HALF, column], c_ready.index(ME), buffer)
        of_c = beta
        if flags.apart:
            at = row + ME * HALF + gl.arange(0, HALF, gl.SliceLayout(1, layout))
            side = d_desc.shape[1]
            of_c = gl.load(betas + batch.to(gl.int64) * side + at, mask=at < side, other=0.0)[:, None]
        acc, step = _multiply(ME, ring, acc, step, 2 * PAUSE * flags.depth, K, flags)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + flags.stages - 1) % flags.stages))
        acc = acc * alpha
        if flags.has_c:
            mbarrier.wait(c_ready.index(ME), turns & 1)
            acc = with_c(acc, of_c, matrix.load(layout).to(gl.float32))
        if flags.has_scale:
            acc *= gl.load(scale + batch)
        turns += 1  # noqa: SIM113
        d = acc.to(d_desc.dtype)
        matrix.store(d)
        fence_async_shared()
        barrier()
        store(d_desc, [batch, row + ME * HALF, column], buffer)
        last_batch = batch
        last_row = row + ME * HALF
        last_column = column
        is_mirrored = row >= column + COLUMNS
    if flags.symmetric:  # noqa: SIM102
        if is_mirrored:
            _store_mirrored(mirror_desc, (last_batch, last_row, last_column), d, buffer)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["total", "tiles", "T", "columns", "K"])
def wide_product_kernel(
    a_desc,
    b_desc,
    c_desc,
    d_desc,
    mirror_desc,
    scale,
    betas,
    total,
    tiles,
    T,
    columns,
    K,
    alpha,
    beta,
    SYMMETRIC: gl.constexpr,
    HAS_C: gl.constexpr,
    HAS_SCALE: gl.constexpr,
    APART: gl.constexpr,
    GROUP: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """All tiles of a batch; K is longer than twice PAUSE steps. SYMMETRIC: T blocks a side, else T rows of tiles."""
    ring = allocate_ring(a_desc, b_desc, STAGES, 2)
    buffers = blocks_of(d_desc, 2)
    c_ready = barriers(2)
    fence_async_shared()
    results = (c_desc, d_desc, mirror_desc)
    schedule = (total, tiles, T, columns, K)
    numbers = (alpha, beta, scale, betas)
    flags: gl.constexpr = wide_flags(SYMMETRIC, HAS_C, HAS_SCALE, APART, GROUP, DEPTH, STAGES)
    gl.warp_specialize(
        [
            (_consume, (0, results, ring, buffers, c_ready, schedule, numbers, flags)),
            (_consume, (1, results, ring, buffers, c_ready, schedule, numbers, flags)),
            (_produce, (a_desc, b_desc, ring, schedule, flags)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
