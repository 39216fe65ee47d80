"""Parameters for tests of optimizers, whose gradients come at new addresses, and steps of twins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from random_tensors import DEVICE
from torch import Tensor


def make_params(shapes: Any = ((40, 30), (7,), (64,))) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in shapes]
    renew_gradients(params)
    return params


def renew_gradients(params: list[torch.nn.Parameter]) -> list[Tensor]:
    """New gradients at new addresses; the old ones, so that their memory is not given away at once."""
    old = [p.grad for p in params if p.grad is not None]
    for p in params:
        p.grad = torch.randn_like(p)
    return old


def step_twins(optimizers: Iterable[torch.optim.Optimizer], params: Sequence[Tensor], twins: Sequence[Tensor]) -> None:
    """Step the optimizers of both lists, whose tensors have the same gradients, and have the same bits afterwards."""
    for p, twin in zip(params, twins, strict=True):
        p.grad = torch.randn_like(p)
        twin.grad = p.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    assert all(map(torch.equal, params, twins))
