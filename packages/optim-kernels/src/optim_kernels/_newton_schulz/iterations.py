"""The iterations of Newton–Schulz, in plain torch; `chain_jobs` lists the products of the same for the kernels.

For G = UΣVᵀ (M ≤ N; a tall matrix is handled as its transpose) both iterations compute U p(Σ/N) Vᵀ with an odd
polynomial p that maps (0, 1] to about 1:

    standard, each step     A = XXᵀ,  S = bA + cA²,  X ← aX + SX

    Gram, each block        R = XXᵀ,  then for each step of the block, all of them m×m,
                                Z = bR + cR²,  Q ← QZ + aQ  (first: Q = Z + aI)
                                P = RZ + aR,   R ← ZP + aP  (unless it is the block's last)
                            X ← QX

In exact arithmetic they agree: the m×m factors are polynomials in one symmetric R, so they commute and every product of
them is symmetric; only one triangle has to be computed. Rounding makes R drift from XXᵀ, and a restart (a new block)
forms it anew. For n = 4m and five steps the standard iteration takes 65 m³ flops with symmetric halves counted once,
Gram with a restart after two steps 38 m³; for n = m they tie at 20 m³, and the standard one is more accurate.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from optim_kernels._newton_schulz import torch_products as products
from optim_kernels._newton_schulz.config import NSConfig
from optim_kernels.reference.newton_schulz import frobenius_norm, norm_divisor

# Steps of the standard iteration whose S and X are exact (see `torch_products`). Later steps enlarge a step's errors:
# all five by 485 (keller) to 1,050 (cans), those after the second by 30 to 41.
NUM_EXACT = 2


def iterate(x: Tensor, config: NSConfig) -> Tensor:
    """The iteration that ``config`` chooses for normalised ``x [..., M, N]``, M ≤ N."""
    gram = config.method_for(*x.shape[-2:]) == "gram"
    return gram_iteration(x, config) if gram else standard_iteration(x, config)


def standard_iteration(x: Tensor, config: NSConfig) -> Tensor:
    """X ← aX + (bA + cA²)X, A = XXᵀ, for every triple."""
    for step, (a, b, c) in enumerate(config.triples):
        exact = step < NUM_EXACT
        gram = products.gram(x)
        if step == 0 and config.row_factors:
            x, gram = apply_row_factors(x, gram)
        if c == 0.0:  # cubic: S is a multiple of A
            x = products.matmul_add(gram, x, c=x, alpha=b, beta=a, exact=exact)
            continue
        s, _ = products.quadratic(gram, b, c, exact=exact)
        x = products.matmul_add(s, x, c=x, beta=a, exact=exact)
    return x


def gram_iteration(x: Tensor, config: NSConfig) -> Tensor:
    """The Gram iteration with restarts; see the module's formulas."""
    for number, block in enumerate(config.blocks):
        r = products.gram(x, exact=True)
        if number == 0 and config.row_factors:
            x, r = apply_row_factors(x, r)
        q: Tensor | None = None
        for step, (a, b, c) in enumerate(block, start=1):
            z, shifted = products.quadratic(r, b, c, a if q is None else None)
            if step < len(block):
                p = products.symmetric_matmul(r, z, c=r, beta=a)
                r = products.symmetric_matmul(z, p, c=p, beta=a)
            q = shifted if q is None else products.symmetric_matmul(q, z, c=q, beta=a)
        assert q is not None
        x = products.matmul_add(q, x, exact=True)
    return x


def apply_row_factors(x: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """``DX`` and ``DAD`` with D = diag(rsqrt(Σ_j |A_ij|)): by Gershgorin ‖DX‖₂ ≤ 1, whatever the norm was."""
    sums = gram.abs().sum(-1, keepdim=True, dtype=torch.float64 if gram.dtype == torch.float64 else torch.float32)
    # a NaN stays one
    factors = torch.where(sums == 0, torch.zeros_like(sums), sums.rsqrt())
    return x.mul_(factors), gram.copy_(gram * factors * factors.mT)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which products on x's device keep the dtype of their operands, whatever is around it."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def normalize(x: Tensor, config: NSConfig) -> tuple[Tensor, Tensor]:
    """``x / N`` in the compute dtype, divided in fp32 or better, and N ``[..., 1, 1]``."""
    divisor = norm_divisor(frobenius_norm(x), norm_scale=config.norm_scale, eps=config.eps, eps_mode=config.eps_mode)
    wide = x if x.dtype == torch.float64 else x.float()
    narrow = divisor.to(wide.dtype)
    # an eps that becomes zero in fp32 leaves a zero matrix as it is, too
    narrow = torch.where(narrow == 0, 1.0, narrow)
    return (wide / narrow).to(config.compute_dtype(x)), divisor
