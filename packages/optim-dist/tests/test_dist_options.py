"""Groups that are told something else after the optimizer was built, by the loop or by what is loaded."""

import copy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from dist_cases import BACKENDS, device_of, mesh_of, normal, world_sizes
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from optim_dist import TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW, checkpoint
from optim_kernels import TritonMuon
from optim_utils.testing import run_ranks

OTHER_MATRICES = {
    "split_rows": ((16, 8), {"split_rows": None}, {"split_rows": 8}),
    "nd": ((2, 16, 8), {"nd": "batch"}, {"nd": "flatten"}),
}
# before, after, and the parameters' dtype
OTHER_STORAGE = {
    "second moments": ({"beta2": None}, {"beta2": 0.9}, torch.float32),
    "no second moments": ({"beta2": 0.9}, {"beta2": None}, torch.float32),
    "momentum": ({"momentum_dtype": None}, {"momentum_dtype": torch.bfloat16}, torch.float32),
    "masters": ({"master_weights": None}, {"master_weights": "fp32"}, torch.bfloat16),
    "no masters": ({"master_weights": "fp32"}, {"master_weights": None}, torch.bfloat16),
    "other masters": ({"master_weights": "fp32"}, {"master_weights": "split16"}, torch.bfloat16),
    "at random": ({"stochastic_rounding": False}, {"stochastic_rounding": True, "seed": 3}, torch.bfloat16),
}


def place(value, form, world_size):
    return distribute_tensor(value, mesh_of(world_size), [Shard(0)]) if form == "cut" else value.clone()


def parameter(shape, form, world_size, dtype=torch.float32):
    value = normal(shape, 31).to(device_of(dist.get_rank()), dtype)
    return nn.Parameter(place(value, form, world_size))


def muon(p, **group):
    return TritonDistMuon([{"params": [p], "impl": "torch", "variant": "torch", **group}], reducer="exact")


def step(*pairs, number=0):
    """Exact averages, the same on every rank."""
    for p, optimizer in pairs:
        values = torch.randint(-3, 4, p.shape, generator=torch.Generator().manual_seed(number)) / 16
        form = "cut" if isinstance(p, DTensor) else "plain"
        p.grad = place(values.to(device_of(dist.get_rank()), p.dtype), form, dist.get_world_size())
        optimizer.step()
        optimizer.zero_grad()


def other_matrices(rank, world_size, folder):
    for form in ("plain", "cut"):
        for name, (shape, before, after) in OTHER_MATRICES.items():
            p = parameter(shape, form, world_size)
            optimizer = muon(p, **before)
            step((p, optimizer))
            where = f"{folder}/{form}-{name}"
            checkpoint.save(where, None, optimizer)
            mine, saved, full = optimizer.state_dict(), p.detach().clone(), [optimizer.full_state_dict()]
            dist.broadcast_object_list(full, src=0)
            optimizer.param_groups[0].update(after)
            with pytest.raises(RuntimeError, match=rf"{name} of param_groups\[0\] changed after the optimizer was"):
                step((p, optimizer))
            optimizer.param_groups[0].update(before)
            step((p, optimizer))
            assert not torch.equal(*(t.to_local() if form == "cut" else t for t in (saved, p.detach())))
            optimizer.close()
            p = parameter(shape, form, world_size)
            optimizer = muon(p, **after)
            if form == "cut":  # of buckets it is another plan
                with pytest.raises(ValueError, match="group 0 was saved with other views of its matrices"):
                    optimizer.load_state_dict(mine)
            with pytest.raises(ValueError, match="group 0 was saved with other views of its matrices"):
                optimizer.load_full_state_dict(full[0])
            with pytest.raises(checkpoint.CheckpointError, match="group 0 was saved with other views of its matrices"):
                checkpoint.load(where, None, optimizer)
            step((p, optimizer))  # nothing was taken over


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_matrices_than_those_of_the_plan_are_refused(backend, tmp_path):
    if world_sizes(backend, (2,)):
        run_ranks(other_matrices, 2, str(tmp_path), backend=backend)


def other_kind(rank, world_size):
    """Groups of equal shapes in another order."""

    def build(*kinds):
        groups = [{"kind": kind, "params": [parameter((8, 8), "plain", world_size)]} for kind in kinds]
        return TritonDistMuonAdamW(groups)

    full = [build("muon", "adamw").full_state_dict()]
    dist.broadcast_object_list(full, src=0)
    with pytest.raises(ValueError, match="group 0 was saved with kind='muon', this optimizer has kind='adamw'; list"):
        build("adamw", "muon").load_full_state_dict(full[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_of_another_kind_are_refused(backend):
    if world_sizes(backend, (2,)):
        run_ranks(other_kind, 2, backend=backend)


def other_storage(rank, world_size):
    """As on one device; of 16-bit DTensors updates travel in 16 bits, so that they are compared in fp32 alone."""
    for name, (before, after, dtype) in OTHER_STORAGE.items():
        for form in ("plain", "cut") if dtype == torch.float32 else ("plain",):
            p, twin = parameter((16, 8), form, world_size, dtype), parameter((16, 8), "plain", world_size, dtype)
            options = {"params": [twin], "impl": "torch", **before}
            ours, theirs = muon(p, **before), TritonMuon([options], lr=0.02, weight_decay=0.0)
            ours.param_groups[0].update(lr=0.02, weight_decay=0.0)
            for number in range(4):
                if number == 2:
                    for optimizer in (ours, theirs):
                        optimizer.param_groups[0].update(after)
                step((p, ours), (twin, theirs), number=number)
                found = p.full_tensor() if form == "cut" else p
                assert torch.equal(found, twin), (name, form, number)
            ours.close()
    p = parameter((700,), "plain", world_size)
    optimizer = TritonDistAdamW([p])
    step((p, optimizer))
    optimizer.param_groups[0]["amsgrad"] = True
    step((p, optimizer))
    assert "max_exp_avg_sq" in optimizer.state[p]


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_may_store_their_state_otherwise_from_some_step_on(backend):
    if world_sizes(backend, (2,)):
        run_ranks(other_storage, 2, backend=backend)


def no_gradient_at_all(rank, world_size):
    """Every rank refuses it, and may go on."""
    needed, other = (parameter((8, 8), "plain", world_size) for _ in range(2))
    optimizer = TritonDistMuon([{"params": [needed, other], "impl": "torch", "missing_grad": "raise"}])
    other.grad = torch.ones_like(other)
    with pytest.raises(RuntimeError, match=r"0\.0 has no gradient on any rank; pass missing_grad='skip' or 'zero'"):
        optimizer.step()
    optimizer.zero_grad()
    other.grad = torch.ones_like(other)
    if rank == 0:
        needed.grad = torch.ones_like(needed)
    optimizer.step()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_no_rank_has_is_an_error_on_all(backend):
    if world_sizes(backend, (2,)):
        run_ranks(no_gradient_at_all, 2, backend=backend)


def own_storage(rank, world_size, folder):
    """Masters and momentum are stored as the optimizer that loads wants them, as in one of a single device."""
    formats = (None, "fp32", "split16")
    for form, before, after, dtype in product(("plain", "cut"), formats, formats, (None, torch.float32)):
        p = parameter((16, 8), form, world_size, torch.bfloat16)
        saved = muon(p, master_weights=before)
        for number in range(3):
            step((p, saved), number=number)
        value = p.full_tensor() if form == "cut" else p
        full = [saved.full_state_dict()]
        dist.broadcast_object_list(full, src=0)
        where = f"{folder}/{form}-{before}-{after}-{dtype}"
        checkpoint.save(where, None, saved)
        own = {"master_weights": after, "momentum_dtype": dtype, "lr": 0.02}
        twin = nn.Parameter(value.detach().clone())
        theirs = TritonMuon([{"params": [twin], "impl": "torch", **own}])
        theirs.load_state_dict(copy.deepcopy(full[0]))
        step((twin, theirs), number=3)
        for how in ("checkpoint", "full"):
            q = nn.Parameter(place(value.detach(), form, world_size))
            ours = muon(q, **own)
            if how == "full":
                ours.load_full_state_dict(full[0])
            else:
                checkpoint.load(where, None, ours)
            step((q, ours), number=3)
            what = (form, before, after, dtype, how)
            assert ours.param_groups[0]["master_weights"] == after, what
            found = [ours.full_state_dict()]
            dist.broadcast_object_list(found, src=0)
            state = found[0]["state"][0]
            assert {key: value.dtype for key, value in state.items()} == {
                key: value.dtype for key, value in theirs.state[twin].items()
            }, what
            # updates of 16-bit DTensors travel in 16 bits
            close = {"rtol": 0.0, "atol": 0.0} if form == "plain" else {"rtol": 2**-7, "atol": 1e-3}
            torch.testing.assert_close(q.full_tensor() if form == "cut" else q, twin, **close)
            if after == "fp32":
                torch.testing.assert_close(state["master"].cpu(), theirs.state[twin]["master"].cpu(), **close)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_loaded_does_not_choose_how_muon_stores_it(backend, tmp_path):
    if world_sizes(backend, (2,)):
        run_ranks(own_storage, 2, str(tmp_path), backend=backend)
