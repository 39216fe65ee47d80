"""Ranks that wait for each other in a stream of the device, without a kernel.

Every rank has a flag in the memory of each other one. To meet is to write the meeting's number to all of these, and to
wait until the flags in one's own memory have it, too: by CUDA's stream memory operations, of which none needs a
multiprocessor. For **a kernel that is queued behind a wait makes every kernel of other streams begin 1.3 microseconds
later**, as long as that wait lasts (H100; copies, and these operations, do not). A host that is ahead of the device by
half a step so loses some 2 ms of it; ``benchmarks/NOTES.md``, The main job 17, has how that was found.

A number that never comes is waited for without an end, and the host goes on. So it watches how far the device has got,
and ends the process after a timeout, as NCCL does.

Source: CUDA driver API, stream memory operations (cuStreamWriteValue32, cuStreamWaitValue32).
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_WAIT_UNTIL_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ; the flags' differences are looked at, so numbers may wrap around
_WRITE_BEHIND_ALL_BEFORE = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: what the stream has written is visible first


class Meeting:
    """The flags, and how often the ranks have met.

    Args:
        theirs: the address of this rank's flag in each other rank's memory.
        ours: of each other rank's in this one's. All int32, 0 before the first meeting.
    """

    def __init__(self, theirs: Sequence[int], ours: Sequence[int]) -> None:
        self._theirs, self._ours = tuple(theirs), tuple(ours)
        self.number = 0

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let ``stream`` go on once those of all ranks have come here, as often as this one has."""
        self.number += 1
        handle = stream.cuda_stream
        for address in self._theirs:
            write_value(handle, address, self.number)
        for address in self._ours:
            _call("cuStreamWaitValue32_v2", handle, address, self.number, _WAIT_UNTIL_AT_LEAST)


def write_value(stream: int, address: int, value: int) -> None:
    """Let a stream write an int32 to the device's memory, or to pinned memory of the host."""
    _call("cuStreamWriteValue32_v2", stream, address, value, _WRITE_BEHIND_ALL_BEFORE)


def missing_operations() -> str | None:
    """What this machine lacks to let ranks meet so; None: nothing."""
    try:
        for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
            _operation(name)
    except (OSError, AttributeError) as error:
        return f"CUDA's driver has no stream memory operations ({error})"
    return None


class Watch:
    """Looks, from a thread, how far the device has got, and ends the process if that takes too long.

    Args:
        reached: ``[1]``, int32, in memory that the device writes to: the number that it has got to.
        timeout: seconds from ``expect`` on.
        what: is waited for.
        end: how to end the process.
    """

    def __init__(self, reached: Tensor, timeout: float, what: str, end: Callable[[], None] = os.abort) -> None:
        self.reached, self._timeout, self._what, self._end = reached, timeout, what, end
        self._expected: deque[tuple[int, float]] = deque()
        self._is_started = False

    def expect(self, number: int) -> None:
        """The device is to get to ``number``, the largest so far, within the timeout."""
        self._expected.append((number, time.monotonic() + self._timeout))
        if not self._is_started:
            self._is_started = True
            period = min(5.0, self._timeout / 4)
            threading.Thread(target=_look, args=(weakref.ref(self), period), daemon=True, name="optim_dist").start()

    def look(self) -> None:
        """Forget what has been reached; end the process if the first that has not is late."""
        reached = int(self.reached)
        while self._expected and self._expected[0][0] <= reached:
            self._expected.popleft()
        if self._expected and self._expected[0][1] < time.monotonic():
            logger.critical(
                "%s took longer than %g s: another rank has ended or raised an error, which says why, or does "
                "something else; this process ends, start all ranks again from the newest checkpoint",
                self._what,
                self._timeout,
            )
            self._end()


def _look(watch: weakref.ref[Watch], period: float) -> None:
    while (found := watch()) is not None:
        found.look()
        del found  # it may go meanwhile
        time.sleep(period)


@cache
def _operation(name: str) -> Callable[[int, int, int, int], int]:
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    function.restype = ctypes.c_int
    found: Callable[[int, int, int, int], int] = function
    return found


def _call(name: str, stream: int, address: int, value: int, flags: int) -> None:
    status = _operation(name)(stream, address, value, flags)
    if status != 0:
        raise RuntimeError(f"{name} failed with CUDA's error {status}")
