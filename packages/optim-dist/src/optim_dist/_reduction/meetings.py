"""Ranks that wait for each other in a stream of the device, without a kernel.

Every rank has flags in the memory of each other one. To meet is to write a number to these, and to wait until those in
one's own memory have it, too: by CUDA's stream memory operations, of which none needs a multiprocessor. For **a kernel
that is queued behind a wait makes every kernel of other streams begin 1.3 microseconds later**, as long as that wait
lasts (H100; copies, and these operations, do not). A host that is ahead of the device by half a step so loses some 2 ms
of it; ``benchmarks/NOTES.md``, The main job 17, has how that was found.

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

    A rank that goes on may come to the next meeting before others have seen that it came to this one, but not to the
    one behind that. So each has two flags, in turn, and waits until others' are equal to its own: those that meet for
    something else wait for ever, instead of taking it for the same.

    Args:
        theirs: the address of this rank's flags in each other rank's memory.
        ours: of each other rank's in this one's. Two int32 each, 0 before the first meeting.
    """

    def __init__(self, theirs: Sequence[int], ours: Sequence[int]) -> None:
        self._theirs, self._ours = tuple(theirs), tuple(ours)
        self._number = 0

    def hold(self, stream: torch.cuda.Stream, what: int) -> None:
        """Let ``stream`` go on once all ranks have come, as often as this one has, for the same ``what < 2^16``."""
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
    """What this machine lacks to let ranks meet so; None: nothing."""
    try:
        for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
            _operation(name)
    except (OSError, AttributeError) as error:
        return f"CUDA's driver has no stream memory operations ({error})"
    return None


class Watch:
    """Looks, from a thread, whether the device ends what it has begun, and ends the process if that takes too long.

    What the device has not begun, for it is behind the host, takes no time, nor does this process while it is stopped.

    Args:
        progress: ``[1]``, int32, 0, in memory of the host that the device writes to.
        timeout: in seconds.
        what: is waited for.
        end: how to end the process.
    """

    def __init__(self, progress: Tensor, timeout: float, what: str, end: Callable[[], None] = os.abort) -> None:
        self._progress, self._timeout, self._what, self._end = progress, timeout, what, end
        self._period = min(5.0, timeout / 4)  # seconds between two looks
        self._written = 0  # how often, where all of it has been
        self._seen, self._waited = 0, 0.0
        self._is_left = False
        # keeps the memory until the device has written to it for the last time
        threading.Thread(target=self._look_on, daemon=True, name="optim_dist").start()

    def write(self, stream: torch.cuda.Stream) -> None:
        """Let ``stream`` tell that it begins something; the next time, that it has ended it."""
        self._written = (self._written + 1) % 2**31
        write_value(stream.cuda_stream, self._progress.data_ptr(), self._written)

    @property
    def is_over(self) -> bool:
        """Whether the device has ended all that it was given."""
        return self._found == self._written

    def leave(self) -> None:
        """Nothing more comes; look on until what is under way has ended."""
        self._is_left = True

    def look(self) -> None:
        """End the process if what was under way in many looks still is."""
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
        # by no operation of torch, out of which a thread cannot be stopped where the interpreter ends
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
