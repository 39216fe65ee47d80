"""Newton–Schulz in one memory of limited size for all buckets; kernels are interpreted where there is no GPU."""

import gc
import weakref

import pytest
import torch
from dist_cases import BACKENDS, device_of, normal
from torch import nn

from optim_dist import TritonDistMuon, TritonDistMuonAdamW
from optim_utils.testing import run_ranks

# Sides are multiples of 16, which Triton 3.5 wants of what it interprets.
SHAPES = ((16, 32), (32, 16), (16, 16), (16, 32), (32, 32), (16, 16))
MB = 2**20


def trained(rank, limit, kind="muon", **options):
    """After three steps: parameters, the optimizer, which is open, and the plans of each bucket."""
    device = device_of(rank)
    params = [nn.Parameter(normal(shape, 1, number).to(device)) for number, shape in enumerate(SHAPES)]
    groups = [{"params": params[i::2], "lr": 0.1 * (i + 1), "impl": "triton", "ns_steps": 3} for i in range(2)]
    options |= {"ns_workspace_mb": limit, "bucket_mb": 1e-3, "deterministic": True, "reducer": "exact"}
    if kind == "muon":
        optimizer = TritonDistMuon(groups, **options)
    else:
        optimizer = TritonDistMuonAdamW([{**group, "kind": "muon"} for group in groups], **options)
    for step in range(3):
        for number, p in enumerate(params):
            p.grad = normal(tuple(p.shape), 2 + step, number, rank).to(device)
        optimizer.step()
        optimizer.wait()
    plans = [cache["planner"].plans for cache in optimizer._caches.values() if "planner" in cache]
    return params, optimizer, plans


def rooms_of(plan):
    """The memory in which a plan has X."""
    return [batch.x.untyped_storage() for family in plan._launches._families for batch in family]


def compare(rank, world_size, kind):
    expected, alone, plans = trained(rank, None, kind)
    assert all(len(each) <= 1 for each in plans)
    assert alone._workspace is None
    alone.close()
    for limit in (1e-6, 0.05, 64):
        found, optimizer, plans = trained(rank, limit, kind)
        for p, q in zip(found, expected, strict=True):
            assert torch.equal(p, q), limit
        own = sum(len(plan.tiles) for each in plans for plan in each)
        if limit == 1e-6:  # a part for each parameter
            assert sum(map(len, plans)) == own
        if limit == 64:
            assert all(len(each) <= 1 for each in plans)
        rooms = list(optimizer._workspace._rooms.values())
        assert len(rooms) == (1 if own else 0)
        assert limit == 1e-6 or all(room.numel() <= limit * MB for room in rooms)
        found_in = {room.data_ptr() for each in plans for plan in each for room in rooms_of(plan)}
        assert found_in == {room.data_ptr() for room in rooms}
        rooms = [weakref.ref(room) for room in rooms]
        del plans
        optimizer.close()
        gc.collect()  # what is interpreted refers to itself
        assert not any(room() is not None for room in rooms)


@pytest.mark.parametrize("kind", ["muon", "both"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_the_same(backend, kind):
    run_ranks(compare, 2, kind, backend=backend)


def test_wrong_limits_are_refused():
    with pytest.raises(ValueError, match="ns_workspace_mb must be positive, or None for no limit, got -1"):
        TritonDistMuon([nn.Parameter(torch.zeros(4, 4))], ns_workspace_mb=-1)


def limits_of_ranks(rank, world_size):
    with pytest.raises(RuntimeError, match="ns_workspace_mb"):
        TritonDistMuon([nn.Parameter(torch.zeros(4, 4))], ns_workspace_mb=1 + rank)


def test_ranks_have_the_same():
    run_ranks(limits_of_ranks, 2)


def interpreter_of_a_rank(rank, world_size):
    from triton.runtime import interpreter

    return interpreter._patch_lang.__module__


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")
def test_ranks_interpret_as_quickly():
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    assert run_ranks(interpreter_of_a_rank, 1) == [interpreter._patch_lang.__module__]
