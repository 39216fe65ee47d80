"""The first step of the standard iteration in int8, where Hopper multiplies twice as fast as in 16 bits:

    A = X₈X₈ᵀ           X₈ = int8(X)       the diagonals of X₈X₈ᵀ and A₈A₈ᵀ are those of XXᵀ and A²
    S = bA + cA₈A₈ᵀ     A₈ = int8(A)
    X ← aX + S₈X₈'      S₈ = int8(S)       X₈' = int8(Xᵀ)ᵀ, so its units belong to columns

It has to be safe for every matrix. Keller's polynomial brings singular values σ up to 1.2024 in a step, and takes what
is above 1.2637 beyond all bounds: 5 % too much after the first step is the end. So with u and v the singular vectors of
a large σ, ‖X‖ = 1, and E for what rounding adds (at random, and each number apart: `_kernels.int8_rows`):

    X₈X₈ᵀ   uᵀEv is about r/2 with r² = Σ_i u_i² max_k x_ik² / 126² ≤ 1/126². EEᵀ would be as much as n r²/4, a quarter
            at n = 16,000, but for its diagonal, where alone it does not cancel, and which is replaced
    A₈A₈ᵀ   likewise
    S₈X     E has a unit for each row of S, max_j |s_ij| / 126, so EXv = σEu has a norm of σ‖S‖ / 252 at most, and
            points nowhere
    SX₈'    E has a unit c_k for each column of X: Σ_k c_k² ≤ Σ_ik x_ik² / 126² = 1/126², so uᵀE has a norm of 1/252
            at most. Units for the rows of X would have to be factors of S, where numbers that are small beside the
            largest of their row, yet many, would be lost in its unit

None of these grows with m or n: each is a hundredth at most of what p(σ) is. Whatever was tried, the largest σ after
this step was 1.21. Errors of the result are those of fp16, for SX is little beside aX, which keeps its 16 bits, and
what rounding leaves in one factor of a product stays within the rows or columns of X because of the other one, so that
later steps do not enlarge it as they enlarge what lies beside them. They are larger where few numbers decide about a
large σ: up to .05 with few rows that are not zero or differ. What rounding S and rounding X add together lies beside X;
where a row outweighs thousands that are its multiples that is .2 of the result with 2,000 rows, and grows about as √m
(fp16 leaves .15 of a random matrix of rank one, bf16 1.1).

Products of int8 are summed exactly. e4m3 multiplies as fast, but the tensor cores keep 14 bits of its sums, and its
rounding is off by up to 6 % of each number, which equal numbers share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optim_kernels._impl import is_interpreted
from optim_kernels._kernels.int8_rows import Int8Rows, to_int8, transposed
from optim_kernels._newton_schulz.coefficients import Triple
from optim_kernels._newton_schulz.config import NSConfig
from optim_kernels._newton_schulz.product_launches import ping_pong
from optim_kernels._newton_schulz.tile_choice import has_gluon
from optim_kernels._newton_schulz.tiles import PING_PONG_INT8


def starts_in_int8(m: int, n: int, config: NSConfig, device: torch.device) -> bool:
    """Whether m×n matrices on this device take their first step in int8, however many they are."""
    is_possible = config.may_start_in_int8(m, n) and device.type == "cuda" and not is_interpreted()
    return is_possible and has_gluon(device.index)


def first_step(
    x: Tensor, triple: Triple, factors: tuple[Tensor, Tensor], out: Tensor, scales: tuple[Tensor, Tensor] | None = None
) -> None:
    """Compute ``aX + (bA + cA²)X`` for ``x [batch, M, N]``; X = σx with ``scales`` (σ, σ²) ``[batch]``.

    One matrix after another, each of which fills the chip. ``factors``: room for A and S of one, ``[1, M, M]``.
    """
    for number in range(len(x)):
        one = slice(number, number + 1)
        of_one = (None, None) if scales is None else (scales[0][one], scales[1][one])
        _first_step(x[one], triple, factors, out[one], *of_one)


def _first_step(
    x: Tensor,
    triple: Triple,
    factors: tuple[Tensor, Tensor],
    out: Tensor,
    scale: Tensor | None,
    squared_scale: Tensor | None,
) -> None:
    (a, b, c), (gram, s) = triple, factors
    # a seed for each, so that no two are off alike; X by columns first, as that takes the most memory
    right = to_int8(transposed(x), 3)
    _symmetric(to_int8(x, 0), gram, scale=squared_scale)
    _symmetric(to_int8(gram, 1), s, alpha=c, c=gram, beta=b)
    left = to_int8(s, 2)
    ping_pong(
        left.numbers,
        right.numbers,
        x,
        out,
        None,
        scale,
        PING_PONG_INT8,
        (1.0, a, 0.0),
        is_symmetric=False,
        int8=(left.units, right.units, left.units),
    )


def _symmetric(
    x: Int8Rows,
    out: Tensor,
    *,
    alpha: float = 1.0,
    c: Tensor | None = None,
    beta: float = 0.0,
    scale: Tensor | None = None,
) -> None:
    """Compute ``scale (alpha x xᵀ + beta c)``, with the diagonal of x xᵀ as it was before rounding."""
    ping_pong(
        x.numbers,
        x.numbers,
        c,
        out,
        None,
        scale,
        PING_PONG_INT8,
        (alpha, beta, 0.0),
        is_symmetric=True,
        int8=(x.units, x.units, x.squares),
    )
