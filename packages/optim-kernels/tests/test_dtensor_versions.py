"""autograd learns of what a step has written to DTensors, whose shards are what a step works on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optim_kernels import TritonAdamW, TritonMuon, TritonMuonAdamW
from optim_kernels._impl import is_interpreted
from optim_utils.testing import run_ranks

KERNELS = "triton" if is_interpreted() else "auto"


def both(params: list[Tensor], kind: str, **options: Any) -> Optimizer:
    return TritonMuonAdamW([{"kind": kind, "params": params}], **options)


MAKES: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "plain torch": partial(TritonAdamW, impl="torch"),
    "reference": partial(TritonAdamW, impl="torch", state_dtype=torch.bfloat16),
    "kernels": partial(TritonAdamW, impl=KERNELS),
    "muon": partial(TritonMuon, impl="torch", ns_steps=1),
    "muon by kernels": partial(TritonMuon, impl=KERNELS, ns_steps=1),
    "both, muon": partial(both, kind="muon", impl="torch"),
    "both, adamw": partial(both, kind="adamw", impl="torch"),
}


def _step(rank: int, world_size: int, name: str) -> None:
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,))
    stepped, left = (nn.Parameter(DTensor.from_local(torch.ones(4, 6), mesh, [Replicate()])) for _ in range(2))
    optimizer = MAKES[name]([stepped, left])
    for _ in range(3):
        losses = [param.square().sum() for param in (stepped, left)]
        stepped.grad = DTensor.from_local(torch.ones(4, 6), mesh, [Replicate()])
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[0].backward()
        losses[1].backward()
        left.grad = None


@pytest.mark.parametrize("name", MAKES)
def test_a_step_is_seen_by_autograd(name: str) -> None:
    run_ranks(_step, 2, name, backend="gloo")
