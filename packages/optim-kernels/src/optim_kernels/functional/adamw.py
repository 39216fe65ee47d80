"""One AdamW step on lists of tensors: the kernels where they run, the reference elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optim_kernels import reference
from optim_kernels.reference.adamw import Betas, Scalar


@torch.no_grad()
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
    """One AdamW step on every tensor, in place (formula: ``optim_kernels.reference.adamw``).

    Tensors may be views into flat buffers at any offset: a shard made of pieces of several parameters is a list of
    views. Hyperparameters are shared or one a tensor.

    Args:
        grads: of any floating dtype; one with a dimension more than its parameter is a stack of slices (one a rank,
            say), summed in order in fp32 before anything else.
        steps: 0-d tensors that count the steps taken so far, one a tensor or shared; each is advanced once.
        masters: per tensor ``None``, its fp32 master, or the int16 low half that completes a bf16 parameter.
        grad_scale: what gradients are divided by; found_inf: if nonzero, nothing is changed, step counts included.
        clip_factor: what gradients are multiplied with.
        stochastic_rounding: whether bf16 parameters and moments are rounded at random, by the packed stream of
            ``optim_utils.rounding`` with key ``(seed, indices[i])`` from element ``starts[i]`` on.
        present: per tensor ``None`` or a 0-d tensor; 0 leaves tensor, state and step count alone.
    """
    reference.adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        steps=steps,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        max_exp_avg_sqs=max_exp_avg_sqs,
        masters=masters,
        maximize=maximize,
        grad_scale=grad_scale,
        found_inf=found_inf,
        clip_factor=clip_factor,
        stochastic_rounding=stochastic_rounding,
        seed=seed,
        indices=indices,
        starts=starts,
        present=present,
    )
