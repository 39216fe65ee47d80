"""What a consumer of `_hopper_chain_kernel` does with a tile: multiply, finish, store, and what the step ends with.

    D = s (α A Bᵀ + β C),  Q = D + ω I     A Aᵀ, and symmetric matrices that commute: tiles on and below the diagonal;
                                           or all tiles. Q may also be what rounding took from D, and D's diagonal
                                           apart from it
    D = s (α A B + β C)                    rectangular; the last one's tiles are O: parameters are updated with it, or
                                           sums of O² left behind for an update that needs all of O first

Of a tile on the diagonal three quarters are computed, from one copy of A where B is A. The kinds share no loop: where
the sums of two ways to multiply meet, the compiler lets one product wait for the other.
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

from optim_kernels import _chain_jobs as chain
from optim_kernels._hopper_kernels import BLOCK, multiply
from optim_kernels._hopper_ring import barrier, store
from optim_kernels._hopper_update_kernel import update_tile
from optim_kernels._muon_table import FIRST_PART, INNER, NUM_FIELDS, OUTER, ROWS_ARE_INNER

# Rows that one instruction of the tensor cores has.
HALF = gl.constexpr(64)
NO_SCALE, SCALE = gl.constexpr(chain.Scale.NONE.value), gl.constexpr(chain.Scale.SCALE.value)
STORE, UPDATE, SQUARES = (gl.constexpr(ending.value) for ending in chain.Ending)
C, D, Q, WHICH_SCALE, ALPHA, BETA, OMEGA, IS_LAST = (gl.constexpr(field) for field in range(8))
IS_LOW, IS_APART = gl.constexpr(13), gl.constexpr(14)
# Addresses in the list of those that only the last product needs.
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
def x_place(x, column, PANELS: gl.constexpr):
    """Where a column of X is: its matrix and the column; or, in panels of BLOCK columns, the panel and its column."""
    if PANELS:
        return x + column // BLOCK, column % BLOCK
    else:
        return x, column


@gluon.jit
def multiply_diagonal(ME: gl.constexpr, ring, turn, step, turns, K, second, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """Of a tile on the diagonal the lower half, and the left half of the upper one; B is in slot + ``second``."""
    blocks, _upright, ready, empty = ring
    lower = gl.zeros([HALF, BLOCK], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16]))
    corner = gl.zeros([HALF, HALF], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16]))
    mbarrier.wait(turn.index(ME), (turns & 1) ^ (1 - ME))
    for k in range(0, K, DEPTH):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
        a = blocks.index(slot).reshape([BLOCK, DEPTH])
        b = blocks.index(slot + second).reshape([BLOCK, DEPTH])
        lower = warpgroup_mma(a.slice(HALF, HALF), b.permute((1, 0)), lower, is_async=True)
        corner = warpgroup_mma(a.slice(0, HALF), b.slice(0, HALF).permute((1, 0)), corner, is_async=True)
        # all but this step's products are done
        lower, corner = warpgroup_mma_wait(2, deps=(lower, corner))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
        step += 1
    mbarrier.arrive(turn.index(1 - ME))
    lower, corner = warpgroup_mma_wait(0, deps=(lower, corner))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return lower, corner


@gluon.jit
def await_c(job, c_ready, loads):
    """Wait for C if there is one; how often that was."""
    if place_in_job(job, C) >= 0:
        mbarrier.wait(c_ready, loads & 1)
        loads += 1
    return loads


@gluon.jit
def finish(acc, beta, job, matrix, view, scales):
    """``s (α acc + β C)`` in fp32; C is in ``view``, the part of the buffer that is meant."""
    acc = acc * of_job(job, ALPHA)
    if place_in_job(job, C) >= 0:
        acc += beta * view.load(acc.type.layout).to(gl.float32)
    which = of_job(job, WHICH_SCALE)
    if which != NO_SCALE:
        acc *= gl.load(gl.where(which == SCALE, scales[0], scales[1]) + matrix)
    return acc


@gluon.jit
def _diagonal_of(diagonals, matrix):
    """Where the diagonal of a matrix's factor is."""
    start, side = diagonals
    return start + matrix.to(gl.int64) * side


@gluon.jit
def _put_apart(wide, at):
    """A tile on the diagonal without its diagonal, which is stored."""
    layout: gl.constexpr = wide.type.layout
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    on_diagonal = row[:, None] == gl.arange(0, BLOCK, gl.SliceLayout(0, layout))[None, :]
    gl.store(at + row, gl.sum(gl.where(on_diagonal, wide, 0.0), axis=1))
    return gl.where(on_diagonal, 0.0, wide)


@gluon.jit
def _rounded(wide, dtype: gl.constexpr):
    """The number and what rounding took from it."""
    d = wide.to(dtype)
    return d, (wide - d.to(gl.float32)).to(dtype)


@gluon.jit
def _is_low(job):
    """Whether Q is what rounding took."""
    return of_job(job, IS_LOW) != 0


@gluon.jit
def square_tile(ME: gl.constexpr, of_tile, is_full, diagonals, squares, shared, desc, scales, flags: gl.constexpr):
    """A tile of a square product, below the diagonal unless it ``is_full``; how often C has been waited for."""
    job, matrix, row, column, step, turns, loads, K = of_tile
    ring, turn, buffer, c_ready = shared
    blocks, _upright, ready, empty = ring
    tile = buffer.reshape([BLOCK, BLOCK])
    acc = multiply(ME, (blocks, blocks, ready, empty), turn, step, turns, K, True, flags[0], flags[1], flags[1])
    loads = await_c(job, c_ready, loads)
    wide = finish(acc, of_job(job, BETA), job, matrix, tile, scales)
    if of_job(job, IS_APART) != 0 and row == column:
        wide = _put_apart(wide, _diagonal_of(diagonals, matrix) + row)
    d, low = _rounded(wide, desc.dtype)
    tile.store(d)
    q = place_in_job(job, Q)
    if _is_low(job):
        _store_square(desc, d, squares + place_in_job(job, D), -1, row, column, buffer, is_full)
        tma.store_wait(0)
        barrier()
        tile.store(low)
        _store_square(desc, low, squares + q, -1, row, column, buffer, is_full)
    else:
        also = gl.where(q >= 0, squares + q, -1)
        _store_square(desc, d, squares + place_in_job(job, D), also, row, column, buffer, is_full)
    return loads


@gluon.jit
def diagonal_tile(ME: gl.constexpr, of_tile, squares, shared, desc, scales, second, flags: gl.constexpr):
    """A tile on the diagonal; how often C has been waited for."""
    job, matrix, row, _column, step, turns, loads, K = of_tile
    ring, turn, buffer, c_ready = shared
    lower, corner = multiply_diagonal(ME, ring, turn, step, turns, K, second, flags[0], flags[1])
    loads = await_c(job, c_ready, loads)
    tile = buffer.reshape([BLOCK, BLOCK])
    bottom = tile.slice(HALF, HALF)
    left = tile.slice(0, HALF).slice(0, HALF, 1)
    beta = of_job(job, BETA)
    d_bottom, low_bottom = _rounded(finish(lower, beta, job, matrix, bottom, scales), desc.dtype)
    d_left, low_left = _rounded(finish(corner, beta, job, matrix, left, scales), desc.dtype)
    bottom.store(d_bottom)
    left.store(d_left)
    if _is_low(job):
        _store_diagonal(desc, squares + place_in_job(job, D), -1, 0.0, row, buffer)
        tma.store_wait(0)
        barrier()
        bottom.store(low_bottom)
        left.store(low_left)
        _store_diagonal(desc, squares + place_in_job(job, Q), -1, 0.0, row, buffer)
    else:
        q = place_in_job(job, Q)
        also = gl.where(q >= 0, squares + q, -1)
        _store_diagonal(desc, squares + place_in_job(job, D), also, of_job(job, OMEGA), row, buffer)
    return loads


@gluon.jit
def _store_diagonal(desc, to, shifted, omega, row, buffer):
    """Store D, whose upper half is to be mirrored from the lower one, and where ``shifted`` ≥ 0 D + ωI there."""
    # half of the rows at a time, for the registers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    rows = gl.arange(0, HALF, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))[None, :]
    tile = buffer.reshape([BLOCK, BLOCK])
    barrier()
    for half in gl.static_range(2):
        part = tile.slice(half * HALF, HALF)
        d = part.load(layout)
        mirrored = tile.permute((1, 0)).slice(half * HALF, HALF).load(layout)
        barrier()
        part.store(gl.where(rows + half * HALF >= cols, d, mirrored))
    fence_async_shared()
    barrier()
    store(desc, [to, row, row], buffer)
    if shifted >= 0:
        tma.store_wait(0)
        barrier()
        for half in gl.static_range(2):
            part = tile.slice(half * HALF, HALF)
            wide = part.load(layout).to(gl.float32)
            part.store(gl.where(rows + half * HALF == cols, wide + omega, wide).to(desc.dtype))
        fence_async_shared()
        barrier()
        store(desc, [shifted, row, row], buffer)


@gluon.jit
def _store_square(desc, d, to, also, row, column, buffer, is_full):
    """Store D, which is in the buffer too, and unless the product ``is_full`` its mirror image.

    Where ``also`` ≥ 0, there as well.
    """
    fence_async_shared()
    barrier()
    store(desc, [to, row, column], buffer)
    if also >= 0:
        store(desc, [also, row, column], buffer)
    if not is_full:
        tma.store_wait(0)
        barrier()
        buffer.reshape([BLOCK, BLOCK]).permute((1, 0)).store(d)
        fence_async_shared()
        barrier()
        store(desc, [to, column, row], buffer)
        if also >= 0:
            store(desc, [also, column, row], buffer)


@gluon.jit
def rectangular_tile(
    ME: gl.constexpr,
    of_tile,
    x,
    diagonals,
    shared,
    descs,
    scales,
    addresses,
    flags: gl.constexpr,
    update: gl.constexpr,
):
    """A tile of a product with X; how often C has been waited for."""
    job, matrix, row, column, step, turns, loads, K = of_tile
    ring, turn, buffer, c_ready = shared
    PANELS: gl.constexpr = flags[2]
    ENDING: gl.constexpr = flags[3]
    tile = buffer.reshape([BLOCK, BLOCK])
    acc = multiply(ME, ring, turn, step, turns, K, False, flags[0], flags[1], flags[1])
    loads = await_c(job, c_ready, loads)
    at = row + gl.arange(0, BLOCK, gl.SliceLayout(1, acc.type.layout))
    # past L1, which may have the line from before
    is_apart = of_job(job, IS_APART) != 0
    diagonal = _diagonal_of(diagonals, matrix)
    beta = gl.load(diagonal + at, mask=(at >= 0) & is_apart, other=of_job(job, BETA), cache_modifier=".cg")
    d = finish(acc, beta[:, None], job, matrix, tile, scales).to(tile.dtype)
    if ENDING == UPDATE:
        if of_job(job, IS_LAST) == 0:
            _store_rectangle(descs, d, job, x, row, column, buffer, PANELS)
        else:
            control = gl.load(addresses + CONTROL).to(gl.pointer_type(gl.float32))
            # found_inf: nothing is written
            if gl.load(control + 1) == 0.0:
                hyper = gl.load(addresses + HYPER).to(gl.pointer_type(gl.float32))
                lr_scale = gl.load(gl.load(addresses + LR_SCALES).to(gl.pointer_type(gl.float32)) + matrix)
                # all have read C
                barrier()
                record = _record(addresses, matrix)
                update_tile(record, hyper, lr_scale, tile, d, row // BLOCK, column // BLOCK, update)
    else:
        _store_rectangle(descs, d, job, x, row, column, buffer, PANELS)
        if ENDING == SQUARES:  # noqa: SIM102
            if of_job(job, IS_LAST) != 0:
                parts = gl.load(addresses + PARTS).to(gl.pointer_type(gl.float32))
                _store_squares(_record(addresses, matrix), parts, tile, row // BLOCK, column // BLOCK)
    return loads


@gluon.jit
def _record(addresses, matrix):
    """The matrix's row in the table of `_muon_table`."""
    return gl.load(addresses + TABLE).to(gl.pointer_type(gl.int64)) + matrix.to(gl.int64) * NUM_FIELDS


@gluon.jit
def _store_rectangle(descs, d, job, x, row, column, buffer, PANELS: gl.constexpr):
    """Store a tile of X; rectangle 0 is only read, unless in panels it is 2 as well."""
    buffer.reshape([BLOCK, BLOCK]).store(d)
    fence_async_shared()
    barrier()
    where, inside = x_place(x, column, PANELS)
    if place_in_job(job, D) == 1:
        store(descs[1], [where, row, inside], buffer)
    elif PANELS:
        store(descs[0], [where, row, inside], buffer)
    else:
        store(descs[2], [where, row, inside], buffer)


@gluon.jit
def _store_squares(record, parts, tile, i, j):
    """Sums of O² over what tile (i, j) of X has of each line."""
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
            # of a panel's last columns some are beyond the matrix
            across = gl.where(places < count, across, 0.0)
            of_rows += gl.sum(across * across, axis=1)
        row = i * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, by_row))
        gl.store(first + j * count + row, of_rows, mask=row < count)
