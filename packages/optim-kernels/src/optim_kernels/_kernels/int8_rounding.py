"""X rounded to int8 for the first step of Newton–Schulz (`_newton_schulz.int8_start`), by rows and by columns:

    limits_kernel      the largest |x_ik| of each row and column, and Σ_k x_ik² of each row, added by tiles
    rounding_kernel    X₈ by rows, and X₈' by columns, which it writes transposed; the diagonal of A = σ²XXᵀ
    diagonal_kernel    the diagonal of S = bA + cA², once there is A

    x_ik ≈ u_i q_ik      q_ik = ⌊x_ik / u_i + r_ik⌋,  0 ≤ r_ik < 1,  u_i = max_k |x_ik| / 126

r is a fixed matrix of numbers that look random, another one for A, S and X either way. So rounding is right on average,
and what it does to one number has nothing to do with what it does to others. Without r equal numbers would all be off
by the same, and with them a singular value.

A and S are rounded where they are made, tile by tile (`_hopper.int8_kernel`), when the largest number of a row is not
known. |a_ij| ≤ √(a_ii a_jj) takes its place, and |s_ij| ≤ √(s_ii s_jj), for -S, too, is positive semidefinite:

    unit of A's row i      √(a_ii max_j a_jj) / 122
    unit of S's row i      √(s_ii max_j s_jj) / 122        of their sizes

What rounding X added may bring a number above its bound, by some hundredths at worst; so 122 instead of 126. Random
rows stay far below, and lose digits beside the identity, which outweighs them in any case.

X is [M, N] with rows of adjacent numbers. A row with a NaN or an infinity becomes some whole numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from optim_kernels._newton_schulz.copy_engine import ALIGNMENT, empty_matrices
from optim_kernels._newton_schulz.tiles import cdiv
from optim_kernels._triton import Launch, tl, triton

# The largest |q|, of a row that is rounded by its largest number, and by a bound, above which noise may bring it.
LARGEST, MOST_BOUNDED = map(tl.constexpr, (126.0, 122.0))
# Added to a number below 2^7, this leaves 8 binary digits behind the point, as the last of the sum's bits.
POINT = tl.constexpr(1.5 * 2**15)
# What tells the random digits of A and S from those of X.
A_SEED, S_SEED = map(tl.constexpr, (1, 2))
# Tiles in which limits are sought, and the side of those that are rounded.
ROWS, COLUMNS = 32, 64
SIDE = 64
# Rows of a program of diagonal_kernel, parts of sums that are added at a time, and the side of the tiles of A that have
# a part each.
ADDED, PARTS, A_SIDE = 32, 32, 128
# Kept launches of each kernel.
NUM_LAUNCHES = 256


class Int8Matrix(NamedTuple):
    """What the first step needs of X [M, N]: numbers in int8, and vectors in fp32.

    Diagonals are those of A = σ²XXᵀ and of S, roots those of their numbers' sizes, and the largest is of these sizes.
    Of S all are written by `add_diagonal`, from what the product that makes A has written to ``partials``.
    """

    by_rows: Tensor  # [1, M, N]
    by_columns: Tensor  # transposed [1, N, M]
    row_units: Tensor  # of σX [M]
    column_units: Tensor  # of X [N]
    a_diagonal: Tensor  # [M]
    a_roots: Tensor  # [M]
    a_largest: Tensor  # [1]
    s_diagonal: Tensor  # [M]
    s_roots: Tensor  # [M]
    s_largest: Tensor  # [1]
    partials: Tensor  # sums of squares of A's rows, by tiles [tiles, M]


@triton.jit
def random_bits(row, column, seed):
    """Two bytes that look random, the upper ones, of numbers (row, column)."""
    bits = (row.to(tl.uint32) * 0x9E3779B1) ^ (column.to(tl.uint32) * 0x85EBCA77 + seed * 0x27D4EB2F)
    return (bits ^ (bits >> 15)) * 0x2C1B3C6D


@triton.jit
def rounded(value, inverse, bits, BYTE: tl.constexpr):
    """⌊y + r⌋ as int8, y = value · inverse to the nearest 1/256, |y| < 127; r = 0, 1/256 … 255/256 from a byte."""
    r = (bits >> 24) if BYTE == 3 else (bits >> 16) & 255
    fixed = (value * inverse + POINT).to(tl.uint32, bitcast=True) + r
    return (fixed >> 8).to(tl.int8)


@triton.jit
def reciprocal(unit):
    """1 / unit, and 0 for the unit of a row of zeros."""
    return tl.where(unit > 0.0, 1.0 / tl.where(unit > 0.0, unit, 1.0), 0.0)


@triton.jit(do_not_specialize=["columns"])
def limits_kernel(
    x,
    limits,
    squares,
    row_stride,
    M,
    N,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile: its part of the rows' sums of squares, and the largest numbers, as bits of fp32 that begin as zeros."""
    tile = tl.program_id(0)
    row = (tile // columns) * ROWS + tl.arange(0, ROWS)
    column = (tile % columns) * COLUMNS + tl.arange(0, COLUMNS)
    at = x + row.to(tl.int64)[:, None] * row_stride + column[None, :]
    value = tl.load(at, mask=(row < M)[:, None] & (column < N)[None, :], other=0.0).to(tl.float32)
    tl.store(squares + (tile % columns) * M + row, tl.sum(value * value, 1), mask=row < M)
    size = tl.abs(value)
    # which program comes first makes no difference
    of_rows, of_columns = tl.max(size, 1).to(tl.int32, bitcast=True), tl.max(size, 0).to(tl.int32, bitcast=True)
    tl.atomic_max(limits + row, of_rows, mask=row < M, sem="relaxed")
    tl.atomic_max(limits + M + column, of_columns, mask=column < N, sem="relaxed")


@triton.jit
def _added(partials, row, M, parts, PARTS: tl.constexpr):
    """The sums of these rows of ``partials [parts, M]``, PARTS at a time."""
    total = tl.zeros(row.shape, tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        at = partials + part[:, None].to(tl.int64) * M + row[None, :]
        total += tl.sum(tl.load(at, mask=(part < parts)[:, None] & (row < M)[None, :], other=0.0), 0)
    return total


@triton.jit(do_not_specialize=["scale", "columns"])
def rounding_kernel(
    x,
    scale,
    limits,
    squares,
    by_rows,
    by_columns,
    row_units,
    column_units,
    diagonal,
    roots,
    row_stride,
    by_rows_stride,
    by_columns_stride,
    M,
    N,
    columns,
    parts,
    HAS_SCALE: tl.constexpr,
    LARGEST: tl.constexpr,
    PARTS: tl.constexpr,
    SIDE: tl.constexpr,
):
    """One tile; the first ones of a row or column also write what belongs to it."""
    tile = tl.program_id(0)
    row = (tile // columns) * SIDE + tl.arange(0, SIDE)
    column = (tile % columns) * SIDE + tl.arange(0, SIDE)
    at = x + row.to(tl.int64)[:, None] * row_stride + column[None, :]
    value = tl.load(at, mask=(row < M)[:, None] & (column < N)[None, :], other=0.0).to(tl.float32)
    row_unit = tl.load(limits + row, mask=row < M, other=0).to(tl.float32, bitcast=True) / LARGEST
    column_unit = tl.load(limits + M + column, mask=column < N, other=0).to(tl.float32, bitcast=True) / LARGEST
    bits = random_bits(row[:, None], column[None, :], 0)
    at = by_rows + row.to(tl.int64)[:, None] * by_rows_stride + column[None, :]
    by_row = rounded(value, reciprocal(row_unit)[:, None], bits, 3)
    tl.store(at, by_row, mask=(row < M)[:, None] & (column < N)[None, :])
    at = by_columns + column.to(tl.int64)[:, None] * by_columns_stride + row[None, :]
    by_column = rounded(value, reciprocal(column_unit)[None, :], bits, 2)
    tl.store(at, by_column.T, mask=(column < N)[:, None] & (row < M)[None, :])
    if tile // columns == 0:
        tl.store(column_units + column, column_unit, mask=column < N)
    if tile % columns == 0:
        factor = tl.load(scale) if HAS_SCALE else 1.0
        tl.store(row_units + row, row_unit * factor, mask=row < M)
        total = _added(squares, row, M, parts, PARTS)
        # in this order neither overflows
        total = total * factor * factor
        tl.store(diagonal + row, total, mask=row < M)
        tl.store(roots + row, tl.sqrt(total), mask=row < M)
        tl.atomic_max(limits + M + N, tl.max(total, 0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def diagonal_kernel(
    partials,
    a_diagonal,
    diagonal,
    roots,
    largest,
    M,
    parts,
    b,
    c,
    PARTS: tl.constexpr,
    ADDED: tl.constexpr,
):
    """s_ii = b a_ii + c Σ_j a_ij² of ADDED rows; ``partials [parts, M]``: parts of the sum."""
    row = tl.program_id(0) * ADDED + tl.arange(0, ADDED)
    squares = _added(partials, row, M, parts, PARTS)
    total = b * tl.load(a_diagonal + row, mask=row < M, other=0.0) + c * squares
    size = tl.abs(total)
    tl.store(diagonal + row, total, mask=row < M)
    tl.store(roots + row, tl.sqrt(size), mask=row < M)
    tl.atomic_max(largest, tl.max(size, 0).to(tl.int32, bitcast=True), sem="relaxed")


def nbytes_of_int8(m: int, n: int) -> int:
    """The most bytes that an `Int8Matrix` [m, n] takes."""
    row, column = (cdiv(side, ALIGNMENT) * ALIGNMENT for side in (m, n))
    partials = max(cdiv(m, A_SIDE), cdiv(n, COLUMNS))
    vectors = (5 + partials) * row + (m + n + 2) + n
    return m * column + n * row + torch.float32.itemsize * vectors


def to_int8(x: Tensor, scale: Tensor | None = None) -> Int8Matrix:
    """``x [1, M, N]`` rounded; X = σx with ``scale``, σ ``[1]``."""
    _, m, n = x.shape
    by_rows = empty_matrices(1, m, n, like=x.new_empty(0, dtype=torch.int8))
    by_columns = empty_matrices(1, n, m, like=by_rows)
    # rows of 16 bytes
    vectors = x.new_empty(5 + max(cdiv(m, A_SIDE), cdiv(n, COLUMNS)), cdiv(m, 4) * 4, dtype=torch.float32)
    row_units, a_diagonal, a_roots, s_diagonal, s_roots = vectors[:5, :m].unbind()
    partials = vectors[5:].flatten()
    # of rows and columns, and the largest on A's and S's diagonals: the bits of fp32
    limits = x.new_zeros(m + n + 2, dtype=torch.int32)
    column_units = x.new_empty(n, dtype=torch.float32)
    key = x.shape[1:], x.stride(1), by_rows.stride(1), by_columns.stride(1), x.dtype, scale is not None, x.device
    (find_limits, of_limits), (rounding, of_rounding) = _launches(*key)
    find_limits((x, limits, partials), of_limits)
    of_x = x, a_diagonal if scale is None else scale, limits, partials
    rounding((*of_x, by_rows, by_columns, row_units, column_units, a_diagonal, a_roots), of_rounding)
    largest = limits.view(torch.float32)[m + n :]
    of_a, of_s = (a_diagonal, a_roots, largest[:1]), (s_diagonal, s_roots, largest[1:])
    return Int8Matrix(by_rows, by_columns, row_units, column_units, *of_a, *of_s, partials)


def add_diagonal(x: Int8Matrix, b: float, c: float) -> None:
    """Find S's diagonal, its roots and the largest."""
    m, largest = len(x.a_diagonal), x.s_largest.view(torch.int32)
    launch = _diagonal_launch(m, largest.data_ptr() % ALIGNMENT, largest.device)
    launch((x.partials, x.a_diagonal, x.s_diagonal, x.s_roots, largest), (m, cdiv(m, A_SIDE), b, c))


@lru_cache(maxsize=NUM_LAUNCHES)
def _launches(
    shape: tuple[int, int],
    row_stride: int,
    by_rows_stride: int,
    by_columns_stride: int,
    _dtype: torch.dtype,
    has_scale: bool,
    _device: torch.device,
) -> tuple[tuple[Launch, tuple[int, ...]], tuple[Launch, tuple[int, ...]]]:
    """The launches for a matrix like this, which stay on its device, each with its numbers."""
    m, n = shape
    columns = cdiv(n, COLUMNS)
    limits = Launch(limits_kernel, cdiv(m, ROWS) * columns, (ROWS, COLUMNS), num_warps=1)
    of_limits = row_stride, m, n, columns
    constants = (has_scale, LARGEST.value, PARTS, SIDE)
    parts, columns = columns, cdiv(n, SIDE)
    rounding = Launch(rounding_kernel, cdiv(m, SIDE) * columns, constants)
    return (limits, of_limits), (rounding, (row_stride, by_rows_stride, by_columns_stride, m, n, columns, parts))


@lru_cache(maxsize=NUM_LAUNCHES)
def _diagonal_launch(m: int, _alignment: int, _device: torch.device) -> Launch:
    """The launch for matrices with m rows, which stays on their device."""
    return Launch(diagonal_kernel, cdiv(m, ADDED), (PARTS, ADDED))
