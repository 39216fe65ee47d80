"""What a step of TritonAdamW refuses, by name and before anything moves, and where it has nothing to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fresh_params import make_params, renew_gradients
from random_tensors import DEVICE

from optim_kernels import TritonAdamW, TritonMuonAdamW


def test_a_limit_that_becomes_negative_in_place_is_refused() -> None:
    limit = torch.tensor(1.0)
    optimizer = TritonAdamW(make_params(), impl="triton", max_norm=limit)
    optimizer.step()
    optimizer.step()
    limit.neg_()
    with pytest.raises(ValueError, match="max_norm must be positive"):
        optimizer.step()


def test_a_number_beyond_fp64_is_refused_each_time() -> None:
    """Not only at first, with the numbers before taken in its place from then on."""
    (p,) = make_params([(5,)])
    optimizer = TritonAdamW([p], impl="triton")
    optimizer.step()
    before = p.detach().clone()
    optimizer.param_groups[0]["lr"] = 10**400
    for _ in range(2):
        with pytest.raises(OverflowError, match="too large"):
            optimizer.step()
    assert torch.equal(p, before)


def test_a_gradient_that_was_resized_is_refused() -> None:
    params = make_params()
    optimizer = TritonAdamW(params, impl="triton")
    optimizer.step()
    assert params[2].grad is not None
    params[2].grad.resize_(32)
    before = params[2].detach().clone()
    with pytest.raises(ValueError, match=r"grad of .*'params'\]\[2\] must be like"):
        optimizer.step()
    assert torch.equal(params[2], before)


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_gradient_without_memory_is_refused(max_norm: float | None) -> None:
    """As where a framework frees storages and keeps the tensors."""
    params = make_params()
    optimizer = TritonAdamW(params, impl="triton", max_norm=max_norm)
    optimizer.step()
    assert params[1].grad is not None
    params[1].grad.untyped_storage().resize_(0)
    before = [p.detach().clone() for p in params]
    wanted = r"grad of .*\[1\]" if max_norm is None else "gradient 1 "
    with pytest.raises(ValueError, match=f"{wanted}.*its storage was freed"):
        optimizer.step()
    assert all(map(torch.equal, params, before))
    params[1].grad = torch.randn_like(params[1])
    optimizer.step()
    assert not torch.equal(params[1], before[1])
    assert [int(optimizer.state[p]["step"]) for p in params] == [2] * 3


def test_a_parameter_without_memory_is_refused() -> None:
    params = make_params()
    optimizer = TritonAdamW(params, impl="triton")
    optimizer.step()
    params[2].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"'params'\]\[2\].*its storage was freed"):
        optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [1] * 3


def test_a_state_is_not_made_while_a_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay would make it anew."""
    params = make_params()
    optimizer = TritonAdamW([("first", params[0]), ("second", params[1])], impl="triton", capturable=True)
    params[1].grad = None
    optimizer.step()
    params[1].grad = torch.ones_like(params[1])
    monkeypatch.setattr("optim_kernels._optimizers.adamw_base.is_capturing", lambda device: True)
    before = params[0].detach().clone()
    with pytest.raises(RuntimeError, match=r"second has no state yet.*run a step before"):
        optimizer.step()
    assert torch.equal(params[0], before)
    assert not optimizer.state.get(params[1])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are:UserWarning")
def test_a_gradient_that_became_sparse_is_named() -> None:
    table = torch.nn.Parameter(torch.zeros(3, 2, device=DEVICE))
    optimizer = TritonAdamW([("table", table)], impl="triton")
    table.grad = torch.ones_like(table)
    optimizer.step()
    indices = torch.tensor([[1]], device=DEVICE)
    table.grad = torch.sparse_coo_tensor(indices, torch.ones(1, 2, device=DEVICE), (3, 2), check_invariants=True)
    with pytest.raises(RuntimeError, match=r"table.*sparse"):
        optimizer.step()


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_without_groups_nothing_happens_until_there_are_some(max_norm: float | None) -> None:
    params = make_params()
    optimizer = TritonAdamW(params, max_norm=max_norm, impl="triton")
    optimizer.step()
    before = [param.detach().clone() for param in params]
    groups, optimizer.param_groups = optimizer.param_groups, []
    optimizer.step()
    assert "0 launches" in optimizer.explain()
    assert all(map(torch.equal, params, before))
    optimizer.param_groups = groups
    optimizer.step()
    assert not any(map(torch.equal, params, before))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_without_gradients_nothing_happens(impl: Any) -> None:
    params = make_params()
    optimizer = TritonAdamW(params, max_norm=1.0, impl=impl)
    optimizer.zero_grad()
    optimizer.step()
    assert not optimizer.state
    assert optimizer.grad_norm is not None
    assert float(optimizer.grad_norm) == 0


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters:UserWarning")
def test_a_parameter_that_is_there_twice_is_refused_by_the_kernels() -> None:
    (p,) = make_params(((6, 5),))
    with pytest.raises(ValueError, match=r"\['params'\]\[1\] is there twice, .* update twice at once"):
        TritonAdamW([p, p], impl="triton").step()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters:UserWarning")
@pytest.mark.parametrize("kind", ["torch's code", "formats", "with muon"])
def test_a_parameter_that_is_there_twice_is_updated_twice_in_plain_torch(kind: str) -> None:
    p, other = make_params(((6, 5), (3,)))
    expected = torch.nn.Parameter(p.detach().clone())
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer: torch.optim.Optimizer
    if kind == "with muon":
        group = {"kind": "adamw", "params": [p, other, p], **options}
        optimizer = TritonMuonAdamW([group], impl="torch")
    else:
        formats: dict[str, Any] = {"state_dtype": (torch.float64, None)} if kind == "formats" else {}
        optimizer = TritonAdamW([p, other, p], impl="torch", **options, **formats)
    # one parameter after the other, which torch's foreach code, its choice on a GPU, does not do
    by_torch = torch.optim.AdamW([expected, expected], foreach=False, **options)
    for _ in range(3):
        renew_gradients([p])
        assert p.grad is not None
        expected.grad = p.grad.clone()
        optimizer.step()
        by_torch.step()
    torch.testing.assert_close(p, expected, atol=1e-6, rtol=0)
    assert [optimizer.state[param]["step"].item() for param in (p, other)] == [6, 3]


@pytest.mark.parametrize("rows", [slice(0, 6), slice(5, 8)], ids=["tied", "overlapping"])
def test_parameters_that_share_memory_are_refused_by_the_kernels(rows: slice) -> None:
    memory = torch.ones(8, 5, device=DEVICE)
    p, q = torch.nn.Parameter(memory[:6]), torch.nn.Parameter(memory[rows])
    for each in (p, q):
        each.grad = torch.ones_like(each)
    how = "are one tensor" if rows.start == 0 else "share memory"
    without_gradient = torch.nn.Parameter(torch.ones(3, device=DEVICE))
    named = [("first", without_gradient), ("one", p), ("other", q)]
    with pytest.raises(ValueError, match=rf"one and other {how}, .* update twice at once"):
        TritonAdamW(named, impl="triton").step()
    assert torch.equal(memory, torch.ones_like(memory))
