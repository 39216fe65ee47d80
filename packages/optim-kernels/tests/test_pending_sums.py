"""Gradients that are spread over ranks otherwise than their parameters, which sequence parallelism leaves."""

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

Make = Callable[[Tensor], Optimizer]
KERNELS = "triton" if is_interpreted() else "auto"


def adamw(param: Tensor, **options: Any) -> Optimizer:
    return TritonAdamW([param], **options)


def muon(param: Tensor, **options: Any) -> Optimizer:
    return TritonMuon([param], momentum=0.5, **options)


def muon_adamw(param: Tensor, **options: Any) -> Optimizer:
    return TritonMuonAdamW([{"kind": "adamw", "params": [param]}], **options)


MAKES: dict[str, Make] = {
    "plain torch": partial(adamw, impl="torch"),
    "reference": partial(adamw, impl="torch", state_dtype=torch.bfloat16),
    "kernels": partial(adamw, impl=KERNELS),
    "muon": partial(muon, impl="torch"),
    "muon_adamw": partial(muon_adamw, impl=KERNELS),
    "muon_adamw in plain torch": partial(muon_adamw, impl="torch"),
}


def _train(rank: int, world_size: int, name: str) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (world_size,))
    whole = nn.Parameter(torch.ones(4, 6))
    replicated = nn.Parameter(DTensor.from_local(torch.ones(4, 6), mesh, [Replicate()]))
    optimizers = [MAKES[name](p) for p in (whole, replicated)]
    for seed in range(3):
        torch.manual_seed(seed)
        shares = torch.randn(world_size, 4, 6)
        whole.grad = shares.sum(dim=0)
        replicated.grad = DTensor.from_local(shares[rank], mesh, [Partial()])
        if seed == 2:
            replicated.grad = DTensor.from_local(whole.grad.chunk(world_size)[rank], mesh, [Shard(0)])
        optimizers[0].step()
        with CommDebugMode() as sent:
            optimizers[1].step()
        assert sent.get_total_counts() == 1
        torch.testing.assert_close(replicated.to_local(), whole)
    plain, own = (optimizer.state[p] for optimizer, p in zip(optimizers, (whole, replicated)))
    for key in plain.keys() - {"step"}:
        torch.testing.assert_close(own[key].full_tensor(), plain[key])


@pytest.mark.parametrize("name", MAKES)
def test_sums_over_ranks_are_done_first_and_once(name: str) -> None:
    run_ranks(_train, 2, name, backend="gloo")
