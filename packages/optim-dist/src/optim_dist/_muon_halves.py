"""A Muon step in three parts, for matrices that nobody holds whole: before, at, and after the owner.

The formulas are those of ``optim_kernels.reference.muon``, called part by part: the first and the last are
elementwise and work on any shard, the middle one needs the whole matrix.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from optim_dist._shards import Item, StepContext
from optim_kernels.functional import muon_update
from optim_kernels.muon_groups import ns_config_of, rule_of
from optim_kernels.reference.adamw import Rounding, gradient_scale, read_param, write_param
from optim_kernels.reference.muon import lr_scale, momentum_, updated, wide_dtype
from optim_utils.param_groups import MatrixView


def takes_part(item: Item) -> bool:
    """Whether the matrix is updated in this step: it has a gradient, or its group takes a missing one for zeros."""
    return item.shard.gradient is not None or item.group["missing_grad"] == "zero"


def local_momentum(item: Item, context: StepContext) -> Tensor:
    """Move the shard's momentum towards its gradient; U of the shard, zeros if the matrix is left alone."""
    shard, group = item.shard, item.group
    if shard.gradient is None and group["missing_grad"] == "raise":
        raise RuntimeError(f"{shard.name} has no gradient; pass missing_grad='skip' or 'zero' to allow that")
    if not takes_part(item):
        return torch.zeros_like(shard.value)
    return momentum_(
        torch.zeros_like(shard.value) if shard.gradient is None else shard.gradient,
        item.state["momentum_buffer"],
        momentum=group["momentum"],
        rule=rule_of(group),
        clip_factor=gradient_scale(context.factor, context.grad_scale),
    )


def direction(item: Item, u: Tensor, view: MatrixView) -> Tensor:
    """O of a whole ``u``, in its shape, fp32 (fp64 for fp64); the second moment moves, ``u`` is used up."""
    if not takes_part(item):
        return u
    group = item.group
    u = _in_stored_order(u, view)
    moment = None if group["beta2"] is None else [item.state["second_momentum_buffer"]]
    # without momentum the update of a gradient is the direction of the gradient itself
    (o,) = muon_update(
        [u],
        [u],
        momentum=0.0,
        rule=replace(rule_of(group), nesterov=False, maximize=False),
        ns=ns_config_of(group),
        second_moments=moment,
        beta2=group["beta2"] or 0.0,
        views=[view],
        impl=group["impl"],
    )
    first, *others = scales = _scales(item, view)
    if any(scale != first for scale in others):
        # a shard cannot tell its matrices apart, so that what is peculiar to each is multiplied here
        for part, scale in zip(view.views(o), scales):
            part *= scale / first
    return o


def apply_update(item: Item, o: Tensor, view: MatrixView) -> None:
    """Update the parameter's shard by the shard ``o`` of its direction."""
    if not takes_part(item):
        return
    shard, group, state = item.shard, item.group, item.state
    bits = None
    if group["stochastic_rounding"]:
        state["step"] += 1
        bits = Rounding(group["seed"], shard.place, shard.start, int(state["step"]))
    master = state.get("master", state.get("master_low"))
    new = updated(
        read_param(shard.value, master),
        o.to(wide_dtype(shard.value, o)),
        lr=group["lr"],
        scale=_scales(item, view)[0],
        weight_decay=group["weight_decay"],
        cautious=group["cautious"],
    )
    write_param(shard.value, master, new, bits)


def _scales(item: Item, view: MatrixView) -> list[float]:
    """What the learning rate of each of the parameter's matrices is multiplied by."""
    return [lr_scale(rule_of(item.group).scale, shape, view.shape) for shape in view.shapes]


def _in_stored_order(u: Tensor, view: MatrixView) -> Tensor:
    """``u`` with strides that allow the view: its dimensions lie as ``view.order`` wants them."""
    if not view.order:
        return u
    inverse = [view.order.index(dim) for dim in range(len(view.order))]
    return u.permute(view.order).contiguous().permute(inverse)
