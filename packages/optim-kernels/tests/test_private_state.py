"""The optimizers ask where the tensors of their states are once somebody may have changed them, not before."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fresh_params import step_twins
from random_tensors import DEVICE
from torch import Tensor

from optim_kernels import TritonAdamW, TritonMuon, TritonMuonAdamW
from optim_kernels._optimizers.private_state import KnownStates
from optim_kernels.functional._adamw_tensor import with_memory
from optim_utils.low_bit import INT8, quantize
from optim_utils.testing import run_ranks

pytest.importorskip("triton")

State = dict[Any, dict[str, Tensor]]


def adamw(params: list[torch.nn.Parameter], impl: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1) if impl == "torch" else TritonAdamW(params, lr=0.1, impl=impl)


def muon(params: list[torch.nn.Parameter], impl: Any) -> torch.optim.Optimizer:
    return TritonMuon(params[:1], lr=0.1, ns_dtype=torch.float32, ns_steps=2, impl=impl)


def muon_adamw(params: list[torch.nn.Parameter], impl: Any) -> torch.optim.Optimizer:
    matrices = {"kind": "muon", "params": params[:1], "ns_dtype": torch.float32, "ns_steps": 2}
    return TritonMuonAdamW([matrices, {"kind": "adamw", "params": params[1:], "lr": 0.1}], impl=impl)


Make = Callable[[list[torch.nn.Parameter], Any], torch.optim.Optimizer]
KINDS = pytest.mark.parametrize("kind", [adamw, muon, muon_adamw])


def make(kind: Make, impl: Any = "triton") -> Any:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in ((6, 5), (7,))]
    for p in params:
        p.grad = torch.randn_like(p)
    return kind(params, impl)


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[KnownStates]:
    """Grows with every look at the states."""
    seen: list[KnownStates] = []
    look = KnownStates.are_unchanged

    def count(self: KnownStates) -> bool:
        seen.append(self)
        return look(self)

    monkeypatch.setattr(KnownStates, "are_unchanged", count)
    return seen


@KINDS
def test_training_and_checkpoints_leave_the_state_alone(kind: Make, looks: list[KnownStates]) -> None:
    optimizer = make(kind)
    for _ in range(3):
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.step()
    other = make(kind)
    other.load_state_dict(torch.load(file, weights_only=True))
    other.explain()
    for _ in range(3):
        other.step()
    assert looks == []
    for p in params_of(other):
        assert "exp_avg" not in other.state[p] or other.state[p]["step"] == 6
    other.step()
    looks.clear()
    other.step()
    # the parts of Muon and of AdamW have states of their own
    assert len(set(looks)) == len(looks) == (2 if kind is muon_adamw else 1)


def by_reading(optimizer: Any) -> tuple[Any, State]:
    return optimizer, optimizer.state


def by_an_earlier_look(optimizer: Any) -> tuple[Any, State]:
    state = optimizer.state
    optimizer.step()
    optimizer.state_dict()
    return optimizer, state


def by_assignment(optimizer: Any) -> tuple[Any, State]:
    state = copy.copy(vars(optimizer)["state"])
    optimizer.state = state
    return optimizer, state


def by_setting_it(optimizer: Any) -> tuple[Any, State]:
    """As torch's own ``load_state_dict`` ends."""
    state = copy.copy(vars(optimizer)["state"])
    optimizer.__setstate__({"state": state, "param_groups": optimizer.param_groups})
    return optimizer, state


def by_a_shallow_copy(optimizer: Any) -> tuple[Any, State]:
    return optimizer, copy.copy(optimizer).state


def by_its_original(optimizer: Any) -> tuple[Any, State]:
    return copy.copy(optimizer), optimizer.state


def by_a_deep_copy(optimizer: Any) -> tuple[Any, State]:
    other = copy.deepcopy(optimizer)
    for p, q in zip(params_of(other), params_of(optimizer)):
        p.grad = q.grad
    return other, other.state


def by_pickle(optimizer: Any) -> tuple[Any, State]:
    other = pickle.loads(pickle.dumps(optimizer))
    for p, q in zip(params_of(other), params_of(optimizer)):
        p.grad = q.grad
    return other, other.state


def by_a_hook(register: str) -> Callable[[Any], tuple[Any, State]]:
    def leak(optimizer: Any) -> tuple[Any, State]:
        held: list[State] = []
        handle = getattr(optimizer, register)(lambda *_: held.append(optimizer.state))
        if register.startswith("register_load"):
            optimizer.load_state_dict(optimizer.state_dict())
        elif register.startswith("register_state"):
            optimizer.state_dict()
        else:
            optimizer.step()
        handle.remove()
        return optimizer, held[-1]

    leak.__name__ = register
    return leak


def by_a_failed_load(optimizer: Any) -> tuple[Any, State]:
    state = optimizer.state
    with pytest.raises(ValueError, match="param"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    return optimizer, state


def by_a_wrapper_with_its_attributes(optimizer: Any) -> tuple[Any, State]:
    """As ``lightning.fabric`` wraps optimizers."""
    wrapper: Any = object.__new__(type("Wrapper", (type(optimizer),), {}))
    wrapper.__dict__ = dict(vars(optimizer))
    return optimizer, wrapper.state


def by_a_wrapper_of_its_class(optimizer: Any) -> tuple[Any, State]:
    """As ``lightning.pytorch`` wraps optimizers."""
    ask = {"__getattr__": lambda _, name: getattr(optimizer, name)}
    wrapper: Any = object.__new__(type("Wrapper", (type(optimizer),), ask))
    return optimizer, wrapper.state


WAYS = [
    by_reading,
    by_an_earlier_look,
    by_assignment,
    by_setting_it,
    by_a_shallow_copy,
    by_its_original,
    by_a_deep_copy,
    by_pickle,
    by_a_hook("register_step_pre_hook"),
    by_a_hook("register_step_post_hook"),
    by_a_hook("register_state_dict_pre_hook"),
    by_a_hook("register_state_dict_post_hook"),
    by_a_hook("register_load_state_dict_post_hook"),
    by_a_failed_load,
    by_a_wrapper_with_its_attributes,
    by_a_wrapper_of_its_class,
]


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_whoever_has_the_state_may_change_it(way: Callable[[Any], tuple[Any, State]], kind: Make) -> None:
    runs = []
    for impl in ("torch", "triton"):
        first = make(kind, impl)
        first.step()
        first.step()
        optimizer, state = way(first)
        optimizer.step()
        for values in state.values():
            for key in ("exp_avg_sq", "momentum_buffer"):
                if key in values:
                    values[key].data = torch.ones_like(values[key])
        optimizer.step()
        runs.append(params_of(optimizer))
    for expected, found in zip(*runs, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("state_dtype", [None, "int8"])
def test_a_state_dict_shares_the_memory_and_no_tensor(state_dtype: Any) -> None:
    params = [torch.nn.Parameter(torch.randn(64, 64, device=DEVICE))]
    params[0].grad = torch.randn_like(params[0])
    optimizer, other = (TritonAdamW(params, impl="triton", state_dtype=state_dtype) for _ in range(2))
    optimizer.step()
    saved = optimizer.state_dict()
    other.load_state_dict(saved)
    found = saved["state"][0]["exp_avg"]
    ours, theirs = (each.state[params[0]]["exp_avg"] for each in (optimizer, other))
    if state_dtype == "int8":
        found, ours, theirs = found["codes"], ours.codes, theirs.codes
    assert found.data_ptr() == ours.data_ptr() == theirs.data_ptr()
    assert len({id(each) for each in (found, ours, theirs)}) == 3


@KINDS
def test_a_parameter_gives_its_memory_back(kind: Make) -> None:
    """As ``model.to(device)`` exchanges it, and with torch's optimizers."""
    optimizer = make(kind)
    for param in params_of(optimizer):
        param.grad = torch.ones_like(param)
    for _ in range(3):
        optimizer.step()
    memory = [weakref.ref(param.untyped_storage()) for param in params_of(optimizer)]
    for param in params_of(optimizer):
        param.data = param.data.clone()
    assert not [reference for reference in memory if reference() is not None]


def test_what_is_here_of_a_parameter_gives_its_memory_back() -> None:
    """As ``model.to(device)`` exchanges DTensors."""
    run_ranks(_shards_move, 1, backend="gloo")


def _shards_move(rank: int, world_size: int) -> None:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh(DEVICE, (world_size,))
    whole, spread = torch.nn.Linear(5, 6, device=DEVICE), torch.nn.Linear(5, 6, device="meta")
    for name, param in whole.named_parameters():
        shards = DTensor.from_local(param.detach().clone(), mesh, [Shard(0)])
        setattr(spread, name, torch.nn.Parameter(shards))
    optimizers = [TritonAdamW(model.parameters(), lr=0.1, impl="triton") for model in (whole, spread)]
    for _ in range(3):
        for p, shards in zip(whole.parameters(), spread.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            shards.grad = DTensor.from_local(p.grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
        memory = [weakref.ref(p.to_local().untyped_storage()) for p in spread.parameters()]
        spread._apply(torch.clone)
        assert not [reference for reference in memory if reference() is not None]
    for p, shards in zip(whole.parameters(), spread.parameters(), strict=True):
        assert torch.equal(shards.to_local(), p)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("with_addresses", [True, False])
@pytest.mark.parametrize("are_tensors", [True, False])
def test_states_are_known_by_their_keys_and_kinds_and_perhaps_addresses(
    are_tensors: bool, with_addresses: bool
) -> None:
    moment = torch.eye(4, device=DEVICE)
    state: dict[str, Any] = {"moment": moment} | ({} if are_tensors else {"note": 1})
    known = KnownStates([state], with_addresses=with_addresses)
    assert known.are_unchanged()
    without_values = moment.to_sparse(), moment.to_sparse_csr(), moment.to(torch.device("meta")), None
    for other in (moment.view(torch.int32), moment[:3], quantize(moment, INT8), *without_values):
        state["moment"] = other
        assert not known.are_unchanged(), other
    state["moment"] = moment.clone()
    assert known.are_unchanged() == (not with_addresses)
    state["moment"] = moment
    if not are_tensors:
        state["note"] = 2
        assert known.are_unchanged(), "no step reads it"
    key, value = state.popitem()
    state["other"] = value
    assert not known.are_unchanged()
    del state["other"]
    state[key] = value
    assert known.are_unchanged()
    state.clear()
    assert not known.are_unchanged()


@KINDS
def test_values_that_have_changed_their_keys(kind: Make) -> None:
    """In the same order as before, so that keys alone tell."""
    runs = []
    for impl in ("torch", "triton"):
        optimizer = make(kind, impl)
        for _ in range(3):
            optimizer.step()
        for p in params_of(optimizer):
            p.grad = torch.randn_like(p)
            state = optimizer.state[p]
            if "momentum_buffer" in state:
                # one that is missing begins anew
                state["former"] = state.pop("momentum_buffer")
            elif state:
                step, first, second = (state.pop(key) for key in ("step", "exp_avg", "exp_avg_sq"))
                state.update(step=step, exp_avg_sq=first.abs_(), exp_avg=second)
        optimizer.step()
        runs.append(params_of(optimizer))
    for expected, found in zip(*runs, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


ADAMW_OPTIONS: list[dict[str, Any]] = [{"state_dtype": "int8"}, {"amsgrad": True}]
MUON_OPTIONS: list[dict[str, Any]] = [{"beta2": 0.9}, {"stochastic_rounding": True}]
MASTERS: list[dict[str, Any]] = [{"master_weights": "fp32"}, {"master_weights": "split16"}]


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        *((TritonAdamW, options) for options in ADAMW_OPTIONS + MASTERS),
        *((TritonMuon, options) for options in MUON_OPTIONS + MASTERS),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_states_of_all_formats_give_their_memory_back(make: Any, options: dict[str, Any], impl: Any) -> None:
    """Codes and scales, too; and the next step works on what has taken their place."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if {"master_weights", "stochastic_rounding"} & options.keys() else torch.float32
    params = [torch.nn.Parameter(torch.randn(64, 64, device=DEVICE).to(dtype)) for _ in range(2)]
    twins = copy.deepcopy(params)
    of_muon: dict[str, Any] = {"ns_dtype": torch.float32, "ns_steps": 2} if make is TritonMuon else {}
    optimizers = [make(each, impl=impl, **of_muon, **options) for each in (params, twins)]
    for _ in range(3):
        step_twins(optimizers, params, twins)
        states = [optimizers[0].state[p] for p in params]
        held = [part for state in states for value in state.values() for part in with_memory(value)]
        memory = [weakref.ref(part.untyped_storage()) for part in held]
        del held
        for state in states:
            for key in state:
                state[key] = state[key].clone()
        assert not [reference for reference in memory if reference() is not None]


@KINDS
def test_a_state_gives_its_memory_back(kind: Make) -> None:
    """At once, however it is replaced."""
    optimizer = make(kind)
    params = params_of(optimizer)

    def left(move: Callable[[dict[str, Tensor], str], None]) -> list[Any]:
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        states = [optimizer.state[param] for param in params]
        memory = [weakref.ref(tensor.untyped_storage()) for state in states for tensor in state.values()]
        for state in states:
            for key in state:
                move(state, key)
        return [reference for reference in memory if reference() is not None]

    def give_other_memory(state: dict[str, Tensor], key: str) -> None:
        state[key].data = state[key].data.clone()

    def replace(state: dict[str, Tensor], key: str) -> None:
        state[key] = state[key].clone()

    assert not left(give_other_memory)
    assert not left(replace)


@KINDS
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("is_read", [False, True])
def test_a_state_that_was_dropped_is_gone_before_another_is_made(
    kind: Make, impl: Any, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with torch's optimizers: to start anew takes no more memory than to go on."""
    optimizer = make(kind, impl)
    for _ in range(3):
        optimizer.step()
        if is_read:
            assert optimizer.state
    params = params_of(optimizer)
    memory = [weakref.ref(tensor.untyped_storage()) for p in params for tensor in optimizer.state.get(p, {}).values()]
    left: list[int] = []
    zeros_like = torch.zeros_like

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        left.append(sum(reference() is not None for reference in memory))
        return zeros_like(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros_like", counted)
    optimizer.state.clear()
    optimizer.step()
    assert left
    assert not any(left)
