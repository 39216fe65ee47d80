"""What the functions over lists do with DTensors: lists are of local parts, and factors may be spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from optim_kernels._impl import is_interpreted
from optim_kernels.functional import MuonMomenta, MuonPlan, MuonUpdates, adamw_, apply_muon_update_, muon_, muon_update
from optim_utils.testing import run_ranks

KERNELS = ["triton"] if is_interpreted() else []
IMPLS: list[Any] = ["torch", *KERNELS]
ADAMW: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
OF_ADAMW, OF_MUON = ("params", "grads", "exp_avgs", "exp_avg_sqs"), ("params", "grads", "momentum_buffers")


def spread(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return DTensor.from_local(tensor, mesh, [Replicate()])


def lists(names: Iterable[str]) -> dict[str, Any]:
    return {name: [torch.full((4, 6), 0.5) for _ in range(2)] for name in names}


def refused(call: Callable[..., Any], names: Iterable[str], at: str, words: str, **options: Any) -> None:
    """Have the second tensor of the list ``at`` refused as a DTensor."""
    given = lists(names)
    given[at][1] = spread(given[at][1])
    with pytest.raises(TypeError, match=rf"^{at}\[1\] is a DTensor.*{words}"):
        call(**given, **options)
    assert all(bool((each[0] == 0.5).all()) for each in given.values())


def _lists(rank: int, world_size: int) -> None:
    for impl in IMPLS:
        words = "give its to_local" if impl == "triton" else "give DTensors alone, or their local parts"
        of_adamw, of_muon = (*OF_ADAMW, "max_exp_avg_sqs", "masters"), (*OF_MUON, "second_moments", "masters")
        for at in of_adamw:
            refused(adamw_, of_adamw, at, words, steps=torch.zeros(()), impl=impl, **ADAMW)
        for at in of_muon:
            for plan in (None, MuonPlan()):
                refused(muon_, of_muon, at, "full_tensor", lr=0.1, plan=plan, impl=impl)
    for at in of_muon[1:-1]:
        refused(muon_update, of_muon[1:-1], at, "full_tensor")
    for at in ("params", "updates", "masters"):
        refused(apply_muon_update_, ("params", "updates", "masters"), at, "or their local parts", lr=0.1)


def test_a_list_with_a_dtensor_is_refused_before_anything_moves() -> None:
    run_ranks(_lists, 1, backend="gloo")


def _counts(rank: int, world_size: int) -> None:
    for impl in KERNELS:
        for at in ("steps", "present"):
            given = {name: [torch.ones(()) for _ in range(2)] for name in ("steps", "present")}
            given[at][1] = spread(given[at][1])
            with pytest.raises(TypeError, match=rf"^{at} of params\[1\] is a DTensor.*give its to_local"):
                adamw_(**lists(OF_ADAMW), **given, impl=impl, **ADAMW)


@pytest.mark.skipif(not KERNELS, reason="plain torch takes them")
def test_kernels_refuse_counts_that_are_dtensors() -> None:
    run_ranks(_counts, 1, backend="gloo")


def _replicated(rank: int, world_size: int) -> None:
    from torch.distributed.tensor.experimental import implicit_replication

    found, expected = lists(OF_ADAMW), lists(OF_ADAMW)
    given = {name: each if name == "grads" else list(map(spread, each)) for name, each in found.items()}
    with implicit_replication():
        adamw_(**given, steps=torch.zeros(()), impl="torch", **ADAMW)
    adamw_(**expected, steps=torch.zeros(()), impl="torch", **ADAMW)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_torch_may_be_told_to_replicate_gradients() -> None:
    run_ranks(_replicated, 1, backend="gloo")


def _factors(rank: int, world_size: int) -> None:
    for impl in IMPLS:
        for name in ("clip_factor", "grad_scale", "found_inf"):
            found = []
            for factor in (torch.tensor(0.25), spread(torch.tensor(0.25))):
                of_adamw, of_muon, planned = lists(OF_ADAMW), lists(OF_MUON), lists(OF_MUON)
                adamw_(**of_adamw, steps=torch.zeros(()), impl=impl, **ADAMW, **{name: factor})
                muon_(**of_muon, lr=0.1, impl=impl, **{name: factor})
                muon_(**planned, lr=0.1, impl=impl, plan=MuonPlan(), **{name: factor})
                found.append([each for given in (of_adamw, of_muon, planned) for each in given.values()])
                if name == "clip_factor":
                    found[-1].append(muon_update(of_muon["grads"], of_muon["momentum_buffers"], clip_factor=factor))
                if impl == "triton" and name != "found_inf":
                    us = lists(["grads", "buffers", "us"])
                    MuonMomenta().step(**us, momentum=0.9, **{name: factor})
                    found[-1].append(us["us"])
            torch.testing.assert_close(*found, rtol=0, atol=0)


def test_factors_may_be_dtensors() -> None:
    """As the norm of DTensors is one, of which the optimizers take a factor, too."""
    run_ranks(_factors, 2, backend="gloo")


def _numbers(rank: int, world_size: int) -> None:
    for impl in IMPLS:
        found = []
        for each in (torch.tensor(0.25), spread(torch.tensor(0.25))):
            of_adamw, of_muon = lists(OF_ADAMW), lists((*OF_MUON, "second_moments"))
            of_muon["second_moments"] = [torch.full((1, 6), 0.5) for _ in range(2)]
            adamw_(**of_adamw, steps=torch.zeros(()), impl=impl, **{**ADAMW, "lr": each, "weight_decay": each})
            muon_(**of_muon, lr=each, weight_decay=each, momentum=each, beta2=each, impl=impl)
            found.append([*of_adamw.values(), *of_muon.values()])
        torch.testing.assert_close(*found, rtol=0, atol=0)


def test_hyperparameters_may_be_dtensors() -> None:
    """Plain torch's Muon found that it cannot compute with them when momentum had moved."""
    run_ranks(_numbers, 1, backend="gloo")


def _read_on_the_device(rank: int, world_size: int) -> None:
    """Where kernels follow the addresses of hyperparameters, as they do on a GPU."""
    found = []
    with ExitStack() as patches:
        for module in ("_device_scalars", "_adamw_scalars", "_adamw_launch", "_element_launch"):
            name = f"optim_kernels.functional.{module}.on_device"
            patches.enter_context(mock.patch(name, lambda value: isinstance(value, Tensor)))
        for spread_or_not in (Tensor.clone, spread):
            lr, beta1, beta2 = map(spread_or_not, torch.tensor([0.25, 0.8, 0.9]).unbind())
            of_adamw, of_muon = lists(OF_ADAMW), lists(["params", "updates"])
            adamw_(**of_adamw, steps=torch.zeros(()), impl="triton", **{**ADAMW, "lr": lr, "betas": (beta1, beta2)})
            MuonUpdates().step(**of_muon, lr=lr, weight_decay=0.1)
            found.append([*of_adamw.values(), *of_muon.values()])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert not bool((found[0][0][0] == 0.5).any()), "a step was taken"


@pytest.mark.skipif(not KERNELS, reason="is patched into kernels that are interpreted")
def test_kernels_read_hyperparameters_that_are_dtensors() -> None:
    run_ranks(_read_on_the_device, 1, backend="gloo")
