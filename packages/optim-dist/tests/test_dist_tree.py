"""order="tree": the same micro-batches give the same bits on 1, 2, 4 and 8 ranks, norms and states included."""

from __future__ import annotations

import copy

import pytest
import torch
from dist_cases import BACKENDS, assert_equal, assert_same_state, device_of, mesh_of, normal, world_sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from optim_dist import TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW, checkpoint
from optim_dist._optimizers.norm import norm_over_ranks
from optim_dist._reduction.collectives import Communicator
from optim_dist._reduction.tree import PassTree, is_power_of_two, sum_in_pairs
from optim_utils.testing import run_ranks

LEAVES = 8
TREE = {"order": "tree", "reducer": "exact", "gradients": "streamed"}


class Net(nn.Module):
    """Layers whose parameters no number of ranks divides; ``skip`` leaves the square one out, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, 17), nn.Linear(17, 11), nn.Linear(11, 11), nn.Linear(11, 3)])
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(0.3 * normal(tuple(parameter.shape), 31, number))

    def forward(self, x, skip):
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = torch.tanh(layer(x))
        return x.square().sum()


def make(net, kind, **options):
    if kind == "adamw":
        return TritonDistAdamW(net.named_parameters(), lr=0.05, **options)
    matrices = [item for item in net.named_parameters() if item[1].ndim == 2]
    if kind == "muon":
        return TritonDistMuon(matrices, **options)
    vectors = [item for item in net.named_parameters() if item[1].ndim == 1]
    return TritonDistMuonAdamW([{"kind": "muon", "params": matrices}, {"kind": "adamw", "params": vectors}], **options)


JOBS = {
    "adamw": {},
    "muon": {"kind": "muon"},
    "muon_adamw": {"kind": "muon_adamw", "clip": 0.5},
    "bf16": {"dtype": torch.bfloat16, "clip": 0.5},
    "bf16 with fp32 states": {"dtype": torch.bfloat16, "state_dtype": torch.float32, "master_weights": "split16"},
    "rounded at random": {"dtype": torch.bfloat16, "stochastic_rounding": True},
    "missing": {"skips": True, "clip": 0.1},
    "not averaged": {"average": False},
    "clipped in the step": {"max_norm": 0.3},
    "fp64": {"dtype": torch.float64, "clip": 0.5},
}


def train(rank, world_size, kind="adamw", dtype=torch.float32, clip=None, skips=False, steps=3, **options):
    """Parameters, norms and the whole state after some steps of ``LEAVES`` micro-batches, dealt to ranks."""
    device = device_of(rank)
    net = Net().to(device, dtype)
    passes = LEAVES // world_size
    options = {"bucket_mb": 3e-4, "model": net, "accumulation_steps": passes, **TREE, **options}
    if kind != "muon":
        optimizer = make(net, kind, **options)
    else:
        for name, parameter in net.named_parameters():
            parameter.requires_grad_("weight" in name)
        optimizer = make(net, kind, **options)
    # the mean over all micro-batches, or their sum
    scale = 1 / passes if options.get("average", True) else 1.0
    norms = []
    for step in range(steps):
        for number in range(passes):
            leaf = number * world_size + rank
            x = normal((3, 9), 41, step, leaf).to(device, dtype)
            skip = 2 if skips and (step == 1 or (leaf + step) % 3 == 0) else None
            (net(x, skip) * scale).backward()
        if clip is not None:
            norms.append(optimizer.clip_grad_norm_(clip).cpu())
        optimizer.step()
        norms.append(torch.zeros(()) if optimizer.grad_norm is None else optimizer.grad_norm.cpu())
        optimizer.zero_grad()
    state = optimizer.full_state_dict()
    net.state_dict()  # waits for gathers
    values = [parameter.detach().cpu().clone() for parameter in net.parameters()]
    optimizer.close()
    return values, norms, state


def train_all(rank, world_size):
    found = {name: train(rank, world_size, **job) for name, job in JOBS.items()}
    return found if rank == 0 else None


@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_do_not_tell_how_many_ranks_there_are(backend):
    sizes = world_sizes(backend, (1, 2, 4, 8))
    found = {size: run_ranks(train_all, size, backend=backend, timeout=240)[0] for size in sizes}
    for size in sizes[1:]:
        for name in JOBS:
            values, norms, state = found[size][name]
            expected, expected_norms, expected_state = found[1][name]
            assert_equal(values, expected, f"{name}, {size} ranks")
            assert_equal(norms, expected_norms, f"norms of {name}, {size} ranks")
            if name != "muon":
                assert_same_state(state, expected_state)
    # clipping did something, and what differs in size only was compared
    assert any(norm > 0.5 for norm in found[1]["muon_adamw"][1])
    assert not torch.equal(found[1]["adamw"][0][0], found[1]["missing"][0][0])


def test_without_a_process_group_as_with_one():
    # both in processes of their own: what other tests have set here decides how products are added up
    expected, found = (run_ranks(train_all, 1, init_process_group=has_one)[0] for has_one in (True, False))
    for name in JOBS:
        assert_equal(found[name][0], expected[name][0], name)
        assert_equal(found[name][1], expected[name][1], name)


def on_a_grid(rank, world_size):
    return train(rank, world_size, kind="muon_adamw", clip=0.5, mesh=mesh_of(2, world_size // 2))


def test_a_grid_of_ranks_has_the_same_bits():
    line, grid = run_ranks(on_a_grid, 4)[0], run_ranks(train_all, 1)[0]["muon_adamw"]
    assert_equal(line[0], grid[0], "parameters")
    assert_equal(line[1], grid[1], "norms")


def with_codes(rank, world_size):
    """8-bit moments of a matrix of 5000 elements, which is cut between their blocks."""
    net = nn.Linear(100, 50)
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(0.1 * normal(tuple(parameter.shape), 61, number))
    passes = LEAVES // world_size
    optimizer = TritonDistAdamW(net.parameters(), lr=0.01, state_dtype="int8", accumulation_steps=passes, **TREE)
    for step in range(3):
        for number in range(passes):
            x = normal((3, 100), 71, step, number * world_size + rank)
            (net(x).square().sum() / passes).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    return [parameter.detach().clone() for parameter in net.parameters()], optimizer.full_state_dict()


def test_8_bit_states_have_the_same_bits():
    found = [run_ranks(with_codes, size)[0] for size in (1, 2, 4)]
    for values, state in found[1:]:
        assert_equal(values, found[0][0], "parameters")
        assert_same_state(state, found[0][1])


def goes_on(rank, world_size, folder, first, last):
    """Steps ``first`` to ``last`` of a run that others go on with on any number of ranks."""
    net, passes = Net(), LEAVES // world_size
    optimizer = make(net, "muon_adamw", model=net, bucket_mb=3e-4, accumulation_steps=passes, **TREE)
    if first:
        checkpoint.load(folder / str(first), net, optimizer)
    for step in range(first, last):
        for number in range(passes):
            x = normal((3, 9), 81, step, number * world_size + rank)
            (net(x, None) / passes).backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(folder / str(last), net, optimizer)
    net.state_dict()
    return [parameter.detach().clone() for parameter in net.parameters()], optimizer.full_state_dict()


def test_runs_go_on_to_the_bit_on_other_numbers_of_ranks(tmp_path):
    ((expected, expected_state),) = run_ranks(goes_on, 1, tmp_path / "whole", 0, 4)
    for step, size in enumerate((4, 1, 8, 2)):
        values, state = run_ranks(goes_on, size, tmp_path / "parts", step, step + 1)[0]
    assert_equal(values, expected, "parameters")
    assert_same_state(state, expected_state)


def ranks_that_add_up_otherwise(rank, world_size):
    return train(rank, world_size, order="rank")[0]


def test_rank_order_is_another():
    # what the tree is for: a rank's own sum first is another rounding on two ranks than on four
    two, four = (run_ranks(ranks_that_add_up_otherwise, size)[0] for size in (2, 4))
    assert not all(map(torch.equal, two, four))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4), st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_the_tree_is_one_tree(levels, seed, dtype):
    number, wide = 2**levels, torch.promote_types(torch.float32, dtype)
    generator = torch.Generator().manual_seed(seed)
    leaves = torch.randn(number, 5, generator=generator, dtype=torch.float64).mul_(1e3).exp2_().to(dtype)
    leaves = torch.where(torch.isfinite(leaves), leaves, torch.ones((), dtype=dtype))
    wholes = []
    for world_size in (2**level for level in range(levels + 1)):
        root = torch.empty(5, dtype=wide)
        tree = PassTree(root, number // world_size)
        for _ in range(2):
            tree.restart()
            for ranks in leaves.split(world_size):
                tree.add(sum_in_pairs(ranks))
        assert tree.nbytes == (number // world_size).bit_length() * root.nbytes - root.nbytes
        wholes.append(root)
    expected = leaves.to(wide)
    while len(expected) > 1:
        expected = torch.stack([expected[k] + expected[k + 1] for k in range(0, len(expected), 2)])
    assert all(torch.equal(whole, expected[0]) for whole in wholes)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 300), st.integers(-140, 120))
def test_exact_norms(seed, size, exponent):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator, dtype=torch.float64) * 2.0**exponent
    gradient, communicator = values.float(), Communicator(None, torch.device("cpu"))

    def norm(*parts):
        return norm_over_ranks([(list(parts), None)], 2.0, communicator, is_exact=True)

    found = norm(gradient)
    assert torch.equal(norm(*gradient.flip(0).split(7)), found)
    torch.testing.assert_close(found, gradient.double().norm(), rtol=1e-8, atol=0.0)
    # the same but for a power of two, as the mean of a sum is
    if gradient.numel() and 2.0**-120 < gradient.abs().max() < 2.0**120:
        assert torch.equal(norm(gradient.double() / 4) * 4, norm(gradient.double()))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_norms_of_what_is_not_finite(bad):
    communicator = Communicator(None, torch.device("cpu"))
    found = norm_over_ranks([([torch.tensor([1.0, bad])], None)], 2.0, communicator, is_exact=True)
    torch.testing.assert_close(found, torch.tensor(bad, dtype=torch.float64), equal_nan=True)


def other_norms(rank, world_size):
    """A norm that is refused, on all ranks, leaves the step to go on with."""
    net = Net()
    twin = copy.deepcopy(net)
    (sum(twin(normal((3, 9), 91, each), None) for each in range(world_size)) / world_size).backward()
    average = torch.cat([p.grad.double().flatten() for p in twin.parameters() if p.grad is not None])
    optimizer = make(net, "adamw", accumulation_steps=1, **TREE)
    net(normal((3, 9), 91, rank), None).backward()
    with pytest.raises(ValueError, match="norm_type must be 2, inf or 0"):
        optimizer.clip_grad_norm_(1.0, 3.0)
    for norm_type in (0.0, float("inf"), 2.0):
        found = optimizer.clip_grad_norm_(1e9, norm_type)
        torch.testing.assert_close(found.double(), torch.linalg.vector_norm(average, norm_type), rtol=1e-6, atol=0)
    optimizer.step()


def test_norms_that_have_no_exact_sums_are_refused():
    for size in (1, 2):
        run_ranks(other_norms, size)


def refusals(rank, world_size):
    net = Net()
    with pytest.raises(ValueError, match=r"3 ranks do not fall into"):
        make(net, "adamw", accumulation_steps=2, **TREE)


def refused_dtensors(rank, world_size):
    weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh_of(2), [Shard(0)]))
    with pytest.raises(ValueError, match=r"a DTensor, whose gradients FSDP .* order='tree'"):
        TritonDistAdamW([("weight", weight)], accumulation_steps=2, **TREE)


def test_what_has_no_tree():
    run_ranks(refusals, 3)
    run_ranks(refused_dtensors, 2)
    net = Net()
    for options, message in (
        ({"reducer": "rs"}, r"give reducer='exact'"),
        ({"gradients": "resident"}, r"gradients='streamed' with it"),
        ({"accumulation_steps": 6}, r"power of two, got 6"),
        ({"reduce_dtype": torch.bfloat16}, r"leave reduce_dtype"),
        ({"reduced_dtype": torch.bfloat16}, r"leave reduce_dtype"),
        ({"order": "ring"}, r"order must be one of 'rank', 'tree', got 'ring'"),
    ):
        with pytest.raises(ValueError, match=message):
            make(net, "adamw", **{"accumulation_steps": 2, **TREE, **options})
    assert [number for number in range(-2, 9) if is_power_of_two(number)] == [1, 2, 4, 8]


def test_one_rank_keeps_its_habits():
    """States have the parameters' shapes, load from and into a torch optimizer, and copies go on alike."""
    net = Net()
    optimizer = make(net, "adamw", accumulation_steps=2, **TREE)
    theirs = torch.optim.AdamW(net.parameters(), lr=0.05)

    def step(net, optimizer):
        for leaf in range(2):
            net(normal((3, 9), 51, leaf), None).backward()
        assert all(parameter.grad is None for parameter in net.parameters())
        optimizer.step()

    step(net, optimizer)
    state = optimizer.state_dict()
    for number, parameter in enumerate(net.parameters()):
        assert state["state"][number]["exp_avg"].shape == parameter.shape
    theirs.load_state_dict(copy.deepcopy(state))
    other = Net()
    other.load_state_dict(net.state_dict())
    resumed = make(other, "adamw", accumulation_steps=2, **TREE)
    resumed.load_state_dict(copy.deepcopy(state))
    step(net, optimizer)
    step(other, resumed)
    for left, right in zip(net.parameters(), other.parameters()):
        assert torch.equal(left, right)
    assert "number j W + r" in str(optimizer.explain())
    assert optimizer.explain().data["order"] == "tree"
    net(normal((3, 9), 51, 0), None).backward()
    optimizer.zero_grad()  # the batch is given up
    before = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer.step()
    assert all(map(torch.equal, before, net.parameters()))
    optimizer.close()
    net(normal((3, 9), 51, 0), None).backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
