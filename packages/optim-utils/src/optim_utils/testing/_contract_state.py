"""The contract's checks about state: saving, loading, copying, checkpoints, and the frameworks that wrap optimizers."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import tempfile
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from optim_utils.testing._contract_case import OptimizerCase, TinyModel, assert_same, snapshot, train, with_tensors
from optim_utils.testing.ranks import run_ranks

__all__ = ["STATE_CHECKS"]


def state_dict_saved_and_loaded(case: OptimizerCase) -> None:
    """A state_dict goes through torch.save and ``weights_only=True``, and training continues bit for bit."""
    model, optimizer = case.trained(range(2))
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] / 2
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    _assert_continues_from(case, model, optimizer, torch.load(saved, weights_only=True))


def state_dict_deep_copied(case: OptimizerCase) -> None:
    """A deep copy of a state_dict restores what was copied, whatever the optimizer did since."""
    model, optimizer = case.trained(range(2))
    model_state, optimizer_state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2, 4))
    restored, restored_optimizer = case.pair()
    restored.load_state_dict(model_state)
    restored_optimizer.load_state_dict(optimizer_state)
    train(restored, restored_optimizer, range(2, 4))
    assert_same(snapshot(restored, restored_optimizer), snapshot(model, optimizer), "training from the copy")


def state_dtype(case: OptimizerCase) -> None:
    """With bf16 parameters, loading keeps every state tensor's dtype and bits, and training continues bit for bit."""
    model, optimizer = case.trained(range(2), torch.bfloat16)
    _assert_continues_from(case, model, optimizer, copy.deepcopy(optimizer.state_dict()), torch.bfloat16)


def _assert_continues_from(
    case: OptimizerCase,
    model: TinyModel,
    optimizer: Optimizer,
    state_dict: dict[str, Any],
    dtype: torch.dtype = torch.float32,
) -> None:
    """A new optimizer that loads ``state_dict`` holds the same state, and both go on alike."""
    restored, restored_optimizer = case.pair(dtype)
    restored.load_state_dict(model.state_dict())
    given = copy.deepcopy(state_dict)
    restored_optimizer.load_state_dict(state_dict)
    assert_same(state_dict, given, "the dict that was loaded")
    _assert_continue_alike(model, optimizer, restored, restored_optimizer)


def _assert_continue_alike(
    model: nn.Module, optimizer: Optimizer, other: nn.Module, other_optimizer: Optimizer
) -> None:
    assert_same(snapshot(other, other_optimizer), snapshot(model, optimizer), "what was restored")
    for group, expected in zip(other_optimizer.param_groups, optimizer.param_groups, strict=True):
        assert_same(group["lr"], expected["lr"], "the restored lr")
    train(model, optimizer, range(2, 4))
    train(other, other_optimizer, range(2, 4))
    assert_same(snapshot(other, other_optimizer), snapshot(model, optimizer), "training after restoring")


def foreign_state_dict(case: OptimizerCase) -> None:
    """A state_dict of other groups is refused with a ValueError and changes nothing."""
    model, optimizer = case.trained([0])
    before = snapshot(model, optimizer)
    smaller = case.model()
    foreign = case.build(list(smaller.parameters())[1:])
    for what, state_dict in (
        ("fewer parameters", foreign.state_dict()),
        ("fewer groups", {"state": {}, "param_groups": []}),
    ):
        try:
            optimizer.load_state_dict(state_dict)
        except ValueError:
            assert_same(snapshot(model, optimizer), before, f"training, after refusing a state_dict of {what},")
        else:
            raise AssertionError(f"a state_dict of {what} was loaded")


def copies_and_pickles(case: OptimizerCase) -> None:
    """Model and optimizer, deep-copied or pickled together, train on alike and independently."""
    for how, duplicate in (("deepcopy", copy.deepcopy), ("pickle", lambda both: pickle.loads(pickle.dumps(both)))):
        model, optimizer = case.trained(range(2))
        other, other_optimizer = duplicate((model, optimizer))
        assert type(other_optimizer) is type(optimizer), f"{how} gave a {type(other_optimizer).__name__}"
        _assert_continue_alike(model, optimizer, other, other_optimizer)
    # without the model: the pickle holds copies of the parameters
    alone = pickle.loads(pickle.dumps(optimizer))
    assert_same(alone.state_dict(), optimizer.state_dict(), "the state_dict of a pickled optimizer")


def state_dict_hooks(case: OptimizerCase) -> None:
    """Pre and post hooks of state_dict and load_state_dict run, and what they replace is used."""
    model, optimizer = case.trained([0])
    calls: list[str] = []

    def after_saving(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append("saved")
        return {**state_dict, "extra": 1}

    def before_loading(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append("load")
        groups = [{**group, "lr": 0.25} for group in state_dict["param_groups"]]
        return {"state": state_dict["state"], "param_groups": groups}

    optimizer.register_state_dict_pre_hook(lambda _: calls.append("save"))
    optimizer.register_state_dict_post_hook(after_saving)
    optimizer.register_load_state_dict_pre_hook(before_loading)
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    state_dict = optimizer.state_dict()
    assert state_dict.get("extra") == 1, "the dict that a post hook of state_dict returned was not used"
    before = snapshot(model, optimizer)
    optimizer.load_state_dict(state_dict)
    assert calls == ["save", "saved", "load", "loaded"], f"the hooks ran as {calls}"
    found = [float(group["lr"]) for group in optimizer.param_groups]
    assert set(found) == {0.25}, f"a pre hook of load_state_dict set lr to 0.25, but the groups have {found}"
    assert_same(snapshot(model, optimizer), before, "state loaded through hooks")


def distributed_state_dict(case: OptimizerCase) -> None:
    """``get/set_optimizer_state_dict`` restores a fresh optimizer, nested and flat, also through a saved checkpoint."""
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model, optimizer = case.trained(range(2))
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        restored, restored_optimizer = case.pair()
        initial = [param.detach().clone() for param in restored.parameters()]
        target = get_optimizer_state_dict(restored, restored_optimizer, options=options)
        found = [param.detach() for param in restored.parameters()]
        assert_same(found, initial, "parameters, after get_optimizer_state_dict made the state of a fresh optimizer,")
        _save_and_load(saved, target)
        restored.load_state_dict(model.state_dict())
        set_optimizer_state_dict(restored, restored_optimizer, target, options=options)
        _assert_continue_alike(model, optimizer, restored, restored_optimizer)


def _save_and_load(saved: dict[str, Any], target: dict[str, Any]) -> None:
    """Save ``saved`` and load it into ``target``; every rank for itself, because all ranks have the same state."""
    with tempfile.TemporaryDirectory(prefix="contract-") as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save({"optimizer": saved}, checkpoint_id=folder, no_dist=True)
        dcp.load({"optimizer": target}, checkpoint_id=folder, no_dist=True)


def fsdp2(case: OptimizerCase) -> None:
    """On one rank, DTensor parameters of ``fully_shard`` train as plain ones do, and restore from a checkpoint."""
    if dist.is_initialized():
        _fsdp2(0, 1, case)
    else:
        run_ranks(_fsdp2, 1, case, backend="gloo" if case.device == "cpu" else "nccl")


def _fsdp2(rank: int, world_size: int, case: OptimizerCase) -> None:
    # here, because every rank of every test would pay for these imports otherwise
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, init_device_mesh

    mesh = init_device_mesh(torch.device(case.device).type, (dist.get_world_size(),))
    plain, _ = case.trained(range(2))
    # fully_shard changes the module's class in place; its annotation names only what is added
    model = cast(nn.Module, fully_shard(case.model(), mesh=mesh))
    optimizer = case.build(model.parameters())
    train(model, optimizer, range(2))
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), f"{name} is no DTensor any more"
        assert_same(param.full_tensor().detach(), plain.get_parameter(name).detach(), f"the DTensor {name}")
    restored = cast(nn.Module, fully_shard(case.model(), mesh=mesh))
    restored_optimizer = case.build(restored.parameters())
    # a copy, because torch's load_state_dict keeps the tensors it is given
    state_dict = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    get_optimizer_state_dict(restored, restored_optimizer)
    set_optimizer_state_dict(restored, restored_optimizer, state_dict)
    restored.load_state_dict(model.state_dict())
    _assert_continue_alike(model, optimizer, restored, restored_optimizer)


def accelerate_prepare(case: OptimizerCase) -> None:
    """Moving and loading state, as Accelerate's ``prepare`` does, changes nothing, fresh or trained, fp32 or bf16."""
    for dtype in (torch.float32, torch.bfloat16):
        for steps in (0, 2):
            model, optimizer = case.trained(range(steps), dtype)
            before = snapshot(model, optimizer)
            optimizer.load_state_dict(with_tensors(optimizer.state_dict(), lambda tensor: tensor.to(case.device)))
            assert_same(snapshot(model, optimizer), before, f"state of {dtype} parameters, moved and loaded,")
            untouched, untouched_optimizer = case.trained(range(steps + 1), dtype)
            train(model, optimizer, [steps])
            assert_same(snapshot(model, optimizer), snapshot(untouched, untouched_optimizer), "training after prepare")


class _Wrapper:
    """Lightning's trick: an object that takes over the optimizer's attributes and pretends to be of its class."""

    def __init__(self, optimizer: Optimizer) -> None:
        own = ("state_dict", "step", "zero_grad")
        self.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key not in own})
        self.__class__ = type("Lightning" + type(optimizer).__name__, (type(self), type(optimizer)), {})
        self._optimizer = optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self._optimizer.step(closure)


def lightning_subclass(case: OptimizerCase) -> None:
    """A dynamic subclass that shares the optimizer's ``__dict__`` steps, saves and loads as the optimizer itself."""
    model, optimizer = case.pair()
    wrapper: Any = _Wrapper(optimizer)
    assert isinstance(wrapper, type(optimizer)), "the wrapper is no instance of the optimizer's class"
    assert wrapper.param_groups is optimizer.param_groups, "the wrapper has groups of its own"
    scheduler = torch.optim.lr_scheduler.StepLR(wrapper, 10)
    train(model, wrapper, range(2))
    scheduler.step()
    assert wrapper.state is optimizer.state, "the wrapper has state of its own"
    plain, plain_optimizer = case.trained(range(2))
    assert_same(snapshot(model, wrapper), snapshot(plain, plain_optimizer), "training through the wrapper")
    assert_same(wrapper.state_dict()["state"], optimizer.state_dict()["state"], "the wrapper's state_dict")
    repr(wrapper)


def construction_by_name(case: OptimizerCase) -> None:
    """The class is found by its name, as torchtitan looks it up, and takes its options as keyword arguments."""
    model, optimizer = case.pair()
    cls = type(optimizer)
    found = getattr(importlib.import_module(cls.__module__), cls.__name__, None)
    assert found is cls, f"{cls.__module__}.{cls.__name__} is {found!r}"
    if case.make is cls:
        by_name = found(list(model.parameters()), **case.options)
        assert type(by_name) is cls, f"constructing {cls.__name__} gave a {type(by_name).__name__}"
        assert_same(by_name.state_dict(), optimizer.state_dict(), "an optimizer constructed by name")


STATE_CHECKS: dict[str, Callable[[OptimizerCase], None]] = {
    check.__name__: check
    for check in (
        state_dict_saved_and_loaded,
        state_dict_deep_copied,
        state_dtype,
        foreign_state_dict,
        copies_and_pickles,
        state_dict_hooks,
        distributed_state_dict,
        fsdp2,
        accelerate_prepare,
        lightning_subclass,
        construction_by_name,
    )
}
