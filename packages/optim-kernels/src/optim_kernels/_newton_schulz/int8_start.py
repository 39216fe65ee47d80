"""The first step of the standard iteration in int8, where Hopper multiplies twice as fast as in 16 bits:

    A = X₈X₈ᵀ           X₈ = int8(X)       the diagonals of A and S are those of XXᵀ and bA + cA²
    S = bA + cA₈A₈ᵀ     A₈ = int8(A)
    X ← aX + S₈X₈'      S₈ = int8(S)       X₈' = int8(Xᵀ)ᵀ, so its units belong to columns

It has to be safe for every matrix. Keller's polynomial brings singular values σ up to 1.2024 in a step, and takes what
is above 1.2637 beyond all bounds: 5 % too much after the first step is the end. So with u and v the singular vectors of
a large σ, ‖X‖ = 1, and E for what rounding adds (at random, and each number apart: `_kernels.int8_rounding`):

    X₈X₈ᵀ   uᵀEv is about r/2 with r² = Σ_i u_i² max_k x_ik² / 126² ≤ 1/126². EEᵀ would be as much as n r²/4, a quarter
            at n = 16,000, but for its diagonal, where alone it does not cancel, and which is replaced
    A₈A₈ᵀ   likewise, r² = Σ_i u_i² a_ii max_j a_jj / 122² ≤ 1/122²
    S₈X     E has a unit for each row of S, √(|s_ii| max_j |s_jj|) / 122, so EXv = σEu has a norm of
            σ √(Σ_i |s_ii| max_j |s_jj|) / 244 ≤ σ |b| / 244 at most, and points nowhere
    SX₈'    E has a unit c_k for each column of X: Σ_k c_k² ≤ Σ_ik x_ik² / 126² = 1/126², so uᵀE has a norm of 1/252
            at most. Units for the rows of X would have to be factors of S, where numbers that are small beside the
            largest of their row, yet many, would be lost in its unit

None of these grows with m or n: each is two hundredths at most of what p(σ) is. Whatever was tried, the largest σ after
this step was 1.21. Errors of the result are those of fp16, for SX is little beside aX, which keeps its 16 bits, and
what rounding leaves in one factor of a product stays within the rows or columns of X because of the other one, so that
later steps do not enlarge it as they enlarge what lies beside them. (So S's diagonal may not be multiplied apart, by an
X that is not rounded.) They are larger where few numbers decide about a large σ: up to .07 with few rows that are not
zero or differ. What rounding S and rounding X add together lies beside X; where a row outweighs thousands that are its
multiples that is .2 of the result with 2,000 rows, and grows about as √m (fp16 leaves .15 of a random matrix of rank
one, bf16 1.1).

Products of int8 are summed exactly. e4m3 multiplies as fast, but the tensor cores keep 14 bits of its sums, and its
rounding is off by up to 6 % of each number, which equal numbers share.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from optim_kernels._impl import is_interpreted
from optim_kernels._kernels.int8_rounding import Int8Matrix, add_diagonal, nbytes_of_int8, to_int8
from optim_kernels._newton_schulz.block_launch import BlockLaunch, alignment_of, layout_of
from optim_kernels._newton_schulz.coefficients import Triple
from optim_kernels._newton_schulz.config import NSConfig
from optim_kernels._newton_schulz.copy_engine import ALIGNMENT, empty_matrices
from optim_kernels._newton_schulz.tile_choice import has_gluon, num_multiprocessors
from optim_kernels._newton_schulz.tiles import PING_PONG_INT8, TILE_GROUP, cdiv, symmetric_tiles

# Kept launches of the three products.
NUM_LAUNCHES = 256
# Launches that `first_step` takes for a matrix: these, two that round it, and one for S's diagonal.
STEP_LAUNCHES = 6


def starts_in_int8(m: int, n: int, config: NSConfig, device: torch.device) -> bool:
    """Whether m×n matrices on this device take their first step in int8, however many they are."""
    is_possible = config.may_start_in_int8(m, n) and device.type == "cuda" and not is_interpreted()
    return is_possible and has_gluon(device.index)


def nbytes_of_first_step(m: int, n: int) -> int:
    """The most bytes that `first_step` allocates for one matrix with short side m and long side n."""
    row = cdiv(m, ALIGNMENT) * ALIGNMENT
    return nbytes_of_int8(m, n) + 2 * m * row


def first_step(x: Tensor, triple: Triple, gram: Tensor, out: Tensor, scales: Tensor | None = None) -> None:
    """Compute ``aX + (bA + cA²)X`` for ``x [batch, M, N]``; X = σx with ``scales``, σ ``[batch]``.

    One matrix after another, each of which fills the chip. ``gram``: room for A of one, ``[1, M, M]``.
    """
    for number in range(len(x)):
        one = slice(number, number + 1)
        _first_step(x[one], triple, gram, out[one], None if scales is None else scales[one])


def _first_step(x: Tensor, triple: Triple, gram: Tensor, out: Tensor, scale: Tensor | None) -> None:
    a, b, c = triple
    start = to_int8(x, scale)
    rounded_gram = _gram(start, gram)
    add_diagonal(start, b, c)
    _step(start, _polynomial(start, gram, rounded_gram, b, c), x, a, out, scale)


def _gram(start: Int8Matrix, gram: Tensor) -> Tensor:
    """Write A to ``gram``, but for its tiles above the diagonal, and return it in int8."""
    # Gluon
    from optim_kernels._hopper.int8_kernel import GRAM

    m, units = len(start.a_diagonal), start.row_units
    x, rounded = start.by_rows, empty_matrices(1, m, m, like=start.by_rows)
    of_rows = start.a_diagonal, start.a_roots, start.a_largest, start.a_largest
    vectors = units, units, *of_rows, start.partials
    _product(GRAM.value, (x, x, gram, gram, rounded, rounded), vectors, (1.0, 0.0))
    return rounded


def _polynomial(start: Int8Matrix, gram: Tensor, rounded_gram: Tensor, b: float, c: float) -> Tensor:
    """S in int8."""
    # Gluon
    from optim_kernels._hopper.int8_kernel import POLYNOMIAL

    m, a = len(start.a_diagonal), rounded_gram
    rounded = empty_matrices(1, m, m, like=a)
    of_rows = start.s_diagonal, start.s_roots, start.a_largest, start.s_largest
    vectors = start.a_roots, start.a_roots, *of_rows, start.partials
    _product(POLYNOMIAL.value, (a, a, gram, gram, rounded, rounded), vectors, (c, b))
    return rounded


def _step(start: Int8Matrix, s: Tensor, x: Tensor, a: float, out: Tensor, scale: Tensor | None) -> None:
    """Write aX + SX to ``out``."""
    # Gluon
    from optim_kernels._hopper.int8_kernel import STEP

    of_rows = start.s_diagonal, start.s_roots, start.s_largest, start.s_largest
    vectors = start.s_roots, start.column_units, *of_rows, start.partials
    _product(STEP.value, (s, start.by_columns, x, out, s, s), vectors, (1.0, a), scale)


def _product(
    kind: int,
    matrices: tuple[Tensor, ...],
    vectors: tuple[Tensor, ...],
    numbers: tuple[float, float],
    scale: Tensor | None = None,
) -> None:
    """One of `_hopper.int8_kernel`; arguments are in its order, ``numbers``: α and β."""
    key = (*map(layout_of, matrices), *map(alignment_of, vectors), alignment_of(scale))
    launch, counts = _launch(kind, key, matrices[0].device)
    launch.launch(matrices, (*vectors, vectors[0] if scale is None else scale, *counts, *numbers))


@lru_cache(maxsize=NUM_LAUNCHES)
def _launch(kind: int, key: tuple[Any, ...], device: torch.device) -> tuple[BlockLaunch, tuple[int, ...]]:
    """The launch, and the numbers of tiles, the length of the sums, and the rows and columns to pass to it."""
    # Gluon
    from optim_kernels._hopper.int8_kernel import STEP, int8_product_kernel
    from optim_kernels._hopper.ring import descriptor

    ((_, m, k), *_), ((_, n, _), *_), *_, scale = key
    side, depth = PING_PONG_INT8.rows, PING_PONG_INT8.depth
    rows, columns = cdiv(m, side), cdiv(n, side)
    total = rows * columns if kind == STEP.value else symmetric_tiles(m, PING_PONG_INT8)
    launch = BlockLaunch(
        int8_product_kernel,
        min(total, num_multiprocessors(device.index)),
        [(side, depth), (side, depth), *(2 * [(side, side)]), (side, side // 2), (side // 2, side)],
        (kind, scale is not None, TILE_GROUP, depth, PING_PONG_INT8.num_stages - (kind != STEP.value)),
        describe=descriptor,
        num_warps=4,
    )
    return launch, (total, rows, columns, k, m, n)
