"""What surrounds a step: the user's hooks once, the profiler's name for it, and gradients enabled or not as before."""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest
import torch
from fresh_params import make_params
from random_tensors import DEVICE
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from optim_kernels import TritonAdamW, TritonMuon


def test_hooks_run_around_the_step() -> None:
    params = make_params()
    optimizer = TritonAdamW(params, impl="triton")
    calls: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre")),
        optimizer.register_step_post_hook(lambda *_: calls.append("post")),
        register_optimizer_step_pre_hook(lambda *_: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global post")),
    ]
    optimizer.step()
    for handle in handles:
        handle.remove()
    assert calls == ["global pre", "pre", "post", "global post"]
    optimizer.step()
    assert len(calls) == 4


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, TritonAdamW])
def test_a_hook_may_turn_gradients_off_for_what_follows(optimizer_class: Any) -> None:
    optimizer = optimizer_class(make_params())
    optimizer.register_step_post_hook(lambda *_: torch.set_grad_enabled(False))
    with torch.enable_grad():
        optimizer.step()
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("base", [TritonAdamW, TritonMuon])
def test_hooks_run_once_around_a_step_that_calls_another(base: Any) -> None:
    class Own(base):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    params = make_params([(4, 5)])
    optimizer = Own(params, impl="triton")
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.step()
    assert calls == ["pre", "post"]


def test_hooks_run_within_a_step_that_was_put_around_the_classs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a tool that measures steps, say; torch takes it for a step with hooks of its own."""
    original, timed = TritonAdamW.step, []

    @wraps(original)
    def step(self: Any, *args: Any) -> Any:
        timed.append(1)
        return original(self, *args)

    monkeypatch.setattr(TritonAdamW, "step", step)
    optimizer = TritonAdamW(make_params(), impl="triton")
    optimizer.register_step_pre_hook(lambda *_: timed.append(2))
    optimizer.step()
    assert timed == [1, 2]


def test_profiles_name_the_step() -> None:
    params = make_params()
    optimizer = TritonAdamW(params, impl="triton")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        optimizer.step()
    assert "Optimizer.step#TritonAdamW.step" in {event.name for event in profile.events()}


def test_gradients_are_enabled_again_after_a_step_that_failed() -> None:
    p = torch.nn.Parameter(torch.ones(4, device=DEVICE))
    optimizer = TritonAdamW([p])
    p.grad = torch.ones_like(p).to_sparse()
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            with pytest.raises(RuntimeError, match="sparse"):
                optimizer.step()
            assert torch.is_grad_enabled() is enabled
