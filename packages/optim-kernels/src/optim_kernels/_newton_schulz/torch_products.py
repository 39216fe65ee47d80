"""The products of Newton–Schulz in plain torch, on ``[..., M, K]``: sums are fp32 at least, rounded once.

``exact``: later steps enlarge this product's error, so for fp32 matrices it is summed in fp64 where the device
multiplies fp64 fast.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from optim_kernels._impl import multiplies_fp64_fast


def gram(x: Tensor, *, exact: bool = False) -> Tensor:
    """``x xᵀ``."""
    return matmul_add(x, x.mT, exact=exact)


def symmetric_matmul(
    a: Tensor,
    b: Tensor,
    *,
    c: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 0.0,
    exact: bool = False,
) -> Tensor:
    """``alpha a b + beta c`` for symmetric operands that commute; symmetric to the last bit.

    a b − b a is rounding alone, but the Gram iteration would multiply it: fp16 errors would be 3 to 20 times as large.
    """
    product = matmul_add(a, b, c=c, alpha=alpha, beta=beta, exact=exact)
    return product.tril() + product.tril(-1).mT


def quadratic(
    r: Tensor, b: float, c: float, a: float | None = None, *, exact: bool = False
) -> tuple[Tensor, Tensor | None]:
    """``z = b r + c r²`` for symmetric ``r``, and ``z + a I`` where ``a`` is given."""
    z = symmetric_matmul(r, r, c=r, alpha=c, beta=b, exact=exact)
    if a is None:
        return z, None
    # in fp32 at least: a rounded to fp16 would shift every singular value alike
    wide = torch.float64 if z.dtype == torch.float64 else torch.float32
    return z, (z.to(wide) + a * torch.eye(z.shape[-1], dtype=wide, device=z.device)).to(z.dtype)


def matmul_add(
    a: Tensor,
    b: Tensor,
    *,
    c: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 0.0,
    exact: bool = False,
) -> Tensor:
    """``alpha a b + beta c``."""
    dtype = wide = a.dtype
    if dtype.itemsize == 2:
        # cuBLAS sums in fp32 and adds C before it rounds; adding C to a rounded product would double the error
        is_alike = c is None or c.dtype == dtype
        if a.is_cuda and is_alike and not isinstance(alpha, Tensor) and not isinstance(beta, Tensor):
            return _by_cublas(a, b, c, alpha, beta)
        wide = torch.float32
    elif exact and multiplies_fp64_fast(a.device):
        wide = torch.float64
    product = a.to(wide) @ b.to(wide)
    if isinstance(alpha, Tensor) or alpha != 1.0:
        product = alpha * product
    if c is not None:
        product = product + beta * c.to(wide)
    return product.to(dtype)


def _by_cublas(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> Tensor:
    """``alpha a b + beta c`` on CUDA, summed and added in fp32."""
    if c is None:
        # with beta 0 it is not read
        c, beta = a.new_empty(1, 1, 1), 0.0
    else:
        c = _flat(c)
    return torch.baddbmm(c, _flat(a), _flat(b), beta=beta, alpha=alpha).view(*a.shape[:-1], b.shape[-1])


def _flat(x: Tensor) -> Tensor:
    """``x [..., M, N]`` as one batch of matrices."""
    return x.reshape(prod(x.shape[:-2]), *x.shape[-2:])
