"""Ranks that wait for each other in streams, on a device that is made of Python: words of memory, and queues."""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
import time
import weakref
from collections import deque
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optim_dist._reduction import meetings
from optim_dist._reduction.meetings import FLAG_BYTES, Meeting, Watch


class Device:
    """Streams as queues of operations, run one at a time in any order, and memory by address."""

    def __init__(self, num_streams):
        self.memory, self.queues = {}, [deque() for _ in range(num_streams)]

    def call(self, name, stream, address, value, flags):
        assert flags == {"cuStreamWriteValue32_v2": 0, "cuStreamWaitValue32_v2": 1}[name]
        self.queues[stream].append((name, address, ctypes.c_uint32(value).value))

    def step(self, stream):
        """Run the next operation of a stream, unless that waits; whether it did."""
        operation = self.queues[stream][0]
        if callable(operation):
            operation()
        elif operation[0] == "cuStreamWriteValue32_v2":
            self.memory[operation[1]] = operation[2]
        elif self.memory.get(operation[1], 0) != operation[2]:
            return False
        self.queues[stream].popleft()
        return True

    def run(self, random):
        """Until all has been done, or waits; whether all has."""
        while waiting := [stream for stream, queue in enumerate(self.queues) if queue]:
            random.shuffle(waiting)
            if not any(self.step(stream) for stream in waiting):
                return False
        return True


def _meetings(num_ranks):
    flags = {(at, of): 1000 * at + FLAG_BYTES * of for at in range(num_ranks) for of in range(num_ranks)}
    for rank in range(num_ranks):
        others = [other for other in range(num_ranks) if other != rank]
        yield Meeting([flags[other, rank] for other in others], [flags[rank, other] for other in others])


@given(
    num_ranks=st.integers(2, 5),
    met_before=st.sampled_from([0, 1, 2**16 - 3]),
    subjects=st.lists(st.integers(1, 2**16 - 1), min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
def test_nobody_goes_on_before_all_have_come(num_ranks, met_before, subjects, seed):
    device, come = Device(num_ranks), []  # ranks that have come, one behind another
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meetings, "_call", device.call)
        for rank, meeting in enumerate(_meetings(num_ranks)):
            meeting._number = met_before
            for number, subject in enumerate(subjects, 1):

                def comes(rank=rank):
                    come.append(rank)

                def goes_on(number=number):
                    assert all(come.count(each) >= number for each in range(num_ranks))

                device.queues[rank].append(comes)
                meeting.hold(SimpleNamespace(cuda_stream=rank), subject)
                device.queues[rank].append(goes_on)
    assert device.run(Random(seed)), "all wait for each other"


@given(num_ranks=st.integers(2, 4), seed=st.integers(0, 2**32 - 1), left_out=st.booleans())
def test_those_that_meet_for_something_else_wait_for_ever(num_ranks, seed, left_out):
    """Whether one does it in the place of what the others do, or does one thing less."""
    device, reached = Device(num_ranks), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meetings, "_call", device.call)
        for rank, meeting in enumerate(_meetings(num_ranks)):
            for subject in (5, 6, 7):
                if rank == 0 and subject == 6:
                    if left_out:
                        continue
                    subject = 8
                meeting.hold(SimpleNamespace(cuda_stream=rank), subject)
                device.queues[rank].append(lambda subject=subject: reached.append(subject))
    assert not device.run(Random(seed))
    assert set(reached) == {5} or num_ranks > 2
    assert 7 not in reached


def test_a_driver_without_the_operations_is_named(monkeypatch):
    def missing(name):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(meetings, "_operation", missing)
    assert "no stream memory operations (libcuda.so.1: cannot open" in meetings.missing_operations()
    monkeypatch.setattr(meetings, "_operation", lambda name: None)
    assert meetings.missing_operations() is None


def test_what_the_driver_refuses_is_an_error(monkeypatch):
    given = []
    monkeypatch.setattr(meetings, "_operation", lambda name: lambda *operands: given.append((name, *operands)) or 801)
    with pytest.raises(RuntimeError, match="cuStreamWriteValue32_v2 failed with CUDA's error 801"):
        meetings.write_value(7, 4096, 3)
    assert given == [("cuStreamWriteValue32_v2", 7, 4096, 3, 0)]


@pytest.fixture
def watched(monkeypatch):
    """A watch, the number that the device tells it, and what ends the process."""
    progress, ended = torch.zeros(1, dtype=torch.int32), []
    monkeypatch.setattr(meetings, "write_value", lambda stream, address, value: None)
    watch = Watch(progress, 0.2, "a copy between ranks [0, 1]", lambda: ended.append(int(progress)))
    yield watch, progress, ended
    progress.fill_(watch._written)
    watch.leave()


def _wait_for(found):
    deadline = time.monotonic() + 20
    while not found() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert found()


STREAM = SimpleNamespace(cuda_stream=7)


def test_a_device_that_is_late_ends_the_process(watched, caplog):
    watch, progress, ended = watched
    for number in range(1, 4):
        watch.write(STREAM)
        progress.fill_(number)
    with caplog.at_level(logging.CRITICAL):
        _wait_for(lambda: ended)
    assert ended[0] == 3
    assert "a copy between ranks [0, 1] took longer than 0.2 s: another rank has ended" in caplog.text


def test_a_device_that_is_behind_the_host_is_not_late(watched):
    watch, progress, ended = watched
    for _ in range(4):
        watch.write(STREAM)
    for number in (0, 2):  # it computes, as the host has told it
        progress.fill_(number)
        time.sleep(0.6)
    assert not ended
    assert not watch.is_over


def test_nobody_is_late_while_the_process_is_stopped(watched, monkeypatch):
    watch, progress, ended = watched
    watch.write(STREAM)
    progress.fill_(1)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 1000)
    watch.look()
    watch.look()
    assert not ended


def test_one_that_goes_on_for_long_is_not_late(watched):
    watch, progress, ended = watched
    watch._written = 2**31 - 4
    for number in (2**31 - 3, 2**31 - 2, 2**31 - 1, 0, 1, 2):
        watch.write(STREAM)
        progress.fill_(number)
        watch.look()
        assert watch.is_over
    assert not ended


def test_what_is_left_is_looked_at_until_it_is_over(watched):
    """So long the device may write to the memory by which it tells how far it is, and another rank may not come."""
    watch, progress, ended = watched
    for _ in range(2):
        watch.write(STREAM)
    watch.leave()
    looking = threading.Thread(target=watch._look_on, daemon=True)
    looking.start()
    looking.join(0.3)
    assert looking.is_alive()
    progress.fill_(1)
    _wait_for(lambda: ended)
    assert looking.is_alive()
    progress.fill_(2)
    _wait_for(lambda: not looking.is_alive())


def test_memory_that_is_written_to_stays(watched, monkeypatch):
    progress = torch.zeros(1, dtype=torch.int32)
    watch, address, gone = Watch(progress, 0.2, "a copy"), progress.data_ptr(), weakref.ref(progress)
    for _ in range(2):
        watch.write(STREAM)
    watch.leave()
    del watch, progress
    gc.collect()
    assert gone() is not None
    ctypes.c_int32.from_address(address).value = 2
    _wait_for(lambda: gone() is None)
