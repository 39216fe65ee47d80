"""Times of graphs are those of the device alone, whatever the host takes to launch one."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from benchmarks import timing

LAUNCH = 0.06  # ms that the host takes to launch a graph


class Machine:
    """A device and its host, in ms; stands for a graph, whose replays take ``durations`` in turn."""

    def __init__(self, *durations: float) -> None:
        self.durations = durations
        self.host = self.device = 0.0
        self.num_replays = 0

    def replay(self) -> None:
        self.host += LAUNCH
        duration = self.durations[min(self.num_replays, len(self.durations) - 1)]
        self.device = max(self.device, self.host) + duration
        self.num_replays += 1

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def record(self) -> None:
        # as soon as the device has nothing else to do
        self.time = max(self.machine.device, self.machine.host)

    def synchronize(self) -> None:
        self.machine.host = max(self.machine.host, self.time)

    def elapsed_time(self, end: Event) -> float:
        return end.time - self.time


def median_of(machine: Machine, monkeypatch: pytest.MonkeyPatch, replays: int = 15) -> float:
    """Of a call, of which a graph has ten."""
    monkeypatch.setattr(torch.cuda, "Event", machine.event)
    return timing.replay_ms(cast("torch.cuda.CUDAGraph", machine), 10, replays=replays)


def test_the_launch_of_a_graph_is_nobodys_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert median_of(Machine(5.0), monkeypatch) == pytest.approx(0.5)


def test_clocks_that_wake_up_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(6.0, 6.0, 6.0, 5.0)
    assert median_of(machine, monkeypatch, replays=1) == pytest.approx(0.5)
    assert machine.num_replays == 4


@pytest.mark.parametrize(("duration", "counted"), [(5.0, 15), (20.0, 6), (100.0, 5)])
def test_the_budget_ends_long_replays(duration: float, counted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(duration)
    median_of(machine, monkeypatch)
    assert machine.num_replays == 3 + counted
