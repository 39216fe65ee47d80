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
from optim_kernels.functional.muon import muon_
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


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_muon_moves_nothing_where_gradients_overflowed(found: float) -> None:
    param, grad, buffer = (torch.ones(3, 3, device=DEVICE) for _ in range(3))
    muon_([param], [grad * 2], [buffer], lr=0.1, found_inf=torch.tensor(found, device=DEVICE))
    assert [torch.equal(x, torch.ones_like(x)) for x in (param, buffer)] == [bool(found)] * 2


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


def test_muon_steps_parameters_that_require_gradients() -> None:
    """It ended in an error of autograd, with the momentum moved."""
    values, grad = torch.randn(4, 3), torch.randn(4, 3)
    found, expected = values.clone().requires_grad_(), values.clone()
    for p in (found, expected):
        muon_([p], [grad], [torch.zeros(4, 3)], lr=0.1)
    assert torch.equal(found.detach(), expected)
    assert not torch.equal(expected, values)
