"""Newton–Schulz in plain torch, in the dtype it is given: the definition that every other path is measured against.

    X₀ = G / N,   N = max(s‖G‖, eps)  or  s‖G‖ + eps,   ‖·‖ the Frobenius norm, s ``norm_scale``
    X ← aX + (bA + cA²)X,   A = XXᵀ                     for each triple (a, b, c)

For G = UΣVᵀ the result is U p(Σ/N) Vᵀ with p the composition of the odd polynomials ax + bx³ + cx⁵. With row factors X₀
is first multiplied by D = diag(rsqrt(Σ_j |A_ij|)), A = X₀X₀ᵀ, which makes ‖DX₀‖₂ ≤ 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def norm_divisor(norm: Tensor, *, norm_scale: float, eps: float, eps_mode: str) -> Tensor:
    """N for the Frobenius norm ``norm``; 1 where it would be 0, so that a zero matrix stays zero."""
    scaled = norm * norm_scale
    divisor = scaled + eps if eps_mode == "add" else scaled.clamp(min=eps)
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def frobenius_norm(x: Tensor) -> Tensor:
    """Norms of the matrices ``[..., M, N] -> [..., 1, 1]``, summed in fp64: squares of 1e±30 stay finite."""
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float64)


def newton_schulz(
    x: Tensor,
    triples: Sequence[tuple[float, float, float]],
    *,
    norm_scale: float = 1.0,
    eps: float = 1e-7,
    eps_mode: str = "clamp",
    row_factors: bool = False,
) -> Tensor:
    """The iteration on ``x [..., M, N]``, every operation in ``x.dtype``."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = (x / norm_divisor(frobenius_norm(x), norm_scale=norm_scale, eps=eps, eps_mode=eps_mode)).to(x.dtype)
    if row_factors:
        sums = (x @ x.mT).abs().sum(dim=-1, keepdim=True)
        x = x * torch.where(sums == 0, 0, sums.rsqrt())
    for a, b, c in triples:
        gram = x @ x.mT  # [..., M, M]
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x
