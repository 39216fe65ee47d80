"""AdamW in plain torch: the definition of what the kernels compute, in any floating dtype.

For step t of one parameter p with gradient g and moments m, v (w with ``amsgrad``):

    g <- ±g · clip_factor / grad_scale
    m <- β1 m + (1 − β1) g
    v <- β2 v + (1 − β2) g²
    w <- max(w, v)                                                  amsgrad; otherwise w = v
    p <- p − (lr λ p + lr/(1 − β1^t) · m / (sqrt(w)/sqrt(1 − β2^t) + eps))

The arithmetic is in fp32, or fp64 for an fp64 parameter, whatever the tensors are stored in; ``1 − β``, ``1 − β^t`` and
``sqrt(1 − β2^t)`` are formed in fp64 and rounded once. The update uses the unrounded m and v, and every stored value is
rounded once: to nearest, or at random with ``stochastic_rounding`` (the packed stream of ``optim_utils.rounding``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from optim_kernels.reference.storage import (
    STREAM_EXP_AVG,
    STREAM_EXP_AVG_SQ,
    Rounding,
    gradient_scale,
    read,
    read_param,
    write,
    write_param,
)

Scalar = float | Tensor
Betas = tuple[Scalar, Scalar]
T = TypeVar("T")


class AdamWScalars(NamedTuple):
    """The hyperparameters of one tensor; ``lr`` and the betas may be 1-element tensors."""

    lr: Scalar
    beta1: Scalar
    beta2: Scalar
    eps: float
    weight_decay: float
    maximize: bool = False


def adamw_update(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, w: Tensor | None, *, step: Scalar, scalars: AdamWScalars
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The new ``(p, m, v, w)`` of step number ``step``; nothing is changed in place. All tensors have one dtype."""
    lr, beta1, beta2, t = (_fp64(x, p) for x in (scalars.lr, scalars.beta1, scalars.beta2, step))
    # a user may give tensors of these, too
    eps, weight_decay = _fp64(scalars.eps, p), _fp64(scalars.weight_decay, p)
    step_size = _rounded(lr / (1 - beta1**t), p)
    sqrt_correction = _rounded((1 - beta2**t) ** 0.5, p)
    decay = _rounded(lr * weight_decay, p)

    m = _rounded(beta1, p) * m + _rounded(1 - beta1, p) * g
    v = _rounded(beta2, p) * v + _rounded(1 - beta2, p) * g * g
    if w is not None:
        w = torch.maximum(w, v)
    denominator = (v if w is None else w).sqrt() / sqrt_correction + _rounded(eps, p)
    p = p - (decay * p + step_size * (m / denominator))
    return p, m, v, w


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    steps: Tensor | Sequence[Tensor],
    lr: Scalar | Sequence[Scalar],
    betas: Betas | Sequence[Betas],
    eps: float | Sequence[float],
    weight_decay: float | Sequence[float],
    max_exp_avg_sqs: Sequence[Tensor] | None = None,
    masters: Sequence[Tensor | None] | None = None,
    maximize: bool | Sequence[bool] = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    clip_factor: Tensor | None = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    indices: Sequence[int] | None = None,
    starts: Sequence[int] | None = None,
    present: Sequence[Tensor | None] | None = None,
) -> None:
    """One AdamW step on every tensor, in place; the arguments are those of ``functional.adamw_``.

    ``found_inf`` and ``present`` are read on the host.
    """
    if found_inf is not None and bool(found_inf.item()):
        return
    scale = gradient_scale(clip_factor, grad_scale)
    count = len(params)
    each_step = steps_of(steps, count)
    each_scalars = scalars_of(count, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize)
    updated = [i for i in range(count) if _is_present(present, i)]
    for i in updated:
        p, m, v = params[i], exp_avgs[i], exp_avg_sqs[i]
        w = None if max_exp_avg_sqs is None else max_exp_avg_sqs[i]
        master = None if masters is None else masters[i]
        step = next_step(each_step[i])
        bits = None
        if stochastic_rounding:
            bits = Rounding(seed, i if indices is None else indices[i], 0 if starts is None else starts[i], int(step))

        wide = torch.promote_types(p.dtype, torch.float32)
        g = summed_gradient(grads[i], p).to(wide)
        if scale is not None:
            g = g * scale.to(g)
        if each_scalars[i].maximize:
            g = -g
        new_p, new_m, new_v, new_w = adamw_update(
            read_param(p, master),
            g,
            read(m, wide),
            read(v, wide),
            None if w is None else w.to(wide),
            step=step,
            scalars=each_scalars[i],
        )
        write_param(p, master, new_p, bits)
        write(m, new_m, bits, STREAM_EXP_AVG)
        write(v, new_v, bits, STREAM_EXP_AVG_SQ)
        if w is not None and new_w is not None:
            w.copy_(new_w)
    advance([each_step[i] for i in updated])


def _is_present(present: Sequence[Tensor | None] | None, i: int) -> bool:
    flag = None if present is None else present[i]
    return flag is None or bool(flag.item())


def steps_of(steps: Tensor | Sequence[Tensor], count: int) -> list[Tensor]:
    """One step count per tensor: those given, or the shared one."""
    return [steps] * count if isinstance(steps, Tensor) else list(steps)


def scalars_of(
    count: int,
    *,
    lr: Scalar | Sequence[Scalar],
    betas: Betas | Sequence[Betas],
    eps: float | Sequence[float],
    weight_decay: float | Sequence[float],
    maximize: bool | Sequence[bool],
) -> list[AdamWScalars]:
    """The hyperparameters of each of ``count`` tensors, from values that are shared or given per tensor."""
    shared_betas = not isinstance(betas[0], Sequence)
    pairs = cast("Sequence[Betas]", [betas] * count if shared_betas else betas)
    return [
        AdamWScalars(*values)
        for values in zip(
            _each(lr, count),
            [pair[0] for pair in pairs],
            [pair[1] for pair in pairs],
            _each(eps, count),
            _each(weight_decay, count),
            _each(maximize, count),
            strict=True,
        )
    ]


def summed_gradient(grad: Tensor, param: Tensor) -> Tensor:
    """The gradient of ``param``; a ``grad`` with one more dimension is a stack of slices, summed in order in fp32."""
    if grad.dim() == param.dim():
        return grad
    total = grad[0].to(torch.promote_types(grad.dtype, torch.float32))
    for piece in grad[1:]:
        total = total + piece
    return total


def next_step(step: Tensor) -> Scalar:
    """The number of the step about to be taken: a number if the count is on the host, otherwise a tensor."""
    return step.item() + 1 if step.device.type == "cpu" else step.double() + 1


def advance(steps: Sequence[Tensor]) -> None:
    """Add one to each count, once however many tensors share it."""
    for step in {id(step): step for step in steps}.values():
        step.add_(1)


def _each(value: T | Sequence[T], count: int) -> Sequence[T]:
    return value if isinstance(value, Sequence) else [value] * count


def _fp64(x: Scalar, like: Tensor) -> Scalar:
    """``x`` in fp64, a float unless it is a tensor of a device; then it is brought to that of ``like``."""
    if not isinstance(x, Tensor):
        return float(x)
    return float(x) if x.device.type == "cpu" else x.reshape(()).to(like.device, torch.float64)


def _rounded(x: Scalar, like: Tensor) -> Scalar:
    """``x`` in the dtype of ``like``; a Python float stays one, as torch rounds it once when it meets the tensor."""
    return x.to(like.dtype) if isinstance(x, Tensor) else x
