"""Sharded Muon works on many matrices at once: the bits of one by one, and a number of calls that is not theirs."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from dist_cases import device_of, mesh_of, normal
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from optim_dist import TritonDistMuon
from optim_dist._muon.launches import Momenta, Updates
from optim_dist._muon.owner import Owner, WholeMatrix, room_for
from optim_dist._muon.plain_torch import apply_updates, momenta
from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.shards import Item, StepContext, make_shard
from optim_dist._reduction.joined import Joined, alike
from optim_kernels.functional import new_second_moment
from optim_kernels.functional._muon_batch_plan import MuonBatchPlan
from optim_kernels.muon_groups import MuonPlanner, init_state, muon_defaults
from optim_utils.param_groups import MatrixView
from optim_utils.testing import run_ranks


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9))), st.integers(1, 20))
def test_items_of_a_kind_come_together_up_to_the_limit(items, limit):
    found = list(alike(items, key=lambda item: item[0], numel=lambda item: item[1], limit=limit))
    for kind in range(3):
        mine = [some for some in found if some[0][0] == kind]
        assert [item for some in mine for item in some] == [item for item in items if item[0] == kind]
        assert all(sum(size for _, size in some) <= limit or len(some) == 1 for some in mine)
        # nothing is cut that would have fitted
        assert all(sum(s for _, s in a) + b[0][1] > limit for a, b in pairwise(mine))


def test_joined_tensors_are_written_back_in_their_shapes():
    tensors = [normal((2, 3), 1), normal((4, 2), 2).t(), torch.empty(0, 5), normal((), 3)]
    expected = [tensor * 2 for tensor in tensors]
    joined = Joined(tensors)
    joined.flat.mul_(2)
    joined.put_back()
    assert all(torch.equal(left, right) for left, right in zip(tensors, expected, strict=True))
    alone = Joined(tensors[:1])
    assert alone.flat is tensors[0]


def make_items(groups, dtype, missing=(), shapes=((4, 6), (3, 5), (8, 2)), device="cpu"):
    """Shards of three shapes in turn, each group with its options."""
    items = []
    for number in range(4 * len(groups)):
        group, shape = groups[number % len(groups)], shapes[number % 3]
        value = nn.Parameter(normal(shape, 1, number).to(device, dtype))
        entry = Entry(f"w{number}", value, number % len(groups), number, "muon")
        shard = make_shard(entry, number, 0, value.numel(), value.data)
        shard.gradient = None if number in missing else normal(shape, 2, number).to(value)
        state = {}
        init_state(value.detach(), MatrixView.identity(shape), group, state)
        items.append(Item(shard, group, state))
    return items


OPTIONS = {
    "plain": ({}, torch.float32),
    "cautious": ({"cautious": True, "nesterov": False, "maximize": True}, torch.float32),
    "bf16": ({"momentum_dtype": torch.float32}, torch.bfloat16),
    "masters": ({"master_weights": "fp32"}, torch.bfloat16),
    "split masters": ({"master_weights": "split16"}, torch.bfloat16),
    "at random": ({"stochastic_rounding": True}, torch.bfloat16),
}


def momenta_of(items, context):
    us = [torch.full_like(item.shard.value, float("nan")) for item in items]
    momenta(items, context, us)
    return us


@pytest.mark.parametrize("name", OPTIONS)
def test_together_is_one_by_one(name):
    options, dtype = OPTIONS[name]
    groups = [{**muon_defaults("nanochat-2025"), "lr": lr, "weight_decay": 0.1, **options} for lr in (0.1, 0.3)]
    context = StepContext(factor=torch.tensor(0.5))
    together, alone = (make_items(groups, dtype, missing=(1, 6)) for _ in range(2))
    views = [MatrixView.identity(item.shard.value.shape) for item in together]
    for _ in range(2):
        us = momenta_of(together, context)
        each = [momenta_of([item], context)[0] for item in alone]
        assert all(torch.equal(left, right) for left, right in zip(us, each, strict=True))
        apply_updates(together, views, us)
        for item, view, u in zip(alone, views, each, strict=True):
            apply_updates([item], [view], [u])
    for left, right in zip(together, alone, strict=True):
        assert torch.equal(left.shard.value, right.shard.value), left.shard.name
        for key, value in right.state.items():
            assert torch.equal(left.state[key], value), (left.shard.name, key)
    untouched = make_items(groups, dtype)[1]
    assert torch.equal(together[1].shard.value, untouched.shard.value)
    assert not torch.equal(together[0].shard.value, make_items(groups, dtype)[0].shard.value)


@pytest.mark.parametrize("name", OPTIONS)
def test_launches_have_the_bits_of_plain_torch(name):
    options, dtype = OPTIONS[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"  # there in Triton's interpreter
    found = []
    for impl in ("torch", "triton"):
        common = {**muon_defaults("nanochat-2025"), "weight_decay": 0.1, "seed": 3, "impl": impl, **options}
        groups = [{**common, "lr": 0.1}, {**common, "lr": 0.3, "momentum": 0.8}]
        items = make_items(groups, dtype, device=device)
        views = [MatrixView.identity(item.shard.value.shape) for item in items]
        by_momenta, by_updates = Momenta(), Updates()
        us = []
        for step in range(4):
            # one is left alone, then another; gradients lie elsewhere in every step
            for number, item in enumerate(items):
                item.shard.gradient = normal(item.shard.value.shape, 2, number, step).to(item.shard.value)
            items[step % 3].shard.gradient = None
            groups[0]["lr"] *= 0.9
            us.append([torch.full_like(item.shard.value, float("nan")) for item in items])
            context = StepContext(factor=torch.tensor(0.5, device=device), grad_scale=torch.tensor(4.0, device=device))
            by_momenta.run(items, context, us[-1])
            by_updates.run(items, views, us[-1])
            if impl == "triton":
                assert [len(each.sorter.launches) for each in (by_momenta, by_updates)] == [1, 1]
                assert by_momenta.sorter.rest == by_updates.sorter.rest == [step % 3]
            else:
                assert not by_momenta.sorter.launches
        found.append((items, us))
    (items, us), (launched, launched_us) = found
    assert all(torch.equal(*pair) for each in zip(us, launched_us, strict=True) for pair in zip(*each, strict=True))
    for left, right in zip(items, launched, strict=True):
        assert torch.equal(left.shard.value, right.shard.value), left.shard.name
        for key, value in left.state.items():
            assert torch.equal(right.state[key], value), (left.shard.name, key)
    untouched = make_items([muon_defaults("nanochat-2025")] * 2, dtype, device=device)
    assert not any(torch.equal(a.shard.value, b.shard.value) for a, b in zip(items, untouched, strict=True))


def test_what_launches_cannot_take_is_left_to_plain_torch_with_the_reason():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    group = {**muon_defaults("nanochat-2025"), "impl": "triton"}
    plain = {**group, "impl": "torch"}
    items = make_items([group, plain], torch.float32, device=device)
    expected = make_items([plain, plain], torch.float32, device=device)
    for each in (items, expected):
        each[2].shard.value = each[2].shard.value.t().contiguous().t()
        each[4].state["momentum_buffer"] = each[4].state["momentum_buffer"].double()
    views = [MatrixView.identity(item.shard.value.shape) for item in items]
    by_momenta, by_updates = Momenta(), Updates()
    for _ in range(2):
        us, wanted = ([torch.empty_like(item.shard.value) for item in each] for each in (items, expected))
        us[2] = us[2].contiguous()
        by_momenta.run(items, StepContext(), us)
        by_updates.run(items, views, us)
        momenta(expected, StepContext(), wanted)
        apply_updates(expected, views, wanted)
    for left, right in zip(items, expected, strict=True):
        assert torch.equal(left.shard.value, right.shard.value), left.shard.name
    assert by_momenta.sorter.rest == [1, 3, 4, 5, 7]
    assert by_momenta.sorter.reasons[4] == "its momentum is torch.float64; the kernels take float32, float16, bfloat16"
    assert by_momenta.sorter.reasons[1] == "impl='torch'"
    assert by_updates.sorter.rest == [1, 2, 3, 5, 7]
    assert by_updates.sorter.reasons[2].startswith("its value must be contiguous, but is torch.float32 of shape (8, 2)")


class Calls(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_elementwise_work_does_not_grow_with_the_number_of_matrices():
    found = []
    for number in (2, 6):
        items = make_items([muon_defaults("nanochat-2025")] * number, torch.float32)
        views = [MatrixView.identity(item.shard.value.shape) for item in items]
        with Calls() as calls:
            apply_updates(items, views, momenta_of(items, StepContext()))
        found.append({name: calls.counts[name] for name in ("mul", "add", "sub", "copy_", "cat", "_foreach_copy_")})
    few, many = found
    # a run for each scale of the learning rate: of three shapes two are tall, by different ratios
    assert few == many
    assert sum(many.values()) < 40


def test_an_owner_computes_directions_by_the_kernels():
    device = "cuda" if torch.cuda.is_available() else "cpu"  # there in Triton's interpreter
    shapes = ((8, 8), (4, 12), (6, 8))
    views = [
        MatrixView.identity((8, 8)),
        MatrixView(shape=(4, 12), transposed=True),
        MatrixView(shape=(6, 8), split=(2, 4)),
    ]
    found = {}
    for impl in ("torch", "triton"):
        group = {**muon_defaults("nanochat-2026-03"), "impl": impl, "ns_steps": 1, "ns_dtype": torch.float32}
        items = make_items([group], torch.float32, shapes=shapes, device=device)[:3]
        for item, view in zip(items, views, strict=True):
            item.state["second_momentum_buffer"] = new_second_moment(item.shard.value, view)
        matrices = [WholeMatrix(view, torch.float32) for view in views]
        memory = torch.full((room_for(matrices),), 255, dtype=torch.uint8, device=device)
        owner = Owner(matrices, memory, MuonPlanner())
        for u, shape in zip(owner.us, shapes, strict=True):
            u.copy_(normal(shape, 4))
        owner.compute(items)
        found[impl] = [o.clone() for o in owner.os] + [item.state["second_momentum_buffer"] for item in items]
    for by_torch, by_triton in zip(*found.values(), strict=True):
        assert by_torch.isfinite().all()
        torch.testing.assert_close(by_triton, by_torch, rtol=1e-3, atol=1e-4)


@dataclass
class Runs:
    """Plans made, runs of them, and launches of each run."""

    made: int = 0
    launches: list[int] = None


@contextmanager
def counted():
    """Plans are run on GPUs only: the interpreter takes seconds, and numbers are looked at elsewhere."""
    runs, make, run = Runs(launches=[]), MuonBatchPlan.__init__, MuonBatchPlan.run

    def making(plan, *arguments, **options):
        runs.made += 1
        make(plan, *arguments, **options)

    def running(plan, *arguments, **options):
        runs.launches.append(plan.launches)
        if torch.cuda.is_available():
            run(plan, *arguments, **options)

    MuonBatchPlan.__init__, MuonBatchPlan.run = making, running
    try:
        yield runs
    finally:
        MuonBatchPlan.__init__, MuonBatchPlan.run = make, run


SIZES = ((8, 8), (4, 12))


def count_plans(rank, world_size, cases):
    return [count_plans_of(rank, world_size, *case) for case in cases]


def count_plans_of(rank, world_size, num_matrices, bucket_mb):
    mesh, device = mesh_of(world_size), device_of(rank)
    shapes = [SIZES[number % 2] for number in range(num_matrices)]
    make = [normal(shape, 1, number).to(device) for number, shape in enumerate(shapes)]
    cut = [nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in make]
    groups = [{"params": cut[::2]}, {"params": cut[1::2], "lr": 0.1}]
    groups = [{"impl": "triton", **group} for group in groups]
    optimizer = TritonDistMuon(groups, ns_steps=1, bucket_mb=bucket_mb)
    with counted() as runs:
        for step in range(2):
            for number, parameter in enumerate(cut):
                gradient = normal(shapes[number], 2, number, step).to(device)
                parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
            optimizer.step()
    return runs.made, runs.launches


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def test_an_owner_runs_one_plan_a_batch(backend):
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    if backend == "gloo" and torch.cuda.is_available():
        pytest.skip("kernels are not interpreted where there is a GPU")
    # 2^20 bytes hold everything, half of all bytes does not
    half = 4 * sum(rows * columns for rows, columns in SIZES) * 4 / 2**20 / 2
    for few, many, batches in run_ranks(count_plans, 2, [(4, 1.0), (8, 1.0), (8, half)], backend=backend):
        assert few[0] == many[0] == 1, "made once"
        assert len(many[1]) == 2, "a run a step"
        assert many[1] == few[1], "launches do not depend on the number of matrices"
        assert batches[0] == 2
        assert len(batches[1]) == 4
