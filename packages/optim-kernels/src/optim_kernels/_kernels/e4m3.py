"""Matrices rounded to 8 bits, as operands that the tensor cores multiply twice as fast: Y = e4m3(256 s X), and Yᵀ.

X is [batch, M, N] with rows of adjacent numbers, s a number of each matrix, read on the device, or 1. e4m3 has 4 bits
for the exponent and 3 for the digits, so that rounding is off by at most 1/16. With ‖s X‖ ≤ 1 no number of Y is too
large for it (448); numbers of s X down to 2⁻¹⁴ keep their digits, smaller ones become multiples of 2⁻¹⁷.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from optim_kernels._kernels.normalize import tile_at
from optim_kernels._newton_schulz.copy_engine import ALIGNMENT
from optim_kernels._newton_schulz.tiles import cdiv
from optim_kernels._triton import Launch, tl, triton

E4M3 = torch.float8_e4m3fn
# Y for an s X of 1. A power of two, which rounds nothing.
UNITS = 256.0
BLOCK_M, BLOCK_N = 64, 128
# Kept launches.
NUM_LAUNCHES = 256


@triton.jit(do_not_specialize=["scale"])
def e4m3_kernel(
    x,
    y,
    transposed,
    scale,
    batch_stride,
    row_stride,
    y_batch_stride,
    y_row_stride,
    t_batch_stride,
    t_row_stride,
    M,
    N,
    columns,
    HAS_SCALE: tl.constexpr,
    HAS_TRANSPOSED: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile, batch = tl.program_id(0), tl.program_id(1)
    at, exists = tile_at(x, batch, tile, columns, batch_stride, row_stride, 1, M, N, BLOCK_M, BLOCK_N)
    value = tl.load(at, mask=exists, other=0.0).to(tl.float32) * FACTOR
    if HAS_SCALE:
        value *= tl.load(scale + batch)
    narrow = value.to(tl.float8e4nv)
    at, exists = tile_at(y, batch, tile, columns, y_batch_stride, y_row_stride, 1, M, N, BLOCK_M, BLOCK_N)
    tl.store(at, narrow, mask=exists)
    if HAS_TRANSPOSED:
        # the same tile, whose columns are rows now
        at, exists = tile_at(transposed, batch, tile, columns, t_batch_stride, 1, t_row_stride, M, N, BLOCK_M, BLOCK_N)
        tl.store(at.T, narrow.T, mask=exists.T)


def empty_e4m3(batch: int, rows: int, columns: int, like: Tensor) -> Tensor:
    """Uninitialised ``[batch, rows, columns]`` in e4m3, whose rows the copy engine can read."""
    padded = cdiv(columns, ALIGNMENT) * ALIGNMENT
    return torch.empty(batch, rows, padded, dtype=E4M3, device=like.device)[..., :columns]


def to_e4m3(x: Tensor, scale: Tensor | None = None, *, with_transposed: bool = False) -> tuple[Tensor, Tensor]:
    """``256 scale x`` in e4m3 for ``x [batch, M, N]`` and ``scale [batch]`` in fp32, and its transpose if wanted."""
    batch, m, n = x.shape
    y = empty_e4m3(batch, m, n, x)
    transposed = empty_e4m3(batch, n, m, x) if with_transposed else y
    key = (x.shape, x.stride(), x.dtype, y.stride(), transposed.stride())
    launch, numbers = _launch(*key, scale is not None, with_transposed, x.device)
    launch((x, y, transposed, x if scale is None else scale), numbers)
    return y, transposed


@lru_cache(maxsize=NUM_LAUNCHES)
def _launch(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    _dtype: torch.dtype,
    y_strides: tuple[int, ...],
    t_strides: tuple[int, ...],
    has_scale: bool,
    has_transposed: bool,
    _device: torch.device,
) -> tuple[Launch, tuple[int, ...]]:
    """The launch for matrices like these, which stays on their device, and its numbers."""
    batch, m, n = shape
    columns = cdiv(n, BLOCK_N)
    constants = (has_scale, has_transposed, UNITS, BLOCK_M, BLOCK_N)
    launch = Launch(e4m3_kernel, (cdiv(m, BLOCK_M) * columns, batch, 1), constants)
    return launch, (*strides[:2], *y_strides[:2], *t_strides[:2], m, n, columns)
