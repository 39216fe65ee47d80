"""Triton kernels of Newton–Schulz: one symmetric product and one general product, on batches of matrices.

    symmetric_kernel    D = s (α A Bᵀ + β C),  Q = D + ω I     D symmetric: one triangle is computed, and mirrored
    general_kernel      D = s (α A B + β C)

Every matrix is row-major with its own batch: A [batch, M, K], B [batch, M, K] or [batch, K, N], C and D like the
product; s is 1 or a number of each matrix, read on the device; α and β are numbers, or addresses of fp32 ones. Operands
arrive through tensor descriptors (the bulk copy engine), which fill what lies outside a matrix with zeros and drop what
is stored there, so no size has to divide a tile. Sums are fp32 and rounded once. Descriptors of C and Q where
there is none, of B where it is A, and of mirror images that are shaped like their tiles, are ``None``.

D has to be symmetric to the last bit: later products read it as its transpose, and what would remain of A Bᵀ − B Aᵀ in
a diagonal tile, rounding alone, grows tenfold through the Gram iteration (measured: 2e-2 instead of 2e-3). A Aᵀ is
symmetric by itself, the tensor cores add in one order; of A Bᵀ a diagonal tile keeps its lower half.

Letters: i, j tile row and column; T square blocks a side; q a tile's number within its matrix.
"""

from __future__ import annotations

from optim_kernels._triton import dot, narrow, tl, triton


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
def _numbers(alpha, beta, BY_ADDRESS: tl.constexpr):
    """α and β, which came as themselves or by their addresses."""
    if BY_ADDRESS:
        alpha = tl.load(alpha)
        beta = tl.load(beta)
    return alpha, beta


@triton.jit
def _store_both(desc, mirror_desc, d, batch, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a tile and its mirror image; a square one has blocks of one shape for both."""
    desc.store([batch, row, column], d.reshape(1, BLOCK_M, BLOCK_N))
    if BLOCK_M == BLOCK_N:
        desc.store([batch, column, row], d.T.reshape(1, BLOCK_N, BLOCK_M))
    else:
        mirror_desc.store([batch, column, row], d.T.reshape(1, BLOCK_N, BLOCK_M))


@triton.jit
def _symmetric_tile(
    operands,
    results,
    batch,
    row,
    column,
    is_diagonal,
    K,
    numbers,
    HAS_C: tl.constexpr,
    HAS_Q: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SAME: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The tile at (row, column), and its mirror image unless it is on the diagonal."""
    a_desc, b_desc, c_desc = operands
    d_desc, mirror_desc, q_desc, q_mirror_desc = results
    scale, alpha, beta, omega = numbers
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a = a_desc.load([batch, row, k]).reshape(BLOCK_M, BLOCK_K)
        if SAME and BLOCK_M == BLOCK_N:
            b = a_desc.load([batch, column, k]).reshape(BLOCK_N, BLOCK_K)
        else:
            b = b_desc.load([batch, column, k]).reshape(BLOCK_N, BLOCK_K)
        acc = dot(a, b.T, acc)
    acc = acc * alpha
    if HAS_C:
        c = c_desc.load([batch, row, column]).reshape(BLOCK_M, BLOCK_N)
        acc += beta * c.to(tl.float32)
    if HAS_SCALE:
        acc *= tl.load(scale + batch)
    d = narrow(acc, d_desc.dtype)
    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    if not is_diagonal:
        _store_both(d_desc, mirror_desc, d, batch, row, column, BLOCK_M, BLOCK_N)
        if HAS_Q:
            _store_both(q_desc, q_mirror_desc, d, batch, row, column, BLOCK_M, BLOCK_N)
    else:
        if not SAME:
            tl.static_assert(BLOCK_M == BLOCK_N)
            d = tl.where(rows[:, None] >= columns[None, :], d, d.T)
        d_desc.store([batch, row, column], d.reshape(1, BLOCK_M, BLOCK_N))
        if HAS_Q:
            shifted = tl.where(rows[:, None] == columns[None, :], d.to(tl.float32) + omega, d.to(tl.float32))
            q_desc.store([batch, row, column], narrow(shifted, d_desc.dtype).reshape(1, BLOCK_M, BLOCK_N))


@triton.jit
def symmetric_kernel(
    a_desc,
    b_desc,
    c_desc,
    d_desc,
    mirror_desc,
    q_desc,
    q_mirror_desc,
    scale,
    tiles,
    T,
    K,
    alpha,
    beta,
    omega,
    HAS_C: tl.constexpr,
    HAS_Q: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BY_ADDRESS: tl.constexpr,
    SAME: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    # the triangle is made of BLOCK_N × BLOCK_N blocks, each of one or two tiles
    PARTS: tl.constexpr = BLOCK_N // BLOCK_M
    pid = tl.program_id(0)
    batch = pid // tiles
    q = pid % tiles
    i, j = triangle_tile(q // PARTS, T, GROUP)
    operands, results = (a_desc, b_desc, c_desc), (d_desc, mirror_desc, q_desc, q_mirror_desc)
    alpha, beta = _numbers(alpha, beta, BY_ADDRESS)
    numbers = (scale, alpha, beta, omega)
    row, column = i * BLOCK_N + (q % PARTS) * BLOCK_M, j * BLOCK_N
    _symmetric_tile(
        operands,
        results,
        batch,
        row,
        column,
        i == j,
        K,
        numbers,
        HAS_C,
        HAS_Q,
        HAS_SCALE,
        SAME,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )


@triton.jit
def quartered_kernel(
    a_desc,
    b_desc,
    c_desc,
    d_desc,
    q_desc,
    small_a_desc,
    small_b_desc,
    small_c_desc,
    small_d_desc,
    small_q_desc,
    scale,
    whole,
    T,
    K,
    alpha,
    beta,
    omega,
    HAS_C: tl.constexpr,
    HAS_Q: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BY_ADDRESS: tl.constexpr,
    SAME: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The symmetric product with tiles below the diagonal whole, and of each on it three of its four quarters.

    All whole ones come first: the quarters fill what they leave free.
    """
    HALF: tl.constexpr = BLOCK // 2
    pid = tl.program_id(0)
    alpha, beta = _numbers(alpha, beta, BY_ADDRESS)
    numbers = (scale, alpha, beta, omega)
    if pid < whole:
        count = T * (T - 1) // 2
        i, j = triangle_tile(pid % count, T - 1, GROUP)
        _symmetric_tile(
            (a_desc, b_desc, c_desc),
            (d_desc, None, q_desc, None),
            pid // count,
            (i + 1) * BLOCK,
            j * BLOCK,
            False,
            K,
            numbers,
            HAS_C,
            HAS_Q,
            HAS_SCALE,
            SAME,
            BLOCK,
            BLOCK,
            BLOCK_K,
        )
    else:
        # upper left, lower left, lower right
        quarter = (pid - whole) % 3
        first = (pid - whole) % (3 * T) // 3 * BLOCK
        _symmetric_tile(
            (small_a_desc, small_b_desc, small_c_desc),
            (small_d_desc, None, small_q_desc, None),
            (pid - whole) // (3 * T),
            first + (quarter + 1) // 2 * HALF,
            first + quarter // 2 * HALF,
            quarter != 1,
            K,
            numbers,
            HAS_C,
            HAS_Q,
            HAS_SCALE,
            SAME,
            HALF,
            HALF,
            BLOCK_K,
        )


@triton.jit
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
):
    pid = tl.program_id(0)
    batch = pid // tiles
    i, j = rectangle_tile(pid % tiles, rows, columns, GROUP)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a = a_desc.load([batch, i * BLOCK_M, k]).reshape(BLOCK_M, BLOCK_K)
        b = b_desc.load([batch, k, j * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
        acc = dot(a, b, acc)
    alpha, beta = _numbers(alpha, beta, BY_ADDRESS)
    acc = acc * alpha
    if HAS_C:
        c = c_desc.load([batch, i * BLOCK_M, j * BLOCK_N]).reshape(BLOCK_M, BLOCK_N)
        acc += beta * c.to(tl.float32)
    if HAS_SCALE:
        acc *= tl.load(scale + batch)
    d = narrow(acc, d_desc.dtype)
    d_desc.store([batch, i * BLOCK_M, j * BLOCK_N], d.reshape(1, BLOCK_M, BLOCK_N))
