"""A mesh (replicate, shard) trains as a line of ranks does: the same bits, and few bytes over its slow dimension."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from dist_cases import (
    Case,
    Scenarios,
    Tensors,
    alone,
    assert_equal,
    assert_same_state,
    device_of,
    mesh_of,
    normal,
    train,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from optim_dist import TritonDistAdamW, TritonDistMuonAdamW, checkpoint
from optim_dist._reduction.grid import GridCommunicator

scenario = Scenarios()

MODEL = Case(
    "muon_adamw",
    (
        Tensors((13, 5), group=1),
        *(Tensors((8, 8)) for _ in range(5)),
        Tensors((), group=1),
        Tensors((0,), group=1),
        Tensors((127,), group=1, absent=frozenset({(1, 0), (2, 1)})),
        Tensors((6, 8), absent=frozenset({(0, -1)})),
        Tensors((17, 9), dtype=torch.bfloat16, group=1),
    ),
    ({"kind": "muon", "weight_decay": 0.1, "impl": "torch"}, {"kind": "adamw"}),
)


def grids(world_size):
    """Meshes over all ranks; in the last, ranks stand in columns."""
    yield mesh_of(2, world_size // 2)
    if world_size == 6:
        yield mesh_of(3, 2)
    kind = device_of(dist.get_rank()).type
    yield DeviceMesh(kind, torch.arange(world_size).view(world_size // 2, 2).t().contiguous())


@scenario(4, 6)
def every_grid_is_one_process(rank, world_size):
    expected = train(rank, 1, MODEL, world_size, {"process_group": alone(rank)})
    for mesh in grids(world_size):
        for bucket_mb in (None, 1e-3):
            found = train(rank, world_size, MODEL, 0, {"mesh": mesh, "reducer": "exact", "bucket_mb": bucket_mb})
            assert_equal(found["parameters"], expected["parameters"], f"{mesh}, {bucket_mb}")
            if dist.get_rank() == mesh.mesh[0, 0]:
                assert_same_state(found["state"], expected["state"])
            else:
                assert found["state"] == {}


@scenario(4, 6)
def the_backends_sums_are_within_rounding(rank, world_size):
    case = Case("adamw", tuple(Tensors((n,)) for n in (3, 50, 1000)), ({"lr": 0.01, "eps": 1e-3},), max_norm=0.5)
    expected = train(rank, 1, case, world_size, {"process_group": alone(rank)})
    for mesh in grids(world_size):
        found = train(rank, world_size, case, 0, {"mesh": mesh, "reducer": "rs"})
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        for actual, wanted in zip(found["parameters"], expected["parameters"], strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


@scenario(4)
def backward_and_forward_overlap_as_on_a_line(rank, world_size):
    def make(**options):
        net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).to(device_of(rank))
        with torch.no_grad():
            for number, parameter in enumerate(net.parameters()):
                parameter.copy_(0.3 * normal(tuple(parameter.shape), 5, number))
        groups = [
            {"kind": kind, "params": [p for p in net.parameters() if (p.ndim == 2) == (kind == "muon")]}
            for kind in ("muon", "adamw")
        ]
        groups[0]["impl"] = "torch"
        return net, TritonDistMuonAdamW(groups, model=net, reducer="exact", bucket_mb=2e-4, **options)

    nets = [make(mesh=mesh_of(2, 2), accumulation_steps=2), make()]
    for step in range(3):
        for net, optimizer in nets:
            for micro in range(2):
                net(normal((3, 6), rank, step, micro).to(device_of(rank))).square().sum().backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    values = [[value.clone() for value in net.state_dict().values()] for net, _ in nets]
    # norms are sums of other pieces, so that factors may differ in the last bit
    for left, right in zip(*values, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@scenario(4)
def a_batch_is_dropped_that_gave_ranks_other_gradients(rank, world_size):
    """One has all gradients of a bucket, for which it does not wait for the others under backward."""
    for reducer in ("rs", "exact"):
        a, b = (nn.Parameter(torch.ones(5, device=device_of(rank))) for _ in range(2))
        optimizer = TritonDistAdamW([a, b], lr=0.1, weight_decay=0.0, mesh=mesh_of(2, 2), reducer=reducer)
        with optimizer.no_sync():
            pass  # from now on backward reduces
        (a.sum() if rank else (a + b).sum()).backward()
        a.grad = b.grad = None
        optimizer.full_state_dict()
        (a + b).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(torch.cat([a, b]).detach().cpu(), torch.full((10,), 0.9))
        is_off = optimizer.explain().data["phases"]["reduction under backward"].startswith("off: here the host waits")
        assert is_off == (reducer == "rs" and a.device.type == "cpu")


@scenario(4, 6)
def little_travels_over_the_slow_dimension(rank, world_size):
    for mesh in grids(world_size):
        num_replicas, num_shards = mesh.shape
        parameter = nn.Parameter(torch.ones(120_000, device=device_of(rank)))
        optimizer = TritonDistAdamW([("w", parameter)], mesh=mesh)
        communicator = optimizer.communicator
        assert isinstance(communicator, GridCommunicator)
        sent = []
        for group in (communicator._replicate, communicator._shard):
            group.traffic = type(group.traffic)()
            sent.append(group)
        parameter.grad = torch.full_like(parameter, rank)
        optimizer.step()
        nbytes = 4 * optimizer.plan.buckets[0].numel
        between, inside = (group.traffic.bytes_sent for group in sent)
        message = 100 * world_size
        assert inside == pytest.approx(2 * nbytes * (num_shards - 1) / num_shards, abs=message)
        assert between == pytest.approx(2 * nbytes / num_shards * (num_replicas - 1) / num_replicas, abs=message)
        assert between + inside == pytest.approx(optimizer.plan.wire_bytes, abs=2 * message)


@scenario(4)
def checkpoints_go_from_grids_to_lines_and_back(rank, world_size):
    from tempfile import mkdtemp

    folder = [mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    net = nn.Linear(7, 5).to(device_of(rank))
    optimizers = {}
    for name, options in {"grid": {"mesh": mesh_of(2, 2)}, "line": {}}.items():
        twin = nn.Linear(7, 5).to(device_of(rank))
        twin.load_state_dict(net.state_dict())
        optimizers[name] = twin, TritonDistAdamW(twin.named_parameters(), lr=0.1, reducer="exact", **options)
    for step, (source, target) in enumerate([("grid", "line"), ("line", "grid")]):
        model, optimizer = optimizers[source]
        model(normal((3, 7), rank, step).to(device_of(rank))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(f"{folder[0]}/{step}", model, optimizer)
        other, restored = optimizers[target]
        checkpoint.load(f"{folder[0]}/{step}", other, restored)
        assert_equal(list(other.parameters()), list(model.parameters()), target)
        full, wanted = restored.full_state_dict(), optimizer.full_state_dict()
        if rank == 0:
            assert_same_state(full, wanted)


@scenario(4)
def grids_in_any_order_that_groups_can_have(rank, world_size):
    """Rows in one order, columns in one order; others are refused, as groups number their ranks from the lowest up."""
    kind = device_of(dist.get_rank()).type
    expected = train(rank, 1, MODEL, world_size, {"process_group": alone(rank)})
    for rows in ([[1, 0], [3, 2]], [[2, 3], [0, 1]]):
        options = {"mesh": DeviceMesh(kind, rows), "reducer": "exact"}
        assert_equal(train(rank, world_size, MODEL, 0, options)["parameters"], expected["parameters"], f"{rows}")
    for rows in ([[0, 1], [3, 2]], [[3, 1], [0, 2]], [[0, 3], [1, 2]]):
        mesh = DeviceMesh(kind, rows)
        with pytest.raises(ValueError, match=r"the same order in every row .* such as \[\[0, 1\], \[2, 3\]\]"):
            TritonDistAdamW([nn.Parameter(torch.ones(8, device=device_of(rank)))], mesh=mesh)


@scenario(4)
def grids_of_one_row_or_column_are_lines(rank, world_size):
    for sizes in ((1, 4), (4, 1)):
        parameter = nn.Parameter(torch.ones(10, device=device_of(rank)))
        optimizer = TritonDistAdamW([("w", parameter)], mesh=mesh_of(*sizes))
        assert optimizer.communicator.world_size == 4
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    with pytest.raises(ValueError, match=r"one dimension, or two \(replicate, shard\), got 3"):
        TritonDistAdamW([parameter], mesh=mesh_of(2, 2, 1))


def test_the_stream_of_its_own_device_waits(monkeypatch):
    """Stand-ins for streams: what is current may be another device."""
    device, waited = torch.device("cuda", 1), []

    class Stream:
        def __init__(self, number):
            self.number = number

        def wait_stream(self, other):
            waited.append((self.number, other.number))

        def record_event(self):
            return "done"

        def wait_event(self, event):
            waited.append((self.number, event))

    streams = {torch.device("cuda", number): Stream(number) for number in (0, 1)}
    current = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[device or current])
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    grid = object.__new__(GridCommunicator)
    grid.device, grid._stream = device, Stream("own")
    finished = SimpleNamespace(wait=lambda: None)
    grid._in_turn(lambda: finished, lambda: finished).wait()
    assert waited == [("own", 1), (1, "done")]


@pytest.mark.slow
@scenario.parametrize()
def test_grid(backend, world_size, name):
    scenario.check(backend, world_size, name)
