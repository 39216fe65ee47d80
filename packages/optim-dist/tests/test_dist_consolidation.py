"""``consolidate_state_dict``: the whole state on one rank, which saves alone; any number of ranks goes on from it."""

import io

import pytest
import torch
import torch.distributed as dist
from dist_cases import Scenarios, alone, device_of, mesh_of, normal
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from optim_dist import TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW
from optim_kernels import TritonMuonAdamW
from optim_utils.param_groups import MatrixView
from optim_utils.testing import run_ranks

scenario = Scenarios()


class Net(nn.Module):
    """A fused projection that Muon reads as matrices, shapes that no number of ranks divides, nothing, and a scalar."""

    def __init__(self, device):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2)
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.zeros(1))
        self.unused = nn.Parameter(torch.zeros(5))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(0.3 * normal(tuple(parameter.shape), 13, number))
        self.to(device)


def groups_of(net):
    """Muon groups with views, and the rest."""
    fused = [net.attention.in_proj_weight]
    matrices = [net.attention.out_proj.weight, net.up.weight, net.down.weight]
    muon = {id(p) for p in fused + matrices}
    rest = [p for p in net.parameters() if id(p) not in muon]
    options = {"kind": "muon", "lr": 0.02, "impl": "torch", "variant": "keller"}
    return [
        {**options, "params": fused, "views": [MatrixView(shape=(18, 6), split=(6, 6, 6))]},
        {**options, "params": matrices},
        {"kind": "adamw", "params": rest, "lr": 0.05, "weight_decay": 0.1},
    ]


def make(kind, net, **options):
    options = {"average": False, "reducer": "exact", "bucket_mb": 1e-4, **options}
    if kind == "adamw":
        return TritonDistAdamW(net.named_parameters(), lr=0.05, amsgrad=True, **options)
    if kind == "masters":
        named = [(name, p) for name, p in net.named_parameters() if p.dtype == torch.bfloat16]
        return TritonDistAdamW(named, lr=0.05, master_weights="split16", **options)
    return TritonDistMuonAdamW(groups_of(net), **options)


def give_gradients(net, step, rank):
    """The same sums at any number of ranks: those of the first one."""
    for number, (name, parameter) in enumerate(net.named_parameters()):
        parameter.grad = None
        if name == "unused":
            continue
        value = normal(tuple(parameter.shape), 17, number, step).to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        elif rank:
            value = torch.zeros_like(value)
        parameter.grad = value


def take_steps(net, optimizer, numbers, rank):
    for step in numbers:
        give_gradients(net, step, rank)
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


def assert_same_dict(actual, expected):
    """Two whole states: groups, and the same bits; of what has had no gradient, zeros or nothing."""
    assert actual["param_groups"] == expected["param_groups"]
    for number in actual["state"].keys() | expected["state"].keys():
        found, wanted = (each["state"].get(number, {}) for each in (actual, expected))
        if not (found and wanted):
            assert not any(value.any() for value in (found or wanted).values())
            continue
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert type(found[key]) is torch.Tensor, key
            assert found[key].device.type == "cpu"
            assert found[key].dtype == value.dtype
            assert torch.equal(found[key], value.cpu()), (number, key)


def saved_and_loaded(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@scenario(1, 2)
def full_states_load_with_weights_only(rank, world_size):
    """Also the views of fused projections."""
    net = Net(device_of(rank))
    optimizer = make("muon_adamw", net)
    take_steps(net, optimizer, range(1), rank)
    sent = [optimizer.full_state_dict()]
    dist.broadcast_object_list(sent, src=0)
    again = make("muon_adamw", Net(device_of(rank)))
    again.load_full_state_dict(saved_and_loaded(sent[0]))
    assert again.param_groups[0]["views"] == optimizer.param_groups[0]["views"]


@scenario(1, 2)
def the_whole_state_is_on_the_cpu_whatever_torchs_default_device(rank, world_size):
    net = Net(device_of(rank))
    optimizer = make("muon_adamw", net)
    take_steps(net, optimizer, range(1), rank)
    with torch.device("meta"):
        full = optimizer.full_state_dict()
    found = {(key, value.device.type) for state in full.get("state", {}).values() for key, value in state.items()}
    assert all(device == "cpu" for _, device in found), found
    assert rank or ("momentum_buffer", "cpu") in found


@scenario(1, 2)
def state_that_lies_otherwise_than_its_parameter_is_whole(rank, world_size):
    """Second moments of columns have the parameter's shape but not its strides; what is loaded may have any."""
    device = device_of(rank)
    values = [normal((3, 5, 1), 3, 0).permute(1, 0, 2).contiguous().permute(1, 0, 2), normal((4, 6), 3, 1).t()]
    columns, matrix = (nn.Parameter(value.to(device)) for value in values)
    groups = [{"params": [("columns", columns)], "nd": "batch"}, {"params": [("matrix", matrix)]}]
    muon = TritonDistMuon(groups, beta2=0.95, process_group=None if world_size > 1 else alone(rank))
    scale = nn.Parameter(normal((2, 3, 4, 5), 3, 2).to(device, memory_format=torch.channels_last))
    adamw = TritonDistAdamW([("scale", scale)], process_group=None if world_size > 1 else alone(rank))
    for p in (columns, matrix, scale):
        p.grad = torch.empty_like(p).copy_(normal(tuple(p.shape), 5, p.ndim))
    for optimizer in (muon, adamw):
        optimizer.step()
        sent = [optimizer.full_state_dict()]
        dist.broadcast_object_list(sent, src=0)
        for state in sent[0]["state"].values():
            for key, value in state.items():
                state[key] = value.contiguous()
        for state in optimizer.state.values():
            for key, value in state.items():
                if key == "second_momentum_buffer":
                    owned = [saved[key] for saved in sent[0]["state"].values() if saved[key].shape == value.shape]
                    assert torch.equal(value.cpu(), owned[0])
        strides = {(p, key): value.stride() for p, state in optimizer.state.items() for key, value in state.items()}
        for _ in range(2):
            optimizer.load_full_state_dict(sent[0])
            for p, state in optimizer.state.items():
                for key, value in state.items():
                    assert value.stride() == strides[p, key], (tuple(p.shape), key)
            again = [optimizer.full_state_dict()]
            dist.broadcast_object_list(again, src=0)
            for number, state in sent[0]["state"].items():
                for key, value in state.items():
                    assert torch.equal(again[0]["state"][number][key], value), (number, key)


@scenario(1, 2, 3)
def the_whole_state_is_that_of_one_process(rank, world_size):
    for kind in ("adamw", "muon_adamw"):
        net, twin = Net(device_of(rank)), Net(device_of(rank))
        optimizer, oracle = make(kind, net), make(kind, twin, process_group=alone(rank))
        for step in range(2 * world_size):
            take_steps(net, optimizer, [step], rank)
            take_steps(twin, oracle, [step], 0)
            to = step % world_size
            optimizer.consolidate_state_dict(to)
            found = optimizer.state_dict()
            if rank != to:
                assert found["plan"]["rank"] == rank  # its part, as ever
                continue
            assert "plan" not in found
            assert_same_dict(found, oracle.state_dict())
            loaded = saved_and_loaded(found)
            assert_same_dict(loaded, oracle.state_dict())
            other = Net(device_of(rank))
            theirs = torch.optim.AdamW(other.parameters()) if kind == "adamw" else TritonMuonAdamW(groups_of(other))
            theirs.load_state_dict(loaded)
            assert len(theirs.state) == len(loaded["state"])


@scenario(2, 3)
def dtensors_come_whole_and_go_back(rank, world_size):
    def build():
        net = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6)).to(device_of(rank))
        with torch.no_grad():
            for number, parameter in enumerate(net.parameters()):
                parameter.copy_(0.3 * normal(tuple(parameter.shape), 13, number))
        return net

    def optimizer_of(net, **options):
        first, second = net
        groups = [
            {"kind": "muon", "params": [first.weight, second.weight], "impl": "torch"},
            {"kind": "adamw", "params": [first.bias, second.bias]},
        ]
        return TritonDistMuonAdamW(groups, average=False, reducer="exact", **options)

    net, twin = build(), build()
    fully_shard(net[0], mesh=mesh_of(world_size))  # the other layer is in buckets
    optimizer, oracle = optimizer_of(net), optimizer_of(twin, process_group=alone(rank))
    take_steps(net, optimizer, range(2), rank)
    take_steps(twin, oracle, range(2), 0)
    to = world_size - 1
    optimizer.consolidate_state_dict(to)
    sent = [optimizer.state_dict() if rank == to else None]
    if rank == to:
        assert_same_dict(sent[0], oracle.state_dict())
    dist.broadcast_object_list(sent, src=to)
    again = build()
    again.load_state_dict(twin.state_dict())
    fully_shard(again, mesh=mesh_of(world_size))
    restored = optimizer_of(again)
    restored.load_state_dict(sent[0])
    take_steps(again, restored, range(2, 4), rank)
    take_steps(twin, oracle, range(2, 4), 0)
    for found, wanted in zip(again.parameters(), twin.parameters(), strict=True):
        assert torch.equal(found.full_tensor(), wanted)


@scenario(4)
def a_rank_of_a_grid_is_the_one_of_its_group(rank, world_size):
    """Chunks of a grid are owned in another order."""
    net = Net(device_of(rank))
    optimizer = make("adamw", net, mesh=mesh_of(2, 2, names=("replicate", "shard")))
    take_steps(net, optimizer, range(1), rank)
    for to in range(world_size):
        optimizer.consolidate_state_dict(to)
        assert ("plan" in optimizer.state_dict()) == (rank != to)


@scenario(1, 2)
def a_state_of_an_earlier_step_is_refused(rank, world_size):
    net = Net(device_of(rank))
    optimizer = make("adamw", net)
    optimizer.consolidate_state_dict()
    before = optimizer.state_dict()
    assert rank or before["state"] == {}
    steps = {
        r"step\(\)": lambda: take_steps(net, optimizer, range(1), rank),
        r"load_state_dict\(\)": lambda: optimizer.load_state_dict(parts),
        r"add_param_group\(\)": lambda: optimizer.add_param_group(
            {"params": [("late", nn.Parameter(torch.ones(3, device=device_of(rank))))]}
        ),
    }
    for what, change in steps.items():
        optimizer.consolidate_state_dict(to=None)
        parts = optimizer.state_dict()
        assert "is_whole" not in parts
        optimizer.consolidate_state_dict()
        assert ("is_whole" in optimizer.state_dict()) == (rank == 0)
        change()
        # on every rank
        with pytest.raises(RuntimeError, match=rf"^{what} came after consolidate_state_dict\(to=0\).* to=None"):
            optimizer.state_dict()
    optimizer.consolidate_state_dict()
    kept = optimizer.state_dict()
    copies = (
        {number: {k: v.clone() for k, v in state.items()} for number, state in kept["state"].items()}
        if not rank
        else {}
    )
    net.late = optimizer.param_groups[1]["params"][0]
    take_steps(net, optimizer, range(1, 3), rank)
    for number, state in copies.items():
        for key, value in state.items():
            assert torch.equal(kept["state"][number][key], value)  # a copy, which no step changes
    optimizer.close()
    with pytest.raises(RuntimeError, match="was closed"):
        optimizer.consolidate_state_dict()


@scenario(2)
def ranks_that_do_not_exist_or_differ_are_refused(rank, world_size):
    optimizer = make("adamw", Net(device_of(rank)))
    for to in (-1, 2, "first"):
        with pytest.raises(ValueError, match=rf"to must be one of the optimizer's ranks 0-1, got {to!r}"):
            optimizer.consolidate_state_dict(to)
    with pytest.raises(RuntimeError, match="to of consolidate_state_dict is 0 on rank 0, 1 on rank 1"):
        optimizer.consolidate_state_dict(to=rank)
    assert "plan" in optimizer.state_dict()


@scenario(2)
def a_part_that_was_saved_alone_says_what_was_missing(rank, world_size):
    net = Net(device_of(rank))
    optimizer = make("adamw", net)
    take_steps(net, optimizer, range(1), rank)
    sent = [optimizer.state_dict()]
    dist.broadcast_object_list(sent, src=0)
    if rank:
        with pytest.raises(ValueError, match=r"of rank 0 of 2.*; this is rank 1 .* called consolidate_state_dict\(\)"):
            optimizer.load_state_dict(sent[0])


@scenario(2)
def a_whole_state_of_other_shapes_is_refused(rank, world_size):
    net, optimizer = Net(device_of(rank)), None
    optimizer = make("adamw", net)
    take_steps(net, optimizer, range(1), rank)
    optimizer.consolidate_state_dict()
    sent = [optimizer.state_dict()]
    dist.broadcast_object_list(sent, src=0)
    sent[0]["state"][0]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"does not fit:\n  empty.exp_avg: shape \(2, 2\)") as refused:
        optimizer.load_state_dict(sent[0])
    assert "up.weight" not in str(refused.value)


@scenario.parametrize()
def test_consolidation(backend, world_size, name):
    scenario.check(backend, world_size, name)


def train_and_save(rank, world_size, folder, kind):
    """As a loop does that saves on one process alone."""
    net = Net("cpu")
    if kind == "masters":
        net.bfloat16()
    optimizer = make(kind, net)
    take_steps(net, optimizer, range(2), rank)
    optimizer.consolidate_state_dict()
    if rank == 0:
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/{kind}-{world_size}.pt")
    take_steps(net, optimizer, range(2, 4), rank)
    return [p.detach().clone() for p in net.parameters()]


def load_and_train(rank, world_size, folder, kind, saved_by):
    net = Net("cpu")
    if kind == "masters":
        net.bfloat16()
    saved = torch.load(f"{folder}/{kind}-{saved_by}.pt", weights_only=True)
    net.load_state_dict(saved["model"])
    optimizer = make(kind, net)
    optimizer.load_state_dict(saved["optimizer"])
    take_steps(net, optimizer, range(2, 4), rank)
    optimizer.wait()
    return [p.detach().clone() for p in net.parameters()]


def in_turn(rank, world_size, function, jobs):
    return [function(rank, world_size, *job) for job in jobs]


def test_any_number_of_ranks_goes_on_bitwise_from_one_file(tmp_path):
    kinds, sizes = ("adamw", "muon_adamw", "masters"), (1, 2, 3)
    jobs = [(str(tmp_path), kind) for kind in kinds]
    wanted = run_ranks(in_turn, 1, train_and_save, jobs)[0]
    for size in sizes[1:]:
        for found in run_ranks(in_turn, size, train_and_save, jobs):
            assert all(torch.equal(a, b) for f, w in zip(found, wanted) for a, b in zip(f, w, strict=True))
    for size in sizes:
        jobs = [(str(tmp_path), kind, saved_by) for kind in kinds for saved_by in sizes]
        for results in run_ranks(in_turn, size, load_and_train, jobs):
            for (_, kind, saved_by), found in zip(jobs, results, strict=True):
                for left, right in zip(found, wanted[kinds.index(kind)], strict=True):
                    assert torch.equal(left, right), f"{kind}: {saved_by} ranks to {size}"
