"""A small model with an optimizer over ranks, and the batches that every rank computes for itself."""

import torch
from dist_cases import device_of, normal
from torch import nn

from optim_dist import TritonDistAdamW, TritonDistMuonAdamW


class Net(nn.Module):
    """Layers of one shape; ``skip`` leaves one out, so that its parameters get no gradient."""

    def __init__(self, device, num_layers=4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(num_layers))
        for number, parameter in enumerate(self.parameters()):
            with torch.no_grad():
                parameter.copy_(0.3 * normal(tuple(parameter.shape), 11, number))
        self.to(device)

    def forward(self, x, skip=None):
        x = x.to(self.layers[0].weight.device)  # batches of other ranks may be on theirs
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = torch.tanh(layer(x))
        return x.square().sum()


def batch(rank, step, micro=0):
    return normal((3, 5), 21, rank, step, micro).to(device_of(rank))


def build(rank, num_layers=4, **options):
    net = Net(device_of(rank), num_layers)
    options = {"lr": 0.05, "reducer": "exact", "bucket_mb": 1e-4, **options}
    return net, TritonDistAdamW(net.named_parameters(), model=net, **options)


def nothing_skipped(rank, step, micro):
    """For ``backward``: no layer is left out."""


def backward(net, rank, step, micro=0, skip=nothing_skipped):
    dtype = next(net.parameters()).dtype
    net(batch(rank, step, micro).to(dtype), skip(rank, step, micro)).backward()


def make(net, kind="adamw", **options):
    """An optimizer of the whole net, or of matrices and the rest apart."""
    if kind == "adamw":
        return TritonDistAdamW(net.named_parameters(), lr=0.05, **options)
    matrices = [item for item in net.named_parameters() if item[1].ndim == 2]
    vectors = [item for item in net.named_parameters() if item[1].ndim == 1]
    groups = [{"kind": "muon", "params": matrices, "impl": "torch"}, {"kind": "adamw", "params": vectors}]
    return TritonDistMuonAdamW(groups, **options)


def values(net):
    net.state_dict()  # waits for gathers in flight
    return [parameter.detach().clone() for parameter in net.parameters()]


def assert_same_updates(actual, expected, kind):
    """The same bits, but of matrices on GPUs, where batches of other sizes are multiplied in another order."""
    if kind == "adamw" or not actual[0].is_cuda:
        assert_same(actual, expected)
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-2, atol=1e-3)


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
