"""Matrices rounded to int8 by rows, as operands that the tensor cores multiply twice as fast:

    x_ij ≈ u_i q_ij      u_i = max_j |x_ij| / 126,  q_ij = x_ij / u_i + r_ij rounded to the nearest,  |r_ij| ≤ 1/2

r is a fixed matrix of numbers that look random, another one for each seed. So rounding is right on average, and what it
does to one number has nothing to do with what it does to others. Without r equal numbers would all be off by the same,
and with them a singular value (`_newton_schulz.int8_start`).

x is [batch, M, N] with rows of adjacent numbers. A row with a NaN or an infinity becomes some whole numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from optim_kernels._newton_schulz.copy_engine import empty_matrices
from optim_kernels._newton_schulz.tiles import cdiv
from optim_kernels._triton import Launch, tl, triton

# The largest |q| but for r.
LARGEST = tl.constexpr(126.0)
# To a number below 2^22, adding this rounds it; the last bits of the sum are then those of the whole number.
ROUNDER = tl.constexpr(1.5 * 2**23)
# Numbers that a program rounds, in registers, unless a row has more.
NUMBERS = 8192
NUM_WARPS = 8
# Side of the tiles that are transposed.
SIDE = 64
# Kept launches of each kernel.
NUM_LAUNCHES = 256


class Int8Rows(NamedTuple):
    """A matrix's ``numbers`` q [batch, M, N] in int8, ``units`` u [batch, M] and ``squares`` Σ_j x_ij² [batch, M].

    The last two are fp32.
    """

    numbers: Tensor
    units: Tensor
    squares: Tensor


@triton.jit
def _read(x, row, column, M, N):
    """A block of x in fp32."""
    return tl.load(x + column[None, :], mask=(row < M)[:, None] & (column < N)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _round(value, inverse, numbers, row, column, M, N, seed, ROUNDER: tl.constexpr):
    """Store a block of q; ``inverse``: 1/u of its rows."""
    of_column = column.to(tl.uint32) * 0x85EBCA77 + seed.to(tl.uint32) * 0x27D4EB2F
    bits = (row.to(tl.uint32) * 0x9E3779B1)[:, None] ^ of_column[None, :]
    bits = (bits ^ (bits >> 15)) * 0x2C1B3C6D
    # the digits of a number from 1 to 2
    r = (bits >> 9 | 0x3F800000).to(tl.float32, bitcast=True) - 1.5
    rounded = (value * inverse[:, None] + r + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)
    tl.store(numbers + column[None, :], rounded, mask=(row < M)[:, None] & (column < N)[None, :])


@triton.jit(do_not_specialize=["seed"])
def int8_kernel(
    x,
    numbers,
    units,
    squares,
    batch_stride,
    row_stride,
    numbers_batch_stride,
    numbers_row_stride,
    M,
    N,
    seed,
    LARGEST: tl.constexpr,
    ROUNDER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """ROWS rows, COLUMNS at a time; IS_WHOLE: these are all of a row."""
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    x += batch * batch_stride + row.to(tl.int64)[:, None] * row_stride
    numbers += batch * numbers_batch_stride + row.to(tl.int64)[:, None] * numbers_row_stride
    value = _read(x, row, column, M, N)
    largest, total = tl.max(tl.abs(value), 1), tl.sum(value * value, 1)
    if not IS_WHOLE:
        for first in range(COLUMNS, N, COLUMNS):
            more = _read(x, row, first + column, M, N)
            largest = tl.maximum(largest, tl.max(tl.abs(more), 1))
            total += tl.sum(more * more, 1)
    tl.store(units + batch * M + row, largest / LARGEST, mask=row < M)
    tl.store(squares + batch * M + row, total, mask=row < M)
    inverse = tl.where(largest > 0.0, LARGEST / tl.where(largest > 0.0, largest, 1.0), 0.0)
    _round(value, inverse, numbers, row, column, M, N, seed, ROUNDER)
    if not IS_WHOLE:
        for first in range(COLUMNS, N, COLUMNS):
            more = _read(x, row, first + column, M, N)
            _round(more, inverse, numbers, row, first + column, M, N, seed, ROUNDER)


@triton.jit
def transpose_kernel(
    x, out, batch_stride, row_stride, out_batch_stride, out_row_stride, M, N, columns, SIDE: tl.constexpr
):
    """One tile."""
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = (tile // columns) * SIDE + tl.arange(0, SIDE)
    column = (tile % columns) * SIDE + tl.arange(0, SIDE)
    at = x + batch * batch_stride + row.to(tl.int64)[:, None] * row_stride + column[None, :]
    value = tl.load(at, mask=(row < M)[:, None] & (column < N)[None, :], other=0.0)
    at = out + batch * out_batch_stride + column.to(tl.int64)[:, None] * out_row_stride + row[None, :]
    tl.store(at, value.T, mask=(column < N)[:, None] & (row < M)[None, :])


def to_int8(x: Tensor, seed: int) -> Int8Rows:
    """``x [batch, M, N]`` rounded."""
    batch, m, n = x.shape
    numbers = empty_matrices(batch, m, n, like=x.new_empty(0, dtype=torch.int8))
    units, squares = torch.empty(2, batch, m, dtype=torch.float32, device=x.device)
    launch, sizes = _launch(x.shape, x.stride(), x.dtype, numbers.stride(), x.device)
    launch((x, numbers, units, squares), (*sizes, seed))
    return Int8Rows(numbers, units, squares)


def transposed(x: Tensor) -> Tensor:
    """``x [batch, M, N]`` with rows of adjacent numbers as a row-major ``[batch, N, M]``."""
    batch, m, n = x.shape
    out = empty_matrices(batch, n, m, like=x)
    launch, sizes = _transpose_launch(x.shape, x.stride(), x.dtype, out.stride(), x.device)
    launch((x, out), sizes)
    return out


@lru_cache(maxsize=NUM_LAUNCHES)
def _launch(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    _dtype: torch.dtype,
    numbers_strides: tuple[int, ...],
    _device: torch.device,
) -> tuple[Launch, tuple[int, ...]]:
    """The launch for matrices like these, which stays on their device, and its numbers but for the seed."""
    batch, m, n = shape
    columns = min(triton.next_power_of_2(n), NUMBERS)
    rows = NUMBERS // columns
    constants = (LARGEST.value, ROUNDER.value, rows, columns, n <= columns)
    launch = Launch(int8_kernel, (cdiv(m, rows), batch, 1), constants, num_warps=NUM_WARPS)
    return launch, (*strides[:2], *numbers_strides[:2], m, n)


@lru_cache(maxsize=NUM_LAUNCHES)
def _transpose_launch(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    _dtype: torch.dtype,
    out_strides: tuple[int, ...],
    _device: torch.device,
) -> tuple[Launch, tuple[int, ...]]:
    """The launch that transposes matrices like these, which stays on their device, and its numbers."""
    batch, m, n = shape
    columns = cdiv(n, SIDE)
    launch = Launch(transpose_kernel, (cdiv(m, SIDE) * columns, batch, 1), (SIDE,))
    return launch, (*strides[:2], *out_strides[:2], m, n, columns)
