"""What users change between steps of Muon (options, groups, states) is what the next step and its plans work with."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from decimal import Decimal
from itertools import chain
from typing import Any

import pytest
import torch
from muon_twins import IMPLS, assert_alike, muon, parameter, steps, twins
from random_tensors import DEVICE, give_gradients
from torch import nn

from optim_kernels import TritonMuon, TritonMuonAdamW
from optim_kernels.functional import _muon_batch_plan, muon_
from optim_kernels.orthogonalization import NSConfig
from optim_kernels.reference.muon import MuonRule
from optim_utils.param_groups import MatrixView
from optim_utils.testing import run_ranks

pytest.importorskip("triton")


@pytest.mark.slow
@IMPLS
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((8, 12), {"split_rows": 4}),
        ((8, 12), {"views": [MatrixView(shape=(8, 12), split=(3, 5))]}),
        ((6, 2, 4), {"nd": "flatten"}),
        ((8, 12), {"ns_coefficients": "polar_express", "nesterov": False}),
    ],
    ids=["split_rows", "views", "nd", "coefficients"],
)
def test_options_may_change_between_steps(impl: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    changed, given = twins(impl, *shape, **options)
    for optimizer in (changed, given):
        optimizer.param_groups[0]["lr"] = 0.0
    steps(changed, given, count=3)
    changed.param_groups[0].update(options)
    for optimizer in (changed, given):
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.param_groups[0]["momentum"] = 0.0
    steps(changed, given)
    assert_alike(changed, given)


def test_groups_of_one_plan_have_hyperparameters_of_their_own() -> None:
    params = [parameter(8, 12) for _ in range(3)]
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    hyper = [{"lr": 0.1}, {"lr": 0.0}, {"lr": 0.02, "weight_decay": 0.5, "momentum": 0.5}]
    ours, theirs = (
        muon([{"params": [p], **own} for p, own in zip(each, hyper)], impl)
        for each, impl in ((params, "triton"), (copies, "torch"))
    )
    steps(ours, theirs, count=3)
    assert len(ours.plans()) == 1
    for p, q in zip(params, copies):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=0)


def test_second_moments_may_come_and_go_between_steps() -> None:
    p = parameter(8, 12)
    q = nn.Parameter(p.detach().clone())
    ours, theirs = muon([p], "triton"), muon([q], "torch")
    for beta2 in (None, None, None, 0.9, 0.9, 0.5, None, None):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["beta2"] = beta2
        steps(ours, theirs)
        assert_alike(ours, theirs)


@IMPLS
@pytest.mark.parametrize(
    "kept_in", [lambda triple: triple, lambda triple: 5 * (triple,)], ids=["list", "tuple of lists"]
)
def test_a_list_among_the_options_may_be_written_to(impl: str, kept_in: Any) -> None:
    changed, given = twins(impl, 8, 12, ns_coefficients=(2.0, -1.5, 0.5))
    written = [3.4445, -4.775, 2.0315]
    changed.param_groups[0].update(ns_coefficients=kept_in(written), lr=0.0)
    given.param_groups[0]["lr"] = 0.0
    steps(changed, given, count=3)
    written[:] = [2.0, -1.5, 0.5]
    changed.param_groups[0]["lr"] = given.param_groups[0]["lr"] = 0.1
    steps(changed, given)
    assert_alike(changed, given)


@IMPLS
@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("nd", "conv", "nd must be"),
        ("master_weights", "split16", r"master_weights='split16' is for .*, but param_groups\[0\].* is torch.float32"),
        ("ns_coefficients", "sharp", "sharp"),
        ("renormalize", "no", "renormalize must be True or False, got 'no'"),
        ("ns_steps", 5.0, r"steps must be an int from 0 to 99, got 5\.0"),
        ("ns_restarts", (2.0,), r"restarts must be None, 'accurate' or step numbers, got \(2\.0,\)"),
        ("eps", Decimal("1e-7"), "eps must be a number, got Decimal"),
        ("beta2", math.nan, r"beta2 should be None or in \[0, 1\) but is: nan"),
        ("beta2", 1.5, r"beta2 should be None or in \[0, 1\) but is: 1\.5"),
        ("cautious", torch.ones(2), r"cautious must be True or False, got tensor"),
    ],
)
def test_options_that_are_wrong_by_now_are_refused(impl: str, option: str, value: Any, words: str) -> None:
    optimizer, _ = twins(impl, 8, 12)
    steps(optimizer, count=2)
    (p,) = optimizer.param_groups[0]["params"]
    before = p.detach().clone()
    optimizer.param_groups[0][option] = value
    with pytest.raises(ValueError, match=words):
        steps(optimizer)
    assert torch.equal(p, before)


@pytest.mark.parametrize(
    "lr",
    [None, "0.1", torch.ones(12), torch.ones(1).to_sparse(), torch.ones(()).to(torch.float8_e5m2), 10**400],
    ids=["none", "text", "several", "sparse", "8 bits", "too large"],
)
def test_a_learning_rate_that_is_no_number_by_now_leaves_other_groups_alone(lr: Any) -> None:
    p = parameter(8, 12)
    optimizer = muon([{"params": [p]}, {"params": [parameter(4, 6)]}], "torch")
    steps(optimizer)
    before = optimizer.state[p]["momentum_buffer"].clone()
    optimizer.param_groups[1]["lr"] = lr
    words = r"^(lr must be a (number|dense tensor)|Tensor lr must be 1-element|lr is too large)"
    with pytest.raises((TypeError, ValueError, OverflowError), match=words):
        steps(optimizer)
    assert torch.equal(optimizer.state[p]["momentum_buffer"], before)


@pytest.mark.slow
@IMPLS
@pytest.mark.parametrize(
    ("name", "bad"), [("lr", None), ("lr", "0.1"), ("weight_decay", "0"), ("momentum", None), ("beta2", "0.9")]
)
def test_no_plan_moves_where_a_hyperparameter_of_another_is_no_number_by_now(impl: str, name: str, bad: Any) -> None:
    p, q = parameter(8, 12), parameter(8, 12)
    optimizer = muon([{"params": [p]}, {"params": [q], "beta2": 0.9}], impl)
    # what repeats is not looked at as the first step is
    steps(optimizer, count=3)
    before = [p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()]
    optimizer.param_groups[1][name] = bad
    with pytest.raises(TypeError, match=f"^{name} must be a number or a 1-element tensor, got {bad!r}$"):
        steps(optimizer)
    torch.testing.assert_close([p.detach(), optimizer.state[p]["momentum_buffer"]], before, rtol=0, atol=0)


@IMPLS
@pytest.mark.parametrize("name", ["lr", "weight_decay", "momentum", "beta2"])
def test_muon_moves_nothing_where_a_hyperparameter_of_a_group_is_on_meta_by_now(impl: str, name: str) -> None:
    p, q = parameter(8, 12), parameter(8, 12)
    optimizer = muon([{"params": [p]}, {"params": [q], "beta2": 0.9}], impl)
    for count in (1, 2):
        steps(optimizer, count=count)
        before = [p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()]
        kept = optimizer.param_groups[1][name]
        optimizer.param_groups[1][name] = torch.tensor(0.5, device="meta")
        with pytest.raises(ValueError, match=f"^{name} is on meta, and so has no value; give one on {DEVICE}"):
            steps(optimizer)
        torch.testing.assert_close([p.detach(), optimizer.state[p]["momentum_buffer"]], before, rtol=0, atol=0)
        optimizer.param_groups[1][name] = kept


@IMPLS
def test_a_step_that_is_refused_does_not_count(impl: str) -> None:
    p = parameter(8, 12, dtype=torch.bfloat16)
    optimizer = muon([p], impl, stochastic_rounding=True)
    steps(optimizer)
    with pytest.raises((ValueError, NotImplementedError), match="meta"):
        optimizer.step(clip_factor=torch.ones((), device="meta"))
    assert optimizer.state[p]["step"] == 1


def test_a_step_in_plain_torch_draws_the_bits_of_its_number() -> None:
    p = parameter(8, 12, dtype=torch.bfloat16)
    q, buffer = p.detach().clone(), torch.zeros_like(p)
    optimizer = muon([p], "torch", stochastic_rounding=True, seed=7)
    for number in (1, 2):
        steps(optimizer)
        options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "ns": NSConfig(steps=2, dtype=torch.float32)}
        muon_([q], [p.grad], [buffer], stochastic_rounding=True, seed=7, steps=[number], impl="torch", **options)
        assert torch.equal(p, q)


class Unread(torch.Tensor):
    """A number on a device: to ask whether it is zero, say, would wait for it."""

    def __bool__(self) -> bool:
        raise AssertionError("the host has asked")


def test_the_host_does_not_ask_for_beta2() -> None:
    optimizer = muon([parameter(8, 12)], "triton", beta2=0.9)
    optimizer.param_groups[0]["beta2"] = torch.tensor(0.9).as_subclass(Unread)
    steps(optimizer, count=3)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(
    ("name", "bad", "words"),
    [
        ("lr", None, "lr must be a number"),
        ("lr", "0.1", "lr must be a number"),
        ("eps", "1e-8", "eps must be a number"),
        ("betas", None, "betas must be a pair, got None"),
        ("betas", ("0.9", 0.9), r"betas\[0\] must be a number"),
        ("lr", torch.tensor(0.1, device="meta"), "lr is on meta, and so has no value"),
        ("betas", (0.9, torch.tensor(0.9, device="meta")), r"betas\[1\] is on meta, and so has no value"),
    ],
)
def test_muon_does_not_move_where_a_hyperparameter_of_adamw_is_no_number_by_now(
    impl: Any, name: str, bad: Any, words: str
) -> None:
    p, q = parameter(8, 12), parameter(4, 4)
    groups = [{"params": [p], "kind": "muon"}, {"params": [q], "kind": "adamw"}]
    optimizer = TritonMuonAdamW(groups, impl=impl)
    for _ in range(3):
        give_gradients(p, q)
        optimizer.step()
    before = [p.detach().clone(), q.detach().clone()]
    optimizer.param_groups[1][name] = bad
    with pytest.raises((TypeError, ValueError), match=f"^{words}"):
        optimizer.step()
    torch.testing.assert_close([p.detach(), q.detach()], before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_text_is_no_switch(kind: str) -> None:
    groups = [{"params": [parameter(4, 4)], "kind": kind}]
    with pytest.raises(ValueError, match=r"^capturable must be True or False, got 'no'$"):
        TritonMuonAdamW(groups, capturable="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^maximize must be True or False, got 'no'$"):
        TritonMuonAdamW([{**groups[0], "maximize": "no"}])


@IMPLS
def test_a_parameter_follows_the_options_of_the_group_it_moves_to(impl: str) -> None:
    p, q = parameter(8, 12), parameter(4, 6)
    optimizer = muon([{"params": [p]}, {"params": [q], "split_rows": 2}], impl)
    expected = muon([{"params": [nn.Parameter(p.detach().clone())], "split_rows": 2}], impl)
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
    steps(expected)
    p.grad = expected.param_groups[0]["params"][0].grad
    optimizer.step()
    torch.testing.assert_close(p, expected.param_groups[0]["params"][0], atol=1e-6, rtol=0)


@IMPLS
def test_parameters_that_come_to_a_group_and_leave_it(impl: str) -> None:
    p, q = parameter(8, 12), parameter(8, 12)
    optimizer = muon([p], impl)
    params = optimizer.param_groups[0]["params"]
    for change, moving in ((None, [p]), (lambda: params.append(q), [p, q]), (params.pop, [p]), (params.pop, [])):
        if change is not None:
            change()
        for _ in range(3):
            give_gradients(p, q)
            before = [x.detach().clone() for x in (p, q)]
            optimizer.step()
            moved = [x for x, old in zip((p, q), before) if not torch.equal(x, old)]
            assert list(map(id, moved)) == list(map(id, moving))


@IMPLS
@pytest.mark.parametrize(
    "storage",
    [{}, {"stochastic_rounding": True}, {"master_weights": "fp32"}, {"master_weights": "split16"}],
    ids=["plain", "random", "fp32", "split16"],
)
def test_a_matrix_may_move_to_a_group_of_adamw_and_back(impl: str, storage: dict[str, Any]) -> None:
    """What Muon kept of it is none of AdamW's: not its masters, and not its count of steps."""
    p, vector = (nn.Parameter(torch.ones(shape, device=DEVICE).bfloat16()) for shape in ((8, 12), (5,)))
    options: dict[str, Any] = {"kind": "adamw", "lr": 0.05}
    optimizer = TritonMuonAdamW(
        [{"params": [p], "kind": "muon", **storage}, {"params": [vector], **options}], impl=impl
    )
    for seed in range(2):
        give_gradients(p, vector, seed=seed)
        optimizer.step()
    matrices, rest = (group["params"] for group in optimizer.param_groups)
    rest.append(matrices.pop())
    twin = nn.Parameter(p.detach().clone())
    expected = TritonMuonAdamW([{"params": [twin], **options}], impl=impl)
    for seed in range(2, 4):
        give_gradients(p, vector, seed=seed)
        twin.grad = p.grad
        optimizer.step()
        expected.step()
        with torch.no_grad():
            for each in (p, twin):
                each.mul_(2)
    assert torch.equal(p, twin)
    matrices.append(rest.pop())
    optimizer.step()
    assert not torch.equal(p, twin)


@IMPLS
def test_steps_are_counted_whatever_the_default_device_is(impl: str) -> None:
    p = parameter(8, 12, dtype=torch.bfloat16)
    optimizer = muon([p], impl, stochastic_rounding=True)
    give_gradients(p)
    with torch.device("meta"):
        for _ in range(3):
            optimizer.step()
    assert optimizer.state[p]["step"].item() == 3


@pytest.mark.slow
@IMPLS
@pytest.mark.parametrize("is_loaded", [False, True], ids=["exchanged", "loaded"])
@pytest.mark.parametrize(
    "cast", [torch.Tensor.bfloat16, torch.Tensor.double, torch.Tensor.long, int], ids=lambda cast: cast.__name__
)
def test_steps_are_counted_whatever_their_dtype_was(impl: str, cast: Any, is_loaded: bool) -> None:
    """After somebody has cast all that a state holds, say; kernels took the bits for those of an fp32 number."""
    p = parameter(8, 12, dtype=torch.bfloat16)
    twin = copy.deepcopy(p)
    optimizer, expected = (muon([each], impl, stochastic_rounding=True) for each in (p, twin))
    steps(optimizer, expected, count=2)
    if is_loaded:
        saved = optimizer.state_dict()
        saved["state"][0]["step"] = cast(saved["state"][0]["step"])
        optimizer.load_state_dict(saved)
    else:
        optimizer.state[p]["step"] = cast(optimizer.state[p]["step"])
    steps(optimizer, expected, count=2)
    assert optimizer.state[p]["step"].item() == 4
    assert torch.equal(p, twin)


def test_a_plan_refuses_step_counts_that_are_not_fp32() -> None:
    p = parameter(8, 12, dtype=torch.bfloat16)
    tensors = _muon_batch_plan.MuonTensors(
        p.detach(), p.detach(), p.detach().clone(), step=torch.tensor(2, device=DEVICE)
    )
    with pytest.raises(ValueError, match=r"steps\[0\] must be one fp32 number, got torch.int64 of shape \(\)"):
        _muon_batch_plan.MuonBatchPlan(
            [tensors], rule=MuonRule(), ns=NSConfig(), variance=False, stochastic_rounding=True
        )


@IMPLS
def test_storage_formats_may_change_between_steps(impl: str) -> None:
    p = parameter(8, 12, dtype=torch.bfloat16)
    optimizer = muon([p], impl, master_weights="fp32")
    (group,) = optimizer.param_groups
    kept = []
    for masters, dtype in (("fp32", None), ("split16", torch.float32), (None, torch.bfloat16), ("fp32", None)):
        group["master_weights"], group["momentum_dtype"] = masters, dtype
        steps(optimizer, count=2)
        kept.append({key: value.dtype for key, value in optimizer.state[p].items()})
    assert kept == [
        {"momentum_buffer": torch.bfloat16, "master": torch.float32},
        {"momentum_buffer": torch.float32, "master_low": torch.int16},
        {"momentum_buffer": torch.bfloat16},
        {"momentum_buffer": torch.bfloat16, "master": torch.float32},
    ]


@IMPLS
def test_a_second_moment_of_other_matrices_is_refused(impl: str) -> None:
    optimizer = muon([parameter(8, 16)], impl, beta2=0.9)
    steps(optimizer)
    optimizer.param_groups[0]["split_rows"] = 4
    with pytest.raises(ValueError, match=r"second_momentum_buffer of param_groups\[0\].* has 16 .* need 32"):
        steps(optimizer)


def test_what_one_plan_refuses_leaves_all_as_they_were() -> None:
    p, q = parameter(8, 12), parameter(8, 12)
    optimizer = muon([{"params": [p]}, {"params": [q], "beta2": 0.9}], "triton")
    steps(optimizer)
    state = optimizer.state[q]
    state["second_momentum_buffer"] = state["second_momentum_buffer"].bfloat16()
    before = [p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()]
    with pytest.raises(ValueError, match="second_moment"):
        steps(optimizer)
    torch.testing.assert_close([p.detach(), optimizer.state[p]["momentum_buffer"]], before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "option", "value", "words"),
    [
        ("muon", "impl", "gpu", "impl must be one of"),
        ("muon", "max_norm", -1.0, "max_norm must be positive or None, got -1"),
        ("muon", "max_norm", 2.0, "max_norm is 2.0 in the first group, but None"),
        ("adamw", "impl", "gpu", "impl must be one of"),
        ("adamw", "max_norm", 2.0, "max_norm is None in the first group, but 2.0"),
        ("adamw", "amsgrad", True, "TritonMuonAdamW has no such option"),
    ],
)
def test_options_of_both_kinds_that_are_wrong_by_now_are_refused(
    kind: str, option: str, value: Any, words: str
) -> None:
    params = parameter(8, 12), parameter(4, 4)
    optimizer = TritonMuonAdamW([{"params": [p], "kind": kind} for p, kind in zip(params, ("muon", "adamw"))])
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    next(group for group in optimizer.param_groups if group["kind"] == kind)[option] = value
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    for p, expected in zip(params, before, strict=True):
        assert torch.equal(p, expected)


@IMPLS
def test_second_moments_are_loaded_in_the_dtype_of_the_arithmetic(impl: str) -> None:
    """nanochat keeps them in the parameter's."""
    p = parameter(8, 12, dtype=torch.bfloat16)
    optimizer = muon([p], impl, beta2=0.9)
    steps(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["second_momentum_buffer"] = saved["state"][0]["second_momentum_buffer"].bfloat16()
    optimizer.load_state_dict(saved)
    assert optimizer.state[p]["second_momentum_buffer"].dtype == torch.float32
    steps(optimizer)


@IMPLS
def test_a_step_is_seen_by_autograd(impl: str) -> None:
    p = parameter(8, 12)
    optimizer = muon([p], impl)
    for _ in range(3):
        before = p._version
        steps(optimizer)
        assert p._version > before


@IMPLS
@pytest.mark.parametrize("options", [{}, {"split_rows": 4}], ids=["whole", "in blocks of rows"])
def test_empty_matrices_beside_others(impl: str, options: dict[str, Any]) -> None:
    p, q = parameter(8, 12), parameter(0, 12)
    alone, beside = muon([p], impl, **options), muon([q, nn.Parameter(p.detach().clone())], impl, **options)
    for _ in range(3):
        steps(alone)
        beside.param_groups[0]["params"][1].grad = p.grad
        give_gradients(q)
        beside.step()
    assert torch.equal(beside.param_groups[0]["params"][1], p)


@pytest.mark.slow
@IMPLS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{"beta2": 0.9}, {}], ids=["variance", "plain"])
def test_steps_that_round_nothing_at_random_are_counted(impl: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Of fp32 parameters, and from a step on of masters: the kernels' counts had stayed."""
    p = parameter(16, 24, dtype=dtype)
    optimizer = muon([p], impl, stochastic_rounding=True, **options)
    steps(optimizer, count=2)
    if dtype == torch.bfloat16:
        optimizer.param_groups[0]["master_weights"] = "fp32"
    steps(optimizer, count=3)
    assert optimizer.state[p]["step"].item() == 5
    optimizer.found_inf = torch.ones((), device=DEVICE)
    steps(optimizer)
    assert optimizer.state[p]["step"].item() == 5


@IMPLS
@pytest.mark.parametrize("shape", [(0, 12), (12, 0), (3, 0, 4)], ids=str)
def test_second_moments_of_empty_matrices_stay_zero(impl: str, shape: tuple[int, ...]) -> None:
    """They were NaN in plain torch."""
    p, q = parameter(8, 12), parameter(*shape)
    optimizer = muon([p, q], impl, beta2=0.9, renormalize=True, row_equilibrate=True)
    steps(optimizer, count=2)
    moment = optimizer.state[q]["second_momentum_buffer"]
    assert moment.numel() == 12
    assert torch.equal(moment, torch.zeros_like(moment))


def test_matrices_of_which_a_rank_has_a_part_are_refused() -> None:
    run_ranks(_sharded, 2, backend="gloo")


def _sharded(rank: int, world_size: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,))
    value, grad = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0))
    plain = nn.Parameter(value.clone())
    whole, part = (nn.Parameter(distribute_tensor(value.clone(), mesh, [place])) for place in (Replicate(), Shard(0)))
    plain.grad = grad
    for p, place in ((whole, Replicate()), (part, Shard(0))):
        p.grad = distribute_tensor(grad, mesh, [place])
    for p in (plain, whole):
        muon([p], "torch").step()
    assert torch.equal(whole.full_tensor(), plain)
    with pytest.raises(RuntimeError, match=r"is a DTensor of shape \(8, 12\) of which this rank holds \(4, 12\); Muon"):
        muon([part], "torch").step()
    assert torch.equal(part.full_tensor(), value)


def test_plans_of_former_options_go() -> None:
    p = parameter(8, 12)
    optimizer = muon([p], "triton")
    for count in (5, 4, 3):
        optimizer.param_groups[0]["ns_steps"] = count
        steps(optimizer)
    other = muon([parameter(8, 12)], "triton", ns_steps=2)
    steps(other)
    optimizer.load_state_dict(other.state_dict())
    steps(optimizer)
    (plan,) = optimizer.plans()
    assert len(optimizer._planner._plans) == 1
    assert not optimizer._planner._captured
    assert f"\n{plan.launches} launches a step" in optimizer.explain()


@pytest.mark.parametrize(
    "leave",
    [lambda groups: groups[0]["params"].pop(), lambda groups: groups.pop(), lambda groups: groups.clear()],
    ids=["group", "optimizer", "nothing"],
)
def test_parameters_that_left_are_not_kept(leave: Any) -> None:
    """Nor is the memory of their plan, although no other takes its place: they were the only ones of their dtype."""
    optimizer = muon([parameter(8, 12), parameter(8, 12, dtype=torch.bfloat16)], "triton")
    optimizer.add_param_group({"params": [parameter(8, 12, dtype=torch.float16)]})
    steps(optimizer)
    before = {p for group in optimizer.param_groups for p in group["params"]}
    leave(optimizer.param_groups)
    after = {p for group in optimizer.param_groups for p in group["params"]}
    for p in before - after:
        del optimizer.state[p]
    gone = list(map(weakref.ref, before - after))
    del p, before
    steps(optimizer)
    gc.collect()
    assert len(gone) in (1, 3)
    assert not any(param() is not None for param in gone)
    assert len(optimizer._planner._plans) == len(after)


def test_plans_that_graphs_read_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their replays read the tables, whatever later steps do; and steps that come back take them again."""
    params = [parameter(8, 12), parameter(8, 12)]
    optimizer = muon(params, "triton")
    with monkeypatch.context() as capture:
        capture.setattr(_muon_batch_plan, "is_capturing", lambda _: True)
        steps(optimizer)
    plans = [weakref.ref(plan) for plan in optimizer.plans()]
    group = optimizer.param_groups[0]

    def other_gradients() -> None:
        params[0].grad = None
        optimizer.step()

    def other_options() -> None:
        group["ns_steps"] = 3
        steps(optimizer)

    def another_group() -> None:
        optimizer.add_param_group({"params": [parameter(8, 12)]})
        steps(optimizer)

    for change in (other_gradients, other_options, another_group):
        options = dict(group)
        change()
        gc.collect()
        assert all(plan() not in (None, *optimizer.plans()) for plan in plans)
        group.update(options)
        for added in optimizer.param_groups[1:]:
            for p in added["params"]:
                p.grad = None
        give_gradients(*params)
        optimizer.step()
        assert [plan() for plan in plans] == optimizer.plans()
    # each of them once
    assert [plan() for plan in plans] == list(chain(*optimizer._planner._captured.values()))


def test_explain_says_why_it_is_plain_torch() -> None:
    p, q = parameter(8, 12), parameter(8, 12)
    optimizer = muon([p], "triton")
    optimizer.param_groups[0]["params"][0] = q
    assert "triton" in optimizer.explain()
    steps(optimizer)
    optimizer.state[q]["momentum_buffer"] = optimizer.state[q]["momentum_buffer"].double()
    row = optimizer.explain().split("\n")[2]
    assert "torch" in row
    assert "its momentum's dtype is torch.float64" in row
    on_cpu = TritonMuon([nn.Parameter(torch.ones(4, 4))])
    assert "it is on cpu" in on_cpu.explain()


def test_a_group_that_is_refused_is_not_added() -> None:
    optimizer = TritonMuon([parameter(4, 6)])
    with pytest.raises(TypeError):
        optimizer.add_param_group({"params": [parameter(4, 6)], "momentum": "0.9"})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(TypeError, match=r"the view of .* must be a MatrixView or None, got \(2, 2\)"):
        TritonMuon([{"params": [parameter(4, 6)], "views": [(2, 2)]}])
    for options, words in (
        ({"variant": "nanochat-2020"}, "unknown variant 'nanochat-2020'; choose one of"),
        ({"views": []}, "views has 0 entries for 1 parameters"),
        ({"views": [MatrixView.identity((6, 4))]}, r"the view of .* is of shape \(6, 4\), the parameter is \(4, 6\)"),
        ({"views": [MatrixView.identity((4, 6))], "split_rows": 2}, "has both a view and split_rows=2"),
    ):
        with pytest.raises(ValueError, match=words):
            TritonMuon([{"params": [parameter(4, 6)], **options}])


@IMPLS
def test_no_newton_schulz_step(impl: str) -> None:
    """Normalised momentum; torch.optim.Muon allows it too."""
    p = parameter(8, 12)
    before = p.detach().clone()
    optimizer = muon([p], impl, ns_steps=0, weight_decay=0.0)
    steps(optimizer)
    assert p.grad is not None
    torch.testing.assert_close(p.detach(), before - 0.1 * p.grad / p.grad.norm(), atol=1e-6, rtol=0)


def test_a_state_is_not_made_while_a_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, vector = parameter(8, 12), parameter(4)
    for module in ("muon_entries", "adamw_base"):
        monkeypatch.setattr(f"optim_kernels._optimizers.{module}.is_capturing", lambda device: True)
    optimizer = muon([matrix], "torch", capturable=True)
    both = TritonMuonAdamW([{"kind": "adamw", "params": [vector]}], capturable=True)
    for each, p in ((optimizer, matrix), (both, vector)):
        p.grad = torch.randn_like(p)
        with pytest.raises(RuntimeError, match=r"param_groups\[0\].* has no state yet"):
            each.step()


@IMPLS
def test_a_parameter_that_is_unfrozen_without_a_gradient(impl: str) -> None:
    """After steps without it, all alike, its group says again what a missing gradient means."""
    p, q = parameter(6, 4), parameter(6, 4)
    optimizer = muon([p, q], impl, missing_grad="zero")
    steps(optimizer)
    q.requires_grad_(False)
    q.grad = None
    for _ in range(3):
        optimizer.step()
    kept, buffer = q.detach().clone(), optimizer.state[q]["momentum_buffer"].clone()
    q.requires_grad_(True)
    optimizer.step()
    assert not torch.equal(q, kept)
    torch.testing.assert_close(optimizer.state[q]["momentum_buffer"], 0.95 * buffer)
    q.requires_grad_(False)
    optimizer.param_groups[0]["missing_grad"] = "raise"
    for _ in range(3):
        optimizer.step()
    q.requires_grad_(True)
    with pytest.raises(RuntimeError, match="has no gradient; pass missing_grad='skip' or 'zero'"):
        optimizer.step()
