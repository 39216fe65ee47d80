"""Time and memory of a region, on CPU and on CUDA, without stopping the device in the middle of a step."""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path
from types import TracebackType

import torch


class Stopwatch:
    """Milliseconds between entering and leaving; on CUDA by events, read only when asked for."""

    def __init__(self, device: torch.device) -> None:
        self._events = None
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._began = self._ended = 0.0

    def __enter__(self) -> Stopwatch:
        if self._events:
            self._events[0].record()
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = time.perf_counter()
        if self._events:
            self._events[1].record()

    def milliseconds(self) -> float:
        if self._events:
            self._events[1].synchronize()
            return self._events[0].elapsed_time(self._events[1])
        return 1e3 * (self._ended - self._began)


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak; on the CPU there is none to reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """On CUDA the allocator's peak since the last reset; on the CPU the process's resident set now (its caller keeps
    the largest), or its largest where only that is told, or 0 where neither is (Windows)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * mmap.PAGESIZE
    try:
        import resource
    except ModuleNotFoundError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
