"""The three products of a first step in int8, on the schedule of `ping_pong_kernels`:

    GRAM          A = U X₈X₈ᵀ U with the diagonal that is given     fp16, the tiles of a triangle alone; and int8,
                                                                    with the squares of its rows, added by tiles
    POLYNOMIAL    S = bA + cV A₈A₈ᵀ V, likewise                     int8
    STEP          σ (aX + W S₈X₈' T)                                fp16

U, V, W and T are units of rows or columns (`_kernels.int8_rounding`). Both operands are given by rows, for the tensor
cores read 8 bits along K alone. Of A and S one triangle is computed, which is rounded by its own rows, and as its
mirror image by the rows of the other one.

A consumer's buffer [128, 128] in fp16 first receives C, then the result. Its columns lie in two panels of 64; each is
rounded from there both ways, into blocks [128, 64] and [64, 128] of 8 bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from optim_kernels._hopper.flags import int8_flags
from optim_kernels._hopper.ping_pong_kernels import allocate, place_of
from optim_kernels._hopper.ring import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    barrier,
    blocks_as,
    blocks_of,
    fill,
    load,
    store,
)
from optim_kernels._hopper.turns import BLOCK, add, begin, end
from optim_kernels._kernels.int8_rounding import A_SEED, MOST_BOUNDED, S_SEED, random_bits, reciprocal, rounded

GRAM, POLYNOMIAL, STEP = map(gl.constexpr, range(3))
# Columns of a panel.
HALF = gl.constexpr(64)


@gluon.jit
def _produce(a_desc, b_desc, ring, schedule, flags: gl.constexpr):
    total, T, columns, K = schedule
    step = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        place = place_of(tile, total, T, columns, flags.kind != STEP, flags.group)
        step = fill(a_desc, b_desc, ring, step, place, K, True, flags.depth, flags.stages)


@gluon.jit
def _of_rows(vector, rows, size):
    """The numbers of these rows, 0 behind the last."""
    return gl.load(vector + rows, mask=rows < size, other=0.0)


@gluon.jit
def _unit(largest):
    """The unit of a row whose diagonal number has the root 1."""
    return gl.sqrt(gl.load(largest)) / MOST_BOUNDED


@gluon.jit
def _round(
    block,
    piece,
    row,
    column,
    diagonal,
    roots,
    factor,
    size,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    KIND: gl.constexpr,
):
    """Round a piece of a tile into a block in shared memory, by units of its rows; return the sums of their squares."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    inverse = factor * reciprocal(_of_rows(roots, rows, size))
    value = piece.load(layout).to(gl.float32)
    if KIND == POLYNOMIAL:
        # not in the whole tile, for which there are too few registers
        exact = _of_rows(diagonal, rows, size)
        # by places in the tile: fewer registers
        value = gl.where((rows - column)[:, None] == (columns - column)[None, :], exact[:, None], value)
    bits = random_bits(rows[:, None], columns[None, :], A_SEED if KIND == GRAM else S_SEED)
    block.reshape([ROWS, COLUMNS]).store(rounded(value, inverse[:, None], bits, 3))
    return gl.sum(value * value, 1)


@gluon.jit
def _consume(
    ME: gl.constexpr,
    results,
    ring,
    buffers,
    blocks,
    c_ready,
    turn,
    schedule,
    vectors,
    numbers,
    flags: gl.constexpr,
):
    c_desc, d_desc, rounded_desc, mirror_desc = results
    left_units, right_units, diagonal, roots, left_largest, largest, partials, scale = vectors
    num_rows, num_columns, alpha, beta = numbers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    upright_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    total, T, columns, K = schedule
    buffer = buffers.index(ME)
    matrix = buffer.reshape([BLOCK, BLOCK])
    rows = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))[None, :]
    steps = gl.cdiv(K, flags.depth)
    step = ME * steps
    turns = 0
    if flags.kind == POLYNOMIAL:
        alpha *= _unit(left_largest) * _unit(left_largest)
    elif flags.kind == STEP:
        alpha *= _unit(left_largest)
    for tile in range(gl.program_id(0) + ME * gl.num_programs(0), total, 2 * gl.num_programs(0)):
        batch, row, column = place_of(tile, total, T, columns, flags.kind != STEP, flags.group)
        # the copy engine has read the buffer's last content
        tma.store_wait(0)
        barrier()
        if flags.kind != GRAM:
            mbarrier.expect(c_ready.index(ME), c_desc.block_type.nbytes)
            load(c_desc, [batch, row, column], c_ready.index(ME), buffer)
        # before the product, which hides how long this takes
        left = alpha * _of_rows(left_units, row + rows, num_rows)
        acc = begin(ME, turn, turns, True)
        acc, last = add(acc, ring, step, 0, K, 0, False, False, flags.depth, flags.stages)
        acc = end(ME, acc, ring[3], turn, last, flags.stages)
        # past its own steps, and those of the other consumer's next tile
        step += 2 * steps
        value = acc.to(gl.float32) * left * _of_rows(right_units, column + cols, num_columns)
        if flags.kind != GRAM:
            mbarrier.wait(c_ready.index(ME), turns & 1)
            value += beta * matrix.load(layout).to(gl.float32)
        if flags.kind == GRAM:
            value = gl.where(row + rows == column + cols, _of_rows(diagonal, row + rows, num_rows), value)
        if flags.has_scale:
            value *= gl.load(scale)
        turns += 1  # noqa: SIM113
        matrix.store(value.to(gl.float16))
        fence_async_shared()
        barrier()
        if flags.kind != POLYNOMIAL:
            store(d_desc, [batch, row, column], buffer)
        if flags.kind != STEP:
            by_rows, by_columns = blocks
            upright, lying = by_rows.index(ME), by_columns.index(ME)
            panels = blocks_as(buffer, 2, BLOCK, HALF)
            # the units of A and S are the roots of their diagonals times one number
            factor = reciprocal(_unit(largest))
            squares = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, upright_layout))
            # a loop: unrolled, its instructions take longer to arrive than to run
            for half in range(2):
                if flags.kind == POLYNOMIAL:
                    # once more, to keep a register free between the halves
                    factor = reciprocal(_unit(largest))
                panel = panels.index(half).reshape([BLOCK, HALF])
                first = column + half * HALF
                if half > 0:
                    # the copy engine has read the other half
                    tma.store_wait(0)
                    barrier()
                squares += _round(
                    upright, panel, row, first, diagonal, roots, factor, num_rows, BLOCK, HALF, flags.kind
                )
                if row != column:
                    mirror = panel.permute((1, 0))
                    sums = _round(lying, mirror, first, row, diagonal, roots, factor, num_rows, HALF, BLOCK, flags.kind)
                    if flags.kind == GRAM:
                        at = first + gl.arange(0, HALF, gl.SliceLayout(1, layout))
                        gl.store(partials + (row // BLOCK) * num_rows + at, sums, mask=at < num_rows)
                fence_async_shared()
                barrier()
                store(rounded_desc, [batch, row, first], upright)
                if row != column:
                    store(mirror_desc, [batch, first, row], lying)
            if flags.kind == GRAM:
                at = row + gl.arange(0, BLOCK, gl.SliceLayout(1, upright_layout))
                gl.store(partials + (column // BLOCK) * num_rows + at, squares, mask=at < num_rows)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["total", "T", "columns", "K"])
def int8_product_kernel(
    a_desc,
    b_desc,
    c_desc,
    d_desc,
    rounded_desc,
    mirror_desc,
    left_units,
    right_units,
    diagonal,
    roots,
    left_largest,
    largest,
    partials,
    scale,
    total,
    T,
    columns,
    K,
    num_rows,
    num_columns,
    alpha,
    beta,
    KIND: gl.constexpr,
    HAS_SCALE: gl.constexpr,
    GROUP: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    ring, buffers, c_ready, turn = allocate(a_desc, b_desc, d_desc, STAGES)
    if KIND == STEP:
        blocks = (ring[0], ring[0])
    else:
        blocks = (blocks_of(rounded_desc, 2), blocks_of(mirror_desc, 2))
    schedule = (total, T, columns, K)
    results = (c_desc, d_desc, rounded_desc, mirror_desc)
    vectors = (left_units, right_units, diagonal, roots, left_largest, largest, partials, scale)
    numbers = (num_rows, num_columns, alpha, beta)
    flags: gl.constexpr = int8_flags(KIND, HAS_SCALE, GROUP, DEPTH, STAGES)
    gl.warp_specialize(
        [
            (_consume, (0, results, ring, buffers, blocks, c_ready, turn, schedule, vectors, numbers, flags)),
            (_consume, (1, results, ring, buffers, blocks, c_ready, turn, schedule, vectors, numbers, flags)),
            (_produce, (a_desc, b_desc, ring, schedule, flags)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
