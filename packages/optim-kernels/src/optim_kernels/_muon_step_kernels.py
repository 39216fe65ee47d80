"""Triton kernels of the Muon step around the products: momentum in front, the parameter's update behind.

    momentum      g <- ±g f;  B <- μB + (1 − μ)g;  U = (1 − μ)g + μB or B;       sums of U² over each tile's lines
    lines         sums of a whole line (a row, or a column) over its tiles, in order
    equilibrate   row factors  (‖U‖/√r) / max(‖U_i‖, 1e-6)  divided by N, or 1/N alone
    normalize     X = U · factor of the row, in the compute dtype
    squares       sums of O² over each tile's lines; then `lines` again
    variance      ρ = √min(r, c)/max(‖O‖, 1e-6) with renormalize, else 1;  q = ρ² mean O² of a line;
                  V <- β2 V + (1 − β2)q;  s = rsqrt(max(V, 1e-10));  line factor ρ s ‖O‖/max(‖O s‖, 1e-10)
    update        p <- p − lr (λp + scale · O · factor), or its cautious form

A launch covers the matrices of all parameters. A matrix is stored as `outer` lines of `inner` adjacent elements (rows
of columns, or the reverse for transposed storage) and cut into 64×64 tiles. X always has its short side first, so the
tiles of a matrix with more lines than elements a line are transposed on the way. A matrix is a row of an int64 table,
a tile a row (matrix, first outer, first inner) of an int32 map. Tables tell the compiler nothing, and without a promise
it loads element by element; ALIGNED promises addresses in multiples of 16 bytes, strides and sizes of 8 elements.

Sums of squares are formed relative to a tile's largest power of two and added in fp64, so entries of 1e±30 neither
vanish nor overflow; every order of addition is fixed. U is formed from the stored B, in the one pass as in the other.
Nothing is written when found_inf (control[1]) is nonzero.
"""

from __future__ import annotations

from optim_kernels._triton import div_rn, narrow, sqrt_rn, tl, triton

# Columns of the table of matrices; `functional.muon_plan` fills it.
P, G, B, X, V, MASTER = 0, 1, 2, 3, 4, 5
P_STRIDE, G_STRIDE, B_STRIDE, X_STRIDE = 6, 7, 8, 9
OUTER, INNER, FIRST_TILE, OUTER_TILES, INNER_TILES, FIRST_LINE, ROWS_ARE_INNER, GROUP = 10, 11, 12, 13, 14, 15, 16, 17
NUM_FIELDS = 18

# Columns of the groups' hyperparameters, and of the matrices' own scalars.
LR, WEIGHT_DECAY, MOMENTUM, BETA2, NUM_HYPER = 0, 1, 2, 3, 4

# Side of a tile; lines are padded to a multiple of it in buffers.
TILE = 64

(_P, _G, _B, _X, _V, _MASTER, _P_STRIDE, _G_STRIDE, _B_STRIDE, _X_STRIDE) = (
    tl.constexpr(field) for field in (P, G, B, X, V, MASTER, P_STRIDE, G_STRIDE, B_STRIDE, X_STRIDE)
)
(_OUTER, _INNER, _FIRST_TILE, _OUTER_TILES, _INNER_TILES, _FIRST_LINE, _ROWS_ARE_INNER, _GROUP, _NUM_FIELDS) = (
    tl.constexpr(field)
    for field in (
        OUTER,
        INNER,
        FIRST_TILE,
        OUTER_TILES,
        INNER_TILES,
        FIRST_LINE,
        ROWS_ARE_INNER,
        GROUP,
        NUM_FIELDS,
    )
)
(_LR, _WEIGHT_DECAY, _MOMENTUM, _BETA2, _NUM_HYPER) = (
    tl.constexpr(column) for column in (LR, WEIGHT_DECAY, MOMENTUM, BETA2, NUM_HYPER)
)
_TILE = tl.constexpr(TILE)


@triton.jit
def _tile_of(tile_map):
    """The matrix of this program's tile, and the tile's first outer and inner index."""
    entry = tile_map + tl.program_id(0).to(tl.int64) * 3
    first_outer = tl.multiple_of(tl.load(entry + 1), _TILE)
    first_inner = tl.multiple_of(tl.load(entry + 2), _TILE)
    return tl.load(entry).to(tl.int64), first_outer, first_inner


@triton.jit
def _sizes(record, ALIGNED: tl.constexpr):
    """The matrix's outer and inner size; aligned ones are multiples of 8."""
    outer, inner = tl.load(record + _OUTER), tl.load(record + _INNER)
    if ALIGNED:
        outer = tl.multiple_of(outer, 8)
        inner = tl.multiple_of(inner, 8)
    return outer, inner


@triton.jit
def _offsets(record, stride_field: tl.constexpr, first_outer, first_inner, ALIGNED: tl.constexpr):
    """Element offsets of a tile in a stored tensor, and the mask of what exists; [TILE, TILE]."""
    stride = tl.load(record + stride_field)
    if ALIGNED:
        stride = tl.multiple_of(stride, 8)
    outer_size, inner_size = _sizes(record, ALIGNED)
    outer = first_outer + tl.arange(0, _TILE)
    inner = first_inner + tl.arange(0, _TILE)
    mask = (outer < outer_size)[:, None] & (inner < inner_size)[None, :]
    return outer.to(tl.int64)[:, None] * stride + inner[None, :], mask


@triton.jit
def _pointer(record, field: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in a field of the record, of elements of ``dtype``."""
    pointer = tl.load(record + field).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _x_offsets(record, first_outer, first_inner, ALIGNED: tl.constexpr):
    """Offsets and mask of a tile in X, [TILE, TILE] with X's short side first, and whether the tile is transposed."""
    outer_size, inner_size = _sizes(record, ALIGNED)
    transposed = outer_size > inner_size
    row = tl.where(transposed, first_inner, first_outer) + tl.arange(0, _TILE)
    column = tl.where(transposed, first_outer, first_inner) + tl.arange(0, _TILE)
    stride = tl.multiple_of(tl.load(record + _X_STRIDE), 8)
    rows = tl.where(transposed, inner_size, outer_size)
    columns = tl.where(transposed, outer_size, inner_size)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    return row.to(tl.int64)[:, None] * stride + column[None, :], mask, transposed


@triton.jit
def _load_x(record, first_outer, first_inner, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """A tile of X in fp32, in the storage's order."""
    offsets, mask, transposed = _x_offsets(record, first_outer, first_inner, ALIGNED)
    x = tl.load(_pointer(record, _X, dtype, True) + offsets, mask=mask, other=0.0)
    if transposed:
        x = tl.trans(x)
    return x.to(tl.float32)


@triton.jit
def _line_sums(u, rows_are_inner):
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
def _direction(g, b, momentum, NESTEROV: tl.constexpr):
    """U, from the gradient and the buffer as it is stored after its move."""
    if NESTEROV:
        return (1.0 - momentum) * g + momentum * b
    return b


@triton.jit
def _gradient(
    record, first_outer, first_inner, control, G_DTYPE: tl.constexpr, MAXIMIZE: tl.constexpr, ALIGNED: tl.constexpr
):
    offsets, mask = _offsets(record, _G_STRIDE, first_outer, first_inner, ALIGNED)
    g = tl.load(_pointer(record, _G, G_DTYPE, ALIGNED) + offsets, mask=mask, other=0.0).to(tl.float32)
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
    matrix, first_outer, first_inner = _tile_of(tile_map)
    record = table + matrix * _NUM_FIELDS
    momentum = tl.load(hyper + tl.load(record + _GROUP) * _NUM_HYPER + _MOMENTUM)
    g = _gradient(record, first_outer, first_inner, control, G_DTYPE, MAXIMIZE, ALIGNED)
    offsets, mask = _offsets(record, _B_STRIDE, first_outer, first_inner, ALIGNED)
    pointers = _pointer(record, _B, B_DTYPE, ALIGNED) + offsets
    b = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    stored = narrow(momentum * b + (1.0 - momentum) * g, B_DTYPE)
    if tl.load(control + 1) == 0.0:
        tl.store(pointers, stored, mask=mask)
    u = _direction(g, stored.to(tl.float32), momentum, NESTEROV)
    out = sums + tl.program_id(0).to(tl.int64) * _TILE + tl.arange(0, _TILE)
    tl.store(out, _line_sums(u, _lines_are_inner(record, True)))


@triton.jit
def squares_kernel(table, tile_map, sums, X_DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The tile's sums of O² by V's lines: rows of a matrix with r ≥ c, else columns."""
    matrix, first_outer, first_inner = _tile_of(tile_map)
    record = table + matrix * _NUM_FIELDS
    o = _load_x(record, first_outer, first_inner, X_DTYPE, ALIGNED)
    out = sums + tl.program_id(0).to(tl.int64) * _TILE + tl.arange(0, _TILE)
    tl.store(out, _line_sums(o, _lines_are_inner(record, False)))


@triton.jit
def _lines_are_inner(record, BY_ROWS: tl.constexpr):
    """Whether the inner index numbers the lines: the matrix's rows (BY_ROWS), or its longer side (ties: rows)."""
    rows_are_inner = tl.load(record + _ROWS_ARE_INNER) != 0
    if BY_ROWS:
        return rows_are_inner
    outer, inner = tl.load(record + _OUTER), tl.load(record + _INNER)
    return (inner > outer) | ((inner == outer) & rows_are_inner)


@triton.jit
def lines_kernel(table, line_map, sums, lines, BY_ROWS: tl.constexpr):
    """Add a block of lines over the tiles that they cross, in order. Map: (matrix, number of the block)."""
    entry = line_map + tl.program_id(0).to(tl.int64) * 2
    matrix, block = tl.load(entry).to(tl.int64), tl.load(entry + 1).to(tl.int64)
    record = table + matrix * _NUM_FIELDS
    inner_lines = _lines_are_inner(record, BY_ROWS)
    outer_tiles, inner_tiles = tl.load(record + _OUTER_TILES), tl.load(record + _INNER_TILES)
    count = tl.where(inner_lines, outer_tiles, inner_tiles)
    step = tl.where(inner_lines, inner_tiles, 1)
    start = tl.load(record + _FIRST_TILE) + tl.where(inner_lines, block, block * inner_tiles)
    line = tl.arange(0, _TILE)
    total = tl.zeros((_TILE,), tl.float64)
    if block < tl.where(inner_lines, inner_tiles, outer_tiles):
        for tile in range(count):
            total += tl.load(sums + (start + tile * step) * _TILE + line)
    tl.store(lines + tl.load(record + _FIRST_LINE) + block * _TILE + line, total)


@triton.jit
def _num_lines(record, BY_ROWS: tl.constexpr):
    inner = _lines_are_inner(record, BY_ROWS)
    return tl.where(inner, tl.load(record + _INNER), tl.load(record + _OUTER))


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
    record = table + tl.program_id(0).to(tl.int64) * _NUM_FIELDS
    rows = _num_lines(record, True)
    first = tl.load(record + _FIRST_LINE)
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
def _factor_tile(record, factors, first_outer, first_inner, BY_ROWS: tl.constexpr):
    """Factors of the tile's lines, to be broadcast over the tile: [TILE, 1] or [1, TILE], as a full tile."""
    inner_lines = _lines_are_inner(record, BY_ROWS)
    line = tl.where(inner_lines, first_inner, first_outer) + tl.arange(0, _TILE)
    factor = tl.load(factors + tl.load(record + _FIRST_LINE) + line, mask=line < _num_lines(record, BY_ROWS), other=0.0)
    by_inner = tl.broadcast_to(factor[None, :], (_TILE, _TILE))
    by_outer = tl.broadcast_to(factor[:, None], (_TILE, _TILE))
    return tl.where(inner_lines, by_inner, by_outer)


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
    matrix, first_outer, first_inner = _tile_of(tile_map)
    record = table + matrix * _NUM_FIELDS
    momentum = tl.load(hyper + tl.load(record + _GROUP) * _NUM_HYPER + _MOMENTUM)
    offsets, mask = _offsets(record, _B_STRIDE, first_outer, first_inner, ALIGNED)
    b = tl.load(_pointer(record, _B, B_DTYPE, ALIGNED) + offsets, mask=mask, other=0.0).to(tl.float32)
    u = b
    if NESTEROV:
        g = _gradient(record, first_outer, first_inner, control, G_DTYPE, MAXIMIZE, ALIGNED)
        u = _direction(g, b, momentum, NESTEROV)
    x = narrow(u * _factor_tile(record, factors, first_outer, first_inner, True), X_DTYPE)
    x_offsets, x_mask, transposed = _x_offsets(record, first_outer, first_inner, ALIGNED)
    pointers = _pointer(record, _X, X_DTYPE, True) + x_offsets
    if transposed:
        x = tl.trans(x)
    tl.store(pointers, x, mask=x_mask)


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
    record = table + tl.program_id(0).to(tl.int64) * _NUM_FIELDS
    first = tl.load(record + _FIRST_LINE)
    count = _num_lines(record, False)
    outer, inner = tl.load(record + _OUTER), tl.load(record + _INNER)
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
        beta2 = tl.load(hyper + tl.load(record + _GROUP) * _NUM_HYPER + _BETA2)
        v_pointer = tl.load(record + _V).to(tl.pointer_type(tl.float32))
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
    matrix, first_outer, first_inner = _tile_of(tile_map)
    record = table + matrix * _NUM_FIELDS
    row = hyper + tl.load(record + _GROUP) * _NUM_HYPER
    lr, weight_decay = tl.load(row + _LR), tl.load(row + _WEIGHT_DECAY)
    o = _load_x(record, first_outer, first_inner, X_DTYPE, ALIGNED)
    if HAS_FACTORS:
        o = o * _factor_tile(record, factors, first_outer, first_inner, False)
    offsets, mask = _offsets(record, _P_STRIDE, first_outer, first_inner, ALIGNED)
    pointers = _pointer(record, _P, P_DTYPE, ALIGNED) + offsets
    if HAS_MASTER:
        masters = _pointer(record, _MASTER, tl.float32, ALIGNED) + offsets
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
