"""muon_ with a plan: what it does without one, whatever changes between calls, and what it keeps from call to call."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_tensors import DEVICE, assert_same_bits, give_gradients, laid_out, random, random_parameters
from torch import Tensor

from optim_kernels import NSConfig, TritonMuon
from optim_kernels.functional import MuonPlan, muon_, new_second_moment
from optim_utils.param_groups import MatrixView

pytest.importorskip("triton")

from optim_kernels.functional import _muon_batch_plan, _muon_checks, muon, muon_plan
from optim_kernels.functional._muon_batch_plan import MuonBatchPlan
from optim_kernels.functional._muon_launches import StepLaunches

FP32, BF16 = torch.float32, torch.bfloat16
SHAPES = ((8, 12), (12, 8), (8, 12), (2, 3, 4))
# exact products, so that what is left to compare is the step around them
EXACT = NSConfig(steps=2, dtype=FP32)


def scalar(value: float) -> Tensor:
    return torch.tensor(value, device=DEVICE)


class Problem:
    """Parameters with all that a step of them reads and writes, and gradients."""

    def __init__(
        self,
        *shapes: tuple[int, ...],
        dtypes: tuple[torch.dtype, ...] = (FP32,),
        masters: torch.dtype | None = None,
        variance: bool = False,
        views: list[MatrixView | None] | None = None,
    ) -> None:
        kinds = [dtypes[i % len(dtypes)] for i in range(len(shapes))]
        params = [random(shape, i, dtype) for i, (shape, dtype) in enumerate(zip(shapes, kinds))]
        self.lists: dict[str, list[Any]] = {
            "params": params,
            "momentum_buffers": [torch.zeros_like(p, dtype=FP32) for p in params],
        }
        self.fixed: dict[str, Any] = {"views": views}
        if masters is not None:
            self.lists["masters"] = [
                None if p.dtype != BF16 else p.float() if masters == FP32 else torch.zeros_like(p, dtype=masters)
                for p in params
            ]
        if variance:
            self.lists["second_moments"] = [new_second_moment(p, views and views[i]) for i, p in enumerate(params)]
        self.draw(0)

    def draw(self, seed: int) -> None:
        self.grads = [random(p.shape, 100 * (seed + 1) + i, p.dtype) for i, p in enumerate(self.lists["params"])]

    def twin(self) -> Problem:
        other = object.__new__(Problem)
        other.lists = {key: [t if t is None else t.clone() for t in each] for key, each in self.lists.items()}
        other.fixed, other.grads = self.fixed, self.grads
        return other

    def step(self, plan: MuonPlan | None = None, impl: Any = "triton", **options: Any) -> None:
        given = {"lr": 0.1, "weight_decay": 0.1, "ns": EXACT, **self.fixed, **options}
        muon_(grads=self.grads, plan=plan, impl=impl, **self.lists, **given)

    def tensors(self) -> list[Tensor]:
        return [tensor for each in self.lists.values() for tensor in each if tensor is not None]

    def close_to(self, other: Problem) -> None:
        for name, each in self.lists.items():
            for found, wanted in zip(each, other.lists[name], strict=True):
                if found is None or found.dtype == torch.int16:
                    continue
                if found.dtype == BF16:
                    assert int((found != wanted).sum()) <= 0.02 * found.numel(), name
                torch.testing.assert_close(found, wanted, atol=2e-5, rtol=8e-3 if found.dtype == BF16 else 1e-4)


SPLIT = [MatrixView(shape=(12, 8), split=(4, 8)), None]


@pytest.mark.parametrize(
    ("of", "options"),
    [
        ({}, {"nesterov": False, "maximize": True, "scale": "match_rms_adamw"}),
        ({}, {"scale": "keller", "lr": scalar(0.1), "momentum": scalar(0.9), "weight_decay": scalar(0.3)}),
        ({"variance": True}, {"beta2": 0.9, "cautious": True, "renormalize": True, "row_equilibrate": True}),
        ({"variance": True, "views": [*SPLIT, None, None]}, {"beta2": scalar(0.9)}),
        ({"dtypes": (BF16,), "masters": FP32}, {}),
        ({"dtypes": (BF16, FP32), "masters": torch.int16}, {"cautious": True}),
        ({"dtypes": (BF16, FP32)}, {"clip_factor": scalar(0.5), "grad_scale": scalar(4.0), "found_inf": scalar(0.0)}),
    ],
    ids=["rule", "numbers on the device", "normuon", "views", "fp32 masters", "split16 masters", "mixed, scaled"],
)
def test_a_plan_changes_no_results(of: dict[str, Any], options: dict[str, Any]) -> None:
    shapes = ((12, 8), *SHAPES[1:]) if "views" in of else SHAPES
    ours = Problem(*shapes, **of)
    theirs, plan = ours.twin(), MuonPlan()
    for seed in range(3):
        ours.draw(seed)
        theirs.grads = ours.grads
        before = [grad.clone() for grad in ours.grads]
        ours.step(plan, **options)
        theirs.step(impl="torch", **options)
        assert_same_bits(ours.grads, before)
        ours.close_to(theirs)
    assert plan.others == {}
    assert plan.num_launches > 0


def test_the_launches_are_those_of_the_optimizer() -> None:
    params = random_parameters(*SHAPES, dtype=BF16)
    optimizer = TritonMuon(
        params, lr=0.1, weight_decay=0.1, ns_steps=2, beta2=0.9, stochastic_rounding=True, seed=3, impl="triton"
    )
    ours = Problem(*SHAPES, dtypes=(BF16,), variance=True)
    ours.lists["params"] = [p.detach().clone() for p in params]
    ours.lists["momentum_buffers"] = [torch.zeros_like(p) for p in ours.lists["params"]]
    plan = MuonPlan()
    for seed in range(3):
        give_gradients(*params, seed=seed)
        ours.grads = [p.grad for p in params if p.grad is not None]
        optimizer.step()
        more: dict[str, Any] = {"steps": [seed + 1] * 4, "stochastic_rounding": True, "seed": 3}
        ours.step(plan, ns=NSConfig(steps=2), beta2=0.9, **more)
    assert_same_bits(ours.lists["params"], params)
    assert_same_bits(ours.lists["momentum_buffers"], [optimizer.state[p]["momentum_buffer"] for p in params])
    assert plan.num_launches == sum(each.launches for each in optimizer.plans())


def test_random_bits_are_those_without_a_plan() -> None:
    """Without gradients parameters only decay, which both compute exactly alike: every bit must agree."""
    ours = Problem((8, 8), (9, 13), (16, 24), dtypes=(BF16, BF16, FP32))
    ours.lists["params"][1] = ours.lists["params"][1].t()
    ours.lists["momentum_buffers"][1] = ours.lists["momentum_buffers"][1].t()
    ours.grads = [torch.zeros_like(p) for p in ours.lists["params"]]
    theirs, plan = ours.twin(), MuonPlan()
    for numbers in ([1, 1, 1], [2, 2, 2], [7, 300, 1], [7, 300, 1]):
        options: dict[str, Any] = {"steps": numbers, "indices": [-1, 2**40 + 3, 5], "seed": -7}
        for problem, each in ((ours, plan), (theirs, None)):
            problem.step(each, stochastic_rounding=True, weight_decay=0.7, **options)
        assert_same_bits(ours.tensors(), theirs.tensors())


@pytest.mark.parametrize("random_rounding", [False, True], ids=["to nearest", "random"])
def test_found_inf_stops_everything(random_rounding: bool) -> None:
    ours = Problem(*SHAPES, (0, 3), dtypes=(BF16,))
    before, plan = ours.twin(), MuonPlan()
    options: dict[str, Any] = {"stochastic_rounding": random_rounding, "steps": [1] * 5}
    ours.step(plan, found_inf=scalar(1.0), **options)
    assert_same_bits(ours.tensors(), before.tensors())
    ours.step(plan, found_inf=scalar(0.0), **options)
    before.step(MuonPlan(), **options)
    assert_same_bits(ours.tensors(), before.tensors())
    assert list(plan.others) == [4]


def exchange(problem: Problem) -> None:
    problem.lists["params"][1] = problem.lists["params"][1].clone()


def exchange_moment(problem: Problem) -> None:
    problem.lists["second_moments"][0] = problem.lists["second_moments"][0].clone()


def move(problem: Problem) -> None:
    problem.lists["momentum_buffers"][2].data = problem.lists["momentum_buffers"][2].data.clone()


def reverse(problem: Problem) -> None:
    for each in (*problem.lists.values(), problem.grads):
        each.reverse()


def remove(problem: Problem) -> None:
    for each in (*problem.lists.values(), problem.grads):
        each.pop(1)


def append(problem: Problem) -> None:
    more = Problem((5, 5), variance=True)
    for name, each in problem.lists.items():
        each += more.lists[name]
    problem.grads += more.grads


def transpose(problem: Problem) -> None:
    """At their addresses."""
    for name in ("params", "momentum_buffers"):
        problem.lists[name][0].data = problem.lists[name][0].data.view(12, 8).t()


def turn_gradients(problem: Problem) -> None:
    problem.grads = [laid_out(grad, "transposed") for grad in problem.grads]


def halve_gradients(problem: Problem) -> None:
    problem.grads = [grad.bfloat16() for grad in problem.grads]


def negate_gradients(problem: Problem) -> None:
    problem.grads[0] = torch._neg_view(problem.grads[0])


CHANGES = [exchange, exchange_moment, move, reverse, remove, append, transpose, turn_gradients, halve_gradients]


@pytest.mark.parametrize("change", [*CHANGES, negate_gradients], ids=lambda change: change.__name__)
def test_a_plan_follows_what_changes(change: Callable[[Problem], None]) -> None:
    """In every step it does as a new one, also when things are as before again."""
    ours = Problem((8, 12), (12, 8), (8, 12), variance=True)
    theirs, plan = ours.twin(), MuonPlan()
    for turn in range(4):
        ours.grads = [random(p.shape, 10 * turn + i) for i, p in enumerate(ours.lists["params"])]
        theirs.grads = list(ours.grads)
        if turn == 2:
            change(ours)
            change(theirs)
        for problem, each in ((ours, plan), (theirs, MuonPlan())):
            problem.step(each, beta2=0.9)
        assert_same_bits(ours.tensors(), theirs.tensors())


def test_a_plan_follows_options() -> None:
    ours = Problem((8, 12), (12, 8), dtypes=(BF16,))
    theirs, plan = ours.twin(), MuonPlan()
    views: list[MatrixView | None] = [MatrixView(shape=(8, 12), split=(4, 4)), None]
    steps, indices = [1, 1], [0, 1]
    options: list[dict[str, Any]] = [
        {"lr": 0.1},
        {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.0},
        {"maximize": True},
        {"ns": NSConfig(steps=3, dtype=FP32)},
        {"ns": NSConfig(steps=3, dtype=FP32)},
        {"views": views},
        {"views": views},
        {"stochastic_rounding": True, "steps": steps, "indices": indices},
        {"stochastic_rounding": True, "steps": steps, "indices": indices, "seed": 1},
        {"impl": "torch"},
        {"lr": 0.1},
    ]
    for number, each in enumerate(options):
        if number == 6:
            views[0] = None
        steps[:], indices[1] = [number, number], number
        ours.step(plan, **each)
        theirs.step(MuonPlan(), **each)
        assert_same_bits(ours.tensors(), theirs.tensors())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parameters each plan of a batch has that is made."""
    sizes: list[int] = []
    make = MuonBatchPlan.__init__

    def making(self: MuonBatchPlan, tensors: Any, **options: Any) -> None:
        sizes.append(len(tensors))
        make(self, tensors, **options)

    monkeypatch.setattr(MuonBatchPlan, "__init__", making)
    return sizes


@pytest.mark.parametrize("alone", [(), ((0, 3),)], ids=["all", "with an empty one"])
def test_tables_are_made_once(alone: tuple[tuple[int, int], ...], made: list[int]) -> None:
    ours, plan = Problem(*SHAPES, *alone, dtypes=(BF16, FP32)), MuonPlan()
    for seed in range(3):
        ours.draw(seed)
        options: dict[str, Any] = {"stochastic_rounding": True, "steps": [seed + 1] * len(ours.grads)}
        ours.step(plan, lr=0.1 * seed, **options)
    assert made == [2, 2]
    assert plan.others == {4 + i: "it is empty" for i, _ in enumerate(alone)}
    # one kind of parameters changes, the other's plan stays
    ours.lists["params"][1] = ours.lists["params"][1].clone()
    ours.step(plan, **options)
    assert made == [2, 2, 2]


def test_other_objects_with_the_same_memory(made: list[int]) -> None:
    ours, plan = Problem((8, 12), (12, 8)), MuonPlan()
    for _ in range(2):
        ours.lists = {name: [tensor.data for tensor in each] for name, each in ours.lists.items()}
        # autograd may need the values of before: it has to learn of the update
        versions = [p._version for p in ours.lists["params"]]
        ours.step(plan)
        assert all(p._version > version for p, version in zip(ours.lists["params"], versions))
    assert made == [2]


def test_a_plan_that_is_built_before_the_first_step(made: list[int]) -> None:
    ours = Problem(*SHAPES, variance=True)
    theirs = ours.twin()
    before = theirs.twin()
    options: dict[str, Any] = {"ns": EXACT, "cautious": True}
    plan = MuonPlan.build(grads=ours.grads, impl="triton", **ours.lists, **options)
    assert_same_bits(ours.tensors(), before.tensors())
    ours.step(plan, beta2=0.9, **options)
    theirs.step(MuonPlan(), beta2=0.9, **options)
    assert_same_bits(ours.tensors(), theirs.tensors())
    assert made == [4, 4]


def test_gradients_that_a_plan_is_told_of() -> None:
    ours = Problem((8, 12), (12, 8))
    theirs, plan = ours.twin(), MuonPlan()
    ours.step(plan)
    theirs.step(MuonPlan())
    turned = [laid_out(grad, "transposed") for grad in ours.grads]
    for told, given in ((turned, ours.grads), (ours.grads, turned), (turned, turned)):
        plan.refresh(told)
        assert plan.num_copied == (0 if told is ours.grads else 2)
        for problem, each in ((ours, plan), (theirs, MuonPlan())):
            problem.grads, kept = given, problem.grads
            problem.step(each)
            problem.grads = kept
        assert_same_bits(ours.tensors(), theirs.tensors())
    with pytest.raises(ValueError, match="the plan is for 2 gradients, got 1"):
        plan.refresh(ours.grads[:1])
    with pytest.raises(TypeError, match=r"grads\[1\] must be a tensor, got None"):
        plan.refresh([ours.grads[0], None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"grads\[0\] must have the shape of params\[0\], \(8, 12\), got \(12, 8\)"):
        plan.refresh(ours.grads[::-1])
    with pytest.raises(ValueError, match=r"grads\[0\] must stay torch.float32, got torch.bfloat16"):
        plan.refresh([grad.bfloat16() for grad in ours.grads])


def test_gradients_are_not_kept() -> None:
    ours, plan = Problem((8, 12)), MuonPlan()
    for _ in range(2):
        ours.step(plan)
    kept = weakref.ref(ours.grads[0])
    ours.grads = []
    assert kept() is None


def test_gradients_are_copied_into_the_gaps_of_their_parameters() -> None:
    """The kernels read both by one stride."""
    ours = Problem((8, 16), (16, 8))
    for name, each in ours.lists.items():
        ours.lists[name] = [each[0][:, :12], each[1].t()[:, :12].t()]
    ours.grads = [random(p.shape, i) for i, p in enumerate(ours.lists["params"])]
    theirs, plan = ours.twin(), MuonPlan()
    for _ in range(2):
        ours.step(plan)
        theirs.step(impl="torch")
        ours.close_to(theirs)
    assert plan.others == {}


def test_memory_that_gradients_of_another_dtype_take() -> None:
    ours, plan = Problem((8, 12), (8, 12)), MuonPlan()
    ours.step(plan)
    other = ours.grads[1].view(-1).view(BF16)[: 8 * 12].view(8, 12)
    with pytest.raises(ValueError, match=r"grads\[1\] must stay torch.float32, got torch.bfloat16"):
        plan.refresh([ours.grads[0], other])
    theirs = ours.twin()
    for problem, each in ((ours, plan), (theirs, MuonPlan())):
        problem.grads = [ours.grads[0], other]
        problem.step(each)
    assert_same_bits(ours.tensors(), theirs.tensors())


@pytest.mark.parametrize("calls", range(4))
def test_gradients_elsewhere_are_refused_in_every_step(calls: int) -> None:
    ours, plan = Problem((8, 12)), MuonPlan()
    for _ in range(calls):
        ours.step(plan)
    kept, ours.grads = ours.grads, [ours.grads[0].to("meta")]
    before = ours.twin()
    with pytest.raises(ValueError, match=rf"grads\[0\] must be where params\[0\] is, on {DEVICE}.*, got meta"):
        ours.step(plan)
    assert_same_bits(ours.tensors(), before.tensors())
    ours.grads = before.grads = kept
    ours.step(plan)
    before.step(MuonPlan())
    assert_same_bits(ours.tensors(), before.tensors())


def test_sparse_gradients_are_left_to_plain_torch() -> None:
    ours = Problem((8, 12), (8, 12))
    theirs, plan = ours.twin(), MuonPlan()
    for turn in range(3):
        ours.grads = theirs.grads = [ours.grads[0], random((8, 12), turn).to_sparse() if turn == 2 else ours.grads[1]]
        ours.step(plan)
        theirs.grads = [grad.to_dense() for grad in theirs.grads]
        theirs.step(impl="torch")
        ours.close_to(theirs)
    assert plan.others == {1: "its gradient is torch.sparse_coo"}


@pytest.mark.parametrize("calls", range(1, 4))
def test_a_copy_of_a_plan_is_empty(calls: int) -> None:
    """Its tables would have the addresses of what the plan keeps, and of another process's memory."""
    ours, plan = Problem(*SHAPES), MuonPlan(tiles="shape")
    for _ in range(calls):
        ours.step(plan)
    theirs = ours.twin()
    for copied in (copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert copied.num_launches == 0
        ours.step(copied)
        theirs.step(MuonPlan(tiles="shape"))
        assert_same_bits(ours.tensors(), theirs.tensors())


def test_a_copied_gradient_holds_no_graph() -> None:
    ours, plan = Problem((8, 12)), MuonPlan()
    ours.step(plan)
    weight = random((12, 8), 0).requires_grad_()
    plan.refresh([weight.mul(2).t()])
    assert plan.num_copied == 1
    assert not any(each.requires_grad for each in plan._batches[0].plan._copies)


def test_where_the_kernels_do_not_run_a_plan_changes_nothing() -> None:
    runs = []
    for plan in (None, MuonPlan(), MuonPlan(tiles="shape")):
        p, grad, buffer = (torch.linspace(-1, 1, 12).view(3, 4).mul(k + 1) for k in range(3))
        for _ in range(2):
            muon_([p], [grad], [buffer], lr=0.1, plan=plan)
        runs.append([p, buffer])
        assert plan is None or plan.others == {0: "it is on cpu"}
    assert_same_bits(runs[0], runs[1])
    assert_same_bits(runs[0], runs[2])
    with pytest.raises(ValueError, match="tiles must be one of"):
        MuonPlan(tiles="matrix")  # type: ignore[arg-type]


def test_tiles_by_shape_do_not_depend_on_the_others() -> None:
    runs = []
    for shapes in (((16, 24),), ((16, 24), (16, 24), (24, 16))):
        ours, plan = Problem(*shapes), MuonPlan(tiles="shape")
        for _ in range(2):
            ours.step(plan)
        runs.append([each[0] for each in ours.lists.values()])
    assert_same_bits(*runs)


def test_tiles_by_shape_do_not_depend_on_where_others_gradients_start() -> None:
    ours, plan = Problem((16, 24), (16, 24)), MuonPlan(tiles="shape")
    ours.step(plan)
    assert [batch.places for batch in plan._batches] == [[0, 1]]
    grads = [torch.empty(16 * 24 + 1, device=DEVICE)[1:].view(16, 24).copy_(ours.grads[0]), ours.grads[1]]
    for told in (False, True):
        if told:
            plan.refresh(grads)
        ours.grads, kept = grads, ours.grads
        ours.step(plan)
        assert [batch.places for batch in plan._batches] == [[0], [1]]
        ours.grads = kept
        ours.step(plan)
        assert [batch.places for batch in plan._batches] == [[0, 1]]


def test_fp64_is_left_to_plain_torch() -> None:
    ours = Problem((8, 12), (12, 8), dtypes=(FP32, torch.float64))
    theirs, plan = ours.twin(), MuonPlan()
    with pytest.raises(RuntimeError, match=r"impl='triton' .* fp64, in which grads\[1\] is orthogonalized"):
        ours.step(plan)
    assert_same_bits(ours.tensors(), theirs.tensors())


def test_parameters_of_no_plan_are_stepped_too() -> None:
    ours = Problem((8, 12), (0, 3), (6, 6), (12, 8), variance=True, masters=FP32, dtypes=(BF16,))
    # no dimension of its matrices is contiguous
    for name in ("params", "momentum_buffers", "masters"):
        ours.lists[name][2] = laid_out(ours.lists[name][2], "gaps")
    theirs, plan = ours.twin(), MuonPlan()
    for seed in range(2):
        for problem, each in ((ours, plan), (theirs, None)):
            problem.draw(seed)
            problem.step(each, beta2=0.9, stochastic_rounding=True, steps=[seed + 1] * 4, seed=4)
    ours.close_to(theirs)
    assert plan.others == {1: "it is empty", 2: "no dimension of its matrices is contiguous"}
    # plain torch does the same with and without the plan
    assert_same_bits([each[2] for each in ours.lists.values()], [each[2] for each in theirs.lists.values()])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"grads": lambda each: each[:2]}, ValueError, "grads must have one entry for each of the 3 params, got 2"),
        ({"params": lambda each: [*each[:2], each[1]]}, ValueError, r"params\[1\] and params\[2\] are one tensor"),
        (
            {"second_moments": lambda each: [*each[:2], each[2].bfloat16()]},
            ValueError,
            r"second_moments\[2\] must be contiguous fp32 of 12 elements",
        ),
        ({"second_moments": lambda each: [*each[:2], each[2][1:]]}, ValueError, r"second_moments\[2\] must have 12"),
        ({"momentum_buffers": lambda each: [*each[:2], None]}, TypeError, r"momentum_buffers\[2\] must be a tensor"),
        ({"grads": lambda each: [*each[:2], each[2].clone()]}, ValueError, r"grads\[2\] has elements but no memory"),
        ({"plan": lambda _: 3}, TypeError, "plan must be a MuonPlan or None, got 3"),
        ({"steps": lambda _: [1, 1, 0]}, ValueError, r"steps\[2\] must be the number of this step, from 1 to 2\*\*24"),
        ({"steps": lambda _: [1, 1, 2**24 + 1]}, ValueError, r"steps\[2\] must be .* got 16777217"),
        ({"steps": lambda _: [1, 1]}, ValueError, "steps must have one entry for each of the 3 params, got 2"),
        ({"steps": lambda _: [1, 1, 0.5]}, ValueError, r"steps\[2\] must be an int, got 0.5"),
        ({"indices": lambda _: [1, 1, 0.5]}, ValueError, r"indices\[2\] must be an int, got 0.5"),
        ({"indices": lambda _: [1, 1, torch.ones(2).int()]}, ValueError, r"indices\[2\] must be an int, got tensor"),
        ({"lr": lambda _: "0.1"}, TypeError, "lr must be a number"),
        ({"momentum": lambda _: None}, TypeError, "momentum must be a number"),
        ({"cautious": lambda _: "no"}, ValueError, "cautious must be True or False"),
        ({"ns": lambda _: "keller"}, TypeError, "ns must be an NSConfig or None"),
        ({"impl": lambda _: "cuda"}, ValueError, "impl must be one of"),
        ({"masters": lambda _: [None, None, 3]}, TypeError, r"masters\[2\] must be a tensor or None, got 3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("planned", [False, True], ids=["at first", "later"])
@pytest.mark.parametrize("first", [(0, 3), (5, 5)], ids=["one alone", "all together"])
def test_what_does_not_fit_is_refused_before_anything_moves(
    change: dict[str, Any], error: Any, words: str, first: tuple[int, int], planned: bool
) -> None:
    ours = Problem(first, (8, 12), (8, 12), dtypes=(BF16,), variance=True)
    given: dict[str, Any] = {**ours.lists, "grads": ours.grads, "plan": MuonPlan(), "lr": 0.1, "steps": [1, 1, 1]}
    given |= {"ns": EXACT, "beta2": 0.9, "stochastic_rounding": True, "impl": "triton"}
    if planned:
        muon_(**given)
    before = ours.twin()
    ((name, how),) = change.items()
    wrong = {name: how(given.get(name))}
    if "no memory" in words:
        wrong["grads"][2].untyped_storage().resize_(0)
    with pytest.raises(error, match=words):
        muon_(**{**given, **wrong})
    assert_same_bits(ours.tensors(), before.tensors())
    # and the plan is as good as before
    muon_(**given)
    before.step(MuonPlan(), weight_decay=0.0, beta2=0.9, stochastic_rounding=True, steps=[1, 1, 1])
    assert_same_bits(ours.tensors(), before.tensors())


@pytest.mark.parametrize("how", [lambda v: v.view(BF16)[:, :12], lambda v: v[:, ::2]], ids=["dtype", "strides"])
def test_second_moments_that_become_another_kind_at_their_address(how: Callable[[Tensor], Tensor]) -> None:
    ours, plan = Problem((8, 12)), MuonPlan()
    memory = torch.zeros(1, 24, device=DEVICE)
    ours.lists["second_moments"] = [memory[:, :12]]
    ours.step(plan, beta2=0.9)
    ours.lists["second_moments"] = [how(memory)]
    before = ours.twin()
    with pytest.raises(ValueError, match=r"second_moments\[0\] must be contiguous fp32 of 12 elements"):
        ours.step(plan, beta2=0.9)
    assert_same_bits(ours.tensors(), before.tensors())


def test_dropped_plans_give_their_memory_back_before_more_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plan = Problem((8, 12), (8, 12), dtypes=(FP32, BF16)), MuonPlan()
    ours.step(plan)
    old, left = [weakref.ref(batch.plan) for batch in plan._batches], []
    make = MuonBatchPlan.__init__

    def making(self: MuonBatchPlan, *arguments: Any, **options: Any) -> None:
        left.append([each() is not None for each in old])
        make(self, *arguments, **options)

    monkeypatch.setattr(MuonBatchPlan, "__init__", making)
    ours.lists["params"][0] = ours.lists["params"][0].clone()
    ours.step(plan)
    assert left == [[False, True]]


def test_tensors_of_before_are_not_kept() -> None:
    """Also where something is left to others, so that every step is looked at anew."""
    ours, plan = Problem((8, 12)), MuonPlan()
    ours.step(plan)
    kept = weakref.ref(ours.lists["params"][0])
    ours = Problem((8, 12), (0, 3))
    ours.step(plan)
    assert kept() is None


@pytest.mark.parametrize("name", ["lr", "weight_decay", "momentum", "beta2", "clip_factor", "found_inf"])
def test_a_number_without_a_value_is_refused_before_anything_moves(name: str) -> None:
    """Neither what the plan steps, nor what is stepped alone."""
    ours, plan = Problem((8, 12), (12, 8), variance=True), MuonPlan()
    ours.grads[1] = ours.grads[1].to_sparse()
    ours.step(plan)
    assert list(plan.others) == [1]
    before = ours.twin()
    with pytest.raises(ValueError, match=f"^{name} is on meta, and so has no value; give one on {DEVICE}"):
        ours.step(plan, **{name: torch.tensor(0.5, device="meta")})
    assert_same_bits(ours.tensors(), before.tensors())


def test_after_a_number_without_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches read the inputs of the first step that runs."""
    ours, plan, taken = Problem((8, 12)), MuonPlan(), []
    take = StepLaunches.take_inputs
    monkeypatch.setattr(StepLaunches, "take_inputs", lambda launches: taken.append(take(launches)))
    with monkeypatch.context() as context:
        # so that it comes to where inputs are set
        context.setattr(muon, "check_values", lambda *_, **__: None)
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            ours.step(plan, lr=torch.tensor(0.1, device="meta"))
    assert taken == []
    ours.step(plan)
    assert len(taken) == 1


def test_a_compiled_caller() -> None:
    torch._dynamo.reset()
    ours, plan = Problem(*SHAPES), MuonPlan()
    theirs = ours.twin()
    step = torch.compile(lambda lr: ours.step(plan, lr=lr), backend="eager")
    for lr in (0.1, 0.2, 0.3):
        step(lr)
        theirs.step(MuonPlan(), lr=lr)
    assert_same_bits(ours.tensors(), theirs.tensors())
    assert plan.others == {}


def capture(context: pytest.MonkeyPatch) -> None:
    """Let steps go on as in the capture of a CUDA graph."""
    for module in (_muon_batch_plan, _muon_checks, muon_plan):
        context.setattr(module, "is_capturing", lambda _: True)


def test_what_graphs_read_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their replays read the tables, whatever later calls do; and calls that come back take them again."""
    ours, plan = Problem((8, 12), (12, 8)), MuonPlan()
    ours.step(plan)

    with monkeypatch.context() as context:
        capture(context)
        ours.step(plan)
    kept = weakref.ref(plan._batches[0].plan)
    params = list(ours.lists["params"])
    ours.lists["params"] = [p.clone() for p in params]
    before = ours.twin()
    with monkeypatch.context() as context:
        capture(context)
        with pytest.raises(RuntimeError, match="captured into a CUDA graph, but there is no plan of its tensors"):
            ours.step(plan)
    assert_same_bits(ours.tensors(), before.tensors())
    for _ in range(2):
        ours.step(plan)
        assert plan._batches[0].plan is not kept()
        ours.lists["params"] = [p.clone() for p in params]
    assert kept() is not None
    ours.lists["params"] = params
    ours.step(plan)
    assert plan._batches[0].plan is kept()
    assert len(plan._captured) == 1


@pytest.mark.parametrize("how", ["planned", "left to others", "without a plan"])
def test_random_bits_are_not_captured(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Problem((8, 12), (0, 3) if how == "planned" else (8, 12), dtypes=(BF16, FP32))
    plan = None if how == "without a plan" else MuonPlan()
    if how == "left to others":
        ours.lists["params"][0] = laid_out(ours.lists["params"][0], "gaps")
    ours.step(plan, stochastic_rounding=True, steps=[1, 1])
    before = ours.twin()
    capture(monkeypatch)
    with pytest.raises(RuntimeError, match=r"params\[0\] would be rounded at random in a step that is being captured"):
        ours.step(plan, stochastic_rounding=True, steps=[2, 2])
    assert_same_bits(ours.tensors(), before.tensors())


def test_a_plan_that_never_ran_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first launches load kernels, which a capture does not allow."""
    ours = Problem((8, 12), (12, 8))
    before = ours.twin()
    plan = MuonPlan.build(grads=ours.grads, impl="triton", ns=EXACT, **ours.lists)
    with monkeypatch.context() as context:
        capture(context)
        with pytest.raises(RuntimeError, match="call muon_ with the plan once before"):
            ours.step(plan)
    assert_same_bits(ours.tensors(), before.tensors())
    ours.step(plan)
    with monkeypatch.context() as context:
        capture(context)
        ours.step(plan)
    for _ in range(2):
        before.step(MuonPlan())
    assert_same_bits(ours.tensors(), before.tensors())


@pytest.mark.gpu
def test_a_captured_step() -> None:
    ours = Problem((512, 300), (64, 64), (33, 1000), variance=True)
    theirs, plan, other = ours.twin(), MuonPlan(), MuonPlan()
    lr = scalar(0.1)
    ours.step(plan, impl="auto", lr=lr, beta2=0.9)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step(plan, impl="auto", lr=lr, beta2=0.9)
    for number in range(3):
        if number:
            lr.fill_(0.1 / number)
            graph.replay()
        theirs.step(other, impl="auto", lr=lr.item(), beta2=0.9)
    for found, wanted in zip(ours.tensors(), theirs.tensors(), strict=True):
        torch.testing.assert_close(found, wanted)
