"""Triton kernels of the symmetric product D = s (α A Bᵀ + β C), Q = D + ω I (letters as in `product`).

    symmetric_kernel    tiles on and below the diagonal
    quartered_kernel    tiles below the diagonal, and three quarters of each tile on it
    joined_kernel       A Aᵀ: tiles below the diagonal, and tiles on it in pairs

Descriptors of C and Q where there is none, of B where it is A, and of mirror images that are shaped like their tiles,
are ``None``.

D has to be symmetric to the last bit: later products read it as its transpose, and the rounding errors of A Bᵀ − B Aᵀ
that a diagonal tile would keep grow tenfold through the Gram iteration (measured: 2e-2 instead of 2e-3). A Aᵀ is
symmetric by itself, as the tensor cores add in one order. Elsewhere a diagonal tile mirrors its lower half: for A Bᵀ;
for fp32 A Aᵀ, whose small parts are added one after the other; and in the interpreter, where numpy may add in several
orders.
"""

from __future__ import annotations

from optim_kernels._kernels.product import read_numbers, triangle_tile, with_c
from optim_kernels._triton import INTERPRETED, dot, let_next_start, narrow, tl, triton, wait_for_previous


@triton.jit
def _store_both(desc, mirror_desc, d, batch, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a tile and its mirror image; a square tile takes one descriptor for both."""
    desc.store([batch, row, column], d.reshape(1, BLOCK_M, BLOCK_N))
    if BLOCK_M == BLOCK_N:
        desc.store([batch, column, row], d.T.reshape(1, BLOCK_N, BLOCK_M))
    else:
        mirror_desc.store([batch, column, row], d.T.reshape(1, BLOCK_N, BLOCK_M))


@triton.jit
def _finish_symmetric(
    acc,
    c_desc,
    results,
    batch,
    row,
    column,
    is_diagonal,
    numbers,
    HAS_C: tl.constexpr,
    HAS_Q: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SAME: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store the result of a tile's sums at (row, column), and its mirror image unless it is on the diagonal."""
    d_desc, mirror_desc, q_desc, q_mirror_desc = results
    scale, alpha, beta, omega = numbers
    acc = acc * alpha
    if HAS_C:
        c = c_desc.load([batch, row, column]).reshape(BLOCK_M, BLOCK_N)
        acc = with_c(acc, beta, c.to(acc.dtype))
    if HAS_SCALE:
        acc *= tl.load(scale + batch)
    d = narrow(acc, d_desc.dtype)
    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    if not is_diagonal:
        _store_both(d_desc, mirror_desc, d, batch, row, column, BLOCK_M, BLOCK_N)
        if HAS_Q:
            _store_both(q_desc, q_mirror_desc, d, batch, row, column, BLOCK_M, BLOCK_N)
    else:
        if not SAME or d_desc.dtype == tl.float32 or (INTERPRETED and BLOCK_M == BLOCK_N):
            tl.static_assert(BLOCK_M == BLOCK_N)
            d = tl.where(rows[:, None] >= columns[None, :], d, d.T)
        d_desc.store([batch, row, column], d.reshape(1, BLOCK_M, BLOCK_N))
        if HAS_Q:
            shifted = tl.where(rows[:, None] == columns[None, :], d.to(tl.float32) + omega, d.to(tl.float32))
            q_desc.store([batch, row, column], narrow(shifted, d_desc.dtype).reshape(1, BLOCK_M, BLOCK_N))


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
    OVERLAP: tl.constexpr,
    IN_FP64: tl.constexpr = False,
):
    """Compute the tile at (row, column), and store it and its mirror image unless it is on the diagonal."""
    a_desc, b_desc, c_desc = operands
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float64 if IN_FP64 else tl.float32)
    for k in range(0, K, BLOCK_K):
        a = a_desc.load([batch, row, k]).reshape(BLOCK_M, BLOCK_K)
        if SAME and BLOCK_M == BLOCK_N:
            b = a_desc.load([batch, column, k]).reshape(BLOCK_N, BLOCK_K)
        else:
            b = b_desc.load([batch, column, k]).reshape(BLOCK_N, BLOCK_K)
        acc = dot(a, b.T, acc)
    let_next_start(OVERLAP)
    _finish_symmetric(
        acc,
        c_desc,
        results,
        batch,
        row,
        column,
        is_diagonal,
        numbers,
        HAS_C,
        HAS_Q,
        HAS_SCALE,
        SAME,
        BLOCK_M,
        BLOCK_N,
    )


@triton.jit(do_not_specialize=["tiles", "T", "K"])
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
    OVERLAP: tl.constexpr,
    IN_FP64: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    # the triangle is made of BLOCK_N × BLOCK_N blocks, each of one or two tiles
    PARTS: tl.constexpr = BLOCK_N // BLOCK_M
    pid = tl.program_id(0)
    batch = pid // tiles
    q = pid % tiles
    i, j = triangle_tile(q // PARTS, T, GROUP)
    operands, results = (a_desc, b_desc, c_desc), (d_desc, mirror_desc, q_desc, q_mirror_desc)
    alpha, beta = read_numbers(alpha, beta, BY_ADDRESS)
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
        OVERLAP,
        IN_FP64,
    )


@triton.jit(do_not_specialize=["whole", "T", "K"])
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
    """The symmetric product: whole tiles below the diagonal, and three of the four quarters of each tile on it.

    Whole tiles come first: the quarters fill the multiprocessors that they leave free.
    """
    HALF: tl.constexpr = BLOCK // 2
    pid = tl.program_id(0)
    alpha, beta = read_numbers(alpha, beta, BY_ADDRESS)
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
            False,
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
            False,
        )


@triton.jit(do_not_specialize=["whole", "T", "K"])
def joined_kernel(
    x_desc,
    c_desc,
    d_desc,
    q_desc,
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
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """s (α X Xᵀ + β C): tiles below the diagonal, then those on it, two to a program, which reads as much as for one.

    T rows of tiles make T² / 2 programs: 128 for T = 16. Single tiles would make 136, and some of 132 multiprocessors
    would have to do the work of two.
    """
    wait_for_previous(OVERLAP)
    pid = tl.program_id(0)
    alpha, beta = read_numbers(alpha, beta, BY_ADDRESS)
    numbers = (scale, alpha, beta, omega)
    results = (d_desc, None, q_desc, None)
    if pid < whole:
        count = T * (T - 1) // 2
        i, j = triangle_tile(pid % count, T - 1, GROUP)
        _symmetric_tile(
            (x_desc, None, c_desc),
            results,
            pid // count,
            (i + 1) * BLOCK,
            j * BLOCK,
            False,
            K,
            numbers,
            HAS_C,
            HAS_Q,
            HAS_SCALE,
            True,
            BLOCK,
            BLOCK,
            BLOCK_K,
            OVERLAP,
        )
    else:
        pairs = (T + 1) // 2
        batch = (pid - whole) // pairs
        first = (pid - whole) % pairs * 2 * BLOCK
        # the last of an odd number of tiles has a partner beyond the matrix, which reads zeros and stores nothing
        second = first + BLOCK
        upper = tl.zeros((BLOCK, BLOCK), tl.float32)
        lower = upper
        for k in range(0, K, BLOCK_K):
            a = x_desc.load([batch, first, k]).reshape(BLOCK, BLOCK_K)
            b = x_desc.load([batch, second, k]).reshape(BLOCK, BLOCK_K)
            upper = dot(a, a.T, upper)
            lower = dot(b, b.T, lower)
        let_next_start(OVERLAP)
        _finish_symmetric(
            upper,
            c_desc,
            results,
            batch,
            first,
            first,
            True,
            numbers,
            HAS_C,
            HAS_Q,
            HAS_SCALE,
            True,
            BLOCK,
            BLOCK,
        )
        _finish_symmetric(
            lower,
            c_desc,
            results,
            batch,
            second,
            second,
            True,
            numbers,
            HAS_C,
            HAS_Q,
            HAS_SCALE,
            True,
            BLOCK,
            BLOCK,
        )
