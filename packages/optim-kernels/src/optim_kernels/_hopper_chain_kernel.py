"""All products of a Newton–Schulz iteration on a batch of matrices in one launch, for Hopper in Gluon.

The products of one matrix depend on each other, those of different matrices do not. So tiles of all products are put
into one list (`_chain_jobs`), in an order in which whatever a tile reads comes before it, and the programs take them
from there one by one:

    scout          draws the next tile from a counter, waits until `done` of its matrix says that what it reads is
                   there, and posts it
    producer       copies the operands of posted tiles, as in `_hopper_kernels`
    consumer 0, 1  multiply in turn, as there; store; and add 1 to the matrix's `done`

The scout is up to two tiles ahead, so nobody waits for its three round trips to memory.

No launch waits for the last tile of the one before it. It cannot deadlock, however many of its programs the chip
holds: of all unfinished tiles the first was drawn by a program that runs, that has finished every tile it drew before,
and that waits for none.

A result is stored by the copy engine; it is complete when the engine says so, then `done` is raised with release. Who
reads `done` with acquire hands it on to its own copy engine by a proxy fence.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from optim_kernels import _chain_jobs as chain
from optim_kernels._hopper_kernels import (
    BLOCK,
    CONSUMER_REGISTERS,
    HAS_OLD_REINTERPRET,
    PRODUCER_REGISTERS,
    barrier,
    load,
    multiply,
    store,
)

GRAM, SQUARE, RECTANGLE = (gl.constexpr(kind.value) for kind in chain.Kind)
NO_SCALE, SCALE = gl.constexpr(chain.Scale.NONE.value), gl.constexpr(chain.Scale.SCALE.value)
ENTRY_FIELDS, JOB_FIELDS = gl.constexpr(chain.ENTRY_FIELDS), gl.constexpr(chain.JOB_FIELDS)


@gluon.jit
def _read_done(counter):
    """A counter of finished tiles, with acquire: what they stored is there for whom it counts."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _fence_proxies(token):
    """What this thread knows to be in memory is there for its copy engine too."""
    return gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait_for_stores(token):
    """Until the copy engine's stores are in memory; `tma.store_wait` only knows that they were read."""
    return gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _post(mail, number, values):
    """Put eight values, of the tile with this number, into the box of the consumer whose turn it is."""
    boxes, posted, taken = mail
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    box = number % 2
    at = gl.arange(0, 8, layout)
    post = gl.zeros([8], gl.int32, layout)
    for i in gl.static_range(8):
        post = gl.where(at == i, values[i], post)
    mbarrier.wait(taken.index(box), ((number // 2) & 1) ^ 1)
    boxes.index(box).store(post)
    barrier()
    mbarrier.arrive(posted.index(box))


@gluon.jit
def _receive(mail, number, NUM_WARPS: gl.constexpr):
    """The values of the tile with this number; its box is free when both producer and consumer have read it."""
    boxes, posted, taken = mail
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [NUM_WARPS], [0])
    box = number % 2
    at = gl.arange(0, 8, layout)
    mbarrier.wait(posted.index(box), (number // 2) & 1)
    post = boxes.index(box).load(layout)
    barrier()
    mbarrier.arrive(taken.index(box))
    return (
        gl.sum(gl.where(at == 0, post, 0), axis=0),
        gl.sum(gl.where(at == 1, post, 0), axis=0),
        gl.sum(gl.where(at == 2, post, 0), axis=0),
        gl.sum(gl.where(at == 3, post, 0), axis=0),
        gl.sum(gl.where(at == 4, post, 0), axis=0),
        gl.sum(gl.where(at == 5, post, 0), axis=0),
        gl.sum(gl.where(at == 6, post, 0), axis=0),
        gl.sum(gl.where(at == 7, post, 0), axis=0),
    )


@gluon.jit
def _upright(b_ring, desc, STAGES: gl.constexpr):
    """The ring of B with blocks [K, columns], as products with X take them, instead of [columns, K]."""
    if HAS_OLD_REINTERPRET:
        return b_ring._reinterpret(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)
    else:
        return b_ring.reinterpret(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)


@gluon.jit
def _load_of(descs, which, place, row, column, full, target):
    """Copy a block of rectangle ``which``."""
    if which == 0:
        load(descs[0], [place, row, column], full, target)
    elif which == 1:
        load(descs[1], [place, row, column], full, target)
    else:
        load(descs[2], [place, row, column], full, target)


@gluon.jit
def _scout(mail, schedule, flags: gl.constexpr):
    DEPTH: gl.constexpr = flags[0]
    entries, state, total, m, n = schedule
    step = 0
    number = 0
    tile = gl.atomic_add(state, 1, sem="relaxed")
    while tile < total:
        entry = entries + tile * ENTRY_FIELDS
        job, matrix, row, column = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)
        kind, needed, a, b = gl.load(entry + 4), gl.load(entry + 5), gl.load(entry + 6), gl.load(entry + 7)
        done = _read_done(state + 1 + matrix)
        while done < needed:
            done = _read_done(state + 1 + matrix)
        _post(mail, number, (job, matrix, row, column, kind, step, a, b))
        step += gl.cdiv(gl.where(kind == GRAM, n, m), DEPTH)
        number += 1
        tile = gl.atomic_add(state, 1, sem="relaxed")
    for last in gl.static_range(2):
        _post(mail, number + last, (-1, 0, 0, 0, 0, 0, 0, 0))


@gluon.jit
def _produce(operands, ring, mail, schedule, flags: gl.constexpr):
    DEPTH: gl.constexpr = flags[0]
    STAGES: gl.constexpr = flags[1]
    square_desc, gram_descs, right_descs = operands
    a_ring, b_ring, ready, empty = ring
    upright = _upright(b_ring, right_descs[0], STAGES)
    _entries, _state, _total, m, n = schedule
    number = 0
    job, matrix, row, column, kind, step, a, b = _receive(mail, number, 1)
    while job >= 0:
        _fence_proxies(job)
        for k in range(0, gl.where(kind == GRAM, n, m), DEPTH):
            slot = step % STAGES
            full = ready.index(slot)
            a_slot, b_slot = a_ring.index(slot), b_ring.index(slot)
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full, 2 * square_desc.block_type.nbytes)
            if kind == GRAM:
                _load_of(gram_descs, a, matrix, row, k, full, a_slot)
                _load_of(gram_descs, a, matrix, column, k, full, b_slot)
            else:
                load(square_desc, [a, row, k], full, a_slot)
                if kind == SQUARE:
                    load(square_desc, [b, column, k], full, b_slot)
                else:
                    _load_of(right_descs, b, matrix, k, column, full, upright.index(slot))
            step += 1
        number += 1
        job, matrix, row, column, kind, step, a, b = _receive(mail, number, 1)


@gluon.jit
def _finish(acc, of_job, number, c_ready, loads, matrix, scales):
    """``s (α acc + β C)`` rounded, and how often C was copied; C is in ``matrix``."""
    acc = acc * gl.load(of_job + 4)
    if gl.load(of_job) >= 0:
        mbarrier.wait(c_ready, loads & 1)
        acc += gl.load(of_job + 5) * matrix.load(acc.type.layout).to(gl.float32)
        loads += 1
    which = gl.load(of_job + 3)
    if which != NO_SCALE:
        acc *= gl.load(gl.where(which == SCALE, scales[0], scales[1]) + number)
    return acc.to(matrix.dtype), loads


@gluon.jit
def _store_rectangle(descs, d, of_job, number, row, column, buffer, matrix):
    """Store a tile of X; rectangle 0 is only read."""
    matrix.store(d)
    fence_async_shared()
    barrier()
    if gl.load(of_job + 1) == 1:
        store(descs[1], [number, row, column], buffer)
    else:
        store(descs[2], [number, row, column], buffer)


@gluon.jit
def _store_symmetric(desc, d, of_job, number, row, column, buffer, matrix):
    """Store D, its mirror image, and Q = D + ωI."""
    layout: gl.constexpr = d.type.layout
    rows = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))[None, :]
    d_place, q = gl.load(of_job + 1).to(gl.int32) + number, gl.load(of_job + 2).to(gl.int32)
    matrix.store(d)
    if row == column:
        barrier()
        mirrored = matrix.permute((1, 0)).load(layout)
        barrier()
        d = gl.where(rows >= cols, d, mirrored)
        matrix.store(d)
    fence_async_shared()
    barrier()
    store(desc, [d_place, row, column], buffer)
    if row != column:
        if q >= 0:
            store(desc, [q + number, row, column], buffer)
        tma.store_wait(0)
        barrier()
        matrix.permute((1, 0)).store(d)
        fence_async_shared()
        barrier()
        store(desc, [d_place, column, row], buffer)
        if q >= 0:
            store(desc, [q + number, column, row], buffer)
    elif q >= 0:
        tma.store_wait(0)
        barrier()
        wide = d.to(gl.float32)
        matrix.store(gl.where(rows == cols, wide + gl.load(of_job + 6), wide).to(d.dtype))
        fence_async_shared()
        barrier()
        store(desc, [q + number, row, column], buffer)


@gluon.jit
def _consume(ME: gl.constexpr, results, ring, buffers, c_ready, turn, mail, schedule, tables, flags: gl.constexpr):
    DEPTH: gl.constexpr = flags[0]
    STAGES: gl.constexpr = flags[1]
    square_desc, rectangle_descs, right_desc = results
    _entries, state, _total, m, n = schedule
    jobs, scales = tables
    a_ring, b_ring, ready, empty = ring
    upright = _upright(b_ring, right_desc, STAGES)
    buffer = buffers.index(ME)
    matrix = buffer.reshape([BLOCK, BLOCK])
    mine = c_ready.index(ME)
    turns = 0
    loads = 0
    job, number, row, column, kind, step, _, _ = _receive(mail, ME, 4)
    while job >= 0:
        _fence_proxies(job)
        of_job = jobs + job * JOB_FIELDS
        c = gl.load(of_job).to(gl.int32)
        # each kind multiplies for itself: where the sums of both meet, the compiler lets one product wait for another
        if kind == RECTANGLE:
            if c >= 0:
                mbarrier.expect(mine, square_desc.block_type.nbytes)
                _load_of(rectangle_descs, c, number, row, column, mine, buffer)
            acc = multiply(ME, (a_ring, upright, ready, empty), turn, step, turns, m, False, DEPTH, STAGES)
            d, loads = _finish(acc, of_job, number, mine, loads, matrix, scales)
            _store_rectangle(rectangle_descs, d, of_job, number, row, column, buffer, matrix)
        else:
            if c >= 0:
                mbarrier.expect(mine, square_desc.block_type.nbytes)
                load(square_desc, [c + number, row, column], mine, buffer)
            acc = multiply(ME, ring, turn, step, turns, gl.where(kind == GRAM, n, m), True, DEPTH, STAGES)
            d, loads = _finish(acc, of_job, number, mine, loads, matrix, scales)
            _store_symmetric(square_desc, d, of_job, number, row, column, buffer, matrix)
        turns += 1
        _wait_for_stores(turns)
        barrier()
        gl.atomic_add(state + 1 + number, 1, sem="release", scope="gpu")
        job, number, row, column, kind, step, _, _ = _receive(mail, 2 * turns + ME, 4)


@gluon.jit
def chain_kernel(
    square_load,
    gram_load_0,
    gram_load_1,
    gram_load_2,
    right_load_0,
    right_load_1,
    right_load_2,
    square_tile,
    rectangle_tile_0,
    rectangle_tile_1,
    rectangle_tile_2,
    entries,
    jobs,
    scales,
    squared_scales,
    state,
    total,
    m,
    n,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """All jobs of a batch of matrices."""
    dtype: gl.constexpr = square_load.dtype
    a_ring = gl.allocate_shared_memory(dtype, [STAGES] + square_load.block_type.shape, square_load.layout)
    b_ring = gl.allocate_shared_memory(dtype, [STAGES] + square_load.block_type.shape, square_load.layout)
    buffers = gl.allocate_shared_memory(dtype, [2] + square_tile.block_type.shape, square_tile.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # of each consumer: C is there, it may multiply
    c_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # of each box: a post is there, both have read it
    posted = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    boxes = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    for consumer in gl.static_range(2):
        mbarrier.init(c_ready.index(consumer), count=1)
        mbarrier.init(turn.index(consumer), count=1)
        mbarrier.init(posted.index(consumer), count=1)
        mbarrier.init(taken.index(consumer), count=2)
    fence_async_shared()
    ring, mail = (a_ring, b_ring, ready, empty), (boxes, posted, taken)
    schedule, tables = (entries, state, total, m, n), (jobs, (scales, squared_scales))
    grams, rights = (gram_load_0, gram_load_1, gram_load_2), (right_load_0, right_load_1, right_load_2)
    results = (square_tile, (rectangle_tile_0, rectangle_tile_1, rectangle_tile_2), right_load_0)
    flags: gl.constexpr = (DEPTH, STAGES)
    gl.warp_specialize(
        [
            (_consume, (0, results, ring, buffers, c_ready, turn, mail, schedule, tables, flags)),
            (_consume, (1, results, ring, buffers, c_ready, turn, mail, schedule, tables, flags)),
            (_produce, ((square_load, grams, rights), ring, mail, schedule, flags)),
            (_scout, (mail, schedule, flags)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
