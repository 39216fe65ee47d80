"""Saves in the background: of the moment at which they were asked for, complete or not there, and never silent."""

import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
import torch.distributed as dist
from dist_cases import Scenarios, assert_equal, assert_same_state, device_of, mesh_of, normal
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from optim_dist import TritonDistAdamW, TritonDistMuonAdamW, checkpoint
from optim_dist._checkpoint import background, manifest, staging
from optim_utils.testing import RankFailure, run_ranks

scenario = Scenarios()


class Net(nn.Module):
    """Matrices and others, in buckets and cut into rows, a frozen parameter and buffers."""

    def __init__(self, device, seed=13, is_cut=True):
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)
        self.rows = nn.Linear(6, 5, bias=False)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("columns", torch.ones(2, 3).t())
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(0.3 * normal(tuple(parameter.shape), seed, number))
        self.to(device)
        if is_cut and dist.is_initialized():
            weight = distribute_tensor(self.rows.weight.data, mesh_of(dist.get_world_size()), [Shard(1)])
            self.rows.weight = nn.Parameter(weight)


def build(rank, seed=13, is_cut=True, **options):
    net = Net(device_of(rank), seed, is_cut)
    matrices = [(name, p) for name, p in net.named_parameters() if name in ("up.weight", "down.weight", "rows.weight")]
    others = [(name, p) for name, p in net.named_parameters() if name in ("up.bias", "down.bias")]
    groups = [{"kind": "muon", "params": matrices}, {"kind": "adamw", "params": others, "lr": 0.1}]
    return net, TritonDistMuonAdamW(groups, reducer="exact", timeout=60, **options)


def step(net, optimizer, number):
    """All that is saved changes, in place where it can."""
    for place, parameter in enumerate(net.parameters()):
        if parameter.requires_grad:
            value = normal(tuple(parameter.shape), 5, number, place).to(parameter.device)
            is_cut = hasattr(parameter, "device_mesh")
            parameter.grad = distribute_tensor(value, parameter.device_mesh, parameter.placements) if is_cut else value
    optimizer.step()
    optimizer.zero_grad()
    net.seen += 1
    net.columns.mul_(2)
    net.frozen.data.add_(1)
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def everything(net, optimizer):
    optimizer.wait()
    whole = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in net.state_dict().items()}
    return (
        {name: value.detach().cpu().clone() for name, value in whole.items()},
        optimizer.full_state_dict(),
        [group["lr"] for group in optimizer.param_groups],
    )


def assert_everything(found, wanted):
    assert_equal(list(found[0].values()), list(wanted[0].values()), "model")
    if wanted[1]:
        assert_same_state(found[1], wanted[1])
    assert found[2] == wanted[2]


def shared_folder():
    folder = [mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    return Path(folder[0])


@contextmanager
def held_up(is_here=True):
    """Nothing is written before the event that this gives is set; on other ranks, where it is not here, it is."""
    gate, write = threading.Event(), manifest.write_durably

    def write_later(*args):
        assert not is_here or gate.wait(60)
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "write_durably", write_later)
        try:
            yield gate
        finally:
            gate.set()
            background.wait_for_last()


@scenario(1, 2, 3)
def what_is_saved_is_of_the_moment_of_the_save(rank, world_size):
    folder = shared_folder()
    net, optimizer = build(rank)
    step(net, optimizer, 0)
    extra = {"seen": [0], "rng": torch.arange(3)}
    wanted = everything(net, optimizer)
    with held_up(is_here=rank == world_size - 1) as gate:
        saving = checkpoint.save(folder / "x", net, optimizer, extra=extra, async_=True)
        # on the last rank before the collectives of the save, on others between or behind them
        for number in (1, 2):
            step(net, optimizer, number)
            extra["seen"].append(number)
            extra["rng"].add_(1)
        assert not saving.done()
        assert checkpoint.latest(folder) is None
        # the last rank, which need not wait for others' steps on a device, could end the save before they have looked
        dist.barrier()
        gate.set()
        assert saving.result() == folder / "x" == checkpoint.latest(folder)
    assert saving.done()
    later = everything(net, optimizer)
    other, loaded = build(rank, seed=3)
    extra = checkpoint.load(folder / "x", other, loaded)
    assert extra["seen"] == [0]
    assert torch.equal(extra["rng"], torch.arange(3))
    assert_everything(everything(other, loaded), wanted)
    for number in (1, 2):
        step(other, loaded, number)
    assert_everything(everything(other, loaded), later)


@scenario(1, 2)
def codes_of_8_bits_are_of_that_moment_too(rank, world_size):
    folder = shared_folder()
    parameters = [nn.Parameter(torch.ones(700, device=device_of(rank))) for _ in range(2)]
    optimizers = [TritonDistAdamW([("w", p)], state_dtype="int8") for p in parameters]

    def take_step(place, number):
        parameters[place].grad = normal((700,), 6, number).to(device_of(rank))
        optimizers[place].step()
        optimizers[place].zero_grad()

    take_step(0, 0)
    with held_up():
        saving = checkpoint.save(folder / "x", None, optimizers[0], async_=True)
        take_step(0, 1)
    checkpoint.load(saving.result(), None, optimizers[1])
    take_step(1, 1)
    full, wanted = optimizers[1].full_state_dict(), optimizers[0].full_state_dict()
    if rank == 0:
        assert_same_state(full, wanted)
    assert_equal(parameters[1:], parameters[:1], "one step later")


@scenario(2)
def it_is_the_same_as_a_save_in_the_foreground(rank, world_size):
    folder = shared_folder()
    net, optimizer = build(rank)
    step(net, optimizer, 0)
    checkpoint.save(folder / "x", net, optimizer, extra=1)
    checkpoint.save(folder / "y", net, optimizer, extra=1, async_=True).wait()
    names = ["common.pt", "manifest.json", *(f"rank-{number:05d}.pt" for number in range(world_size))]
    assert sorted(os.listdir(folder / "x")) == sorted(os.listdir(folder / "y")) == names
    for name in names:
        if name.endswith(".pt"):
            x, y = (torch.load(folder / where / name, map_location="cpu", weights_only=True) for where in "xy")
            assert str(x) == str(y), f"{name}: {x} and {y}"


@scenario(2, 4)
def ranks_of_a_mesh_may_be_numbered_otherwise(rank, world_size):
    folder = shared_folder()
    order = torch.arange(world_size).flip(0).view(2, -1)
    kind = device_of(rank).type
    net, optimizer = build(rank, is_cut=False, mesh=DeviceMesh(kind, order))
    step(net, optimizer, 0)
    optimizer.wait()
    checkpoint.save(folder / "x", net, optimizer, async_=True).wait()
    other, loaded = build(rank, seed=3, is_cut=False)
    checkpoint.load(folder / "x", other, loaded)
    for model, its in ((net, optimizer), (other, loaded)):
        step(model, its, 1)
        its.wait()
    assert_equal(list(other.parameters()), list(net.parameters()), "loaded")
    with pytest.MonkeyPatch.context() as patch:
        if optimizer.communicator.rank == 1:
            patch.setattr(manifest, "write_durably", full)
        with pytest.raises(RuntimeError, match="rank 1: OSError"):
            checkpoint.save(folder / "y", net, optimizer, async_=True).wait()


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def fail_to_save(folder, net, optimizer, failing):
    with pytest.MonkeyPatch.context() as patch:
        if optimizer.communicator.rank == failing:
            patch.setattr(manifest, "write_durably", full)
        saving = checkpoint.save(folder / "x", net, optimizer, async_=True)
        background.wait_for_last()
    return saving


@scenario(1, 2)
def what_fails_on_one_rank_is_raised_by_wait_on_all(rank, world_size):
    folder = shared_folder()
    net, optimizer = build(rank)
    step(net, optimizer, 0)
    for failing in range(world_size):
        saving = fail_to_save(folder, net, optimizer, failing)
        assert saving.done()
        for waits in (saving.wait, saving.result):
            with pytest.raises(RuntimeError) as raised:
                waits()
            fault = f"rank {failing}: OSError: [Errno 28] No space left on device"
            assert str(raised.value) == f"checkpoint {folder / 'x'} was not saved:\n  {fault}"
    dist.barrier()
    assert os.listdir(folder) == []
    # it is known, and in nobody's way
    checkpoint.save(folder / "x", net, optimizer)


@scenario(1, 2)
def what_nobody_has_waited_for_is_raised_by_the_next_save_on_all(rank, world_size):
    folder = shared_folder()
    net, optimizer = build(rank)
    step(net, optimizer, 0)
    for is_async in (False, True):
        saving = fail_to_save(folder, net, optimizer, world_size - 1)
        if rank == 1:
            # who knows is told again, for others do not
            with pytest.raises(RuntimeError):
                saving.wait()
        with pytest.raises(RuntimeError) as raised:
            checkpoint.save(folder / "y", net, optimizer, async_=is_async)
        text = str(raised.value)
        assert text.startswith(f"checkpoint {folder / 'y'} was not saved:\n  an earlier one was not, for which nobody")
        assert f"{folder / 'x'} was not saved:\n  rank {world_size - 1}: OSError" in text
    checkpoint.save(folder / "y", net, optimizer, async_=True).wait()


@scenario(1)
def what_fails_is_logged(rank, world_size):
    found = []
    handler = logging.Handler()
    handler.emit = found.append
    logger = logging.getLogger("optim_dist")
    logger.addHandler(handler)
    net, optimizer = build(rank)
    saving = fail_to_save(shared_folder(), net, optimizer, 0)
    logger.removeHandler(handler)
    assert [record.levelname for record in found] == ["ERROR"]
    assert "was not saved:\n  rank 0: OSError" in found[0].getMessage()
    with pytest.raises(RuntimeError):
        saving.wait()


@scenario(1)
def what_was_to_be_written_is_let_go_of(rank, world_size):
    """Host memory is as much as a rank's part; it does not stay with the ``Saving``, nor with its error."""
    copies = []

    class Noting(staging.Staging):
        def copy(self, value):
            copied = super().copy(value)
            copies.append(weakref.ref(copied))
            return copied

    folder = shared_folder()
    net, optimizer = build(rank)
    step(net, optimizer, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optim_dist._checkpoint.saving.Staging", Noting)
        failed = fail_to_save(folder, net, optimizer, 0)
        with pytest.raises(RuntimeError):
            failed.wait()
        saved = checkpoint.save(folder / "y", net, optimizer, async_=True)
        saved.wait()
    gc.collect()
    assert len(copies) > 10
    assert not any(copy() is not None for copy in copies)


@scenario(1, 2)
def a_save_or_load_waits_for_the_one_before(rank, world_size):
    folder = shared_folder()
    net, optimizer = build(rank)
    step(net, optimizer, 0)
    for number, is_async in enumerate((False, True)):
        with held_up() as gate:
            first = checkpoint.save(folder / f"first-{number}", net, optimizer, async_=True)
            opens = threading.Timer(0.3, gate.set)
            opens.start()
            checkpoint.save(folder / f"second-{number}", net, optimizer, async_=is_async)
            assert first.done()
            assert (folder / f"first-{number}" / "manifest.json").is_file()
    with held_up() as gate:
        checkpoint.save(folder / "x", net, optimizer, async_=True)
        threading.Timer(0.3, gate.set).start()
        checkpoint.load(folder / "x", net, optimizer)


@scenario(2, 3)
def optimizers_of_the_same_ranks_share_a_group(rank, world_size):
    """Each group has sockets and threads that nothing frees before the process group is destroyed."""
    folder = shared_folder()
    order = torch.arange(world_size).flip(0).view(1, -1)
    numbers = []
    for number, options in enumerate(({}, {"mesh": DeviceMesh(device_of(rank).type, order)}, {}, {})):
        net, optimizer = build(rank, is_cut=False, **options)
        before = len(dist.distributed_c10d._world.pg_names)
        checkpoint.save(folder / str(number), net, optimizer, async_=True).wait()
        numbers.append(len(dist.distributed_c10d._world.pg_names) - before)
        checkpoint.load(folder / "0", net, optimizer)
    assert numbers[1:] == [0, 0, 0]


@scenario(2)
def ranks_that_save_in_different_ways_are_refused(rank, world_size):
    folder = shared_folder()
    net, optimizer = build(rank)
    with pytest.raises(RuntimeError, match="async_ is True on rank 0, False on rank 1; pass the same on every rank"):
        checkpoint.save(folder / "x", net, optimizer, async_=rank == 0)
    with pytest.raises(RuntimeError, match="keep is None on rank 0, 2 on rank 1; pass the same on every rank"):
        checkpoint.save(folder / "x", net, optimizer, keep=2 if rank else None)
    with pytest.raises(RuntimeError, match="keep must be at least 1, or None to keep all checkpoints, got 0"):
        checkpoint.save(folder / "x", net, optimizer, keep=rank)
    assert os.listdir(folder) == []


@scenario(2)
def what_load_could_not_read_is_refused_at_once(rank, world_size):
    folder = shared_folder()
    net, optimizer = build(rank)
    for extra, expected in (({"a": [print]}, r"rank 0: TypeError: extra\['a'\]\[0\] is of"), (print, "extra is of")):
        with pytest.raises(RuntimeError, match=expected):
            checkpoint.save(folder / "x", net, optimizer, extra=extra, async_=True)
    assert os.listdir(folder) == []


def parameter_and_optimizer(timeout=5):
    parameter = nn.Parameter(torch.ones(100))
    return parameter, TritonDistAdamW([("w", parameter)], timeout=timeout)


def lose_a_rank(rank, world_size, folder):
    parameter, optimizer = parameter_and_optimizer()
    checkpoint.save(f"{folder}/x", None, optimizer, async_=True).wait()
    if rank == 1:
        manifest.write_durably = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    saving = checkpoint.save(f"{folder}/y", None, optimizer, async_=True)
    start = time.monotonic()
    try:
        saving.wait()
    except RuntimeError as error:
        Path(folder, "told").write_text(f"{time.monotonic() - start} {error}")
    parameter.grad = torch.ones(100)
    optimizer.step()


def test_a_killed_rank_leaves_the_checkpoint_before(tmp_path):
    with pytest.raises(RankFailure, match="exit code -9"):
        run_ranks(lose_a_rank, 2, str(tmp_path), timeout=60)
    assert checkpoint.latest(tmp_path) == tmp_path / "x"
    checkpoint.load(tmp_path / "x", None, parameter_and_optimizer()[1])
    seconds, text = (tmp_path / "told").read_text().split(maxsplit=1)
    # not after minutes of patience with slow disks
    assert float(seconds) < 20
    assert "another rank has ended" in text


def leave_the_group(rank, world_size, folder):
    _, optimizer = parameter_and_optimizer()
    with held_up() as gate:
        saving = checkpoint.save(f"{folder}/x", None, optimizer, async_=True)
        dist.destroy_process_group()
        gate.set()
        saving.wait()
    return os.listdir(folder)


def test_a_save_outlives_the_process_group(tmp_path):
    for found in run_ranks(leave_the_group, 2, str(tmp_path)):
        assert "x" in found
    checkpoint.load(tmp_path / "x", None, parameter_and_optimizer()[1])


def save_in_two_groups(rank, world_size, folder):
    for number in range(2):
        _, optimizer = parameter_and_optimizer()
        checkpoint.save(f"{folder}/{number}", None, optimizer, async_=True).wait()
        if number == 0:
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=world_size)
    return checkpoint.latest(folder).name


def test_a_process_group_made_anew_has_a_group_of_its_own(tmp_path):
    assert run_ranks(save_in_two_groups, 2, str(tmp_path), timeout=60) == ["1", "1"]


# Each end is that of a process of its own, which part when all is imported, as that takes longer than the rest does.
SCRIPT = """
import os, sys, time
import torch
import torch._dynamo  # for the first optimizer
from optim_dist import TritonDistAdamW, checkpoint
from optim_dist._checkpoint import manifest

os.chdir(sys.argv[1])
for end in ("", "sys.exit(3)", "raise ValueError"):
    if not (process := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
else:
    sys.exit()
folder = end.partition("(")[0] or "none"
os.mkdir(folder)
os.chdir(folder)
write = manifest.write_durably
manifest.write_durably = lambda *args: time.sleep(0.3) or write(*args)
optimizer = TritonDistAdamW([("w", torch.nn.Parameter(torch.ones(100)))])
checkpoint.save("x", None, optimizer, async_=True)
os.chdir("/")
exec(end)
"""


@pytest.mark.slow
def test_the_interpreter_waits_before_it_exits(tmp_path):
    """Also where a path is relative to a directory that the process has left."""
    # started where the tests are, as packages that are not installed may be found from there alone
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout.split() == ["0", "3", "1"], found.stderr
    for end in ("none", "sys.exit", "raise ValueError"):
        assert sorted(os.listdir(tmp_path / end)) == ["latest", "x"]
        checkpoint.load(tmp_path / end / "x", None, parameter_and_optimizer()[1])


@scenario.parametrize()
def test_background(backend, world_size, name):
    scenario.check(backend, world_size, name)
