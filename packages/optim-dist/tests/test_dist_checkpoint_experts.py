"""Optimizers of different ranks over one model: experts of some ranks beside layers of all, each with a checkpoint."""

import itertools

import pytest
import torch
from dist_cases import normal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from optim_dist import TritonDistAdamW, checkpoint
from optim_utils.testing import run_ranks


class Net(nn.Module):
    """A layer that all ranks share behind an expert, of which this rank's is number ``expert``."""

    def __init__(self, expert, seed=0):
        super().__init__()
        self.expert, self.shared = nn.Linear(5, 7), nn.Linear(7, 3)
        with torch.no_grad():
            for place, parameter in enumerate(self.expert.parameters()):
                parameter.copy_(normal(tuple(parameter.shape), seed, expert, place))
            for place, parameter in enumerate(self.shared.parameters()):
                parameter.copy_(normal(tuple(parameter.shape), seed, 9, place))

    def forward(self, x):
        return self.shared(self.expert(x).tanh())


def build(mesh, seed=0):
    """A model, and its optimizers: of layers that all ranks share, and of this rank's expert."""
    net = Net(mesh["expert"].get_local_rank(), seed)
    shared = TritonDistAdamW(net.shared.named_parameters(prefix="shared"), lr=0.1, model=net)
    return net, [shared, expert_optimizer(mesh, net)]


def expert_optimizer(mesh, net):
    return TritonDistAdamW(net.expert.named_parameters(prefix="expert"), lr=0.1, model=net, mesh=mesh["replica"])


def train(rank, net, optimizers, steps):
    for step in steps:
        net(normal((4, 5), step, rank)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def values(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def go_on(rank, world_size, folder, is_async):
    """Whether runs that load both checkpoints, in either order, go on bitwise as the one that saved them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "expert"))
    paths = [f"{folder}/shared", f"{folder}/expert-{mesh['expert'].get_local_rank()}"]
    net, optimizers = build(mesh)
    train(rank, net, optimizers, range(2))
    for path, optimizer in zip(paths, optimizers):
        checkpoint.save(path, net, optimizer, async_=is_async)
    train(rank, net, optimizers, range(2, 4))
    expected = values(net)
    for order in itertools.permutations(range(2)):
        net, optimizers = build(mesh, seed=1)
        for number in order:
            checkpoint.load(paths[number], net, optimizers[number])
        train(rank, net, optimizers, range(2, 4))
        torch.testing.assert_close(values(net), expected, rtol=0, atol=0)


@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "in the background"])
def test_each_checkpoint_has_what_its_own_optimizer_trains(tmp_path, is_async):
    run_ranks(go_on, 4, str(tmp_path), is_async)
    # buffers and frozen parameters are in the common file, which the first rank writes
    for name in ("shared", "expert-0", "expert-1"):
        assert not torch.load(tmp_path / name / "common.pt")["model"]


def load_without_the_other(rank, world_size, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "expert"))
    net, optimizers = build(mesh)
    checkpoint.save(f"{folder}/both", net, optimizers[0])
    optimizers.pop().close()
    before = values(net)
    with pytest.raises(checkpoint.CheckpointError, match=r"expert.weight: not in the checkpoint, since an optimizer"):
        checkpoint.load(f"{folder}/both", net, optimizers[0])
    checkpoint.save(f"{folder}/one", net, optimizers[0])
    optimizers.append(expert_optimizer(mesh, net))
    with pytest.raises(checkpoint.CheckpointError, match=r"expert.weight: in the checkpoint, but an optimizer"):
        checkpoint.load(f"{folder}/one", net, optimizers[0])
    torch.testing.assert_close(values(net), before, rtol=0, atol=0)
    checkpoint.load(f"{folder}/both", net, optimizers[0])


def test_an_optimizer_of_other_ranks_that_was_there_at_one_time_alone_is_named(tmp_path):
    run_ranks(load_without_the_other, 4, str(tmp_path))
