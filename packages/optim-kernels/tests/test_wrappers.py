"""What optimizers are asked for by way of frameworks' wrappers, which pretend to be of the class that they wrap."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from random_tensors import DEVICE, give_gradients, random_parameters

from optim_kernels import TritonAdamW, TritonMuon, TritonMuonAdamW

pytest.importorskip("triton")

EXACT: dict[str, Any] = {"impl": "triton", "ns_dtype": torch.float32, "ns_steps": 2}
KINDS: dict[str, Any] = {
    "TritonAdamW": lambda p, q: TritonAdamW([p, q], impl="triton", max_norm=1.0),
    "masters": lambda p, q: TritonAdamW([p.detach().bfloat16().requires_grad_()], impl="triton", master_weights="fp32"),
    "TritonMuon": lambda p, q: TritonMuon([p, q], **EXACT, ns_workspace_mb=1),
    "TritonMuonAdamW": lambda p, q: TritonMuonAdamW(
        [{"kind": "muon", "params": [p], **EXACT}, {"kind": "adamw", "params": [q]}], impl="triton", max_norm=1.0
    ),
}


class Wrapper:
    """As ``lightning.pytorch`` wraps optimizers: with the methods of their class; what it lacks it asks of them."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Wrapper", (Wrapper, type(optimizer)), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self) -> None:
        self._optimizer.step()


class CopyingWrapper(Wrapper):
    """As ``lightning.fabric`` wraps them: it has the attributes that they had then."""

    def __init__(self, optimizer: Any) -> None:
        self.__dict__ = dict(vars(optimizer))
        super().__init__(optimizer)


def wrapped(kind: str, wrap: Any) -> tuple[Any, Any]:
    """An optimizer and its wrapper, after two steps."""
    optimizer = KINDS[kind](*(p.detach().to(DEVICE).requires_grad_() for p in random_parameters((8, 6), (5, 4))))
    wrapper = wrap(optimizer)
    for seed in range(2):
        give_gradients(*(p for group in optimizer.param_groups for p in group["params"]), seed=seed)
        wrapper.step()
    return optimizer, wrapper


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_saved_and_loaded(kind: str) -> None:
    optimizer, wrapper = wrapped(kind, Wrapper)
    saved = copy.deepcopy(wrapper.state_dict())
    assert str(saved) == str(optimizer.state_dict())
    if isinstance(optimizer, TritonAdamW):
        assert str(wrapper.to_torch_state_dict()) == str(optimizer.to_torch_state_dict())
    wrapper.step()
    assert str(wrapper.state_dict()["state"]) != str(saved["state"])
    optimizer.load_state_dict(saved)
    assert str(wrapper.state_dict()) == str(saved)


@pytest.mark.parametrize("wrap", [Wrapper, CopyingWrapper])
@pytest.mark.parametrize("kind", ["TritonAdamW", "TritonMuonAdamW"])
def test_the_norm_of_the_latest_step(kind: str, wrap: Any) -> None:
    optimizer, wrapper = wrapped(kind, wrap)
    assert optimizer.grad_norm is not None
    assert wrapper.grad_norm is optimizer.grad_norm


@pytest.mark.parametrize("wrap", [Wrapper, CopyingWrapper])
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_explained_alike(kind: str, wrap: Any) -> None:
    optimizer, wrapper = wrapped(kind, wrap)
    assert " launch" in optimizer.explain()
    assert wrapper.explain() == optimizer.explain()
    if not isinstance(optimizer, TritonAdamW):
        assert wrapper.plans() == optimizer.plans() != []


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_optimizer_has_loaded_is_what_wrappers_tell(kind: str) -> None:
    """The optimizer has other groups and another state by then than a wrapper has copied."""
    optimizer, wrapper = wrapped(kind, CopyingWrapper)
    optimizer.load_state_dict(wrapped(kind, CopyingWrapper)[0].state_dict())
    optimizer.param_groups[0]["lr"] = 0.5
    wrapper.step()
    assert wrapper.explain() == optimizer.explain()
    assert vars(wrapper)["_shared"] is optimizer._shared
    if isinstance(optimizer, TritonAdamW):
        assert str(wrapper.to_torch_state_dict()) == str(optimizer.to_torch_state_dict())


def test_a_copy_of_what_is_shared_is_not_shared() -> None:
    """As where somebody copies a wrapper, attribute by attribute."""
    optimizer, wrapper = wrapped("TritonAdamW", CopyingWrapper)
    copied = copy.deepcopy(vars(wrapper)["_shared"])
    assert vars(wrapper)["_shared"].is_private
    assert not copied.is_private
    assert optimizer.grad_norm is not None
    assert copied.grad_norm is None
