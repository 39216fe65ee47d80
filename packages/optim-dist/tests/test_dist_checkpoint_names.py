"""Models whose state calls parameters otherwise than they do: nothing is saved twice, and wrappers come and go."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist_cases import mesh_of, normal
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from optim_dist import TritonDistAdamW, checkpoint
from optim_dist._checkpoint import saving
from optim_utils import CombinedLinear
from optim_utils.testing import run_ranks


def build(form, is_sharded=False, seed=0):
    """Two linear layers around a normalization, one of them perhaps behind a wrapper or in a Linear's form."""
    first, last = nn.Linear(5, 7), nn.Linear(7, 3)
    for number, parameter in enumerate([*first.parameters(), *last.parameters()]):
        with torch.no_grad():
            parameter.copy_(normal(tuple(parameter.shape), seed, number))
    if form == "wrapped":
        first = checkpoint_wrapper(first)
    if form == "combined":
        first = CombinedLinear.from_linear(first, checkpoint_format="linear")
    model = nn.Sequential(first, nn.BatchNorm1d(7, affine=False), last)
    if is_sharded:
        fully_shard(model, mesh=mesh_of(dist.get_world_size()))
    return model, TritonDistAdamW(model.named_parameters(), lr=0.1, model=model)


def values(model):
    model.state_dict()  # waits for gathers in flight
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [value.detach().clone() for value in [*found, *model.buffers()]]


def rest_of_0_12_6(model, optimizer):
    trained = optimizer.trained_ids()
    names = {name for name, p in model.named_parameters() if id(p) in trained}
    return {name: value for name, value in model.state_dict().items() if name not in names}, set()


def save(rank, world_size, folder, form, is_sharded):
    model, optimizer = build(form, is_sharded)
    model(normal((4, 5), 9, rank)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoint.save(f"{folder}/new", model, optimizer)
    with mock.patch.object(saving, "rest_of_model", rest_of_0_12_6):
        checkpoint.save(f"{folder}/old", model, optimizer)
    return values(model), optimizer.full_state_dict().get("state")


def load(rank, world_size, folder, form, is_sharded):
    found = []
    for name in ("new", "old"):
        model, optimizer = build(form, is_sharded, seed=1)
        checkpoint.load(f"{folder}/{name}", model, optimizer)
        found.append((values(model), optimizer.full_state_dict().get("state")))
        # and what was loaded can be trained and saved
        model(normal((4, 5), 9, rank)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(f"{folder}/{name}-by-{world_size}-{form}", model, optimizer)
    return found


@pytest.mark.parametrize("is_sharded", [False, True], ids=["buckets", "FSDP2"])
@pytest.mark.parametrize(
    ("form", "others"),
    [("wrapped", ("wrapped", "plain")), ("plain", ("wrapped",)), ("combined", ("combined",))],
    ids=["wrapped", "plain", "combined"],
)
def test_trained_parameters_are_saved_once_whatever_the_state_calls_them(tmp_path, form, others, is_sharded):
    saved, state = run_ranks(save, 2, str(tmp_path), form, is_sharded)[0]
    rest = torch.load(tmp_path / "new" / "common.pt", weights_only=True)["model"]
    assert list(rest) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    for other in others:
        for world_size in (1, 2):
            is_cut = is_sharded and world_size > 1
            for found, found_state in run_ranks(load, world_size, str(tmp_path), other, is_cut)[0]:
                assert all(torch.equal(left, right) for left, right in zip(found, saved, strict=True))
                for index, entries in state.items():
                    for key, value in entries.items():
                        assert torch.equal(found_state[index][key], value)


class OwnState(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.BatchNorm1d(3)

    def state_dict(self):
        return super().state_dict()


def test_a_state_dict_without_arguments_is_asked_without_them(tmp_path):
    saved, other = OwnState(), OwnState()
    with torch.no_grad():
        for value in saved.state_dict().values():
            value.add_(3)
    checkpoint.save(tmp_path / "x", saved, TritonDistAdamW(saved.named_parameters()))
    assert len(torch.load(tmp_path / "x" / "common.pt", weights_only=True)["model"]) == 3
    checkpoint.load(tmp_path / "x", other, TritonDistAdamW(other.named_parameters()))
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in other.state_dict().items())


def test_what_is_frozen_on_one_side_alone_is_refused_behind_wrappers_too(tmp_path):
    for number, (saved, loading) in enumerate([("wrapped", "plain"), ("plain", "wrapped"), ("wrapped", "wrapped")]):
        for was_frozen in (True, False):
            path = tmp_path / f"{number}-{was_frozen}"
            model = build(saved)[0]
            model[0].requires_grad_(not was_frozen)
            checkpoint.save(path, model, TritonDistAdamW(model.named_parameters()))
            other = build(loading)[0]
            other[0].requires_grad_(was_frozen)
            before = values(other)
            with pytest.raises(checkpoint.CheckpointError, match="weight"):
                checkpoint.load(path, other, TritonDistAdamW(other.named_parameters()))
            assert all(torch.equal(left, right) for left, right in zip(values(other), before, strict=True))
