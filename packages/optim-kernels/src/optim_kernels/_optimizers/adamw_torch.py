"""The step of ``TritonAdamW`` where no kernel runs: torch's own AdamW, and the reference for options it lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from optim_kernels import reference
from optim_kernels._dtensors import local, note_shards_were_written
from optim_kernels._optimizers.adamw_parts import TorchStep
from optim_kernels._optimizers.adamw_state import MOMENTS
from optim_kernels._optimizers.storage import MASTER_KEYS, master_of
from optim_kernels._options import without_dims
from optim_utils.low_bit import LowBitTensor


def step_with_torch(
    step: TorchStep, *, grad_scale: Tensor | None, found_inf: Tensor | None, clip_factor: Tensor | None
) -> None:
    """Take a step by torch's code, or the reference."""
    take = _torch_step if _fits_torch(step) else reference_step
    take(step, grad_scale=grad_scale, found_inf=found_inf, clip_factor=clip_factor)


def check_step(step: TorchStep, names: Callable[[], Mapping[Tensor, str]]) -> None:
    """Raise for what torch's code lacks or refuses: it would do so in the middle of a step, when others have moved."""
    group, differentiable, is_foreach = step.group, step.group["differentiable"], step.group["foreach"]
    if differentiable or any(param.is_complex() for param in step.params):
        for index, param, grad, state in zip(step.indices, step.params, step.grads, step.states, strict=True):
            if not _fits_torch(TorchStep(group, [index], [param], [grad], [state])):
                raise RuntimeError(
                    "complex parameters and differentiable=True are left to torch's own code, which has neither "
                    "stochastic rounding, nor master weights, nor moments of another dtype than the parameter's; give "
                    f"{names()[param]} to a group without them"
                )
    if not (differentiable or is_foreach or group["capturable"]) or not _fits_torch(step):
        return
    if differentiable and is_foreach:
        raise ValueError("torch's foreach functions have no derivatives: differentiable=True goes with foreach=None")
    if is_foreach and not group["capturable"]:
        numbers = {"lr": group["lr"], "betas[0]": group["betas"][0], "betas[1]": group["betas"][1]}
        for option, number in numbers.items():
            if isinstance(number, Tensor):
                raise ValueError(
                    f"{option} as a Tensor is not supported for capturable=False and foreach=True; give foreach=None"
                )
    for param in step.params:
        if group["capturable"] and param.device.type == "cpu":
            raise RuntimeError(
                f"capturable=True is for steps that a CUDA graph captures, and {names()[param]} is on the CPU; give it "
                "to a group with capturable=False (torch.compile sets it where a compiled function writes to "
                "param_groups: write to them outside)"
            )
        if differentiable and any(map(_is_leaf_with_gradient, (param, param._base))):
            raise RuntimeError(
                f"differentiable=True makes the step a part of the graph, in which {names()[param]}, a leaf that "
                "requires a gradient, cannot be overwritten; give its clone, or a group with differentiable=False"
            )


def _is_leaf_with_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_leaf and tensor.requires_grad


def _fits_torch(step: TorchStep) -> bool:
    """Whether torch's code can take a step: gradients and moments in the parameters' dtypes, and no masters."""
    return not step.group["stochastic_rounding"] and not any(
        MASTER_KEYS & state.keys()
        or grad.dtype != param.dtype
        or any(
            state[key].dtype != param.dtype or isinstance(state[key], LowBitTensor) for key in MOMENTS if key in state
        )
        for param, grad, state in zip(step.params, step.grads, step.states)
    )


def _torch_step(
    step: TorchStep, *, grad_scale: Tensor | None, found_inf: Tensor | None, clip_factor: Tensor | None
) -> None:
    if found_inf is not None and bool(found_inf.item()):
        return
    group, grads, states = step.group, step.grads, step.states
    scale = reference.gradient_scale(clip_factor, grad_scale)
    with torch.set_grad_enabled(bool(group["differentiable"])):
        torch_adamw(
            step.params,
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
            has_complex=any(param.is_complex() for param in step.params),
            amsgrad=group["amsgrad"],
            beta1=without_dims(group["betas"][0]),
            beta2=without_dims(group["betas"][1]),
            lr=without_dims(group["lr"]),
            weight_decay=without_dims(group["weight_decay"]),
            eps=without_dims(group["eps"]),
            maximize=group["maximize"],
        )


def _scaled(grad: Tensor, scale: Tensor) -> Tensor:
    """The gradient times the factor, rounded once.

    torch would round the factor too, to the dtype of a 16-bit gradient, or widen a 0-d gradient.
    """
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    return (wide * scale.to(wide.device)).to(grad.dtype)


@torch.no_grad()
def reference_step(
    step: TorchStep, *, grad_scale: Tensor | None, found_inf: Tensor | None, clip_factor: Tensor | None
) -> None:
    """Take a step by the reference, which has every option."""
    group, params, states = step.group, step.params, step.states
    # only the local parts of DTensors, since the update is elementwise
    reference.adamw_(
        [local(param) for param in params],
        [local(grad) for grad in step.grads],
        [local(state["exp_avg"]) for state in states],
        [local(state["exp_avg_sq"]) for state in states],
        steps=[state["step"] for state in states],
        lr=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        max_exp_avg_sqs=[local(state["max_exp_avg_sq"]) for state in states] if group.get("amsgrad") else None,
        masters=[local(master_of(state)) for state in states],
        maximize=group["maximize"],
        grad_scale=grad_scale,
        found_inf=found_inf,
        clip_factor=clip_factor,
        stochastic_rounding=group.get("stochastic_rounding", False),
        seed=group["seed"],
        indices=step.indices,
    )
    note_shards_were_written(params)
