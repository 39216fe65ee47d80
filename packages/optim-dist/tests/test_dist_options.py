"""Groups that are told something else after the optimizer was built, by the loop or by what is loaded."""

import copy
from datetime import timedelta
from functools import partial
from itertools import product
from typing import get_type_hints

import pytest
import torch
import torch.distributed as dist
from dist_cases import BACKENDS, device_of, mesh_of, normal, world_sizes
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from optim_dist import (
    CommonOptions,
    Options,
    TritonDistAdamW,
    TritonDistMuon,
    TritonDistMuonAdamW,
    checkpoint,
    clip_grad_norm_,
)
from optim_kernels import TritonAdamW, TritonMuon
from optim_utils.low_bit import LowBitTensor
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
# how AdamW may store the state of bf16 parameters; 8-bit codes not of DTensors, which load those of one device
ADAMW_STORAGE = {
    "torch's": {},
    "fp32": {"state_dtype": torch.float32},
    "half": {"state_dtype": (None, torch.float32)},
    "fp16": {"state_dtype": (torch.float32, torch.float16)},
    "masters": {"state_dtype": torch.float32, "master_weights": "fp32"},
    "split16": {"master_weights": "split16"},
    "int8": {"state_dtype": "int8"},
}
MASTERS = {"fp32": "master", "split16": "master_low"}


def place(value, form, world_size):
    return distribute_tensor(value, mesh_of(world_size), [Shard(0)]) if form == "cut" else value.clone()


def parameter(shape, form, world_size, dtype=torch.float32):
    value = normal(shape, 31).to(device_of(dist.get_rank()), dtype)
    return nn.Parameter(place(value, form, world_size))


def whole(p):
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


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
    run_ranks(other_storage, 2, backend=backend)


def storage_that_cannot_be(rank, world_size):
    """Every rank refuses it before anything has moved, and may go on."""
    wrong = {
        "8-bit": (TritonDistAdamW, {"state_dtype": "int8"}, "build a new optimizer|shards may cut"),
        "8-bit floats": (TritonDistAdamW, {"state_dtype": torch.float8_e4m3fn}, "state_dtype must be None, one of"),
        "masters": (TritonDistAdamW, {"master_weights": "fp32"}, r"'fp32' is for .*, but params\[0\] is"),
        "no masters": (TritonDistMuon, {"master_weights": "bf16"}, "master_weights must be None, 'fp32' or 'split16'"),
    }
    for form, (name, (build, options, match)) in product(("plain", "cut"), wrong.items()):
        p = parameter((64, 64), form, world_size)
        optimizer = build([p], reducer="exact")
        step((p, optimizer))
        before, kept = whole(p), {key: optimizer.param_groups[0].get(key) for key in options}
        optimizer.param_groups[0].update(options)
        with pytest.raises(ValueError, match=match):
            step((p, optimizer), number=1)
        optimizer.zero_grad()
        assert torch.equal(whole(p), before), (form, name)
        optimizer.param_groups[0].update(kept)
        step((p, optimizer), number=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_storage_that_a_group_cannot_have_is_refused_at_the_step(backend):
    run_ranks(storage_that_cannot_be, 2, backend=backend)


def no_gradient_at_all(rank, world_size):
    """Every rank refuses it before anything has moved, and may go on."""
    for form in ("plain", "cut"):
        needed, other = (parameter((8, 8), form, world_size) for _ in range(2))
        group = {"params": [other, needed], "impl": "torch", "missing_grad": "raise"}
        optimizer = TritonDistMuon([group], bucket_mb=1e-5)  # in batches of their own
        other.grad = torch.ones_like(other)
        with pytest.raises(RuntimeError, match=r"0\.1 has no gradient on any rank; pass missing_grad='skip' or 'zero'"):
            optimizer.step()
        assert not any(optimizer.kept_state(shard) for shard in optimizer.shards()), form
        optimizer.zero_grad()
        other.grad = torch.ones_like(other)
        if rank == 0 or form == "cut":
            needed.grad = torch.ones_like(needed)
        optimizer.step()


def missing_in_adamw(rank, world_size):
    """A group of AdamW keeps Muon's option, and skips what has no gradient all the same."""
    for form, how in product(("plain", "cut") if world_size > 1 else ("plain",), ("zero", "raise", "skip")):
        used, other = (parameter((64, 8), form, world_size) for _ in range(2))
        optimizer = TritonDistMuonAdamW([{"kind": "adamw", "params": [used, other], "missing_grad": how}])
        before = whole(other)
        step((used, optimizer))
        assert torch.equal(whole(other), before), (form, how)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_adamw_skips_missing_gradients_whatever_its_group_says(backend, world_size):
    if world_sizes(backend, (world_size,)):
        run_ranks(missing_in_adamw, world_size, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_no_rank_has_is_an_error_on_all(backend):
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
    run_ranks(own_storage, 2, str(tmp_path), backend=backend)


def adamw_storage(rank, world_size, folder):
    """States are stored as the optimizer that loads wants them, as in one of a single device."""
    for form, before in product(("plain", "cut"), ADAMW_STORAGE):
        # so many elements that int8 means codes
        p = parameter((80, 60), form, world_size, torch.bfloat16)
        value = whole(p)
        alone = TritonAdamW([nn.Parameter(value)], lr=0.02, **ADAMW_STORAGE[before])
        if before == "int8" and form == "cut":
            for number in range(3):
                step((alone.param_groups[0]["params"][0], alone), number=number)
            p, full = nn.Parameter(place(alone.param_groups[0]["params"][0].detach(), form, world_size)), None
            state = alone.state_dict()
        else:
            saved = TritonDistAdamW([p], lr=0.02, reducer="exact", **ADAMW_STORAGE[before])
            for number in range(3):
                step((p, saved), number=number)
            full = f"{folder}/{form}-{before}"
            checkpoint.save(full, None, saved)
            found = [saved.full_state_dict()]
            dist.broadcast_object_list(found, src=0)
            state = found[0]
        value = whole(p)
        for after, how in product(ADAMW_STORAGE, ("checkpoint", "full")):
            if (after == "int8" and form == "cut") or (full is None and how == "checkpoint"):
                continue
            twin, q = nn.Parameter(value.clone()), nn.Parameter(place(value, form, world_size))
            theirs = TritonAdamW([twin], **ADAMW_STORAGE[after])
            theirs.load_state_dict(copy.deepcopy(state))
            ours = TritonDistAdamW([q], reducer="exact", **ADAMW_STORAGE[after])
            if how == "full":
                ours.load_full_state_dict(state)
            else:
                checkpoint.load(full, None, ours)
            for number in range(3, 5):
                step((q, ours), (twin, theirs), number=number)
            what = (form, before, after, how)
            kept = {key: ours.param_groups[0].get(key) for key in ("state_dtype", "master_weights")}
            assert kept == {key: ADAMW_STORAGE[after].get(key) for key in kept}, what
            found = [ours.full_state_dict()]
            dist.broadcast_object_list(found, src=0)
            state_of_ours, state_of_theirs = found[0]["state"][0], theirs.state[twin]
            assert {key: value.dtype for key, value in state_of_ours.items()} == {
                key: value.dtype for key, value in state_of_theirs.items()
            }, what
            # torch's own loop rounds to 16 bits between its operations, and kernels may round once more or less
            is_exact = after != "torch's" and not q.is_cuda
            narrow = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 2**-5, "atol": 1e-3}
            torch.testing.assert_close(whole(q), twin.detach(), **narrow, msg=str(what))
            for key, value_of_ours in state_of_ours.items():
                expected = state_of_theirs[key]
                expected = expected.dequantize() if isinstance(expected, LowBitTensor) else expected
                assert key == "step" or expected.any(), what
                torch.testing.assert_close(value_of_ours, expected.cpu(), **narrow, msg=str((*what, key)))
            ours.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_loaded_does_not_choose_how_adamw_stores_it(backend, tmp_path):
    run_ranks(adamw_storage, 2, str(tmp_path), backend=backend)


@pytest.mark.parametrize("how", ["checkpoint", "state_dict", "full"])
def test_hyperparameters_that_are_tensors_stay_on_their_device(tmp_path, how):
    """Captured steps read them there, where files are read on the CPU. The device without memory stands for a GPU."""

    def build(device):
        number = partial(torch.tensor, device=device)
        parameter = nn.Parameter(torch.ones(3))
        return TritonDistAdamW([("w", parameter)], lr=number(0.1), betas=(number(0.9), number(0.99)), eps=1e-6)

    saved, optimizer = build("cpu"), build("meta")
    if how == "checkpoint":
        checkpoint.save(tmp_path / "x", None, saved)
        checkpoint.load(tmp_path / "x", None, optimizer)
    elif how == "full":
        optimizer.load_full_state_dict(saved.full_state_dict())
    else:
        optimizer.load_state_dict(saved.state_dict())
    group = optimizer.param_groups[0]
    assert {value.device.type for value in (group["lr"], *group["betas"])} == {"meta"}
    assert type(group["betas"]) is tuple
    # a number takes over where it is
    plain = TritonDistAdamW([("w", nn.Parameter(torch.ones(3)))])
    plain.load_state_dict(saved.state_dict())
    assert torch.equal(plain.param_groups[0]["lr"], torch.tensor(0.1))


def masters_through_both_forms(rank, world_size):
    """Masters come back to the bit, by way of the other form and of parameters that are loaded after the state."""
    for form, (first, second) in product(("plain", "cut"), (("fp32", "split16"), ("split16", "fp32"))):
        p = parameter((64, 8), form, world_size, torch.bfloat16)
        optimizer = TritonDistAdamW([p], lr=0.02, reducer="exact", master_weights=first)
        for number in range(3):
            step((p, optimizer), number=number)
        wanted = None
        for how in (first, second, first):
            full = [optimizer.full_state_dict()]
            dist.broadcast_object_list(full, src=0)
            wanted = full[0]["state"][0] if wanted is None else wanted
            value = whole(p)
            optimizer.close()
            p = parameter((64, 8), form, world_size, torch.bfloat16)
            optimizer = TritonDistAdamW([p], reducer="exact", master_weights=how)
            optimizer.load_full_state_dict(full[0])
            with torch.no_grad():
                p.copy_(place(value, form, world_size))
            optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
            step((p, optimizer))
            assert torch.equal(whole(p), value), (form, first, how)
            assert {"master", "master_low"} & optimizer.state[p].keys() == {MASTERS[how]}, (form, first, how)
        found = [optimizer.full_state_dict()]
        dist.broadcast_object_list(found, src=0)
        assert torch.equal(found[0]["state"][0][MASTERS[first]], wanted[MASTERS[first]]), (form, first)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masters_come_back_by_way_of_the_other_form(backend):
    run_ranks(masters_through_both_forms, 2, backend=backend)


def maximum_comes_later(rank, world_size, folder):
    """As in `TritonAdamW`, which begins with the second moments that were loaded."""
    for form in ("plain", "cut"):
        p = parameter((64, 8), form, world_size)
        saved = TritonDistAdamW([p], lr=0.02, reducer="exact")
        step((p, saved))
        full = [saved.full_state_dict()]
        dist.broadcast_object_list(full, src=0)
        checkpoint.save(f"{folder}/{form}", None, saved)
        wanted = full[0]["state"][0]["exp_avg_sq"]
        full[0]["param_groups"][0]["amsgrad"] = True
        for how in ("checkpoint", "full"):
            q = nn.Parameter(place(whole(p), form, world_size))
            ours = TritonDistAdamW([q], lr=0.02, reducer="exact", amsgrad=True)
            if how == "full":
                ours.load_full_state_dict(full[0])
            else:
                checkpoint.load(f"{folder}/{form}", None, ours)
                ours.param_groups[0]["amsgrad"] = True
            q.grad = torch.zeros_like(q)  # second moments get smaller
            ours.step()
            found = [ours.full_state_dict()]
            dist.broadcast_object_list(found, src=0)
            assert torch.equal(found[0]["state"][0]["max_exp_avg_sq"], wanted), (form, how)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_maximum_that_was_not_saved_begins_with_the_second_moments(backend, tmp_path):
    run_ranks(maximum_comes_later, 2, str(tmp_path), backend=backend)


def other_adamw_storage(rank, world_size):
    """What groups are told after the first step holds from the next one on, as of Muon's."""
    for form, (before, after) in product(("plain", "cut"), product(ADAMW_STORAGE, repeat=2)):
        # codes have to be chosen at construction
        if after == "int8" or (before == "int8" and form == "cut"):
            continue
        p, q = (parameter((64, 80), form, world_size, torch.bfloat16) for _ in range(2))
        ours = TritonDistAdamW([p], lr=0.02, reducer="exact", **ADAMW_STORAGE[before])
        theirs = TritonDistAdamW([q], lr=0.02, reducer="exact", **ADAMW_STORAGE[before])
        step((p, ours), (q, theirs))
        ours.param_groups[0].update({"state_dtype": None, "master_weights": None, **ADAMW_STORAGE[after]})
        twin = TritonDistAdamW([r := nn.Parameter(place(whole(q), form, world_size))], **ADAMW_STORAGE[after])
        full = [theirs.full_state_dict()]
        dist.broadcast_object_list(full, src=0)
        twin.load_full_state_dict(full[0])
        step((p, ours), (r, twin), number=1)
        assert torch.equal(whole(p), whole(r)), (form, before, after)
        mine, loaded = ours.full_state_dict(), twin.full_state_dict()
        if rank == 0:
            assert {key: (value.dtype, value.sum().item()) for key, value in mine["state"][0].items()} == {
                key: (value.dtype, value.sum().item()) for key, value in loaded["state"][0].items()
            }


@pytest.mark.parametrize("backend", BACKENDS)
def test_adamws_groups_may_store_their_state_otherwise_from_some_step_on(backend):
    run_ranks(other_adamw_storage, 2, backend=backend)


def test_checkers_of_types_know_the_options_that_there_are():
    assert list(get_type_hints(CommonOptions).items()) == list(get_type_hints(Options).items())


@pytest.mark.parametrize(("options", "message"), [
    ({"overlap": "no"}, "overlap must be True or False, got 'no'"),
    ({"average": "sum"}, "average must be True or False, got 'sum'"),
    ({"debug": 1}, "debug must be True or False, got 1"),
    ({"accumulation_steps": 2.5}, "accumulation_steps must be a whole number of at least 1, got 2.5"),
    ({"accumulation_steps": 0}, "accumulation_steps must be a whole number of at least 1, got 0"),
    ({"reduce_dtype": "bf16"}, "reduce_dtype must be None or one of "),
    ({"reducer": "exact", "reduced_dtype": torch.int32}, "reduced_dtype must be None or one of "),
    ({"reduced_dtype": torch.float32}, "reduced_dtype belongs to reducer='exact'; with 'rs' give reduce_dtype"),
    ({"max_norm": "1"}, "max_norm must be positive, got '1'"),
    ({"bucket_mb": float("inf")}, "bucket_mb must be positive and finite, got inf"),
    ({"timeout": float("inf")}, "timeout must be positive and finite, got inf"),
    ({"timeout": timedelta(seconds=3)}, r"timeout must be a number of seconds, got .*; give its total_seconds\(\)"),
    ({"model": "gpt2"}, "model must be None or a Module, got 'gpt2'"),
    ({"mesh": (2, 2)}, r"mesh must be None or a DeviceMesh, got \(2, 2\)"),
    ({"process_group": "gloo"}, "process_group must be None or a ProcessGroup, got 'gloo'"),
], ids=repr)  # fmt: skip
def test_values_of_another_kind_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        TritonDistAdamW([nn.Parameter(torch.ones(4))], **options)


def test_a_process_group_where_there_is_none_is_refused():
    with pytest.raises(RuntimeError, match=r"process_group was given, but torch\.distributed is not initialized"):
        TritonDistAdamW([nn.Parameter(torch.ones(4))], process_group=dist.GroupMember.NON_GROUP_MEMBER)


def test_no_limit_measures_the_norm_alone():
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    optimizer = TritonDistAdamW([parameter], max_norm=float("inf"))
    optimizer.step()
    assert optimizer.grad_norm.item() == 2


@pytest.mark.parametrize("given", [nn.Linear(2, 2), nn.Parameter(torch.ones(4)), None], ids=["model", "one", "none"])
def test_what_lists_no_parameters_is_refused(given):
    with pytest.raises(TypeError, match=rf"params must be a list of parameters.*, got a {type(given).__name__}"):
        TritonDistAdamW(given)


@pytest.mark.parametrize("unordered", [set, frozenset])
def test_parameters_without_an_order_are_refused(unordered):
    """torch refuses them in groups; ranks would mix up those of one shape."""
    given = unordered(nn.Linear(4, 4).parameters())
    refused = pytest.raises(TypeError, match=rf"params must come in the same order .* a {unordered.__name__} has not")
    with refused:
        TritonDistAdamW(given)
    with refused:
        TritonDistAdamW([{"params": given}])
    optimizer = TritonDistAdamW([nn.Parameter(torch.ones(4))])
    with refused:
        optimizer.add_param_group({"params": given})


def test_a_group_without_parameters_is_refused_by_what_it_has():
    listed = {"params": [nn.Parameter(torch.ones(4))]}
    with pytest.raises(ValueError, match=r"a group must have 'params', got one with 'lr', 'param'$"):
        TritonDistAdamW([listed, {"lr": 1.0, "param": []}])
    with pytest.raises(ValueError, match=r"a group must have 'params', got one with nothing$"):
        TritonDistAdamW([listed]).add_param_group({})


@pytest.mark.parametrize("optimizer_class", [TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW])
def test_a_group_that_is_no_dict_or_lists_nothing_is_refused(optimizer_class):
    listed = {"kind": "muon", "params": [nn.Parameter(torch.ones(4, 4))]}
    other = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(TypeError, match=r"a group must be a dict with 'params', got a Parameter"):
        optimizer_class([listed, other])
    with pytest.raises(TypeError, match=r"a group must be a dict with 'params', got a list"):
        optimizer_class([listed]).add_param_group([other])
    with pytest.raises(TypeError, match=r"params of a group must be a list of parameters, got None"):
        optimizer_class([{**listed, "params": None}])


@pytest.mark.parametrize("optimizer_class", [TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW])
def test_a_group_that_asks_to_be_clipped_is_refused(optimizer_class):
    """As groups of the optimizers for one device may; without a limit they are taken."""

    def group(name, **options):
        return {"params": [(name, nn.Parameter(torch.ones(3, 4)))], "kind": "adamw", **options}

    message = r"a group has max_norm=1\.0, but .* give max_norm to the optimizer, or call clip_grad_norm_"
    with pytest.raises(ValueError, match=message):
        optimizer_class([group("w", max_norm=1.0)])
    optimizer = optimizer_class([group("w", max_norm=None)])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(group("v", max_norm=1.0))
    assert len(optimizer.param_groups) == 1


def test_a_group_takes_no_options_from_defaults_that_lack_them():
    """A program may replace ``defaults``, as nanochat's and Keller Jordan's optimizers have none for its schedules."""
    for optimizer_class, lost in ((TritonDistAdamW, "betas"), (TritonDistMuon, "beta2")):
        optimizer = optimizer_class([nn.Parameter(torch.ones(4, 4))], maximize=True)
        optimizer.defaults = {"lr": 0.1}
        with pytest.raises(KeyError, match=rf"the group has no '{lost}', .*defaults.* give the group all its options"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))]})
        assert len(optimizer.param_groups) == 1
    optimizer = TritonDistMuonAdamW([{"kind": "muon", "params": [nn.Parameter(torch.ones(4, 4))]}], maximize=True)
    optimizer.defaults = {"lr": 0.1}
    for again in (optimizer, copy.deepcopy(optimizer)):
        for kind in ("muon", "adamw"):
            again.add_param_group({"kind": kind, "params": [nn.Parameter(torch.ones(4, 4))]})
            assert again.param_groups[-1]["maximize"] is True


def test_another_kind_of_a_group_counts_from_rebuild_plan_on():
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = TritonDistMuonAdamW([{"kind": "muon", "params": [p], "impl": "torch"}])
    group = optimizer.param_groups[0]
    group |= {"kind": "adamw", "betas": (0.9, 0.99), "eps": 1e-8}
    p.grad = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match=r"kind of param_groups\[0\] is 'adamw' by now, .* rebuild_plan\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    group["kind"] = "adam"
    with pytest.raises(ValueError, match="kind must be 'muon' or 'adamw', got 'adam'"):
        optimizer.rebuild_plan()
    del group["kind"]
    with pytest.raises(ValueError, match="kind must be 'muon' or 'adamw', got None"):
        optimizer.rebuild_plan()
    group["kind"] = "adamw"
    del group["eps"]
    with pytest.raises(KeyError, match=r"param_groups\[0\] has lost its 'eps'"):
        optimizer.rebuild_plan()
    group["eps"] = 1e-8
    optimizer.rebuild_plan()
    p.grad = torch.ones(4, 4)
    optimizer.step()
    assert "exp_avg" in optimizer.state[p]


@pytest.mark.parametrize(
    "given", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), [None]], ids=["model", "list", "none"]
)
def test_what_has_no_gradients_to_clip_is_refused(given):
    with pytest.raises(TypeError, match=r"takes optimizers of optim_dist, or parameters .*, got a (Linear|NoneType)"):
        clip_grad_norm_(given, 1.0)
    with pytest.raises(ValueError, match=r"clip_grad_norm_ got no parameters; .* lists its parameters once"):
        clip_grad_norm_([], 1.0)


def test_optimizers_to_clip_count_once_and_are_not_mixed_with_parameters():
    p = nn.Parameter(torch.ones(4))
    optimizer = TritonDistAdamW([p])
    p.grad = torch.ones(4)
    assert clip_grad_norm_([optimizer, optimizer], 1.0) == 2.0
    with pytest.raises(TypeError, match="takes optimizers, or the parameters of optimizers, and got both"):
        clip_grad_norm_([optimizer, p], 1.0)


# what becomes of an option of a group, by its number
NOT_TO_BE_STEPPED = {
    "lr of Muon": (0, "lr", "1e-3", TypeError, "lr must be a number or a 1-element tensor, got '1e-3'"),
    "lr of the next": (1, "lr", None, TypeError, "lr must be a number or a 1-element tensor, got None"),
    "momentum": (1, "momentum", "0.9", TypeError, "momentum must be a number or a 1-element tensor, got '0.9'"),
    "steps": (1, "ns_steps", 2.5, ValueError, "steps must be an int from 0 to 99, got 2.5"),
    "switch": (0, "nesterov", "no", ValueError, "nesterov must be True or False, got 'no'"),
    "choice": (1, "missing_grad", "never", ValueError, "missing_grad must be one of .* got 'never'"),
    "lr of AdamW": (2, "lr", torch.ones(2), ValueError, r"Tensor lr must be 1-element, got shape \(2,\)"),
    "lr without a value": (2, "lr", torch.tensor(0.1, device="meta"), ValueError, "lr is on meta, and so has no value"),
    "the same of Muon": (0, "lr", torch.tensor(0.1, device="meta"), ValueError, "lr is on meta, and so has no value"),
    "betas": (2, "betas", (0.9,), ValueError, r"betas must be a pair, got \(0.9,\)"),
    "beta1": (2, "betas", (-0.5, 0.99), ValueError, "Invalid beta parameter at index 0: -0.5"),
    "beta2": (2, "betas", (0.9, 1.5), ValueError, "Invalid beta parameter at index 1: 1.5"),
    "a tensor": (2, "betas", (torch.tensor(1.0), torch.tensor(0.9)), ValueError, "Invalid beta .* at index 0: 1.0"),
    "maximize": (2, "maximize", "yes", ValueError, "maximize must be True or False, got 'yes'"),
}


def refuse_before_anything_changes(rank, world_size, options):
    """One rank's groups, all ranks' alike, are told what no update can take: it may be put right, and stepped."""
    device = device_of(rank) if dist.is_initialized() else "cpu"
    parameters = [nn.Parameter(normal((4, 4), 31, number).to(device)) for number in range(4)]
    muon = [{"kind": "muon", "params": parameters[:2]}, {"kind": "muon", "params": parameters[2:3]}]
    optimizer = TritonDistMuonAdamW([*muon, {"kind": "adamw", "params": parameters[3:]}], **options)

    def step(seed):
        for number, p in enumerate(parameters):
            p.grad = normal((4, 4), seed, number).to(device)
        optimizer.step()
        optimizer.zero_grad()

    step(1)
    for number, key, value, error, message in NOT_TO_BE_STEPPED.values():
        group, before = optimizer.param_groups[number], [p.detach().clone() for p in parameters]
        group[key], kept = value, group[key]
        with pytest.raises(error, match=rf"^param_groups\[{number}\]: {message}"):
            step(2)
        assert all(map(torch.equal, parameters, before)), key
        group[key] = kept
    lr = optimizer.param_groups[1].pop("lr")
    with pytest.raises(KeyError, match=r"param_groups\[1\] has lost its 'lr'"):
        step(2)
    optimizer.param_groups[1]["lr"] = lr
    step(3)
    assert all(not torch.equal(p, was) for p, was in zip(parameters, before))


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 1}], ids=["at the step", "under backward"])
def test_what_no_update_can_take_is_refused_before_any_update(options):
    refuse_before_anything_changes(0, 1, options)
    run_ranks(refuse_before_anything_changes, 2, options)
