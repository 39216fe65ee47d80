"""transport="symm": ranks copy from each other's memory. Without GPUs that is files which all of them map."""

from __future__ import annotations

import gc
import tempfile
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from dist_cases import BACKENDS, Scenarios, assert_equal, device_of, mesh_of, normal, world_sizes
from dist_loops import Net, assert_same, batch, build, values
from dist_peers import hold_copies, share_host_memory
from torch import nn

from optim_dist import Options, TritonDistAdamW, TritonDistMuonAdamW, checkpoint
from optim_dist._optimizers.gradient_dtype import IS_SUPPORTED
from optim_dist._reduction import meetings, peers
from optim_dist._reduction.collectives import Communicator
from optim_utils.testing import run_ranks

JOBS = {
    "adamw": {},
    "muon and adamw": {"kind": "muon_adamw"},
    "clipped": {"kind": "muon_adamw", "max_norm": 0.5},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "fp32 sums of bf16": {"dtype": torch.bfloat16, "reduced_dtype": torch.float32},
    "sent in bf16": {"reduce_dtype": torch.bfloat16},
    "under backward": {"kind": "muon_adamw", "accumulation_steps": 2},
    "streamed": {"kind": "muon_adamw", "accumulation_steps": 2, "gradients": "streamed"},
    "in a tree": {"accumulation_steps": 2, "gradients": "streamed", "order": "tree"},
    "without overlap": {"overlap": False},
    "8 bits": {"state_dtype": "int8"},
    "fp64": {"dtype": torch.float64},
}
if IS_SUPPORTED:  # not in torch 2.9
    JOBS["fp32 gradients"] = {"dtype": torch.bfloat16, "grad_dtype": torch.float32}


def optimizer_of(net, kind="adamw", **options):
    if kind == "adamw":
        return TritonDistAdamW(net.named_parameters(), lr=0.05, **options)
    matrices = [item for item in net.named_parameters() if item[1].ndim == 2]
    others = [item for item in net.named_parameters() if item[1].ndim != 2]
    return TritonDistMuonAdamW([{"kind": "muon", "params": matrices}, {"kind": "adamw", "params": others}], **options)


def train(rank, kind="adamw", dtype=torch.float32, steps=3, **options):
    """Parameters after every step; ranks lack other layers in other micro-batches."""
    net = Net(device_of(rank)).to(dtype)
    optimizer = optimizer_of(net, kind, model=net, reducer="exact", bucket_mb=1e-4, **options)
    assert len(optimizer.plan.buckets) > 1
    found, at_first = [], optimizer.communicator.traffic.bytes_sent
    with pytest.MonkeyPatch.context() as patch:
        # what is streamed waits for other ranks under backward, where these might wait for what is held
        if options.get("transport") == "symm" and "gradients" not in options:
            hold_copies(optimizer, patch)
        for step in range(steps):
            for micro in range(2):
                skip = (rank + step + micro) % 3 if step else None
                net(batch(rank, step, micro).to(dtype), skip).backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [value.cpu() for value in values(net)]
    sent = optimizer.communicator.traffic.bytes_sent - at_first
    optimizer.close()
    return found, sent


def train_all(rank, world_size, transport):
    share_host_memory()
    return {name: train(rank, transport=transport, **job) for name, job in JOBS.items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_and_bytes_are_those_of_exact_sums_by_the_backend(backend):
    for world_size in world_sizes(backend, (2, 4)):
        found, expected = (
            run_ranks(train_all, world_size, transport, backend=backend, timeout=240)
            for transport in ("symm", "backend")
        )
        for name in JOBS:
            for rank in range(world_size):
                assert_equal(found[rank][name][0], expected[0][name][0], f"{name} on rank {rank} of {world_size}")
                assert found[rank][name][1] == expected[rank][name][1] > 0, name
        first, *_, last = found[0]["adamw"][0]
        assert first.isfinite().all()
        assert last.isfinite().all()


scenario = Scenarios()


@scenario(3)
def an_odd_number_of_ranks_of_which_one_has_no_gradient(rank, world_size):
    share_host_memory()
    found = []
    for transport in ("symm", "backend"):
        net = Net(device_of(rank))
        optimizer = optimizer_of(net, reducer="exact", transport=transport, model=net, accumulation_steps=1)
        for step in range(3):
            if rank != step:
                net(batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(values(net))
        optimizer.close()
    assert_same(*found)


@scenario(2)
def rs_is_exact_there(rank, world_size):
    share_host_memory()
    _, optimizer = build(rank, transport="symm", reducer="rs")
    assert optimizer.explain().data["reducer"] == "exact"
    assert optimizer.explain().data["transport"] == "symm"
    assert "buckets travel by copies between the memories of ranks\n" in optimizer.explain()
    assert "for the step's copies beside backward at once" in optimizer.explain()


def come_and_go(rank, folder, transport):
    """Parameters after steps between which a group comes, one is frozen, and all are saved and loaded."""
    net, more = Net(device_of(rank)), torch.nn.Parameter(normal((40,), 5).to(device_of(rank)))
    optimizer = optimizer_of(net, reducer="exact", transport=transport, bucket_mb=1e-4)

    def step(number):
        (net(batch(rank, number)) + (more * (rank + 1)).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        more.grad = None

    step(0)
    optimizer.add_param_group({"params": [("more", more)]})
    step(1)
    next(net.parameters()).requires_grad_(False)
    optimizer.rebuild_plan()
    step(2)
    checkpoint.save(folder, net, optimizer)
    saved = values(net)
    step(3)
    assert not all(map(torch.equal, values(net), saved))
    checkpoint.load(folder, net, optimizer)
    assert_same(values(net), saved)
    step(4)
    optimizer.close()
    return [*values(net), more.detach()]


@scenario(2)
def groups_plans_and_checkpoints_come_and_go(rank, world_size):
    share_host_memory()
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    found = [come_and_go(rank, f"{folders[0]}/{transport}", transport) for transport in ("symm", "backend")]
    assert_same(*found)


@scenario(2)
def memory_goes_with_its_buckets(rank, world_size):
    share_host_memory()
    net, optimizer = build(rank, transport="symm")
    memory = optimizer.communicator._memory
    net(batch(rank, 0)).backward()
    optimizer.step()
    board = world_size * (peers.MESSAGE_BYTES + peers.FLAG_BYTES)  # stays, for ranks to meet by
    assert len(memory._regions) == 2 * len(optimizer.plan.buckets) + 1
    assert optimizer.communicator.bytes_shared == optimizer.plan.nbytes + optimizer.plan.gradient_nbytes + board
    storages = [weakref.ref(bucket.values.untyped_storage()) for bucket in optimizer._bucketed.buckets]
    optimizer.zero_grad()
    optimizer.close()
    gc.collect()
    assert len(memory._regions) == 1
    assert optimizer.communicator.bytes_shared == board
    assert not any(storage() is not None for storage in storages)
    gone = weakref.ref(memory), weakref.ref(memory._board.untyped_storage())
    del optimizer, memory
    gc.collect()
    assert not any(each() is not None for each in gone)


@scenario(2)
def what_others_do_not_see_goes_by_the_backend(rank, world_size):
    share_host_memory()
    _, optimizer = build(rank, transport="symm")
    ours = optimizer.communicator
    flat = torch.zeros(4, device=device_of(rank))
    flat[2 * rank :][:2] = rank + 1
    ours.all_gather_(flat).wait()
    assert flat.tolist() == [1, 1, 2, 2]
    assert [found["rank"] for found in ours.gather_json({"rank": rank})] == [0, 1]
    assert ours.gather_message(torch.tensor([rank], device=device_of(rank))).flatten().tolist() == [0, 1]


def _trained(rank, change=lambda net: None, steps=3, is_scaled=False, **options):
    """Parameters after steps of two passes, the first of which only accumulates, and what ran beside backward."""
    net, optimizer = build(rank, reducer="exact", bucket_mb=1e-4, **options)
    scaler, beside = torch.amp.GradScaler(device_of(rank).type, init_scale=256.0, enabled=is_scaled), []
    with pytest.MonkeyPatch.context() as patch:
        if "symm" in options.values():
            beside = hold_copies(optimizer, patch)
        for step in range(steps):
            with nullcontext() if "accumulation_steps" in options else optimizer.no_sync():
                scaler.scale(net(batch(rank, step, 0))).backward()
            scaler.scale(net(batch(rank, step, 1))).backward()
            if "symm" in options.values():
                assert all(bucket.is_as_noted for bucket in optimizer._bucketed.buckets)
                assert not optimizer._bucketed.reduction.has_launched
            change(net)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    size = len(optimizer._bucketed.buckets)
    found = values(net)
    optimizer.close()
    return found, [beside[at : at + size] for at in range(0, len(beside), size)]


@scenario(2)
def gradients_are_taken_under_backward_and_copied_in_the_step(rank, world_size):
    share_host_memory()
    for options in ({"accumulation_steps": 2}, {}):
        found, steps = _trained(rank, transport="symm", **options)
        assert_same(found, _trained(rank, transport="backend", **options)[0])
        # memory that is used for the first time may be read by what backward has left on the device
        assert not any(steps[0])
        assert all(steps[1])
        assert all(steps[2])


@scenario(2)
def what_the_step_makes_is_not_copied_beside_backward(rank, world_size):
    """What is sent, if that is no gradient, and memory for what others send, of which a later group gets more."""
    share_host_memory()
    _, steps = _trained(rank, transport="symm", accumulation_steps=2, reduce_dtype=torch.bfloat16)
    assert not any(map(any, steps))
    net, optimizer = build(rank, transport="symm", accumulation_steps=1, bucket_mb=1e-4)
    with pytest.MonkeyPatch.context() as patch:
        beside = hold_copies(optimizer, patch)
        for step in range(3):
            optimizer.zero_grad()
            beside.clear()
            net(batch(rank, step)).backward()
            if step == 1:
                late = nn.Parameter(torch.ones(3, device=device_of(rank)))
                optimizer.add_param_group({"params": [("late", late)]})
            optimizer.step()
            assert any(beside) == (step == 2)
    optimizer.close()


@scenario(2)
def gradients_that_are_changed_behind_backward_are_what_counts(rank, world_size):
    share_host_memory()

    def halved(net):
        for parameter in net.parameters():
            parameter.grad.mul_(0.5)

    def replaced(net):
        for parameter in net.parameters():
            parameter.grad = 0.5 * parameter.grad

    def moved(net):
        for parameter in net.parameters():
            parameter.grad.data = 0.5 * parameter.grad.data

    expected, _ = _trained(rank, halved, overlap=False, accumulation_steps=2)
    for change in (halved, replaced, moved):
        found, steps = _trained(rank, change, transport="symm", accumulation_steps=2)
        assert_same(found, expected)
        assert not any(map(any, steps))


@scenario(2)
def a_scaler_writes_gradients_before_they_are_added(rank, world_size):
    """Where they were, and torch does not count it: a sum beside that would be overwritten by what was there."""
    share_host_memory()
    found, steps = _trained(rank, is_scaled=True, transport="symm", accumulation_steps=2)
    assert_same(found, _trained(rank, is_scaled=True, overlap=False, accumulation_steps=2)[0])
    assert not any(map(any, steps))


@scenario(2)
def what_makes_no_difference_needs_no_other_ranks(rank, world_size):
    share_host_memory()
    _, optimizer = build(rank, transport="symm", overlap=False)
    if rank == 0:
        with optimizer.no_sync():
            pass
    assert optimizer.communicator.gather_json(rank) == [0, 1]
    optimizer.close()


@scenario(2)
def ranks_that_do_something_else_at_the_first_no_sync_are_told_so(rank, world_size):
    share_host_memory()
    _, optimizer = build(rank, transport="symm")
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 1 does .*with no_sync\(\) in the"), optimizer.no_sync():
            pass
    else:
        optimizer.communicator.gather_json("something else")
    optimizer.close()


@scenario(2)
def ranks_that_are_late_and_talk_between_do_not_wait_for_ever(rank, world_size):
    """A copy that waits for a rank holds up others, such as those by which the host sees a number."""
    share_host_memory()
    found, seen = [], []
    for transport in ("symm", "backend"):
        net, optimizer = build(rank, transport=transport, accumulation_steps=1)
        for step in range(6):
            loss = net(batch(rank, step))
            if loss.is_cuda and (step + rank) % 2:
                torch.cuda._sleep(50_000_000)
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            seen.append(total.item())
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        found.append(values(net))
        optimizer.close()
    assert_same(*found)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


@scenario(2)
def ranks_wait_for_two_optimizers_in_another_order(rank, world_size):
    share_host_memory()
    found = []
    for transport in ("symm", "backend"):
        nets = [Net(device_of(rank)) for _ in range(2)]
        optimizers = [optimizer_of(net, model=net, reducer="exact", transport=transport) for net in nets]
        with pytest.MonkeyPatch.context() as patch:
            for optimizer in optimizers if transport == "symm" else ():
                hold_copies(optimizer, patch)
            for step in range(3):
                for net in nets if rank else reversed(nets):
                    net(batch(rank, step)).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        found.append([value for net in nets for value in values(net)])
        for optimizer in optimizers:
            optimizer.close()
    assert_same(*found)


@scenario(2)
def one_more_pass_than_was_said_is_added(rank, world_size):
    share_host_memory()
    found = []
    for options in ({"transport": "symm", "accumulation_steps": 1}, {"reducer": "exact"}):
        net, optimizer = build(rank, bucket_mb=1e-4, **options)
        for micro in range(2):
            net(batch(rank, 0, micro)).backward()
        optimizer.step()
        found.append(values(net))
        optimizer.close()
    assert_same(*found)


@scenario(2)
def a_gather_writes_to_all_and_a_sum_reads_from_all(rank, world_size):
    share_host_memory()
    _, optimizer = build(rank, transport="symm")
    ours, device = optimizer.communicator, device_of(rank)
    rooms, read = torch.empty(1, 4096, device=device), None
    for numel in (2, 6, 2 * 4096):
        flat = ours.zeros(numel, torch.float32, device)
        flat.copy_(torch.arange(numel) * (rank + 1))
        size = numel // 2
        own, room = flat[rank * size : (rank + 1) * size], rooms[:, :size]
        ours.collect(flat, room, read).wait()
        contributions = ours.contributions(flat, room)
        last = (rank + 1) * size - 1
        assert [float(each[-1]) for each in contributions] == [last, 2 * last]
        own.copy_(sum(contributions))
        read = ours.mark()
        assert torch.equal(own.cpu(), torch.arange(numel)[rank * size :][:size] * 3.0)
        ours.all_gather_(flat).wait()
        assert torch.equal(flat.cpu(), torch.arange(numel) * 3.0)


@scenario(2)
def a_second_device_is_refused_before_anything_moves(rank, world_size):
    share_host_memory()
    parameters = [torch.nn.Parameter(torch.ones(4, device=device)) for device in (device_of(rank), "meta")]
    address = parameters[0].data_ptr()
    with pytest.raises(ValueError, match=r"1: on meta, and what gives it numbers makes another parameter of it"):
        TritonDistAdamW(parameters, transport="symm")
    assert parameters[0].data_ptr() == address


@scenario(2)
def what_copies_come_to_is_kept_for_them(rank, world_size):
    share_host_memory()
    net = Net(device_of(rank)).to(torch.bfloat16)
    optimizer = optimizer_of(net, transport="symm", reduced_dtype=torch.float32)
    kept, communicator = [], optimizer.communicator
    communicator.keep = lambda tensor: kept.append(tensor.data_ptr())
    optimizer.rebuild_plan()
    net(batch(rank, 0).to(torch.bfloat16)).backward()
    optimizer.step()
    rooms = optimizer._bucketed._reducer._rooms
    assert sorted(kept) == sorted(room.data_ptr() for room in rooms.values())
    assert [*rooms] == optimizer._bucketed.buckets
    optimizer.close()


@scenario(2)
def what_is_streamed_takes_no_memory_for_copies(rank, world_size):
    share_host_memory()
    with pytest.MonkeyPatch.context() as patch:
        kept = []
        patch.setattr(peers.PeerCommunicator, "keep", lambda self, tensor: kept.append(tensor))
        _, optimizer = build(rank, transport="symm", gradients="streamed", accumulation_steps=1)
        assert not kept
        optimizer.close()


@scenario(2)
def ranks_that_do_something_else_do_not_take_it_for_the_same(rank, world_size):
    share_host_memory()
    _, optimizer = build(rank, transport="symm")
    ours, device = optimizer.communicator, device_of(rank)
    flats = [ours.zeros(2, torch.float32, device) for _ in range(2)]
    numbers = [
        *(ours._memory.chunk_of(flat).number for flat in flats),
        *(ours._memory.chunk_of(ours._memory.place_for(torch.zeros(size))).number for size in (1, 2)),
        ours._memory.chunk_of(ours._memory.place_for(torch.zeros(1, dtype=torch.float64))).number,
    ]
    assert len(set(numbers)) == 5
    assert ours.gather_json(numbers) == [numbers] * 2
    assert max(numbers) < 2**16
    if device.type != "cuda":  # there they would wait until the process ends
        with pytest.raises(RuntimeError, match="meets for"):
            ours.all_gather_(flats[rank]).wait()


@scenario(2)
def memory_may_go_while_it_is_counted_or_left(rank, world_size):
    share_host_memory()
    _, optimizer = build(rank, transport="symm")
    memory = optimizer.communicator._memory

    class Handle:
        @property
        def buffer_size(self):  # as a collection of garbage that begins here
            memory._regions.pop("gone", None)
            return 0

    def storage():
        memory._regions.pop("gone", None)

    before = optimizer.communicator.bytes_shared
    for use in (lambda: optimizer.communicator.bytes_shared == before, optimizer.communicator.leave_memory):
        memory._regions |= {name: SimpleNamespace(handle=Handle(), storage=storage) for name in ("it", "gone")}
        assert use() in (True, None)
    del memory._regions["it"]


@scenario.parametrize()
def test_peers(backend, world_size, name):
    scenario.check(backend, world_size, name)


def train_a_part(rank, world_size):
    share_host_memory()
    groups = [dist.new_group([1, 2]), dist.new_group([0])]
    found = []
    for transport in ("symm", "backend"):
        net = Net(device_of(rank))
        options = {"process_group": groups[rank == 0], "transport": transport, "reducer": "exact", "bucket_mb": 1e-4}
        optimizer = optimizer_of(net, "muon_adamw", model=net, **options)
        for step in range(2):
            net(batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(values(net))
        optimizer.close()
    assert_same(*found)


def share_with_ranks_that_have_less_often(rank, world_size):
    """They would wait for each other: torch counts how often over all groups."""
    share_host_memory()
    groups = [dist.new_group([1, 2]), dist.new_group([0])]
    _, part = build(rank, transport="symm", process_group=groups[rank == 0])
    parameter = torch.nn.Parameter(torch.ones(4, device=device_of(rank)))
    address = parameter.data_ptr()
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1, 2\] have shared memory \d+, \d+, \d+ times by now"):
        TritonDistAdamW([parameter], transport="symm")
    assert parameter.data_ptr() == address
    part.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [train_a_part, share_with_ranks_that_have_less_often])
def test_ranks_of_a_part_of_the_world_share_memory(backend, function):
    for world_size in world_sizes(backend, (3,)):
        run_ranks(function, world_size, backend=backend, timeout=240)


def test_memory_is_of_no_pool(monkeypatch):
    """What ranks freed before, which need not be the same, says nothing of which memory is whose counterpart."""
    made = SimpleNamespace(empty_strided_p2p=lambda *given: given)
    torchs = SimpleNamespace(_SymmetricMemory=made, rendezvous=lambda *given: given)
    monkeypatch.setattr(peers, "symmetric_memory", torchs)
    memory = peers.PeerMemory.__new__(peers.PeerMemory)
    memory._device, memory._group = torch.device("cuda", 1), "group"
    flat, handle = memory._allocate(5, torch.float16)
    assert flat == ((5,), (1,), torch.float16, torch.device("cuda", 1))
    assert handle == (flat, "group")


class Device:
    """Stands in for ``torch.cuda.device``, of a current one that ``set_stream`` changes, too."""

    current = 0

    def __init__(self, device):
        self.device = device.index

    def __enter__(self):
        self.before, Device.current = Device.current, self.device

    def __exit__(self, *_):
        Device.current = self.before


@pytest.fixture
def memory(monkeypatch):
    """Of rank 1 of 2, whose device is not the current one; ``found`` is what was current for each operation."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(device_index=1, cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(Device, "current", stream.device_index))
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    memory = peers.PeerMemory.__new__(peers.PeerMemory)
    memory.found = []
    for name in ("_call", "write_value"):
        monkeypatch.setattr(meetings, name, lambda *given: memory.found.append(Device.current))
    memory._device, memory._rank, memory._world_size, memory._ranks = torch.device("cuda", 1), 1, 2, [4, 5]
    stream = {"device_index": 1, "cuda_stream": 7, "wait_event": lambda event: None, "record_event": lambda: None}
    memory._copying = SimpleNamespace(**stream, synchronize=lambda: None)
    memory._ready = SimpleNamespace(record=lambda stream: None)
    memory._timeout, memory._regions = 60.0, {}
    return memory


def test_ranks_meet_first_where_their_memory_is(monkeypatch, memory):
    """Whatever device is the current one, and the default one of new tensors."""
    made, zeros = [], torch.zeros

    def pinned(*given, pin_memory, device="that of torch.set_default_device", **options):
        assert device == "cpu"
        made.append(zeros(*given, **options))
        return made[-1]

    board = torch.zeros(2 * (peers.MESSAGE_BYTES + peers.FLAG_BYTES), dtype=torch.uint8)
    handle = SimpleNamespace(barrier=lambda *given: None, get_buffer=lambda *given: board)
    memory._regions[id(board.untyped_storage())] = SimpleNamespace(handle=handle)
    memory._copying.synchronize = lambda: made[0].fill_(2)
    monkeypatch.setattr(torch, "zeros", pinned)
    memory._begin_to_meet(board)
    assert memory.found == [1] * 6  # two meetings, of a flag to write and to wait for each, and what is watched
    assert Device.current == 0


def test_copies_leave_the_current_device_alone(memory):
    memory._watch = SimpleNamespace(write=lambda stream: memory.found.append(Device.current))
    memory._meeting = SimpleNamespace(hold=lambda stream, number: memory.found.append(Device.current))
    memory.run([], 7)
    assert memory.found == [1, 1, 1, 1]
    assert Device.current == 0


def test_a_graph_takes_no_copies(monkeypatch, memory):
    """It would not count meetings, so that ranks would go on before others have come."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a graph that is replayed would not count how often ranks meet"):
        memory.run([], 7)
    assert not memory.found


def on_a_cpu(rank, world_size):
    parameter = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(
        ValueError, match="transport='symm' is for ranks on GPUs of one host, but parameters are on cpu"
    ):
        TritonDistAdamW([parameter], transport="symm")
    assert parameter.data_ptr()
    assert not parameter.grad


def test_a_cpu_is_refused():
    run_ranks(on_a_cpu, 2)


def on_two_hosts(rank, world_size):
    peers.socket.gethostname = lambda: f"host{rank}"
    communicator = Communicator(None, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="is for ranks of one host, got host0, host1; leave it out"):
        peers._check_host(communicator)
    peers.socket.gethostname, peers.missing_operations = lambda: "host", lambda: None
    if rank == 1:
        peers.symmetric_memory = None
    with pytest.raises(RuntimeError, match="on rank 1 has no symmetric memory"):
        peers._check_host(communicator)


def test_other_hosts_and_other_torches_are_refused():
    run_ranks(on_two_hosts, 2)


def in_a_grid(rank, world_size):
    with pytest.raises(ValueError, match="a mesh of one dimension has, got 2 dimensions"):
        TritonDistAdamW([torch.nn.Parameter(torch.zeros(4))], transport="symm", mesh=mesh_of(2, 2))


def test_a_grid_is_refused():
    run_ranks(in_a_grid, 4)


def test_one_rank_takes_no_transport():
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = TritonDistAdamW([parameter], transport="symm")
    parameter.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.explain().data["transport"] is None
    assert not dist.is_initialized()


def test_unknown_transports_are_refused():
    with pytest.raises(ValueError, match="transport must be one of 'backend', 'symm', got 'nccl'"):
        Options(transport="nccl")
