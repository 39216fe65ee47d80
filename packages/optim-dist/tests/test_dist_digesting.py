"""Files that are hashed and flushed while they are written: they hold what was given, and so says the digest."""

import errno
import hashlib
import os
import random
import resource
import threading
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from unittest import mock

import pytest
import torch

from optim_dist import TritonDistAdamW, checkpoint
from optim_dist._checkpoint import digesting, manifest
from optim_dist._checkpoint.digesting import CHUNK, NUM_CHUNKS, DigestingStream
from optim_dist._checkpoint.manifest import write_durably
from optim_dist._checkpoint.staging import on_host
from optim_dist._optimizers.agreement import digest

SIZES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * NUM_CHUNKS * CHUNK + 17]


@pytest.mark.parametrize("size", SIZES)
def test_a_file_holds_what_was_given_in_whatever_pieces(tmp_path, size):
    data, chosen = random.Random(size).randbytes(size), random.Random(1)
    pieces = []
    while sum(map(len, pieces)) < size:
        start = sum(map(len, pieces))
        pieces.append(data[start : start + chosen.choice([1, 7, 4096, CHUNK, 3 * CHUNK + 5])])
    # of the largest, at most so many at once
    pieces += [b""]
    lent = bytearray(max(map(len, pieces)))

    def write(stream):
        for piece in pieces:
            lent[: len(piece)] = piece
            assert stream.write(memoryview(lent)[: len(piece)]) == len(piece)
            lent[:] = bytes(len(lent))  # as who gave it does with memory that was read

    assert write_durably(tmp_path / "x", write) == [size, hashlib.sha256(data).hexdigest()]
    assert (tmp_path / "x").read_bytes() == data
    assert not _threads()


def _threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint_")]


class Altering:
    """A file on a way that changes a bit of the third chunk."""

    def __init__(self, file):
        self.file, self.num_writes = file, 0

    def write(self, data):
        self.num_writes += 1
        changed = bytearray(data)
        changed[-1] ^= self.num_writes == 3
        return self.file.write(changed)

    def flush(self):
        self.file.flush()

    def fileno(self):
        return self.file.fileno()


def test_the_digest_is_of_what_was_given_and_not_of_what_a_disk_made_of_it(tmp_path):
    data = random.Random(0).randbytes(5 * CHUNK)
    with (tmp_path / "x").open("wb") as raw, DigestingStream(Altering(raw)) as stream:
        stream.write(data)
        assert stream.finish() == (len(data), hashlib.sha256(data).hexdigest())
    assert hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest() != hashlib.sha256(data).hexdigest()


def test_a_flush_that_failed_under_the_writes_fails_the_file(tmp_path, monkeypatch):
    """The system tells only the first who asks, which is not the flush at the end."""
    asked = []

    def fail_once(descriptor):
        asked.append(descriptor)
        if len(asked) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(digesting.os, "fsync", fail_once)

    def write(stream):
        for _ in range(3 * NUM_CHUNKS):
            stream.write(bytes(CHUNK))
        while not asked:  # the thread that flushes has its turn
            pass

    with pytest.raises(OSError, match="Input/output error"):
        write_durably(tmp_path / "x", write)
    assert not _threads()


def test_what_fails_between_writes_ends_the_threads(tmp_path):
    def write(stream):
        stream.write(bytes(3 * CHUNK))
        assert len(_threads()) == 2
        raise KeyError("of whoever writes")

    with pytest.raises(KeyError):
        write_durably(tmp_path / "x", write)
    assert not _threads()


def test_a_full_disk_is_what_torch_save_reports(tmp_path):
    """Not that torch's own writer found its file too short, which it raises over the error."""
    tensors = [torch.ones(CHUNK) for _ in range(3)]
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * CHUNK, hard[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_durably(tmp_path / "x", lambda stream: torch.save(tensors, stream))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, hard)
    assert not _threads()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.float64])
def test_parts_are_written_from_where_they_lie(dtype):
    flat = torch.arange(100).to(dtype)
    for part in (flat, flat[7:31], flat[5:5]):
        found = on_host(part)
        assert torch.equal(found, part)
        assert (found.dtype, found.shape) == (part.dtype, part.shape)
        assert found.untyped_storage().nbytes() == part.nbytes
        assert found.data_ptr() == part.data_ptr() or not part.numel()


def test_a_checkpoint_larger_than_all_chunks_is_as_it_was(tmp_path):
    parameter = torch.nn.Parameter(torch.randn(NUM_CHUNKS * CHUNK // 4 + 3))
    optimizer = TritonDistAdamW([("w", parameter)])
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    before = parameter.detach().clone(), optimizer.state[parameter]["exp_avg"].clone()
    checkpoint.save(tmp_path / "x", None, optimizer)
    optimizer.step()
    checkpoint.load(tmp_path / "x", None, optimizer)
    assert torch.equal(parameter, before[0])
    assert torch.equal(optimizer.state[parameter]["exp_avg"], before[1])


def test_files_are_checked_at_the_same_time(tmp_path, monkeypatch):
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = TritonDistAdamW([("w", parameter)])
    checkpoint.save(tmp_path / "x", None, optimizer)
    both, file_digest = threading.Barrier(2, timeout=20), manifest.file_digest

    def meet(file):
        if file.name != manifest.MANIFEST:
            both.wait()
        return file_digest(file)

    monkeypatch.setattr(manifest, "file_digest", meet)
    checkpoint.load(tmp_path / "x", None, optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_digests_are_those_of_the_bytes_with_numpy_or_without(monkeypatch, dtype):
    def numpy(tensor):
        raise RuntimeError("Numpy is not available")

    tensors = [torch.arange(size).to(dtype) for size in (0, 1, 24)]
    content = [bytes(each.view(torch.uint8).tolist()) for each in tensors]
    monkeypatch.setattr(torch.Tensor, "numpy", numpy)
    assert list(map(digest, tensors)) == [hashlib.sha256(each).hexdigest() for each in content]
    # in memory order, also of what is not dense
    assert digest(tensors[2].view(4, 6).t()) == digest(tensors[2])
    assert digest(tensors[2][::2]) == digest(tensors[2][::2].clone())


@pytest.mark.parametrize("size", [2**31, 2**32 + 1])
def test_digests_are_of_all_bytes_however_many(monkeypatch, size):
    """Of pages that nothing is written to, which take no memory; their digests would take seconds."""
    found = []
    monkeypatch.setattr(hashlib, "sha256", lambda content: found.append(memoryview(content).nbytes) or mock.Mock())
    with mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS) as pages:
        tensor = torch.frombuffer(pages, dtype=torch.uint8)
        digest(tensor)
        del tensor
    assert found == [size]
