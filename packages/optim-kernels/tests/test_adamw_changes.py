"""What users of TritonAdamW change between steps counts: parameters, groups, states, options, layouts."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from fresh_params import make_params, renew_gradients, step_twins
from random_tensors import DEVICE
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from optim_kernels import TritonAdamW
from optim_utils.low_bit import LowBitTensor
from optim_utils.testing import run_ranks


def test_gradients_that_come_and_go() -> None:
    """A parameter whose gradient is gone is left alone, and keeps its own count."""
    params = make_params()
    optimizer = TritonAdamW(params, impl="triton")
    optimizer.step()
    for absent in (0, 2, None):
        renew_gradients(params)
        if absent is not None:
            params[absent].grad = None
        before = [p.detach().clone() for p in params]
        optimizer.step()
        assert [torch.equal(p, old) for p, old in zip(params, before)] == [i == absent for i in range(3)]
    assert [int(optimizer.state[p]["step"]) for p in params] == [3, 4, 3]


def test_moved_parameters_and_replaced_groups_are_followed() -> None:
    params = make_params()
    optimizer = TritonAdamW(params, lr=0.1, impl="triton")
    optimizer.step()
    moved = params[0].detach().clone()
    params[0].data = moved
    optimizer.step()
    assert not torch.equal(moved, torch.zeros_like(moved))
    assert params[0].data_ptr() == moved.data_ptr()
    assert int(optimizer.state[params[0]]["step"]) == 2
    stranger = torch.nn.Parameter(torch.ones(7, device=DEVICE))
    stranger.grad = torch.ones_like(stranger)
    optimizer.param_groups[0]["params"][1] = stranger
    optimizer.step()
    assert float(stranger.detach().max()) < 1
    assert int(optimizer.state[stranger]["step"]) == 1


@pytest.mark.parametrize(
    "option",
    [
        {"max_norm": "1.0"},
        {"state_dtype": []},
        {"state_dtype": np.ones(2)},
        {"master_weights": np.ones(2)},
        {"seed": 0.5},
        {"impl": "cuda"},
        {"impl": np.ones(2)},
    ],
    ids=str,
)
def test_a_group_that_is_refused_is_not_kept(option: dict[str, Any]) -> None:
    first, second = make_params([(5,), (5,)])
    optimizer = TritonAdamW([first], impl="triton")
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(option))} must be"):
        optimizer.add_param_group({"params": [second], **option})
    optimizer.add_param_group({"params": [second]})
    assert [group["params"] for group in optimizer.param_groups] == [[first], [second]]
    optimizer.step()


def test_parameters_of_lazy_modules_are_looked_at_once_they_are_there() -> None:
    model = torch.nn.LazyLinear(3, device=DEVICE)
    optimizer = TritonAdamW(model.parameters(), impl="triton", state_dtype=torch.float32)
    optimizer.step()
    assert "not yet there" in optimizer.explain()
    model(torch.ones(2, 5, device=DEVICE)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert optimizer.explain().count("triton") == 2
    assert not any(map(torch.equal, model.parameters(), before))
    model = torch.nn.LazyLinear(3, device=DEVICE, dtype=torch.float64)
    optimizer = TritonAdamW(model.parameters(), impl="triton")
    model(torch.ones(2, 5, device=DEVICE, dtype=torch.float64)).sum().backward()
    with pytest.raises(RuntimeError, match=r"its dtype is torch\.float64; give it to a group with impl='auto'"):
        optimizer.step()


def test_parameters_that_change_groups_take_their_hyperparameters() -> None:
    first, second = make_params([(5,), (5,)])
    optimizer = TritonAdamW([{"params": [first, second]}, {"params": [], "lr": 0.0}], impl="triton")
    optimizer.step()
    optimizer.param_groups[0]["params"], optimizer.param_groups[1]["params"] = [first], [second]
    before = first.detach().clone(), second.detach().clone()
    optimizer.step()
    assert not torch.equal(first, before[0])
    assert torch.equal(second, before[1])
    optimizer.param_groups = [{**group, "lr": 0.0} for group in optimizer.param_groups]
    before = first.detach().clone(), second.detach().clone()
    optimizer.step()
    assert torch.equal(first, before[0])


def dequantized(value: Tensor) -> Tensor:
    return value.dequantize() if isinstance(value, LowBitTensor) else value


def exchanged_parameter(optimizer: torch.optim.Optimizer) -> None:
    group = optimizer.param_groups[0]
    new = torch.nn.Parameter(torch.full_like(group["params"][0], 3.0))
    new.grad = group["params"][0].grad
    group["params"][0] = new


def exchanged_groups(optimizer: torch.optim.Optimizer) -> None:
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]


def another_group(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.5}


def no_state(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def another_count(optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    state["step"] = torch.zeros_like(state["step"])


def another_moment(optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    state["exp_avg_sq"] = torch.ones_like(state["exp_avg_sq"])


def another_state(optimizer: torch.optim.Optimizer) -> None:
    """What was there may be the user's own copy now."""
    for p, state in list(optimizer.state.items()):
        optimizer.state[p] = {key: value.clone() for key, value in state.items()}
        for value in state.values():
            value.fill_(7.0)


def denser(optimizer: torch.optim.Optimizer) -> None:
    """As Gaussian splatting does: a parameter makes place for a larger one that takes over its state."""
    group = optimizer.param_groups[0]
    old = group["params"][0]
    new = torch.nn.Parameter(torch.cat([old.detach(), old.detach()]))
    new.grad = torch.cat([old.grad, old.grad])
    state = optimizer.state.pop(old)
    for key in ("exp_avg", "exp_avg_sq"):
        state[key] = torch.cat([state[key], torch.zeros_like(state[key])])
    optimizer.state[new] = state
    group["params"][0] = new


def moved_states(optimizer: torch.optim.Optimizer) -> None:
    """As states are taken to another device and back: the tensors stay, their memory does not."""
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data.clone()


def refilled_states(optimizer: torch.optim.Optimizer) -> None:
    """As where storages are freed while nobody needs them."""
    for state in optimizer.state.values():
        for value in state.values():
            saved, storage = value.clone(), value.untyped_storage()
            size = storage.size()
            storage.resize_(0)
            storage.resize_(size)
            value.copy_(saved)


def another_layout(optimizer: torch.optim.Optimizer) -> None:
    """As ``model.to(memory_format=torch.channels_last)`` does; the states stay as they were."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data = p.data.t().contiguous().t()


def notes(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["times"], state["note"] = 3, "the user's own"


EDITS = [
    exchanged_parameter,
    exchanged_groups,
    another_group,
    no_state,
    another_count,
    another_moment,
    another_state,
    denser,
    moved_states,
    refilled_states,
    another_layout,
    notes,
]


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("edit", EDITS)
def test_what_the_user_changes_between_steps_counts(edit: Any, impl: Any) -> None:
    runs = []
    for make in (torch.optim.AdamW, TritonAdamW):
        torch.manual_seed(0)
        params = make_params(((6, 5), (4, 3)))
        groups = [{"params": [params[0]], "lr": 0.1}, {"params": [params[1]], "lr": 0.01}]
        optimizer: Any = make(groups) if make is torch.optim.AdamW else TritonAdamW(groups, impl=impl)
        optimizer.step()
        optimizer.step()
        edit(optimizer)
        optimizer.step()
        optimizer.step()
        runs.append([p for group in optimizer.param_groups for p in group["params"]] + params)
    for expected, found in zip(*runs, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [False, True], ids=["moved", "exchanged"])
def test_states_in_codes_may_change_their_memory(exchange: bool) -> None:
    params = make_params(((64, 80), (5,)))
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizers = [TritonAdamW(each, state_dtype="int8", impl="triton") for each in (params, twins)]
    step_twins(optimizers, params, twins)
    step_twins(optimizers, params, twins)
    kept = []
    for state in optimizers[0].state.values():
        for key, value in state.items():
            # another object of the same memory, as was in use before, holds the old numbers
            old = value.detach()
            kept.append((old, old.clone()))
            if exchange:
                state[key] = value.clone()
            else:
                value.data = value.clone()
    step_twins(optimizers, params, twins)
    for old, before in kept:
        assert torch.equal(dequantized(old), dequantized(before))


def test_scales_of_codes_may_get_other_memory() -> None:
    """Alone: the codes stay where they are."""
    params = make_params(((64, 64),))
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizers = [TritonAdamW(each, lr=0.1, impl="triton", state_dtype="int8") for each in (params, twins)]
    for _ in range(4):
        step_twins(optimizers, params, twins)
        moved, scaled = (optimizer.state[p]["exp_avg"] for optimizer, (p,) in zip(optimizers, (params, twins)))
        moved.scale.data = moved.scale * 4
        scaled.scale.mul_(4)


@pytest.mark.parametrize("exchange", [False, True], ids=["moved", "exchanged"])
def test_what_is_here_of_a_state_may_become_another_tensor(exchange: bool) -> None:
    run_ranks(_states_of_dtensors, 1, exchange, backend="gloo")


def _states_of_dtensors(rank: int, world_size: int, exchange: bool) -> None:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh(DEVICE, (world_size,))
    whole = torch.nn.Parameter(torch.randn(16, 8, device=DEVICE))
    sharded = torch.nn.Parameter(DTensor.from_local(whole.detach().clone(), mesh, [Shard(0)]))
    optimizers = [TritonAdamW([p], lr=0.1, impl="triton") for p in (whole, sharded)]
    for turn in range(5):
        renew_gradients([whole])
        assert whole.grad is not None
        sharded.grad = DTensor.from_local(whole.grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(sharded.to_local(), whole), f"step {turn}"
        if turn < 2:
            continue
        (plain,), (spread,) = (optimizer.state.values() for optimizer in optimizers)
        with torch.no_grad():
            for key in ("exp_avg", "exp_avg_sq"):
                plain[key].mul_(4)
                if exchange:
                    torch.utils.swap_tensors(spread[key], spread[key] * 4)
                else:
                    # only without gradients is this the tensor itself, not a view
                    here = spread[key].to_local()
                    here.data = here * 4


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("impl", "gpu", "impl must be one of"),
        ("master_weights", "fp32", r"param_groups\[1\].* is torch.float32"),
        ("max_norm", 1.0, "all groups are clipped together: max_norm is None in the first group, but 1"),
        ("max_norm", -1.0, "max_norm must be positive or None, got -1"),
        ("norm_type", 1.0, "all groups are clipped together: .* give it to the optimizer's constructor, or to all"),
    ],
)
def test_options_that_are_wrong_by_now_are_refused(option: str, value: Any, words: str) -> None:
    params = make_params(((6, 5), (4, 3)))
    optimizer = TritonAdamW([{"params": [p]} for p in params])
    optimizer.step()
    optimizer.param_groups[1][option] = value
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    for p, expected in zip(params, before, strict=True):
        assert torch.equal(p, expected)


@pytest.mark.parametrize("options", [{"stochastic_rounding": True}, {"state_dtype": torch.float32}], ids=str)
@pytest.mark.parametrize("alone", [{"differentiable": True}, {"dtype": torch.complex64}], ids=str)
def test_what_torch_alone_updates_has_torchs_options_before_anything_moves(
    alone: dict[str, Any], options: dict[str, Any]
) -> None:
    alone = dict(alone)
    dtype = alone.pop("dtype", torch.bfloat16)
    first, last = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5, dtype=dtype))
    for p in (first, last):
        p.grad = torch.ones_like(p)
    optimizer = TritonAdamW([{"params": [("first", first)]}, {"params": [("last", last)], **alone, **options}])
    with pytest.raises(RuntimeError, match=r"are left to torch's own code, .*; give last to a group without them"):
        optimizer.step()
    assert torch.equal(first, torch.ones(5))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_the_state_of_a_parameter_may_have_entries_of_the_users(impl: Any) -> None:
    (p,) = make_params(((6, 5),))
    optimizer = TritonAdamW([p], impl=impl)
    for count in (1, 2):
        optimizer.step()
        optimizer.state[p]["note"] = "mine"
        assert optimizer.state[p]["step"] == count
    assert optimizer.state[p]["note"] == "mine"


def test_complex_parameters_are_stepped_as_by_torch() -> None:
    ours, theirs = (torch.nn.Parameter(torch.full((5,), 1.0 + 2.0j)) for _ in range(2))
    optimizers = [TritonAdamW([ours], lr=0.1), torch.optim.AdamW([theirs], lr=0.1)]
    for _ in range(2):
        for p, optimizer in zip((ours, theirs), optimizers):
            p.grad = p.detach().conj() * 0.5
            optimizer.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("lr", None, "lr must be a number"),
        ("lr", "0.1", "lr must be a number"),
        ("eps", "1e-8", "eps must be a number"),
        ("eps", np.ones(2), r"eps must be a number, got an array of shape \(2,\)"),
        ("lr", np.ones(1), r"lr must be a number, got an array of shape \(1,\); give one number's item\(\)"),
        ("weight_decay", None, "weight_decay must be a number"),
        ("betas", None, "betas must be a pair, got None"),
        ("betas", (0.9,), r"betas must be a pair, got \(0.9,\)"),
        ("betas", (0.9, 0.99, 0.999), r"betas must be a pair, got \(0.9, 0.99, 0.999\)"),
        ("betas", ("0.9", 0.99), "beta.* must be a number .*, got '0.9'"),
        ("lr", torch.tensor(0.1, device="meta"), f"lr is on meta, and so has no value; give one on {DEVICE}"),
        ("eps", torch.tensor(1e-8, device="meta"), "eps is on meta, and so has no value"),
        ("weight_decay", torch.tensor(0.1, device="meta"), "weight_decay is on meta, and so has no value"),
        ("betas", (torch.tensor(0.9, device="meta"), 0.99), "beta.* is on meta, and so has no value"),
        ("betas", (1.0, 0.99), r"betas\[0\] must be from 0 to below 1, got 1.0"),
        ("betas", (0.9, 1), r"betas\[1\] must be from 0 to below 1, got 1"),
        ("betas", (0.9, 1.5), r"betas\[1\] must be from 0 to below 1, got 1.5"),
        ("betas", (torch.tensor(1.0), torch.tensor(0.99)), r"betas\[0\] must be from 0 to below 1, got 1"),
        ("betas", (math.nan, 0.99), r"betas\[0\] must be from 0 to below 1, got nan"),
        ("betas", (0.9, None), r"betas\[1\] must be a number or a 1-element tensor, got None"),
        ("weight_decay", torch.tensor([0.1]).to_sparse(), "weight_decay must be a dense tensor, got one in .*coo"),
        ("lr", torch.tensor(0.5).to(torch.float8_e4m3fn), "lr must be a number .*, got torch.float8_e4m3fn"),
        ("max_norm", torch.tensor(0.5, device="meta"), "max_norm is on meta, and so has no value"),
        ("max_norm", "1.0", "max_norm must be a number"),
        ("norm_type", "2", "norm_type must be a number"),
        ("stochastic_rounding", "no", "stochastic_rounding must be True or False, got 'no'"),
        ("maximize", "no", "maximize must be True or False, got 'no'"),
        ("amsgrad", "no", "amsgrad must be True or False, got 'no'"),
        ("capturable", "no", "capturable must be True or False, got 'no'"),
        ("differentiable", "no", "differentiable must be True or False, got 'no'"),
        ("foreach", "no", "foreach must be None, True or False, got 'no'"),
        ("fused", "no", "fused must be None, True or False, got 'no'"),
        ("maximize", torch.ones(2), r"maximize must be True or False, got tensor\(\[1., 1.\]\)"),
        ("amsgrad", torch.ones(2), r"amsgrad must be True or False, got tensor\(\[1., 1.\]\)"),
        ("amsgrad", np.ones(2), r"amsgrad must be True or False, got array\(\[1., 1.\]\)"),
        ("amsgrad", torch.ones(2).to_sparse(), r"amsgrad must be True or False, got tensor"),
        ("maximize", np.ones(2), r"maximize must be True or False, got array\(\[1., 1.\]\)"),
        ("foreach", torch.tensor(True, device="meta"), "foreach must be None, True or False, got tensor"),
    ],
)
@pytest.mark.parametrize("impls", [("triton", "triton"), ("triton", "torch"), ("torch", "torch")], ids="-".join)
def test_what_is_no_number_and_no_switch_by_now_is_refused_before_anything_moves(
    impls: tuple[str, str], option: str, value: Any, words: str
) -> None:
    params = make_params(((6, 5), (4, 3)))
    optimizer = TritonAdamW([{"params": [p], "impl": impl} for p, impl in zip(params, impls)])
    optimizer.step()
    optimizer.step()
    for group in optimizer.param_groups if "norm" in option else optimizer.param_groups[1:]:
        group[option] = value
    before = [p.detach().clone() for p in params]
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        optimizer.step()
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("formats", [{}, {"state_dtype": (torch.float64, None)}], ids=["torch's code", "reference"])
@pytest.mark.parametrize("kind", [lambda x: torch.tensor([x]), np.array], ids=["tensors", "arrays"])
def test_hyperparameters_may_be_tensors_of_one_number_and_arrays_without_dimensions(
    kind: Any, formats: dict[str, Any]
) -> None:
    """A step failed, of tensors at the parameter without dimensions, when others had moved."""
    wide, narrow = ([torch.nn.Parameter(torch.ones(shape)) for shape in ((3,), ())] for _ in range(2))
    numbers = {"lr": 0.1, "weight_decay": 0.25, "eps": 0.5}
    arrays: dict[str, Any] = {name: kind(number) for name, number in numbers.items()}
    for params, options in ((wide, arrays), (narrow, numbers)):
        for p in params:
            p.grad = torch.ones_like(p)
        TritonAdamW(params, impl="torch", **options, **formats).step()
    for p, expected in zip(wide, narrow):
        torch.testing.assert_close(p, expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"differentiable": True}, r"in which param_groups\[1\]\['params'\]\[0\], a leaf that requires a gradient"),
        ({"differentiable": True, "foreach": True}, "foreach functions have no derivatives"),
        ({"foreach": True, "lr": torch.tensor(0.1)}, "lr as a Tensor is not supported for capturable=False and"),
        ({"foreach": True, "betas": (torch.tensor(0.9), torch.tensor(0.99))}, r"betas\[0\] as a Tensor is not"),
        ({"capturable": True}, r"param_groups\[1\]\['params'\]\[0\] is on the CPU; give it to a group with"),
    ],
    ids=str,
)
def test_what_torchs_code_refuses_is_refused_before_anything_moves(options: dict[str, Any], words: str) -> None:
    """It did so when it came to the group, as one does that has another checkpoint's options."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = TritonAdamW([{"params": [p], "impl": "torch"} for p in params])
    optimizer.param_groups[1].update(options)
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises((RuntimeError, ValueError), match=words):
        optimizer.step()
    assert torch.equal(params[0], torch.ones(3))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"stochastic_rounding": "no"}, "stochastic_rounding must be True or False, got 'no'"),
        ({"maximize": "no"}, "maximize must be True or False, got 'no'"),
        ({"amsgrad": "no"}, "amsgrad must be True or False, got 'no'"),
        ({"capturable": "no"}, "capturable must be True or False, got 'no'"),
        ({"differentiable": "no"}, "differentiable must be True or False, got 'no'"),
        ({"foreach": "no"}, "foreach must be None, True or False, got 'no'"),
        ({"fused": "no"}, "fused must be None, True or False, got 'no'"),
        ({"lr": "1"}, "lr must be a number or a 1-element tensor, got '1'"),
        ({"betas": 0.9}, "betas must be a pair, got 0.9"),
        ({"betas": ("0.9", 0.99)}, r"betas\[0\] must be a number .*, got '0.9'"),
        ({"eps": None}, "eps must be a number .*, got None"),
        ({"weight_decay": "0.1"}, "weight_decay must be a number .*, got '0.1'"),
        ({"max_norm": "1"}, "max_norm must be a number"),
        ({"max_norm": 1.0, "norm_type": "2"}, "norm_type must be a number"),
        ({"max_norm": 1.0, "norm_type": math.nan}, "norm_type must be the order of a norm, got nan"),
    ],
    ids=str,
)
def test_texts_are_no_switches_and_no_numbers(option: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        TritonAdamW(make_params(((6, 5),)), **option)


def test_the_limit_of_the_norm_may_change() -> None:
    params = make_params()
    optimizer = TritonAdamW(params, max_norm=1.0)
    optimizer.step()
    optimizer.param_groups[0]["max_norm"] = 2.0
    optimizer.step()
    optimizer.param_groups[0]["max_norm"] = 0.0
    with pytest.raises(ValueError, match="max_norm must be positive or None, got 0"):
        optimizer.step()


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t()


def cut(tensor: Tensor) -> Tensor:
    return tensor[:3]


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("view", [transposed, cut])
def test_a_parameter_may_become_a_view_of_itself(view: Any, impl: Any) -> None:
    """At the address that it had: kernels would go through it in its old order, or beyond its end."""
    runs = []
    for make in (torch.optim.AdamW, TritonAdamW):
        torch.manual_seed(0)
        (p,) = make_params(((64, 64),))
        optimizer: Any = make([p], lr=0.1) if make is torch.optim.AdamW else TritonAdamW([p], lr=0.1, impl=impl)
        for _ in range(3):
            optimizer.step()
        whole = p.data
        p.grad, p.data = None, view(p.data)
        p.grad = torch.randn(64, 64, device=DEVICE)[: len(p)]
        for state in vars(optimizer)["state"].values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].data = view(state[key].data)
        optimizer.step()
        runs.append(whole)
    torch.testing.assert_close(*runs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("exchange", [False, True], ids=["turned", "exchanged"])
def test_a_state_may_become_a_view_of_itself(exchange: bool, impl: Any) -> None:
    """At the address that it had, while the parameter stays as it is."""
    runs = []
    for make in (torch.optim.AdamW, TritonAdamW):
        torch.manual_seed(0)
        (p,) = make_params(((8, 8),))
        optimizer: Any = make([p], lr=0.1) if make is torch.optim.AdamW else TritonAdamW([p], lr=0.1, impl=impl)
        for _ in range(3):
            optimizer.step()
        state = optimizer.state[p]
        optimizer.step()
        if exchange:
            state["exp_avg"] = state["exp_avg"].t()
        else:
            state["exp_avg"].data = state["exp_avg"].data.t()
        renew_gradients([p])
        optimizer.step()
        runs.append(p)
    torch.testing.assert_close(*runs, rtol=2e-5, atol=2e-6)


def test_a_gradient_that_becomes_sparse_is_refused_without_kernels_too() -> None:
    (p,) = make_params(((6, 5),))
    optimizer = TritonAdamW([p], impl="torch")
    optimizer.step()
    p.grad = torch.randn(6, 5, device=DEVICE).to_sparse()
    with pytest.raises(RuntimeError, match=r"takes dense gradients.*param_groups\[0\]"):
        optimizer.step()


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_states_may_change_their_keys(impl: Any) -> None:
    """The same states in the same order, the parameters in another."""
    runs = []
    for make in (torch.optim.AdamW, TritonAdamW):
        torch.manual_seed(0)
        params = make_params(((6, 5), (6, 5)))
        optimizer: Any = make(params, lr=0.1) if make is torch.optim.AdamW else TritonAdamW(params, lr=0.1, impl=impl)
        optimizer.step()
        states = list(optimizer.state.values())
        optimizer.state.clear()
        optimizer.state.update(zip(reversed(params), states))
        optimizer.step()
        runs.append(params)
    for expected, found in zip(*runs, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("cast", [Tensor.bfloat16, Tensor.double, Tensor.long, int], ids=lambda cast: cast.__name__)
def test_steps_are_counted_whatever_their_dtype_was(cast: Any) -> None:
    """As by torch's loop; the kernels refused all but fp32."""
    params = make_params()
    optimizer = TritonAdamW(params, lr=0.1, impl="triton")
    for _ in range(2):
        for p in params:
            if p in optimizer.state:
                optimizer.state[p]["step"] = cast(optimizer.state[p]["step"])
        optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [2, 2, 2]


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_amsgrad_may_be_turned_off(impl: Any) -> None:
    runs = []
    for make in (torch.optim.AdamW, TritonAdamW):
        torch.manual_seed(0)
        params = make_params()
        own = {} if make is torch.optim.AdamW else {"impl": impl}
        optimizer: Any = make(params, lr=0.1, amsgrad=True, **own)
        for step in range(4):
            optimizer.param_groups[0]["amsgrad"] = step < 2
            optimizer.step()
            for p in params:
                assert p.grad is not None
                p.grad.mul_(0.1)
        runs.append(params)
    for expected, found in zip(*runs, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_parameters_without_a_name_join_those_with_one(impl: Any) -> None:
    params = make_params()
    optimizer = TritonAdamW([("first", params[0])], impl=impl)
    optimizer.param_groups[0]["params"].append(params[1])
    optimizer.step()
    assert len(optimizer.state) == 2
    assert "param_groups[0]['params'][1]" in optimizer.explain()


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="gradients have the parameter's dtype")
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_gradients_may_change_their_dtype(impl: Any) -> None:
    p = torch.nn.Parameter(torch.ones(40, device=DEVICE))
    q = p.detach().clone().requires_grad_()
    p.grad_dtype = None
    optimizer, expected = TritonAdamW([p], lr=0.1, impl=impl), torch.optim.AdamW([q], lr=0.1)
    for dtype in (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32):
        p.grad = torch.randn(40, device=DEVICE).to(dtype)
        q.grad = p.grad.float()
        optimizer.step()
        expected.step()
    torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_gradients_may_be_made_of_other_tensors(num_steps: int, max_norm: float | None) -> None:
    """As a functional collective gives them, until torch has waited for it: they have no memory of their own."""
    ours = make_params()
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizers = [TritonAdamW(params, impl="triton", max_norm=max_norm) for params in (ours, theirs)]
    for number in range(num_steps + 2):
        renew_gradients(ours)
        for p, q in zip(ours, theirs, strict=True):
            assert p.grad is not None
            q.grad = p.grad.clone()
            if number == num_steps:
                p.grad = AsyncCollectiveTensor(p.grad)
        for optimizer in optimizers:
            optimizer.step()
        for p, q in zip(ours, theirs, strict=True):
            # with norms that torch has added up in another order
            torch.testing.assert_close(p, q, rtol=0 if max_norm is None else 1e-6, atol=0 if max_norm is None else 1e-6)


def test_a_demand_for_kernels_is_heard_after_the_first_step_too() -> None:
    params = make_params()
    optimizer = TritonAdamW([("weight", params[0])], impl="triton")
    optimizer.step()
    params[0].data = params[0].data.double()
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(RuntimeError, match=r"impl='triton' asks for.*weight cannot have.*float64.*impl='auto'"):
        optimizer.step()


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("option", ["lr", "eps", "weight_decay", "betas"])
def test_a_number_beyond_fp64_is_refused_by_name_before_anything_moves(impl: Any, option: str) -> None:
    params = make_params(((6, 5), (4, 3)))
    optimizer = TritonAdamW([{"params": [p]} for p in params], impl=impl)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[1][option] = (0.9, 10**400) if option == "betas" else 10**400
    name = r"betas\[1\]" if option == "betas" else option
    with pytest.raises(OverflowError, match=f"^{name} is too large"):
        optimizer.step()
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("switch", [0, 1, np.False_, np.True_, torch.tensor(True)], ids=repr)
@pytest.mark.parametrize("option", ["amsgrad", "maximize", "stochastic_rounding"])
def test_what_is_equal_to_a_switch_is_one(option: str, switch: Any) -> None:
    found = []
    for value in (switch, bool(switch)):
        p = torch.nn.Parameter(torch.ones(6, 5, dtype=torch.bfloat16, device=DEVICE))
        p.grad = torch.ones_like(p)
        TritonAdamW([p], impl="torch", **{option: value}).step()
        found.append(p.detach())
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_switch_that_is_no_bool_may_be_off() -> None:
    """It ended in an error of ``torch.set_grad_enabled``, when other groups had moved."""
    params = make_params(((6, 5), (4, 3)))
    before = [p.detach().clone() for p in params]
    TritonAdamW([{"params": [p], "differentiable": off} for p, off in zip(params, (False, 0))], impl="torch").step()
    assert not any(map(torch.equal, params, before))


def test_a_limit_of_other_groups_that_is_an_array_is_refused_by_name() -> None:
    params = make_params()
    optimizer = TritonAdamW([{"params": params[:1]}, {"params": params[1:]}], max_norm=1.0)
    optimizer.param_groups[1]["max_norm"] = np.ones(3)
    with pytest.raises(ValueError, match="max_norm must be a number, got an array"):
        optimizer.step()


@pytest.mark.parametrize("order", [Decimal(3), np.array(3), torch.tensor(3.0)], ids=repr)
def test_the_order_of_the_norm_may_become_any_number(order: Any) -> None:
    params = make_params(((6, 5), (4, 3)))
    optimizer = TritonAdamW(params, impl="torch", max_norm=0.5)
    optimizer.step()
    optimizer.param_groups[0]["norm_type"] = order
    optimizer.step()
    expected = torch.cat([p.grad.double().flatten() for p in params if p.grad is not None]).norm(3.0)
    torch.testing.assert_close(optimizer.grad_norm, expected.float())


@pytest.mark.parametrize("limit", [Decimal("0.5"), Fraction(1, 2), np.array(0.5), np.float32(0.5)], ids=repr)
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_the_limit_of_the_norm_may_be_any_number(impl: Any, limit: Any) -> None:
    found = []
    for max_norm in (limit, 0.5):
        params = [torch.nn.Parameter(torch.ones(shape, device=DEVICE)) for shape in ((6, 5), (4, 3))]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = TritonAdamW(params, impl=impl, max_norm=max_norm, eps=1.0)
        optimizer.step()
        optimizer.step()
        found.append([p.detach() for p in params])
    torch.testing.assert_close(*found, rtol=0, atol=0)
