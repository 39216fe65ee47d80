"""The derivative of Newton–Schulz.

One step X' = aX + SX, S = bA + cA², has the derivative, given dX',

    D = dX' Xᵀ,  E = D + Dᵀ,  F = bE + c(EA + AE),  dX = a dX' + S dX' + F X

and the normalisation X₀ = G/N

    dG = dX₀/N − (⟨dX₀, G⟩/N²) (norm_scale G/‖G‖), without the second term where N is the constant eps

It runs the standard iteration again, whatever the forward used, and keeps the X of each step.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from optim_kernels._newton_schulz.config import NSConfig
from optim_kernels._newton_schulz.iterations import normalize
from optim_kernels.reference.newton_schulz import frobenius_norm


def newton_schulz_backward(x: Tensor, grad: Tensor, config: NSConfig) -> Tensor:
    """The gradient at ``x`` of ``⟨grad, newton_schulz(x)⟩``, in ``x.dtype``."""
    if config.row_factors:
        raise NotImplementedError("the row factors of coefficients='aol4' have no backward; use another set")
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz_backward(x.mT, grad.mT, config).mT
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    start, divisor = normalize(x.to(wide), replace(config, dtype=wide))
    steps = [start]
    for a, b, c in config.triples[:-1]:
        gram = steps[-1] @ steps[-1].mT
        steps.append(a * steps[-1] + (b * gram + c * gram @ gram) @ steps[-1])
    grad = grad.to(wide)
    for step, (a, b, c) in zip(reversed(steps), reversed(config.triples)):
        gram = step @ step.mT
        d = grad @ step.mT
        e = d + d.mT
        f = b * e + c * (e @ gram + gram @ e)
        grad = a * grad + (b * gram + c * gram @ gram) @ grad + f @ step
    divisor = divisor.to(wide)
    norm = frobenius_norm(x).to(wide)
    along = (grad * start).sum((-2, -1), keepdim=True)  # ⟨dX₀, G⟩ / N
    if config.eps_mode == "clamp":
        along = torch.where(config.norm_scale * norm > config.eps, along, 0.0)
    unit = torch.where(norm > 0, x.to(wide) / norm, 0.0)
    return ((grad - config.norm_scale * along * unit) / divisor).to(x.dtype)
