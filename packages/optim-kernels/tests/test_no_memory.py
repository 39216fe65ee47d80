"""Tensors without memory of their own are left to torch: those made of others, and fake ones, which measure a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_tensors import DEVICE
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from optim_kernels import TritonAdamW, TritonMuon, TritonMuonAdamW, clip_grad_norm_

OPTIMIZERS: dict[str, Any] = {
    "TritonAdamW": lambda ps: TritonAdamW(ps, max_norm=1.0),
    "formats": lambda ps: TritonAdamW(ps, state_dtype=torch.float32, master_weights="fp32", stochastic_rounding=True),
    "TritonMuon": lambda ps: TritonMuon(ps[:1], beta2=0.95),
    "TritonMuonAdamW": lambda ps: TritonMuonAdamW(
        [{"kind": "muon", "params": ps[:1]}, {"kind": "adamw", "params": ps[1:]}], max_norm=1.0
    ),
}


# those whose steps in plain torch are not torch's own
OTHERS: dict[str, Any] = {
    "formats": lambda ps: TritonAdamW(ps, impl="torch", state_dtype=torch.bfloat16),
    "TritonMuon": lambda ps: TritonMuon(ps[:1], impl="torch", beta2=0.95),
    "TritonMuonAdamW": lambda ps: TritonMuonAdamW(
        [{"kind": "muon", "params": ps[:1]}, {"kind": "adamw", "params": ps[1:]}], impl="torch"
    ),
}


# without a GPU torch copies no fake tensors of one
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_may_be_measured_with_fake_tensors(name: str, device: str) -> None:
    """As memory is estimated: no value is read, and no address."""
    with FakeTensorMode():
        params = [nn.Parameter(torch.zeros(shape, device=device, dtype=torch.bfloat16)) for shape in ((8, 6), (5,))]
        optimizer = OPTIMIZERS[name](params)
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            clip_grad_norm_(params, 1.0)
            optimizer.step()
        held = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
        assert {value.device.type for value in held} == {device}
        assert "torch" in optimizer.explain()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()


# groups keep hyperparameters that only some optimizers have
@pytest.mark.parametrize("name", ["formats", "TritonMuon", "TritonMuonAdamW"])
@pytest.mark.parametrize("option", ["lr", "weight_decay", "momentum", "beta2", "betas", "eps", "clip_factor"])
def test_numbers_may_be_on_another_device_than_parameters(name: str, option: str) -> None:
    """As torch's optimizers take them, for parts of a model on several devices; fake tensors need no second one."""
    with FakeTensorMode():
        params = [nn.Parameter(torch.zeros(shape)) for shape in ((8, 6), (5,))]
        optimizer = OTHERS[name](params)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        number = torch.tensor(0.5, device="cuda")
        for group in optimizer.param_groups:
            # eps of Muon is no hyperparameter
            if option in group and not (option == "eps" and "momentum" in group):
                group[option] = (number, number) if option == "betas" else number
        optimizer.step(clip_factor=number if option == "clip_factor" else None)


def test_fake_tensors_of_a_gpu_are_left_to_torch() -> None:
    with FakeTensorMode():
        params = [nn.Parameter(torch.zeros(shape, device="cuda")) for shape in ((8, 6), (5,))]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = TritonAdamW(params)
        for _ in range(2):
            optimizer.step()
        for each in (optimizer, *(OPTIMIZERS[name](params) for name in ("TritonMuon", "TritonMuonAdamW"))):
            assert "FakeTensor, which has no memory of its own" in each.explain()


@pytest.mark.parametrize(
    "build",
    [
        lambda p: TritonAdamW([p], impl="triton"),
        lambda p: TritonMuonAdamW([{"kind": "adamw", "params": [p]}], impl="triton"),
    ],
    ids=["TritonAdamW", "TritonMuonAdamW"],
)
def test_tensors_that_are_made_of_others_are_left_to_torch(build: Any) -> None:
    two = nn.Parameter(TwoTensor(torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE)))
    two.grad = torch.ones_like(two)
    with pytest.raises(RuntimeError, match=r"it is a TwoTensor, which has no memory of its own"):
        build(two).step()
