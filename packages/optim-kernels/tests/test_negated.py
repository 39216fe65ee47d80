"""Tensors that are stored with the other sign, as imaginary parts of conjugates are; kernels see memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from random_tensors import DEVICE
from torch import Tensor, nn

from optim_kernels import TritonAdamW, TritonMuon, TritonMuonAdamW, functional

Make = Callable[[list[nn.Parameter], str], torch.optim.Optimizer]

MAKERS: dict[str, Make] = {
    "AdamW": lambda params, impl: TritonAdamW(params, lr=0.1, impl=impl),
    "AdamW of one": lambda params, impl: TritonAdamW(params[:1], lr=0.1, impl=impl),
    "AdamW, max_norm": lambda params, impl: TritonAdamW(params, lr=0.1, max_norm=0.5, impl=impl),
    "AdamW of two dtypes": lambda params, impl: TritonAdamW([*params, half(params[0])], lr=0.1, impl=impl),
    "Muon": lambda params, impl: TritonMuon(params, lr=0.1, impl=impl, ns_dtype=torch.float32),
    "MuonAdamW": lambda params, impl: TritonMuonAdamW([{"kind": "adamw", "params": params, "lr": 0.1, "impl": impl}]),
}


def half(like: Tensor) -> nn.Parameter:
    p = nn.Parameter(torch.ones(5, device=DEVICE).half())
    p.grad = torch.ones_like(p)
    return p


def normal(number: int, shape: tuple[int, ...] = (9, 12)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(DEVICE)


@pytest.mark.parametrize("name", MAKERS)
def test_gradients_of_either_sign_in_one_place(name: str) -> None:
    arms = []
    for impl in ("triton", "torch"):
        params = [nn.Parameter(normal(0)), nn.Parameter(normal(1))]
        optimizer = MAKERS[name](params, impl)
        stored = [normal(2), normal(3)]
        # often enough to be recognised, before and after
        for signs in (1, 1, 1, -1, -1, -1, 1, 1):
            for p, grad in zip(params, stored):
                p.grad = grad if signs > 0 else torch._neg_view(grad)
            optimizer.step()
        arms.append(params)
        assert all(torch.equal(grad, normal(number)) for number, grad in enumerate(stored, start=2))
    for ours, theirs in zip(*arms):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_scalar_in_complex_arithmetic() -> None:
    """Autograd hands on what is negated lazily, where a parameter has one element."""
    ends = []
    for impl in ("triton", "torch"):
        phase = nn.Parameter(torch.full((1,), 2.0, device=DEVICE))
        optimizer = TritonAdamW([phase], lr=0.1, weight_decay=0.0, impl=impl)
        (torch.complex(torch.ones_like(phase), phase).conj() * (3 + 5j)).imag.sum().backward()
        assert phase.grad is not None
        assert phase.grad.is_neg()
        optimizer.step()
        ends.append(phase.item())
    assert ends == pytest.approx([2.1, 2.1])


def test_parameters_go_through_plain_torch() -> None:
    p = nn.Parameter(torch._neg_view(normal(0)))
    p.grad = normal(1)
    with pytest.raises(RuntimeError, match="it is negated lazily"):
        TritonAdamW([p], impl="triton").step()
    muon = TritonMuon([p], impl="triton")
    muon.step()
    assert muon.plans() == []
    m, v = torch.zeros(9, 12, device=DEVICE), torch.zeros(9, 12, device=DEVICE)
    hyper = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "impl": "triton"}
    steps = torch.zeros((), device=DEVICE)
    with pytest.raises(ValueError, match=r"params\[0\], .* is negated lazily; give its resolve_neg"):
        functional.adamw_([p.detach()], [normal(1)], [m], [v], steps=steps, **hyper)
    largest, master = torch.zeros_like(v), normal(0)
    tensors = {"exp_avgs": m, "exp_avg_sqs": v, "max_exp_avg_sqs": largest, "masters": master}
    for name in tensors:
        given = {key: [torch._neg_view(x) if key == name else x] for key, x in tensors.items()}
        with pytest.raises(ValueError, match=rf"{name}\[0\], .* is negated lazily"):
            functional.adamw_([normal(0).half()], [normal(1)], **given, steps=steps, **hyper)
