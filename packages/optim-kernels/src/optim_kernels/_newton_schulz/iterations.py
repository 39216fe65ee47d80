"""The iterations of Newton–Schulz, written over three products.

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

Products come from an implementation of `Products`: plain torch, or the Triton kernels (`triton_products`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from optim_kernels._impl import multiplies_fp64_fast
from optim_kernels._newton_schulz.coefficients import Triple
from optim_kernels._newton_schulz.config import NSConfig
from optim_kernels.reference.newton_schulz import frobenius_norm, norm_divisor

# Steps of the standard iteration whose S and X are exact (see `Products`). Later steps enlarge a step's errors: all
# five by 485 (keller) to 1,050 (cans), those after the second by 30 to 41.
NUM_EXACT = 2


class Products(Protocol):
    """The three products of the iterations, on batches ``[..., M, K]``. Sums are fp32 at least, rounded once.

    An iteration runs on a family: tensors of matrices with one short side M, whose m×m factors are one batch.
    ``exact``: later steps enlarge this product's error, so for fp32 matrices it is summed in fp64 where the device
    multiplies fp64 fast.
    """

    def first_step(self, xs: Sequence[Tensor], triple: Triple, /) -> list[Tensor] | None:
        """``aX + (bA + cA²)X`` where the implementation has a way of its own for it; else ``None``."""

    def gram(self, xs: Sequence[Tensor], /, *, exact: bool = False) -> Tensor:
        """``x xᵀ`` of every x of the family, as one batch."""

    def symmetric_matmul(
        self, a: Tensor, b: Tensor, /, *, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
    ) -> Tensor:
        """``alpha a b + beta c`` for symmetric operands that commute; symmetric to the last bit.

        a b − b a is rounding alone, but the Gram iteration would multiply it: fp16 errors would be 3 to 20 times as
        large.
        """

    def matmul_add(
        self,
        a: Tensor,
        b: Tensor,
        /,
        *,
        c: Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        exact: bool = False,
    ) -> Tensor:
        """``alpha a b + beta c`` for symmetric ``a`` and rectangular ``b``."""

    def quadratic(
        self, r: Tensor, b: float, c: float, a: float | None = None, /, *, exact: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """``z = b r + c r²`` for symmetric ``r``, and ``z + a I`` where ``a`` is given."""


class TorchProducts:
    """Plain torch; products are rounded once."""

    def first_step(self, xs: Sequence[Tensor], triple: Triple, /) -> None:
        return None

    def gram(self, xs: Sequence[Tensor], /, *, exact: bool = False) -> Tensor:
        grams = [_multiplied(x, x.mT, exact=exact) for x in xs]
        return grams[0] if len(grams) == 1 else torch.cat(grams)

    def matmul_add(
        self,
        a: Tensor,
        b: Tensor,
        /,
        *,
        c: Tensor | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 0.0,
        exact: bool = False,
    ) -> Tensor:
        return _multiplied(a, b, c, alpha, beta, exact=exact)

    def symmetric_matmul(
        self,
        a: Tensor,
        b: Tensor,
        /,
        *,
        c: Tensor | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 0.0,
        exact: bool = False,
    ) -> Tensor:
        product = _multiplied(a, b, c, alpha, beta, exact=exact)
        return product.tril() + product.tril(-1).mT

    def quadratic(
        self, r: Tensor, b: float, c: float, a: float | None = None, /, *, exact: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        z = self.symmetric_matmul(r, r, c=r, alpha=c, beta=b, exact=exact)
        if a is None:
            return z, None
        # in fp32 at least: a rounded to fp16 would shift every singular value alike
        wide = torch.float64 if z.dtype == torch.float64 else torch.float32
        return z, (z.to(wide) + a * torch.eye(z.shape[-1], dtype=wide, device=z.device)).to(z.dtype)


def _multiplied(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 0.0,
    *,
    exact: bool = False,
) -> Tensor:
    """``alpha a b + beta c``; ``exact`` as in `Products`."""
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


def iterate(xs: Sequence[Tensor], config: NSConfig, products: Products) -> list[Tensor]:
    """The iteration that ``config`` chooses for a family of normalised ``x [..., M, N]``, M ≤ N.

    A family has one M and takes one iteration; with several tensors each is a ``[batch, M, N]``.
    """
    gram = config.method_for(*xs[0].shape[-2:]) == "gram"
    return gram_iteration(xs, config, products) if gram else standard_iteration(xs, config, products)


def standard_iteration(xs: Sequence[Tensor], config: NSConfig, products: Products) -> list[Tensor]:
    """X ← aX + (bA + cA²)X, A = XXᵀ, for every triple."""
    stepped = products.first_step(xs, config.triples[0]) if config.triples else None
    xs, first = (list(xs), 0) if stepped is None else (stepped, 1)
    for step, (a, b, c) in enumerate(config.triples[first:], start=first):
        exact = step < NUM_EXACT
        gram = products.gram(xs)
        if step == 0 and config.row_factors:
            xs, gram = apply_row_factors(xs, gram)
        if c == 0.0:  # cubic: S is a multiple of A
            xs = [products.matmul_add(s, x, c=x, alpha=b, beta=a, exact=exact) for s, x in _split(gram, xs)]
            continue
        factors, _ = products.quadratic(gram, b, c, exact=exact)
        xs = [products.matmul_add(s, x, c=x, beta=a, exact=exact) for s, x in _split(factors, xs)]
    return xs


def gram_iteration(xs: Sequence[Tensor], config: NSConfig, products: Products) -> list[Tensor]:
    """The Gram iteration with restarts; see the module's formulas."""
    xs = list(xs)
    for number, block in enumerate(config.blocks):
        r = products.gram(xs, exact=True)
        if number == 0 and config.row_factors:
            xs, r = apply_row_factors(xs, r)
        q: Tensor | None = None
        for step, (a, b, c) in enumerate(block, start=1):
            z, shifted = products.quadratic(r, b, c, a if q is None else None)
            if step < len(block):
                p = products.symmetric_matmul(r, z, c=r, beta=a)
                r = products.symmetric_matmul(z, p, c=p, beta=a)
            q = shifted if q is None else products.symmetric_matmul(q, z, c=q, beta=a)
        assert q is not None
        xs = [products.matmul_add(factor, x, exact=True) for factor, x in _split(q, xs)]
    return xs


def _split(factors: Tensor, xs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each x of the family with its own part of the batch of m×m factors."""
    if len(xs) == 1:
        return [(factors, xs[0])]
    return list(zip(factors.split([len(x) for x in xs]), xs, strict=True))


def apply_row_factors(xs: Sequence[Tensor], gram: Tensor) -> tuple[list[Tensor], Tensor]:
    """``DX`` and ``DAD`` with D = diag(rsqrt(Σ_j |A_ij|)): by Gershgorin ‖DX‖₂ ≤ 1, whatever the norm was."""
    sums = gram.abs().sum(-1, keepdim=True, dtype=torch.float64 if gram.dtype == torch.float64 else torch.float32)
    # a NaN stays one
    factors = torch.where(sums == 0, torch.zeros_like(sums), sums.rsqrt())
    scaled = [x.mul_(d) for d, x in _split(factors, xs)]
    return scaled, gram.copy_(gram * factors * factors.mT)


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
