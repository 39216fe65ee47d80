"""Tensors of a Muon step that are turned, cut or exchanged, of other classes, with gaps, shared or without memory."""

from __future__ import annotations

import copy

import pytest
import torch
from muon_twins import IMPLS, assert_alike, muon, parameter, steps, twins
from random_tensors import DEVICE, give_gradients
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from optim_kernels import TritonMuon
from optim_kernels.functional import muon_
from optim_kernels.muon_groups import MuonEntry, MuonPlanner
from optim_utils.param_groups import MatrixView

pytest.importorskip("triton")


class OwnParameter(nn.Parameter):
    """A parameter of a library's own class."""


KINDS = pytest.mark.parametrize("kind", [nn.Parameter, OwnParameter])


@IMPLS
@pytest.mark.parametrize("key", ["momentum_buffer", "second_momentum_buffer"])
def test_the_data_of_a_state_may_be_replaced(impl: str, key: str) -> None:
    """As code does that moves states to the host between steps and back."""
    changed, left = twins(impl, 8, 12)
    for optimizer in (changed, left):
        optimizer.param_groups[0]["beta2"] = 0.9
    steps(changed, left, count=3)
    (state,) = changed.state.values()
    before, state[key].data = state[key].data, state[key].data.clone()
    old = before.clone()
    steps(changed, left)
    assert torch.equal(before, old)
    assert_alike(changed, left)


@IMPLS
@KINDS
def test_a_state_may_be_exchanged(impl: str, kind: type[nn.Parameter]) -> None:
    changed, written = (muon([kind(p)], impl) for p in torch.randn(8, 12, device=DEVICE).expand(2, 8, 12).clone())
    steps(changed, written, count=3)
    (ours,), (theirs,) = changed.state.values(), written.state.values()
    ours["momentum_buffer"] = torch.ones_like(ours["momentum_buffer"])
    theirs["momentum_buffer"].fill_(1.0)
    steps(changed, written)
    assert_alike(changed, written)


@IMPLS
@pytest.mark.parametrize("exchange", [False, True], ids=["turned", "exchanged"])
def test_a_state_may_become_a_view_of_itself(impl: str, exchange: bool) -> None:
    """At the address that it had, while the parameter stays as it is."""
    changed, written = twins(impl, 8, 8)
    steps(changed, written, count=3)
    (ours,), (theirs,) = changed.state.values(), written.state.values()
    theirs["momentum_buffer"].copy_(theirs["momentum_buffer"].t().clone())
    if exchange:
        ours["momentum_buffer"] = ours["momentum_buffer"].t()
    else:
        ours["momentum_buffer"].data = ours["momentum_buffer"].data.t()
    steps(changed, written)
    assert_alike(changed, written)


@IMPLS
def test_a_momentum_of_another_dtype_may_take_its_address(impl: str) -> None:
    """As memory does that is given back and asked for again."""
    changed, moved = twins(impl, 8, 12)
    steps(changed, moved, count=3)
    (ours,), (theirs,) = changed.state.values(), moved.state.values()
    narrow = theirs["momentum_buffer"].bfloat16()
    place = ours["momentum_buffer"].data.view(torch.bfloat16).flatten()[: narrow.numel()].view_as(narrow)
    ours["momentum_buffer"].data, theirs["momentum_buffer"].data = place.copy_(narrow), narrow
    steps(changed, moved)
    assert_alike(changed, moved)


def test_a_tensor_of_another_kind_may_take_the_address_of_a_state() -> None:
    """As plans keep no state, its memory may be given to another; it is checked as any that has not been stepped."""
    p, taken = parameter(8, 12, dtype=torch.bfloat16), torch.zeros(10, 12, device=DEVICE)
    give_gradients(p)
    (group,) = muon([p], "triton", stochastic_rounding=True).param_groups
    state = {"momentum_buffer": taken[:8], "step": torch.zeros((), device=DEVICE)}
    assert p.grad is not None
    entry, planner = MuonEntry(p.detach(), p.grad, state, MatrixView.identity(p.shape), 0, "weight"), MuonPlanner()
    planner.step([(group, [entry])])
    for key, other, words in (
        ("momentum_buffer", taken, r"momentum_buffers\[0\] must have the shape of .* \(8, 12\), got \(10, 12\)"),
        ("step", state["step"].view(torch.int32), r"step of weight must be one fp32 number, got torch.int32"),
    ):
        former, state[key] = state[key], other
        with pytest.raises(ValueError, match=words):
            planner.step([(group, [entry])])
        state[key] = former
    planner.step([(group, [entry])])
    assert state["step"] == 2


@IMPLS
def test_a_parameter_may_be_transposed_where_it_is(impl: str) -> None:
    changed, moved = twins(impl, 8, 8)
    steps(changed, moved, count=3)
    p, q = (optimizer.param_groups[0]["params"][0] for optimizer in (changed, moved))
    p.data, q.data = p.data.t(), q.data.t().contiguous()
    p.grad, q.grad = torch.ones(2, 8, 8, device=DEVICE).tril()
    changed.step()
    moved.step()
    assert_alike(changed, moved)


@IMPLS
def test_a_parameter_may_be_transposed_with_its_momentum(impl: str) -> None:
    """Addresses and shapes stay, and rows become columns."""
    start = parameter(8, 8).detach()
    changed, moved = (muon([nn.Parameter(start.clone())], impl, row_equilibrate=True) for _ in range(2))
    steps(changed, moved, count=3)
    for optimizer in (changed, moved):
        ((p, state),) = optimizer.state.items()
        p.grad = None
        for tensor in (p, state["momentum_buffer"]):
            tensor.data = tensor.data.t() if optimizer is changed else tensor.data.t().contiguous()
    steps(changed, moved)
    assert_alike(changed, moved)


@IMPLS
def test_a_parameter_may_be_cut_where_it_is(impl: str) -> None:
    """What lay behind it had been written, and memory behind the gradient read."""
    changed, moved = twins(impl, 8, 6)
    steps(changed, moved, count=3)
    before = changed.param_groups[0]["params"][0].data
    for optimizer in (changed, moved):
        ((p, state),) = optimizer.state.items()
        p.grad = None
        for tensor in (p, state["momentum_buffer"]):
            tensor.data = tensor.data[:4] if optimizer is changed else tensor.data[:4].clone()
    rest = before[4:].clone()
    steps(changed, moved)
    assert torch.equal(before[4:], rest)
    assert_alike(changed, moved)


@IMPLS
def test_random_rounding_of_parameters_with_gaps(impl: str) -> None:
    p = nn.Parameter(torch.randn(8, 12, device=DEVICE).bfloat16()[:, :6])
    optimizer = muon([p], impl, stochastic_rounding=True)
    before = p.detach().clone()
    steps(optimizer)
    assert not torch.equal(p, before)


@IMPLS
@KINDS
def test_gradients_in_another_layout_than_their_parameter(impl: str, kind: type[nn.Parameter]) -> None:
    """Of parameters of other classes than torch's they were refused in the middle of a step."""
    p = kind(parameter(8, 3, 3, 3).detach())
    q = nn.Parameter(p.detach().clone())
    ours, theirs = (muon([x], how, nd="flatten") for x, how in ((p, impl), (q, "torch")))
    for _ in range(3):
        q.grad = torch.randn_like(q)
        p.grad = q.grad.to(memory_format=torch.channels_last)
        ours.step()
        theirs.step()
    torch.testing.assert_close(p, q, atol=1e-6, rtol=0)
    assert ours.state[p]["momentum_buffer"].stride() == p.stride()
    assert impl in ours.explain().split("\n")[2]
    assert len(ours.plans()) == (1 if impl == "triton" else 0)
    saved = ours.state_dict()
    saved["state"][0]["momentum_buffer"] = saved["state"][0]["momentum_buffer"].to(memory_format=torch.channels_last)
    ours.load_state_dict(saved)
    assert ours.state[p]["momentum_buffer"].stride() == p.stride()


@IMPLS
@pytest.mark.parametrize("is_turned", [False, True], ids=["rows", "columns"])
def test_layouts_of_gradients_may_change_between_steps(impl: str, is_turned: bool) -> None:
    p = nn.Parameter(parameter(12, 8).detach().t()) if is_turned else parameter(8, 12)
    q = nn.Parameter(p.detach().clone())
    ours, theirs = muon([p], impl), muon([q], "torch")
    for turned in (True, True, True, False, False, False, True):
        q.grad = torch.randn(8, 12, device=DEVICE)
        p.grad = q.grad.t().contiguous().t() if turned else q.grad.clone()
        ours.step()
        theirs.step()
        torch.testing.assert_close(p, q, atol=1e-5, rtol=0)


@KINDS
def test_parameters_whose_layout_allows_no_view_are_named(kind: type[nn.Parameter]) -> None:
    conv = nn.Conv2d(3, 8, 3)
    conv.weight = kind(conv.weight.detach())
    optimizer = TritonMuon.keller([("conv", conv.weight)])
    conv.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"conv cannot be read as matrices: .*route_parameters"):
        TritonMuon.keller([("conv", conv.weight)])
    conv.weight.grad = torch.randn_like(conv.weight)
    with pytest.raises(ValueError, match="conv cannot be read as matrices"):
        optimizer.step()


class ComputedParameter(torch.Tensor):
    """A parameter of a class of tensors, which torch's functions return too."""


@IMPLS
def test_momenta_of_other_classes_of_tensors_are_plain_tensors(impl: str) -> None:
    p = nn.Parameter(torch.randn(8, 12, device=DEVICE).as_subclass(ComputedParameter))
    q = nn.Parameter(p.detach().as_subclass(torch.Tensor).clone())
    ours, plain = muon([p], impl), muon([q], impl)
    for turned in (False, True):
        p.grad = torch.randn(8, 12, device=DEVICE)
        q.grad = p.grad.clone()
        ours.step()
        plain.step()
        saved = copy.deepcopy(ours.state_dict())
        if turned:
            saved["state"][0]["momentum_buffer"] = saved["state"][0]["momentum_buffer"].t().contiguous().t()
        ours.load_state_dict(saved)
        assert type(ours.state[p]["momentum_buffer"]) is torch.Tensor
    assert torch.equal(p, q)


def test_second_moments_with_gaps_move() -> None:
    """A copy had moved instead."""
    p, grad = torch.randn(3, 8, 4), torch.randn(3, 8, 4)
    moment, expected = torch.zeros(3, 9, 2)[:, :8, :1], torch.zeros(3, 8, 1)
    for v in (moment, expected):
        muon_([p.clone()], [grad], [torch.zeros_like(p)], lr=0.1, second_moments=[v], beta2=0.9)
    assert moment.abs().sum() > 0
    assert torch.equal(moment, expected)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters:UserWarning")
def test_parameters_that_share_memory_are_refused_by_the_kernels() -> None:
    memory = torch.ones(12, 16, device=DEVICE)
    p, q, r = (nn.Parameter(part) for part in (memory[:8], memory[:8], memory[4:]))
    give_gradients(p, q, r)
    for params, how in (([p, p], "is there twice"), ([p, q], "are one tensor"), ([r, p], "share memory")):
        with pytest.raises(ValueError, match=rf"'params'\]\[1\] {how}, .* update twice at once"):
            muon(params, "triton").step()
    assert torch.equal(memory, torch.ones_like(memory))
    # columns of one matrix lie between each other
    p, q = nn.Parameter(memory[:, :8]), nn.Parameter(memory[:, 8:])
    give_gradients(p, q)
    muon([p, q], "triton").step()
    assert not (memory == 1.0).any()


@pytest.mark.parametrize("num_steps", [0, 2])
def test_tensors_without_memory_are_refused_by_the_kernels(num_steps: int) -> None:
    p = parameter(8, 12)
    optimizer = muon([p], "triton")
    steps(optimizer, count=num_steps)
    give_gradients(p)
    assert p.grad is not None
    p.grad.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"grad of .*\[0\] has elements but no memory: its storage was freed"):
        optimizer.step()
    give_gradients(p)
    p.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"\[0\] has elements but no memory: its storage was freed"):
        optimizer.step()


def test_what_a_later_plan_refuses_has_moved_no_other() -> None:
    params = [parameter(8, 12), nn.Parameter(parameter(8, 12).detach().bfloat16())]
    optimizer = muon(params, "triton")
    steps(optimizer, count=2)
    assert len(optimizer.plans()) == 2
    give_gradients(*params)
    before = [p.detach().clone() for p in params]
    assert params[1].grad is not None
    params[1].grad.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="has elements but no memory"):
        optimizer.step()
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("num_steps", [0, 2])
def test_gradients_that_are_made_of_others_are_left_to_torch(num_steps: int) -> None:
    """They have no memory of their own; what a functional collective gives is such, until torch has waited for it."""
    optimizer, plain = twins("triton", 8, 12)
    steps(optimizer, plain, count=num_steps)
    (p,), (q,) = (each.param_groups[0]["params"] for each in (optimizer, plain))
    give_gradients(p, q)
    q.grad = p.grad.clone()
    p.grad = AsyncCollectiveTensor(p.grad.clone())
    for each in (optimizer, plain):
        each.step()
    assert_alike(optimizer, plain)
    steps(optimizer, plain)
    assert_alike(optimizer, plain)
