"""Optimizers in what torch compiles or exports: steps stay out of it, on whichever thread the compiler runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from random_tensors import DEVICE
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from optim_kernels import TritonAdamW, TritonMuon, TritonMuonAdamW


@pytest.mark.parametrize("optimizer_class", [TritonAdamW, TritonMuon])
def test_a_compiled_training_step_leaves_the_optimizer_out(optimizer_class: Any) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False) for _ in range(3)]).to(DEVICE)
        optimizer = optimizer_class(model.parameters(), lr=0.1)
        counter, hooks = CompileCounter(), [0]

        def count(*_: object, hooks: list[int] = hooks) -> None:
            hooks[0] += 1

        def train(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        optimizer.register_step_post_hook(count)
        step = torch.compile(train, backend=counter) if compiled else train
        for scale in range(1, 4):
            step(torch.full((4, 8), float(scale), device=DEVICE))
        assert hooks == [3]
        assert counter.frame_count == compiled
        found.append([p.detach().clone() for p in model.parameters()])
    for eager, other in zip(*found, strict=True):
        torch.testing.assert_close(other, eager)


@pytest.mark.parametrize(("make", "kind"), [(TritonAdamW, {}), (TritonMuon, {}), (TritonMuonAdamW, {"kind": "muon"})])
def test_a_compiled_function_may_make_an_optimizer(make: Any, kind: dict[str, str]) -> None:
    """Its constructor and groups that are added are not traced; tracing lost attributes that the former sets."""
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        params = [torch.nn.Parameter(torch.ones(4, 3, device=DEVICE)) for _ in range(2)]

        def train(params: Any = params) -> None:
            optimizer = make([{**kind, "params": params[:1], "lr": 0.1}])
            optimizer.add_param_group({**kind, "params": params[1:], "lr": 0.2})
            (params[0] * params[1]).sum().backward()
            optimizer.step()

        (torch.compile(train, backend="eager") if compiled else train)()
        found.append(params)
    for eager, other in zip(*found, strict=True):
        assert (eager != 1).all()
        torch.testing.assert_close(other, eager)


def test_the_compilers_capturable_is_refused_in_words_that_say_whose_it_is() -> None:
    """Where compiled code has written to a group, the compiler gives all groups ``capturable=True``."""
    torch._dynamo.reset()
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = TritonAdamW([p])

    def train() -> None:
        p.square().sum().backward()
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"torch\.compile sets it where a compiled function writes"):
        torch.compile(train, backend="eager")()


@pytest.mark.parametrize("optimizer_class", [TritonAdamW, TritonMuon])
def test_steps_while_another_thread_compiles_are_steps(optimizer_class: Any) -> None:
    torch._dynamo.reset()
    p = torch.nn.Parameter(torch.ones(4, 4, device=DEVICE))
    p.grad = torch.ones_like(p)
    optimizer, hooks = optimizer_class([p]), []
    optimizer.register_step_post_hook(lambda *_: hooks.append(1))

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        with ThreadPoolExecutor(1) as training:
            training.submit(optimizer.step).result()
        return graph.forward

    torch.compile(torch.sin, backend=backend)(torch.ones(3))
    assert hooks == [1]
    assert (p != 1).all()


def test_a_step_in_a_module_that_is_exported_runs_once() -> None:
    p = torch.nn.Parameter(torch.ones(4, device=DEVICE))
    p.grad = torch.ones_like(p)
    # torch's foreach operations cannot be exported on CUDA
    optimizer = TritonAdamW([p], impl="torch", foreach=False)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            optimizer.step()
            return x.sin()

    exported = torch.export.export(Model(), (torch.ones(3),), strict=False)
    assert torch.equal(exported.module()(torch.ones(3)), torch.ones(3).sin())
