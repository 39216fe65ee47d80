"""What a consumer of `chain_kernel` does with a tile: multiply, finish, and the ending of the last product.

    D = s (α A Bᵀ + β C),  Q = D + ω I     A Aᵀ, and symmetric matrices that commute: tiles on and below the diagonal;
                                           or all tiles. Q may also be the rounding error of D, and D's diagonal
                                           stored apart from it
    D = s (α A B + β C)                    rectangular; the last product is O: parameters are updated with it, or sums
                                           of O² stored for an update that needs all of O first

Results go into the consumer's buffer, from which its porter stores them while the consumer goes on: the consumer waits
for the porter only before it fills the buffer again.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from optim_kernels._hopper.chain_products import multiply_squares, multiply_x
from optim_kernels._hopper.ring import barrier
from optim_kernels._hopper.turns import BLOCK
from optim_kernels._hopper.update_kernel import update_tile
from optim_kernels._kernels.muon_table import FIRST_PART, INNER, NUM_FIELDS, OUTER, ROWS_ARE_INNER
from optim_kernels._kernels.product import scaled, with_c
from optim_kernels._newton_schulz import chain_jobs as chain

# Rows of a tile that are mirrored or shifted at a time, for the registers.
HALF = gl.constexpr(BLOCK // 2)
GRAM, SQUARE, RECTANGLE, FULL = (gl.constexpr(kind.value) for kind in chain.Kind)
NO_SCALE, SCALE = gl.constexpr(chain.Scale.NONE.value), gl.constexpr(chain.Scale.SCALE.value)
STORE, UPDATE, SQUARES = (gl.constexpr(ending.value) for ending in chain.Ending)
C, D, Q, WHICH_SCALE, ALPHA, BETA, OMEGA, IS_LAST = (gl.constexpr(field) for field in range(8))
IS_LOW, IS_APART = gl.constexpr(13), gl.constexpr(14)
# Places in ``addresses``, the list of what only the last product needs.
TABLE, HYPER, CONTROL, LR_SCALES, PARTS = (gl.constexpr(place) for place in range(5))
# Lines whose squares are added at a time.
_LINES = gl.constexpr(32)


@gluon.jit
def of_job(job, field: gl.constexpr):
    """A number of the job."""
    return gl.load(job + field)


@gluon.jit
def place_in_job(job, field: gl.constexpr):
    """The number of a buffer; −1 for none."""
    return gl.load(job + field).to(gl.int32)


@gluon.jit
def await_c(job, c_ready, loads):
    """Wait for C if there is one; return how often that was."""
    if place_in_job(job, C) >= 0:
        mbarrier.wait(c_ready, loads & 1)
        loads += 1
    return loads


@gluon.jit
def await_free(mine, fills):
    """Wait until the porter has read the buffer's last content."""
    _buffer, _c_ready, _filled, free = mine
    mbarrier.wait(free, (fills & 1) ^ 1)


@gluon.jit
def hand_over(mine, fills):
    """Hand the buffer, filled by all threads, over to the porter; return how often that was."""
    _buffer, _c_ready, filled, _free = mine
    fence_async_shared()
    barrier()
    mbarrier.arrive(filled)
    return fills + 1


@gluon.jit
def finish(acc, beta, job, matrix, tile, scales):
    """``s (α acc + β C)`` in fp32; C is in ``tile``, the buffer."""
    acc = acc * of_job(job, ALPHA)
    if place_in_job(job, C) >= 0:
        acc = with_c(acc, beta, tile.load(acc.type.layout).to(gl.float32))
    which = of_job(job, WHICH_SCALE)
    if which != NO_SCALE:
        acc = scaled(acc, gl.load(gl.where(which == SCALE, scales[0], scales[1]) + matrix))
    return acc


@gluon.jit
def _diagonal_of(diagonals, matrix):
    """A pointer to the diagonal of a matrix's factor."""
    start, side = diagonals
    return start + matrix.to(gl.int64) * side


@gluon.jit
def _put_apart(wide, at):
    """Store the diagonal of a tile at ``at``; return the tile with zeros there."""
    layout: gl.constexpr = wide.type.layout
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    on_diagonal = row[:, None] == gl.arange(0, BLOCK, gl.SliceLayout(0, layout))[None, :]
    gl.store(at + row, gl.sum(gl.where(on_diagonal, wide, 0.0), axis=1))
    return gl.where(on_diagonal, 0.0, wide)


@gluon.jit
def _rounded(wide, dtype: gl.constexpr):
    """The rounded numbers and their rounding errors."""
    d = wide.to(dtype)
    return d, (wide - d.to(gl.float32)).to(dtype)


@gluon.jit
def is_low(job):
    """Whether Q is the rounding error of D."""
    return of_job(job, IS_LOW) != 0


@gluon.jit
def square_tile(ME: gl.constexpr, of_tile, kind, diagonals, shared, scales, dtype: gl.constexpr, flags: gl.constexpr):
    """Compute a tile of a square product: below the diagonal, or anywhere if all tiles are computed.

    Returns how often C has been waited for, and the buffer handed over.
    """
    job, matrix, row, column, step, turns, loads, fills, K, of_a = of_tile
    ring, turn, mine = shared
    tile = mine[0].reshape([BLOCK, BLOCK])
    of_b = gl.where(kind == GRAM, K, gl.minimum(column + BLOCK, K))
    acc = multiply_squares(ME, ring, turn, step, turns, K, of_a, of_b, flags.stages, flags)
    loads = await_c(job, mine[1], loads)
    wide = finish(acc, of_job(job, BETA), job, matrix, tile, scales)
    if of_job(job, IS_APART) != 0 and row == column:
        wide = _put_apart(wide, _diagonal_of(diagonals, matrix) + row)
    d, low = _rounded(wide, dtype)
    await_free(mine, fills)
    tile.store(d)
    fills = hand_over(mine, fills)
    if is_low(job):
        await_free(mine, fills)
        tile.store(low)
        fills = hand_over(mine, fills)
    return loads, fills


@gluon.jit
def diagonal_tile(ME: gl.constexpr, of_tile, kind, is_single, shared, scales, dtype: gl.constexpr, flags: gl.constexpr):
    """Compute a tile on the diagonal of a symmetric product; ``is_single``: B is A, and the ring has one copy of it.

    Returns how often C has been waited for, and the buffer handed over.
    """
    job, matrix, _row, column, step, turns, loads, fills, K, of_a = of_tile
    ring, turn, mine = shared
    second = gl.where(is_single, 0, flags.stages)
    of_b = gl.where(kind == GRAM, K, gl.minimum(column + BLOCK, K))
    acc = multiply_squares(ME, ring, turn, step, turns, K, of_a, of_b, second, flags)
    loads = await_c(job, mine[1], loads)
    tile = mine[0].reshape([BLOCK, BLOCK])
    wide = finish(acc, of_job(job, BETA), job, matrix, tile, scales)
    await_free(mine, fills)
    if is_single:
        # these sums are symmetric to the last bit
        d, low = _rounded(wide, dtype)
        tile.store(d)
        if is_low(job):
            fills = hand_over(mine, fills)
            await_free(mine, fills)
            tile.store(low)
    else:
        tile.store(wide.to(dtype))
        _mirror_corner(tile)
    fills = hand_over(mine, fills)
    if (place_in_job(job, Q) >= 0) & (is_low(job) == 0):
        await_free(mine, fills)
        _shift(tile, of_job(job, OMEGA))
        fills = hand_over(mine, fills)
    return loads, fills


@gluon.jit
def _mirror_corner(tile):
    """Replace what is above the diagonal of a tile on it by the mirror image of what is below."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    rows = gl.arange(0, HALF, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))[None, :]
    barrier()
    for half in gl.static_range(2):
        part = tile.slice(half * HALF, HALF)
        d = part.load(layout)
        mirrored = tile.permute((1, 0)).slice(half * HALF, HALF).load(layout)
        barrier()
        part.store(gl.where(rows + half * HALF >= cols, d, mirrored))


@gluon.jit
def _shift(tile, omega):
    """Add ω to the diagonal."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    rows = gl.arange(0, HALF, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))[None, :]
    barrier()
    for half in gl.static_range(2):
        part = tile.slice(half * HALF, HALF)
        wide = part.load(layout).to(gl.float32)
        part.store(gl.where(rows + half * HALF == cols, wide + omega, wide).to(tile.dtype))


@gluon.jit
def rectangular_tile(
    ME: gl.constexpr,
    of_tile,
    diagonals,
    shared,
    scales,
    addresses,
    flags: gl.constexpr,
    update: gl.constexpr,
):
    """Compute a tile of a product with X; return how often C has been waited for, and the buffer handed over."""
    job, matrix, row, column, step, turns, loads, fills, K, of_a = of_tile
    ring, turn, mine = shared
    tile = mine[0].reshape([BLOCK, BLOCK])
    acc = multiply_x(ME, ring, turn, step, turns, K, of_a, flags)
    loads = await_c(job, mine[1], loads)
    at = row + gl.arange(0, BLOCK, gl.SliceLayout(1, acc.type.layout))
    # bypass L1, which may hold an old version of the line
    is_apart = of_job(job, IS_APART) != 0
    diagonal = _diagonal_of(diagonals, matrix)
    beta = gl.load(diagonal + at, mask=(at >= 0) & is_apart, other=of_job(job, BETA), cache_modifier=".cg")
    d = finish(acc, beta[:, None], job, matrix, tile, scales).to(tile.dtype)
    await_free(mine, fills)
    if flags.ending == UPDATE:
        if of_job(job, IS_LAST) == 0:
            tile.store(d)
        else:
            control = gl.load(addresses + CONTROL).to(gl.pointer_type(gl.float32))
            # found_inf: nothing is written
            if gl.load(control + 1) == 0.0:
                hyper = gl.load(addresses + HYPER).to(gl.pointer_type(gl.float32))
                lr_scale = gl.load(gl.load(addresses + LR_SCALES).to(gl.pointer_type(gl.float32)) + matrix)
                # all threads have read C
                barrier()
                record = record_of(addresses, matrix)
                update_tile(record, hyper, lr_scale, tile, d, row // BLOCK, column // BLOCK, update)
    else:
        tile.store(d)
        if flags.ending == SQUARES:  # noqa: SIM102
            if of_job(job, IS_LAST) != 0:
                barrier()
                parts = gl.load(addresses + PARTS).to(gl.pointer_type(gl.float32))
                _store_squares(record_of(addresses, matrix), parts, tile, row // BLOCK, column // BLOCK)
    return loads, hand_over(mine, fills)


@gluon.jit
def record_of(addresses, matrix):
    """The matrix's row in the table of `_kernels.muon_table`."""
    return gl.load(addresses + TABLE).to(gl.pointer_type(gl.int64)) + matrix.to(gl.int64) * NUM_FIELDS


@gluon.jit
def _store_squares(record, parts, tile, i, j):
    """Store the sums of O² over the part of each line that is in tile (i, j) of X."""
    outer_size, inner_size = gl.load(record + OUTER), gl.load(record + INNER)
    count = gl.maximum(outer_size, inner_size)
    first = parts + gl.load(record + FIRST_PART)
    # X's columns are the longer side, hence the lines; a square X is in the storage's order
    if (outer_size != inner_size) | (gl.load(record + ROWS_ARE_INNER) != 0):
        by_column: gl.constexpr = gl.BlockedLayout([_LINES, 1], [1, 32], [1, 4], [0, 1])
        of_columns = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(0, by_column))
        for part in gl.static_range(BLOCK // _LINES):
            o = tile.slice(part * _LINES, _LINES).load(by_column).to(gl.float32)
            of_columns += gl.sum(o * o, axis=0)
        column = j * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, by_column))
        gl.store(first + i * count + column, of_columns, mask=column < count)
    else:
        by_row: gl.constexpr = gl.BlockedLayout([1, _LINES], [32, 1], [4, 1], [1, 0])
        of_rows = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, by_row))
        for part in gl.static_range(BLOCK // _LINES):
            places = j * BLOCK + part * _LINES + gl.arange(0, _LINES, gl.SliceLayout(0, by_row))[None, :]
            across = tile.slice(part * _LINES, _LINES, 1).load(by_row).to(gl.float32)
            # some of the last columns of a panel are beyond the matrix
            across = gl.where(places < count, across, 0.0)
            of_rows += gl.sum(across * across, axis=1)
        row = i * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, by_row))
        gl.store(first + j * count + row, of_rows, mask=row < count)
