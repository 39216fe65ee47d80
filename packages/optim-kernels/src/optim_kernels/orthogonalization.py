"""Newton–Schulz orthogonalisation: the coefficient tables and the iterations, written over three products.

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

Products come from an implementation of `Products`: plain torch, or the Triton kernels of `muon_kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from optim_kernels._coefficients import COEFFICIENTS, Triple, resolve
from optim_kernels._impl import Impl, check_impl, use_triton
from optim_kernels.reference.newton_schulz import frobenius_norm, norm_divisor

__all__ = ["COEFFICIENTS", "NSConfig", "iterate", "newton_schulz", "orthogonalize"]

Method = Literal["auto", "standard", "gram"]
EpsMode = Literal["clamp", "add"]
Coefficients = str | tuple[Triple, ...] | Sequence[float] | Sequence[Sequence[float]]

# From which n/m on "auto" takes the Gram iteration, by the slope at 0 of the whole polynomial: how much the iteration
# enlarges small singular values, and with them the rounding of R. Below 1.5 Gram wins no time; the other limits keep
# Gaussian matrices in fp16 within 2e-3 (2.5e-3 from slope 900) of fp64, see "Newton–Schulz and Muon" in the benchmarks'
# notes for the errors measured.
GRAM_ASPECTS = ((600.0, 1.5), (900.0, 3.0), (float("inf"), 4.0))
# Short sides from which it does: of smaller matrices a Gaussian one may be so badly conditioned that the errors of Gram
# are 1e-2, and their time is that of the launches, of which the standard iteration has fewer.
GRAM_SIDE = 256
RESTARTS: dict[object, tuple[int, ...]] = {None: (2,), "accurate": (1, 3)}
COMPUTE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class NSConfig:
    """Everything that determines a Newton–Schulz run beside the matrix; validated once.

    Args:
        coefficients: a name of ``COEFFICIENTS``, a triple, or a list of triples (the last one is repeated).
        steps: how many, under 100.
        method: ``"auto"`` takes ``"gram"`` for matrices with m ≥ 256 and n ≥ `gram_aspect` m, else ``"standard"``.
        dtype: of the products' operands; ``None`` is fp16 on CUDA, where tensor cores accumulate in fp32, and elsewhere
            fp32 (fp64 for fp64 matrices).
        restarts: step numbers after which the Gram iteration forms R anew; ``None`` is ``(2,)``, ``"accurate"``
            is ``(1, 3)``.
        norm_scale, eps, eps_mode: X = G / max(s‖G‖, eps) (``"clamp"``) or G / (s‖G‖ + eps) (``"add"``).
    """

    coefficients: Coefficients = "keller"
    steps: int = 5
    method: Method = "auto"
    dtype: torch.dtype | None = None
    restarts: tuple[int, ...] | Literal["accurate"] | None = None
    norm_scale: float = 1.0
    eps: float = 1e-7
    eps_mode: EpsMode = "clamp"

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or not 0 <= self.steps < 100:
            raise ValueError(f"steps must be an int from 0 to 99, got {self.steps!r}")
        if not isinstance(self.coefficients, str):
            object.__setattr__(self, "coefficients", resolve(self.coefficients, self.steps))
        if self.method not in get_args(Method):
            raise ValueError(f"method must be one of {get_args(Method)}, got {self.method!r}")
        if self.dtype is not None and self.dtype not in COMPUTE_DTYPES:
            raise ValueError(f"dtype must be None or one of {COMPUTE_DTYPES}, got {self.dtype}")
        if self.eps_mode not in get_args(EpsMode):
            raise ValueError(f"eps_mode must be one of {get_args(EpsMode)}, got {self.eps_mode!r}")
        if not self.eps >= 0:
            raise ValueError(f"eps must be at least 0, got {self.eps}")
        if not self.norm_scale > 0:
            raise ValueError(f"norm_scale must be above 0, got {self.norm_scale}")
        restarts = RESTARTS[self.restarts] if self.restarts in RESTARTS else tuple(int(s) for s in self.restarts or ())
        if any(later <= earlier for earlier, later in zip((0, *restarts), restarts)):
            raise ValueError(f"restarts must be increasing step numbers from 1, got {self.restarts!r}")
        object.__setattr__(self, "restarts", restarts)
        self.triples  # noqa: B018  (an unknown name, or a wrong number of steps for it, is found here)

    @cached_property
    def triples(self) -> tuple[Triple, ...]:
        """(a, b, c) of every step."""
        return resolve(self.coefficients, self.steps)

    @property
    def row_factors(self) -> bool:
        """Whether the first Gram matrix supplies row factors ``rsqrt(Σ_j |A_ij|)`` (the set ``"aol4"``)."""
        return self.coefficients == "aol4"

    @cached_property
    def blocks(self) -> tuple[tuple[Triple, ...], ...]:
        """The triples between restarts of the Gram iteration."""
        assert isinstance(self.restarts, tuple)
        cuts = [0, *(after for after in self.restarts if after < self.steps), self.steps]
        return tuple(self.triples[start:stop] for start, stop in pairwise(cuts) if start < stop)

    def method_for(self, m: int, n: int) -> Literal["standard", "gram"]:
        """The iteration that a matrix with short side ``m`` and long side ``n`` takes."""
        if self.method == "auto":
            return "gram" if m >= GRAM_SIDE and n >= self.gram_aspect * m else "standard"
        return self.method

    @cached_property
    def gram_aspect(self) -> float:
        """n/m from which ``"auto"`` takes the Gram iteration: 1.5, 3 or 4, the steeper the polynomial the larger."""
        slope = prod(a for a, _, _ in self.triples)
        return next(aspect for limit, aspect in GRAM_ASPECTS if slope <= limit)

    def flops(self, rows: int, columns: int) -> int:
        """Of one ``rows × columns`` matrix, with symmetric halves counted once."""
        m, n = sorted((rows, columns))
        cube, rectangle = m**3, m * m * n  # a symmetric m×m product; a symmetric XXᵀ (SX and QX take two)
        if self.method_for(m, n) == "standard":
            return sum(3 * rectangle + (cube if c != 0.0 else 0) for _, _, c in self.triples)
        total = 0
        for block in self.blocks:
            squares = sum(1 for _, _, c in block if c != 0.0)
            total += 3 * rectangle + cube * (squares + 2 * (len(block) - 1) + len(block) - 1)
        return total

    def compute_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of the operands of every product for input ``x``."""
        if self.dtype is not None:
            return self.dtype
        if x.is_cuda:
            return torch.float16
        return torch.float64 if x.dtype == torch.float64 else torch.float32


class Products(Protocol):
    """The three products of the iterations, on batches ``[..., M, K]``. Sums are fp32 at least, rounded once.

    An iteration runs on a family: tensors of matrices with one short side M, whose m×m factors are one batch.
    """

    def normalize(self, x: Tensor, config: NSConfig, /) -> Tensor:
        """``x / N`` in the compute dtype, as the other methods take it."""

    def orthogonalize(self, x: Tensor, config: NSConfig, /) -> Tensor | None:
        """The result for ``x [..., M, N]``, M ≤ N, as a batch; ``None`` where it takes the single products."""

    def gram(self, xs: Sequence[Tensor], /) -> Tensor:
        """``x xᵀ`` of every x of the family, as one batch."""

    def symmetric_matmul(
        self, a: Tensor, b: Tensor, /, *, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
    ) -> Tensor:
        """``alpha a b + beta c`` for symmetric operands that commute; symmetric to the last bit.

        What is left of a b − b a is rounding, but the Gram iteration would multiply it: in fp16, errors by 3 to 20.
        """

    def matmul_add(
        self, a: Tensor, b: Tensor, /, *, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
    ) -> Tensor:
        """``alpha a b + beta c`` for symmetric ``a`` and rectangular ``b``."""

    def quadratic(self, r: Tensor, b: float, c: float, a: float | None = None, /) -> tuple[Tensor, Tensor | None]:
        """``z = b r + c r²`` for symmetric ``r``, and ``z + a I`` where ``a`` is given."""


class TorchProducts:
    """Plain torch. On the CPU 16-bit operands are multiplied in fp32 and the result is rounded, as tensor cores do."""

    def normalize(self, x: Tensor, config: NSConfig, /) -> Tensor:
        return normalize(x, config)[0]

    def orthogonalize(self, x: Tensor, config: NSConfig, /) -> Tensor | None:
        return None

    def gram(self, xs: Sequence[Tensor], /) -> Tensor:
        grams = [self.matmul_add(x, x.mT) for x in xs]
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
    ) -> Tensor:
        dtype = a.dtype
        if not a.is_cuda and dtype.itemsize == 2:
            a, b, c = a.float(), b.float(), None if c is None else c.float()
        product = a @ b
        if isinstance(alpha, Tensor) or alpha != 1.0:
            product = alpha * product
        if c is not None:
            product = product + beta * c
        return product.to(dtype)

    def symmetric_matmul(
        self,
        a: Tensor,
        b: Tensor,
        /,
        *,
        c: Tensor | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 0.0,
    ) -> Tensor:
        product = self.matmul_add(a, b, c=c, alpha=alpha, beta=beta)
        return product.tril() + product.tril(-1).mT

    def quadratic(self, r: Tensor, b: float, c: float, a: float | None = None, /) -> tuple[Tensor, Tensor | None]:
        z = self.symmetric_matmul(r, r, c=r, alpha=c, beta=b)
        if a is None:
            return z, None
        # in fp32 at least: a rounded to fp16 would shift every singular value alike
        wide = torch.float64 if z.dtype == torch.float64 else torch.float32
        return z, (z.to(wide) + a * torch.eye(z.shape[-1], dtype=wide, device=z.device)).to(z.dtype)


def iterate(xs: Sequence[Tensor], config: NSConfig, products: Products) -> list[Tensor]:
    """The iteration ``config`` chooses for a family of normalised ``x [..., M, N]``, M ≤ N.

    A family has one M and takes one iteration; with several tensors each is a ``[batch, M, N]``.
    """
    gram = config.method_for(*xs[0].shape[-2:]) == "gram"
    return gram_iteration(xs, config, products) if gram else standard_iteration(xs, config, products)


def standard_iteration(xs: Sequence[Tensor], config: NSConfig, products: Products) -> list[Tensor]:
    """X ← aX + (bA + cA²)X, A = XXᵀ, for every triple."""
    xs = list(xs)
    for step, (a, b, c) in enumerate(config.triples):
        gram = products.gram(xs)
        if step == 0 and config.row_factors:
            xs, gram = apply_row_factors(xs, gram)
        if c == 0.0:  # cubic: S is a multiple of A
            xs = [products.matmul_add(s, x, c=x, alpha=b, beta=a) for s, x in _split(gram, xs)]
            continue
        factors, _ = products.quadratic(gram, b, c)
        xs = [products.matmul_add(s, x, c=x, beta=a) for s, x in _split(factors, xs)]
    return xs


def gram_iteration(xs: Sequence[Tensor], config: NSConfig, products: Products) -> list[Tensor]:
    """The Gram iteration with restarts; see the module's formulas."""
    xs = list(xs)
    for number, block in enumerate(config.blocks):
        r = products.gram(xs)
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
        xs = [products.matmul_add(factor, x) for factor, x in _split(q, xs)]
    return xs


def _split(factors: Tensor, xs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each x of the family with its own part of the batch of m×m factors."""
    if len(xs) == 1:
        return [(factors, xs[0])]
    return list(zip(factors.split([len(x) for x in xs]), xs, strict=True))


def apply_row_factors(xs: Sequence[Tensor], gram: Tensor) -> tuple[list[Tensor], Tensor]:
    """``DX`` and ``DAD`` with D = diag(rsqrt(Σ_j |A_ij|)): by Gershgorin ‖DX‖₂ ≤ 1, whatever the norm was."""
    sums = gram.abs().sum(-1, keepdim=True, dtype=torch.float64 if gram.dtype == torch.float64 else torch.float32)
    factors = torch.where(sums > 0, sums.rsqrt(), torch.zeros_like(sums))
    scaled = [x.copy_(x * d) for d, x in _split(factors, xs)]
    return scaled, gram.copy_(gram * factors * factors.mT)


def normalize(x: Tensor, config: NSConfig) -> tuple[Tensor, Tensor]:
    """``x / N`` in the compute dtype, divided in fp32 or better, and N ``[..., 1, 1]``."""
    divisor = norm_divisor(frobenius_norm(x), norm_scale=config.norm_scale, eps=config.eps, eps_mode=config.eps_mode)
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide / divisor.to(wide.dtype)).to(config.compute_dtype(x)), divisor


def newton_schulz(
    x: Tensor | Sequence[Tensor],
    steps: int = 5,
    *,
    coefficients: Coefficients = "keller",
    method: Method = "auto",
    compute_dtype: torch.dtype | None = None,
    restarts: tuple[int, ...] | Literal["accurate"] | None = None,
    norm_scale: float = 1.0,
    eps: float = 1e-7,
    eps_mode: EpsMode = "clamp",
    out: Tensor | Sequence[Tensor] | None = None,
    impl: Impl = "auto",
) -> Any:
    """``x [..., M, N]`` with its singular values moved to about 1, in ``x.dtype``; a list is done matrix by matrix.

        X = x / N,  then ``steps`` times  X ← aX + (bA + cA²)X,  A = XXᵀ

    The options are those of `NSConfig`. Differentiable; the gradient is that of the standard iteration in fp32 (fp64
    for fp64 input), whatever the forward used. ``out`` (same shape, any dtype and strides) receives the result.

    Raises:
        ValueError: fewer than two dimensions, or a bad option.
        TypeError: integer or complex input.
    """
    check_impl(impl)
    config = NSConfig(
        coefficients=coefficients,
        steps=steps,
        method=method,
        dtype=compute_dtype,
        restarts=restarts,
        norm_scale=norm_scale,
        eps=eps,
        eps_mode=eps_mode,
    )
    if isinstance(x, Tensor):
        if out is not None and not isinstance(out, Tensor):
            raise TypeError(f"out must be a tensor when x is one, got {type(out).__name__}")
        return _newton_schulz_one(x, config, out, impl)
    outs: Sequence[Tensor | None] = [None] * len(x) if out is None else list(out)
    if len(outs) != len(x):
        raise ValueError(f"out has {len(outs)} tensors for {len(x)} matrices")
    return [_newton_schulz_one(matrix, config, target, impl) for matrix, target in zip(x, outs)]


orthogonalize = newton_schulz


def _newton_schulz_one(x: Tensor, config: NSConfig, out: Tensor | None, impl: Impl) -> Tensor:
    result = newton_schulz_with(x, config, impl)
    if out is None:
        return result
    if out.shape != x.shape:
        raise ValueError(f"out has shape {tuple(out.shape)} for x of shape {tuple(x.shape)}")
    return out.copy_(result)


def newton_schulz_with(x: Tensor, config: NSConfig, impl: Impl = "auto") -> Tensor:
    """`newton_schulz` of one tensor with the options of ``config``."""
    if x.ndim < 2:
        raise ValueError(f"newton_schulz takes matrices [..., M, N], got shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"newton_schulz takes floating-point matrices, got {x.dtype}")
    result: Tensor = _NewtonSchulz.apply(x, config, impl)
    return result


def products_for(x: Tensor, config: NSConfig, impl: Impl) -> Products:
    """The products that ``impl`` takes for matrices like ``x``."""
    dtype = config.compute_dtype(x)
    if dtype != torch.float64 and use_triton(impl, x, f"a matrix of shape {tuple(x.shape)}"):
        from optim_kernels.muon_kernels import TritonProducts

        return TritonProducts()
    return TorchProducts()


def _forward(x: Tensor, config: NSConfig, products: Products) -> Tensor:
    if x.shape[-2] > x.shape[-1]:
        return _forward(x.mT, config, products).mT
    if x.numel() == 0:
        return x.clone()
    at_once = products.orthogonalize(x, config)
    if at_once is not None:
        return at_once.reshape(x.shape).to(x.dtype)
    return iterate([products.normalize(x, config)], config, products)[0].reshape(x.shape).to(x.dtype)


class _NewtonSchulz(torch.autograd.Function):
    """Saves the input alone; the backward runs the standard iteration again and keeps the X of each step.

    One step X' = aX + SX, S = bA + cA², A = XXᵀ, given dX':
        D = dX' Xᵀ,  E = D + Dᵀ,  F = bE + c(EA + AE),  dX = a dX' + S dX' + F X
    Normalisation X₀ = G/N:
        dG = dX₀/N − (⟨dX₀, G⟩/N²) (norm_scale G/‖G‖), without the second term where N is the constant eps
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, config: NSConfig, impl: Impl) -> Tensor:
        ctx.save_for_backward(x)
        ctx.config = config
        return _forward(x, config, products_for(x, config, impl))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return newton_schulz_backward(x, grad, ctx.config), None, None


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
