"""Tiles of a parameter's matrices inside Triton kernels: addresses, masks, and sums of squares.

X always has its short side first, so the tiles of a matrix with more lines than elements a line are transposed when X
is loaded or stored. Numbers from a table carry no alignment, and without it the compiler loads element by element;
ALIGNED promises that addresses are multiples of 16 bytes, strides and sizes of 8 elements.

Sums of squares are formed relative to a tile's largest power of two and added in fp64, so entries of 1e±30 neither
vanish nor overflow; every order of addition is fixed.
"""

from __future__ import annotations

from optim_kernels._kernels.muon_table import (
    FIRST_LINE,
    INNER,
    OUTER,
    PANEL,
    ROWS_ARE_INNER,
    STRIDE,
    TILE,
    X_COLUMNS,
    X_PANEL,
    X_STRIDE,
)
from optim_kernels._triton import tl, triton


@triton.jit
def tile_of(tile_map):
    """The matrix of this program's tile, and the tile's first outer and inner index."""
    entry = tile_map + tl.program_id(0).to(tl.int64) * 3
    first_outer = tl.multiple_of(tl.load(entry + 1), TILE)
    first_inner = tl.multiple_of(tl.load(entry + 2), TILE)
    return tl.load(entry).to(tl.int64), first_outer, first_inner


@triton.jit
def sizes(record, ALIGNED: tl.constexpr):
    """The matrix's outer and inner size; aligned ones are multiples of 8."""
    outer, inner = tl.load(record + OUTER), tl.load(record + INNER)
    if ALIGNED:
        outer = tl.multiple_of(outer, 8)
        inner = tl.multiple_of(inner, 8)
    return outer, inner


@triton.jit
def stride_of(record, ALIGNED: tl.constexpr):
    """Elements from one stored line to the next; aligned ones are multiples of 8."""
    stride = tl.load(record + STRIDE)
    if ALIGNED:
        stride = tl.multiple_of(stride, 8)
    return stride


@triton.jit
def tile_offsets(
    record,
    first_outer,
    first_inner,
    ALIGNED: tl.constexpr,
    LINES: tl.constexpr = TILE,
    LENGTH: tl.constexpr = TILE,
):
    """Element offsets of a tile in a stored tensor, and the mask of what exists; [LINES, LENGTH]."""
    outer_size, inner_size = sizes(record, ALIGNED)
    outer = first_outer + tl.arange(0, LINES)
    inner = first_inner + tl.arange(0, LENGTH)
    mask = (outer < outer_size)[:, None] & (inner < inner_size)[None, :]
    return outer.to(tl.int64)[:, None] * stride_of(record, ALIGNED) + inner[None, :], mask


@triton.jit
def pointer_in(record, field: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in a field of the record, of elements of ``dtype``."""
    return pointer_at(record + field, dtype, ALIGNED)


@triton.jit
def pointer_at(place, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The address that is stored at ``place``, of elements of ``dtype``."""
    pointer = tl.load(place).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _x_offsets(record, first_row, first_column, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of a piece of X [ROWS, COLUMNS], and their mask; the piece starts at a panel or lies in one."""
    stride = tl.multiple_of(tl.load(record + X_STRIDE), 8)
    panel = tl.multiple_of(tl.load(record + X_PANEL), 8)
    row, inside = first_row + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    column = first_column + inside + first_column // PANEL * (panel - PANEL)
    if COLUMNS > PANEL:
        column += inside // PANEL * (panel - PANEL)
    columns = tl.multiple_of(tl.load(record + X_COLUMNS), 8)
    mask = (row < rows)[:, None] & (first_column + inside < columns)[None, :]
    return row.to(tl.int64)[:, None] * stride + column[None, :], mask


@triton.jit
def load_x(
    record,
    field: tl.constexpr,
    first_outer,
    first_inner,
    dtype: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """A tile of X in fp32, in the storage's order."""
    outer_size, inner_size = sizes(record, ALIGNED)
    pointer = pointer_in(record, field, dtype, True)
    if outer_size > inner_size:
        offsets, mask = _x_offsets(record, first_inner, first_outer, inner_size, TILE, TILE)
        x = tl.trans(tl.load(pointer + offsets, mask=mask, other=0.0))
    else:
        offsets, mask = _x_offsets(record, first_outer, first_inner, outer_size, TILE, TILE)
        x = tl.load(pointer + offsets, mask=mask, other=0.0)
    return x.to(tl.float32)


@triton.jit
def store_x(record, field: tl.constexpr, first_outer, first_inner, x, ALIGNED: tl.constexpr):
    """Store a piece ``x``, in the storage's order and already rounded to X's dtype, to X."""
    outer_size, inner_size = sizes(record, ALIGNED)
    pointer = pointer_in(record, field, x.dtype, True)
    if outer_size > inner_size:
        _store_piece(record, pointer, first_inner, first_outer, inner_size, tl.trans(x))
    else:
        _store_piece(record, pointer, first_outer, first_inner, outer_size, x)


@triton.jit
def _store_piece(record, pointer, first_row, first_column, rows, x):
    offsets, mask = _x_offsets(record, first_row, first_column, rows, x.shape[0], x.shape[1])
    tl.store(pointer + offsets, x, mask=mask)


@triton.jit
def squares_along(u, axis: tl.constexpr):
    """Σ u² along an axis of a tile, in fp64."""
    largest = tl.max(tl.abs(u))
    # the largest entry's power of two, capped so that its inverse is a float too; 1 for zero, subnormal, infinite, NaN
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.where((bits == 0) | (bits == 0x7F800000), 0x3F800000, tl.minimum(bits, 0x7E800000))
    unit = bits.to(tl.float32, bitcast=True)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    sums = tl.sum((u * inverse) * (u * inverse), axis=axis)
    return sums.to(tl.float64) * unit.to(tl.float64) * unit.to(tl.float64)


@triton.jit
def lines_are_inner(record):
    """Whether the inner index numbers the lines of V: the longer side, rows of a square matrix."""
    outer, inner = tl.load(record + OUTER), tl.load(record + INNER)
    return (inner > outer) | ((inner == outer) & (tl.load(record + ROWS_ARE_INNER) != 0))


@triton.jit
def factor_tile(record, factors, first_outer, first_inner):
    """Factors of the tile's lines, as a full tile."""
    inner_lines = lines_are_inner(record)
    line = tl.where(inner_lines, first_inner, first_outer) + tl.arange(0, TILE)
    count = tl.maximum(tl.load(record + OUTER), tl.load(record + INNER))
    factor = tl.load(factors + tl.load(record + FIRST_LINE) + line, mask=line < count, other=0.0)
    by_inner = tl.broadcast_to(factor[None, :], (TILE, TILE))
    by_outer = tl.broadcast_to(factor[:, None], (TILE, TILE))
    return tl.where(inner_lines, by_inner, by_outer)
