"""FSDP2's gradients, summed in rank order: the bits of one process that adds up the gradients of all ranks."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_cases import Scenarios, device_of, mesh_of, normal, sum_in_rank_order
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from optim_dist import TritonDistAdamW, reducers

BF16 = torch.bfloat16
POLICIES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"param_dtype": BF16, "reduce_dtype": BF16},
    "bf16 reduced in fp32": {"param_dtype": BF16, "reduce_dtype": torch.float32},
}

scenarios = Scenarios()


def make_net(device):
    """Shapes that no number of ranks divides."""
    net = nn.Sequential(nn.Linear(7, 65), nn.Tanh(), nn.Linear(65, 13), nn.Tanh(), nn.Linear(13, 1))
    with torch.no_grad():
        for number, p in enumerate(net.parameters()):
            p.copy_(normal(tuple(p.shape), 3, number) / 3)
    return net.to(device)


def shard(net, world_size, policy, reducer):
    for module in (net[0], net[2], net):
        fully_shard(module, mesh=mesh_of(world_size), mp_policy=MixedPrecisionPolicy(**policy))
    for module in net.modules():
        if reducer is not None and isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(reducer)
    return net


def local_gradients(net, policy, rank):
    """This rank's own, as FSDP2 gets them from autograd, in the dtype that it reduces."""
    alone = copy.deepcopy(net).to(policy.get("param_dtype", torch.float32))
    backward(alone, rank, alone[0].weight.dtype)
    return [p.grad.to(policy.get("reduce_dtype", torch.float32)) for p in alone.parameters()]


def backward(net, rank, dtype=torch.float32):
    inputs = normal((11, 7), 5, rank).to(next(net.parameters()).device, dtype)
    net(inputs).float().square().sum().backward()


def summed_by_one(gradients, world_size, factor):
    """The sums of all ranks' gradients in rank order, times a factor, rounded once."""
    found = []
    for gradient in gradients:
        every = [torch.empty_like(gradient) for _ in range(world_size)]
        dist.all_gather(every, gradient)
        total = sum_in_rank_order([each.float() for each in every])
        found.append((average(total, world_size) if factor is None else total * factor).to(gradient.dtype).float())
    return found


def average(total, world_size):
    # by a tensor: on CUDA the quotient by a Python number is a product with its inverse, and so rounded twice
    return total / torch.full_like(total, world_size)


@scenarios(2, 3, 4)
def gradients_are_those_of_one_process(rank, world_size):
    for name, policy in POLICIES.items():
        net = make_net(device_of(rank))
        wanted = summed_by_one(local_gradients(net, policy, rank), world_size, None)
        shard(net, world_size, policy, reducers.for_fsdp())
        backward(net, rank)
        for (parameter, p), expected in zip(net.named_parameters(), wanted, strict=True):
            assert torch.equal(p.grad.full_tensor(), expected), (name, parameter)
        optimizer = TritonDistAdamW(net.named_parameters(), lr=0.01)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()


@scenarios(2, 3)
def sums_are_scaled_as_fsdp_asks_for_it(rank, world_size):
    for factor, name in ((0.25, "fp32"), (0.3, "bf16")):
        policy = POLICIES[name]
        net = make_net(device_of(rank))
        wanted = summed_by_one(local_gradients(net, policy, rank), world_size, factor)
        shard(net, world_size, policy, reducers.for_fsdp())
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1 / factor)
        backward(net, rank)
        for (parameter, p), expected in zip(net.named_parameters(), wanted, strict=True):
            assert torch.equal(p.grad.full_tensor(), expected), (name, parameter)


# as FSDP2 makes it
premultiplied = getattr(dist, "_make_nccl_premul_sum", dist.ReduceOp.PREMUL_SUM)


@scenarios(2, 3)
def every_operation_of_fsdp_is_one_sum(rank, world_size):
    reduce = reducers.for_fsdp("exact")
    device, group = device_of(rank), mesh_of(world_size).get_group()
    for dtype in (torch.float16, BF16, torch.float32, torch.float64):
        contributions = [normal((world_size * 5,), 9, each).to(device, dtype) for each in range(world_size)]
        total = sum_in_rank_order([c.to(torch.promote_types(dtype, torch.float32)) for c in contributions])
        ops = {
            dist.ReduceOp.SUM: total,
            dist.ReduceOp.AVG: average(total, world_size),
            premultiplied(0.3): total * 0.3,
        }
        for op, expected in ops.items():
            given = reduce.allocate((world_size * 5,), dtype=dtype, device=device).copy_(contributions[rank])
            out = reduce.allocate((5,), dtype=dtype, device=device)
            reduce(output_tensor=out, input_tensor=given, group=group, op=op)
            assert torch.equal(out, expected.view(world_size, 5)[rank].to(dtype)), (dtype, op)
    with pytest.raises(ValueError, match="op must be SUM, AVG or PREMUL_SUM"):
        reduce(out, given, group, dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match="async_op=True"):
        reduce(out, given, group, dist.ReduceOp.SUM, async_op=True)


@scenarios(2, 3)
def complex_gradients_are_summed_part_by_part(rank, world_size):
    reduce, device = reducers.for_fsdp(), device_of(rank)
    contributions = [normal((world_size * 5, 2), 9, each).to(device) for each in range(world_size)]
    total = sum_in_rank_order(contributions)
    ops = {dist.ReduceOp.SUM: total, dist.ReduceOp.AVG: average(total, world_size), premultiplied(0.3): total * 0.3}
    for op, expected in ops.items():
        out = torch.empty(5, dtype=torch.complex64, device=device)
        reduce(out, torch.view_as_complex(contributions[rank]), mesh_of(world_size).get_group(), op)
        assert torch.equal(torch.view_as_real(out), expected.view(world_size, 5, 2)[rank]), op


@scenarios.parametrize()
def test_sums_of_fsdp(backend, world_size, name):
    scenarios.check(backend, world_size, name)


def test_other_reducers_are_refused():
    with pytest.raises(ValueError, match="reducer must be 'exact', got 'rs'; a reduce-scatter of the backend is what"):
        reducers.for_fsdp("rs")
