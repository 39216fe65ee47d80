"""What adamw_ and muon_ refuse by name before anything moves, in plain torch, by the kernels, and by a plan."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from random_tensors import DEVICE
from torch import Tensor

from optim_kernels.functional import AdamWPlan, adamw_
from optim_kernels.functional.muon import apply_muon_update_, muon_, muon_update
from optim_kernels.reference.adamw import AdamWScalars

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"params": [torch.zeros(4, dtype=torch.float64)]}, "float64"),
        ({"exp_avgs": [torch.zeros(5)]}, r"exp_avgs\[0\]"),
        ({"exp_avg_sqs": [torch.zeros(4, dtype=torch.int8)]}, r"exp_avg_sqs\[0\]"),
        ({"grads": [torch.zeros(3)]}, r"grads\[0\]"),
        ({"masters": [torch.zeros(4, dtype=torch.int16)]}, "bfloat16"),
        ({"steps": torch.zeros(2)}, "steps"),
        ({"params": [torch.zeros(8)[::2]]}, "dense"),
        ({"grads": [torch.zeros(4, dtype=torch.float64)]}, r"grads\[0\] is torch.float64; the kernels take float32, "),
        (
            {"masters": [torch.zeros(4, dtype=torch.float16)]},
            r"masters\[0\] must be float32 or int16, is torch.float16",
        ),
        ({"max_exp_avg_sqs": [torch.zeros(4, dtype=torch.float16)]}, r"max_exp_avg_sqs\[0\] is torch.float16; beside"),
    ],
    ids=str,
)
def test_wrong_tensors_are_named(change: dict[str, Any], words: str) -> None:
    lists: dict[str, Any] = {
        "params": [torch.zeros(4)],
        "grads": [torch.zeros(4)],
        "exp_avgs": [torch.zeros(4)],
        "exp_avg_sqs": [torch.zeros(4)],
        "steps": torch.zeros(()),
    }
    moved = {
        key: [x.to(DEVICE) for x in value] if isinstance(value, list) else value.to(DEVICE)
        for key, value in {**lists, **change}.items()
    }
    if change.keys() == {"params"} and change["params"][0].stride() == (2,):
        moved["params"] = [torch.zeros(8, device=DEVICE)[::2]]
    with pytest.raises((ValueError, RuntimeError), match=words):
        adamw_(**moved, impl="triton", **OPTIONS)


@pytest.mark.parametrize("name", ["params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"])
@pytest.mark.parametrize("wrong", [torch.ones(4, dtype=torch.complex64), torch.ones(4, dtype=torch.int32)], ids=str)
def test_the_reference_takes_no_tensor_of_another_dtype(name: str, wrong: Tensor) -> None:
    lists = {key: [torch.ones(4), torch.ones(4)] for key in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
    lists |= {name: [torch.ones(4), wrong]}
    with pytest.raises(ValueError, match=rf"^{name}\[1\] must be of a real floating dtype, got {wrong.dtype}$"):
        adamw_(**lists, steps=torch.zeros(()), impl="torch", **OPTIONS)
    assert torch.equal(lists["params"][0], torch.ones(4))


@pytest.mark.parametrize("shape", [(1,), (0, 4)], ids=str)
def test_the_reference_takes_no_gradient_of_another_shape(shape: Any) -> None:
    params, grads, *moments = ([torch.ones(4), torch.ones(4)] for _ in range(4))
    grads[1] = torch.ones(shape)
    with pytest.raises(ValueError, match=r"^grads\[1\] must have its parameter's shape \(4,\), or be a stack of such"):
        adamw_(params, grads, *moments, steps=torch.zeros(()), impl="torch", **OPTIONS)
    assert torch.equal(params[0], torch.ones(4))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"steps": [1, torch.ones(())]}, r"steps\[1\] must be an int, got tensor"),
        ({"steps": [1, None]}, r"steps\[1\] must be an int, got None"),
        ({"steps": [1, 1], "indices": [0, 0.5]}, r"indices\[1\] must be an int, got 0.5"),
        ({"second_moments": [torch.zeros(3), torch.zeros(3).int()]}, r"second_moments\[1\] must be of a real floating"),
    ],
    ids=str,
)
def test_muon_refuses_numbers_before_momentum_moves(option: dict[str, Any], words: str) -> None:
    params, grads, buffers = ([torch.ones(3, 3, dtype=torch.bfloat16) for _ in range(2)] for _ in range(3))
    with pytest.raises(ValueError, match=f"^{words}"):
        muon_(params, grads, buffers, lr=0.1, stochastic_rounding="steps" in option, **option)
    assert all(torch.equal(x, torch.ones_like(x)) for x in (*params, *buffers))


LIST_OF_TWO: dict[str, Any] = {
    "exp_avgs": [torch.zeros(4)],
    "exp_avg_sqs": [torch.zeros(4)] * 3,
    "max_exp_avg_sqs": [torch.zeros(4)],
    "masters": [None],
    "steps": [torch.zeros(())],
    "grads": [torch.ones(4)] * 3,
    "present": [None],
    "indices": [0],
    "starts": [0, 0, 0],
    "lr": [1e-3],
    "betas": [(0.9, 0.99)],
    "eps": [1e-8],
    "weight_decay": [0.0] * 3,
    "maximize": [True],
}


def refused(change: dict[str, Any], how: str, error: Any, words: str) -> None:
    """Have a call on two tensors refused, by plain torch, by the kernels, or by the kernels after a step of a plan."""
    params, grads, exp_avgs, exp_avg_sqs = ([torch.ones(4, device=DEVICE) for _ in range(2)] for _ in range(4))
    given: dict[str, Any] = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    given |= {"steps": [torch.zeros((), device=DEVICE) for _ in range(2)], "impl": "triton", **OPTIONS}
    if how == "torch":
        given["impl"] = "torch"
    elif how == "planned":
        given["plan"] = AdamWPlan()
        adamw_(**given)
    tensors = [*params, *exp_avgs, *exp_avg_sqs, *given["steps"]]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(error, match=f"^{words}"):
        adamw_(**{**given, **change})
    assert all(map(torch.equal, tensors, before))
    # a loop may put it right
    adamw_(**given)
    assert not any(map(torch.equal, params, before))


HOW = pytest.mark.parametrize("how", ["torch", "triton", "planned"])


@HOW
@pytest.mark.parametrize("name", LIST_OF_TWO)
def test_a_list_of_another_length_is_refused_by_name(name: str, how: str) -> None:
    placed = [value.to(DEVICE) if isinstance(value, Tensor) else value for value in LIST_OF_TWO[name]]
    refused({name: placed}, how, ValueError, f"{name} must have one entry for each of the 2 params, got [13]$")


@pytest.mark.parametrize("how", ["triton", "planned"])
@pytest.mark.parametrize("name", ["grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters"])
def test_kernels_refuse_sparse_tensors_by_name(name: str, how: str) -> None:
    mixed = [torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE).to_sparse()]
    words = r"\[1\] is torch\.sparse_coo; the kernels take dense tensors: give its to_dense\(\)$"
    refused({name: mixed}, how, ValueError, name + words)
    refused({name: mixed, "names": ["a", "b"]}, how, ValueError, f"{name[:-1]} of b is")


@HOW
@pytest.mark.parametrize(
    "value",
    [torch.ones(4), np.ones(2), 0.5, "ab", (t for t in (torch.ones(4),)), {"a": 1, "b": 2}.values(), {1, 2}, {0: 1}],
    ids=["tensor", "array", "number", "text", "generator", "values of a dict", "set", "dict"],
)
@pytest.mark.parametrize("name", ["params", "grads", "exp_avgs", "masters", "indices", "starts"])
def test_what_is_no_list_is_refused_by_name(name: str, value: Any, how: str) -> None:
    """A single parameter's tensor in place of a list, above all."""
    words = f"{name} must be a list, with one entry for each tensor, got a {type(value).__name__}"
    refused({name: value}, how, TypeError, words)


@pytest.mark.parametrize("name", ["params", "grads", "momentum_buffers", "second_moments", "views", "steps"])
def test_muon_refuses_what_is_no_list_by_name(name: str) -> None:
    lists: dict[str, Any] = {key: [torch.ones(4, 6)] for key in ("params", "grads", "momentum_buffers")}
    with pytest.raises(TypeError, match=f"^{name} must be a list, with one entry for each tensor, got a Tensor"):
        muon_(**{**lists, name: torch.ones(4, 6)}, lr=0.1)
    assert all(torch.equal(x, torch.ones(4, 6)) for (x,) in lists.values())


WRONG_KINDS = {
    "sparse": (lambda x: x.to_sparse(), r"must be a dense tensor, got one in torch\.sparse_coo"),
    "8 bits": (lambda x: x.to(torch.float8_e4m3fn), r"must be of 16 bits or more, got torch\.float8_e4m3fn"),
}
WRITTEN = ["params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters"]


@pytest.mark.parametrize(("name", "kind"), [*((name, "sparse") for name in WRITTEN), ("params", "8 bits")])
def test_the_reference_writes_no_tensors_of_other_kinds(name: str, kind: str) -> None:
    """torch's operators refused them when others had moved."""
    change, words = WRONG_KINDS[kind]
    ones = torch.ones(4, device=DEVICE)
    refused({name: [ones.clone(), change(ones)]}, "torch", ValueError, rf"{name}\[1\] {words}")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "sparse") for name in ("params", "momentum_buffers", "masters", "updates")),
        *((name, "8 bits") for name in ("params", "updates")),
    ],
)
def test_muon_writes_no_tensors_of_other_kinds(name: str, kind: str) -> None:
    change, words = WRONG_KINDS[kind]
    lists: dict[str, Any] = {key: [torch.ones(4, 6) for _ in range(2)] for key in ("params", "momentum_buffers")}
    grads, before = [torch.ones(4, 6)] * 2, copy.deepcopy(lists)
    wrong = {**lists, name: [torch.ones(4, 6), change(torch.ones(4, 6))]}
    with pytest.raises(ValueError, match=rf"^{name}\[1\] {words}"):
        if name == "updates":
            apply_muon_update_(lists["params"], wrong["updates"], lr=0.1)
        else:
            muon_(wrong["params"], grads, wrong["momentum_buffers"], masters=wrong.get("masters"), lr=0.1)
    assert all(torch.equal(*pair) for key, value in before.items() for pair in zip(value, lists[key]))


@HOW
@pytest.mark.parametrize(
    ("count", "words"),
    [
        (torch.tensor(True), r"steps\[1\] must be a number that counts, got torch\.bool"),
        (torch.zeros(1).to_sparse(), r"steps\[1\] must be a dense tensor, got one in torch\.sparse_coo"),
    ],
    ids=["bool", "sparse"],
)
def test_counts_that_cannot_be_advanced_are_refused(count: Tensor, words: str, how: str) -> None:
    refused({"steps": [torch.zeros((), device=DEVICE), count.to(DEVICE)]}, how, ValueError, words)


@pytest.mark.parametrize("name", ["exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters"])
def test_the_reference_broadcasts_no_state(name: str) -> None:
    p = torch.ones(4, 3, device=DEVICE)
    arguments: dict[str, Any] = {"exp_avgs": [torch.zeros_like(p)], "exp_avg_sqs": [torch.zeros_like(p)]}
    arguments[name] = [torch.zeros(3, device=DEVICE)]
    with pytest.raises(ValueError, match=rf"^{name}\[0\] must have the shape of params\[0\], \(4, 3\), got \(3,\)$"):
        adamw_([p], [torch.ones_like(p)], steps=torch.zeros(()), impl="torch", **arguments, **OPTIONS)
    assert torch.equal(p, torch.ones_like(p))


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("name", ["grad_scale", "found_inf", "clip_factor"])
def test_numbers_that_must_be_tensors_are_refused_by_name(name: str, impl: Any) -> None:
    tensors = [[torch.ones(4, 3, device=DEVICE)] for _ in range(4)]
    arguments: dict[str, Any] = {"steps": torch.zeros((), device=DEVICE), "impl": impl, **OPTIONS}
    for take in (
        lambda number: adamw_(*tensors, **arguments, **{name: number}),
        lambda number: muon_(*tensors[:3], lr=0.1, impl=impl, **{name: number}),
    ):
        with pytest.raises(TypeError, match=rf"^{name} must be a 0-d tensor, got 0.5; give torch.tensor\(0.5\)"):
            take(0.5)
        with pytest.raises(ValueError, match=rf"^{name} must be a 0-d tensor, one number .* got shape \(2,\)"):
            take(torch.ones(2, device=DEVICE))
        with pytest.raises(ValueError, match=rf"^{name} must be a real number, got torch\.complex64"):
            take(torch.tensor(1j, dtype=torch.complex64, device=DEVICE))
    assert all(torch.equal(x, torch.ones_like(x)) for (x,) in tensors)


@HOW
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"lr": "12"}, "lr must be a number"),
        ({"lr": [0.1, None]}, "lr must be a number"),
        ({"eps": None}, "eps must be a number"),
        ({"weight_decay": "00"}, "weight_decay must be a number"),
        ({"betas": ("0.9", 0.9)}, r"(betas\[0\]|beta1) must be a number"),
        ({"betas": 0.9}, "betas must be a pair, or one for each of the params, got 0.9"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] must be from 0 to below 1, got 1"),
        ({"betas": [(0.9, 0.9), (1.5, 0.9)]}, r"betas\[0\] must be from 0 to below 1, got 1.5"),
        ({"maximize": "no"}, "maximize must be True or False, got 'no'"),
        ({"stochastic_rounding": "no"}, "stochastic_rounding must be True or False, got 'no'"),
        ({"seed": "1"}, "seed must be an int, got '1'"),
    ],
    ids=str,
)
def test_what_is_no_number_and_no_switch_is_refused_by_name(option: dict[str, Any], words: str, how: str) -> None:
    refused(option, how, (TypeError, ValueError), words)


def on_meta(value: float) -> Tensor:
    return torch.tensor(value, device="meta")


@HOW
@pytest.mark.parametrize(
    ("option", "name"),
    [
        ({"lr": on_meta(0.1)}, "lr"),
        ({"lr": [0.1, on_meta(0.1)]}, "lr"),
        ({"eps": on_meta(1e-8)}, "eps"),
        ({"weight_decay": on_meta(0.1)}, "weight_decay"),
        ({"betas": (0.9, on_meta(0.9))}, r"(betas\[1\]|beta2)"),
        ({"betas": [(0.9, 0.9), (on_meta(0.9), 0.9)]}, r"(betas\[0\]|beta1)"),
        ({"grad_scale": on_meta(1.0)}, "grad_scale"),
        ({"found_inf": on_meta(0.0)}, "found_inf"),
        ({"clip_factor": on_meta(1.0)}, "clip_factor"),
    ],
    ids=str,
)
def test_numbers_without_a_value_are_refused_by_name(option: dict[str, Any], name: str, how: str) -> None:
    refused(option, how, ValueError, f"{name} is on meta, and so has no value; give one on {DEVICE}")


@pytest.mark.parametrize("option", ["lr", "beta1", "weight_decay"])
def test_a_plan_refuses_numbers_without_a_value(option: str) -> None:
    tensors = [[torch.ones(4, device=DEVICE)] for _ in range(4)]
    plan = AdamWPlan.build(*tensors, steps=torch.zeros((), device=DEVICE))
    scalars = AdamWScalars(0.1, 0.9, 0.99, 1e-8, 0.0)._replace(**{option: on_meta(0.5)})
    with pytest.raises(ValueError, match=f"^{option} is on meta, and so has no value; give one on {DEVICE}"):
        plan.step(tensors[1], [scalars])
    assert all(torch.equal(x, torch.ones_like(x)) for (x,) in tensors)


def test_parameters_without_values_take_numbers_without_a_value() -> None:
    """A step that only shows what shapes and memory it takes."""
    tensors = [[torch.empty(4, 3, device="meta")] for _ in range(4)]
    adamw_(*tensors, steps=on_meta(0.0), **{**OPTIONS, "lr": on_meta(0.1)}, clip_factor=on_meta(1.0))
    muon_(*tensors[:3], lr=on_meta(0.1), momentum=on_meta(0.9), clip_factor=on_meta(1.0))


@pytest.mark.parametrize(
    "option", ["nesterov", "maximize", "cautious", "row_equilibrate", "renormalize", "stochastic_rounding"]
)
def test_muon_takes_no_text_for_a_switch(option: str) -> None:
    tensors = [[torch.ones(4, 3, device=DEVICE)] for _ in range(3)]
    with pytest.raises(ValueError, match=f"^{option} must be True or False, got 'no'"):
        muon_(*tensors, lr=0.1, steps=[1], **{option: "no"})
    assert all(torch.equal(x, torch.ones_like(x)) for (x,) in tensors)


@HOW
@pytest.mark.parametrize("steps", [0, [0.0, 0.0]], ids=str)
def test_step_counts_that_are_no_tensors_are_refused(steps: Any, how: str) -> None:
    refused({"steps": steps}, how, TypeError, r"steps must be a 0-d tensor, or one for each of the params, .* got ")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int16], ids=str)
def test_the_reference_takes_no_master_that_the_kernels_refuse(dtype: torch.dtype) -> None:
    tensors = [[torch.ones(4)] for _ in range(4)]
    arguments: dict[str, Any] = {"masters": [torch.ones(4).to(dtype)], "steps": torch.zeros(()), **OPTIONS}
    with pytest.raises(ValueError, match=rf"masters\[0\] .* {dtype}"):
        adamw_(*tensors, impl="torch", **arguments)


def test_a_plan_takes_no_other_gradients() -> None:
    p, g, m, v = ([torch.zeros(3, device=DEVICE)] for _ in range(4))
    plan = AdamWPlan.build(p, g, m, v, steps=torch.zeros((), device=DEVICE))
    scalars = [AdamWScalars(0.1, 0.9, 0.99, 1e-8, 0.0)]
    with pytest.raises(ValueError, match="the plan is for 1 gradients, got 2"):
        plan.step(g * 2, scalars)
    for other in (g[0].half(), torch.zeros(2, 3, device=DEVICE)):
        became = rf"grads\[0\] became {other.dtype} .*; the plan is for torch.float32 and 1 slice\(s\): prepare it anew"
        with pytest.raises(ValueError, match=became):
            plan.step([other], scalars)


def broken_lists(change: str, at: str) -> dict[str, Any]:
    """Two tensors of each kind, of which the second under ``at`` is wrong."""
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "momentum_buffers")
    lists: dict[str, Any] = {name: [torch.ones(3, 4) for _ in range(2)] for name in names}
    wrong = {"none": None, "elsewhere": torch.ones(3, 4, device="meta"), "expanded": torch.ones(1, 4).expand(3, 4)}
    lists[at][1] = wrong[change]
    return lists


BROKEN = pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ("none", TypeError, "must be a tensor, got None"),
        ("elsewhere", ValueError, r"must be where \w+\[1\] is, on \w+, got \w+"),
        ("expanded", ValueError, r"has several elements at one place; give its contiguous\(\)"),
    ],
)


@BROKEN
@pytest.mark.parametrize("at", ["params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"])
def test_the_reference_finds_what_is_wrong_before_anything_moves(at: str, change: str, error: Any, words: str) -> None:
    if (at, change) == ("grads", "expanded"):
        pytest.skip("gradients are only read")
    lists = broken_lists(change, at)
    del lists["momentum_buffers"]
    steps = [torch.zeros(()), torch.zeros(())]
    # wherever one of two is, the other is elsewhere
    named = r"\w+" if (at, change) == ("params", "elsewhere") else at
    with pytest.raises(error, match=rf"{named}\[1\].* {words}"):
        adamw_(**lists, steps=steps, impl="torch", **OPTIONS)
    assert all(bool((tensors[0] == 1).all()) for tensors in lists.values())
    assert not any(map(bool, steps))


@BROKEN
@pytest.mark.parametrize("at", ["params", "grads", "momentum_buffers"])
def test_muon_finds_what_is_wrong_before_anything_moves(at: str, change: str, error: Any, words: str) -> None:
    if (at, change) == ("grads", "expanded"):
        pytest.skip("gradients are only read")
    lists = broken_lists(change, at)
    named = r"\w+" if (at, change) == ("params", "elsewhere") else at
    with pytest.raises(error, match=rf"{named}\[1\].* {words}"):
        muon_(lists["params"], lists["grads"], lists["momentum_buffers"], lr=0.1)
    assert all(bool((tensors[0] == 1).all()) for tensors in lists.values())


@HOW
@pytest.mark.parametrize(
    ("option", "error", "words"),
    [
        ({"steps": [torch.zeros((), device=DEVICE), torch.zeros(2, device=DEVICE)]}, ValueError, r"steps\[1\] must be"),
        ({"present": [False, None]}, TypeError, r"present\[0\] must be a 0-d tensor, got False"),
        ({"present": [None, torch.ones(2, device=DEVICE)]}, ValueError, r"present\[1\] must be a 0-d tensor, got"),
        ({"indices": [0, 1.0]}, ValueError, r"indices\[1\] must be an int, got 1\.0"),
        ({"starts": [0.5, 0]}, ValueError, r"starts\[0\] must be an int, got 0\.5"),
        ({"grads": [torch.ones(4, device=DEVICE), None]}, TypeError, r"grads\[1\] must be a tensor, got None"),
        ({"exp_avgs": [None, None]}, TypeError, r"exp_avgs\[0\] must be a tensor, got None"),
        ({"max_exp_avg_sqs": [0.5, 0.5]}, TypeError, r"max_exp_avg_sqs\[0\] must be a tensor.*, got 0.5"),
        ({"masters": [None, 0.5]}, TypeError, r"masters\[1\] must be a tensor or None, got 0.5"),
        ({"plan": 3}, TypeError, "plan must be an AdamWPlan or None, got 3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_counts_flags_and_places_are_refused_by_name(option: dict[str, Any], error: Any, words: str, how: str) -> None:
    refused({"stochastic_rounding": True, **option}, how, error, words)


def lists_with_one_of_inference_mode(at: str, *names: str) -> dict[str, Any]:
    """Two tensors of each kind, of which the second under ``at`` was made in inference mode."""
    shapes = {"steps": (), "second_moments": (3, 1)}
    lists = {name: [torch.ones(shapes.get(name, (3, 3))) for _ in range(2)] for name in ("params", "grads", *names)}
    with torch.inference_mode():
        lists[at][1] = lists[at][1].clone()
    return lists


OF_INFERENCE = "was made in inference mode, outside of which it cannot be written; give its clone"


@pytest.mark.parametrize("at", ["params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters", "steps"])
def test_what_was_made_in_inference_mode_is_refused_before_anything_moves(at: str) -> None:
    names = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters", "steps")
    lists = lists_with_one_of_inference_mode(at, *names)
    before = copy.deepcopy(lists)
    with pytest.raises(ValueError, match=rf"^{at}\[1\] {OF_INFERENCE}"):
        adamw_(**lists, **OPTIONS, impl="torch")
    assert all(map(torch.equal, tensors, before[name]) for name, tensors in lists.items())
    with torch.inference_mode():
        adamw_(**lists, **OPTIONS, impl="torch")
    assert not torch.equal(lists["params"][1], before["params"][1])


@pytest.mark.parametrize("at", ["params", "momentum_buffers", "second_moments", "masters"])
def test_muon_refuses_what_was_made_in_inference_mode_before_anything_moves(at: str) -> None:
    lists = lists_with_one_of_inference_mode(at, "momentum_buffers", "second_moments", "masters")
    before = copy.deepcopy(lists)
    with pytest.raises(ValueError, match=rf"^{at}\[1\] {OF_INFERENCE}"):
        muon_(**lists, lr=0.1)
    params, grads, masters = lists.pop("params"), lists["grads"], lists.pop("masters")
    with pytest.raises(ValueError, match=rf"^{at}\[1\] {OF_INFERENCE}"):
        if at in lists:
            muon_update(**lists)
        else:
            apply_muon_update_(params, grads, masters=masters, lr=0.1)
    lists |= {"params": params, "masters": masters}
    assert all(map(torch.equal, tensors, before[name]) for name, tensors in lists.items())


def test_gradients_without_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="grads must have one entry for each of the 0 params, got 1"):
        adamw_([], [torch.ones(4)], [], [], steps=[], **OPTIONS)
