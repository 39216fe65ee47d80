"""Triton kernels after Muon's products, each over the matrices of all parameters.

    last product  Newton–Schulz's last product, O = s (α S X + β X) rounded to X's dtype, with more in its epilogue:
                      the parameter's update (`muon_parameter`),
                      or, where the update needs all of O first, sums of O² over each tile's lines
    variance      ρ = √min(r, c)/max(‖O‖, 1e-6) with renormalize, else 1;  q = ρ² mean O² of a line;
                  V <- β2 V + (1 − β2)q;  s = rsqrt(max(V, 1e-10));  line factor ρ s ‖O‖/max(‖O s‖, 1e-10)
    advance       step counts + 1; stochastic rounding draws its bits by them
    update        O · factor subtracted from the parameter

A line is a row of a matrix with r ≥ c, else a column; its sum is in parts, one for each tile that it crosses. Nothing
is written when found_inf (control[1]) is nonzero.
"""

from __future__ import annotations

from optim_kernels._kernels.muon_parameter import update_tile
from optim_kernels._kernels.muon_table import (
    BETA2,
    FIRST_LINE,
    FIRST_PART,
    GROUP,
    INNER,
    NUM_FIELDS,
    NUM_HYPER,
    NUM_PARTS,
    OUTER,
    ROWS_ARE_INNER,
    O,
    V,
)
from optim_kernels._kernels.muon_tiles import factor_tile, load_x, tile_of
from optim_kernels._kernels.product import multiply_tile, rectangle_tile, with_c
from optim_kernels._triton import div_rn, narrow, sqrt_rn, tl, triton

# Parts of a line's sum of squares that are loaded at a time.
_PARTS_AT_A_TIME = tl.constexpr(8)


@triton.jit
def _line_squares(record, parts, line, count):
    """Σ O² of lines, from their parts in order; fp64."""
    first = parts + tl.load(record + FIRST_PART) + line
    num_parts = tl.load(record + NUM_PARTS)
    total = tl.zeros(line.shape, tl.float64)
    for start in range(0, num_parts, _PARTS_AT_A_TIME):
        part = start + tl.arange(0, _PARTS_AT_A_TIME)
        mask = (part < num_parts)[:, None] & (line < count)[None, :]
        total += tl.sum(tl.load(first[None, :] + part[:, None] * count, mask=mask, other=0.0).to(tl.float64), axis=0)
    return total


@triton.jit
def variance_kernel(
    table,
    hyper,
    control,
    parts,
    factors,
    RENORMALIZE: tl.constexpr,
    VARIANCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From sums of O² over lines: move V, write each line's factor. One program a matrix."""
    record = table + tl.program_id(0).to(tl.int64) * NUM_FIELDS
    first = tl.load(record + FIRST_LINE)
    outer, inner = tl.load(record + OUTER), tl.load(record + INNER)
    count = tl.maximum(outer, inner)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        total += _line_squares(record, parts, start + tl.arange(0, BLOCK), count)
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
            squares = _line_squares(record, parts, line, count) * rho * rho
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
def advance_kernel(step_addresses, control):
    """Add one to the step counts, one program each."""
    step = tl.load(step_addresses + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    if tl.load(control + 1) == 0.0:
        tl.store(step, tl.load(step) + 1.0)


@triton.jit
def update_kernel(
    table,
    tile_map,
    hyper,
    control,
    lr_scales,
    factors,
    X_DTYPE: tl.constexpr,
    P_DTYPE: tl.constexpr,
    MASTER_KIND: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Decay the parameter and subtract its update; rounded once."""
    if tl.load(control + 1) != 0.0:
        return
    matrix, first_outer, first_inner = tile_of(tile_map)
    record = table + matrix * NUM_FIELDS
    o = load_x(record, O, first_outer, first_inner, X_DTYPE, ALIGNED)
    if HAS_FACTORS:
        o = o * factor_tile(record, factors, first_outer, first_inner)
    scale = tl.load(lr_scales + matrix)
    update_tile(record, hyper, scale, first_outer, first_inner, o, P_DTYPE, MASTER_KIND, CAUTIOUS, STOCHASTIC, ALIGNED)


@triton.jit(do_not_specialize=["first_matrix", "tiles", "rows", "columns", "K"])
def last_product_kernel(
    s_desc,
    x_desc,
    c_desc,
    o_desc,
    table,
    hyper,
    control,
    lr_scales,
    scales,
    parts,
    betas,
    first_matrix,
    tiles,
    rows,
    columns,
    K,
    alpha,
    beta,
    HAS_C: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BETAS: tl.constexpr,
    SQUARES: tl.constexpr,
    P_DTYPE: tl.constexpr,
    MASTER_KIND: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE_GROUP: tl.constexpr,
):
    """One tile of the batch of matrices that starts with number ``first_matrix``.

    With HAS_BETAS β is a number for each row, fp32. With SQUARES O and its sums of squares are stored, else the
    parameter is updated.
    """
    if tl.load(control + 1) != 0.0:
        return
    pid = tl.program_id(0)
    batch = pid // tiles
    i, j = rectangle_tile(pid % tiles, rows, columns, TILE_GROUP)
    row, column = i * BLOCK_M, j * BLOCK_N
    acc = multiply_tile(s_desc, x_desc, batch, row, column, K, BLOCK_M, BLOCK_N, BLOCK_K)
    acc = acc * alpha
    if HAS_C:
        c = c_desc.load([batch, row, column]).reshape(BLOCK_M, BLOCK_N)
        of_c = beta
        if HAS_BETAS:
            line = row + tl.arange(0, BLOCK_M)
            of_c = tl.load(betas + batch * K + line, mask=line < K, other=0.0)[:, None]
        acc = with_c(acc, of_c, c.to(tl.float32))
    if HAS_SCALE:
        acc *= tl.load(scales + batch)
    matrix = (first_matrix + batch).to(tl.int64)
    record = table + matrix * NUM_FIELDS
    outer_size, inner_size = tl.load(record + OUTER), tl.load(record + INNER)
    # rounded as where it is stored, so that bits do not depend on which kernel updates
    o = narrow(acc, o_desc.dtype)
    if SQUARES:
        o_desc.store([batch, row, column], o.reshape(1, BLOCK_M, BLOCK_N))
        _store_squares(record, parts, o.to(tl.float32), i, j, outer_size, inner_size)
    else:
        scale = tl.load(lr_scales + matrix)
        # in halves: the whole tile's parameters do not fit in registers beside O
        halves = o.to(tl.float32).reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
        for half in tl.static_range(2):
            o, first = halves[half], column + half * (BLOCK_N // 2)
            # X has its short side first, the storage its outer lines
            if outer_size > inner_size:
                update_tile(record, hyper, scale, first, row, o.T, P_DTYPE, MASTER_KIND, CAUTIOUS, False, ALIGNED)
            else:
                update_tile(record, hyper, scale, row, first, o, P_DTYPE, MASTER_KIND, CAUTIOUS, False, ALIGNED)


@triton.jit
def _store_squares(record, parts, o, i, j, outer_size, inner_size):
    """Store the sums of O² over the part of each line that is in tile (i, j) of X."""
    count = tl.maximum(outer_size, inner_size)
    first = parts + tl.load(record + FIRST_PART)
    # X's columns are the longer side, hence the lines; a square X is in the storage's order
    if (outer_size != inner_size) | (tl.load(record + ROWS_ARE_INNER) != 0):
        _store_part(first + i * count, j, count, tl.sum(o * o, axis=0))
    else:
        _store_part(first + j * count, i, count, tl.sum(o * o, axis=1))


@triton.jit
def _store_part(part, block, count, squares):
    line = block * squares.shape[0] + tl.arange(0, squares.shape[0])
    tl.store(part + line, squares, mask=line < count)
