"""What the host writes for AdamW's kernels of a group's hyperparameters: rounded as fp32 arithmetic would round."""

from __future__ import annotations

from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from fresh_params import make_params
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optim_kernels import TritonAdamW
from optim_kernels.functional import _adamw_scalars
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


@pytest.mark.parametrize("shapes", [[(40, 30)], [(40, 30), (7,)]], ids=["one", "two"])
def test_a_beta_above_one_is_refused_before_anything_is_written(shapes: list[tuple[int, ...]]) -> None:
    """As no root of 1 − β2 exists; in a loop that goes on the next step is as if nothing had been."""
    params = make_params(shapes)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    for p, q in zip(params, others):
        q.grad = p.grad
    ours, expected = (TritonAdamW(each, impl="triton") for each in (params, others))
    for turn in range(3):
        if turn:
            ours.param_groups[0]["betas"] = (0.9, 1.5)
            with pytest.raises(ValueError, match=r"betas\[1\] must be from 0 to below 1, got 1.5"):
                ours.step()
            ours.param_groups[0]["betas"] = (0.9, 0.999)
        assert all(map(torch.equal, params, others))
        ours.step()
        expected.step()
        assert all(map(torch.equal, params, others))
