"""adamw_ on lists of views: kernels against the reference, in every storage format and layout of the list."""

from __future__ import annotations

import copy
import mmap
import pickle
import platform
import sys
from typing import Any

import pytest
import torch
from compiling_apart import lines_of
from hypothesis import given, settings
from hypothesis import strategies as st
from random_tensors import DEVICE
from torch import Tensor

from optim_kernels import reference
from optim_kernels.functional import AdamWPlan, _adamw_launch, adamw_
from optim_kernels.functional.muon import apply_muon_update_, muon_, muon_update
from optim_kernels.reference.adamw import AdamWScalars

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
SHAPES = ((100, 70), (3,), (), (0,), (4096,), (4097,))
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


class Problem:
    """Parameters, states and gradients, twice: once for the kernels, once for the reference."""

    def __init__(
        self,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype],
        shapes: Any = SHAPES,
        *,
        slices: int = 1,
        offset: int = 0,
        amsgrad: bool = False,
        master: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        p, g, m, v = dtypes
        self.lists: dict[str, list[Tensor]] = {
            "params": [self.random(s, p, offset) for s in shapes],
            "exp_avgs": [self.random(s, m, offset, 0.1) for s in shapes],
            "exp_avg_sqs": [self.random(s, v, offset, 0.1).square_() for s in shapes],
        }
        if amsgrad:
            self.lists["max_exp_avg_sqs"] = [self.random(s, v, offset, 0.1).square_() for s in shapes]
        if master == torch.float32:
            self.lists["masters"] = [x.float() + 1e-4 for x in self.lists["params"]]
        elif master == torch.int16:
            self.lists["masters"] = [
                torch.randint(-(2**15), 2**15, x.shape, generator=self.generator, dtype=torch.int16).to(DEVICE)
                for x in self.lists["params"]
            ]
        self.expected = {key: [x.clone() for x in tensors] for key, tensors in self.lists.items()}
        self.grads = [self.random((slices, *s) if slices > 1 else s, g, offset) for s in shapes]
        self.steps = [torch.tensor(5.0, device=DEVICE) for _ in shapes]
        self.expected_steps = [step.clone() for step in self.steps]

    def random(self, shape: Any, dtype: torch.dtype, offset: int, scale: float = 1.0) -> Tensor:
        size = torch.Size(shape).numel()
        flat = torch.randn(size + offset, generator=self.generator).mul_(scale).to(DEVICE, dtype)
        return flat[offset:].view(shape)

    def run(self, num_steps: int = 3, **options: Any) -> AdamWPlan:
        plan = AdamWPlan()
        for _ in range(num_steps):
            arguments = {**OPTIONS, **options}
            adamw_(grads=self.grads, steps=self.steps, plan=plan, impl="triton", **self.lists, **arguments)
            reference.adamw_(grads=self.grads, steps=self.expected_steps, **self.expected, **arguments)
        assert self.steps == self.expected_steps
        return plan

    def check(self) -> None:
        """Within an ulp of the dtype, and nearly always the same bits in 16-bit dtypes."""
        for key, tensors in self.lists.items():
            for found, expected in zip(tensors, self.expected[key]):
                if found.dtype == torch.int16 or not found.numel():
                    continue
                ulp = torch.finfo(found.dtype).eps
                torch.testing.assert_close(found, expected, rtol=4 * ulp, atol=5e-7 + 4 * ulp * 1e-2)
                if found.dtype != torch.float32 and found.numel() > 1000:
                    assert (found == expected).float().mean() > 0.98, key


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(
    ("dtypes", "options"),
    [
        ((FP32, FP32, FP32, FP32), {}),
        ((FP16, FP16, FP16, FP16), {}),
        ((BF16, BF16, BF16, BF16), {}),
        ((BF16, FP32, BF16, FP32), {}),
        ((FP32, FP32, BF16, BF16), {}),
        ((FP32, FP32, FP32, FP32), {"amsgrad": True}),
        ((BF16, BF16, FP32, FP32), {"slices": 3}),
        ((BF16, BF16, FP32, FP32), {"master": torch.float32}),
        ((FP16, FP16, FP32, FP32), {"master": torch.float32}),
        ((BF16, BF16, FP32, FP32), {"master": torch.int16, "amsgrad": True}),
    ],
    ids=str,
)
def test_kernel_is_the_reference(dtypes: Any, options: dict[str, Any], offset: int) -> None:
    problem = Problem(dtypes, offset=offset, **options)
    problem.run(
        maximize=True,
        clip_factor=torch.tensor(0.3, device=DEVICE),
        grad_scale=torch.tensor(2.0, device=DEVICE),
        found_inf=torch.tensor(0.0, device=DEVICE),
    )
    problem.check()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("formats", "options"),
    [
        ({}, {"clip_factor": torch.tensor(0.3, device=DEVICE), "maximize": True}),
        ({"slices": 3}, {"present": [torch.tensor(1.0, device=DEVICE)], "lr": torch.tensor(0.1, device=DEVICE)}),
        ({"master": torch.int16, "amsgrad": True}, {"grad_scale": torch.tensor(2.0, device=DEVICE)}),
        ({}, {"stochastic_rounding": True, "seed": -7, "indices": [3], "starts": [16]}),
        ({}, {"present": [torch.tensor(0.0, device=DEVICE)]}),
    ],
    ids=["plain", "slices", "formats", "random", "absent"],
)
def test_a_lone_tensor_is_the_references(formats: dict[str, Any], options: dict[str, Any], shape: Any) -> None:
    """Its kernel is another than that of lists; one without elements has its steps counted, too."""
    problem = Problem((BF16, BF16, FP32, BF16), (shape,), **formats)
    assert problem.run(**options)._launches[0]._is_of_one
    problem.check()


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 16, 5])
def test_random_rounding_is_the_packed_stream(start: int) -> None:
    problem = Problem((BF16, BF16, BF16, BF16))
    problem.run(stochastic_rounding=True, seed=-7, indices=[3, 1, 4, 15, 9, 2], starts=[start] * 6)
    for key, tensors in problem.lists.items():
        different = sum(int((x != y).sum()) for x, y in zip(tensors, problem.expected[key]))
        assert different <= 0.001 * sum(x.numel() for x in tensors), key


def test_present_and_shared_steps() -> None:
    problem = Problem((FP32, FP32, FP32, FP32))
    # those without a flag are present, in the same launch
    present = [torch.tensor(float(i % 2), device=DEVICE) for i in range(5)]
    plan = problem.run(present=[*present, None])
    problem.check()
    assert [int(step) for step in problem.steps] == [5, 8, 5, 8, 5, 8]
    assert plan.num_launches == 1
    shared = Problem((FP32, FP32, FP32, FP32))
    shared.steps = [shared.steps[0]] * 6
    shared.expected_steps = [shared.expected_steps[0]] * 6
    shared.run()
    shared.check()
    assert int(shared.steps[0]) == 8


def test_a_step_count_that_two_launches_would_advance_is_refused() -> None:
    problem = Problem((FP32, FP32, FP32, FP32))
    problem.lists["params"][1] = problem.lists["params"][1].bfloat16()
    with pytest.raises(ValueError, match=r"params\[0\] and params\[1\] share a step count"):
        adamw_(grads=problem.grads, steps=problem.steps[0], impl="triton", **problem.lists, **OPTIONS)


def test_a_plan_follows_lists_that_are_changed_in_place() -> None:
    problem = Problem((FP32, FP32, FP32, FP32))
    plan = AdamWPlan()
    for turn in range(3):
        adamw_(grads=problem.grads, steps=problem.steps, plan=plan, impl="triton", **problem.lists, **OPTIONS)
        reference.adamw_(grads=problem.grads, steps=problem.expected_steps, **problem.expected, **OPTIONS)
        key = ("params", "exp_avgs", "exp_avg_sqs")[turn]
        problem.lists[key][0] = problem.lists[key][0].clone()
        problem.grads[4] = problem.grads[4].neg()
    problem.check()
    problem.grads[0] = problem.grads[0].flatten().view(70, 100)
    with pytest.raises(ValueError, match=r"grads\[0\]"):
        adamw_(grads=problem.grads, steps=problem.steps, plan=plan, impl="triton", **problem.lists, **OPTIONS)


def test_hyperparameters_of_each_tensor() -> None:
    problem = Problem((FP32, FP32, FP32, FP32))
    problem.run(
        lr=[0.1, torch.tensor(0.02, device=DEVICE), 0.03, 0.0, 1e-3, 1e-4],
        betas=[(0.9, 0.99), (0.0, 0.5), (0.5, 0.0), (0.9, 0.9), (0.8, 0.95), (0.95, 0.999)],
        eps=[1e-8, 1e-3, 1e-10, 1e-8, 1.0, 1e-8],
        weight_decay=[0.0, 0.1, 0.2, 0.3, 0.4, 0.5],
        maximize=[True, False] * 3,
    )
    problem.check()


@settings(deadline=None, max_examples=10)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    cut=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_cutting_a_flat_tensor_into_views_changes_nothing(sizes: list[int], cut: int, seed: int) -> None:
    total = sum(sizes) + cut
    whole = Problem((FP32, FP32, FP32, FP32), [(total,)], seed=seed)
    flat = {key: tensors[0].clone() for key, tensors in whole.lists.items()}
    grad = whole.grads[0]
    adamw_(grads=[grad], steps=whole.steps[0], impl="triton", **whole.lists, **OPTIONS)
    views = {key: list(x.split([*sizes, cut])) for key, x in flat.items()}
    steps = torch.tensor(5.0, device=DEVICE)
    adamw_(grads=list(grad.split([*sizes, cut])), steps=steps, impl="triton", **views, **OPTIONS)
    for key, x in flat.items():
        assert torch.equal(x, whole.lists[key][0]), key


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
    params, grads, buffers = ([torch.ones(3, 3, dtype=BF16) for _ in range(2)] for _ in range(3))
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


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_muon_moves_nothing_where_gradients_overflowed(found: float) -> None:
    param, grad, buffer = (torch.ones(3, 3, device=DEVICE) for _ in range(3))
    muon_([param], [grad * 2], [buffer], lr=0.1, found_inf=torch.tensor(found, device=DEVICE))
    assert [torch.equal(x, torch.ones_like(x)) for x in (param, buffer)] == [bool(found)] * 2


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


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_an_empty_list_stands_for_none(impl: Any) -> None:
    """As torch's own functions have it: a step without AMSGrad is given no maxima."""
    results = []
    for nothing in (None, []):
        p, m, v = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE), torch.zeros(4, device=DEVICE)
        lists: dict[str, Any] = {"max_exp_avg_sqs": nothing, "masters": nothing, "starts": nothing, "present": nothing}
        adamw_([p], [torch.ones_like(p)], [m], [v], steps=torch.zeros((), device=DEVICE), impl=impl, **lists, **OPTIONS)
        results.append(p)
    assert torch.equal(*results)
    assert float(results[0][0]) < 1


@pytest.mark.skipif(DEVICE != "cpu" or (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="MAP_32BIT")
def test_one_tensor_at_an_address_below_4_gib():
    """Where Python is no position-independent program, as Debian's, memory of the C heap begins there."""
    map_32bit = 0x40

    def low(values: Tensor) -> Tensor:
        memory = mmap.mmap(-1, 4 * values.numel(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_32bit)
        tensor = torch.frombuffer(memory, dtype=FP32).copy_(values)
        assert tensor.data_ptr() < 2**32
        return tensor

    made = [torch.randn(50), torch.randn(50), torch.zeros(50), torch.zeros(50), torch.zeros(1)]
    p, g, m, v, step = map(low, made)
    adamw_([p], [g], [m], [v], steps=step.reshape(()), impl="triton", **OPTIONS)
    expected, grad, *moments, count = made
    adamw_([expected], [grad], *([x] for x in moments), steps=count.reshape(()), impl="torch", **OPTIONS)
    torch.testing.assert_close(p, expected)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_an_update_is_seen_by_autograd(impl: Any) -> None:
    params, grads, exp_avgs, exp_avg_sqs = ([torch.ones(5, device=DEVICE)] for _ in range(4))
    x = torch.ones(5, device=DEVICE, requires_grad=True)
    loss = (x * params[0]).sum()
    steps = [torch.tensor(0.0, device=DEVICE)]
    adamw_(params, grads, exp_avgs, exp_avg_sqs, steps=steps, **OPTIONS, impl=impl)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hyperparameters_may_be_written_where_they_are() -> None:
    """A plan's step reads the list that it is given, not what that was before."""
    p, g, m, v = (torch.ones(6, device=DEVICE) for _ in range(4))
    step = torch.zeros((), device=DEVICE)
    plan = AdamWPlan.build([p], [g], [m], [v], steps=[step])
    scalars = [AdamWScalars(0.0, 0.9, 0.99, 1e-8, 0.0)]
    plan.step([g], scalars)
    assert torch.equal(p, torch.ones_like(p))
    scalars[0] = scalars[0]._replace(lr=0.1)
    plan.step([g], scalars)
    assert (p < 1.0).all()


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


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "unplanned"])
def test_a_compiled_caller(planned: bool) -> None:
    """The compiler leaves the kernels' part as it is, as it does for a MuonPlan."""
    torch._dynamo.reset()
    ours, theirs = (Problem((FP32, FP32, FP32, FP32), ((8, 12), (5,))) for _ in range(2))
    plan = AdamWPlan() if planned else None

    def step(problem: Problem, lr: float, plan: AdamWPlan | None = None) -> None:
        options = {**OPTIONS, "lr": lr}
        adamw_(grads=problem.grads, steps=problem.steps, plan=plan, impl="triton", **problem.lists, **options)

    compiled = torch.compile(lambda lr: step(ours, lr, plan), backend="eager")
    for lr in (0.1, 0.2, 0.3):
        compiled(lr)
        step(theirs, lr)
        for problem in (ours, theirs):
            problem.grads = [grad * 2 for grad in problem.grads]
    assert plan is None or plan.num_launches == 1
    assert ours.steps == theirs.steps
    for key, tensors in ours.lists.items():
        assert all(map(torch.equal, tensors, theirs.lists[key])), key
        assert [t._version for t in tensors] == [t._version for t in theirs.lists[key]], key


def test_a_compiled_caller_has_plain_torch_traced() -> None:
    torch._dynamo.reset()
    ours, theirs = (Problem((FP32, FP32, FP32, FP32), ((8, 12), (5,))) for _ in range(2))

    def step(problem: Problem) -> None:
        adamw_(grads=problem.grads, steps=problem.steps, impl="torch", **problem.lists, **OPTIONS)

    torch.compile(step, backend="eager", fullgraph=True)(ours)
    step(theirs)
    for key, tensors in ours.lists.items():
        assert all(map(torch.equal, tensors, theirs.lists[key])), key


PREPARED = """
import json
from optim_kernels.functional import AdamWPlan, MuonMomenta, MuonUpdates
for made in (AdamWPlan(), MuonMomenta(), MuonUpdates()):
    print(json.dumps(type(vars(type(made))["step"]).__name__))
"""


def test_what_is_made_is_ready_for_a_compiled_caller() -> None:
    """The compiler cannot look up a method that is not compiled for the first time."""
    assert lines_of(PREPARED, count=3) == ["function"] * 3


def test_tensors_that_are_hyperparameters_of_all_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checking them anew for each parameter took most of the host's time."""
    checked: list[dict[str, Any]] = []
    monkeypatch.setattr(_adamw_launch, "check_scalars", lambda **numbers: checked.append(numbers))
    problem, options = Problem((FP32, FP32, FP32, FP32), ((8, 12), (5,), (3,))), {**OPTIONS, "lr": torch.tensor(0.1)}
    adamw_(grads=problem.grads, steps=problem.steps, impl="triton", **problem.lists, **options)
    assert [numbers["lr"] for numbers in checked] == [options["lr"]]


@pytest.mark.parametrize("calls", range(1, 4))
def test_a_copy_of_a_plan_is_empty(calls: int) -> None:
    """Its tables would have the addresses of what the plan keeps, and of another process's memory."""
    ours, theirs = (Problem((FP32, FP32, FP32, FP32), ((4, 4), (3,))) for _ in range(2))

    def step(plan: AdamWPlan) -> None:
        for problem, each in ((ours, plan), (theirs, None)):
            adamw_(grads=problem.grads, steps=problem.steps, plan=each, impl="triton", **problem.lists, **OPTIONS)

    plan = AdamWPlan()
    for _ in range(calls):
        step(plan)
    for copied in (copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert copied.num_launches == 0
        step(copied)
        assert copied.num_launches == 1
        for name, tensors in ours.lists.items():
            assert all(map(torch.equal, tensors, theirs.lists[name]))


def test_numbers_of_a_plan_may_be_written_where_they_are() -> None:
    params, grads, first, second = ([torch.ones(6, device=DEVICE) for _ in range(2)] for _ in range(4))
    steps = [torch.zeros((), device=DEVICE) for _ in range(2)]
    groups, plan = [0, 1], AdamWPlan()
    scalars = [AdamWScalars(lr, 0.9, 0.99, 1e-8, 0.0) for lr in (0.0, 0.1)]
    for moving in (1, 0):
        groups[:] = [1 - moving, moving]
        before = [p.clone() for p in params]
        plan.prepare(params, grads, first, second, steps=steps, groups=groups)
        plan.step(grads, scalars)
        assert [not torch.equal(p, old) for p, old in zip(params, before)] == [moving == 0, moving == 1]


def test_strides_of_single_elements_do_not_matter() -> None:
    p, m = (torch.ones(6, device=DEVICE).as_strided((6, 1), (1, stride)) for stride in (5, 7))
    g, v = (torch.ones(6, 1, device=DEVICE) for _ in range(2))
    plan = AdamWPlan.build([p], [g], [m], [v], steps=[torch.zeros((), device=DEVICE)])
    plan.step([g], [AdamWScalars(0.1, 0.9, 0.99, 1e-8, 0.0)])
    assert (p < 1.0).all()
    assert plan.num_copied == 0


@pytest.mark.parametrize("which", ["params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "steps"])
@pytest.mark.parametrize("how", ["moved", "transposed"])
def test_a_plan_follows_tensors_whose_memory_is_replaced(which: str, how: str) -> None:
    """They stay the objects that were planned; what they had may be another's by now."""
    problem = Problem((FP32, FP32, FP32, FP32), [(4, 4), (5,)], amsgrad=True)
    plan = AdamWPlan()
    ours, theirs = (
        {**lists, "steps": steps}
        for lists, steps in ((problem.lists, problem.steps), (problem.expected, problem.expected_steps))
    )
    for number in range(4):
        if number == 2:
            old = [(tensor.data, tensor.clone()) for tensor in ours[which]]
            for lists in (ours, theirs):
                for tensor in lists[which] if how == "moved" else [each[0] for each in lists.values()]:
                    tensor.data = (
                        tensor.data.clone() if how == "moved" else tensor.data.t() if tensor.ndim else tensor.data
                    )
        adamw_(grads=problem.grads, **ours, plan=plan, impl="triton", **OPTIONS)
        reference.adamw_(grads=problem.grads, **theirs, **OPTIONS)
        problem.check()
    assert how != "moved" or all(torch.equal(memory, values) for memory, values in old)


@pytest.mark.parametrize("which", ["exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"])
def test_a_plan_sees_that_a_moment_was_turned_at_its_address(which: str) -> None:
    problem = Problem((FP32, FP32, FP32, FP32), [(4, 4), (5,)], amsgrad=True)
    plan = AdamWPlan()
    for _ in range(3):
        adamw_(grads=problem.grads, steps=problem.steps, plan=plan, impl="triton", **problem.lists, **OPTIONS)
    moment = problem.lists[which][0]
    moment.data = moment.data.t()
    with pytest.raises(ValueError, match=rf"{which}\[0\] must be like params\[0\], .* strides \(4, 1\)"):
        adamw_(grads=problem.grads, steps=problem.steps, plan=plan, impl="triton", **problem.lists, **OPTIONS)


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


def test_muon_steps_parameters_that_require_gradients() -> None:
    """It ended in an error of autograd, with the momentum moved."""
    values, grad = torch.randn(4, 3), torch.randn(4, 3)
    found, expected = values.clone().requires_grad_(), values.clone()
    for p in (found, expected):
        muon_([p], [grad], [torch.zeros(4, 3)], lr=0.1)
    assert torch.equal(found.detach(), expected)
    assert not torch.equal(expected, values)


def test_gradients_without_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="grads must have one entry for each of the 0 params, got 1"):
        adamw_([], [torch.ones(4)], [], [], steps=[], **OPTIONS)
