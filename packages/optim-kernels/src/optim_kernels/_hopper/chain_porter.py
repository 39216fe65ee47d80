"""The porter of a consumer in `chain_kernel`: all copies from and to the consumer's buffer.

    C comes into the buffer before a tile's products are done
    the consumer puts a result there, and hands the buffer over (``filled``)
    the porter stores it, and gives the buffer back when it has been read (``free``); as often as the tile has results
    when all results are in memory, the count of the tile's matrix goes up

So a consumer waits for a result to be read, never for it to be stored, and multiplies its next tile meanwhile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from optim_kernels._hopper.chain_panels import load_x, store_x
from optim_kernels._hopper.chain_tiles import (
    FULL,
    IS_LAST,
    RECTANGLE,
    UPDATE,
    C,
    D,
    Q,
    is_low,
    of_job,
    place_in_job,
    record_of,
)
from optim_kernels._hopper.mail import fence_proxies, receive, wait_for_stores
from optim_kernels._hopper.pairs import join_pair
from optim_kernels._hopper.ring import barrier, load, store
from optim_kernels._hopper.turns import BLOCK
from optim_kernels._hopper.update_kernel import fetch_tile
from optim_kernels._newton_schulz import chain_jobs as chain

JOB_FIELDS = gl.constexpr(chain.JOB_FIELDS)


@gluon.jit
def _give_back(mine, fills):
    """Give the buffer back when it has been read; return how often that was."""
    _buffer, _c_ready, _filled, free = mine
    tma.store_wait(0)
    barrier()
    mbarrier.arrive(free)
    return fills + 1


@gluon.jit
def _carry_square(desc, to, also, row, column, mine, fills):
    """Store the consumer's next result as a tile of square ``to``, and of square ``also`` too if that is ≥ 0."""
    buffer, _c_ready, filled, _free = mine
    mbarrier.wait(filled, fills & 1)
    store(desc, [to, row, column], buffer)
    if also >= 0:
        store(desc, [also, row, column], buffer)
    return _give_back(mine, fills)


@gluon.jit
def carry(
    ME: gl.constexpr,
    results,
    buffers,
    page,
    mail,
    schedule,
    addresses,
    flags: gl.constexpr,
    update: gl.constexpr,
):
    square_desc, _mirror_desc, x_descs = results
    _entries, jobs, _matrices, state, _counter, _total = schedule
    c_ready, filled, free = page
    mine = (buffers.index(ME), c_ready.index(ME), filled.index(ME), free.index(ME))
    turns = 0
    fills = 0
    join_pair(turns)
    job, matrix, row, column, kind, _step, _a, _b, x, squares, _K, _of_a, _meets = receive(mail, ME, 1)
    while job >= 0:
        fence_proxies(job)
        numbers = jobs + job * JOB_FIELDS
        c, d, q = place_in_job(numbers, C), place_in_job(numbers, D), place_in_job(numbers, Q)
        if c >= 0:
            mbarrier.expect(mine[1], square_desc.block_type.nbytes)
            if kind == RECTANGLE:
                load_x(x_descs, c, x, row, column, mine[1], mine[0], flags.panels)
            else:
                load(square_desc, [squares + c, row, column], mine[1], mine[0])
        if kind == RECTANGLE:
            is_updated = False
            if flags.ending == UPDATE:
                is_updated = of_job(numbers, IS_LAST) != 0
                if is_updated:
                    fetch_tile(record_of(addresses, matrix), row // BLOCK, column // BLOCK, update)
            mbarrier.wait(mine[2], fills & 1)
            if not is_updated:
                store_x(x_descs, d, x, row, column, mine[0], flags.panels)
            fills = _give_back(mine, fills)
        else:
            second = gl.where(q >= 0, squares + q, -1)
            if (row == column) & (kind != FULL):
                fills = _carry_square(square_desc, squares + d, -1, row, row, mine, fills)
                if q >= 0:
                    fills = _carry_square(square_desc, second, -1, row, row, mine, fills)
            else:
                also = gl.where(is_low(numbers), -1, second)
                fills = _carry_square(square_desc, squares + d, also, row, column, mine, fills)
                if is_low(numbers):
                    fills = _carry_square(square_desc, second, -1, row, column, mine, fills)
        turns += 1
        wait_for_stores(turns)
        barrier()
        gl.atomic_add(state + matrix, 1, sem="release", scope="gpu")
        job, matrix, row, column, kind, _step, _a, _b, x, squares, _K, _of_a, _meets = receive(mail, 2 * turns + ME, 1)
    join_pair(turns)
