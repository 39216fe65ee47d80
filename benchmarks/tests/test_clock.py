"""What the main job says of its memory, on systems that tell it in different ways."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpt.clock import peak_memory_bytes
from benchmarks.gpt.results import Result
from benchmarks.gpt.training import History

CPU = torch.device("cpu")


@pytest.fixture
def no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)


def test_pages_are_of_the_size_that_the_system_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path: "999 5 1 1 0 1 0\n")
    monkeypatch.setattr(mmap, "PAGESIZE", 1 << 16)
    assert peak_memory_bytes(CPU) == 5 << 16


@pytest.mark.parametrize(("platform", "unit"), [("freebsd14", 1024), ("darwin", 1)])
@pytest.mark.usefixtures("no_proc")
def test_the_largest_resident_set_is_in_units_of_the_system(
    monkeypatch: pytest.MonkeyPatch, platform: str, unit: int
) -> None:
    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: SimpleNamespace(ru_maxrss=7))
    monkeypatch.setitem(sys.modules, "resource", usage)
    monkeypatch.setattr(sys, "platform", platform)
    assert peak_memory_bytes(CPU) == 7 * unit


@pytest.mark.usefixtures("no_proc")
def test_a_system_that_tells_nothing_trains_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    history = History([1.0], [1.0], [1.0], [[1.0, 1.0]], peak_bytes=peak_memory_bytes(CPU))
    assert Result("muon", "Muon", 0.02, history).row()[-1] == "not known"
    history.peak_bytes = 3 << 20
    assert Result("muon", "Muon", 0.02, history).row()[-1] == "3 MiB"
