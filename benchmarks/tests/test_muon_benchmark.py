"""The benchmark of Newton–Schulz and the Muon step: dtypes, rows, and no speed for a wrong result."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import muon_benchmark

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="small shapes are for machines without a GPU")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["muon_benchmark", *arguments])
    return muon_benchmark.main()


@on_cpu
def test_a_shape_in_two_dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "rows.json"
    extra = ["--steps", "3", "--warmup", "1", "--json", str(table)]
    assert run(monkeypatch, "--shape", "2", "16", "24", "--dtype", "float16", "bfloat16", *extra) == 0
    rows = json.loads(table.read_text())["rows"]
    assert [(row["dtype"], row["what"]) for row in rows] == [
        (dtype, what) for dtype in ("float16", "bfloat16") for what in ("ours", "built-in", "addmm")
    ]
    ours = {row["dtype"]: row["error"] for row in rows if row["what"] == "ours"}
    # bf16 has 8 significant bits, fp16 has 11
    assert 0 < ours["float16"] < ours["bfloat16"] < 4e-3
    assert all(row["wall_ms"] > 0 and row["useful_TF"] > 0 for row in rows)
    # which form others take is theirs to choose
    assert {row["what"] for row in rows if row.get("method")} == {"ours"}


@on_cpu
def test_no_speed_of_a_wrong_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = muon_benchmark.newton_schulz
    monkeypatch.setattr(muon_benchmark, "newton_schulz", lambda *args, **options: 1.02 * right(*args, **options))
    assert run(monkeypatch, "--shape", "16", "24", "--peers", "none") == 1
    said = capsys.readouterr().out
    # beside that of rounding to 16 bits
    (error,) = re.findall(r"relative error ([0-9.]+);", said)
    assert float(error) == pytest.approx(0.02, rel=0.02)
    assert "wall_ms" not in said


@on_cpu
def test_a_step_of_matrices_as_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with sides cut, as shapes are."""
    table, made = tmp_path / "rows.json", []
    make = muon_benchmark.make_parameters

    def noted(shapes: list[tuple[int, ...]], *more: Any) -> list[torch.nn.Parameter]:
        made.append(shapes)
        return make(shapes, *more)

    monkeypatch.setattr(muon_benchmark, "make_parameters", noted)
    assert run(monkeypatch, "--matrices", "2x16x24", "20x200", "--json", str(table)) == 0
    assert made == 2 * [[(16, 24), (16, 24), (20, 128)]]
    content = json.loads(table.read_text())
    assert content["title"] == "Muon step, 2 of 16×24, 1 of 20×200, bfloat16, torch semantics"
    assert [row["what"] for row in content["rows"]] == ["TritonMuon", "torch.optim.Muon"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--matrices", "16x0"], "expected a whole number from 1 on, got '0'"),
        (["--matrices", "16"], "expected matrices as 4x768x3072 or 768x3072, got '16'"),
        (["--matrices", "16x16", "--model", "d20"], "a step is that of a --model or of --matrices, got both"),
        (["--matrices", "16x16", "--dtype", "float16", "bfloat16"], "--dtype is one dtype for a step"),
    ],
    ids=str,
)
def test_matrices_that_make_no_step_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, *arguments)
    assert words in capsys.readouterr().err


@on_cpu
@pytest.mark.parametrize("semantics", ["torch", "nanochat"])
def test_a_model_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, semantics: str) -> None:
    table = tmp_path / "rows.json"
    extra = ["--ns-dtype", "bfloat16", "--semantics", semantics, "--json", str(table)]
    assert run(monkeypatch, "--model", "d20", *extra) == 0
    content = json.loads(table.read_text())
    # what was measured
    assert content["title"] == f"Muon step, tiny, bfloat16, products in bfloat16, {semantics} semantics"
    names = ["TritonMuon", "torch.optim.Muon"] if semantics == "torch" else ["TritonMuonAdamW"]
    assert [row["what"] for row in content["rows"]] == names


@on_cpu
@pytest.mark.parametrize("wrong", [1.02, torch.nan])
def test_no_speed_of_a_wrong_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: float
) -> None:
    right = muon_benchmark.TritonMuon.step

    def step(optimizer: torch.optim.Optimizer) -> None:
        right(optimizer)
        optimizer.param_groups[0]["params"][-1].detach().mul_(wrong)

    monkeypatch.setattr(muon_benchmark.TritonMuon, "step", step)
    assert run(monkeypatch, "--model", "tiny") == 1
    said = capsys.readouterr()
    assert "no speed is printed" in said.out
    assert "wall_ms" not in said.out + said.err


def test_the_suite_is_in_both_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["muon_benchmark", "--suite"])
    assert muon_benchmark.parse().dtype == ["float16", "bfloat16"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "d20", "--dtype", "float16", "bfloat16"], "--dtype is one dtype for a step"),
        (["--dim", "64", "--ns-dtype", "bfloat16"], "--ns-dtype is for a step"),
        (["--dim", "64", "--dtype", "int8"], "invalid choice"),
        (["--model", "d21"], "invalid choice: 'd21'"),
        (["--shape", "64"], "--shape is that of a matrix or a batch of matrices, got 64 alone"),
        (["--steps", "0"], "expected a whole number from 1 on, got '0'"),
        (["--coefficients", "kelly"], "unknown coefficients 'kelly'"),
    ],
)
def test_arguments_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, *arguments)
    assert said in capsys.readouterr().err
