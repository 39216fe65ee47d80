"""States that a user has changed to what no step can go on with are refused by name, before a step moves anything."""

import pytest
import torch
from dist_cases import mesh_of, normal
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from optim_dist import TritonDistMuonAdamW
from optim_utils.testing import run_ranks

KEYS = {
    "adamw": ("exp_avg", "exp_avg_sq", "step", "master"),
    "muon": ("momentum_buffer", "second_momentum_buffer", "master"),
}
OPTIONS = {"adamw": {}, "muon": {"beta2": 0.95}}


def sparse(value):
    return value.to_sparse()


def complex_(value):
    return value.to(torch.complex64)


def on_meta(value):
    return value.to("meta")


def of_another_shape(value):
    return torch.ones(3)


def a_number(value):
    return 1.5


def given(parameters, number):
    for place, (_, p) in enumerate(parameters):
        value = normal(tuple(p.shape), number, place).to(p.dtype)
        p.grad = distribute_tensor(value, p.device_mesh, p.placements) if hasattr(p, "device_mesh") else value


def build(kind, world_size, is_cut):
    values = [normal((8, 8), 3, place).bfloat16() for place in range(4)]
    if is_cut:
        values = [distribute_tensor(value, mesh_of(world_size), [Shard(0)]) for value in values]
    parameters = [(f"layer{place}", nn.Parameter(value)) for place, value in enumerate(values)]
    group = {"kind": kind, "params": parameters, "master_weights": "fp32", "lr": 0.1, **OPTIONS[kind]}
    optimizer = TritonDistMuonAdamW([group], timeout=20)
    for number in range(2):
        given(parameters, number)
        optimizer.step()
        optimizer.zero_grad()
    return parameters, optimizer


def last_own(parameters, optimizer):
    return [(name, optimizer.state[p]) for name, p in parameters if optimizer.state[p]][-1]


def assert_refused(parameters, optimizer, name, words):
    before = [p.detach().clone() for _, p in parameters]
    given(parameters, 2)
    with pytest.raises(ValueError, match=words) as raised:
        optimizer.step()
    assert name in str(raised.value)
    assert all(torch.equal(p.detach(), old) for (_, p), old in zip(parameters, before))


def refuse_each(rank, world_size, kind, is_cut):
    for key in KEYS[kind]:
        for change in (sparse, complex_, on_meta, of_another_shape, a_number):
            parameters, optimizer = build(kind, world_size, is_cut)
            name, state = last_own(parameters, optimizer)
            state[key] = change(state[key].to_local() if hasattr(state[key], "to_local") else state[key])
            assert_refused(parameters, optimizer, name, rf"^({name} cannot be updated: its|the) {key} .*")
        parameters, optimizer = build(kind, world_size, is_cut)
        name, state = last_own(parameters, optimizer)
        del state[key]
        given(parameters, 2)
        if key != "master":
            with pytest.raises(ValueError, match=f"^{name} cannot be updated: its state has .*, but needs {key} too"):
                optimizer.step()
            continue
        optimizer.step()
        assert last_own(parameters, optimizer)[1].keys() >= {"master"}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize(
    ("num_ranks", "is_cut"), [(1, False), (2, False), (2, True)], ids=["one-rank", "buckets", "dtensors"]
)
def test_what_cannot_be_updated_is_refused_before_anything_moves(kind, num_ranks, is_cut):
    run_ranks(refuse_each, num_ranks, kind, is_cut, timeout=120)


def refuse_each_of_the_loaded(rank, world_size, kind, is_cut):
    # what is lacking of the others is made anew, as where an option is new; a count may be a number
    lacking = {("adamw", key) for key in ("exp_avg", "exp_avg_sq", "step")}
    for key in KEYS[kind]:
        for change in (sparse, complex_, of_another_shape, a_number, None):
            if (key, change) == ("step", a_number) or (change is None and (kind, key) not in lacking):
                continue
            parameters, optimizer = build(kind, world_size, is_cut)
            optimizer.load_state_dict(optimizer.state_dict())
            name, state = last_own(parameters, optimizer)
            value = state.pop(key)
            if change is not None:
                state[key] = change(value.to_local() if hasattr(value, "to_local") else value)
            assert_refused(parameters, optimizer, name, rf"\b{key}\b")


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize(
    ("num_ranks", "is_cut"), [(1, False), (2, False), (2, True)], ids=["one-rank", "buckets", "dtensors"]
)
def test_states_changed_between_a_load_and_a_step_are_refused_before_anything_moves(kind, num_ranks, is_cut):
    run_ranks(refuse_each_of_the_loaded, num_ranks, kind, is_cut, timeout=120)


def test_a_master_that_was_taken_out_begins_as_its_parameter():
    """It was left out for good, and updates smaller than a 16-bit parameter shows were lost."""
    parameters, optimizer = build("adamw", 1, False)
    name, state = last_own(parameters, optimizer)
    value = dict(parameters)[name].detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    del state["master"]
    given(parameters, 2)
    optimizer.step()
    assert torch.equal(optimizer.state[dict(parameters)[name]]["master"], value.float())


def test_a_state_of_which_nothing_has_changed_is_not_checked_again(monkeypatch):
    parameters, optimizer = build("adamw", 1, False)
    given(parameters, 2)
    optimizer.step()
    checked = []
    monkeypatch.setattr(optimizer._routes["adamw"], "check_state", lambda shard, *_: checked.append(shard.name))
    for number in range(2):
        given(parameters, number)
        optimizer.step()
    assert checked == []
    last_own(parameters, optimizer)[1]["exp_avg"] = torch.zeros(8, 8)
    optimizer.step()
    assert "layer3" in checked
