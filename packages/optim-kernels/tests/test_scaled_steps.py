"""Steps by way of torch's ``GradScaler``, one of which fails."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from random_tensors import DEVICE, give_gradients, random_parameters
from torch import Tensor
from torch.optim import Optimizer

from optim_kernels import TritonAdamW, TritonMuon, TritonMuonAdamW

KINDS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "AdamW": partial(TritonAdamW, eps=1.0),  # else no scale makes a difference
    "Muon": TritonMuon,
    "MuonAdamW": lambda params: TritonMuonAdamW([{"kind": "muon", "params": params}]),
}


def sparse(param: Tensor, _: Optimizer) -> None:
    assert param.grad is not None
    param.grad = param.grad.to_sparse()


def refusing_hook(_: Tensor, optimizer: Optimizer) -> None:
    def refuse(*_: object) -> None:
        handle.remove()
        raise RuntimeError("refused by a hook")

    handle = optimizer.register_step_pre_hook(refuse)


@pytest.mark.parametrize("fail", [sparse, refusing_hook])
@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_of_a_step_that_failed_is_forgotten(kind: str, fail: Callable[[Tensor, Optimizer], None]) -> None:
    """Else the scaler multiplies the next scale by it, and the gradients count for 1/256 of themselves."""
    found = []
    for fails in (False, True):
        params: list[Tensor] = [*random_parameters((33, 40), (20, 20))]
        optimizer = KINDS[kind](params)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0)
        scaler.scale(torch.ones((), device=DEVICE))
        for step in range(3):
            give_gradients(*params, seed=step)
            dense = [p.grad * 256 for p in params if p.grad is not None]
            for p, grad in zip(params, dense, strict=True):
                p.grad = grad
            if fails and step == 1:
                before = [p.detach().clone() for p in params]
                fail(params[1], optimizer)
                with pytest.raises(RuntimeError, match=r"sparse|dense|refused by a hook"):
                    scaler.step(optimizer)
                assert all(map(torch.equal, params, before))
                params[1].grad = dense[1]
            scaler.step(optimizer)
            scaler.update()
        found.append(params)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_the_norm_is_a_number_whatever_the_dimensions_of_the_scale(impl: str) -> None:
    (p,) = random_parameters((3, 4))
    for optimizer in (
        TritonAdamW([p], max_norm=1.0, impl=impl),  # type: ignore[arg-type]
        TritonMuonAdamW([{"kind": "adamw", "params": [p]}], max_norm=1.0, impl=impl),  # type: ignore[arg-type]
    ):
        p.grad = torch.full_like(p, 8.0)
        optimizer.grad_scale = torch.full((1,), 4.0, device=DEVICE)  # type: ignore[union-attr]
        optimizer.step()
        assert optimizer.grad_norm is not None
        assert optimizer.grad_norm.shape == ()
        assert optimizer.grad_norm.item() == pytest.approx(2 * 12**0.5)
