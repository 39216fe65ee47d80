"""Ranks that wait for each other in a stream of the device, without a kernel.

Every rank has flags in the memory of each other rank. To meet, a rank writes a number to its flags, and waits until the
other ranks' flags in its own memory have that number. CUDA's stream memory operations do both, and need no
multiprocessor. The reason: **a kernel that is queued behind a wait makes every kernel of other streams begin 1.3
microseconds later**, as long as that wait lasts (H100; copies and stream memory operations do not). With the host half
a step ahead of the device, this costs some 2 ms a step; ``benchmarks/NOTES.md``, The main job 17, says how that was
found.

The device waits without end for a number that never comes, while the host goes on. So the host watches how far the
device has got, and ends the process after a timeout, as NCCL does.

Source: CUDA driver API, stream memory operations (cuStreamWriteValue32, cuStreamWaitValue32).
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_WAIT_UNTIL_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_WRITE_BEHIND_ALL_BEFORE = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: what the stream has written is visible first

FLAG_BYTES = 8  # of one rank in the memory of another


class Meeting:
    """The flags, and how often the ranks have met.

    A rank may come to the next meeting before others have seen it at this one, but not to the meeting after that. So
    each rank has two flags, used in turn. It waits until the others' flags equal its own: ranks that meet for different
    things wait for ever, instead of mistaking one meeting for the other.

    Args:
        theirs: the address of this rank's flags in each other rank's memory.
        ours: the address of each other rank's flags in this rank's memory. Two int32 each, 0 before the first meeting.
    """

    def __init__(self, theirs: Sequence[int], ours: Sequence[int]) -> None:
        self._theirs, self._ours = tuple(theirs), tuple(ours)
        self._number = 0

    def hold(self, stream: torch.cuda.Stream, what: int) -> None:
        """Let ``stream`` go on once all ranks have come to this meeting, for the same ``what < 2^16``."""
        self._number = (self._number + 1) % 2**16
        handle, turn, value = stream.cuda_stream, 4 * (self._number % 2), self._number << 16 | what
        for address in self._theirs:
            write_value(handle, address + turn, value)
        for address in self._ours:
            _call("cuStreamWaitValue32_v2", handle, address + turn, value, _WAIT_UNTIL_EQUAL)


def write_value(stream: int, address: int, value: int) -> None:
    """Let a stream write an int32 to the device's memory, or to pinned memory of the host."""
    _call("cuStreamWriteValue32_v2", stream, address, value, _WRITE_BEHIND_ALL_BEFORE)


def missing_operations() -> str | None:
    """What this machine lacks for such meetings, None if nothing."""
    try:
        for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
            _operation(name)
    except (OSError, AttributeError) as error:
        return f"CUDA's driver has no stream memory operations ({error})"
    return None


class Watch:
    """A thread that ends the process if the device takes too long to finish work that it has begun.

    The time does not run before the device, which may be behind the host, has begun the work, nor while this process is
    stopped.

    Args:
        progress: ``[1]``, int32, 0, in host memory that the device can write to.
        timeout: in seconds.
        what: the work, as the log message names it.
        end: ends the process.
    """

    def __init__(self, progress: Tensor, timeout: float, what: str, end: Callable[[], None] = os.abort) -> None:
        self._progress, self._timeout, self._what, self._end = progress, timeout, what, end
        self._period = min(5.0, timeout / 4)  # seconds between two looks
        self._written = 0  # the value of ``progress`` once the device has done everything
        self._seen, self._waited = 0, 0.0
        self._is_left = False
        # the thread keeps ``progress`` alive until the device has written to it for the last time
        threading.Thread(target=self._look_on, daemon=True, name="optim_dist").start()

    def write(self, stream: torch.cuda.Stream) -> None:
        """Let ``stream`` report that it begins some work, and with the next call that it has finished the work."""
        self._written = (self._written + 1) % 2**31
        write_value(stream.cuda_stream, self._progress.data_ptr(), self._written)

    @property
    def is_over(self) -> bool:
        """Whether the device has finished all that it was given."""
        return self._found == self._written

    def leave(self) -> None:
        """Nothing more is launched: let the thread end once the device has finished."""
        self._is_left = True

    def look(self) -> None:
        """Called every ``_period`` seconds: end the process if the same work was seen in flight beyond the timeout."""
        found = self._found
        if found % 2 == 0 or found != self._seen:
            self._seen, self._waited = found, 0.0
            return
        self._waited += self._period
        if self._waited > self._timeout:
            logger.critical(
                "%s took longer than %g s: another rank has ended or raised an error, which says why, or does "
                "something else; this process ends, start all ranks again from the newest checkpoint",
                self._what,
                self._timeout,
            )
            self._end()

    def _look_on(self) -> None:
        while not (self._is_left and self.is_over):
            time.sleep(self._period)
            self.look()

    @property
    def _found(self) -> int:
        # without an operation of torch: a daemon thread inside one cannot be stopped when the interpreter ends
        return ctypes.c_int32.from_address(self._progress.data_ptr()).value


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
