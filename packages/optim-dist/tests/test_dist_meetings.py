"""Ranks that wait for each other in streams, on a device that is made of Python: words of memory, and queues."""

from __future__ import annotations

import gc
import logging
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
from optim_dist._reduction.meetings import Meeting, Watch


class Device:
    """Streams as queues of operations, run one at a time in any order, and memory by address."""

    def __init__(self, num_streams):
        self.memory, self.queues = {}, [deque() for _ in range(num_streams)]

    def call(self, name, stream, address, value, flags):
        self.queues[stream].append((name, address, value, flags))

    def step(self, stream):
        """Run the next operation of a stream, unless that waits; whether it did."""
        operation = self.queues[stream][0]
        if callable(operation):
            operation()
        elif operation[0] == "cuStreamWriteValue32_v2":
            self.memory[operation[1]] = operation[2]
        elif self.memory.get(operation[1], 0) < operation[2]:
            return False
        self.queues[stream].popleft()
        return True


@given(num_ranks=st.integers(2, 5), num_meetings=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_nobody_goes_on_before_all_have_come(num_ranks, num_meetings, seed):
    device, random = Device(num_ranks), Random(seed)
    flags = {(at, of): 100 * at + 4 * of for at in range(num_ranks) for of in range(num_ranks)}
    come = []  # ranks that have come, one behind another
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meetings, "_call", device.call)
        for rank in range(num_ranks):
            others = [other for other in range(num_ranks) if other != rank]
            meeting = Meeting([flags[other, rank] for other in others], [flags[rank, other] for other in others])
            for number in range(1, num_meetings + 1):

                def comes(rank=rank):
                    come.append(rank)

                def goes_on(number=number):
                    assert all(come.count(each) >= number for each in range(num_ranks))

                device.queues[rank].append(comes)
                meeting.hold(SimpleNamespace(cuda_stream=rank))
                device.queues[rank].append(goes_on)
                assert meeting.number == number
    while waiting := [stream for stream, queue in enumerate(device.queues) if queue]:
        random.shuffle(waiting)
        assert any(device.step(stream) for stream in waiting), "all wait for each other"


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


def test_a_device_that_is_late_ends_the_process(caplog):
    ended = []
    reached = torch.zeros(1, dtype=torch.int32)
    watch = Watch(reached, 0.2, "a copy between ranks [0, 1]", lambda: ended.append(int(reached)))
    for number in range(1, 4):
        watch.expect(number)
        reached.fill_(number)
    time.sleep(0.4)
    assert not ended
    watch.expect(4)
    with caplog.at_level(logging.CRITICAL):
        deadline = time.monotonic() + 20
        while not ended and time.monotonic() < deadline:
            time.sleep(0.05)
    assert ended[0] == 3
    assert "a copy between ranks [0, 1] took longer than 0.2 s: another rank has ended" in caplog.text


def test_nobody_looks_for_what_is_gone():
    watch = Watch(torch.zeros(1, dtype=torch.int32), 0.2, "a copy", lambda: None)
    watch.expect(1)
    gone = weakref.ref(watch)
    del watch
    deadline = time.monotonic() + 20
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.05)
        gc.collect()
    assert gone() is None
