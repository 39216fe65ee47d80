"""What benchmarks write says how to repeat them, with which code, and in pictures what is what."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.report import ROOT, Report


def test_the_command_is_the_one_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/train_gpt.py", "--out", "a run"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert report.command() == "python benchmarks/train_gpt.py --out 'a run'"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert report.command() == "torchrun --nproc-per-node 2 benchmarks/train_gpt.py --out 'a run'"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    assert report.command().startswith("torchrun --nnodes 3 --nproc-per-node 2 ")


def test_the_command_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "asked.py").write_text("from benchmarks import report; print(report.command())")
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    said = subprocess.run([sys.executable, "-m", "asked", "1"], env=environment, capture_output=True, check=True)
    assert said.stdout == b"python -m asked 1\n"


def test_versions_are_those_of_the_code_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.0")
    monkeypatch.setattr(report, "find_spec", lambda module: None)
    # of an installed wheel what the installer wrote
    assert report.versions()["optim-dist"] == "0.0"

    class Spec:
        origin = str(ROOT / "packages" / "optim-dist" / "src" / "optim_dist" / "__init__.py")

    monkeypatch.setattr(report, "find_spec", lambda module: Spec if module == "optim_dist" else None)
    found = report.versions()
    assert f'version = "{found["optim-dist"]}"' in (ROOT / "packages" / "optim-dist" / "pyproject.toml").read_text()
    assert found["optim-kernels"] == "0.0"


def test_bars_are_named_by_all_that_tells_them_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    made = Report("Two", announce=False)
    made.add(what="ours", dtype="float16", ms=1.0)
    made.add(what="ours", dtype="bfloat16", ms=2.0)
    made.save_plot(tmp_path / "two.png", value="ms", labels=["what", "dtype"])
    (axis,) = drawn[0].axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["ours float16", "ours bfloat16"]
    # the title is above the panels
    assert not axis.get_title()
