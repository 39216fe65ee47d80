"""What a consumer of `lone_kernel` does with its part of a tile: multiply, finish, store.

    whole_tile    64 rows of a tile of the general product, or of a symmetric one's below the diagonal
    half_tile     64 rows of a symmetric tile of 128 columns
    corner        the upper left block of a diagonal tile, which may be all of it; BANDED: also a block of another one
    lower_half    the lower 64 rows of a diagonal tile

D is written where C was, the mirror image into the slot after it and Q, where it differs, into the one after that. The
slots are those of the steps that would come next: they are free when all consumers have read what is in them. With LOW
the rounding errors of D follow, in the same places once D has left them.

D is symmetric to the last bit: see `_kernels.symmetric`.
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

from optim_kernels._hopper.overlap import wait_for_previous
from optim_kernels._hopper.ring import barrier, blocks_as, store
from optim_kernels._kernels.normalize import inverse_norm
from optim_kernels._kernels.product import scaled, with_c

# Side of a block: the rows of one tensor core instruction, and the columns that the copy engine swizzles as one.
SIDE = gl.constexpr(64)


@gluon.jit
def await_free(ring, step, STAGES: gl.constexpr):
    """Wait until all consumers have read what was in the slot of this step."""
    mbarrier.wait(ring[3].index(step % STAGES), ((step // STAGES) & 1) ^ 1)


@gluon.jit
def await_ready(ring, step, STAGES: gl.constexpr):
    """Wait until the copy engine has filled the slot of this step."""
    mbarrier.wait(ring[2].index(step % STAGES), (step // STAGES) & 1)


@gluon.jit
def release(ring, step, STAGES: gl.constexpr, condition=True):
    """Say that this consumer has read the slot of this step."""
    mbarrier.arrive(ring[3].index((step + STAGES) % STAGES), pred=condition)


@gluon.jit
def await_place(ring, step, HAS_C: gl.constexpr, STAGES: gl.constexpr):
    """Wait until the slot of this step has C, or is free where there is none."""
    if HAS_C:
        await_ready(ring, step, STAGES)
    else:
        await_free(ring, step, STAGES)


@gluon.jit
def zeros(COLUMNS: gl.constexpr):
    return gl.zeros([SIDE, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))


@gluon.jit
def block(blocks, number):
    """A block of 64×64."""
    return blocks.index(number).reshape([SIDE, SIDE])


@gluon.jit
def tall(blocks, number, NUM: gl.constexpr):
    """One of NUM tall blocks of 128×64, each made of two blocks."""
    return blocks_as(blocks, NUM, 2 * SIDE, SIDE).index(number).reshape([2 * SIDE, SIDE])


@gluon.jit
def wide(blocks, number, COLUMNS: gl.constexpr, NUM: gl.constexpr):
    """One of NUM wide blocks of 64 rows, each made of several blocks side by side."""
    return blocks_as(blocks, NUM, SIDE, COLUMNS).index(number).reshape([SIDE, COLUMNS])


@gluon.jit
def _multiply(ME: gl.constexpr, ring, K, flags: gl.constexpr):
    """The sums of this consumer's rows of a whole tile, and the steps taken."""
    a_blocks, b_blocks = ring[0], ring[1]
    acc = zeros(flags.broad * SIDE)
    step = 0
    for k in range(0, K, flags.deep * SIDE):
        slot = step % flags.stages
        await_ready(ring, step, flags.stages)
        for i in gl.static_range(flags.deep):
            if not flags.symmetric:
                b = wide(b_blocks, flags.deep * slot + i, flags.broad * SIDE, flags.deep * flags.stages)
            elif flags.broad == 1:
                b = block(b_blocks, 2 * slot + i).permute((1, 0))
            else:
                b = tall(b_blocks, flags.deep * slot + i, flags.deep * flags.stages).permute((1, 0))
            acc = warpgroup_mma(block(a_blocks, flags.deep * flags.tall * slot + i + ME), b, acc, is_async=True)
        # all but this step's products are done
        acc = warpgroup_mma_wait(flags.deep, deps=(acc,))
        release(ring, step - 1, flags.stages, k > 0)
        step += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(ring, step - 1, flags.stages)
    return acc, step


@gluon.jit
def multiply_rows(left, PER_STEP: gl.constexpr, number, right, ring, K, flags: gl.constexpr):
    """The sums of 64 rows, a step's block ``number`` on the left, and 128 on the right; and the steps taken."""
    acc = zeros(2 * SIDE)
    step = 0
    for k in range(0, K, SIDE):
        slot = step % flags.stages
        await_ready(ring, step, flags.stages)
        b = tall(right, slot, flags.stages).permute((1, 0))
        acc = warpgroup_mma(block(left, PER_STEP * slot + number), b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        release(ring, step - 1, flags.stages, k > 0)
        step += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(ring, step - 1, flags.stages)
    return acc, step


@gluon.jit
def _multiply_corner(ring, quarter, K, flags: gl.constexpr):
    """The sums of a diagonal tile's upper left block, BANDED: of a block of another tile; and the steps taken."""
    a_blocks, b_blocks = ring[0], ring[1]
    acc = zeros(SIDE)
    other = zeros(SIDE)
    # the lower left quarter is a product of two blocks of rows, the others are of one with itself
    second = quarter % 2
    step = 0
    for k in range(0, K, flags.deep * SIDE):
        slot = step % flags.stages
        await_ready(ring, step, flags.stages)
        for i in gl.static_range(flags.deep):
            b = block(a_blocks if flags.same else b_blocks, 2 * slot + i)
            acc = warpgroup_mma(block(a_blocks, 2 * slot + i), b.permute((1, 0)), acc, is_async=True)
            if flags.banded:
                left = block(b_blocks, 2 * slot + i)
                right = left if flags.tall == 1 else block(b_blocks, 2 * slot + second)
                other = warpgroup_mma(left, right.permute((1, 0)), other, is_async=True)
        if flags.banded:
            acc, other = warpgroup_mma_wait(2 * flags.deep, deps=(acc, other))
        else:
            acc = warpgroup_mma_wait(flags.deep, deps=(acc,))
        release(ring, step - 1, flags.stages, k > 0)
        step += 1
    acc, other = warpgroup_mma_wait(0, deps=(acc, other))
    release(ring, step - 1, flags.stages)
    return acc, other, step


@gluon.jit
def with_scale(numbers, batch, K, flags: gl.constexpr):
    """α, β, ω and the matrix's scale, which may have to be waited for and found; all after a consumer's products."""
    alpha, beta, omega, of_scale = numbers
    if flags.early:
        wait_for_previous(K)
    scale = 1.0
    if flags.parts > 0:
        scale = _inverse_square(of_scale, batch, flags)
    elif flags.has_scale:
        scale = gl.load(of_scale[0] + batch)
    return alpha, beta, omega, scale


@gluon.jit
def _inverse_square(of_scale, batch, flags: gl.constexpr):
    """1/N² of a matrix, from the squares of its parts; one program leaves it and 1/N for later launches."""
    sums, inverses, num_matrices, parts, norm_scale, eps = of_scale
    part = gl.arange(0, flags.parts, gl.BlockedLayout([1], [32], [4], [0]))
    squares = gl.sum(gl.load(sums + batch * parts + part, mask=part < parts, other=0.0), axis=0)
    inverse = inverse_norm(squares, norm_scale, eps, flags.adds_eps)
    square = (inverse * inverse).to(gl.float32)
    if gl.program_id(0) == 0:
        gl.store(inverses + batch, inverse.to(gl.float32))
        gl.store(inverses + num_matrices + batch, square)
    return square


@gluon.jit
def finish(acc, view, numbers, flags: gl.constexpr):
    """``s (α acc + β C)`` rounded, which replaces C in ``view``; and with LOW what rounding took from it."""
    alpha, beta, _omega, scale = numbers
    acc = acc * alpha
    if flags.has_c:
        acc = with_c(acc, beta, view.load(acc.type.layout).to(gl.float32))
    if flags.has_scale:
        acc = scaled(acc, scale) if flags.low else acc * scale
    d = acc.to(view.dtype)
    view.store(d)
    low = d
    if flags.low:
        low = (acc - d.to(gl.float32)).to(view.dtype)
    return d, low


@gluon.jit
def _await_sent():
    """Wait until the copy engine has read what this consumer has sent."""
    tma.store_wait(0)
    barrier()


@gluon.jit
def _put_apart(acc, result, batch, row, column):
    """Store the part of a square matrix's diagonal that is in ``acc``, at this place; return it with zeros there."""
    desc, diagonals = result
    side = desc.shape[1]
    layout: gl.constexpr = acc.type.layout
    i = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    j = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    on_diagonal = i[:, None] == j[None, :]
    is_here = (i >= column) & (i < column + acc.shape[1]) & (i < side)
    gl.store(diagonals + batch.to(gl.int64) * side + i, gl.sum(gl.where(on_diagonal, acc, 0.0), axis=1), mask=is_here)
    return gl.where(on_diagonal, 0.0, acc)


@gluon.jit
def symmetrize(view):
    """Mirror the lower half of a block on the diagonal."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    rows = gl.arange(0, SIDE, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, SIDE, gl.SliceLayout(0, layout))[None, :]
    barrier()
    d = view.load(layout)
    mirrored = view.permute((1, 0)).load(layout)
    barrier()
    view.store(gl.where(rows >= cols, d, mirrored))


@gluon.jit
def _shift(view, target, omega):
    """``target = view + ω I``."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    rows = gl.arange(0, SIDE, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, SIDE, gl.SliceLayout(0, layout))[None, :]
    barrier()
    wide = view.load(layout).to(gl.float32)
    target.store(gl.where(rows == cols, wide + omega, wide).to(view.dtype))


@gluon.jit
def send(flags: gl.constexpr, result, blocks, number, batch, row, column):
    """Store a block of D or Q: from registers in eights, or by the copy engine, which a program has to wait for."""
    if flags.tall == 1 and flags.in_eights:
        _send_eights(result, block(blocks, number), batch, row, column)
    else:
        store(result[0], [batch, row, column], blocks.index(number))


@gluon.jit
def _send_eights(result, view, batch, row, column):
    desc, pointer = result
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, SIDE, gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, SIDE, gl.SliceLayout(0, layout))[None, :]
    # whole eights, as the copy engine requires and the compiler cannot know
    stride = desc.strides[1] // 8 * 8
    first = gl.multiple_of(pointer + batch.to(gl.int64) * desc.strides[0] + row * stride + column, 16)
    rows, columns = desc.shape[1] - row, gl.multiple_of(desc.shape[2] - column, 8)
    gl.store(first + (i * stride + j), view.load(layout), mask=(i < rows) & (j < columns))


@gluon.jit
def _send_mirrored(flags: gl.constexpr, result, blocks, slot, mirror, batch, row, column):
    """Store a consumer's rows of a tile below the diagonal, and their mirror image, which is in slot ``mirror``."""
    for i in gl.static_range(flags.tall):
        send(flags, result, blocks, 2 * slot + i, batch, row, column + i * SIDE)
        send(flags, result, blocks, 2 * mirror + i, batch, column + i * SIDE, row)


@gluon.jit
def whole_tile(ME: gl.constexpr, where, descs, ring, K, numbers, flags: gl.constexpr):
    a_blocks, b_blocks = ring[0], ring[1]
    d_result, q_result = descs[3], descs[4]
    batch, row, column = where[0], where[2] + ME * SIDE, where[3]
    acc, step = _multiply(ME, ring, K, flags)
    numbers = with_scale(numbers, batch, K, flags)
    if flags.symmetric:
        blocks = a_blocks if ME == 0 else b_blocks
        slot, next_slot = step % flags.stages, (step + 1) % flags.stages
        await_place(ring, step, flags.has_c, flags.stages)
        view = wide(blocks, flags.deep * slot, flags.tall * SIDE, flags.deep * flags.stages)
        d, low = finish(acc, view, numbers, flags)
        await_free(ring, step + 1, flags.stages)
        if flags.tall == 1:
            mirror = block(blocks, 2 * next_slot).permute((1, 0))
        else:
            mirror = tall(blocks, next_slot, flags.stages).permute((1, 0))
        mirror.store(d)
        fence_async_shared()
        barrier()
        _send_mirrored(flags, d_result, blocks, slot, next_slot, batch, row, column)
        if flags.has_q:
            _send_mirrored(flags, q_result, blocks, slot, next_slot, batch, row, column)
        if flags.low:
            _await_sent()
            view.store(low)
            mirror.store(low)
            fence_async_shared()
            barrier()
            _send_mirrored(flags, q_result, blocks, slot, next_slot, batch, row, column)
    else:
        # each consumer's rows of C come in a step of their own
        slot = (step + ME) % flags.stages
        await_place(ring, step + ME, flags.has_c, flags.stages)
        view = wide(b_blocks, flags.deep * slot, flags.broad * SIDE, flags.deep * flags.stages)
        first = flags.deep * flags.broad * slot
        if flags.apart:
            acc = _put_apart(acc, q_result, batch, row, column)
        _d, low = finish(acc, view, numbers, flags)
        fence_async_shared()
        barrier()
        for i in gl.static_range(flags.broad):
            send(flags, d_result, b_blocks, first + i, batch, row, column + i * SIDE)
        if flags.low:
            _await_sent()
            view.store(low)
            fence_async_shared()
            barrier()
            for i in gl.static_range(flags.broad):
                send(flags, q_result, b_blocks, first + i, batch, row, column + i * SIDE)


@gluon.jit
def half_tile(where, descs, ring, K, numbers, flags: gl.constexpr):
    blocks = ring[1]
    d_result, q_result = descs[3], descs[4]
    batch, row, column = where[0], where[2], where[3]
    acc, step = _multiply(0, ring, K, flags)
    numbers = with_scale(numbers, batch, K, flags)
    # blocks between this tile's first one and the diagonal: none above it, one across it, more below
    below = (row - column) // SIDE
    slot, next_slot, third = step % flags.stages, (step + 1) % flags.stages, (step + 2) % flags.stages
    await_place(ring, step, flags.has_c, flags.stages)
    view = wide(blocks, flags.deep * slot, 2 * SIDE, flags.deep * flags.stages)
    d, _low = finish(acc, view, numbers, flags)
    place, mirror, shifted = 2 * flags.deep * slot, 2 * flags.deep * next_slot, 2 * flags.deep * third
    if below < 2:
        if not flags.same:
            symmetrize(block(blocks, place + below))
        if flags.has_q:
            await_free(ring, step + 2, flags.stages)
            _shift(block(blocks, place + below), block(blocks, shifted), numbers[2])
    await_free(ring, step + 1, flags.stages)
    tall(blocks, flags.deep * next_slot, flags.deep * flags.stages).permute((1, 0)).store(d)
    fence_async_shared()
    barrier()
    for i in gl.static_range(2):
        if below >= i:
            send(flags, d_result, blocks, place + i, batch, row, column + i * SIDE)
            if flags.has_q:
                send(flags, q_result, blocks, shifted if below == i else place + i, batch, row, column + i * SIDE)
        if below > i:
            send(flags, d_result, blocks, mirror + i, batch, column + i * SIDE, row)
            if flags.has_q:
                send(flags, q_result, blocks, mirror + i, batch, column + i * SIDE, row)


@gluon.jit
def lower_half(where, descs, ring, K, numbers, flags: gl.constexpr):
    blocks = ring[1]
    d_result, q_result = descs[3], descs[4]
    batch, first, row = where[0], where[2], where[2] + SIDE
    a_blocks, b_blocks = ring[0], ring[1]
    acc, step = multiply_rows(a_blocks, 2, 1, a_blocks if flags.same else b_blocks, ring, K, flags)
    numbers = with_scale(numbers, batch, K, flags)
    left = 2 * (step % flags.stages)
    mirror, shifted = 2 * ((step + 1) % flags.stages), 2 * ((step + 2) % flags.stages)
    await_place(ring, step, flags.has_c, flags.stages)
    view = wide(blocks, step % flags.stages, 2 * SIDE, flags.stages)
    _d, low = finish(acc, view, numbers, flags)
    if not flags.same:
        symmetrize(block(blocks, left + 1))
    barrier()
    await_free(ring, step + 1, flags.stages)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    block(blocks, mirror).permute((1, 0)).store(block(blocks, left).load(layout))
    if flags.has_q:
        await_free(ring, step + 2, flags.stages)
        _shift(block(blocks, left + 1), block(blocks, shifted), numbers[2])
    fence_async_shared()
    barrier()
    send(flags, d_result, blocks, left, batch, row, first)
    send(flags, d_result, blocks, left + 1, batch, row, row)
    send(flags, d_result, blocks, mirror, batch, first, row)
    if flags.has_q:
        send(flags, q_result, blocks, left, batch, row, first)
        send(flags, q_result, blocks, shifted, batch, row, row)
        send(flags, q_result, blocks, mirror, batch, first, row)
    if flags.low:
        _await_sent()
        view.store(low)
        barrier()
        block(blocks, mirror).permute((1, 0)).store(block(blocks, left).load(layout))
        fence_async_shared()
        barrier()
        send(flags, q_result, blocks, left, batch, row, first)
        send(flags, q_result, blocks, left + 1, batch, row, row)
        send(flags, q_result, blocks, mirror, batch, first, row)


@gluon.jit
def corner(where, descs, ring, K, numbers, flags: gl.constexpr):
    blocks = ring[0]
    d_result, q_result = descs[3], descs[4]
    batch, _b_batch, row, _column, quarter, other_row, other_column = where
    acc, other, step = _multiply_corner(ring, quarter, K, flags)
    numbers = with_scale(numbers, batch, K, flags)
    place = 2 * (step % flags.stages)
    mirror, shifted = 2 * ((step + 1) % flags.stages), 2 * ((step + 2) % flags.stages)
    await_place(ring, step, flags.has_c, flags.stages)
    _d, low = finish(acc, block(blocks, place), numbers, flags)
    if not flags.same:
        symmetrize(block(blocks, place))
    if flags.has_q:
        await_free(ring, step + 2, flags.stages)
        _shift(block(blocks, place), block(blocks, shifted), numbers[2])
    if flags.banded:
        e, other_low = finish(other, block(blocks, place + 1), numbers, flags)
        if quarter == 1:
            await_free(ring, step + 1, flags.stages)
            block(blocks, mirror).permute((1, 0)).store(e)
        elif flags.has_q:
            _shift(block(blocks, place + 1), block(blocks, shifted + 1), numbers[2])
    fence_async_shared()
    barrier()
    send(flags, d_result, blocks, place, batch, row, row)
    if flags.has_q:
        send(flags, q_result, blocks, shifted, batch, row, row)
    if flags.banded:
        send(flags, d_result, blocks, place + 1, batch, other_row, other_column)
        if quarter == 1:
            send(flags, d_result, blocks, mirror, batch, other_column, other_row)
            if flags.has_q:
                send(flags, q_result, blocks, place + 1, batch, other_row, other_column)
                send(flags, q_result, blocks, mirror, batch, other_column, other_row)
        elif flags.has_q:
            send(flags, q_result, blocks, shifted + 1, batch, other_row, other_column)
    if flags.low:
        _await_sent()
        block(blocks, place).store(low)
        if flags.banded:
            block(blocks, place + 1).store(other_low)
            if quarter == 1:
                block(blocks, mirror).permute((1, 0)).store(other_low)
        fence_async_shared()
        barrier()
        send(flags, q_result, blocks, place, batch, row, row)
        if flags.banded:
            send(flags, q_result, blocks, place + 1, batch, other_row, other_column)
            if quarter == 1:
                send(flags, q_result, blocks, mirror, batch, other_column, other_row)
