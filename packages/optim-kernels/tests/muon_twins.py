"""Muon's optimizers in pairs, one of which a test changes: the same parameters and gradients for both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_tensors import DEVICE
from torch import nn

from optim_kernels import TritonMuon

IMPLS = pytest.mark.parametrize("impl", ["torch", "triton"])


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape).to(DEVICE, dtype))


def muon(params: list[Any], impl: str, **options: Any) -> TritonMuon:
    """With fewer iterations than usual, as these are interpreted and always the same."""
    return TritonMuon(params, lr=0.1, impl=impl, ns_dtype=torch.float32, **{"ns_steps": 2, **options})


def steps(*optimizers: TritonMuon, count: int = 1) -> None:
    """The same gradients for all."""
    for _ in range(count):
        first, *others = [[p for group in opt.param_groups for p in group["params"]] for opt in optimizers]
        for p, *same in zip(first, *others, strict=True):
            p.grad = torch.randn_like(p)
            for q in same:
                q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()


def twins(impl: str, *shape: int, **options: Any) -> tuple[TritonMuon, TritonMuon]:
    p = parameter(*shape)
    return muon([p], impl), muon([{"params": [nn.Parameter(p.detach().clone())], **options}], impl)


def assert_alike(one: TritonMuon, other: TritonMuon) -> None:
    for p, q in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)
