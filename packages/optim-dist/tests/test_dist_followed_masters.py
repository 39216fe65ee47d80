"""fp32 masters in copies, state dicts and checkpoints: those that the next step would begin with.

A step with an fp32 master writes the parameter without reading it. What others have written to the parameter since the
last step has to be in the master that is saved, or the run that loads it undoes that.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_cases import mesh_of, normal
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from optim_dist import TritonDistMuonAdamW, checkpoint
from optim_utils.testing import run_ranks

NAMES = ("first", "last")


def build(kind, world_size, is_cut):
    values = [normal((16, 16), 3, place).bfloat16() for place in range(2)]
    if is_cut:
        values = [distribute_tensor(value, mesh_of(world_size), [Shard(0)]) for value in values]
    params = list(map(nn.Parameter, values))
    group = {"kind": kind, "params": list(zip(NAMES, params)), "master_weights": "fp32", "lr": 0.1}
    return params, TritonDistMuonAdamW([group], timeout=20, reducer="exact")


def step(params, optimizer, lr=0.1):
    optimizer.param_groups[0]["lr"] = lr
    for p in params:
        p.grad = torch.full_like(p.detach(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def write(params, values):
    for p, value in zip(params, values):
        p.copy_(value)


def values_of(params):
    return [p.detach().clone() for p in params]


def averages(params):
    return [torch.full_like(p.detach(), 3.0) for p in params]


def shared(content):
    """The same on every rank, as the first one has it."""
    listed = [content]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(listed, src=0)
    return listed[0]


def by_checkpoint(ours, theirs, folder):
    checkpoint.save(f"{folder}/x", None, ours)
    checkpoint.load(f"{folder}/x", None, theirs)


def by_checkpoint_in_the_background(ours, theirs, folder):
    checkpoint.save(f"{folder}/y", None, ours, async_=True).wait()
    checkpoint.load(f"{folder}/y", None, theirs)


def by_state_dict(ours, theirs, folder):
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))


def by_full_state(ours, theirs, folder):
    theirs.load_full_state_dict(shared(ours.full_state_dict()))


def by_consolidated_state(ours, theirs, folder):
    ours.consolidate_state_dict()
    theirs.load_state_dict(shared(ours.state_dict()))
    ours.consolidate_state_dict(to=None)


def by_torch(ours, theirs, folder):
    dcp.save({"optim": ours.state_dict()["state"]}, checkpoint_id=f"{folder}/dcp")
    state = theirs.state_dict()
    dcp.load({"optim": state["state"]}, checkpoint_id=f"{folder}/dcp")
    theirs.load_state_dict(state)


WAYS = (
    by_checkpoint,
    by_checkpoint_in_the_background,
    by_state_dict,
    by_full_state,
    by_consolidated_state,
    by_torch,
)


def save_what_was_written(rank, world_size, kind, is_cut, folder):
    for way in WAYS:
        params, optimizer = build(kind, world_size, is_cut)
        step(params, optimizer)
        before, masters = values_of(params), masters_of(params, optimizer)
        write(params, averages(params))
        others, theirs = build(kind, world_size, is_cut)
        step(others, theirs)
        write(others, averages(others))
        way(optimizer, theirs, f"{folder}/{way.__name__}")
        step(others, theirs, lr=0.0)
        assert all(map(torch.equal, values_of(others), averages(others))), way.__name__
        # what was put back has all bits of its master
        write(params, before)
        step(params, optimizer, lr=0.0)
        assert all(map(torch.equal, masters_of(params, optimizer), masters)), way.__name__


def masters_of(params, optimizer):
    states = [optimizer.state[p] for p in params if optimizer.state[p]]
    return [state["master"].clone() for state in states]


FORMS = pytest.mark.parametrize(
    ("num_ranks", "is_cut"), [(1, False), (2, False), (2, True)], ids=["one-rank", "buckets", "dtensors"]
)
KINDS = pytest.mark.parametrize("kind", ["adamw", "muon"])


@KINDS
@FORMS
def test_what_was_written_before_a_save_is_not_undone_behind_it(tmp_path, kind, num_ranks, is_cut):
    run_ranks(save_what_was_written, num_ranks, kind, is_cut, str(tmp_path), timeout=120)


def write_after_a_load(rank, world_size, kind, is_cut, folder):
    params, optimizer = build(kind, world_size, is_cut)
    step(params, optimizer)
    for way in WAYS:
        others, theirs = build(kind, world_size, is_cut)  # without states before
        way(optimizer, theirs, f"{folder}/{way.__name__}")
        write(others, averages(others))
        step(others, theirs, lr=0.0)
        assert all(map(torch.equal, values_of(others), averages(others))), way.__name__


@KINDS
@FORMS
def test_what_is_written_after_a_load_is_not_undone_by_the_next_step(tmp_path, kind, num_ranks, is_cut):
    run_ranks(write_after_a_load, num_ranks, kind, is_cut, str(tmp_path), timeout=120)


@KINDS
def test_copies_have_masters_of_what_was_written(kind):
    params, optimizer = build(kind, 1, False)
    step(params, optimizer)
    write(params, averages(params))
    others, copied = copy.deepcopy((params, optimizer))
    step(others, copied, lr=0.0)
    assert all(map(torch.equal, values_of(others), averages(others)))
    optimizer.close()
    copy.deepcopy(optimizer)
