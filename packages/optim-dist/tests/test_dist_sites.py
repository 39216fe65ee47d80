"""Checkpoints of ranks that share no disk: found out by themselves, and whole without any one host if copied.

A host is a directory of its own here. Hosts are given by rank, so that ``(0, 0, 1)`` are two.
"""

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from dist_cases import assert_equal, assert_same_state
from dist_loops import Net, batch, make
from torch.distributed.device_mesh import DeviceMesh

from optim_dist import checkpoint, elastic
from optim_dist._checkpoint import manifest, sending, sites, surveying, writing
from optim_dist._reduction.collectives import Communicator
from optim_utils.testing import RankFailure, run_ranks

APART = (0, 1, 2)
IN_PAIRS = (0, 0, 1, 1)


def build(scale=1.0, **options):
    net = Net("cpu")
    net.register_buffer("seen", torch.full((3,), scale))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(scale)
    return net, make(net, "muon", reducer="exact", timeout=60, **options)


def step(net, optimizer, rank, number):
    net(batch(rank, number)).backward()
    optimizer.step()
    optimizer.zero_grad()
    net.seen += 1


def everything(net, optimizer):
    optimizer.wait()
    return {name: value.clone() for name, value in net.state_dict().items()}, optimizer.full_state_dict()


def save(rank, world_size, folder, hosts, options):
    sending.PIECE = 512  # bytes: a file has several
    net, optimizer = build()
    step(net, optimizer, rank, 0)
    saved = everything(net, optimizer)
    saving = checkpoint.save(f"{folder}/{hosts[rank]}/x", net, optimizer, extra={"step": 1}, **options)
    if isinstance(saving, checkpoint.Saving):
        step(net, optimizer, rank, 1)
        saving.wait()
    return saved


def load(rank, world_size, folder, hosts):
    sending.PIECE = 512
    net, optimizer = build(scale=3.0)
    try:
        extra = checkpoint.load(f"{folder}/{hosts[rank]}/x", net, optimizer)
    except checkpoint.CheckpointError as error:
        return str(error)
    assert extra == {"step": 1}
    return everything(net, optimizer)


def saved_by(hosts, folder, **options):
    return run_ranks(save, len(hosts), str(folder), hosts, options, timeout=120)[0]


def loaded_by(hosts, folder):
    return run_ranks(load, len(hosts), str(folder), hosts, timeout=120)


def assert_loaded(found, saved):
    for rank, (parameters, state) in enumerate(found):
        assert_equal(list(parameters.values()), list(saved[0].values()), f"of rank {rank}")
        if rank == 0:
            assert_same_state(state, saved[1])


def files_at(folder, host):
    return sorted(file.name for file in (Path(folder) / str(host) / "x").glob("rank-*"))


def names(*ranks):
    return [manifest.rank_file(rank) for rank in ranks]


@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize("hosts", [APART, IN_PAIRS])
def test_a_lost_host_does_not_cost_what_was_copied(tmp_path, hosts, async_):
    saved = saved_by(hosts, tmp_path, copies=2, async_=async_)
    if hosts == APART:
        assert [files_at(tmp_path, host) for host in range(3)] == [names(0, 2), names(0, 1), names(1, 2)]
    else:
        assert [files_at(tmp_path, host) for host in range(2)] == [names(0, 1, 2, 3)] * 2
    for host in set(hosts):
        assert sorted(os.listdir(tmp_path / str(host))) == ["latest", "x"]
    assert_loaded(loaded_by(hosts, tmp_path), saved)
    for lost in set(hosts):
        shutil.copytree(tmp_path, tmp_path.with_name("without"))
        shutil.rmtree(tmp_path.with_name("without") / str(lost))
        # the host is back with an empty disk, or gone and another number of ranks goes on
        left = tuple(host for host in hosts if host != lost)
        found = (hosts, left, (*left, *left, left[0]))[lost]
        assert_loaded(loaded_by(found, tmp_path.with_name("without")), saved)
        shutil.rmtree(tmp_path.with_name("without"))


def test_what_was_not_copied_is_loaded_by_any_ranks_that_have_it(tmp_path):
    saved = saved_by(IN_PAIRS, tmp_path)
    assert [files_at(tmp_path, host) for host in range(2)] == [names(0, 1), names(2, 3)]
    # in another order, by fewer and by more, also such as have nothing
    for hosts in (IN_PAIRS, (1, 1, 0, 0), (1, 0), (2, 1, 0, 2, 1)):
        assert_loaded(loaded_by(hosts, tmp_path), saved)
    for file in (tmp_path / "1" / "x").glob("rank-*"):
        file.rename(tmp_path / "0" / "x" / file.name)
    assert_loaded(loaded_by((0,), tmp_path), saved)


def test_what_is_lost_is_named_and_who_looked_where(tmp_path):
    saved_by(IN_PAIRS, tmp_path)
    shutil.rmtree(tmp_path / "1")
    for text in loaded_by(IN_PAIRS, tmp_path):
        assert "rank-00002.pt, rank-00003.pt: not whole on any rank; ranks [0, 1] looked in " in text
        assert f"{tmp_path}/0/x on " in text
        assert f"; ranks [2, 3] looked in {tmp_path}/1/x on " in text


def shorten(file):
    os.truncate(file, file.stat().st_size - 7)


def test_of_copies_one_that_is_whole_is_taken(tmp_path):
    saved = saved_by(APART, tmp_path, copies=2)
    shorten(tmp_path / "0" / "x" / "rank-00000.pt")
    shorten(tmp_path / "2" / "x" / manifest.COMMON)
    # what else is there counts all the same
    (tmp_path / "1" / "x" / manifest.MANIFEST).unlink()
    assert_loaded(loaded_by(APART, tmp_path), saved)
    shorten(tmp_path / "1" / "x" / "rank-00000.pt")
    for text in loaded_by(APART, tmp_path):
        assert "rank-00000.pt: not whole on any rank" in text


def alter(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def load_and_listen(rank, world_size, folder, hosts):
    said = []
    surveying._logger.warning = lambda text, *values: said.append(text % values)
    return load(rank, world_size, folder, hosts), said


def test_of_copies_one_that_is_as_it_was_written_is_taken(tmp_path):
    saved = saved_by(APART, tmp_path, copies=2)
    damaged = {0: [manifest.rank_file(0)], 1: [manifest.rank_file(1), manifest.COMMON], 2: []}
    for host, files in damaged.items():
        for name in files:
            alter(tmp_path / str(host) / "x" / name)
    for hosts in (APART, (1, 0, 2, 0, 1)):
        found, said = zip(*run_ranks(load_and_listen, len(hosts), str(tmp_path), hosts, timeout=120))
        assert_loaded(found, saved)
        told = {text.partition(" ")[0] for each in said for text in each}
        bad = {f"{tmp_path}/{host}/x/{name}" for host, files in damaged.items() for name in files}
        # of those that were to be read; with one rank a host these are all
        assert told == bad if hosts == APART else told <= bad
        assert told
    alter(tmp_path / "1" / "x" / manifest.rank_file(0))
    for text in loaded_by(APART, tmp_path):
        assert text.endswith("/x was not loaded:\n  rank-00000.pt: its contents were altered (SHA-256 differs)")
    for host in (0, 2):
        alter(tmp_path / str(host) / "x" / manifest.COMMON)
    for text in loaded_by(APART, tmp_path):
        assert "common.pt: its contents were altered" in text


def test_a_manifest_that_is_damaged_on_some_hosts_is_taken_from_another(tmp_path):
    """Other files of these hosts count, of which there may be no copy."""
    saved = saved_by(APART, tmp_path)
    damaged = {1: b"", 0: b"{"}
    for host, content in damaged.items():
        (tmp_path / str(host) / "x" / manifest.MANIFEST).write_bytes(content)
        found, said = zip(*run_ranks(load_and_listen, 3, str(tmp_path), APART, timeout=120))
        assert_loaded(found, saved)
        told = [text for texts in said for text in texts if "manifest.json cannot be read" in text]
        assert {text.partition(" ")[0] for text in told} == {
            f"{tmp_path}/{each}/x/{manifest.MANIFEST}" for each in damaged if each >= host
        }
    (tmp_path / "2" / "x" / manifest.MANIFEST).write_bytes(b"[]")
    for text in loaded_by(APART, tmp_path):
        assert text.count("manifest.json cannot be read") == 3


def load_at_another_version(rank, world_size, folder, hosts):
    if rank == 1:
        manifest.FORMAT = "optim-dist.checkpoint/0"
    return load(rank, world_size, folder, hosts)


def test_who_does_not_understand_what_another_has_is_an_error_on_all(tmp_path):
    saved_by(APART, tmp_path, copies=2)
    shutil.rmtree(tmp_path / "1")
    for text in run_ranks(load_at_another_version, 3, str(tmp_path), APART, timeout=60):
        assert "rank 1: CheckpointError: " in text
        assert "its format is 'optim-dist.checkpoint/1', this version reads 'optim-dist.checkpoint/0'" in text


def load_where_a_disk_does_not_give_a_file(rank, world_size, folder, hosts):
    digest = manifest.file_digest

    def read_or_fail(file):
        if rank == 0 and file.name == manifest.rank_file(0):
            raise OSError(5, "Input/output error")
        return digest(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "file_digest", read_or_fail)
        return load(rank, world_size, folder, hosts)


def test_of_copies_one_that_a_disk_gives_is_taken(tmp_path):
    saved = saved_by(APART, tmp_path, copies=2)
    assert_loaded(run_ranks(load_where_a_disk_does_not_give_a_file, 3, str(tmp_path), APART, timeout=120), saved)


def load_and_count(rank, world_size, folder, hosts, damaged):
    """How often this rank has asked about, and how often it has read through, which file."""
    asked, digested = [], []
    identity, digest = surveying._identity, manifest.file_digest
    surveying._identity = lambda folder, name, found: asked.append(name) or identity(folder, name, found)
    manifest.file_digest = lambda file: digested.append(file.name) or digest(file)
    found = load(rank, world_size, folder, hosts)
    return asked, digested, isinstance(found, str)


@pytest.mark.parametrize("damage", [None, shorten, alter])
def test_ranks_that_share_a_disk_ask_it_about_each_file_once(tmp_path, damage):
    hosts = (0, 0, 0, 0)
    saved_by(hosts, tmp_path)
    if damage is not None:
        damage(tmp_path / "0" / "x" / manifest.rank_file(2))
    found = run_ranks(load_and_count, 4, str(tmp_path), hosts, damage, timeout=120)
    for number, (asked, digested, is_refused) in enumerate(found):
        assert is_refused == (damage is not None)
        again = [manifest.rank_file(2)] if damage else []
        assert asked == [manifest.rank_file(number), manifest.COMMON, *again]
        expected = [manifest.rank_file(number), manifest.COMMON]
        if damage is shorten and number == 2:
            expected = [manifest.COMMON]  # its size is enough
        assert sorted(digested) == sorted(expected)


def load_from_a_disk_that_fails(rank, world_size, folder, hosts):
    read = Path.read_bytes

    def fail(file):
        if rank == 0 and file.name == manifest.COMMON:
            raise OSError(5, "Input/output error")
        return read(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        return load(rank, world_size, folder, hosts)


def test_who_cannot_read_the_common_file_says_why_on_all_ranks(tmp_path):
    saved_by(APART, tmp_path, copies=2)
    (tmp_path / "2" / "x" / manifest.COMMON).unlink()
    for text in run_ranks(load_from_a_disk_that_fails, 3, str(tmp_path), APART, timeout=120):
        assert "rank 0: OSError: [Errno 5] Input/output error" in text


def test_another_checkpoint_of_the_same_name_is_refused(tmp_path):
    for place in ("a", "b"):
        saved_by(APART, tmp_path / place, copies=2)
    run = tmp_path / "a"
    file = tmp_path / "b" / "1" / "x" / manifest.MANIFEST
    file.write_bytes(file.read_bytes() + b" ")
    shutil.copy(file, run / "1" / "x")
    for text in loaded_by(APART, run):
        assert f"ranks read different checkpoints: {run}/0/x, {run}/1/x, {run}/2/x; let one" in text


def save_otherwise(rank, world_size, folder):
    """Chunks in another order than ranks, and another torch on one host."""
    net, optimizer = build(mesh=DeviceMesh("cpu", torch.arange(world_size).view(2, -1)))
    writing.torch = SimpleNamespace(save=torch.save, __version__=f"2.{rank}")
    saved = everything(net, optimizer)
    for number, async_ in enumerate((False, True)):
        saving = checkpoint.save(f"{folder}/{rank}/{number}/x", net, optimizer, {"step": 1}, copies=2, async_=async_)
        if isinstance(saving, checkpoint.Saving):
            saving.wait()
    return optimizer.communicator.rank, saved


def test_ranks_may_be_numbered_otherwise_and_have_another_torch(tmp_path):
    chunks, saved = zip(*run_ranks(save_otherwise, 4, str(tmp_path)))
    assert chunks == (0, 2, 1, 3)
    for number in range(2):
        shutil.rmtree(tmp_path / "1" / str(number))
        assert_loaded(loaded_by([f"{host}/{number}" for host in (0, 2, 3)], tmp_path), saved[0])


def save_too_often(rank, world_size, folder, hosts):
    net, optimizer = build()
    texts = []
    for options in ({"copies": 3}, {"copies": 3, "async_": True}, {"copies": 0}, {"copies": "2"}, {"copies": 1 + rank}):
        with pytest.raises(RuntimeError) as raised:
            saving = checkpoint.save(f"{folder}/{hosts[rank]}/x", net, optimizer, **options)
            saving.wait()
        texts.append(str(raised.value))
    checkpoint.save(f"{folder}/{hosts[rank]}/x", net, optimizer, copies=2)
    return texts


def test_more_copies_than_hosts_are_refused(tmp_path):
    hosts = (0, 1, 1)
    for texts in run_ranks(save_too_often, 3, str(tmp_path), hosts):
        for text in texts[:2]:
            assert text.endswith(
                "/x was not saved:\n  copies=3 takes as many folders that ranks do not share, on hosts of their own; "
                "there are 2, of ranks [0], of ranks [1, 2]"
            )
        assert "copies must be at least 1, got 0" in texts[2]
        assert "copies must be at least 1, got '2'" in texts[3]
        assert "copies is 1 on rank 0, 2 on rank 1" in texts[4]
    for host in hosts:
        assert sorted(os.listdir(tmp_path / str(host))) == ["latest", "x"]


def save_on_a_full_disk(rank, world_size, folder, hosts):
    net, optimizer = build()
    sending.PIECE = 512
    write, read = manifest.write_durably, sending.Courier._read
    texts = []

    def write_or_fail(file, *args):
        if rank == world_size - 1 and file.name in names(0, 1):
            raise OSError("no space left")
        return write(file, *args)

    def read_wrongly(courier, *args):
        found = read(courier, *args)
        found[-1] ^= rank == 1
        return found

    def read_or_fail(courier, copy, *args):
        return read(courier, copy._replace(name="gone") if rank == 1 else copy, *args)

    def write_or_fail_at_the_end(file, *args):
        if rank == world_size - 1 and file.name == checkpoint.LATEST:
            raise OSError("no space left")
        return write(file, *args)

    for owner, name, broken in (
        (manifest, "write_durably", write_or_fail),
        (manifest, "write_durably", write_or_fail_at_the_end),
        (sending.Courier, "_read", read_wrongly),
        (sending.Courier, "_read", read_or_fail),
    ):
        for async_ in (False, True):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as raised:
                patch.setattr(owner, name, broken)
                checkpoint.save(f"{folder}/{hosts[rank]}/x", net, optimizer, copies=2, async_=async_).wait()
            texts.append(str(raised.value))
            dist.barrier()
            assert os.listdir(f"{folder}/{hosts[rank]}") == []
    checkpoint.save(f"{folder}/{hosts[rank]}/x", net, optimizer, copies=2)
    return texts


@pytest.mark.parametrize("hosts", [APART, (0, 1, 1, 2)])
def test_what_does_not_arrive_is_an_error_on_all_and_leaves_nothing(tmp_path, hosts):
    for texts in run_ranks(save_on_a_full_disk, len(hosts), str(tmp_path), hosts, timeout=120):
        for text in texts[:4]:
            assert f"rank {hosts.index(2)}: OSError: no space left" in text
        for text in texts[4:]:
            assert "rank-00001.pt has not arrived as rank 1 had written it" in text
        for text in texts[6:]:
            assert "rank 1: FileNotFoundError" in text


def save_where_rank_1_cannot_begin(rank, world_size, folder, hosts):
    net, optimizer = build()
    texts = []
    for owner, name in ((Path, "mkdir"), (Path, "touch"), (writing, "seen_in")):
        working = getattr(owner, name)

        def work_or_fail(path, *args, _working=working, **options):
            if path.name.startswith(".x.") or path.parent.name.startswith(".x."):
                raise OSError("read-only")
            return _working(path, *args, **options)

        for async_ in (False, True):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as raised:
                if rank == 1:
                    patch.setattr(owner, name, work_or_fail)
                saving = checkpoint.save(f"{folder}/{hosts[rank]}/x", net, optimizer, async_=async_)
                saving.wait()
            texts.append(str(raised.value))
            dist.barrier()
            path = Path(folder, str(hosts[rank]))
            assert not path.exists() or os.listdir(path) == []
            dist.barrier()
    return texts


@pytest.mark.parametrize("hosts", [APART, (0, 0, 1), (0, 1, 1)])
def test_a_save_that_fails_before_hosts_are_known_leaves_nothing_on_any(tmp_path, hosts):
    for texts in run_ranks(save_where_rank_1_cannot_begin, len(hosts), str(tmp_path), hosts, timeout=120):
        for text in texts:
            assert text.endswith("/x was not saved:\n  rank 1: OSError: read-only")


def save_and_die(rank, world_size, folder, hosts, when, async_):
    net, optimizer = build()
    step(net, optimizer, rank, 0)
    saved = everything(net, optimizer)
    checkpoint.save(f"{folder}/{hosts[rank]}/x", net, optimizer, extra={"step": 1}, copies=2)
    torch.save(saved, f"{folder}/saved-{rank}")
    step(net, optimizer, rank, 1)

    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 2:
        owner, name = {"sending": (sending.Courier, "_read"), "naming": (writing, "_give_name")}[when]
        setattr(owner, name, die)
    saving = checkpoint.save(f"{folder}/{hosts[rank]}/y", net, optimizer, copies=2, keep=1, async_=async_)
    if isinstance(saving, checkpoint.Saving):
        saving.wait()


@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize("when", ["sending", "naming"])
def test_a_rank_killed_during_a_save_leaves_the_checkpoint_before(tmp_path, when, async_):
    with pytest.raises(RankFailure, match="exit code -9"):
        run_ranks(save_and_die, 3, str(tmp_path), APART, when, async_, timeout=60)
    assert (tmp_path / "2" / "latest").read_text() == "x"
    assert_loaded(loaded_by(APART, tmp_path), torch.load(tmp_path / "saved-0", weights_only=False))


def send_to_the_dead(rank, world_size, folder):
    communicator = Communicator(None, torch.device("cpu"))
    piece = torch.zeros(8, dtype=torch.uint8)
    if rank == 2:
        communicator.receive(piece, 1).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        communicator.send(piece, 2).wait()
        with suppress(RuntimeError):
            communicator.receive(piece, 2).wait()  # returns when it is gone
        communicator.is_lost = False
        lost = []
        for start in (communicator.send, communicator.receive):
            with suppress(RuntimeError):
                start(piece, 2)
                lost.append("started")
            lost.append(communicator.is_lost)
            communicator.is_lost = False
        files = {"x": (600, "")}
        courier = sending.Courier(
            Path(folder), files, rank=1, addresses=dict(enumerate(range(3))), communicator=communicator
        )
        with pytest.raises(RuntimeError, match="rank 1 gave up the receiving from rank 2 over 3 ranks"):
            courier.copy([sending.Copy("x", 2, 1)])
        torch.save([*lost, courier.problems], f"{folder}/lost")


def test_who_sends_to_a_rank_that_has_ended_gives_up_at_once(tmp_path):
    with pytest.raises(RankFailure, match="exit code -9"):
        run_ranks(send_to_the_dead, 3, str(tmp_path), timeout=60)
    assert torch.load(tmp_path / "lost") == [True, True, []]


def save_on_one_disk(rank, world_size, folder):
    net, optimizer = build()
    writing.on_cpu = sending.sent_to_all = surveying.sent_to_all = None  # nobody sends anything
    for async_ in (False, True):
        saving = checkpoint.save(f"{folder}/async-{async_}", net, optimizer, keep=1, async_=async_)
    checkpoint.load(saving.result(), net, optimizer)


def test_on_one_disk_nothing_is_sent(tmp_path):
    run_ranks(save_on_one_disk, 3, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["async-True", "latest"]
    assert sorted(os.listdir(tmp_path / "async-True")) == ["common.pt", "manifest.json", *names(0, 1, 2)]


def test_disks_that_show_some_ranks_less_than_others_are_refused():
    assert sites.in_sites([sites.as_set(seen) for seen in ((0, 2), (1,), (0, 2))]) == [[0, 2], [1]]
    with pytest.raises(ValueError, match=r"ranks \[1\] see files of other ranks that do not see all of theirs"):
        sites.in_sites([sites.as_set(seen) for seen in ((0,), (0, 1))])


def test_copies_go_around_and_every_rank_sends_and_receives_once_at_a_time():
    ring = [[0, 1], [2, 3], [4, 5]]
    copies = sites.copies_of(ring, 2)
    assert [copy for copy in copies if copy.name == manifest.COMMON] == [("common.pt", 0, 2), ("common.pt", 0, 4)]
    assert copies[2:] == [(manifest.rank_file(rank), rank, (rank + 2) % 6) for rank in range(6)]
    rounds = sending._in_rounds(copies)
    assert sorted(copy for each in rounds for copy in each) == sorted(copies)
    for each in rounds:
        assert len({copy.source for copy in each}) == len({copy.target for copy in each}) == len(each)
    assert len(rounds) == 3


@pytest.mark.parametrize(
    ("holdings", "readers"),
    [
        ([(0, 1, 2, 3, 4)] * 3, [0, 1, 2, 0, 1]),
        ([(0, 3, 4), (0, 1, 4), (1, 2, 4), (2, 3, 4)], [0, 1, 2, 3, 0]),
        ([(), (0, 1, 2, 3, 4), (2, 4)], [1, 1, 2, 1, 2]),
    ],
)
def test_files_are_read_by_those_who_have_them_evenly(holdings, readers):
    holders = [[rank for rank, numbers in enumerate(holdings) if number in numbers] for number in range(5)]
    assert surveying.shared_out(holders, len(holdings)) == readers


TOTAL = 8


def train(run, rank, before_step=lambda step: None):
    net, optimizer = build()
    numbers = []
    for number in run.steps(net, optimizer, TOTAL):
        before_step(number)
        for place, parameter in enumerate(net.parameters()):
            # the others add zeros, so that not even the order of sums can differ
            parameter.grad = torch.full_like(parameter, (place + number) % 5 - 2.0 if rank == 0 else 0.0)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append(number)
    return numbers, list(everything(net, optimizer)[0].values())


def train_at(rank, world_size, folder, hosts, options, lost=None):
    def lose(number):
        if (rank, number) == lost:
            os.kill(os.getpid(), signal.SIGKILL)

    return elastic.run(lambda run: train(run, rank, lose), f"{folder}/{hosts[rank]}", every=2, **options)


def trained_at(hosts, folder, lost=None, **options):
    return run_ranks(train_at, len(hosts), str(folder), hosts, options, lost, timeout=120)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return trained_at(APART, tmp_path_factory.mktemp("whole"))[0][1]


def assert_trained(found, whole, first):
    for numbers, parameters in found:
        assert numbers == list(range(first, TOTAL))
        assert_equal(parameters, whole, "trained")


@pytest.mark.parametrize("async_", [False, True])
def test_training_goes_on_without_a_host(tmp_path, whole, async_):
    with pytest.raises(RankFailure, match="exit code -9"):
        trained_at(APART, tmp_path, (1, 5), copies=2, async_=async_)
    shutil.rmtree(tmp_path / "1")
    saved = [checkpoint.latest(tmp_path / str(host)).name for host in (0, 2)]
    # two hosts are left, one of which has two ranks
    found = trained_at((0, 2, 2), tmp_path, copies=2, async_=async_)
    if not async_:
        assert saved == ["step-000000004"] * 2
    assert_trained(found, whole, int(saved[0][-1]))
    for host in (0, 2):
        assert sorted(os.listdir(tmp_path / str(host))) == ["latest", *(f"step-{n:09d}" for n in (4, 6, 8))]


def train_and_listen(rank, world_size, folder, hosts, options):
    said = []
    writing._logger.warning = lambda text, *values: said.append(text % values)
    return train_at(rank, world_size, folder, hosts, options), said


def test_the_last_host_goes_on_with_fewer_copies(tmp_path, whole):
    with pytest.raises(RankFailure, match="exit code -9"):
        trained_at((0, 0, 1), tmp_path, (2, 5), copies=2)
    shutil.rmtree(tmp_path / "1")
    found = run_ranks(train_and_listen, 3, str(tmp_path), (0, 0, 0), {"copies": 2}, timeout=120)
    assert_trained([trained for trained, _ in found], whole, 4)
    assert [len(said) for _, said in found] == [2, 0, 0]
    assert "each rank's file is there in 1 copies in place of 2, as ranks have no more folders" in found[0][1][0]


def test_that_one_host_has_a_file_alone_is_said(tmp_path):
    found = run_ranks(train_and_listen, 3, str(tmp_path), APART, {}, timeout=120)
    assert [len(said) for _, said in found] == [4, 0, 0]
    assert (
        "a folder of its own on 3 hosts, and each rank's file is in one alone; copies=2 makes it two" in found[0][1][0]
    )


def lose_step(folder, number):
    shutil.rmtree(folder / f"step-{number:09d}")
    (folder / checkpoint.LATEST).write_text(f"step-{number - 2:09d}")


@pytest.mark.parametrize(("copies", "first"), [(1, 6), (2, 8)])
def test_a_host_that_has_missed_the_last_save_does_not_stop_it(tmp_path, whole, copies, first):
    trained_at(APART, tmp_path, copies=copies)
    lose_step(tmp_path / "1", 8)
    (tmp_path / "1" / ".step-000000008.0123456789ab.tmp").mkdir()
    assert_trained(trained_at(APART, tmp_path, copies=copies), whole, first)
    assert not list((tmp_path / "1").glob(".*"))
    assert len(list((tmp_path / "0").glob("step-*"))) == 3


def test_the_newest_that_is_complete_somewhere_is_found(tmp_path, whole):
    trained_at(APART, tmp_path, keep=9)
    lose_step(tmp_path / "1", 8)
    shorten(tmp_path / "0" / "step-000000006" / "rank-00000.pt")
    assert_trained(trained_at(APART, tmp_path, keep=9), whole, 4)


def test_an_empty_disk_and_a_damaged_file_do_not_stop_it(tmp_path, whole):
    trained_at(APART, tmp_path, copies=2)
    shutil.rmtree(tmp_path / "1")
    shorten(tmp_path / "0" / "step-000000008" / "rank-00000.pt")
    assert_trained(trained_at(APART, tmp_path, copies=2), whole, 6)
    assert_trained(trained_at((1, 2), tmp_path, copies=2), whole, 8)


def test_nothing_is_begun_anew_if_no_checkpoint_is_complete(tmp_path):
    trained_at(APART, tmp_path)
    shutil.rmtree(tmp_path / "1")
    with pytest.raises(RankFailure, match=r"step-000000008 was not loaded:\n  rank-00001.pt: not whole on any rank"):
        trained_at(APART, tmp_path)


def train_where_a_disk_does_not_answer(rank, world_size, folder, hosts):
    read = Path.read_bytes

    def read_or_fail(path):
        if rank == 1 and path.parent.name == "step-000000008":
            raise OSError("stale file handle")
        return read(path)

    def is_seen(path):  # as Python 3.14 has it
        return path.exists() and not (rank == 1 and path.parent.name == "step-000000008")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", read_or_fail)
        patch.setattr(Path, "is_file", is_seen)
        with pytest.raises(checkpoint.CheckpointError) as raised:
            train_at(rank, world_size, folder, hosts, {"keep": 1 + TOTAL})
    return str(raised.value)


@pytest.mark.parametrize("hosts", [(0, 0, 0), APART])
def test_a_disk_that_does_not_answer_costs_no_steps(tmp_path, whole, hosts):
    trained_at(hosts, tmp_path, keep=1 + TOTAL)
    for text in run_ranks(train_where_a_disk_does_not_answer, len(hosts), str(tmp_path), hosts, timeout=120):
        assert text.endswith("step-000000008 was not loaded:\n  rank 1: OSError: stale file handle")
    # what is there is as it was
    assert_trained(trained_at(hosts, tmp_path, keep=1 + TOTAL), whole, TOTAL)
