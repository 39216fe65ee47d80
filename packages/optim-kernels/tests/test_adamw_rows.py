"""What AdamW's kernels read of a group's hyperparameters: the host's rows, and memos that one step leaves for the next.

Rows are rounded as fp32 arithmetic would round.
"""

from __future__ import annotations

from decimal import Decimal
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from fresh_params import make_params
from hypothesis import given, settings
from hypothesis import strategies as st
from random_tensors import DEVICE
from torch import Tensor

from optim_kernels import TritonAdamW
from optim_kernels.functional import AdamWPlan, _adamw_launch, _adamw_scalars, _device_scalars, adamw_
from optim_kernels.functional._adamw_scalars import ROW_SIZE, hyperparameter_rows, without_rates, write_betas
from optim_kernels.reference.adamw import AdamWScalars

pytest.importorskip("triton")
from optim_kernels._kernels import adamw_update

BETA = st.floats(0.0, 1.0, exclude_max=True)
GROUP = st.builds(
    AdamWScalars,
    lr=st.floats(0.0, 10.0),
    beta1=BETA,
    beta2=BETA,
    eps=st.floats(0.0, 1.0),
    weight_decay=st.floats(0.0, 1.0),
    maximize=st.booleans(),
)
PLACE = {name: place for place, name in enumerate(adamw_update.ROW)}


def test_the_kernels_rows_are_the_hosts() -> None:
    assert len(adamw_update.ROW) == ROW_SIZE
    places = (_adamw_scalars._BETA, _adamw_scalars._RATES, _adamw_scalars._BETAS, _adamw_scalars._PARTS)
    assert places == tuple(PLACE[name] for name in ("beta1", "rates", "betas", "parts"))


@settings(deadline=None)
@given(st.lists(GROUP, min_size=1, max_size=3))
def test_numbers_are_rounded_once(groups: list[AdamWScalars]) -> None:
    rows = np.frombuffer(hyperparameter_rows(groups), np.int64).reshape(-1, ROW_SIZE)
    for row, group in zip(rows, groups, strict=True):
        assert row[PLACE["lr_address"]] == 0
        doubles, (rates, betas, parts, eps) = (
            row.view(np.float64),
            row.view(np.float32).reshape(-1, 2)[PLACE["rates"] :],
        )
        assert doubles[PLACE["beta1"]] == group.beta1
        assert doubles[PLACE["beta2"]] == group.beta2
        assert doubles[PLACE["weight_decay"]] == group.weight_decay
        for name, beta in (("log2_beta1", group.beta1), ("log2_beta2", group.beta2)):
            assert 2 ** doubles[PLACE[name]] == pytest.approx(beta, rel=1e-12)
        sign = np.float32(-1 if group.maximize else 1)
        assert rates.tolist() == [np.float32(group.lr), np.float32(group.lr * group.weight_decay)]
        assert betas.tolist() == [np.float32(group.beta1), np.float32(group.beta2)]
        assert parts.tolist() == [sign * np.float32(1 - group.beta1), sign * np.sqrt(np.float32(1 - group.beta2))]
        assert eps.tolist() == [np.float32(group.eps), 0]
    rates, others = without_rates(rows.tobytes())
    assert list(rates) == rows[:, PLACE["rates"]].tolist()
    rows = rows.copy()
    rows[:, PLACE["rates"]] = 0
    assert others == rows.tobytes()


@pytest.mark.parametrize(
    "as_given",
    [
        np.float16,
        np.float32,
        Decimal,
        *(partial(torch.tensor, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)),
    ],
    ids=["numpy fp16", "numpy fp32", "decimal", "bf16", "fp32"],
)
def test_a_decay_of_any_dtype_is_multiplied_in_fp64(as_given: Any) -> None:
    """Neither these numbers nor their product are numbers of those dtypes."""
    group = AdamWScalars(lr=0.3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=as_given(0.37))
    expected = group._replace(weight_decay=float(group.weight_decay))
    assert hyperparameter_rows([group]) == hyperparameter_rows([expected])


@settings(deadline=None)
@given(st.lists(GROUP, min_size=1, max_size=3), st.data())
def test_betas_on_a_device_give_the_same_rows(groups: list[AdamWScalars], data: st.DataObject) -> None:
    expected = torch.frombuffer(bytearray(hyperparameter_rows(groups)), dtype=torch.int64)

    def moved(group: AdamWScalars) -> AdamWScalars:
        names = data.draw(st.sets(st.sampled_from(["beta1", "beta2"])))
        return group._replace(**{name: torch.tensor(getattr(group, name), dtype=torch.float64) for name in names})

    groups = [moved(group) for group in groups]
    with pytest.MonkeyPatch.context() as patch:
        # what is here a tensor of the host stands for one of a device
        patch.setattr(_adamw_scalars, "on_device", lambda value: isinstance(value, Tensor))
        found = torch.frombuffer(bytearray(hyperparameter_rows(groups)), dtype=torch.int64)
        write_betas(found, groups)
    logs = [PLACE["log2_beta1"], PLACE["log2_beta2"]]
    found, expected = found.view(-1, ROW_SIZE), expected.view(-1, ROW_SIZE)
    torch.testing.assert_close(found.view(torch.float64)[:, logs], expected.view(torch.float64)[:, logs])
    found[:, logs] = expected[:, logs] = 0
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("betas", "words"),
    [
        ((0.9, 1.5), r"betas\[1\] .*, got 1.5"),
        ((0.9, -0.5), r"betas\[1\] .*, got -0.5"),
        ((1.0, 0.99), r"betas\[0\] .*, got 1.0"),
        ((-0.5, 0.99), r"betas\[0\] .*, got -0.5"),
    ],
)
@pytest.mark.parametrize("shapes", [[(40, 30)], [(40, 30), (7,)]], ids=["one", "two"])
def test_a_beta_out_of_range_is_refused_before_anything_is_written(
    shapes: list[tuple[int, ...]], betas: tuple[float, float], words: str
) -> None:
    """As 1 − β2 has no root, 1 − β1^t is zero or β^t has no logarithm; the next step is as if nothing had been."""
    params = make_params(shapes)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    for p, q in zip(params, others):
        q.grad = p.grad
    ours, expected = (TritonAdamW(each, impl="triton") for each in (params, others))
    for turn in range(3):
        if turn:
            ours.param_groups[0]["betas"] = betas
            with pytest.raises(ValueError, match=words):
                ours.step()
            ours.param_groups[0]["betas"] = (0.9, 0.999)
        assert all(map(torch.equal, params, others))
        ours.step()
        expected.step()
        assert all(map(torch.equal, params, others))


@pytest.mark.parametrize("shapes", [[(300,)], [(40, 30), (7,)]], ids=["one", "two"])
@pytest.mark.parametrize("num_groups", [1, 5], ids=["few", "many"])
def test_numbers_on_a_device_come_and_go(shapes: Any, num_groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes those that the groups have then: a tensor's for a number's, in its place, and back."""
    for module in (_adamw_scalars, _adamw_launch, _device_scalars):
        # without a GPU a tensor of the host stands for one of a device
        monkeypatch.setattr(module, "on_device", lambda value: isinstance(value, Tensor))
    number = partial(torch.tensor, device=DEVICE)
    params = [make_params(shapes) for _ in range(num_groups)]
    others = [[torch.nn.Parameter(p.detach().clone()) for p in group] for group in params]
    for p, q in zip(chain(*params), chain(*others)):
        q.grad = p.grad
    ours, expected = (TritonAdamW([{"params": group} for group in each], impl="triton") for each in (params, others))
    for change in (
        {"betas": (0.5, 0.75)},
        {"betas": (number(0.5), number(0.75, dtype=torch.float64))},
        {"lr": number(0.25)},
        {"weight_decay": 0.5, "maximize": True},
        {"betas": (number(0.5), 0.75)},
        # 0 has the least in a row
        {"betas": (0.0, 0.75)},
        {"betas": (0.0, number(0.5))},
        {"betas": (0.0, 0.0)},
        {"lr": 0.125},
        {"lr": number(0.0)},
        {"lr": 0.0},
    ):
        last, theirs = ours.param_groups[-1], expected.param_groups[-1]
        last.update(change)
        theirs.update(last, params=theirs["params"], lr=float(last["lr"]), betas=tuple(map(float, last["betas"])))
        for _ in range(2):
            ours.step()
            expected.step()
            for p, q in zip(chain(*params), chain(*others)):
                torch.testing.assert_close(
                    p, q, rtol=1e-6, atol=1e-7, msg=lambda text, change=change: f"{change} {text}"
                )


@pytest.mark.parametrize("count", [1, 2], ids=["odd", "even"])
@pytest.mark.parametrize(
    "change",
    [{}, {"betas": (0.5, 0.99)}, {"betas": (0.9, 0.5)}, {"further": 2}],
    ids=["same", "beta1", "beta2", "step"],
)
def test_a_memo_is_for_one_step_and_one_pair_of_betas(change: dict[str, Any], count: int) -> None:
    """A lone tensor's step leaves the next one's bias corrections, in the place that its own programs do not read."""
    generator = torch.Generator().manual_seed(0)
    plan, numbers = AdamWPlan(), {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    own = [[each.to(DEVICE)] for each in (*torch.randn(2, 300, generator=generator), *torch.zeros(2, 300))]
    steps = torch.tensor(float(count), device=DEVICE)
    adamw_(*own, steps=steps, plan=plan, impl="triton", **numbers)
    (launch,) = plan._launches
    memos = launch._memos.view(2, -1)
    place = count % 2
    # t in fp32
    assert memos[place].view(torch.float32)[0] == count + 2
    assert not memos[1 - place].any()
    steps += change.get("further", 0)
    numbers["betas"] = change.get("betas", numbers["betas"])
    others = [[each.clone()] for (each,) in own]
    adamw_(*others, steps=steps.clone(), impl="triton", **numbers)
    adamw_(*own, steps=steps, plan=plan, impl="triton", **numbers)
    assert plan._launches[0]._memos is launch._memos
    for (found,), (expected,) in zip(own, others):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("count", [1, 2])
def test_a_memo_that_fits_is_read(count: int) -> None:
    numbers = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    plan, own = AdamWPlan(), [[torch.ones(300, device=DEVICE)] for _ in range(4)]
    steps = torch.tensor(float(count), device=DEVICE)
    adamw_(*own, steps=steps, plan=plan, impl="triton", **numbers)
    memos = plan._launches[0]._memos.view(torch.float32).view(2, -1)
    # corrections for which the next step is to be zero
    memos[count % 2, 6:] = torch.tensor([torch.inf, 1.0], device=DEVICE)
    before = own[0][0].clone()
    adamw_(*own, steps=steps, plan=plan, impl="triton", **numbers)
    assert torch.equal(own[0][0], before)
