"""The producer of `chain_kernel`: copies the operands of posted tiles into the ring.

A step is short, .3 µs, and one warp requests the blocks of all steps: whatever it decides in between makes the ring
shallower. So it decides once per tile, or where a row of a symmetric matrix goes on in its mirror image, and has a loop
without branches for each way to copy.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from optim_kernels._hopper.chain_panels import place_of
from optim_kernels._hopper.chain_tiles import GRAM, RECTANGLE
from optim_kernels._hopper.mail import fence_proxies, receive
from optim_kernels._hopper.pairs import join_pair, meet
from optim_kernels._hopper.ring import as_blocks, load
from optim_kernels._hopper.turns import BLOCK


@gluon.jit
def _empty_slot(ring, step, BYTES: gl.constexpr, flags: gl.constexpr):
    """The slot of a step, once it has been read, and its barrier, which opens when BYTES have arrived."""
    _blocks, _upright, ready, empty = ring
    slot = step % flags.stages
    full = ready.index(slot)
    mbarrier.wait(empty.index(slot), ((step // flags.stages) & 1) ^ 1)
    mbarrier.expect(full, BYTES)
    return slot, full


@gluon.jit
def _copy_square(descs, at, line, k, full, slot, ring, UPRIGHT: gl.constexpr):
    """Copy rows of a square matrix, or with UPRIGHT the columns that mirror them."""
    blocks, upright, _ready, _empty = ring
    if UPRIGHT:
        load(descs[1], [at, k, line], full, upright.index(slot))
    else:
        load(descs[0], [at, line, k], full, blocks.index(slot))


@gluon.jit
def _fill_squares(
    descs,
    place,
    ring,
    step,
    first,
    end,
    A_UPRIGHT: gl.constexpr,
    B_UPRIGHT: gl.constexpr,
    SINGLE: gl.constexpr,
    flags: gl.constexpr,
):
    """Fill the steps of A Bᵀ from ``first`` to ``end`` along K; return the step after them."""
    BYTES: gl.constexpr = descs[0].block_type.nbytes * (1 if SINGLE else 2)
    a, b, row, column = place
    for k in range(first, end, flags.depth):
        slot, full = _empty_slot(ring, step, BYTES, flags)
        _copy_square(descs, a, row, k, full, slot, ring, A_UPRIGHT)
        if not SINGLE:
            _copy_square(descs, b, column, k, full, slot + flags.stages, ring, B_UPRIGHT)
        step += 1
    return step


@gluon.jit
def _fill_grams(desc, place, ring, step, K, SINGLE: gl.constexpr, flags: gl.constexpr):
    """Fill the steps of X Xᵀ."""
    BYTES: gl.constexpr = desc.block_type.nbytes * (1 if SINGLE else 2)
    x, row, column = place
    blocks = ring[0]
    for k in range(0, K, flags.depth):
        slot, full = _empty_slot(ring, step, BYTES, flags)
        where, inside = place_of(x, k, flags.panels)
        load(desc, [where, row, inside], full, blocks.index(slot))
        if not SINGLE:
            load(desc, [where, column, inside], full, blocks.index(slot + flags.stages))
        step += 1
    return step


@gluon.jit
def _fill_with_x(descs, x_desc, place, ring, step, first, end, A_UPRIGHT: gl.constexpr, flags: gl.constexpr):
    """Fill the steps of A X from ``first`` to ``end`` along K; return the step after them."""
    BYTES: gl.constexpr = descs[0].block_type.nbytes + x_desc.block_type.nbytes
    a, where, row, inside = place
    upright = ring[1]
    for k in range(first, end, flags.depth):
        slot, full = _empty_slot(ring, step, BYTES, flags)
        _copy_square(descs, a, row, k, full, slot, ring, A_UPRIGHT)
        load(x_desc, [where, k, inside], full, upright.index(slot + flags.stages))
        step += 1
    return step


@gluon.jit
def _gram_tile_of(desc, place, ring, step, K, flags: gl.constexpr):
    _x, row, column = place
    if row == column:
        _fill_grams(desc, place, ring, step, K, True, flags)
    else:
        _fill_grams(desc, place, ring, step, K, False, flags)


@gluon.jit
def _gram_tile(descs, which, place, ring, step, K, flags: gl.constexpr):
    if which == 1:
        _gram_tile_of(descs[1], place, ring, step, K, flags)
    elif flags.panels:
        _gram_tile_of(descs[0], place, ring, step, K, flags)
    else:
        if which == 0:
            _gram_tile_of(descs[0], place, ring, step, K, flags)
        else:
            _gram_tile_of(descs[2], place, ring, step, K, flags)


@gluon.jit
def _tile_of_x(descs, x_desc, place, ring, step, K, of_a, flags: gl.constexpr):
    step = _fill_with_x(descs, x_desc, place, ring, step, 0, of_a, False, flags)
    _fill_with_x(descs, x_desc, place, ring, step, of_a, K, True, flags)


@gluon.jit
def _rectangular_tile(descs, x_descs, which, place, ring, step, K, of_a, flags: gl.constexpr):
    if which == 1:
        _tile_of_x(descs, x_descs[1], place, ring, step, K, of_a, flags)
    elif flags.panels:
        _tile_of_x(descs, x_descs[0], place, ring, step, K, of_a, flags)
    else:
        if which == 0:
            _tile_of_x(descs, x_descs[0], place, ring, step, K, of_a, flags)
        else:
            _tile_of_x(descs, x_descs[2], place, ring, step, K, of_a, flags)


@gluon.jit
def _square_tile(descs, place, ring, step, K, of_a, flags: gl.constexpr):
    a, b, row, column = place
    if (row == column) & (a == b):
        step = _fill_squares(descs, place, ring, step, 0, of_a, False, False, True, flags)
        _fill_squares(descs, place, ring, step, of_a, K, True, True, True, flags)
    else:
        of_b = gl.minimum(column + BLOCK, K)
        # in the order in which `chain_products` reads them
        step = _fill_squares(descs, place, ring, step, 0, gl.minimum(of_a, of_b), False, False, False, flags)
        step = _fill_squares(descs, place, ring, step, of_b, of_a, False, True, False, flags)
        step = _fill_squares(descs, place, ring, step, of_a, of_b, True, False, False, flags)
        _fill_squares(descs, place, ring, step, gl.maximum(of_a, of_b), K, True, True, False, flags)


@gluon.jit
def produce(operands, ring, mail, flags: gl.constexpr):
    square_desc, mirror_desc, gram_descs, right_descs = operands
    blocks, ready, empty = ring
    descs = (square_desc, mirror_desc)
    # blocks of a mirror image, and of X on the right: [K, rows] and [K, columns], not [rows, K] and [columns, K]
    slots = (blocks, as_blocks(blocks, mirror_desc, 2 * flags.stages), ready, empty)
    number = 0
    meetings = 0
    join_pair(number)
    job, _matrix, row, column, kind, step, a, b, x, _squares, K, of_a, meets = receive(mail, number, 1)
    while job >= 0:
        fence_proxies(job)
        if meets != 0:
            meetings = meet(meetings)
        if kind == GRAM:
            _gram_tile(gram_descs, a, (x, row, column), slots, step, K, flags)
        elif kind == RECTANGLE:
            where, inside = place_of(x, column, flags.panels)
            _rectangular_tile(descs, right_descs, b, (a, where, row, inside), slots, step, K, of_a, flags)
        else:
            _square_tile(descs, (a, b, row, column), slots, step, K, of_a, flags)
        number += 1
        job, _matrix, row, column, kind, step, a, b, x, _squares, K, of_a, meets = receive(mail, number, 1)
    join_pair(number)
