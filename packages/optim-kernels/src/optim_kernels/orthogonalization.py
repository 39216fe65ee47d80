"""Newton–Schulz orthogonalization as a function with gradients, usable inside ``torch.compile`` and ``torch.func``.

    X = x / N,  then ``steps`` times  X ← aX + (bA + cA²)X,  A = XXᵀ

The options are documented in `_newton_schulz.config`, the computation in `_newton_schulz.iterations`, the derivative in
`_newton_schulz.backward`; on CUDA `_newton_schulz.plan` runs it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any, Literal, overload

import torch
from torch import Tensor

from optim_kernels._dtensors import is_dtensor
from optim_kernels._impl import Impl, check_impl, use_triton, why_not_products
from optim_kernels._newton_schulz.backward import newton_schulz_backward
from optim_kernels._newton_schulz.coefficients import COEFFICIENTS
from optim_kernels._newton_schulz.config import (
    COMPUTE_DTYPES,
    Coefficients,
    EpsMode,
    Method,
    NSConfig,
    config_of,
    restart_steps,
    values_of,
)
from optim_kernels._newton_schulz.direct_calls import NO_TANGENTS, can_compute_directly, is_transformed
from optim_kernels._newton_schulz.iterations import iterate, normalize, without_autocast
from optim_kernels._newton_schulz.outputs import checked_out

__all__ = [
    "COEFFICIENTS",
    "Coefficients",
    "EpsMode",
    "Method",
    "NSConfig",
    "iterate",
    "newton_schulz",
    "newton_schulz_with",
    "orthogonalize",
]


@overload
def newton_schulz(
    x: Tensor,
    steps: int = 5,
    *,
    coefficients: Coefficients = "keller",
    method: Method = "auto",
    compute_dtype: torch.dtype | None = None,
    restarts: tuple[int, ...] | Literal["accurate"] | None = None,
    norm_scale: float = 1.0,
    eps: float = 1e-7,
    eps_mode: EpsMode = "clamp",
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor: ...


@overload
def newton_schulz(
    x: Sequence[Tensor],
    steps: int = 5,
    *,
    coefficients: Coefficients = "keller",
    method: Method = "auto",
    compute_dtype: torch.dtype | None = None,
    restarts: tuple[int, ...] | Literal["accurate"] | None = None,
    norm_scale: float = 1.0,
    eps: float = 1e-7,
    eps_mode: EpsMode = "clamp",
    out: Sequence[Tensor] | None = None,
    impl: Impl = "auto",
) -> list[Tensor]: ...


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
) -> Tensor | list[Tensor]:
    """``x [..., M, N]`` with its singular values moved to about 1, in ``x.dtype``.

    Five steps of ``"keller"`` bring those above a hundredth of the Frobenius norm to between 0.68 and 1.14; smaller
    ones end anywhere up to 1.21, and zero stays zero. The options are those of `NSConfig` (``compute_dtype`` is its
    ``dtype``).

    Differentiable; the gradient is that of the standard iteration in fp32 (fp64 for fp64 input), whatever the forward
    used. The row factors of ``"aol4"`` have no gradient: the backward pass raises. ``torch.func`` transforms it too
    (``vmap``, ``grad``), forward mode (``jvp``) excepted. ``out`` (same shape, any floating dtype and strides) receives
    the result.

    A list gives a list. On CUDA its matrices of one shape run as a batch where that is faster; their results are views
    of one tensor.

    Raises:
        ValueError: fewer than two dimensions, or a bad option.
        TypeError: integer, complex, 8-bit, quantised or sparse input, a DTensor, or no tensor at all.
        RuntimeError: ``impl="triton"`` where the kernels cannot run.
    """
    check_impl(impl)
    values = values_of(coefficients, steps, method, compute_dtype, restarts, norm_scale, eps, eps_mode)
    if not isinstance(x, Tensor):
        results = _many(x, values, impl)
        if out is None:
            return results
        if len(out) != len(results):
            raise ValueError(f"out has {len(out)} tensors for {len(results)} matrices")
        # check all targets before the first is written
        targets = [checked_out(target, result, of="x") for target, result in zip(out, results)]
        return [target.copy_(result) for target, result in zip(targets, results)]
    result = _one(x, values, impl)
    return result if out is None else checked_out(out, result, of="x").copy_(result)


orthogonalize = newton_schulz


def newton_schulz_with(x: Tensor, config: NSConfig, impl: Impl = "auto") -> Tensor:
    """`newton_schulz` of one tensor with the options of ``config``."""
    return _one(x, _values(config), impl)


# The fields of an `NSConfig`, in their order.
Values = tuple[Any, ...]
_values: Callable[[NSConfig], Values] = attrgetter(*(field.name for field in fields(NSConfig)))


def _one(x: Tensor, values: Values, impl: Impl) -> Tensor:
    is_at_once = x.layout is torch.strided and not x.is_nested and can_compute_directly(x)
    if is_transformed(x):
        _check(x)
        transformed: Tensor = _Transformed.apply(x, config_of(*values), impl)
        return transformed
    if is_at_once:
        return _forward(x, values, impl)
    _check(x)
    if not torch.compiler.is_compiling():
        # raises if an option is bad; while tracing the operator's fake does that
        config_of(*values)
    result: Tensor = _operator(x, *_taken_apart(*values), impl)
    return result


def _check(x: Tensor) -> None:
    if x.is_nested:
        raise TypeError("newton_schulz takes dense matrices, got a nested tensor; give a list of its unbind()")
    if x.ndim < 2:
        raise ValueError(f"newton_schulz takes matrices [..., M, N], got shape {tuple(x.shape)}")
    if x.dtype not in COMPUTE_DTYPES:
        raise TypeError(f"newton_schulz takes floating-point matrices of 16 bits or more, got {x.dtype}")
    if x.layout is not torch.strided:
        raise TypeError(f"newton_schulz takes dense matrices, got layout {x.layout}; call to_dense() first")
    # a traced tensor may stand for anything
    if not torch.compiler.is_compiling() and is_dtensor(x):
        raise TypeError(
            f"newton_schulz takes matrices that are whole, got a DTensor of shape {tuple(x.shape)}; give its "
            "full_tensor(), or the to_local() of one that every rank has whole"
        )


def _many(xs: Sequence[Tensor], values: Values, impl: Impl) -> list[Tensor]:
    """`_one` of each tensor; small matrices of one shape run as a batch."""
    others = [x for x in xs if not isinstance(x, Tensor)] if isinstance(xs, Sequence) else [xs]
    if others:
        raise TypeError(f"newton_schulz takes a tensor or a sequence of tensors, got a {type(others[0]).__name__}")
    groups: dict[Any, list[int]] = {}
    for number, x in enumerate(xs):
        key = (x.shape, x.dtype, x.device) if x.is_cuda and _gains_by_batches(x, values, impl) else number
        groups.setdefault(key, []).append(number)
    results = list(xs)
    for numbers in groups.values():
        if len(numbers) == 1:
            results[numbers[0]] = _one(xs[numbers[0]], values, impl)
            continue
        batch = _one(torch.stack([xs[number] for number in numbers]), values, impl)
        for number, result in zip(numbers, batch.unbind()):
            results[number] = result
    return results


def _gains_by_batches(x: Tensor, values: Values, impl: Impl) -> bool:
    if torch.compiler.is_compiling() or x.ndim < 2 or not _takes_triton(x, config_of(*values), impl):
        return False
    from optim_kernels._newton_schulz import plan

    return plan.is_small(x.shape, config_of(*values))


# Plans keyed by the kind of matrix (shape, strides, dtype, device, alignment, options), the latest used last; the most
# that are kept.
_plans: OrderedDict[Any, Callable[[Tensor], Tensor]] = OrderedDict()
NUM_PLANS = 256


def _forward(x: Tensor, values: Values, impl: Impl) -> Tensor:
    """The result, contiguous, or for tall matrices the transpose of a contiguous tensor."""
    # kernels do not know torch's negative bit (an imaginary part of a conjugate is stored with the other sign)
    x = x.resolve_neg()
    kind = (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0, values, impl)
    plan = _plans.get(kind)
    if plan is None:
        _check(x)
        plan = _plans[kind] = _plan_for(x, config_of(*values), impl)
        if len(_plans) > NUM_PLANS:
            _plans.popitem(last=False)
    else:
        # not move_to_end: another thread may have dropped the plan
        _plans.pop(kind, None)
        _plans[kind] = plan
    return plan(x)


def _plan_for(x: Tensor, config: NSConfig, impl: Impl) -> Callable[[Tensor], Tensor]:
    config = config.of(x)
    if _takes_triton(x, config, impl):
        from optim_kernels._newton_schulz import plan

        return plan.plan_for(x, config)
    return partial(_by_torch, config=config)


def _takes_triton(x: Tensor, config: NSConfig, impl: Impl) -> bool:
    if config.compute_dtype(x) == torch.float64:
        if impl == "triton":
            raise RuntimeError(
                f"impl='triton' multiplies no fp64, in which the {x.dtype} matrix of shape {tuple(x.shape)} would be "
                "orthogonalized; use impl='auto' or 'torch', or compute_dtype=torch.float32"
            )
        return False
    if impl == "auto" and why_not_products(x.device) is not None:
        return False
    return use_triton(impl, x, f"a matrix of shape {tuple(x.shape)}")


def _by_torch(x: Tensor, config: NSConfig) -> Tensor:
    if x.shape[-2] > x.shape[-1]:
        return _by_torch(x.mT, config).mT
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with without_autocast(x):
        return iterate(normalize(x, config)[0], config).to(x.dtype).contiguous()


def _taken_apart(
    coefficients: Any, steps: int, method: str, dtype: torch.dtype | None, restarts: Any, *norm: Any
) -> Any:
    """The values in types that an operator's schema has: coefficients as a name and numbers, restarts as numbers."""
    name = coefficients if isinstance(coefficients, str) else ""
    triples = () if name else coefficients
    numbers = [number for triple in triples for number in (triple if isinstance(triple, tuple) else (triple,))]
    return name, numbers, steps, method, dtype, list(restart_steps(restarts, steps)), *norm


def _put_together(
    name: str, numbers: Sequence[float], steps: int, method: str, dtype: Any, restarts: Any, *norm: Any
) -> NSConfig:
    triples = tuple(tuple(numbers[i : i + 3]) for i in range(0, len(numbers), 3))
    return config_of(name or triples, steps, method, dtype, tuple(restarts), *norm)


@torch.library.custom_op(
    "optim_kernels::newton_schulz",
    mutates_args=(),
    schema="(Tensor x, str coefficients, float[] triples, int steps, str method, ScalarType? dtype, int[] restarts, "
    "float norm_scale, float eps, str eps_mode, str impl) -> Tensor",
)
def _operator(x: Any, *apart_and_impl: Any) -> Any:
    *apart, impl = apart_and_impl
    return _forward(x, _values(_put_together(*apart)), impl)


@_operator.register_fake
def _(x: Tensor, *apart_and_impl: Any) -> Tensor:
    # raises for bad options while they are traced
    _put_together(*apart_and_impl[:-1])
    if x.shape[-2] > x.shape[-1]:
        return x.new_empty(x.mT.shape).mT
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *apart, _ = inputs
    ctx.save_for_backward(x)
    ctx.apart = apart


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (x,) = ctx.saved_tensors
    with without_autocast(x):
        return newton_schulz_backward(x, grad, _put_together(*ctx.apart)), *(None for _ in range(10))


_operator.register_autograd(_backward, setup_context=_save)


@_operator.register_vmap
def _(_: object, in_dims: Sequence[int | None], x: Tensor, *apart_and_impl: object) -> tuple[Tensor, int]:
    dim = in_dims[0]
    assert dim is not None  # there is no other tensor
    return _operator(x.movedim(dim, 0), *apart_and_impl), 0


class _Transformed(torch.autograd.Function):
    """The operator for the transforms of ``torch.func``, which cannot differentiate operators of ``torch.library``."""

    @staticmethod
    def forward(x: Tensor, config: NSConfig, impl: Impl) -> Tensor:
        return _forward(x, _values(config), impl)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.config, _ = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        with without_autocast(x):
            return newton_schulz_backward(x, grad, ctx.config), None, None

    @staticmethod
    def vmap(_: object, in_dims: tuple[int, None, None], x: Tensor, config: NSConfig, impl: Impl) -> tuple[Tensor, int]:
        return _Transformed.apply(x.movedim(in_dims[0], 0), config, impl), 0

    @staticmethod
    def jvp(*_: Any) -> Any:
        raise NotImplementedError(NO_TANGENTS)
