"""Triton kernels before Muon's products: they move the momentum buffer and write X before its norm is known.

    guess        υ = 2^(6 − e), with 2^e near ‖U‖, estimated from a sample of the matrix
    momentum     g <- ±g f;  B <- μB + (1 − μ)g;  U = (1 − μ)g + μB or B;  X = υU;  Σ U² of each tile
    norm         N from ‖U‖, σ = 1/(υN) and σ², with which the first products bring X to U/N
                 (`functional._muon_products`);  where υ was far off, X is written again with a better one

So nothing is read twice. Multiplying by a power of two loses nothing: in fp16 X keeps its digits while 1 ≤ υ‖U‖ < 2^15.
The guess depends on gradient and buffer alone, not on an earlier step, so a resumed run is bitwise equal without
further state. With row equilibration a row's norm takes the guess's place:

    strips       B and U as above, a few whole rows a program;  X_i = 64 U_i / max(‖U_i‖, 1e-6);  Σ U² of each row
    equilibrate  σ and σ², with  σ X_i = U_i (‖U‖/√r) / max(‖U_i‖, 1e-6) / N

A launch covers the matrices of all parameters. U is formed from the stored B. B does not move when found_inf
(control[1]) is nonzero.
"""

from __future__ import annotations

from optim_kernels._kernels.muon_table import (
    FIRST_LINE,
    FIRST_TILE,
    GROUP,
    INNER,
    INNER_TILES,
    MOMENTUM,
    NUM_FIELDS,
    NUM_HYPER,
    OUTER,
    OUTER_TILES,
    ROWS_ARE_INNER,
    STRIP,
    STRIP_STEP,
    TILE,
    B,
    X,
)
from optim_kernels._kernels.muon_tiles import (
    pointer_at,
    pointer_in,
    sizes,
    squares_along,
    store_x,
    stride_of,
    tile_of,
    tile_offsets,
)
from optim_kernels._kernels.normalize import divisor_of
from optim_kernels._triton import let_next_start, narrow, tl, triton, wait_for_previous

# How many pieces of TILE elements the sample has.
_PIECES = tl.constexpr(16)
# υ‖U‖ is meant to be 2^6 to 2^7, and good from 1 to 2^15.
_TARGET = tl.constexpr(6)
_LARGEST = tl.constexpr(2.0**15)
# The norm of equilibrated rows of X, so that small entries are normal numbers in fp16.
_ROW_NORM = tl.constexpr(64.0)


@triton.jit
def _momentum_of(record, hyper):
    return tl.load(hyper + tl.load(record + GROUP) * NUM_HYPER + MOMENTUM)


@triton.jit
def _direction(g, b, momentum, NESTEROV: tl.constexpr):
    """U, from the gradient and the buffer as it is stored after its move."""
    if NESTEROV:
        return (1.0 - momentum) * g + momentum * b
    return b


@triton.jit
def _load_gradient(
    gradient, offsets, mask, control, G_DTYPE: tl.constexpr, MAXIMIZE: tl.constexpr, ALIGNED: tl.constexpr
):
    g = tl.load(pointer_at(gradient, G_DTYPE, ALIGNED) + offsets, mask=mask, other=0.0).to(tl.float32)
    g = g * tl.load(control)
    if MAXIMIZE:
        g = -g
    return g


@triton.jit
def _unit_for(norm):
    """2^(6 − e) for a norm of at least 2^e and below 2^(e + 1); 2^6 for zero, infinity and NaN. fp64 -> fp32."""
    biased = ((norm.to(tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32)
    exponent = tl.where((biased == 0) | (biased == 0x7FF), 0, biased - 1023)
    # the tensor first: in Triton 3.8's interpreter a constant less a tensor is no tensor
    exponent = tl.minimum(tl.maximum(-exponent + _TARGET, -126), 127)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def guess_kernel(
    table,
    grads,
    hyper,
    control,
    units,
    G_DTYPE: tl.constexpr,
    B_DTYPE: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """υ of a matrix, from a few pieces of TILE elements that are spread over it. One program a matrix."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    matrix = tl.program_id(0).to(tl.int64)
    record = table + matrix * NUM_FIELDS
    momentum = _momentum_of(record, hyper)
    outer_size, inner_size = sizes(record, ALIGNED)
    piece = tl.arange(0, _PIECES)
    outer = piece * outer_size // _PIECES
    inner = ((piece * 37) % tl.load(record + INNER_TILES) * TILE)[:, None] + tl.arange(0, TILE)[None, :]
    offsets = outer[:, None] * stride_of(record, ALIGNED) + inner
    mask = (inner < inner_size) & (outer < outer_size)[:, None]
    g = _load_gradient(grads + matrix, offsets, mask, control, G_DTYPE, MAXIMIZE, ALIGNED)
    b = tl.load(pointer_in(record, B, B_DTYPE, ALIGNED) + offsets, mask=mask, other=0.0).to(tl.float32)
    u = _direction(g, momentum * b + (1.0 - momentum) * g, momentum, NESTEROV)
    squares = tl.sum(squares_along(u, 1), axis=0)
    taken = tl.sum(tl.sum(mask.to(tl.int32), axis=1), axis=0).to(tl.float64)
    share = outer_size.to(tl.float64) * inner_size.to(tl.float64) / taken
    tl.store(units + matrix, _unit_for(tl.sqrt(squares * share)))


@triton.jit
def _read(
    places,
    first_outer,
    first_inner,
    control,
    G_DTYPE: tl.constexpr,
    B_DTYPE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    LINES: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Load a piece of the gradient, scaled, in fp32, and of B as stored; B's pointers, and the mask of what exists."""
    record, gradient = places
    offsets, mask = tile_offsets(record, first_outer, first_inner, ALIGNED, LINES, LENGTH)
    pointers = pointer_in(record, B, B_DTYPE, ALIGNED) + offsets
    g = _load_gradient(gradient, offsets, mask, control, G_DTYPE, MAXIMIZE, ALIGNED)
    return g, tl.load(pointers, mask=mask, other=0.0), pointers, mask


@triton.jit
def _move(piece, momentum, control, B_DTYPE: tl.constexpr, NESTEROV: tl.constexpr):
    """Move a piece of B that has been read, and return its U."""
    g, b, pointers, mask = piece
    stored = narrow(momentum * b.to(tl.float32) + (1.0 - momentum) * g, B_DTYPE)
    if tl.load(control + 1) == 0.0:
        tl.store(pointers, stored, mask=mask)
    return _direction(g, stored.to(tl.float32), momentum, NESTEROV)


@triton.jit
def _moved(
    places,
    first_outer,
    first_inner,
    hyper,
    control,
    G_DTYPE: tl.constexpr,
    B_DTYPE: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    LINES: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """U of a piece whose B has moved."""
    record, gradient = places
    offsets, mask = tile_offsets(record, first_outer, first_inner, ALIGNED, LINES, LENGTH)
    u = tl.load(pointer_in(record, B, B_DTYPE, ALIGNED) + offsets, mask=mask, other=0.0).to(tl.float32)
    if NESTEROV:
        g = _load_gradient(gradient, offsets, mask, control, G_DTYPE, MAXIMIZE, ALIGNED)
        u = _direction(g, u, _momentum_of(record, hyper), NESTEROV)
    return u


@triton.jit
def momentum_kernel(
    table,
    tile_map,
    grads,
    hyper,
    control,
    units,
    sums,
    G_DTYPE: tl.constexpr,
    B_DTYPE: tl.constexpr,
    X_DTYPE: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Move B; write X = υU and the tile's Σ U²."""
    let_next_start(OVERLAP)
    matrix, first_outer, first_inner = tile_of(tile_map)
    record = table + matrix * NUM_FIELDS
    momentum = _momentum_of(record, hyper)
    places = (record, grads + matrix)
    piece = _read(places, first_outer, first_inner, control, G_DTYPE, B_DTYPE, MAXIMIZE, ALIGNED, TILE, TILE)
    # ``guess_kernel`` reads B as it was: let it end before B is written
    wait_for_previous(OVERLAP)
    u = _move(piece, momentum, control, B_DTYPE, NESTEROV)
    tl.store(sums + tl.program_id(0).to(tl.int64), tl.sum(squares_along(u, 1), axis=0))
    store_x(record, X, first_outer, first_inner, narrow(u * tl.load(units + matrix), X_DTYPE), ALIGNED)


@triton.jit(do_not_specialize=["num_chains"])
def norm_kernel(
    table,
    grads,
    hyper,
    control,
    units,
    sums,
    scales,
    squared_scales,
    progress,
    num_chains,
    norm_scale,
    eps,
    G_DTYPE: tl.constexpr,
    B_DTYPE: tl.constexpr,
    X_DTYPE: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ADD_EPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """σ and σ² of a matrix. Its programs (axis 1) share the work of writing X again, which is rarely needed."""
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    matrix = tl.program_id(0).to(tl.int64)
    record = table + matrix * NUM_FIELDS
    inner_tiles = tl.load(record + INNER_TILES).to(tl.int32)
    tiles = tl.load(record + OUTER_TILES).to(tl.int32) * inner_tiles
    first = sums + tl.load(record + FIRST_TILE)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        total += tl.load(first + tile, mask=tile < tiles, other=0.0)
    norm = tl.sqrt(tl.sum(total, axis=0))
    unit = tl.load(units + matrix)
    scaled = norm * unit.to(tl.float64)
    # false for NaN and infinity, which no other υ would mend
    is_far_off = ((scaled < 1.0) & (norm > 0.0)) | ((scaled >= _LARGEST) & (scaled < float("inf")))
    if is_far_off:
        unit = _unit_for(norm)
        places = (record, grads + matrix)
        for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
            outer, inner = tile // inner_tiles * TILE, tile % inner_tiles * TILE
            u = _moved(places, outer, inner, hyper, control, G_DTYPE, B_DTYPE, NESTEROV, MAXIMIZE, ALIGNED, TILE, TILE)
            store_x(record, X, outer, inner, narrow(u * unit, X_DTYPE), ALIGNED)
    if tl.program_id(1) == 0:
        scale = 1.0 / (divisor_of(norm, norm_scale, eps, ADD_EPS) * unit.to(tl.float64))
        # a zero matrix has to stay zero, but with a small eps σ² is infinite in fp32, and 0 · ∞ is NaN
        scale = tl.where(norm == 0.0, 1.0, scale)
        tl.store(scales + matrix, scale.to(tl.float32))
        tl.store(squared_scales + matrix, (scale * scale).to(tl.float32))
        _clear(progress, num_chains)


@triton.jit
def _clear(progress, num_chains):
    """Set the count of this program's matrix to zero; the first programs also clear the counter of a chain each."""
    matrix = tl.program_id(0)
    tl.store(progress + matrix, 0)
    tl.store(progress + tl.num_programs(0) + matrix, 0, mask=matrix < num_chains)


@triton.jit
def _strip(
    places,
    row,
    hyper,
    control,
    row_squares,
    G_DTYPE: tl.constexpr,
    B_DTYPE: tl.constexpr,
    X_DTYPE: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS_INNER: tl.constexpr,
):
    """Move B and write X for rows ``row … row + STRIP − 1``, which are the inner dimension or the outer one."""
    LINES: tl.constexpr = STRIP_STEP if ROWS_INNER else STRIP
    LENGTH: tl.constexpr = STRIP if ROWS_INNER else STRIP_STEP
    ACROSS: tl.constexpr = 0 if ROWS_INNER else 1
    record, _gradient = places
    outer_size, inner_size = sizes(record, ALIGNED)
    columns = outer_size if ROWS_INNER else inner_size
    rows = inner_size if ROWS_INNER else outer_size
    squares = tl.zeros((STRIP,), tl.float64)
    for column in range(0, columns, STRIP_STEP):
        if ROWS_INNER:
            outer, inner = column, row
        else:
            outer, inner = row, column
        piece = _read(places, outer, inner, control, G_DTYPE, B_DTYPE, MAXIMIZE, ALIGNED, LINES, LENGTH)
        u = _move(piece, _momentum_of(record, hyper), control, B_DTYPE, NESTEROV)
        squares += squares_along(u, ACROSS)
    each = row + tl.arange(0, STRIP)
    tl.store(row_squares + tl.load(record + FIRST_LINE) + each, squares, mask=each < rows)
    norms = tl.sqrt(squares)
    factor = (1.0 / tl.where(norms < 1e-6, 1e-6, norms) * _ROW_NORM).to(tl.float32)
    # the second pass reads what all threads of the program stored to B
    tl.debug_barrier()
    for column in range(0, columns, STRIP_STEP):
        if ROWS_INNER:
            outer, inner = column, row
        else:
            outer, inner = row, column
        u = _moved(places, outer, inner, hyper, control, G_DTYPE, B_DTYPE, NESTEROV, MAXIMIZE, ALIGNED, LINES, LENGTH)
        if ROWS_INNER:
            x = u * factor[None, :]
        else:
            x = u * factor[:, None]
        store_x(record, X, outer, inner, narrow(x, X_DTYPE), ALIGNED)


@triton.jit
def strips_kernel(
    table,
    strip_map,
    grads,
    hyper,
    control,
    row_squares,
    G_DTYPE: tl.constexpr,
    B_DTYPE: tl.constexpr,
    X_DTYPE: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Move B; write X with rows of norm 64, and Σ U² of each row. Map: (matrix, first row)."""
    entry = strip_map + tl.program_id(0).to(tl.int64) * 2
    matrix = tl.load(entry).to(tl.int64)
    places = (table + matrix * NUM_FIELDS, grads + matrix)
    row = tl.multiple_of(tl.load(entry + 1), STRIP)
    if tl.load(places[0] + ROWS_ARE_INNER) != 0:
        _strip(places, row, hyper, control, row_squares, G_DTYPE, B_DTYPE, X_DTYPE, NESTEROV, MAXIMIZE, ALIGNED, True)
    else:
        _strip(places, row, hyper, control, row_squares, G_DTYPE, B_DTYPE, X_DTYPE, NESTEROV, MAXIMIZE, ALIGNED, False)


@triton.jit(do_not_specialize=["num_chains"])
def equilibrate_kernel(
    table,
    row_squares,
    scales,
    squared_scales,
    progress,
    num_chains,
    norm_scale,
    eps,
    ADD_EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """σ and σ² of a matrix of equilibrated rows. One program a matrix."""
    matrix = tl.program_id(0).to(tl.int64)
    record = table + matrix * NUM_FIELDS
    rows = tl.load(record + tl.where(tl.load(record + ROWS_ARE_INNER) != 0, INNER, OUTER))
    first = row_squares + tl.load(record + FIRST_LINE)
    total = tl.zeros((BLOCK,), tl.float64)
    equal = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        squares = tl.load(first + row, mask=row < rows, other=0.0)
        total += squares
        # 1, but for rows whose norm is below 1e-6
        equal += squares / tl.where(squares < 1e-12, 1e-12, squares)
    of_row = tl.sqrt(tl.sum(total, axis=0) / rows.to(tl.float64))
    norm = of_row * tl.sqrt(tl.sum(equal, axis=0))
    scale = of_row / (divisor_of(norm, norm_scale, eps, ADD_EPS) * _ROW_NORM)
    tl.store(scales + matrix, scale.to(tl.float32))
    tl.store(squared_scales + matrix, (scale * scale).to(tl.float32))
    _clear(progress, num_chains)
