"""All products of a Newton–Schulz iteration on many matrices in one launch, for Hopper in Gluon.

The products of one matrix depend on each other, those of different matrices do not. So tiles of all products are put
into one list (`_newton_schulz.chain_list`), in an order in which whatever a tile reads comes before it, and pairs of
programs draw two tiles at a time from it (`pairs`):

    scout          draws the next two tiles together with the other program's scout, waits until `done` of its own
                   tile's matrix says that what the tile reads is stored, and posts the tile (`mail`)
    producer       copies the operands of posted tiles, as in `ping_pong_kernels` (`chain_producer`)
    consumer 0, 1  multiply in turn, as there, and put results into a buffer (`chain_tiles`)
    porter 0, 1    request C, into that buffer; store what a consumer puts there; and when a tile is in memory add 1 to
                   the matrix's `done`

The scout is up to two tiles ahead, so no other role waits for its three round trips to memory.

So no matrix waits for the last tiles of others before its next product, as it would with separate launches. The kernel
cannot deadlock, however few programs the chip holds: the first unfinished tile was drawn by two programs that run and
have finished every tile they drew before, and of their two tiles neither waits for the other or for a later one.

Matrices share their short side. X is [matrices, m, n], or where they differ in length [panels, m, BLOCK]: each matrix
in as many panels of BLOCK columns as it needs; the last columns of its last panel may be unused.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from optim_kernels._hopper.chain_porter import carry
from optim_kernels._hopper.chain_producer import produce
from optim_kernels._hopper.chain_tiles import (
    FULL,
    GRAM,
    RECTANGLE,
    SQUARE,
    diagonal_tile,
    place_in_job,
    rectangular_tile,
    square_tile,
)
from optim_kernels._hopper.flags import chain_flags, update_flags
from optim_kernels._hopper.mail import allocate_mail, post, read_done, receive
from optim_kernels._hopper.overlap import wait_for_previous
from optim_kernels._hopper.pairs import draw, join_pair, open_pair, rank
from optim_kernels._hopper.ring import CONSUMER_REGISTERS, PRODUCER_REGISTERS, as_blocks, barriers, blocks_of
from optim_kernels._hopper.turns import BLOCK
from optim_kernels._newton_schulz import chain_jobs, chain_list

ENTRY_FIELDS, JOB_FIELDS = gl.constexpr(chain_list.ENTRY_FIELDS), gl.constexpr(chain_jobs.JOB_FIELDS)
NO_TILE = gl.constexpr(chain_list.NO_TILE)
# Of a job's numbers, those that only the scout needs.
KIND, NEEDED, A, B, LENGTH = (gl.constexpr(field) for field in range(8, 13))
IS_WHOLE = gl.constexpr(15)


@gluon.jit
def _scout(mail, schedule, flags: gl.constexpr):
    entries, jobs, matrices, state, counter, total = schedule
    me = rank()
    join_pair(total)
    # no other role touches memory before the first post
    wait_for_previous(total)
    step = 0
    number = 0
    draws = 0
    pair = draw(me, state + counter, draws)
    while 2 * pair < total:
        entry, other = entries + (2 * pair + me) * ENTRY_FIELDS, entries + (2 * pair + 1 - me) * ENTRY_FIELDS
        job, matrix, row, column = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)
        is_shared = (gl.load(other) == job) & (gl.load(other + 1) == matrix) & (gl.load(other + 2) == row)
        if matrix != NO_TILE:
            numbers = jobs + job * JOB_FIELDS
            kind = place_in_job(numbers, KIND)
            x, squares = gl.load(matrices + 2 * matrix), gl.load(matrices + 2 * matrix + 1)
            # square operands are numbered over all matrices, the others are buffers of X
            a = place_in_job(numbers, A) + gl.where(kind == GRAM, 0, squares)
            b = place_in_job(numbers, B) + gl.where((kind == SQUARE) | (kind == FULL), squares, 0)
            K = place_in_job(numbers, LENGTH)
            # up to ``of_a`` along K A is stored as it is; from there on its mirror image is read
            is_whole = (kind == GRAM) | (place_in_job(numbers, IS_WHOLE) != 0)
            of_a = gl.where(is_whole, K, gl.minimum(row + BLOCK, K))
            needed = place_in_job(numbers, NEEDED)
            while read_done(state + matrix) < needed:
                pass
            meets = is_shared.to(gl.int32)
            post(mail, number, (job, matrix, row, column, kind, step, a, b, x, squares, K, of_a, meets))
            step += gl.cdiv(K, flags.depth)
            number += 1
        draws += 1
        pair = draw(me, state + counter, draws)
    for last in gl.static_range(2):
        post(mail, number + last, (-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0))
    join_pair(number)


@gluon.jit
def _consume(
    ME: gl.constexpr,
    results,
    ring,
    buffers,
    page,
    turn,
    mail,
    schedule,
    scales,
    diagonals,
    addresses,
    flags: gl.constexpr,
    update: gl.constexpr,
):
    square_desc, mirror_desc, _x_descs = results
    c_ready, filled, free = page
    _entries, jobs, _matrices, _state, _counter, _total = schedule
    blocks, ready, empty = ring
    mine = (buffers.index(ME), c_ready.index(ME), filled.index(ME), free.index(ME))
    shared = ((blocks, as_blocks(blocks, mirror_desc, 2 * flags.stages), ready, empty), turn, mine)
    dtype: gl.constexpr = square_desc.dtype
    turns = 0
    loads = 0
    fills = 0
    join_pair(turns)
    job, matrix, row, column, kind, step, a, b, _x, _squares, K, of_a, _meets = receive(mail, ME, 4)
    while job >= 0:
        numbers = jobs + job * JOB_FIELDS
        of_tile = (numbers, matrix, row, column, step, turns, loads, fills, K, of_a)
        if kind == RECTANGLE:
            loads, fills = rectangular_tile(ME, of_tile, diagonals, shared, scales, addresses, flags, update)
        elif (row == column) & (kind != FULL):
            loads, fills = diagonal_tile(ME, of_tile, kind, a == b, shared, scales, dtype, flags)
        else:
            loads, fills = square_tile(ME, of_tile, kind, diagonals, shared, scales, dtype, flags)
        turns += 1
        job, matrix, row, column, kind, step, a, b, _x, _squares, K, of_a, _meets = receive(mail, 2 * turns + ME, 4)
    join_pair(turns)


# the second row of scales may be aligned or not: specialised on that, everything would be compiled twice
@gluon.jit(do_not_specialize=["scales", "squared_scales", "side", "counter", "total"])
def chain_kernel(
    square_load,
    right_load_square,
    gram_load_0,
    gram_load_1,
    gram_load_2,
    right_load_0,
    right_load_1,
    right_load_2,
    square_desc,
    x_desc_0,
    x_desc_1,
    x_desc_2,
    entries,
    jobs,
    matrices,
    scales,
    squared_scales,
    diagonals,
    state,
    addresses,
    side,
    counter,
    total,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    PANELS: gl.constexpr,
    ENDING: gl.constexpr,
    P_DTYPE: gl.constexpr,
    MASTER_KIND: gl.constexpr,
    CAUTIOUS: gl.constexpr,
):
    """All jobs of matrices that share their short side.

    ``state``: how many tiles of each matrix are done, and at ``counter`` the number of the next pair of tiles.
    ``diagonals``: ``side`` numbers for each matrix.
    """
    # slots of A, then slots of B
    blocks, ready, empty = blocks_of(square_load, 2 * STAGES), barriers(STAGES), barriers(STAGES)
    buffers = blocks_of(square_desc, 2)
    # barriers of each consumer: C has arrived, its buffer is filled, its buffer is free again; it may multiply
    page, turn = (barriers(2), barriers(2), barriers(2)), barriers(2)
    mail = allocate_mail()
    open_pair(total)
    fence_async_shared()
    ring = (blocks, ready, empty)
    schedule = (entries, jobs, matrices, state, counter, total)
    grams, rights = (gram_load_0, gram_load_1, gram_load_2), (right_load_0, right_load_1, right_load_2)
    results = (square_desc, right_load_square, (x_desc_0, x_desc_1, x_desc_2))
    both = (scales, squared_scales)
    apart = (diagonals, side)
    flags: gl.constexpr = chain_flags(DEPTH, STAGES, PANELS, ENDING)
    update: gl.constexpr = update_flags(P_DTYPE, MASTER_KIND, CAUTIOUS)
    gl.warp_specialize(
        [
            (_consume, (0, results, ring, buffers, page, turn, mail, schedule, both, apart, addresses, flags, update)),
            (_consume, (1, results, ring, buffers, page, turn, mail, schedule, both, apart, addresses, flags, update)),
            (produce, ((square_load, right_load_square, grams, rights), ring, mail, flags)),
            (_scout, (mail, schedule, flags)),
            (carry, (0, results, buffers, page, mail, schedule, addresses, flags, update)),
            (carry, (1, results, buffers, page, mail, schedule, addresses, flags, update)),
        ],
        [4, 1, 1, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
