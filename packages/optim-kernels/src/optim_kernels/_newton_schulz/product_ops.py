"""The products of Newton–Schulz as functions with gradients, usable inside ``torch.compile``.

    gram                alpha x xᵀ  or  alpha xᵀ x       d x = alpha (dA + dAᵀ) x
    symmetric_matmul    alpha a b + beta c               d a = alpha g bᵀ,  d b = alpha aᵀ g,  d c = beta g
    matmul_add          alpha a b + beta c               likewise;  d alpha = ⟨g, a b⟩,  d beta = ⟨g, c⟩

alpha and beta are numbers, or 0-d tensors that are read on the device. On Hopper and newer GPUs the kernels of
`product_launches` run; elsewhere plain torch, with the same rounding (sums in fp32, rounded once).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from optim_kernels._impl import use_triton, why_not_products
from optim_kernels._newton_schulz import torch_products
from optim_kernels._newton_schulz.direct_calls import NO_TANGENTS, can_compute_directly, is_transformed
from optim_kernels._newton_schulz.iterations import without_autocast
from optim_kernels._newton_schulz.outputs import checked_out
from optim_kernels._options import check_layout, check_scalars

Number = float | Tensor

# The dtypes that c may have beside the product's own.
SUMMANDS = (torch.float32, torch.float16, torch.bfloat16)


def _multiply(a: Tensor, b: Tensor, c: Tensor | None, alpha: Number, beta: Number, symmetric: bool) -> Tensor:
    """``alpha a b + beta c``; ``symmetric``: b is transposed and one triangle computed (gram: b is a)."""
    if not use_triton("auto", a, "a") or why_not_products(a.device) is not None:
        multiply = torch_products.symmetric_matmul if symmetric else torch_products.matmul_add
        with without_autocast(a):
            return multiply(a, b.mT if symmetric else b, c=c, alpha=alpha, beta=beta).contiguous()
    return _product_launches().multiply(a, b, c, alpha, beta, symmetric=symmetric)


@cache
def _product_launches() -> ModuleType:
    """The kernels' module, which needs Triton."""
    from optim_kernels._newton_schulz import product_launches

    return product_launches


@torch.library.custom_op(
    "optim_kernels::product",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor? c, Tensor? alpha_tensor, Tensor? beta_tensor, float alpha, float beta, "
    "bool symmetric) -> Tensor",
)
def _product(a: Any, b: Any, c: Any, alpha_tensor: Any, beta_tensor: Any, alpha: Any, beta: Any, symmetric: Any) -> Any:
    alpha = alpha if alpha_tensor is None else alpha_tensor
    beta = beta if beta_tensor is None else beta_tensor
    return _multiply(a, b, c, alpha, beta, symmetric)


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
    ctx.c_dtype = None if c is None else c.dtype
    # only the derivative of beta needs c
    ctx.save_for_backward(a, b, None if beta_tensor is None else c, alpha_tensor, beta_tensor)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    a, b, c, alpha_tensor, beta_tensor = ctx.saved_tensors
    alpha = ctx.alpha if alpha_tensor is None else alpha_tensor.to(grad.dtype)
    factor, to_c = b.mT if ctx.symmetric else b, None
    if ctx.c_dtype is not None:
        # where c has more range than the product, its gradient keeps what the product's dtype could not hold
        beta = ctx.beta if beta_tensor is None else beta_tensor
        to_c = (beta * grad.to(torch.promote_types(grad.dtype, ctx.c_dtype))).to(ctx.c_dtype)
    to_beta = None if beta_tensor is None or c is None else _inner(grad, c, beta_tensor.dtype)
    with without_autocast(a):
        a_grad = a.mT @ grad
        to_a, to_b = alpha * (grad @ factor.mT), alpha * a_grad
    # ⟨g, a b⟩ as ⟨aᵀ g, b⟩, from a product that is there
    to_alpha = None if alpha_tensor is None else _inner(a_grad, factor, alpha_tensor.dtype)
    return to_a, to_b.mT if ctx.symmetric else to_b, to_c, to_alpha, to_beta, None, None, None


def _inner(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """⟨x, y⟩, multiplied and summed in ``dtype``: 16 bits may not hold it."""
    return (x.to(dtype) * y.to(dtype)).sum()


_product.register_autograd(_backward, setup_context=_save)


def _batched(
    operator: Callable[..., Tensor], size: int, dims: Sequence[int | None], inputs: Sequence[Any]
) -> tuple[Tensor, int]:
    """The ``operator`` for ``size`` calls at once, which differ along these dimensions of the tensors among inputs."""
    *tensors, alpha, beta, symmetric = inputs
    moved: list[Any] = [
        x if x is None else x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(tensors, dims)
    ]
    a, b, c, alphas, betas = moved
    if dims[3] is None and dims[4] is None:
        return operator(a, b, c, *tensors[3:], alpha, beta, symmetric), 0
    # calls have factors of their own, of which the operator has one for all matrices
    wide = torch.promote_types(a.dtype, torch.float32)
    product = operator(a.to(wide), b.to(wide), None, None, None, 1.0, 0.0, symmetric)
    shape = (size, *[1] * (a.ndim - 1))
    product = (alpha if alphas is None else alphas.reshape(shape)) * product
    if c is not None:
        product = product + (beta if betas is None else betas.reshape(shape)) * c.to(wide)
    return product.to(a.dtype), 0


@_product.register_vmap
def _(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> tuple[Tensor, int]:
    return _batched(_product, info.batch_size, in_dims, inputs)


class _Transformed(torch.autograd.Function):
    """The operator for the transforms of ``torch.func``, which cannot differentiate operators of ``torch.library``."""

    setup_context, backward = staticmethod(_save), staticmethod(_backward)

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return _product(*inputs)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> tuple[Tensor, int]:
        return _batched(_Transformed.apply, info.batch_size, in_dims, inputs)

    @staticmethod
    def jvp(*_: Any) -> Any:
        raise NotImplementedError(NO_TANGENTS)


def _multiplied(a: Tensor, b: Tensor, c: Tensor | None, alpha: Number, beta: Number, symmetric: bool) -> Tensor:
    """`_multiply`, through the operator where autograd or tracing has to see it."""
    if not (isinstance(alpha, float) and isinstance(beta, float)):
        alpha, beta = _checked_factor("alpha", alpha, a), _checked_factor("beta", beta, a)
    alpha_tensor, beta_tensor = (x if isinstance(x, Tensor) else None for x in (alpha, beta))
    tensors = (a, b, c, alpha_tensor, beta_tensor)
    is_at_once = can_compute_directly(*tensors)
    transforms = is_transformed(*tensors)
    if is_at_once and not transforms:
        return _multiply(a, b, c, alpha, beta, symmetric)
    numbers = (0.0 if isinstance(x, Tensor) else float(x) for x in (alpha, beta))
    result: Tensor = (_Transformed.apply if transforms else _product)(*tensors, *numbers, symmetric)
    return result


def _checked_factor(name: str, value: Number, like: Tensor) -> Number:
    """A number, or a 0-d tensor in the precision of the sums."""
    if not isinstance(value, Tensor):
        check_scalars(**{name: value})
        return float(value)
    check_layout(name, value)
    if value.is_meta and not like.is_meta:
        raise ValueError(f"{name} is on meta, and so has no value; give one on {like.device}")
    if value.numel() != 1 or value.is_complex():
        raise ValueError(
            f"{name} must be a number or a tensor of one element, got {value.dtype} of shape {tuple(value.shape)}"
        )
    return value.reshape(()).to(like.device, torch.float64 if like.dtype == torch.float64 else torch.float32)


def gram(
    x: Tensor, *, side: Literal["left", "right"] = "left", alpha: Number = 1.0, out: Tensor | None = None
) -> Tensor:
    """``alpha x xᵀ`` (``side="right"``: ``alpha xᵀ x``), computing one triangle and mirroring it; differentiable.

    x [..., M, K] -> [..., M, M], or [..., K, K] for ``"right"``; of any strides. Sums are in fp32 (fp64 for fp64) and
    rounded once.

    Args:
        alpha: a number or a tensor of one element, which is read on the device.
        out: a tensor of the result's shape and a floating dtype that receives the result, and is returned.

    Raises:
        ValueError: for other shapes, dtypes (of 16 bits or more) or devices, by name.
        TypeError: something else in place of a tensor or a number.
    """
    if side not in ("left", "right"):
        raise ValueError(f"side must be 'left' or 'right', got {side!r}")
    _check_operand("x", x, x)
    x = x if side == "left" else x.mT
    return _into(out, _multiplied(x, x, None, alpha, 0.0, True))


def symmetric_matmul(
    a: Tensor, b: Tensor, *, c: Tensor | None = None, alpha: Number = 1.0, beta: Number = 0.0, out: Tensor | None = None
) -> Tensor:
    """``alpha a b + beta c`` for symmetric operands that commute, so that the result is symmetric.

    a, b, c [..., M, M] -> [..., M, M]; only one triangle is computed, the other is its mirror image. c as in
    `matmul_add`; factors, ``out`` and errors as in `gram`.
    """
    _check_operand("b", b, a)
    if a.shape != b.shape or a.shape[-1] != a.shape[-2]:
        raise ValueError(f"a and b must be square and of one shape, got {tuple(a.shape)} and {tuple(b.shape)}")
    _check_added(c, a, a.shape)
    return _into(out, _multiplied(a, b, c, alpha, beta, True))


def matmul_add(
    a: Tensor, b: Tensor, *, c: Tensor | None = None, alpha: Number = 1.0, beta: Number = 0.0, out: Tensor | None = None
) -> Tensor:
    """``alpha a b + beta c``: a [..., M, K], b [..., K, N], c [..., M, N] -> [..., M, N].

    c may be fp32, fp16 or bf16 whatever a and b are; the result has their dtype. Factors, ``out`` and errors as in
    `gram`; alpha and beta have gradients, too.
    """
    _check_operand("b", b, a)
    if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} cannot be multiplied")
    _check_added(c, a, (*a.shape[:-1], b.shape[-1]))
    return _into(out, _multiplied(a, b, c, alpha, beta, False))


def _check_operand(name: str, tensor: Tensor, like: Tensor) -> None:
    for each, given in ((name, tensor), ("a", like)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{each} must be a tensor of matrices, got a {type(given).__name__}")
        check_layout(each, given)
        if given.ndim < 2 or not given.is_floating_point() or given.dtype.itemsize < 2:
            raise ValueError(
                f"{each} must be floating-point matrices, got {given.dtype} of shape {tuple(given.shape)}; products "
                "take 16 bits and more"
            )
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, the other is {like.dtype} on {like.device}")


def _check_added(c: Tensor | None, like: Tensor, shape: Sequence[int]) -> None:
    if c is None:
        return
    if not isinstance(c, Tensor):
        raise TypeError(f"c must be a tensor or None, got a {type(c).__name__}")
    check_layout("c", c)
    if c.shape != torch.Size(shape):
        raise ValueError(f"c must have the shape of the product, {tuple(shape)}, got {tuple(c.shape)}")
    if c.device != like.device:
        raise ValueError(f"c is on {c.device}, the matrices on {like.device}")
    dtypes = dict.fromkeys((like.dtype, *SUMMANDS))
    if c.dtype not in dtypes:
        raise ValueError(f"c must be one of {', '.join(map(str, dtypes))}, got {c.dtype}")


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else checked_out(out, result, of="result").copy_(result)
