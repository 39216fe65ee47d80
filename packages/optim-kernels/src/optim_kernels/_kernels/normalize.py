"""The start of Newton–Schulz in two launches: X = G / N, with N = max(s‖G‖, eps) or s‖G‖ + eps for every matrix.

    squares_kernel      the sum of squares of each part of a matrix, parts × batch programs
    scale_kernel        adds the parts in their order, divides, rounds once
    divisors_kernel     replaces it where X stays G, or is a copy made by squares_kernel: 1/N and 1/N² for the first
                        products, unless the first one finds them itself (`Norm`)

and for the set "aol4" after the first Gram matrix A = XXᵀ, with D = diag(rsqrt(Σ_j |A_ij|)):

    factors_kernel      D
    row_factors_kernel  X ← DX  and  A ← DAD

G is [batch, M, N] with any strides, X row-major. Squares are added in fp32 within a tile where they cannot overflow or
vanish (fp16), else in fp64, and tiles in fp64; a NaN stays in its matrix.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from optim_kernels._newton_schulz.config import NSConfig
from optim_kernels._newton_schulz.tiles import cdiv
from optim_kernels._triton import FIRST, FUSED, Launch, after_previous, div_rn, narrow, tl, triton

BLOCK_M, BLOCK_N = 32, 256
# Parts of one launch, over all matrices: enough to fill the chip, few enough for every program of the next to add.
MAX_PARTS = 1056
# Kept launches of each kernel.
NUM_LAUNCHES = 256


@triton.jit
def _tile(x, batch, tile, columns, batch_stride, row_stride, column_stride, M, N, BLOCK_M, BLOCK_N):
    """Addresses of a tile of a matrix, and which of them exist."""
    rows = (tile // columns) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (tile % columns) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    start = x + batch.to(tl.int64) * batch_stride
    return start + rows.to(tl.int64) * row_stride + cols.to(tl.int64) * column_stride, (rows < M) & (cols < N)


@triton.jit(do_not_specialize=["tiles", "columns"])
def squares_kernel(
    g,
    partials,
    state,
    x,
    batch_stride,
    row_stride,
    column_stride,
    x_batch_stride,
    x_row_stride,
    M,
    N,
    tiles,
    columns,
    HAS_STATE: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    after_previous(OVERLAP)
    part, parts, batch = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    if HAS_STATE:
        tl.store(state + 1 + batch, 0, mask=part == 0)
        tl.store(state, 0, mask=(part == 0) & (batch == 0))
    total = tl.zeros((), tl.float64)
    for tile in range(part, tiles, parts):
        at, exists = _tile(g, batch, tile, columns, batch_stride, row_stride, column_stride, M, N, BLOCK_M, BLOCK_N)
        value = tl.load(at, mask=exists, other=0.0)
        if COPIES:
            at, exists = _tile(x, batch, tile, columns, x_batch_stride, x_row_stride, 1, M, N, BLOCK_M, BLOCK_N)
            tl.store(at, value, mask=exists)
        wide = value.to(tl.float32) if g.dtype.element_ty == tl.float16 else value.to(tl.float64)
        total += tl.sum(tl.reshape(wide * wide, (BLOCK_M * BLOCK_N,)), 0).to(tl.float64)
    tl.store(partials + batch * parts + part, total)


@triton.jit
def _sum_of(partials, batch, parts, PARTS: tl.constexpr):
    """The sum of squares of a matrix."""
    part = tl.arange(0, PARTS)
    return tl.sum(tl.load(partials + batch * parts + part, mask=part < parts, other=0.0), 0)


@triton.jit
def divisor_of(norm, norm_scale, eps, ADD_EPS: tl.constexpr):
    """N, in fp64; 1 where it would be zero."""
    scaled = norm * norm_scale
    # max would drop a NaN
    divisor = scaled + eps if ADD_EPS else tl.where(scaled < eps, eps, scaled)
    return tl.where(divisor == 0.0, 1.0, divisor)


@triton.jit
def inverse_norm(squares, norm_scale, eps, ADD_EPS: tl.constexpr):
    """1/N in fp64 of a sum of squares; a zero matrix stays zero whatever it is, so 1 there."""
    return tl.where(squares == 0.0, 1.0, 1.0 / divisor_of(tl.sqrt(squares), norm_scale, eps, ADD_EPS))


@triton.jit(do_not_specialize=["columns"])
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
    OVERLAP: tl.constexpr,
):
    after_previous(OVERLAP)
    tile, batch = tl.program_id(0), tl.program_id(1)
    at, exists = _tile(g, batch, tile, columns, batch_stride, row_stride, column_stride, M, N, BLOCK_M, BLOCK_N)
    value = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    norm = tl.sqrt(_sum_of(partials, batch, parts, PARTS))
    divisor = divisor_of(norm, norm_scale, eps, ADD_EPS).to(tl.float32)
    at, exists = _tile(x, batch, tile, columns, x_batch_stride, x_row_stride, 1, M, N, BLOCK_M, BLOCK_N)
    tl.store(at, narrow(div_rn(value, divisor), x.dtype.element_ty), mask=exists)


@triton.jit
def divisors_kernel(
    partials, inverses, parts, norm_scale, eps, ADD_EPS: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr
):
    """1/N and 1/N², each of all matrices in a row of its own."""
    after_previous(OVERLAP)
    batch = tl.program_id(0)
    inverse = inverse_norm(_sum_of(partials, batch, parts, PARTS), norm_scale, eps, ADD_EPS)
    tl.store(inverses + batch, inverse.to(tl.float32))
    tl.store(inverses + tl.num_programs(0) + batch, (inverse * inverse).to(tl.float32))


@triton.jit
def factors_kernel(a, factors, batch_stride, row_stride, M, BLOCK: tl.constexpr):
    """A row's factor: 0 for a row of zeros, NaN for a row with a NaN."""
    row, batch = tl.program_id(0), tl.program_id(1)
    start = a + batch.to(tl.int64) * batch_stride + row.to(tl.int64) * row_stride
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, M, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.abs(tl.load(start + at, mask=at < M, other=0.0).to(tl.float32))
    sums = tl.sum(total, 0)
    tl.store(factors + batch * M + row, tl.where(sums == 0.0, 0.0, 1.0 / tl.sqrt(tl.where(sums == 0.0, 1.0, sums))))


@triton.jit(do_not_specialize=["columns"])
def row_factors_kernel(
    x,
    factors,
    batch_stride,
    row_stride,
    M,
    N,
    columns,
    BOTH_SIDES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Multiply a tile's rows, and with BOTH_SIDES its columns, by their factors, in place."""
    tile, batch = tl.program_id(0), tl.program_id(1)
    at, exists = _tile(x, batch, tile, columns, batch_stride, row_stride, 1, M, N, BLOCK_M, BLOCK_N)
    row = (tile // columns) * BLOCK_M + tl.arange(0, BLOCK_M)
    value = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    value *= tl.load(factors + batch * M + row, mask=row < M, other=0.0)[:, None]
    if BOTH_SIDES:
        column = (tile % columns) * BLOCK_N + tl.arange(0, BLOCK_N)
        value *= tl.load(factors + batch * M + column, mask=column < N, other=0.0)[None, :]
    tl.store(at, narrow(value, x.dtype.element_ty), mask=exists)


class Norm(NamedTuple):
    """What the first product finds 1/N and 1/N² from, and where it leaves them for later ones.

    Args:
        sums: squares of the parts of each matrix, fp64 [batch * parts].
        inverses: 1/N and 1/N², fp32 [2, batch].
        norm_scale, eps, adds_eps: N = max(s‖G‖, eps) or s‖G‖ + eps.
    """

    sums: Tensor
    inverses: Tensor
    parts: int
    norm_scale: float
    eps: float
    adds_eps: bool


class Start:
    """The start of Newton–Schulz for matrices like ``g [batch, M, N]``: two launches, or the first of them, kept.

    Args:
        x: like the row-major X that is written, G / N or with ``is_scaled`` a copy of G; ``None``: X stays G.
        is_scaled: X is not divided; the launches give 1/N and 1/N² for the first products instead.
        in_product: the first product finds these.
        has_state: calls pass ``state``, int32 numbers to set to zero: one for all matrices and one for each.
    """

    def __init__(
        self,
        g: Tensor,
        x: Tensor | None,
        config: NSConfig,
        *,
        is_scaled: bool = False,
        in_product: bool = False,
        has_state: bool = False,
    ) -> None:
        self._config, self._in_product = config, in_product
        layout, self._batch, self._is_scaled = _layout(g), len(g), is_scaled or x is None
        copied = _layout(x) if x is not None and is_scaled else None
        self._squares, parts, self._of_squares = _squares_launch(layout, copied, has_state)
        numbers: tuple[int, ...] = (parts,)
        add_eps = config.eps_mode == "add"
        if x is None or is_scaled:
            self._second = _divisors_launch(self._batch, parts, g.device, add_eps)
        else:
            self._second, numbers = _scale_launch(layout, _layout(x), parts, add_eps)
        self._of_second = (*numbers, config.norm_scale, config.eps)
        self._parts, self._num_sums = parts, self._batch * parts

    def __call__(
        self, g: Tensor, x: Tensor | None = None, *, room: Tensor | None = None, state: Tensor | None = None
    ) -> Tensor | Norm | None:
        """Launch; return what finds the norm, or 1/N and 1/N² [2, batch], unless X is divided.

        They lie in ``room``, `size_of_room` numbers in fp64.
        """
        if room is None:
            room = torch.empty(self._num_sums + self._batch, dtype=torch.float64, device=g.device)
        sums = room[: self._num_sums]
        copy = x if x is not None and self._is_scaled else sums
        self._squares((g, sums, sums if state is None else state, copy), self._of_squares)
        if x is not None and not self._is_scaled:
            self._second((g, sums, x), self._of_second)
            return None
        inverses = room[self._num_sums :].view(torch.float32).view(2, self._batch)
        if self._in_product:
            config = self._config
            return Norm(sums, inverses, self._parts, config.norm_scale, config.eps, config.eps_mode == "add")
        self._second((sums, inverses), self._of_second)
        return inverses

    def again(self, g: int, x: int, room: int) -> None:
        """Launch again, without a state, with addresses instead of tensors."""
        self._squares.again((g, room, room, x, *self._of_squares))
        if self._in_product:
            return
        tensors = (room, room + 8 * self._num_sums) if self._is_scaled else (g, room, x)
        self._second.again((*tensors, *self._of_second))


def size_of_room(g: Tensor) -> int:
    """fp64 numbers that a start needs for ``g [batch, M, N]``: sums of squares by parts, and 1/N and 1/N²."""
    return len(g) * (_squares_launch(_layout(g), None, False)[1] + 1)


def apply_row_factors(x: Tensor, a: Tensor) -> None:
    """Scale the rows of ``x [batch, M, N]`` so that ‖x‖₂ ≤ 1, and ``a = x xᵀ`` with them; both are row-major."""
    batch, m, n = x.shape
    factors = torch.empty(batch, m, dtype=torch.float32, device=x.device)
    factors_kernel[(m, batch)](a, factors, *a.stride()[:2], m, BLOCK=1024, **FUSED)
    for each, width in ((x, n), (a, m)):
        columns = cdiv(width, BLOCK_N)
        row_factors_kernel[(cdiv(m, BLOCK_M) * columns, batch)](
            each,
            factors,
            *each.stride()[:2],
            m,
            width,
            columns,
            BOTH_SIDES=each is a,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            **FUSED,
        )


Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool, torch.device]


def _layout(x: Tensor) -> Layout:
    """What a launch is kept for: shape, strides, dtype, whether loads can be wide; and the device."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0, x.device


@lru_cache(maxsize=NUM_LAUNCHES)
def _squares_launch(g: Layout, copied: Layout | None, has_state: bool) -> tuple[Launch, int, tuple[int, ...]]:
    """The launch, how many parts it makes of a matrix, and its numbers.

    The next launch may read G: it starts only when all that this launch waits for is complete.
    """
    (batch, m, n), strides, *_, device = g
    columns = cdiv(n, BLOCK_N)
    tiles = cdiv(m, BLOCK_M) * columns
    parts = min(tiles, max(1, MAX_PARTS // batch))
    constants = (has_state, copied is not None, BLOCK_M, BLOCK_N)
    launch = Launch.overlapping(squares_kernel, (parts, batch, 1), constants, device, overlap=FIRST)
    return launch, parts, (*strides, *(copied or g)[1][:2], m, n, tiles, columns)


@lru_cache(maxsize=NUM_LAUNCHES)
def _scale_launch(g: Layout, x: Layout, parts: int, add_eps: bool) -> tuple[Launch, tuple[int, ...]]:
    """The launch, and its numbers but for ``norm_scale`` and ``eps``."""
    (batch, m, n), strides, *_, device = g
    columns = cdiv(n, BLOCK_N)
    constants = (add_eps, triton.next_power_of_2(parts), BLOCK_M, BLOCK_N)
    launch = Launch.overlapping(scale_kernel, (cdiv(m, BLOCK_M) * columns, batch, 1), constants, device)
    return launch, (*strides, *x[1][:2], m, n, columns, parts)


@lru_cache(maxsize=NUM_LAUNCHES)
def _divisors_launch(batch: int, parts: int, device: torch.device, add_eps: bool) -> Launch:
    return Launch.overlapping(divisors_kernel, (batch, 1, 1), (add_eps, triton.next_power_of_2(parts)), device)
