"""The products of Newton–Schulz as functions with gradients, usable inside ``torch.compile``.

    gram                alpha x xᵀ  or  alpha xᵀ x       d x = alpha (dA + dAᵀ) x
    symmetric_matmul    alpha a b + beta c               d a = alpha g bᵀ,  d b = alpha aᵀ g,  d c = beta g
    matmul_add          alpha a b + beta c               likewise;  d alpha = ⟨g, a b⟩,  d beta = ⟨g, c⟩

alpha and beta are numbers, or 0-d tensors that are read on the device. On CUDA the kernels of `muon_kernels` run;
elsewhere plain torch, with the same rounding (sums in fp32, rounded once).
"""

from __future__ import annotations

from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from optim_kernels import muon_kernels
from optim_kernels._impl import use_triton
from optim_kernels.orthogonalization import TorchProducts

Number = float | Tensor


@torch.library.custom_op(
    "optim_kernels::product",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor? c, Tensor? alpha_tensor, Tensor? beta_tensor, float alpha, float beta, "
    "bool symmetric) -> Tensor",
)
def _product(a: Any, b: Any, c: Any, alpha_tensor: Any, beta_tensor: Any, alpha: Any, beta: Any, symmetric: Any) -> Any:
    """``alpha a b + beta c``, by tensors if given; ``symmetric``: one triangle, b is transposed (gram: b is a)."""
    shape = (*a.shape[:-1], b.shape[-2] if symmetric else b.shape[-1])
    given = alpha_tensor is not None or beta_tensor is not None
    alpha = alpha if alpha_tensor is None else alpha_tensor
    beta = beta if beta_tensor is None else beta_tensor
    if not use_triton("auto", a, "a"):
        products = TorchProducts()
        multiply = products.symmetric_matmul if symmetric else products.matmul_add
        return multiply(a, b.mT if symmetric else b, c=c, alpha=alpha, beta=beta).contiguous()
    same = a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())
    left = muon_kernels.as_batch(a)
    right = left if symmetric and same else muon_kernels.as_batch(b)
    added = None if c is None else muon_kernels.as_batch(c.expand(shape))
    multiply_batches = muon_kernels.symmetric_product if symmetric else muon_kernels.general_product
    tile = muon_kernels.portable_tile(left, right, symmetric=symmetric) if given else None
    result = multiply_batches(left, right, c=added, alpha=alpha, beta=beta, tile=tile)
    assert len(result) == prod(shape[:-2])
    return result.reshape(shape).contiguous()


@_product.register_fake
def _(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    alpha_tensor: Tensor | None,
    beta_tensor: Tensor | None,
    alpha: float,
    beta: float,
    symmetric: bool,
) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-2] if symmetric else b.shape[-1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, c, alpha_tensor, beta_tensor, ctx.alpha, ctx.beta, ctx.symmetric = inputs
    ctx.has_c = c is not None
    # c enters the derivative of beta alone
    ctx.save_for_backward(a, b, None if beta_tensor is None else c, alpha_tensor, beta_tensor)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    a, b, c, alpha_tensor, beta_tensor = ctx.saved_tensors
    alpha = ctx.alpha if alpha_tensor is None else alpha_tensor.to(grad.dtype)
    beta = ctx.beta if beta_tensor is None else beta_tensor.to(grad.dtype)
    factor = b.mT if ctx.symmetric else b
    to_b = alpha * (a.mT @ grad)
    to_c = beta * grad if ctx.has_c else None
    to_alpha = None if alpha_tensor is None else (grad * (a @ factor)).sum().to(alpha_tensor.dtype)
    to_beta = None if beta_tensor is None or c is None else (grad * c).sum().to(beta_tensor.dtype)
    to_a = alpha * (grad @ factor.mT)
    return to_a, to_b.mT if ctx.symmetric else to_b, to_c, to_alpha, to_beta, None, None, None


_product.register_autograd(_backward, setup_context=_save)


def _multiplied(a: Tensor, b: Tensor, c: Tensor | None, alpha: Number, beta: Number, symmetric: bool) -> Tensor:
    """`_product`, with numbers and tensors told apart."""
    tensors: list[Tensor | None] = []
    numbers: list[float] = []
    for name, value in (("alpha", alpha), ("beta", beta)):
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"{name} must be a number or a tensor of one element, got shape {tuple(value.shape)}")
            wide = torch.float64 if a.dtype == torch.float64 else torch.float32
            tensors.append(value.reshape(()).to(a.device, wide))
            numbers.append(0.0)
        else:
            tensors.append(None)
            numbers.append(float(value))
    result: Tensor = _product(a, b, c, *tensors, *numbers, symmetric)
    return result


def gram(
    x: Tensor, *, side: Literal["left", "right"] = "left", alpha: Number = 1.0, out: Tensor | None = None
) -> Tensor:
    """``alpha x xᵀ`` (``side="right"``: ``alpha xᵀ x``), computing one triangle and mirroring it.

    x [..., M, K] -> [..., M, M]
    """
    if side not in ("left", "right"):
        raise ValueError(f"side must be 'left' or 'right', got {side!r}")
    x = _checked("x", x, x)
    x = x if side == "left" else x.mT
    return _into(out, _multiplied(x, x, None, alpha, 0.0, True))


def symmetric_matmul(
    a: Tensor, b: Tensor, *, c: Tensor | None = None, alpha: Number = 1.0, beta: Number = 0.0, out: Tensor | None = None
) -> Tensor:
    """``alpha a b + beta c`` for symmetric operands that commute, so that the result is symmetric.

    a, b, c [..., M, M] -> [..., M, M]; only one triangle is computed, the other is its mirror image.
    """
    _checked("b", b, a)
    if a.shape != b.shape or a.shape[-1] != a.shape[-2]:
        raise ValueError(f"a and b must be square and of one shape, got {tuple(a.shape)} and {tuple(b.shape)}")
    return _into(out, _multiplied(a, b, c, alpha, beta, True))


def matmul_add(
    a: Tensor, b: Tensor, *, c: Tensor | None = None, alpha: Number = 1.0, beta: Number = 0.0, out: Tensor | None = None
) -> Tensor:
    """``alpha a b + beta c``: a [..., M, K], b [..., K, N], c [..., M, N] -> [..., M, N]."""
    _checked("b", b, a)
    if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} cannot be multiplied")
    return _into(out, _multiplied(a, b, c, alpha, beta, False))


def _checked(name: str, tensor: Tensor, like: Tensor) -> Tensor:
    if tensor.ndim < 2 or not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating-point matrices, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, the other is {like.dtype} on {like.device}")
    return tensor


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    if out is None:
        return result
    if out.shape != result.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, the result {tuple(result.shape)}")
    return out.copy_(result)
