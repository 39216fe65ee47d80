"""Products of operands in e4m3 for Hopper in Gluon: twice as many a second as of 16 bits.

    D = α A Bᵀ + s β C     SYMMETRIC, B is A: one triangle of tiles is computed, and mirrored

The tensor cores take operands of 8 bits along K alone, so the second one is given as B [N, K]. D and C are fp16, or
both e4m3. The tensor cores keep 14 bits of a sum of such products: what is lost points all to one side, and grows with
K. So they sum no more than CHUNK of them, and fp32 sums the chunks. Errors of Newton–Schulz (`e4m3_steps`) on rank 8
and on singular values 1/i², of 4096 rows, by length of a chunk (1.3 times the errors in fp16 are allowed):

    128   4.5e-2   2.2e-2        512   5.1e-2   3.0e-2        no chunks   2.8e-1   1.7e-1        fp16   4.4e-2   2.1e-2

One program a multiprocessor walks over tiles p, p + P, p + 2P, … (P programs). Both consumers multiply the same slots
of the ring, each its own 64 rows of A with all 128 rows of B; while one adds up a chunk the other has the tensor cores.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from optim_kernels._hopper.ring import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    allocate_ring,
    barrier,
    barriers,
    blocks_of,
    descriptor,
    fill,
    load,
    store,
)
from optim_kernels._kernels.product import rectangle_tile, triangle_tile
from optim_kernels._newton_schulz.tiles import cdiv
from optim_kernels._triton import FUSED

BLOCK = gl.constexpr(128)
# Rows of a consumer.
HALF = gl.constexpr(64)
# Numbers of a row in a slot of the ring: 128 bytes.
DEPTH = gl.constexpr(128)
STAGES = gl.constexpr(5)
# Products that the tensor cores sum.
CHUNK = gl.constexpr(128)
# Rows of tiles that share a column's operand in L2.
PANEL = gl.constexpr(8)


@gluon.jit
def _place(tile, schedule, SYMMETRIC: gl.constexpr):
    """(batch, first row, first column) of a tile."""
    _, tiles, rows, columns, _ = schedule
    if SYMMETRIC:
        i, j = triangle_tile(tile % tiles, rows, PANEL)
    else:
        i, j = rectangle_tile(tile % tiles, rows, columns, PANEL)
    return tile // tiles, i * BLOCK, j * BLOCK


@gluon.jit
def _produce(a_desc, b_desc, ring, schedule, SYMMETRIC: gl.constexpr):
    total, _, _, _, K = schedule
    step = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        # B lies as it would for A Bᵀ
        step = fill(a_desc, b_desc, ring, step, _place(tile, schedule, SYMMETRIC), K, True, DEPTH, STAGES)


@gluon.jit
def _add_chunk(ME: gl.constexpr, ring, sums, step, first, end, layout: gl.constexpr):
    """Add the products from ``first`` to ``end`` along K; return the sums and the ring's next step."""
    a_ring, b_ring, ready, empty = ring
    chunk = gl.zeros([HALF, BLOCK], gl.float32, layout)
    for k in range(first, end, DEPTH):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
        a = a_ring.index(slot).reshape([BLOCK, DEPTH]).slice(ME * HALF, HALF)
        b = b_ring.index(slot).reshape([BLOCK, DEPTH]).permute((1, 0))
        chunk = warpgroup_mma(a, b, chunk, is_async=True)
        # all but this step's product are done
        chunk = warpgroup_mma_wait(1, deps=(chunk,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > first)
        step += 1
    chunk = warpgroup_mma_wait(0, deps=(chunk,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return sums + chunk, step


@gluon.jit
def _consume(
    ME: gl.constexpr,
    results,
    ring,
    buffers,
    c_ready,
    schedule,
    numbers,
    SYMMETRIC: gl.constexpr,
    HAS_C: gl.constexpr,
    HAS_SCALE: gl.constexpr,
):
    c_desc, d_desc, mirror_desc = results
    alpha, beta, scale = numbers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    total, _, _, _, K = schedule
    block, mirror = buffers
    buffer = block.index(ME)
    matrix = buffer.reshape([HALF, BLOCK])
    step = 0
    turns = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        batch, row, column = _place(tile, schedule, SYMMETRIC)
        row += ME * HALF
        sums, step = _add_chunk(
            ME, ring, gl.zeros([HALF, BLOCK], gl.float32, layout), step, 0, gl.minimum(CHUNK, K), layout
        )
        # the copy engine has read what the last tile left in the buffers
        tma.store_wait(0)
        barrier()
        if HAS_C:
            mbarrier.expect(c_ready.index(ME), c_desc.block_type.nbytes)
            load(c_desc, [batch, row, column], c_ready.index(ME), buffer)
        for first in range(CHUNK, K, CHUNK):
            sums, step = _add_chunk(ME, ring, sums, step, first, gl.minimum(first + CHUNK, K), layout)
        sums = sums * alpha
        if HAS_C:
            s = gl.load(scale + batch) if HAS_SCALE else 1.0
            mbarrier.wait(c_ready.index(ME), turns & 1)
            sums += s * beta * matrix.load(layout).to(gl.float32)
        turns += 1  # noqa: SIM113
        d = sums.to(d_desc.dtype)
        matrix.store(d)
        if SYMMETRIC:
            mirror.index(ME).reshape([BLOCK, HALF]).permute((1, 0)).store(d)
        fence_async_shared()
        barrier()
        store(d_desc, [batch, row, column], buffer)
        if SYMMETRIC:
            # a tile on the diagonal is symmetric, as the tensor cores add in one order
            store(mirror_desc, [batch, column, row], mirror.index(ME))
    tma.store_wait(0)


@gluon.jit
def e4m3_product_kernel(
    a_desc,
    b_desc,
    c_desc,
    d_desc,
    mirror_desc,
    scale,
    total,
    tiles,
    rows,
    columns,
    K,
    alpha,
    beta,
    SYMMETRIC: gl.constexpr,
    HAS_C: gl.constexpr,
    HAS_SCALE: gl.constexpr,
):
    ring = allocate_ring(a_desc, b_desc, STAGES, 2)
    block = blocks_of(d_desc, 2)
    mirror = blocks_of(mirror_desc, 2) if SYMMETRIC else block
    c_ready = barriers(2)
    fence_async_shared()
    schedule = (total, tiles, rows, columns, K)
    results = (c_desc, d_desc, mirror_desc)
    buffers = (block, mirror)
    numbers = (alpha, beta, scale)
    gl.warp_specialize(
        [
            (_consume, (0, results, ring, buffers, c_ready, schedule, numbers, SYMMETRIC, HAS_C, HAS_SCALE)),
            (_consume, (1, results, ring, buffers, c_ready, schedule, numbers, SYMMETRIC, HAS_C, HAS_SCALE)),
            (_produce, (a_desc, b_desc, ring, schedule, SYMMETRIC)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def e4m3_product(
    a: Tensor,
    b: Tensor | None,
    out: Tensor,
    *,
    alpha: float,
    c: Tensor | None = None,
    beta: float = 0.0,
    scale: Tensor | None = None,
    programs: int,
) -> None:
    """Compute ``alpha a bᵀ + scale beta c`` for ``a [batch, M, K]`` and ``b [batch, N, K]`` in e4m3.

    ``b`` ``None`` is ``a``, and ``c`` symmetric. ``programs``: how many at most.
    """
    (batch, m, n), side = out.shape, BLOCK.value
    rows, columns = cdiv(m, side), cdiv(n, side)
    tiles = rows * (rows + 1) // 2 if b is None else rows * columns
    e4m3_product_kernel[(min(batch * tiles, programs),)](
        descriptor(a, side, DEPTH.value),
        descriptor(a if b is None else b, side, DEPTH.value),
        descriptor(out if c is None else c, HALF.value, side),
        descriptor(out, HALF.value, side),
        descriptor(out, side, HALF.value),
        out if scale is None else scale,
        batch * tiles,
        tiles,
        rows,
        columns,
        a.shape[-1],
        alpha,
        beta,
        SYMMETRIC=b is None,
        HAS_C=c is not None,
        HAS_SCALE=scale is not None,
        num_warps=4,
        **FUSED,
    )
