"""The products of `product_launches` in plain torch, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor


def by_torch(
    a: Tensor,
    b: Tensor,
    *,
    out: Tensor,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    scale: Tensor | None = None,
    low: Tensor | None = None,
    diagonal: Tensor | None = None,
    betas: Tensor | None = None,
    shifted: tuple[Tensor, float] | None = None,
    symmetric: bool = False,
    **others: object,
) -> Tensor:
    """A product with all that Hopper's kernels may do with it; ``symmetric``: with bᵀ, and mirrored."""
    count, m, _ = out.shape
    # a shorter batch is repeated
    b = b.repeat(count // len(b), 1, 1)
    wide = alpha * a.double() @ (b.mT if symmetric else b).double()
    if diagonal is not None:
        on_diagonal = wide.diagonal(dim1=-2, dim2=-1)
        diagonal[: count * m].view(count, m).copy_(on_diagonal)
        on_diagonal.zero_()
    if c is not None:
        wide += (beta if betas is None else betas[: count * m].view(count, m, 1).double()) * c
    if scale is not None:
        wide *= scale[:, None, None]
    if symmetric:
        wide = wide.tril() + wide.tril(-1).mT
    out.copy_(wide)
    if low is not None:
        low.copy_(wide - out)
    if shifted is not None:
        shifted[0].copy_(out + shifted[1] * torch.eye(m, dtype=torch.float64, device=out.device))
    return out
