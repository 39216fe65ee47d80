"""Tiles of a parameter's matrices inside Triton kernels: addresses, masks, and sums of squares over lines.

X always has its short side first, so the tiles of a matrix with more lines than elements a line are transposed on the
way. Tables tell the compiler nothing, and without a promise it loads element by element; ALIGNED promises addresses in
multiples of 16 bytes, strides and sizes of 8 elements.

Sums of squares are formed relative to a tile's largest power of two and added in fp64, so entries of 1e±30 neither
vanish nor overflow; every order of addition is fixed.
"""

from __future__ import annotations

from optim_kernels._muon_table import (
    FIRST_LINE,
    FIRST_TILE,
    INNER,
    INNER_TILES,
    NUM_FIELDS,
    OUTER,
    OUTER_TILES,
    ROWS_ARE_INNER,
    STRIDE,
    TILE,
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
    pointer = tl.load(record + field).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def x_offsets(record, first_outer, first_inner, ALIGNED: tl.constexpr):
    """Offsets and mask of a tile in X, [TILE, TILE] with X's short side first, and whether the tile is transposed."""
    outer_size, inner_size = sizes(record, ALIGNED)
    transposed = outer_size > inner_size
    row = tl.where(transposed, first_inner, first_outer) + tl.arange(0, TILE)
    column = tl.where(transposed, first_outer, first_inner) + tl.arange(0, TILE)
    stride = tl.multiple_of(tl.load(record + X_STRIDE), 8)
    rows = tl.where(transposed, inner_size, outer_size)
    columns = tl.where(transposed, outer_size, inner_size)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    return row.to(tl.int64)[:, None] * stride + column[None, :], mask, transposed


@triton.jit
def load_x(record, field: tl.constexpr, first_outer, first_inner, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """A tile of X in fp32, in the storage's order."""
    offsets, mask, transposed = x_offsets(record, first_outer, first_inner, ALIGNED)
    x = tl.load(pointer_in(record, field, dtype, True) + offsets, mask=mask, other=0.0)
    if transposed:
        x = tl.trans(x)
    return x.to(tl.float32)


@triton.jit
def store_x(record, field: tl.constexpr, first_outer, first_inner, x, ALIGNED: tl.constexpr):
    """Store a tile that is in the storage's order to X, which rounded values ``x`` have the dtype of."""
    offsets, mask, transposed = x_offsets(record, first_outer, first_inner, ALIGNED)
    pointers = pointer_in(record, field, x.dtype, True) + offsets
    if transposed:
        x = tl.trans(x)
    tl.store(pointers, x, mask=mask)


@triton.jit
def line_sums(u, rows_are_inner):
    """Σ u² over each of the tile's rows (the matrix's rows, not the storage's), in fp64; [TILE]."""
    largest = tl.max(tl.abs(u))
    # the exponent of the largest entry: 1 where it is zero, subnormal, infinite or NaN; its inverse is a float too
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.where((bits == 0) | (bits == 0x7F800000), 0x3F800000, tl.minimum(bits, 0x7E800000))
    unit = bits.to(tl.float32, bitcast=True)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    squares = (u * inverse) * (u * inverse)
    if rows_are_inner:
        sums = tl.sum(squares, axis=0)
    else:
        sums = tl.sum(squares, axis=1)
    return sums.to(tl.float64) * unit.to(tl.float64) * unit.to(tl.float64)


@triton.jit
def lines_are_inner(record, BY_ROWS: tl.constexpr):
    """Whether the inner index numbers the lines: the matrix's rows (BY_ROWS), or its longer side (ties: rows)."""
    rows_are_inner = tl.load(record + ROWS_ARE_INNER) != 0
    if BY_ROWS:
        return rows_are_inner
    outer, inner = tl.load(record + OUTER), tl.load(record + INNER)
    return (inner > outer) | ((inner == outer) & rows_are_inner)


@triton.jit
def num_lines(record, BY_ROWS: tl.constexpr):
    """How many lines the matrix has."""
    inner = lines_are_inner(record, BY_ROWS)
    return tl.where(inner, tl.load(record + INNER), tl.load(record + OUTER))


@triton.jit
def factor_tile(record, factors, first_outer, first_inner, BY_ROWS: tl.constexpr):
    """Factors of the tile's lines, to be broadcast over the tile: [TILE, 1] or [1, TILE], as a full tile."""
    inner_lines = lines_are_inner(record, BY_ROWS)
    line = tl.where(inner_lines, first_inner, first_outer) + tl.arange(0, TILE)
    factor = tl.load(factors + tl.load(record + FIRST_LINE) + line, mask=line < num_lines(record, BY_ROWS), other=0.0)
    by_inner = tl.broadcast_to(factor[None, :], (TILE, TILE))
    by_outer = tl.broadcast_to(factor[:, None], (TILE, TILE))
    return tl.where(inner_lines, by_inner, by_outer)


@triton.jit
def lines_kernel(table, line_map, sums, lines, BY_ROWS: tl.constexpr):
    """Add a block of lines over the tiles that they cross, in order. Map: (matrix, number of the block)."""
    entry = line_map + tl.program_id(0).to(tl.int64) * 2
    matrix, block = tl.load(entry).to(tl.int64), tl.load(entry + 1).to(tl.int64)
    record = table + matrix * NUM_FIELDS
    inner_lines = lines_are_inner(record, BY_ROWS)
    outer_tiles, inner_tiles = tl.load(record + OUTER_TILES), tl.load(record + INNER_TILES)
    count = tl.where(inner_lines, outer_tiles, inner_tiles)
    step = tl.where(inner_lines, inner_tiles, 1)
    start = tl.load(record + FIRST_TILE) + tl.where(inner_lines, block, block * inner_tiles)
    line = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float64)
    if block < tl.where(inner_lines, inner_tiles, outer_tiles):
        for tile in range(count):
            total += tl.load(sums + (start + tile * step) * TILE + line)
    tl.store(lines + tl.load(record + FIRST_LINE) + block * TILE + line, total)
