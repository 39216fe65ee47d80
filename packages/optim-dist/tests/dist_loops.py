"""A small model with an optimizer over ranks, and the batches that every rank computes for itself."""

import torch
from dist_cases import device_of, normal
from torch import nn

from optim_dist import TritonDistAdamW


class Net(nn.Module):
    """Four layers; ``skip`` leaves one out, so that its parameters get no gradient."""

    def __init__(self, device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        for number, parameter in enumerate(self.parameters()):
            with torch.no_grad():
                parameter.copy_(0.3 * normal(tuple(parameter.shape), 11, number))
        self.to(device)

    def forward(self, x, skip=None):
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = torch.tanh(layer(x))
        return x.square().sum()


def batch(rank, step, micro=0):
    return normal((3, 5), 21, rank, step, micro).to(device_of(rank))


def build(rank, **options):
    net = Net(device_of(rank))
    options = {"lr": 0.05, "reducer": "exact", "bucket_mb": 1e-4, **options}
    return net, TritonDistAdamW(net.named_parameters(), model=net, **options)


def values(net):
    net.state_dict()  # waits for gathers in flight
    return [parameter.detach().clone() for parameter in net.parameters()]


def assert_same(actual, expected):
    assert all(torch.equal(left, right) for left, right in zip(actual, expected, strict=True))


class LateWork:
    """A gather whose result appears when it is waited for."""

    def __init__(self, work, flat, arrived):
        self.work, self.flat, self.arrived = work, flat, arrived

    def wait(self):
        self.work.wait()
        self.flat.copy_(self.arrived)


def delay_gathers(optimizer):
    communicator = optimizer.communicator
    gather = communicator.all_gather_

    def late(flat):
        arrived = flat.clone()
        return LateWork(gather(arrived), flat, arrived)

    communicator.all_gather_ = late
