"""Objects that a checkpoint holds and an optimizer has not made yet: a step that changes nothing makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optim_utils._state.walk import is_low_bit_form


def make_missing_objects(optimizer: Optimizer, saved: dict[Tensor, dict[Any, Any]]) -> list[Tensor]:
    """Let the optimizer make the state of those parameters that have none, if a saved state holds objects for them.

    Returns these parameters.
    """
    params = [
        param
        for param, state in saved.items()
        if not optimizer.state.get(param) and any(map(_may_be_object, state.values()))
    ]
    if not params:
        return []
    wanted = set(params)
    everyone = [param for group in optimizer.param_groups for param in group["params"]]
    values = [param.detach().clone() for param in params]
    gradients = [param.grad for param in everyone]
    # all entries of all groups: a step may count itself in them
    groups = [dict(group) for group in optimizer.param_groups]
    try:
        for param in everyone:
            param.grad = torch.zeros_like(param) if param in wanted else None
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        optimizer.step()
    except BaseException:
        drop_states(optimizer, params)
        raise
    finally:
        for group, before in zip(optimizer.param_groups, groups):
            group.clear()
            group.update(before)
        for param, gradient in zip(everyone, gradients):
            param.grad = gradient
        with torch.no_grad():
            for param, value in zip(params, values):
                param.copy_(value)
    return params


def drop_states(optimizer: Optimizer, params: list[Tensor]) -> None:
    """Take the states of ``params`` away again."""
    for param in params:
        optimizer.state.pop(param, None)


def _may_be_object(value: object) -> bool:
    """Whether a saved value can be the state of an object; a low-bit tensor's form says that it is none."""
    return isinstance(value, Mapping) and not is_low_bit_form(value)
