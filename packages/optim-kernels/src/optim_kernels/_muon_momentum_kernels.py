"""Triton kernels in front of Muon's products: the momentum buffer moves, X = U / N is written.

    momentum      g <- ±g f;  B <- μB + (1 − μ)g;  U = (1 − μ)g + μB or B;       sums of U² over each tile's lines
    equilibrate   row factors  (‖U‖/√r) / max(‖U_i‖, 1e-6)  divided by N, or 1/N alone
    normalize     X = U · factor of the row, in the compute dtype

A launch covers the matrices of all parameters. U is formed from the stored B, in the one pass as in the other. Nothing
is written when found_inf (control[1]) is nonzero.
"""

from __future__ import annotations

from optim_kernels._muon_table import (
    B_STRIDE,
    FIRST_LINE,
    G_STRIDE,
    GROUP,
    MOMENTUM,
    NUM_FIELDS,
    NUM_HYPER,
    TILE,
    B,
    G,
    X,
)
from optim_kernels._muon_tiles import (
    factor_tile,
    line_sums,
    lines_are_inner,
    num_lines,
    pointer_in,
    tile_of,
    tile_offsets,
    x_offsets,
)
from optim_kernels._triton import narrow, tl, triton


@triton.jit
def _direction(g, b, momentum, NESTEROV: tl.constexpr):
    """U, from the gradient and the buffer as it is stored after its move."""
    if NESTEROV:
        return (1.0 - momentum) * g + momentum * b
    return b


@triton.jit
def _gradient(
    record, first_outer, first_inner, control, G_DTYPE: tl.constexpr, MAXIMIZE: tl.constexpr, ALIGNED: tl.constexpr
):
    offsets, mask = tile_offsets(record, G_STRIDE, first_outer, first_inner, ALIGNED)
    g = tl.load(pointer_in(record, G, G_DTYPE, ALIGNED) + offsets, mask=mask, other=0.0).to(tl.float32)
    g = g * tl.load(control)
    if MAXIMIZE:
        g = -g
    return g


@triton.jit
def momentum_kernel(
    table,
    tile_map,
    hyper,
    control,
    sums,
    G_DTYPE: tl.constexpr,
    B_DTYPE: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Move B; write the tile's sums of U² by the matrix's rows."""
    matrix, first_outer, first_inner = tile_of(tile_map)
    record = table + matrix * NUM_FIELDS
    momentum = tl.load(hyper + tl.load(record + GROUP) * NUM_HYPER + MOMENTUM)
    g = _gradient(record, first_outer, first_inner, control, G_DTYPE, MAXIMIZE, ALIGNED)
    offsets, mask = tile_offsets(record, B_STRIDE, first_outer, first_inner, ALIGNED)
    pointers = pointer_in(record, B, B_DTYPE, ALIGNED) + offsets
    b = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    stored = narrow(momentum * b + (1.0 - momentum) * g, B_DTYPE)
    if tl.load(control + 1) == 0.0:
        tl.store(pointers, stored, mask=mask)
    u = _direction(g, stored.to(tl.float32), momentum, NESTEROV)
    out = sums + tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(out, line_sums(u, lines_are_inner(record, True)))


@triton.jit
def equilibrate_kernel(
    table,
    lines,
    factors,
    norm_scale,
    eps,
    EQUILIBRATE: tl.constexpr,
    ADD_EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From sums of U² by row: each row's factor, which includes 1/N. One program a matrix."""
    record = table + tl.program_id(0).to(tl.int64) * NUM_FIELDS
    rows = num_lines(record, True)
    first = tl.load(record + FIRST_LINE)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, rows, BLOCK):
        line = start + tl.arange(0, BLOCK)
        total += tl.load(lines + first + line, mask=line < rows, other=0.0)
    squares = tl.sum(total, axis=0)
    norm = tl.sqrt(squares)
    if EQUILIBRATE:
        target = norm / tl.sqrt(rows.to(tl.float64))
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, rows, BLOCK):
            line = start + tl.arange(0, BLOCK)
            of_row = tl.sqrt(tl.load(lines + first + line, mask=line < rows, other=0.0))
            scaled = of_row * target / tl.maximum(of_row, 1e-6)
            total += scaled * scaled
        norm = tl.sqrt(tl.sum(total, axis=0))
    divisor = norm * norm_scale
    if ADD_EPS:
        divisor = divisor + eps
    else:
        divisor = tl.where(divisor < eps, eps, divisor)  # a NaN norm stays NaN
    divisor = tl.where(divisor == 0.0, 1.0, divisor)
    for start in range(0, rows, BLOCK):
        line = start + tl.arange(0, BLOCK)
        factor = tl.zeros((BLOCK,), tl.float64) + 1.0 / divisor
        if EQUILIBRATE:
            of_row = tl.sqrt(tl.load(lines + first + line, mask=line < rows, other=0.0))
            factor = target / tl.maximum(of_row, 1e-6) / divisor
        tl.store(factors + first + line, factor.to(tl.float32), mask=line < rows)


@triton.jit
def normalize_kernel(
    table,
    tile_map,
    hyper,
    control,
    factors,
    G_DTYPE: tl.constexpr,
    B_DTYPE: tl.constexpr,
    X_DTYPE: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """X = U times its row's factor, rounded once."""
    matrix, first_outer, first_inner = tile_of(tile_map)
    record = table + matrix * NUM_FIELDS
    momentum = tl.load(hyper + tl.load(record + GROUP) * NUM_HYPER + MOMENTUM)
    offsets, mask = tile_offsets(record, B_STRIDE, first_outer, first_inner, ALIGNED)
    b = tl.load(pointer_in(record, B, B_DTYPE, ALIGNED) + offsets, mask=mask, other=0.0).to(tl.float32)
    u = b
    if NESTEROV:
        g = _gradient(record, first_outer, first_inner, control, G_DTYPE, MAXIMIZE, ALIGNED)
        u = _direction(g, b, momentum, NESTEROV)
    x = narrow(u * factor_tile(record, factors, first_outer, first_inner, True), X_DTYPE)
    places, x_mask, transposed = x_offsets(record, first_outer, first_inner, ALIGNED)
    pointers = pointer_in(record, X, X_DTYPE, True) + places
    if transposed:
        x = tl.trans(x)
    tl.store(pointers, x, mask=x_mask)
