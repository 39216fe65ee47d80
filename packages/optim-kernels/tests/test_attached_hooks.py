"""``optim_utils.attach_state_dict_hooks`` on our optimizers: objects load, formats stay the optimizer's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from random_tensors import give_gradients, random_parameters
from torch import Tensor

from optim_kernels import TritonAdamW, TritonMuon, TritonMuonAdamW
from optim_utils import OptimizerModule, StateLoadError, attach_state_dict_hooks
from optim_utils.low_bit import INT8, LowBitTensor, quantize

KINDS: dict[str, Any] = {
    "AdamW": TritonAdamW,
    "int8": lambda params: TritonAdamW(params, state_dtype="int8"),
    "bf16 moments": lambda params: TritonAdamW(params, state_dtype=torch.bfloat16, amsgrad=True),
    "fp32 master": lambda params: TritonAdamW(params, master_weights="fp32", state_dtype=torch.float32),
    "low half": lambda params: TritonAdamW(params, master_weights="split16"),
    "Muon": lambda params: TritonMuon(params[:1], beta2=0.95),
    "MuonAdamW": lambda params: TritonMuonAdamW(
        [{"kind": "muon", "params": params[:1]}, {"kind": "adamw", "params": params[1:]}]
    ),
}


def stepped(kind: str, count: int, *, seed: int = 0) -> tuple[list[Tensor], torch.optim.Optimizer]:
    params: list[Tensor] = [*random_parameters((70, 64), (9,), dtype=torch.bfloat16)]
    optimizer = KINDS[kind](params)
    for step in range(count):
        give_gradients(*params, seed=seed + step)
        optimizer.step()
    return params, optimizer


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    torch.testing.assert_close(a["state"], b["state"], rtol=0, atol=0)
    assert a["param_groups"] == b["param_groups"]


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_loads_as_without_hooks(kind: str, before: int) -> None:
    params, optimizer = stepped(kind, 2)
    attach_state_dict_hooks(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    loaded_params, loaded = stepped(kind, before, seed=7)
    attach_state_dict_hooks(loaded)
    loaded.load_state_dict(copy.deepcopy(saved))
    assert_same(loaded.state_dict(), saved)
    assert "__setstate__" not in vars(loaded)
    with torch.no_grad():
        for p, q in zip(params, loaded_params):
            q.copy_(p)
    for each, its in ((optimizer, params), (loaded, loaded_params)):
        give_gradients(*its, seed=20)
        each.step()
    assert_same(loaded.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("into", ["AdamW", "int8", "bf16 moments", "fp32 master", "low half"])
@pytest.mark.parametrize("kind", ["AdamW", "int8", "fp32 master"])
def test_formats_are_converted_as_without_hooks(kind: str, into: str) -> None:
    saved = stepped(kind, 2)[1].state_dict()
    (_, plain), (_, hooked) = (stepped(into, 1, seed=7) for _ in range(2))
    attach_state_dict_hooks(hooked)
    for optimizer in (plain, hooked):
        optimizer.load_state_dict(copy.deepcopy(saved))
    assert_same(hooked.state_dict(), plain.state_dict())


class Statistics(OptimizerModule):
    def __init__(self, value: float) -> None:
        self.mean = torch.full((3,), value)
        self.low = quantize(torch.full((8,), value), INT8)


def with_objects(kind: str, value: float) -> torch.optim.Optimizer:
    """An optimizer of one step, in whose state the user keeps objects."""
    params, optimizer = stepped(kind, 1)
    attach_state_dict_hooks(optimizer)
    state = optimizer.state[params[0]]
    state["statistics"] = Statistics(value)
    state["history"] = [Statistics(value), Statistics(value)]
    state["low"] = quantize(torch.full((8,), value), INT8)
    return optimizer


def objects_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    return {key: state[key] for key in ("statistics", "history", "low")}


def values_of(objects: dict[str, Any]) -> set[float]:
    statistics = [objects["statistics"], *objects["history"]]
    tensors = [objects["low"].dequantize(), *(x for s in statistics for x in (s.mean, s.low.dequantize()))]
    return {round(float(number), 2) for tensor in tensors for number in tensor}


@pytest.mark.parametrize("kind", KINDS)
def test_objects_in_the_state_are_filled(kind: str) -> None:
    optimizer, loaded = with_objects(kind, 3.0), with_objects(kind, 1.0)
    before = objects_of(loaded)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    after = objects_of(loaded)
    assert after["statistics"] is before["statistics"]
    assert all(a is b for a, b in zip(after["history"], before["history"], strict=True))
    assert isinstance(after["low"], LowBitTensor)
    assert values_of(after) == {3.0}
    assert_same(loaded.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", ["object", "moment", "group"])
def test_what_does_not_fit_changes_nothing(kind: str, wrong: str) -> None:
    saved = copy.deepcopy(with_objects(kind, 3.0).state_dict())
    optimizer = with_objects(kind, 1.0)
    objects, before = objects_of(optimizer), copy.deepcopy(optimizer.state_dict())
    state = saved["state"][0]
    if wrong == "object":
        state["statistics"]["mean"] = torch.zeros(4)
    elif wrong == "moment":
        state["momentum_buffer" if "momentum_buffer" in state else "exp_avg"] = torch.zeros(3, 3)
    else:
        saved["param_groups"][0]["lr"] = 0.5
        # torch fails at it, after all hooks
        state["odd"] = iter([1])
    with pytest.raises((StateLoadError, ValueError, TypeError)):
        optimizer.load_state_dict(saved)
    assert_same(optimizer.state_dict(), before)
    assert all(objects_of(optimizer)[key] is value for key, value in objects.items())
    assert "__setstate__" not in vars(optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_hook_sees_what_was_saved(kind: str) -> None:
    optimizer, loaded = with_objects(kind, 3.0), with_objects(kind, 1.0)

    def without_wrapping(_: torch.optim.Optimizer, content: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(content["optimizer"]["state"][0]["statistics"]["mean"], Tensor)
        return content["optimizer"]

    loaded.register_load_state_dict_pre_hook(without_wrapping)
    loaded.load_state_dict({"optimizer": optimizer.state_dict()})
    assert values_of(objects_of(loaded)) == {3.0}
    assert_same(loaded.state_dict(), optimizer.state_dict())
