"""States go to and from torch.optim.AdamW, and between this package's formats, through files and without loss."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from random_tensors import DEVICE, assert_same_bits, random_parameters
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from optim_kernels import TritonAdamW, TritonMuon, TritonMuonAdamW, clip_factor, get_total_norm
from optim_kernels._gradient_norm import GradientNorms
from optim_kernels._impl import is_interpreted
from optim_utils.low_bit import LowBitTensor
from optim_utils.testing import run_ranks

FORMATS: dict[str, dict[str, Any]] = {
    "torch": {},
    "fp32": {"state_dtype": torch.float32},
    "pair": {"state_dtype": (torch.bfloat16, torch.float32)},
    "half": {"state_dtype": (None, torch.float32)},
    "int8": {"state_dtype": "int8"},
    "master": {"state_dtype": torch.float32, "master_weights": "fp32"},
    "split16": {"state_dtype": torch.float32, "master_weights": "split16"},
}


def make(dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    return random_parameters((80, 70), (9,), dtype=dtype)


def steps(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], count: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p)
        optimizer.step()


def step_in_place(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter) -> None:
    """A step that brings the state into its formats and moves nothing."""
    optimizer.param_groups[0]["lr"] = 0.0
    p.grad = torch.zeros_like(p)
    optimizer.step()


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)  # type: ignore[no-any-return]


def test_default_state_is_torchs_both_ways() -> None:
    ours, theirs = make(torch.float32), make(torch.float32)
    first, second = TritonAdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    steps(first, ours, 3)
    steps(second, theirs, 3)
    swapped, back = TritonAdamW(theirs, lr=1.0), torch.optim.AdamW(ours, lr=1.0)
    swapped.load_state_dict(through_file(second.state_dict()))
    back.load_state_dict(through_file(first.state_dict()))
    assert swapped.param_groups[0]["lr"] == 1e-2
    steps(swapped, theirs, 3, seed=2)
    steps(back, ours, 3, seed=2)
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_any_format_loads_into_any(source: str, target: str) -> None:
    params = make()
    old = TritonAdamW(params, **FORMATS[source])
    steps(old, params, 2)
    new = TritonAdamW(params, **FORMATS[target])
    fresh = TritonAdamW(make(), **FORMATS[target])
    steps(fresh, [p for _, p in fresh._parameters()], 1)
    new.load_state_dict(through_file(old.state_dict()))
    for p, like in zip(params, (p for _, p in fresh._parameters())):
        found, expected = new.state[p], fresh.state[like]
        # a master that was not saved, or in another format, is made by the next step
        masters = {"master", "master_low"}
        assert expected.keys() - found.keys() <= masters - old.state[p].keys()
        assert found.keys() - expected.keys() <= (masters & old.state[p].keys() if masters & expected.keys() else set())
        for key in found.keys() & expected.keys():
            assert type(found[key]) is type(expected[key]), key
            assert found[key].dtype == expected[key].dtype, key
        assert int(found["step"]) == 2
        torch.testing.assert_close(number(found["exp_avg"]), number(old.state[p]["exp_avg"]), rtol=0.02, atol=0.02)
    steps(new, params, 1)
    assert all(new.state[p].keys() == fresh.state[like].keys() for p, (_, like) in zip(params, fresh._parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("make_optimizer", [TritonAdamW, TritonMuon])
@pytest.mark.parametrize(("source", "target"), [("split16", "fp32"), ("fp32", "split16")])
def test_masters_of_another_kind_may_come_before_the_parameters(
    source: str, target: str, make_optimizer: type[TritonAdamW | TritonMuon], impl: str
) -> None:
    """As they may behind them: an optimizer's state can be loaded before its model's."""
    params = [torch.nn.Parameter(p.detach().bfloat16()) for p in make() if p.ndim == 2]
    old = make_optimizer(params, lr=1e-3, master_weights=source, impl=impl)
    steps(old, params, 3)
    found = []
    for state_first in (False, True):
        others = [torch.nn.Parameter(torch.full_like(p, 7.0)) for p in params]
        new = make_optimizer(others, lr=1e-3, master_weights=target, impl=impl)
        loads = [
            lambda new=new: new.load_state_dict(through_file(old.state_dict())),
            lambda others=others: [q.data.copy_(p) for p, q in zip(params, others)],
        ]
        for load in loads if state_first else reversed(loads):
            load()
        steps(new, others, 1, seed=5)
        own = {"fp32": "master", "split16": "master_low"}[target]
        assert all(state.keys() & {"master", "master_low"} == {own} for state in new.state.values())
        found.append([*others, *(new.state[q][own] for q in others)])
    assert all(map(torch.equal, *found))
    assert all(q.abs().max() < 7 for q in found[0][: len(params)])


@pytest.mark.parametrize("source", FORMATS)
def test_own_format_is_kept_to_the_bit(source: str) -> None:
    params = make()
    old = TritonAdamW(params, **FORMATS[source])
    steps(old, params, 2)
    new = TritonAdamW(params, **FORMATS[source])
    new.load_state_dict(through_file(old.state_dict()))
    for p in params:
        for key, value in old.state[p].items():
            kept = new.state[p][key]
            if isinstance(value, LowBitTensor):
                assert torch.equal(kept.codes, value.codes)
                assert torch.equal(kept.scale, value.scale)
            else:
                assert torch.equal(kept, value), key


@pytest.mark.parametrize("source", FORMATS)
def test_torch_loads_to_torch_state_dict(source: str) -> None:
    params = make()
    ours = TritonAdamW(params, amsgrad=True, **FORMATS[source])
    steps(ours, params, 2)
    theirs = torch.optim.AdamW(params, amsgrad=True)
    theirs.load_state_dict(through_file(ours.to_torch_state_dict()))
    assert theirs.state[params[0]].keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert theirs.param_groups[0].keys() == torch.optim.AdamW(make()).param_groups[0].keys()
    steps(theirs, params, 1)


def test_it_may_take_the_place_of_torchs_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may replace the name, so that code that asks for torch's optimizer gets this one."""
    torchs_options = torch.optim.AdamW(make()).param_groups[0].keys()
    monkeypatch.setattr(torch.optim, "AdamW", TritonAdamW)
    assert TritonAdamW(make()).to_torch_state_dict()["param_groups"][0].keys() == torchs_options


def test_what_others_put_into_defaults_is_not_taken_for_an_option_of_ours() -> None:
    """A program may also replace ``defaults``; which options torch lacks does not follow from them."""
    first, *others = make()
    optimizer = TritonAdamW([first])
    optimizer.defaults["note"] = 3
    optimizer.add_param_group({"params": others})
    optimizer.defaults = {"lr": 0.1}
    saved = optimizer.to_torch_state_dict()
    torchs_options = torch.optim.AdamW(make()).param_groups[0].keys()
    assert [group.keys() - torchs_options for group in saved["param_groups"]] == [set(), {"note"}]


def test_codes_come_back_from_the_numbers_that_torch_keeps() -> None:
    """A state that went through ``torch.optim.AdamW`` goes on to the last bit, where the parameter's dtype is fp32."""
    params = make(torch.float32)
    old = TritonAdamW(params, state_dtype="int8")
    steps(old, params, 2)
    new = TritonAdamW(params, state_dtype="int8")
    new.load_state_dict(through_file(old.to_torch_state_dict()))
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(new.state[params[0]][key].codes, old.state[params[0]][key].codes)
        assert torch.equal(new.state[params[0]][key].scale, old.state[params[0]][key].scale)


def test_integer_steps_and_corrupt_states() -> None:
    params = make()
    old = TritonAdamW(params, state_dtype="int8")
    steps(old, params, 2)
    saved = old.state_dict()
    saved["state"][0]["step"] = 7
    new = TritonAdamW(params, state_dtype="int8")
    new.load_state_dict(saved)
    assert int(new.state[params[0]]["step"]) == 7


def _without_scale(state: dict[str, Any]) -> None:
    del state["exp_avg"]["scale"]


def _with_too_few_blocks(state: dict[str, Any]) -> None:
    state["exp_avg_sq"]["scale"] = state["exp_avg_sq"]["scale"][:-1]


def _with_too_few_codes(state: dict[str, Any]) -> None:
    state["exp_avg"]["codes"] = state["exp_avg"]["codes"].flatten()[:-1]


def _without_a_moment(state: dict[str, Any]) -> None:
    del state["exp_avg_sq"]


def _of_another_shape(state: dict[str, Any]) -> None:
    state["exp_avg"] = torch.zeros(3, 3)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_without_scale, "scale"),
        (_with_too_few_blocks, "scale"),
        (_with_too_few_codes, "codes"),
        (_without_a_moment, "exp_avg_sq"),
        (_of_another_shape, r"exp_avg has shape \(3, 3\)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_corrupt_state_is_refused_and_leaves_the_optimizer(damage: Any, words: str) -> None:
    params = make()
    optimizer, other = TritonAdamW(params, state_dtype="int8"), TritonAdamW(make(), state_dtype="int8", lr=0.5)
    steps(optimizer, params, 2)
    steps(other, [p for group in other.param_groups for p in group["params"]], 5)
    saved = other.state_dict()
    damage(saved["state"][max(i for i in saved["state"] if isinstance(saved["state"][i]["exp_avg"], dict))])
    before = {p: dict(state) for p, state in optimizer.state.items()}
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] != 0.5
    for p, state in before.items():
        assert state.keys() == optimizer.state[p].keys()
        assert all(state[key] is optimizer.state[p][key] for key in state)
    steps(optimizer, params, 1)
    assert int(optimizer.state[params[0]]["step"]) == 3


def test_int8_trains_as_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 64, generator=generator)
    targets = inputs @ torch.randn(64, 64, generator=generator) + torch.randn(256, 64, generator=generator)
    losses = []
    for state_dtype in (torch.float32, "int8"):
        weight = torch.nn.Parameter(torch.zeros(64, 64))
        optimizer = TritonAdamW([weight], lr=0.05, state_dtype=state_dtype, weight_decay=0.0)
        loss = torch.zeros(())
        for _ in range(300):
            loss = (inputs @ weight - targets).square().mean()
            weight.grad = torch.autograd.grad(loss, weight)[0]
            optimizer.step()
        losses.append(loss.item())
    assert abs(losses[1] - losses[0]) <= 0.01 * losses[0]


def number(moment: Tensor) -> Tensor:
    return moment.dequantize().float() if isinstance(moment, LowBitTensor) else moment.float()


@pytest.mark.parametrize("name", ["torch", "master", "split16"])
def test_the_model_may_be_loaded_after_the_optimizer(name: str) -> None:
    """A master that the checkpoint lacks is made of the parameters that the model has by the next step."""
    trained = make()
    theirs = torch.optim.AdamW(trained, lr=1e-3)
    steps(theirs, trained, 2)
    params = make()
    ours = TritonAdamW(params, lr=1e-3, **FORMATS[name])
    for p in params:
        p.data.zero_()
    ours.load_state_dict(theirs.state_dict())
    for p, loaded in zip(params, trained):
        p.data.copy_(loaded.data)
    steps(ours, params, 1)
    steps(theirs, trained, 1)
    for p, expected in zip(params, trained):
        torch.testing.assert_close(p, expected, rtol=2**-7, atol=1e-3)


def test_options_that_a_state_lacks_keep_their_values() -> None:
    (p, _) = make(torch.float32)
    ours = TritonAdamW([{"params": [p], "stochastic_rounding": True, "seed": 5}], max_norm=0.5)
    ours.load_state_dict(torch.optim.AdamW([p], lr=0.25).state_dict())
    group = ours.param_groups[0]
    assert [group[key] for key in ("lr", "max_norm", "stochastic_rounding", "seed")] == [0.25, 0.5, True, 5]


@pytest.mark.parametrize("options", [{"fused": True}, {"fused": False}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("own", [{"impl": "auto"}, {"impl": "torch"}, {"foreach": False}], ids=str)
def test_what_computed_the_steps_before_does_not_choose_the_implementation(
    options: dict[str, Any], own: dict[str, Any]
) -> None:
    """torch's ``fused=True``, which the CPU has too, asked for kernels that are not there."""
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 12, device=DEVICE)) for _ in range(2)]
    for param in params:
        param.grad = param.detach().cos()
    theirs, ours = torch.optim.AdamW(params[:1], lr=0.1, **options), TritonAdamW(params[1:], **own)
    theirs.step()
    # what is loaded is taken over, and both go on
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    params[1].data.copy_(params[0].data)
    group = ours.param_groups[0]
    assert (group["lr"], group["fused"], group["foreach"]) == (0.1, None, own.get("foreach"))
    for optimizer in (theirs, ours):
        optimizer.step()
    torch.testing.assert_close(params[1], params[0])
    # and a demand outlives the load
    asking = TritonAdamW([torch.nn.Parameter(torch.zeros(12, device=DEVICE))], fused=False)
    asking.load_state_dict(ours.state_dict())
    assert asking.param_groups[0]["fused"] is False


def test_states_that_hold_nothing() -> None:
    """Whoever looks for the state of a parameter that has none makes one: it is saved and loaded."""
    optimizers = [make_optimizer(make()) for make_optimizer in (TritonAdamW, torch.optim.AdamW)]
    for optimizer in optimizers:
        first, second = optimizer.param_groups[0]["params"]
        first.grad = torch.ones_like(first)
        optimizer.step()
        assert optimizer.state[second].get("exp_avg") is None
        fresh = TritonAdamW(make())
        fresh.load_state_dict(through_file(optimizer.state_dict()))
        assert sorted(len(state) for state in fresh.state.values()) in ([3], [0, 3])
        steps(fresh, fresh.param_groups[0]["params"], 1)
    assert len(optimizers[0].to_torch_state_dict()["state"]) == 1


def test_a_state_of_the_users_alone_is_none_of_torchs() -> None:
    """Before the first step."""
    params = [torch.nn.Parameter(torch.ones(5)) for _ in range(2)]
    optimizer = TritonAdamW(params)
    params[1].grad = torch.ones(5)
    optimizer.step()
    optimizer.state[params[0]]["note"] = "x"
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(optimizer.to_torch_state_dict())
    params[0].grad = torch.ones(5)
    theirs.step()
    assert [float(theirs.state[p]["step"]) for p in params] == [1, 2]


def test_a_state_may_have_entries_of_the_users() -> None:
    """torch saves and loads what is in a state beside the parameters'."""
    param = torch.nn.Parameter(torch.ones(5))
    param.grad = torch.ones(5)
    optimizer = TritonAdamW([param])
    optimizer.step()
    optimizer.state["calls"] = 3
    for target in (optimizer, torch.optim.AdamW([param])):
        for saved in (optimizer.state_dict(), optimizer.to_torch_state_dict()):
            target.load_state_dict(saved)
            assert target.state["calls"] == 3
    optimizer.step()
    assert float(optimizer.state[param]["step"]) == 2


def test_moments_of_dtypes_that_cannot_hold_them_are_refused() -> None:
    with pytest.raises(ValueError, match="state_dtype must be None, one of"):
        TritonAdamW(make(), state_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "options", [{"master_weights": "split16"}, {"stochastic_rounding": True}, {"master_weights": "fp32"}], ids=str
)
def test_shards_are_updated_as_tensors_are(options: dict[str, Any]) -> None:
    run_ranks(_sharded, 1, options, backend="gloo")


class _Codes(torch.Tensor):
    """Stands for a tensor of another library that holds numbers by codes."""

    def dequantize(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def _sharded(rank: int, world_size: int, options: dict[str, Any]) -> None:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.nn.Parameter(torch.ones(16, 8, dtype=torch.bfloat16))
    sharded = torch.nn.Parameter(distribute_tensor(whole.detach().clone(), mesh, [Shard(0)]))
    optimizers = [TritonAdamW([p], lr=0.01, impl="torch", **options) for p in (whole, sharded)]
    for seed in range(3):
        torch.manual_seed(seed)
        whole.grad = torch.randn(16, 8).bfloat16()
        sharded.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(sharded.full_tensor(), whole)
    with pytest.raises(ValueError, match=r"state_dtype='int8' .* is a DTensor"):
        TritonAdamW([sharded], state_dtype="int8")
    with pytest.raises(ValueError, match="is a DTensor; clip with optim_dist"):
        TritonMuonAdamW([{"kind": "adamw", "params": [sharded]}], max_norm=1.0)
    for late in (TritonAdamW([sharded]), TritonMuonAdamW([{"kind": "adamw", "params": [sharded]}])):
        late.param_groups[0]["max_norm"] = 1.0
        with pytest.raises(ValueError, match="is a DTensor; clip with optim_dist"):
            late.step()
    assert sharded.grad is not None
    expected = torch.nn.utils.get_total_norm([whole.grad.float()])
    norms = GradientNorms("triton" if is_interpreted() else "auto")
    # torch adds up over ranks: kernels see no memory of a DTensor, behind a plain gradient like it neither
    for _ in range(3):
        torch.testing.assert_close(norms.norm([whole.grad], 2.0), expected)
        norm = norms.norm([sharded.grad], 2.0)
        torch.testing.assert_close(norm.full_tensor(), expected)  # type: ignore[attr-defined]
    for p, optimizer in zip((whole, sharded), optimizers):
        optimizer.step(clip_factor=clip_factor(get_total_norm([p.grad]), 0.1))
    saved = optimizers[1].state_dict()
    part = saved["state"][0]["exp_avg"].to_local().as_subclass(_Codes)
    saved["state"][0]["exp_avg"] = DTensor.from_local(part, mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"must be plain numbers, got a _Codes; load its dequantize\(\)"):
        optimizers[1].load_state_dict(saved)
    torch.testing.assert_close(sharded.full_tensor(), whole)


NAMED: dict[str, tuple[Any, dict[str, Any]]] = {
    "pair": (TritonAdamW, {"state_dtype": (torch.bfloat16, torch.float32)}),
    "master": (TritonAdamW, {"state_dtype": torch.float32, "master_weights": "fp32"}),
    "int8": (TritonAdamW, {"state_dtype": "int8"}),
    "muon": (TritonMuon, {"ns_dtype": torch.float32, "momentum_dtype": torch.float32, "master_weights": "fp32"}),
}


def matrices(options: dict[str, Any], make_optimizer: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.ParameterList(random_parameters((80, 70), (9, 12), dtype=torch.bfloat16))
    return model, make_optimizer(model.parameters(), lr=0.01, **options)


@pytest.mark.parametrize("gather", [{"full_state_dict": True}, {"cpu_offload": True}])
@pytest.mark.parametrize("name", NAMED)
def test_torch_gathers_states_whose_options_are_dtypes(name: str, gather: dict[str, bool]) -> None:
    make_optimizer, options = NAMED[name]
    how = StateDictOptions(**gather)
    model, optimizer = matrices(options, make_optimizer)
    steps(optimizer, list(model.parameters()), 2)
    saved = through_file(copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=how)))
    restored, other = matrices(options, make_optimizer)
    restored.load_state_dict(model.state_dict())
    set_optimizer_state_dict(restored, other, saved, options=how)
    for option, value in options.items():
        assert other.param_groups[0][option] == value, option
    for one, its_model in ((optimizer, model), (other, restored)):
        steps(one, list(its_model.parameters()), 2, seed=3)
    assert_same_bits(model.parameters(), restored.parameters())


@pytest.mark.parametrize(("is_flat", "master_weights"), [(False, None), (True, None), (False, "fp32")])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_of_torchs_optimizer_are_loaded_in_part(is_flat: bool, master_weights: Any, tmp_path: Path) -> None:
    """As the README says; a master that no file has is made from the parameter, not kept."""
    how = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    model, restored = (torch.nn.Linear(6, 4, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    theirs = torch.optim.AdamW(model.parameters(), lr=0.1)
    steps(theirs, list(model.parameters()), 2)
    saved = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, theirs, options=how)}
    dcp.save(saved, checkpoint_id=tmp_path)
    ours = TritonAdamW(restored.parameters(), master_weights=master_weights)
    found = {"model": restored.state_dict(), "optim": get_optimizer_state_dict(restored, ours, options=how)}
    with pytest.raises(BaseException, match="Missing key"):
        dcp.load(found, checkpoint_id=tmp_path)
    if master_weights:
        for state in found["optim"]["state"].values():
            del state["master"]
    dcp.load(found, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    restored.load_state_dict(found["model"])
    set_optimizer_state_dict(restored, ours, found["optim"], options=how)
    assert {group["lr"] for group in ours.param_groups} == {0.1}
    step_in_place(ours, restored.weight)
    assert_same_bits(restored.parameters(), model.parameters())


def test_the_dtype_of_products_is_loaded_from_its_name_and_from_itself() -> None:
    for build in (TritonMuon, TritonMuonAdamW):
        dtypes = (torch.bfloat16, torch.float32)
        first, second = (build([{"kind": "muon", "params": make()[:1], "ns_dtype": dtype}]) for dtype in dtypes)
        saved = first.state_dict()
        assert saved["param_groups"][0]["ns_dtype"] == "torch.bfloat16"
        second.load_state_dict(saved)
        assert second.param_groups[0]["ns_dtype"] is torch.bfloat16
        # as it was saved before
        saved["param_groups"][0]["ns_dtype"] = torch.float16
        second.load_state_dict(saved)
        assert second.param_groups[0]["ns_dtype"] is torch.float16
        assert first.param_groups[0]["ns_dtype"] is torch.bfloat16
        saved["param_groups"][0]["ns_dtype"] = "torch.bfloat17"
        with pytest.raises(ValueError, match="bfloat17', which torch"):
            second.load_state_dict(saved)


def test_masters_of_shards_are_converted() -> None:
    run_ranks(_converted, 2, backend="gloo")


def _converted(rank: int, world_size: int) -> None:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    value, gradient = torch.randn(16, 8).bfloat16(), torch.randn(16, 8).bfloat16()

    def sharded(whole: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(whole.chunk(world_size)[rank].clone(), mesh, [Shard(0)])

    for before, after in (("split16", "fp32"), ("fp32", "split16")):
        found = []
        for make in (sharded, torch.clone):
            p = torch.nn.Parameter(make(value))
            saved, loaded = (TritonAdamW([p], lr=0.01, impl="torch", master_weights=how) for how in (before, after))
            for optimizer in (saved, loaded):
                p.grad = make(gradient)
                optimizer.step()
                loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
            step_in_place(loaded, p)
            key = {"fp32": "master", "split16": "master_low"}[after]
            found += [[p.detach(), loaded.state[p][key]]]
        for cut, whole in zip(*found):
            assert torch.equal(cut.to_local(), whole.chunk(world_size)[rank]), (before, after)


@pytest.mark.parametrize("sign", [1, -1])
def test_masters_halfway_between_two_parameters_become_split16(sign: int) -> None:
    halves = sign * torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 2.0**-126 * (1 + 2**-8)])
    param = torch.nn.Parameter(halves.bfloat16().to(DEVICE))
    assert param[:2].detach().abs().tolist() == [1.0, 1 + 2**-6]
    state = {"step": 1.0, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3), "master": halves}
    loaded = TritonAdamW([param], master_weights="split16")
    loaded.load_state_dict({"state": {0: state}, "param_groups": loaded.state_dict()["param_groups"]})
    step_in_place(loaded, param)
    assert loaded.state[param]["master_low"].dtype == torch.int16
    again = TritonAdamW([param], master_weights="fp32")
    again.load_state_dict(copy.deepcopy(loaded.state_dict()))
    step_in_place(again, param)
    torch.testing.assert_close(again.state[param]["master"].cpu(), halves, rtol=2**-23, atol=0.0)
