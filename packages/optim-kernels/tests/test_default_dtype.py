"""torch's default dtype is the user's: whatever it is, steps, norms and iterations are what they are without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from random_tensors import DEVICE, random
from torch import Tensor, nn

from optim_kernels import TritonAdamW, TritonMuon, TritonMuonAdamW, get_total_norm, newton_schulz

pytest.importorskip("triton")

SHAPES = [(4, 6), (6, 4)]


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def with_default(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Calls a function with that default dtype."""

    def call(function: Callable[[], Any]) -> Any:
        torch.set_default_dtype(request.param)
        try:
            return function()
        finally:
            torch.set_default_dtype(torch.float32)

    yield call
    torch.set_default_dtype(torch.float32)


def trained(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[Tensor]:
    """Parameters after two steps, and what they have for states."""
    params = [nn.Parameter(random(shape, i)) for i, shape in enumerate(SHAPES)]
    optimizer = make(params)
    for step in range(2):
        for i, p in enumerate(params):
            p.grad = random(p.shape, 10 * step + i, p.dtype)
        optimizer.step()
    return [*params, *(value for p in params for value in optimizer.state[p].values())]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params, impl: TritonAdamW(params, lr=0.1, max_norm=0.5, impl=impl),
    "Muon": lambda params, impl: TritonMuon(params, lr=0.1, ns_dtype=torch.float32, impl=impl),
    "nanochat": lambda params, impl: TritonMuonAdamW(
        [{"params": params, "kind": "muon", "ns_dtype": torch.float32}], max_norm=0.5, impl=impl
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(name: str, impl: str, with_default: Callable[[Callable[[], Any]], Any]) -> None:
    def train() -> list[Tensor]:
        return trained(lambda params: OPTIMIZERS[name](params, impl))

    for found, expected in zip(with_default(train), train(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("coefficients", ["keller", "aol4"])
def test_newton_schulz(coefficients: str, with_default: Callable[[Callable[[], Any]], Any]) -> None:
    x = random((2, 20, 30), 0)

    def iterate() -> Tensor:
        result: Tensor = newton_schulz(x, 4, coefficients=coefficients, compute_dtype=torch.float32, impl="triton")
        return result

    assert torch.equal(with_default(iterate), iterate())


def test_norms(with_default: Callable[[Callable[[], Any]], Any]) -> None:
    x = random((20, 30), 0)
    norm = with_default(lambda: get_total_norm([x]))
    assert torch.equal(norm, get_total_norm([x]))
    assert with_default(lambda: get_total_norm([])).dtype == torch.float32


def test_counts_of_nanochats_checkpoints(with_default: Callable[[Callable[[], Any]], Any]) -> None:
    p = nn.Parameter(random((5,), 0))
    optimizer = TritonMuonAdamW([{"params": [p], "kind": "adamw"}])
    p.grad = random((5,), 1)
    optimizer.step()
    content = copy.deepcopy(optimizer.state_dict(layout="nanochat"))
    content["state"][0]["step"] = 1001
    with_default(lambda: optimizer.load_state_dict(content))
    assert optimizer.state[p]["step"].device.type in ("cpu", DEVICE)
    assert int(optimizer.state[p]["step"]) == 1001
