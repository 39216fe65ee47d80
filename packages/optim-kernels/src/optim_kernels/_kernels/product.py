"""Triton kernels of Newton–Schulz: the general product here, the symmetric one in `symmetric`.

    symmetric_kernel    D = s (α A Bᵀ + β C),  Q = D + ω I     D symmetric: one triangle is computed, and mirrored
    general_kernel      D = s (α A B + β C)

Every matrix is row-major with its own batch: A [batch, M, K], B [batch, M, K] or [batch, K, N], C and D like the
product; s is 1 or a number of each matrix, read on the device; α and β are numbers, or addresses of fp32 ones. Operands
arrive through tensor descriptors (the bulk copy engine), which fill what lies outside a matrix with zeros and drop what
is stored there, so no size has to divide a tile. Sums are fp32, or fp64 with IN_FP64, and rounded once. With OVERLAP
the next launch may come to the device when the sums are done.

Letters: i, j tile row and column; T square blocks a side; q a tile's number within its matrix.
"""

from __future__ import annotations

from optim_kernels._triton import dot, let_next_start, narrow, tl, triton, wait_for_previous


@triton.jit
def triangle_tile(q, T, GROUP: tl.constexpr):
    """Tile ``q`` of the lower triangle as (i, j), in panels of GROUP rows that are walked column by column.

    Row-major order would read every column's operand again for each row; in a panel it is read once for GROUP rows.
    The panel of rows GROUP·I … starts at number P(P + 1)/2 with P = GROUP·I, as rows do in row-major order.
    """
    row = ((tl.sqrt(8.0 * q.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # the root is rounded: step to the row with row(row + 1)/2 <= q < (row + 1)(row + 2)/2
    row = tl.where(row * (row + 1) // 2 > q, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= q, row + 1, row)
    first = (row // GROUP) * GROUP
    height = tl.minimum(GROUP, T - first)
    inside = q - first * (first + 1) // 2
    in_rectangle = inside < first * height
    # the panel ends in a triangle of its own, whose column k holds rows k … height − 1
    rest = inside - first * height
    column = 0
    for _ in tl.static_range(GROUP - 1):
        wrap = rest >= height - column
        rest = tl.where(wrap, rest - (height - column), rest)
        column = tl.where(wrap, column + 1, column)
    i = tl.where(in_rectangle, first + inside % height, first + column + rest)
    j = tl.where(in_rectangle, inside // height, first + column)
    return i, j


@triton.jit
def rectangle_tile(q, rows, columns, GROUP: tl.constexpr):
    """Tile ``q`` of a rows × columns grid as (i, j), in panels of GROUP rows that are walked column by column."""
    panel = q // (GROUP * columns)
    first = panel * GROUP
    height = tl.minimum(GROUP, rows - first)
    inside = q - panel * GROUP * columns
    return first + inside % height, inside // height


@triton.jit
def read_numbers(alpha, beta, BY_ADDRESS: tl.constexpr):
    """α and β, passed as numbers or by their addresses."""
    if BY_ADDRESS:
        alpha = tl.load(alpha)
        beta = tl.load(beta)
    return alpha, beta


@triton.jit
def with_c(acc, beta, c):
    """``acc + β C``, rounded once; acc is rounded before, as α times the sums.

    Left to the compiler, either product would be rounded, and kernels of one product would differ in bits.
    """
    return tl.fma(c, beta, acc)


@triton.jit
def scaled(acc, scale):
    """``s acc`` in fp32, rounded, also where the compiler could fuse it with what is subtracted from it."""
    return tl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [acc, scale], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def multiply_tile(
    a_desc,
    b_desc,
    batch,
    row,
    column,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_FP64: tl.constexpr = False,
):
    """The tile of A B at (row, column), in fp32 or fp64."""
    if a_desc.dtype == tl.float32 and not IN_FP64:
        # of 32-bit operands the right one has to be contiguous along K, as A is and B is not: so compute Bᵀ Aᵀ
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, K, BLOCK_K):
            a = a_desc.load([batch, row, k]).reshape(BLOCK_M, BLOCK_K)
            b = b_desc.load([batch, k, column]).reshape(BLOCK_K, BLOCK_N)
            sums = dot(b.T, a.T, sums)
        return sums.T
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float64 if IN_FP64 else tl.float32)
    for k in range(0, K, BLOCK_K):
        a = a_desc.load([batch, row, k]).reshape(BLOCK_M, BLOCK_K)
        b = b_desc.load([batch, k, column]).reshape(BLOCK_K, BLOCK_N)
        sums = dot(a, b, sums)
    return sums


@triton.jit(do_not_specialize=["tiles", "rows", "columns", "K"])
def general_kernel(
    a_desc,
    b_desc,
    c_desc,
    d_desc,
    scale,
    tiles,
    rows,
    columns,
    K,
    alpha,
    beta,
    HAS_C: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BY_ADDRESS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
    IN_FP64: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    pid = tl.program_id(0)
    batch = pid // tiles
    i, j = rectangle_tile(pid % tiles, rows, columns, GROUP)
    acc = multiply_tile(a_desc, b_desc, batch, i * BLOCK_M, j * BLOCK_N, K, BLOCK_M, BLOCK_N, BLOCK_K, IN_FP64)
    let_next_start(OVERLAP)
    alpha, beta = read_numbers(alpha, beta, BY_ADDRESS)
    acc = acc * alpha
    if HAS_C:
        c = c_desc.load([batch, i * BLOCK_M, j * BLOCK_N]).reshape(BLOCK_M, BLOCK_N)
        acc = with_c(acc, beta, c.to(acc.dtype))
    if HAS_SCALE:
        acc *= tl.load(scale + batch)
    d = narrow(acc, d_desc.dtype)
    d_desc.store([batch, i * BLOCK_M, j * BLOCK_N], d.reshape(1, BLOCK_M, BLOCK_N))
