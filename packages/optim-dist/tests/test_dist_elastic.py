"""Training that goes on from its newest checkpoint: after an error, a lost rank, a stop, at another number of ranks."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from dist_cases import device_of, normal
from torch import nn
from torch.distributed import FileStore, HashStore, PrefixStore

from optim_dist import TritonDistAdamW, checkpoint, elastic
from optim_dist._checkpoint import manifest
from optim_dist._fresh_store import fresh_store
from optim_utils.testing import RankFailure, run_ranks

TOTAL = 10


def build(device="cpu"):
    model = nn.Linear(5, 3, device=device)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(tuple(parameter.shape), 3, number))
    return model, TritonDistAdamW(model.named_parameters(), lr=0.1, average=False)


def train(run, rank=0, before_step=lambda step: None, total=TOTAL, device="cpu"):
    """Steps on a global batch that the ranks share out: the sum of their gradients does not depend on their number."""
    model, optimizer = build(device)
    numbers = []
    for step in run.steps(model, optimizer, total):
        before_step(step)
        for number, parameter in enumerate(model.parameters()):
            whole = normal(tuple(parameter.shape), 5, number, step).to(device)
            parameter.grad = whole if rank == 0 else torch.zeros_like(whole)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append(step)
        run.extra["seen"] = [*run.extra.get("seen", []), step]
    return numbers, [p.detach().cpu() for p in model.parameters()], run


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    numbers, parameters, run = elastic.run(train, tmp_path_factory.mktemp("whole"), every=100)
    assert numbers == list(range(TOTAL))
    assert run.resumed_from is None
    return parameters


def fail_at(number):
    def check(step):
        if step == number:
            raise RuntimeError("lost")

    return check


def test_goes_on_where_it_was_saved(tmp_path, uninterrupted):
    with pytest.raises(RuntimeError, match="lost"):
        elastic.run(lambda run: train(run, before_step=fail_at(8)), tmp_path, every=3)
    numbers, parameters, run = elastic.run(train, tmp_path, every=3)
    assert run.resumed_from == tmp_path / "step-000000006"
    assert numbers == [6, 7, 8, 9]
    assert run.extra["seen"] == list(range(TOTAL))
    for actual, expected in zip(parameters, uninterrupted, strict=True):
        assert torch.equal(actual, expected)
    assert run.done == TOTAL
    numbers, _, run = elastic.run(train, tmp_path, every=3)
    assert numbers == []
    assert run.done == TOTAL
    assert len(elastic.run(lambda run: train(run, total=12), tmp_path, every=3)[0]) == 2


def test_keeps_the_newest(tmp_path):
    elastic.run(train, tmp_path, every=2, keep=2)
    assert sorted(folder.name for folder in tmp_path.glob("step-*")) == ["step-000000008", "step-000000010"]
    assert checkpoint.latest(tmp_path).name == "step-000000010"


def test_other_checkpoints_beside_its_own_stay(tmp_path):
    """Copies under other names, which do not count either."""
    elastic.run(lambda run: train(run, total=4), tmp_path, every=2)
    others = ["step-000000002-best", "step-2", "best"]
    for name in others:
        shutil.copytree(tmp_path / "step-000000002", tmp_path / name)
    elastic.run(train, tmp_path, every=2, keep=2)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "latest", "step-000000008", "step-000000010"])


def test_keeps_what_it_saves_after_it_was_taken_back(tmp_path):
    elastic.run(train, tmp_path, every=2, keep=3)
    (tmp_path / checkpoint.LATEST).write_text("step-000000006")
    numbers = elastic.run(lambda run: train(run, total=7), tmp_path, every=2, keep=1)[0]
    assert numbers == [6]
    assert checkpoint.latest(tmp_path).name == "step-000000007"
    assert sorted(f.name for f in tmp_path.glob("step-*")) == [f"step-{n:09d}" for n in (7, 8, 10)]


def test_a_checkpoint_that_was_moved_and_linked_is_replaced_by_a_new_one(tmp_path):
    folder, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    elastic.run(lambda run: train(run, total=4), folder, every=2)
    (folder / "step-000000004").rename(elsewhere)
    (folder / "step-000000004").symlink_to(elsewhere)
    assert elastic.run(lambda run: train(run, total=5), folder, every=5)[0] == [4]
    (folder / checkpoint.LATEST).write_text("step-000000002")
    assert elastic.run(lambda run: train(run, total=4), folder, every=2)[0] == [2, 3]
    assert not (folder / "step-000000004").is_symlink()
    assert (elsewhere / manifest.MANIFEST).exists()
    assert not list(folder.glob(".*"))


def test_steps_of_more_digits_than_names_have_are_newer(tmp_path):
    """As texts 1,000,000,000 would come before 999,999,999."""
    steps = [10**9 + number for number in range(-3, 2)]
    elastic.run(lambda run: train(run, total=2), tmp_path, every=1)
    (tmp_path / "step-000000001").rename(tmp_path / f"step-{steps[0]}")
    (tmp_path / "step-000000002").rename(tmp_path / f"step-{steps[-1]}")
    (tmp_path / checkpoint.LATEST).write_text(f"step-{steps[-1]}")
    # not whole, so that an older one is looked for
    (tmp_path / f"step-{steps[-1]}" / "rank-00000.pt").unlink()
    assert elastic.run(train, tmp_path, every=100)[2].resumed_from.name == f"step-{steps[0]}"
    shutil.rmtree(tmp_path)
    run = elastic.Run(tmp_path, every=1, keep=2)
    model, optimizer = build()
    for run.done in steps:
        run._save(model, optimizer)
    assert {folder.name for folder in tmp_path.glob("step-*")} == {f"step-{number}" for number in steps[-2:]}


def test_leftovers_of_a_killed_save_are_in_nobodys_way(tmp_path):
    elastic.run(lambda run: train(run, total=4), tmp_path, every=2)
    (tmp_path / ".step-000000006.abc.tmp").mkdir()
    # complete, but the pointer still names the one before
    elastic.run(lambda run: train(run, total=6), tmp_path, every=2)
    (tmp_path / checkpoint.LATEST).write_text("step-000000004")
    numbers, _, _ = elastic.run(train, tmp_path, every=2)
    assert numbers[0] == 4
    assert not list(tmp_path.glob(".*.tmp"))


def test_sigterm_saves_and_leaves(tmp_path, uninterrupted):
    before = signal.getsignal(signal.SIGTERM)

    def stop(step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    numbers, _, run = elastic.run(lambda run: train(run, before_step=stop), tmp_path, every=100, poll=3)
    assert numbers == list(range(6))
    assert run.stopped
    assert run.done == 6
    assert signal.getsignal(signal.SIGTERM) is before
    numbers, parameters, run = elastic.run(train, tmp_path, every=100)
    assert numbers == [6, 7, 8, 9]
    assert not run.stopped
    for actual, expected in zip(parameters, uninterrupted, strict=True):
        assert torch.equal(actual, expected)


def test_another_thread_than_the_main_one_is_told_what_to_do(tmp_path, uninterrupted):
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError, match=r"main thread alone.*elastic\.Run\(directory, every=\.\.\.\)\.steps"):
            pool.submit(elastic.run, train, tmp_path, every=2).result()
        # and what it is told works
        numbers, parameters, _ = pool.submit(train, elastic.Run(tmp_path, every=2)).result()
    assert numbers == list(range(TOTAL))
    assert checkpoint.latest(tmp_path) == tmp_path / f"step-{TOTAL:09d}"
    assert all(torch.equal(left, right) for left, right in zip(parameters, uninterrupted, strict=True))


@pytest.fixture
def slow_disk(monkeypatch):
    write = manifest.write_durably
    monkeypatch.setattr(manifest, "write_durably", lambda *args: time.sleep(0.05) or write(*args))


@pytest.mark.parametrize("async_", [False, True])
def test_saves_are_complete_when_it_returns(tmp_path, uninterrupted, slow_disk, async_):
    writers = set()

    def note(step):
        writers.update(thread.name for thread in threading.enumerate() if thread.name.startswith("saving"))

    numbers, parameters, run = elastic.run(
        lambda run: train(run, before_step=note), tmp_path, every=3, keep=2, async_=async_
    )
    assert writers == ({f"saving step-{number:09d}" for number in (3, 6, 9)} if async_ else set())
    assert numbers == list(range(TOTAL))
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-000000009", "step-000000010"]
    for actual, expected in zip(parameters, uninterrupted, strict=True):
        assert torch.equal(actual, expected)
    (tmp_path / checkpoint.LATEST).write_text("step-000000009")
    numbers, parameters, run = elastic.run(train, tmp_path, every=3, async_=async_)
    assert numbers == [9]
    assert run.extra["seen"] == list(range(TOTAL))
    for actual, expected in zip(parameters, uninterrupted, strict=True):
        assert torch.equal(actual, expected)


def test_no_step_is_left_when_the_last_save_is_complete(tmp_path, slow_disk):
    model, optimizer = build()
    for _ in elastic.Run(tmp_path, every=100, async_=True).steps(model, optimizer, 2):
        optimizer.step()
    assert checkpoint.latest(tmp_path).name == "step-000000002"


def leave_at(number):
    def train_and_leave(run):
        model, optimizer = build()
        for step in run.steps(model, optimizer, TOTAL):
            if step == number:
                break
            optimizer.step()

    return train_and_leave


def test_leaving_the_loop_waits_for_the_last_save(tmp_path, slow_disk):
    elastic.run(leave_at(4), tmp_path, every=2, async_=True)
    assert checkpoint.latest(tmp_path).name == "step-000000004"


@pytest.mark.parametrize("loop", [train, leave_at(4)])
def test_a_save_that_fails_in_the_background_is_an_error(tmp_path, monkeypatch, loop):
    write = manifest.write_durably

    def fail(file, *args):
        if "step-000000002" not in file.parent.name:
            raise OSError("no space left")
        return write(file, *args)

    monkeypatch.setattr(manifest, "write_durably", fail)
    with pytest.raises(RuntimeError, match="step-000000004 was not saved:\n  rank 0: OSError: no space left"):
        elastic.run(loop, tmp_path, every=2, async_=True)
    assert checkpoint.latest(tmp_path).name == "step-000000002"
    with pytest.raises(RuntimeError, match="step-000000010 was not saved:\n  rank 0: OSError: no space left"):
        elastic.run(train, tmp_path, every=100, async_=True)


@pytest.mark.parametrize("name", ["every", "keep", "poll"])
@pytest.mark.parametrize("value", [0, 2.5, float("nan"), "20"])
def test_what_is_no_whole_number_of_at_least_one_is_refused(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got {value!r}"):
        elastic.run(train, tmp_path, **{"every": 1, name: value})


@pytest.mark.parametrize("total", [2.5, float("nan"), "3", None])
def test_a_total_that_is_no_whole_number_is_refused(tmp_path, total):
    """Of 2.5 steps three were made, and not saved."""
    model = nn.Linear(4, 4)
    optimizer = TritonDistAdamW(model.named_parameters())
    with pytest.raises(ValueError, match=f"total must be a whole number of steps, got {total!r}"):
        next(elastic.Run(tmp_path, every=5).steps(model, optimizer, total))
    with pytest.raises(TypeError, match="steps takes model, an optimizer of optim_dist and total, got Linear"):
        next(elastic.Run(tmp_path, every=5).steps(optimizer, model, 3))


def test_checkpoints_stay_together_when_the_loop_changes_its_directory(tmp_path, monkeypatch):
    """Of a relative path, each part of a run would have its own checkpoints, and forget those of the other."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    elastic.run(lambda run: train(run, before_step=lambda step: os.chdir(elsewhere)), "checkpoints", every=2, keep=2)
    assert os.listdir(elsewhere) == []
    found = sorted(os.listdir(tmp_path / "checkpoints"))
    assert found == ["latest", "step-000000008", "step-000000010"]


@pytest.mark.parametrize("extra", [None, {"step": 3}, "text"])
def test_a_checkpoint_that_it_has_not_saved_is_refused_by_name(tmp_path, extra):
    model = nn.Linear(4, 4)
    optimizer = TritonDistAdamW(model.named_parameters())
    checkpoint.save(tmp_path / "best", model, optimizer, extra=extra)
    run = elastic.Run(tmp_path, every=2)
    with pytest.raises(checkpoint.CheckpointError, match="its extra has no step and extra of elastic's; give elastic"):
        next(run.steps(model, optimizer, 5))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    elastic.run(train, tmp_path, every=100)

    def other(run):
        model = nn.Linear(4, 4)
        return list(run.steps(model, TritonDistAdamW(model.named_parameters()), TOTAL))

    with pytest.raises(checkpoint.CheckpointError, match="weight"):
        elastic.run(other, tmp_path, every=100)


def on_ranks(rank, world_size, folder, lost, async_=False):
    def lose(step):
        if (rank, step) == lost:
            os.kill(os.getpid(), signal.SIGKILL)

    device = device_of(rank) if dist.is_initialized() else torch.device("cpu")
    numbers, parameters, _ = elastic.run(
        lambda run: train(run, rank, lose, device=device), folder, every=2, async_=async_
    )
    return numbers, parameters


def test_a_rank_is_killed_and_fewer_or_more_go_on(tmp_path, uninterrupted):
    with pytest.raises(RankFailure, match="exit code -9"):
        run_ranks(on_ranks, 3, str(tmp_path), (1, 5))
    with pytest.raises(RankFailure, match="exit code -9"):
        run_ranks(on_ranks, 2, str(tmp_path), (0, 7))
    for numbers, parameters in run_ranks(on_ranks, 4, str(tmp_path), None):
        assert numbers == [6, 7, 8, 9]
        for actual, expected in zip(parameters, uninterrupted, strict=True):
            # the others add zeros, so that not even the order of sums can differ
            assert torch.equal(actual, expected)


def test_ranks_that_are_killed_while_they_save(tmp_path, uninterrupted):
    """The newest checkpoint is the last one or the one before, and it is whole."""
    for world_size, lost in ((3, (1, 4)), (2, (0, 8))):
        with pytest.raises(RankFailure, match="exit code -9"):
            run_ranks(on_ranks, world_size, str(tmp_path), lost, True)
        assert checkpoint.latest(tmp_path).name in [f"step-{lost[1] - back:09d}" for back in (0, 2)]
    for numbers, parameters in run_ranks(on_ranks, 4, str(tmp_path), None, True):
        assert numbers in ([6, 7, 8, 9], [8, 9])
        for actual, expected in zip(parameters, uninterrupted, strict=True):
            assert torch.equal(actual, expected)
    assert sorted(os.listdir(tmp_path)) == ["latest", *(f"step-{number:09d}" for number in (6, 8, 10))]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_rank_is_killed_on_devices(tmp_path):
    whole = elastic.run(lambda run: train(run, device="cuda"), tmp_path / "whole", every=100)[1]
    for lost in ((1, 3), (0, 5), (1, 7)):
        with pytest.raises(RankFailure, match="exit code -9"):
            run_ranks(on_ranks, 2, str(tmp_path / "killed"), lost, backend="nccl")
    # one rank is left
    [(numbers, parameters)] = run_ranks(on_ranks, 1, str(tmp_path / "killed"), None, backend="nccl")
    assert numbers == [6, 7, 8, 9]
    for actual, expected in zip(parameters, whole, strict=True):
        assert torch.equal(actual, expected)


def stop_one(rank, world_size, folder):
    def stop(step):
        if rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return elastic.run(lambda run: train(run, rank, stop), folder, every=100, poll=4)[0]


def test_sigterm_on_one_rank_stops_all_at_the_same_step(tmp_path):
    assert run_ranks(stop_one, 2, str(tmp_path)) == [list(range(4))] * 2
    assert checkpoint.latest(tmp_path).name == "step-000000004"


def with_other_numbers(rank, world_size, folder):
    with pytest.raises(RuntimeError, match="total is 10 on rank 0, 11 on rank 1; pass the same on every rank"):
        elastic.run(lambda run: train(run, rank, total=TOTAL + rank), folder, every=2)
    with pytest.raises(RuntimeError, match="every is 2 on rank 0, 3 on rank 1; pass the same on every rank"):
        elastic.run(lambda run: train(run, rank), folder, every=2 + rank)
    with pytest.raises(RuntimeError, match="async_ is False on rank 0, True on rank 1; pass the same on every rank"):
        elastic.run(lambda run: train(run, rank), folder, every=2, async_=bool(rank))


def test_ranks_with_other_numbers_of_steps_are_refused(tmp_path):
    run_ranks(with_other_numbers, 2, str(tmp_path))


def fail_to_remove(rank, world_size, folder):
    def fail(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(f"{path} is not yours")

    shutil.rmtree = fail
    with pytest.raises(RuntimeError) as raised:
        elastic.run(lambda run: train(run, rank), folder, every=2, keep=1)
    return str(raised.value)


def test_what_a_rank_cannot_remove_is_an_error_on_all(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "resumed" / ".step-000000002.abc.tmp").mkdir(parents=True)
    expected = {
        "saved": "checkpoint .* is complete, but older ones were not removed",
        "resumed": "training was not resumed",
    }
    for name, beginning in expected.items():
        for text in run_ranks(fail_to_remove, 2, str(tmp_path / name)):
            assert re.match(rf"{beginning}.*\n  rank \d: PermissionError: .*step-000000002.* is not yours", text), text


def agree(store, rank, world_size, seconds=20):
    return fresh_store(store, rank, world_size, timedelta(seconds=seconds))


def test_nothing_of_an_earlier_start_is_in_the_store():
    store = HashStore()
    stale = []
    for attempt in range(3):
        with ThreadPoolExecutor(3) as threads:
            # the first rank is the last to come: it finds greetings of this start and of those before
            found = [threads.submit(agree, store, rank, 3) for rank in (2, 1)]
            time.sleep(0.05)
            found = [threads.submit(agree, store, 0, 3), *found]
            first, second, third = (each.result() for each in found)
        first.set("address", str(attempt))
        assert [each.get("address") for each in (second, third)] == [str(attempt).encode()] * 2
        assert not any(each.get("address") == first.get("address") for each in stale)
        stale.append(first)


def test_nccl_does_not_dump_for_ranks_that_ran_before(tmp_path):
    at_the_root = FileStore(str(tmp_path / "store"))
    at_the_root.set("exception_dump", "rank 0 of the start before")
    at_the_root.set("other", "stays")
    agree(PrefixStore("start", PrefixStore("worker", at_the_root)), 0, 1)
    assert not at_the_root.check(["exception_dump"])
    assert at_the_root.get("other") == b"stays"


def test_a_rank_that_does_not_know_its_gpu_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ValueError, match=r"LOCAL_RANK, .*, has to be in the environment beside WORLD_SIZE"):
        elastic.run(lambda run: None, tmp_path, every=1)


def test_a_rank_that_never_starts_is_named():
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 did not start"):
        agree(HashStore(), 0, 2, seconds=0.1)


SCRIPT = """
    import json, os, signal, sys, time
    import torch
    from torch import nn
    from optim_dist import TritonDistAdamW, elastic

    with open(f"{sys.argv[1]}/worker-of-{os.getppid()}", "w") as file:
        file.write(str(os.getpid()))

    def train(run):
        device = sys.argv[4]
        model = nn.Linear(5, 3, device="cuda:" + os.environ["LOCAL_RANK"] if device == "cuda" else device)
        optimizer = TritonDistAdamW(model.named_parameters(), timeout=20)
        numbers = []
        for step in run.steps(model, optimizer, 12):
            if step == 5 and sys.argv[2] == "rank" and run.resumed_from is None and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(float(sys.argv[3]))
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            numbers.append(step)
        return numbers, optimizer.communicator.world_size

    numbers, world_size = elastic.run(train, sys.argv[1] + "/runs", every=2)
    with open(sys.argv[1] + "/rank-" + os.environ["RANK"] + ".json", "w") as file:
        json.dump([numbers, world_size], file)
"""


def torchrun(tmp_path, *arguments, options, log="log"):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(tmp_path), *arguments]
    with (tmp_path / log).open("w") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


ON_DEVICES = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")],
)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", ON_DEVICES])
def test_torchrun_starts_the_ranks_again(tmp_path, device):
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    job = torchrun(tmp_path, "rank", "0", device, options=options)
    assert job.wait(180) == 0, (tmp_path / "log").read_text()
    for rank in range(2):
        assert json.loads((tmp_path / f"rank-{rank}.json").read_text()) == [list(range(4, 12)), 2]


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def test_threads_let_go_of_tensors_before_the_process_group_ends(tmp_path, monkeypatch):
    freed, said = threading.Semaphore(0), []
    thread = threading.Thread(target=lambda: (freed.acquire(), said.append("let go")))
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: said.append("end"))
    thread.start()
    interval = sys.getswitchinterval()
    # nobody is given Python's lock who is not waited for
    sys.setswitchinterval(100)
    try:
        elastic.run(lambda run: freed.release(), tmp_path, every=1)
        assert said == ["let go", "end"]
    finally:
        sys.setswitchinterval(interval)
        thread.join()


@pytest.mark.nightly
def test_a_lost_node_leaves_the_others_training(tmp_path):
    """Three agents of one rank each, and a store in a process of its own; one agent is killed with its rank."""
    port = free_port()
    store = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time\nfrom torch.distributed import TCPStore\n"
            f"store = TCPStore('localhost', {port}, is_master=True, wait_for_workers=False)\ntime.sleep(600)",
        ]
    )
    options = ["--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=5", "--rdzv-backend=c10d", "--rdzv-id=elastic"]
    options += [f"--rdzv-endpoint=localhost:{port}"]
    timeouts = "last_call_timeout=3,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3"
    options += [f"--rdzv-conf=is_host=0,{timeouts}"]
    agents = [torchrun(tmp_path, "agent", "1", "cpu", options=options, log=f"log-{number}") for number in range(3)]
    try:
        deadline = time.monotonic() + 120
        while checkpoint.latest(tmp_path / "runs") is None and time.monotonic() < deadline:
            time.sleep(0.2)
        lost = agents[1].pid
        for process in (lost, int((tmp_path / f"worker-of-{lost}").read_text())):
            os.kill(process, signal.SIGKILL)
        for number in (0, 2):
            assert agents[number].wait(240) == 0, (tmp_path / f"log-{number}").read_text()
    finally:
        for process in (*agents, store):
            if process.poll() is None:
                process.kill()
            process.wait()
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert found[0][0][-1] == 11
    assert found[0][0][0] > 0
    assert found[0][1] == 2
