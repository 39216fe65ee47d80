"""The start of Newton–Schulz in two launches: X = G / N, with N = max(s‖G‖, eps) or s‖G‖ + eps for every matrix.

    squares_kernel      the sum of squares of each part of a matrix, parts × batch programs
    scale_kernel        adds the parts in their order, divides, rounds once
    divisors_kernel     in its place where X stays G: 1/N and 1/N² for the first products

G is [batch, M, N] with any strides, X row-major. Squares are added in fp32 within a tile where they cannot overflow or
vanish (fp16), else in fp64, and tiles in fp64; a NaN stays in its matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optim_kernels._tiles import cdiv
from optim_kernels._triton import div_rn, narrow, tl, triton

BLOCK_M, BLOCK_N = 32, 256
# Of one launch, over all matrices: enough to fill the chip, few enough to be added by every program of the next.
MAX_PARTS = 1056


@triton.jit
def _tile(x, batch, tile, columns, batch_stride, row_stride, column_stride, M, N, BLOCK_M, BLOCK_N):
    """Addresses of a tile of a matrix, and which of them exist."""
    rows = (tile // columns) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (tile % columns) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    start = x + batch.to(tl.int64) * batch_stride
    return start + rows.to(tl.int64) * row_stride + cols.to(tl.int64) * column_stride, (rows < M) & (cols < N)


@triton.jit
def squares_kernel(
    g,
    partials,
    state,
    batch_stride,
    row_stride,
    column_stride,
    M,
    N,
    tiles,
    columns,
    HAS_STATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    part, parts, batch = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    if HAS_STATE:
        tl.store(state + 1 + batch, 0, mask=part == 0)
        tl.store(state, 0, mask=(part == 0) & (batch == 0))
    total = tl.zeros((), tl.float64)
    for tile in range(part, tiles, parts):
        at, exists = _tile(g, batch, tile, columns, batch_stride, row_stride, column_stride, M, N, BLOCK_M, BLOCK_N)
        x = tl.load(at, mask=exists, other=0.0)
        wide = x.to(tl.float32) if g.dtype.element_ty == tl.float16 else x.to(tl.float64)
        total += tl.sum(tl.reshape(wide * wide, (BLOCK_M * BLOCK_N,)), 0).to(tl.float64)
    tl.store(partials + batch * parts + part, total)


@triton.jit
def _divisor(partials, batch, parts, norm_scale, eps, ADD_EPS: tl.constexpr, PARTS: tl.constexpr):
    """N of a matrix in fp64, 1 where it is zero."""
    part = tl.arange(0, PARTS)
    squares = tl.load(partials + batch * parts + part, mask=part < parts, other=0.0)
    scaled = tl.sqrt(tl.sum(squares, 0)) * norm_scale
    # max would drop a NaN
    divisor = scaled + eps if ADD_EPS else tl.where(scaled < eps, eps, scaled)
    return tl.where(divisor == 0.0, 1.0, divisor)


@triton.jit
def scale_kernel(
    g,
    partials,
    x,
    batch_stride,
    row_stride,
    column_stride,
    x_batch_stride,
    x_row_stride,
    M,
    N,
    columns,
    parts,
    norm_scale,
    eps,
    ADD_EPS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile, batch = tl.program_id(0), tl.program_id(1)
    at, exists = _tile(g, batch, tile, columns, batch_stride, row_stride, column_stride, M, N, BLOCK_M, BLOCK_N)
    value = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    divisor = _divisor(partials, batch, parts, norm_scale, eps, ADD_EPS, PARTS).to(tl.float32)
    at, exists = _tile(x, batch, tile, columns, x_batch_stride, x_row_stride, 1, M, N, BLOCK_M, BLOCK_N)
    tl.store(at, narrow(div_rn(value, divisor), x.dtype.element_ty), mask=exists)


@triton.jit
def divisors_kernel(partials, inverses, parts, norm_scale, eps, ADD_EPS: tl.constexpr, PARTS: tl.constexpr):
    """1/N and 1/N², of each matrix in a row of its own; a zero matrix stays zero whatever they are, so both are 1."""
    batch = tl.program_id(0)
    part = tl.arange(0, PARTS)
    squares = tl.load(partials + batch * parts + part, mask=part < parts, other=0.0)
    inverse = 1.0 / _divisor(partials, batch, parts, norm_scale, eps, ADD_EPS, PARTS)
    inverse = tl.where(tl.sum(squares, 0) == 0.0, 1.0, inverse)
    tl.store(inverses + batch, inverse.to(tl.float32))
    tl.store(inverses + tl.num_programs(0) + batch, (inverse * inverse).to(tl.float32))


def normalize_into(
    x: Tensor, g: Tensor, *, norm_scale: float, eps: float, add_eps: bool, state: Tensor | None = None
) -> None:
    """``x = g / N`` for ``g [batch, M, N]`` and a row-major ``x``; ``state`` is set to zero."""
    batch, m, n = g.shape
    partials = _squares(g, state)
    columns = cdiv(n, BLOCK_N)
    scale_kernel[(cdiv(m, BLOCK_M) * columns, batch)](
        g,
        partials,
        x,
        *g.stride(),
        *x.stride()[:2],
        m,
        n,
        columns,
        partials.shape[1],
        norm_scale,
        eps,
        ADD_EPS=add_eps,
        PARTS=triton.next_power_of_2(partials.shape[1]),
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
    )


def divisors_of(g: Tensor, *, norm_scale: float, eps: float, add_eps: bool, state: Tensor | None = None) -> Tensor:
    """[2, batch]: 1/N and 1/N² of ``g [batch, M, N]``; ``state`` is set to zero."""
    partials = _squares(g, state)
    inverses = torch.empty(2, len(g), device=g.device)
    parts = partials.shape[1]
    divisors_kernel[(len(g),)](
        partials, inverses, parts, norm_scale, eps, ADD_EPS=add_eps, PARTS=triton.next_power_of_2(parts)
    )
    return inverses


def _squares(g: Tensor, state: Tensor | None) -> Tensor:
    """Σ g² in parts, fp64 [batch, parts]."""
    batch, m, n = g.shape
    columns = cdiv(n, BLOCK_N)
    tiles = cdiv(m, BLOCK_M) * columns
    partials = torch.empty(batch, min(tiles, max(1, MAX_PARTS // batch)), dtype=torch.float64, device=g.device)
    squares_kernel[(partials.shape[1], batch)](
        g,
        partials,
        partials if state is None else state,
        *g.stride(),
        m,
        n,
        tiles,
        columns,
        HAS_STATE=state is not None,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
    )
    return partials
