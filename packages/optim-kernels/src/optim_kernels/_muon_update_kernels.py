"""Triton kernels behind Muon's products: NorMuon's variance, and the parameter's update.

    squares       sums of O² over each tile's lines, which `_muon_tiles.lines_kernel` adds up
    variance      ρ = √min(r, c)/max(‖O‖, 1e-6) with renormalize, else 1;  q = ρ² mean O² of a line;
                  V <- β2 V + (1 − β2)q;  s = rsqrt(max(V, 1e-10));  line factor ρ s ‖O‖/max(‖O s‖, 1e-10)
    update        p <- p − lr (λp + scale · O · factor), or its cautious form

A launch covers the matrices of all parameters. Nothing is written when found_inf (control[1]) is nonzero.
"""

from __future__ import annotations

from optim_kernels._muon_table import (
    BETA2,
    FIRST_LINE,
    GROUP,
    INNER,
    LR,
    MASTER,
    NUM_FIELDS,
    NUM_HYPER,
    OUTER,
    P_STRIDE,
    TILE,
    WEIGHT_DECAY,
    P,
    V,
)
from optim_kernels._muon_tiles import (
    factor_tile,
    line_sums,
    lines_are_inner,
    load_x,
    num_lines,
    pointer_in,
    tile_of,
    tile_offsets,
)
from optim_kernels._triton import div_rn, narrow, sqrt_rn, tl, triton


@triton.jit
def squares_kernel(table, tile_map, sums, X_DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The tile's sums of O² by V's lines: rows of a matrix with r ≥ c, else columns."""
    matrix, first_outer, first_inner = tile_of(tile_map)
    record = table + matrix * NUM_FIELDS
    o = load_x(record, first_outer, first_inner, X_DTYPE, ALIGNED)
    out = sums + tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(out, line_sums(o, lines_are_inner(record, False)))


@triton.jit
def variance_kernel(
    table,
    hyper,
    control,
    lines,
    factors,
    RENORMALIZE: tl.constexpr,
    VARIANCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From sums of O² by line: move V, write each line's factor. One program a matrix."""
    record = table + tl.program_id(0).to(tl.int64) * NUM_FIELDS
    first = tl.load(record + FIRST_LINE)
    count = num_lines(record, False)
    outer, inner = tl.load(record + OUTER), tl.load(record + INNER)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        line = start + tl.arange(0, BLOCK)
        total += tl.load(lines + first + line, mask=line < count, other=0.0)
    norm = tl.sqrt(tl.sum(total, axis=0))
    rho = norm * 0.0 + 1.0
    if RENORMALIZE:
        rho = tl.sqrt(tl.minimum(outer, inner).to(tl.float64)) / tl.where(norm < 1e-6, 1e-6, norm)
    norm = norm * rho
    ratio = rho
    if VARIANCE:
        beta2 = tl.load(hyper + tl.load(record + GROUP) * NUM_HYPER + BETA2)
        v_pointer = tl.load(record + V).to(tl.pointer_type(tl.float32))
        across = tl.minimum(outer, inner).to(tl.float64)
        keep = tl.load(control + 1) == 0.0
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, count, BLOCK):
            line = start + tl.arange(0, BLOCK)
            there = line < count
            squares = tl.load(lines + first + line, mask=there, other=0.0) * rho * rho
            v = tl.load(v_pointer + line, mask=there, other=0.0)
            v = beta2 * v + (1.0 - beta2) * (squares / across).to(tl.float32)
            if keep:
                tl.store(v_pointer + line, v, mask=there)
            s = div_rn(1.0, sqrt_rn(tl.where(v < 1e-10, 1e-10, v)))
            tl.store(factors + first + line, s, mask=there)
            total += squares * s.to(tl.float64) * s.to(tl.float64)
        scaled = tl.sqrt(tl.sum(total, axis=0))
        ratio = rho * norm / tl.where(scaled < 1e-10, 1e-10, scaled)
        tl.debug_barrier()
    for start in range(0, count, BLOCK):
        line = start + tl.arange(0, BLOCK)
        factor = tl.zeros((BLOCK,), tl.float32) + ratio.to(tl.float32)
        if VARIANCE:
            factor *= tl.load(factors + first + line, mask=line < count, other=0.0)
        tl.store(factors + first + line, factor, mask=line < count)


@triton.jit
def update_kernel(
    table,
    tile_map,
    hyper,
    control,
    scales,
    factors,
    P_DTYPE: tl.constexpr,
    X_DTYPE: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Decay the parameter and subtract its update; rounded once."""
    if tl.load(control + 1) != 0.0:
        return
    matrix, first_outer, first_inner = tile_of(tile_map)
    record = table + matrix * NUM_FIELDS
    row = hyper + tl.load(record + GROUP) * NUM_HYPER
    lr, weight_decay = tl.load(row + LR), tl.load(row + WEIGHT_DECAY)
    o = load_x(record, first_outer, first_inner, X_DTYPE, ALIGNED)
    if HAS_FACTORS:
        o = o * factor_tile(record, factors, first_outer, first_inner, False)
    offsets, mask = tile_offsets(record, P_STRIDE, first_outer, first_inner, ALIGNED)
    pointers = pointer_in(record, P, P_DTYPE, ALIGNED) + offsets
    if HAS_MASTER:
        masters = pointer_in(record, MASTER, tl.float32, ALIGNED) + offsets
        p = tl.load(masters, mask=mask, other=0.0)
    else:
        p = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    step_size = lr * tl.load(scales + matrix)
    if CAUTIOUS:
        decay = tl.where(o * p >= 0.0, step_size * weight_decay * p, 0.0)
        p = p - step_size * o - decay
    else:
        p = p * (1.0 - lr * weight_decay) - step_size * o
    if HAS_MASTER:
        tl.store(masters, p, mask=mask)
    tl.store(pointers, narrow(p, P_DTYPE), mask=mask)
