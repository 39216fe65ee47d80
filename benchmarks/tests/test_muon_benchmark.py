"""The benchmark of Newton–Schulz and the Muon step: dtypes, rows, and no speed for a wrong result."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

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
        (["--model", "d20", "--dtype", "float16", "bfloat16"], "--dtype is one dtype for a --model"),
        (["--dim", "64", "--ns-dtype", "bfloat16"], "--ns-dtype is for a --model"),
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
