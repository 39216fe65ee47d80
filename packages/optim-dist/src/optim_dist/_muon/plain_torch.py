"""The elementwise parts of a Muon step on shards of matrices: before and after the owner's work.

The formulas are those of ``optim_kernels.reference.muon``, called on the shards of many matrices at once, in plain
torch on any device. Where optim-kernels has one launch for many shards, ``launches`` uses that instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from optim_dist._optimizers.shards import Item, StepContext, takes_zeros
from optim_dist._reduction.joined import Joined, alike
from optim_kernels.muon_groups import rule_of
from optim_kernels.reference.muon import ScaleRule, lr_scale, momentum_, updated, wide_dtype
from optim_kernels.reference.storage import Rounding, gradient_scale, read_param, write_param
from optim_utils.param_groups import MatrixView


class _Update(NamedTuple):
    """A shard, and the shard of its direction."""

    item: Item
    view: MatrixView
    o: Tensor


def takes_part(item: Item) -> bool:
    """Whether the matrix is updated in this step: it has a gradient, or its group takes a missing one for zeros."""
    return item.shard.gradient is not None or takes_zeros(item.shard, item.group)


def momenta(items: Sequence[Item], context: StepContext, us: Sequence[Tensor]) -> None:
    """Update every shard's momentum by its gradient, and write each shard's U, zeros for a matrix left alone."""
    factor = gradient_scale(context.factor, context.grad_scale)
    pairs = list(zip(items, us, strict=True))
    if left_alone := [u for item, u in pairs if not takes_part(item)]:
        torch._foreach_zero_(left_alone)
    taking_part = [(item, u) for item, u in pairs if takes_part(item)]
    for some in alike(taking_part, lambda pair: _kind_of_momentum(pair[0]), lambda pair: _numel(pair[0])):
        group, buffers = some[0][0].group, Joined([item.state["momentum_buffer"] for item, _ in some])
        u = momentum_(
            Joined([item.shard.gradient_or_zeros for item, _ in some]).flat,
            buffers.flat,
            momentum=group["momentum"],
            rule=rule_of(group),
            clip_factor=factor,
        )
        buffers.put_back()
        torch._foreach_copy_([target for _, target in some], buffers.split(u))


def apply_updates(items: Sequence[Item], views: Sequence[MatrixView], updates: Sequence[Tensor]) -> None:
    """Update every parameter's shard by the shard of its direction in ``updates``."""
    taking_part = [_Update(*each) for each in zip(items, views, updates, strict=True) if takes_part(each[0])]
    at_random = [update for update in taking_part if update.item.group["stochastic_rounding"]]
    together = [update for update in taking_part if not update.item.group["stochastic_rounding"]]
    for some in alike(together, _kind_of_update, lambda update: _numel(update.item)):
        _apply(some, None)
    # one by one, since an element's random bits depend on its place in its parameter
    for item, _, _ in at_random:
        item.state["step"] += 1
    steps = torch.stack([item.state["step"] for item, _, _ in at_random]).tolist() if at_random else []
    for update, step in zip(at_random, steps, strict=True):
        group, shard = update.item.group, update.item.shard
        _apply([update], Rounding(group["seed"], shard.number, shard.start, int(step)))


def scales(item: Item, view: MatrixView) -> tuple[float, ...]:
    """The factors on the learning rate, one for each of the parameter's matrices; shards apply the first to all.

    A shard cannot tell its matrices apart, so the owner multiplies each matrix by its factor relative to the first.
    """
    return _scales(rule_of(item.group).scale, view)


@lru_cache(maxsize=4096)
def _scales(rule: ScaleRule, view: MatrixView) -> tuple[float, ...]:
    return tuple(lr_scale(rule, shape, view.shape) for shape in view.shapes)


def _apply(updates: Sequence[_Update], bits: Rounding | None) -> None:
    """Update shards of one kind, with one learning rate; ``bits`` for stochastic rounding."""
    items = [update.item for update in updates]
    group, values = items[0].group, Joined([item.shard.value for item in items])
    found = [master for item in items if (master := item.master) is not None]
    masters = Joined(found) if found else None
    o, master = Joined([update.o for update in updates]).flat, None if masters is None else masters.flat
    new = updated(
        read_param(values.flat, master),
        o.to(wide_dtype(values.flat, o)),
        lr=group["lr"],
        scale=scales(items[0], updates[0].view)[0],
        weight_decay=group["weight_decay"],
        cautious=group["cautious"],
    )
    write_param(values.flat, master, new, bits)
    values.put_back()
    if masters is not None:
        masters.put_back()


def _kind_of_momentum(item: Item) -> tuple[object, ...]:
    value, gradient = item.shard.value, item.shard.gradient
    gradient_dtype = value.dtype if gradient is None else gradient.dtype
    return id(item.group), gradient_dtype, item.state["momentum_buffer"].dtype, value.dtype


def _kind_of_update(update: _Update) -> tuple[object, ...]:
    item, view, o = update
    master = item.master
    master_dtype = None if master is None else master.dtype
    return id(item.group), scales(item, view)[0], item.shard.value.dtype, o.dtype, master_dtype


def _numel(item: Item) -> int:
    return item.shard.value.numel()
