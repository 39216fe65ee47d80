"""The step of ``TritonAdamW`` where no kernel runs: torch's own AdamW, and the reference for options it lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from optim_kernels import reference
from optim_kernels._dtensors import local
from optim_kernels._optimizers.adamw_state import MOMENTS
from optim_kernels._optimizers.storage import MASTER_KEYS, master_of
from optim_utils.low_bit import LowBitTensor


def step_with_torch(
    group: dict[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Any]],
    indices: list[int],
    *,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    clip_factor: Tensor | None,
) -> None:
    """Update the parameters of one group; ``indices`` are their numbers among all, for random rounding."""
    if _fits_torch(group, params, grads, states):
        _torch_step(group, params, grads, states, grad_scale=grad_scale, found_inf=found_inf, clip_factor=clip_factor)
    else:
        _reference_step(
            group, params, grads, states, indices, grad_scale=grad_scale, found_inf=found_inf, clip_factor=clip_factor
        )


def beyond_torch(
    group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
) -> Tensor | None:
    """The first parameter with options that torch's code lacks, in a group that no other code can update."""
    if not group["differentiable"] and not any(param.is_complex() for param in params):
        return None
    each = zip(params, grads, states)
    return next((param for param, grad, state in each if not _fits_torch(group, [param], [grad], [state])), None)


def _fits_torch(group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]) -> bool:
    """Whether torch's code can work on these: gradient and moments in the parameter's dtype, and no master."""
    return not group["stochastic_rounding"] and not any(
        MASTER_KEYS & state.keys()
        or grad.dtype != param.dtype
        or any(
            state[key].dtype != param.dtype or isinstance(state[key], LowBitTensor) for key in MOMENTS if key in state
        )
        for param, grad, state in zip(params, grads, states)
    )


def _torch_step(
    group: dict[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Any]],
    *,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    clip_factor: Tensor | None,
) -> None:
    if found_inf is not None and bool(found_inf.item()):
        return
    scale = reference.gradient_scale(clip_factor, grad_scale)
    with torch.set_grad_enabled(group["differentiable"]):
        torch_adamw(
            params,
            grads if scale is None else [_scaled(grad, scale) for grad in grads],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            capturable=group["capturable"],
            differentiable=group["differentiable"],
            # None, as from a user of torch, lets torch choose between its loop and foreach
            fused=None if group["fused"] is None else False,
            has_complex=any(param.is_complex() for param in params),
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


def _scaled(grad: Tensor, scale: Tensor) -> Tensor:
    """The gradient times the factor, rounded once.

    torch would round the factor too, to the dtype of a 16-bit gradient, or widen a 0-d gradient.
    """
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    return (wide * scale.to(wide.device)).to(grad.dtype)


@torch.no_grad()
def _reference_step(
    group: dict[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Any]],
    indices: list[int],
    *,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    clip_factor: Tensor | None,
) -> None:
    # only the local parts of DTensors, since the update is elementwise
    reference.adamw_(
        [local(param) for param in params],
        [local(grad) for grad in grads],
        [local(state["exp_avg"]) for state in states],
        [local(state["exp_avg_sq"]) for state in states],
        steps=[state["step"] for state in states],
        lr=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        max_exp_avg_sqs=[local(state["max_exp_avg_sq"]) for state in states] if group["amsgrad"] else None,
        masters=[local(master_of(state)) for state in states],
        maximize=group["maximize"],
        grad_scale=grad_scale,
        found_inf=found_inf,
        clip_factor=clip_factor,
        stochastic_rounding=group["stochastic_rounding"],
        seed=group["seed"],
        indices=indices,
    )
