"""How long a call takes: replayed from a CUDA graph, called back to back, after a flush of L2, or for a whole second.

    graph      device time: calls captured in a graph and replayed, round after round of them; no host cost
    wall       what a training loop sees: eager calls in a row, one synchronisation at the end
    flushed    device time of single calls, each after L2 was overwritten
    sustained  graph replays for a second: the clocks that the power limit allows

Matrix products draw more power than a card may for long: an H200 starts them at 1.98 GHz, has after some 50 ms what
700 W allow, 1.4 GHz say, and from .7 s on, about every second, less than that for some 150 ms. A figure would depend on
what ran before it, so `alternate` lets the card rest first, and ``sustained`` stands beside ``graph``.

Give ``graph_ms`` several functions that do the same on different tensors, more than three times the L2 together, and
the figure is "cold"; give it one and small inputs stay in L2, which is "hot". On a CPU only ``wall_ms`` exists.
All figures are milliseconds per call.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import torch

Call = Callable[[], object]
Timer = Callable[[], float]
K = TypeVar("K")

L2_BYTES = 60 << 20
REST_SECONDS = 0.6  # after which an H200 has its highest clock again


def num_cold_sets(num_bytes: int) -> int:
    """How many sets of inputs of so many bytes make each call find cold caches: three times the L2; one on a CPU."""
    return max(1, math.ceil(3 * L2_BYTES / num_bytes)) if torch.cuda.is_available() else 1


def capture(calls: Sequence[Call], *, warmups: int = 2) -> torch.cuda.CUDAGraph:
    """A graph of all ``calls`` in order, captured after each has run ``warmups`` times on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            for _ in range(warmups):
                call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def capture_rounds(
    calls: Sequence[Call], *, warmups: int = 2, at_least_ms: float = 5.0
) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of as many rounds of ``calls`` as last ``at_least_ms``, and how many calls that is.

    The start of a graph and its end take some microseconds whatever is between them, which is not a call's time.
    """
    graph = capture(calls, warmups=warmups)
    once = len(calls) * replay_ms(graph, len(calls), replays=3)
    num_rounds = math.ceil(at_least_ms / once)
    if num_rounds > 1:
        graph = capture([*calls] * num_rounds, warmups=0)
    return graph, num_rounds * len(calls)


def replay_ms(graph: torch.cuda.CUDAGraph, num_calls: int, *, replays: int = 15, budget_ms: float = 130.0) -> float:
    """The median time of a replay over ``num_calls``: of 15 replays, or of 5 and more that fill the budget.

    They are queued one behind the other, since the host takes some 60 µs to launch a graph, which is not a call's time.
    The first three do not count: clocks that wake up cost a short launch a tenth of its time.
    """
    (once,) = _queued_ms(graph, 1)
    return statistics.median(_queued_ms(graph, min(replays, max(5, int(budget_ms / once))))) / num_calls


def _queued_ms(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    """The times of so many replays behind one that is not timed."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for mark in marks:
        graph.replay()
        mark.record()
    marks[-1].synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(marks)]


def graph_ms(calls: Sequence[Call], *, repeat: int = 1) -> float:
    """Device time of a call, from a graph of ``repeat`` rounds over ``calls``."""
    rounds = list(calls) * repeat
    return replay_ms(capture(rounds), len(rounds))


def wall_ms(
    calls: Sequence[Call], *, at_least_ms: float = 100.0, at_least_calls: int = 1, repeats: int = 3, warmups: int = 3
) -> float:
    """Median over ``repeats`` of a call's time in ``at_least_calls`` back to back, which go on for ``at_least_ms``."""
    for call in calls:
        for _ in range(warmups):
            call()
    _synchronize()
    count = at_least_calls
    figures: list[float] = []
    while len(figures) < repeats:
        start = time.perf_counter()
        for i in range(count):
            calls[i % len(calls)]()
        _synchronize()
        elapsed = 1e3 * (time.perf_counter() - start)
        if elapsed < at_least_ms:
            count = max(count + 1, round(1.2 * count * at_least_ms / max(elapsed, 1e-3)))
        else:
            figures.append(elapsed / count)
    return statistics.median(figures)


def host_us(call: Call, *, num_calls: int = 50) -> float:
    """Microseconds the host spends in a call, the device's work not waited for."""
    figures = []
    for _ in range(5):
        _synchronize()
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        figures.append(1e6 * (time.perf_counter() - start) / num_calls)
    _synchronize()
    return statistics.median(figures)


def launches(call: Call) -> int:
    """Kernels that a call launches, copies and fills not counted."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    on_device = (event for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA)
    return sum(not event.name.startswith("Mem") for event in on_device)


def sm_clock_mhz(call: Call, *, seconds: float = 0.03) -> int | None:
    """The multiprocessors' clock while calls run, which power may hold below its highest; ``None`` without pynvml."""
    _synchronize()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        call()
    try:
        return torch.cuda.clock_rate()
    except ModuleNotFoundError:
        return None
    finally:
        torch.cuda.synchronize()


def flushed_ms(call: Call, *, runs: int = 20) -> float:
    """Median device time of single calls, each after writing four times the L2."""
    junk = torch.empty(4 * L2_BYTES, dtype=torch.uint8, device="cuda")
    call()
    times = []
    for _ in range(runs):
        junk.fill_(1)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def sustained_ms(graph: torch.cuda.CUDAGraph, num_calls: int, *, seconds: float = 1.0) -> float:
    """Mean device time of a call over replays of ``num_calls`` each that go on for ``seconds``."""
    count = max(1, round(1e3 * seconds / (num_calls * replay_ms(graph, num_calls, replays=5))))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count / num_calls


def alternate(timers: Mapping[K, Timer], *, rounds: int = 3) -> dict[K, float]:
    """The median figure of each timer, measured in turn (A B A B) and on a rested card, so that all see one clock."""
    figures: dict[K, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            rest()
            figures[name].append(timer())
    return {name: statistics.median(values) for name, values in figures.items()}


def rest() -> None:
    """Leave a GPU without work until it may run at its highest clock."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        time.sleep(REST_SECONDS)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
