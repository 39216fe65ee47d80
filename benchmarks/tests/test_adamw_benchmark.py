"""The benchmarks of AdamW and clipping: floors by counting bytes, suites, and a run on the tiny list."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import adamw_benchmark, clip_benchmark, timing
from benchmarks.adamw_benchmark import SUITES, Case
from benchmarks.ceilings import H200, ceilings
from benchmarks.model_lists import model_shapes

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "options", "size"),
    [
        (BF16, {}, 14),
        (FP32, {}, 28),
        (BF16, {"max_norm": 1.0}, 16),
        (BF16, {"state_dtype": (BF16, FP32)}, 18),
        (BF16, {"state_dtype": FP32}, 22),
        (BF16, {"state_dtype": FP32, "master_weights": "split16"}, 26),
        (BF16, {"state_dtype": FP32, "master_weights": "fp32"}, 28),
        (BF16, {"state_dtype": "int8"}, 10.0625),
    ],
    ids=str,
)
def test_bytes_of_an_element(dtype: torch.dtype, options: dict[str, object], size: float) -> None:
    assert Case("one", [(1,)], dtype, options).bytes_per_element == size


def test_the_floor_of_gpt2() -> None:
    num_bytes = Case("gpt2_124m", model_shapes("gpt2_124m"), BF16).num_bytes
    assert 1e3 * num_bytes / H200.copy == pytest.approx(0.411, abs=5e-4)


def test_ceilings_are_those_of_this_machine() -> None:
    found = ceilings()
    assert ceilings() is found
    if not torch.cuda.is_available():
        assert "measured here (cpu" in found.source
        # between a slow core and a large server, so that units are right
        assert 1e8 < found.copy < 2e12
        assert 1e8 < found.product < 1e14
    assert f"{found.copy / 1e12:.3g} TB/s" in str(found)


def test_every_case_of_a_suite_has_a_floor() -> None:
    assert len(SUITES["all"]) == sum(len(SUITES[name]) for name in ("plain", "clipping", "formats"))
    for name in SUITES:
        assert all(case.floor_ms > 0 for case in adamw_benchmark.suite(name))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny list is for machines without a GPU")
@pytest.mark.parametrize("module", [adamw_benchmark, clip_benchmark], ids=["adamw", "clip"])
def test_tiny_runs(module: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    extra = ["--with-adamw"] if module is clip_benchmark else ["--max-norm", "1.0"]
    monkeypatch.setattr(sys, "argv", ["benchmark", "--model", "d20", "--peers", "none", "--json", str(path), *extra])
    assert module.main() == 0  # type: ignore[attr-defined]
    content = json.loads(path.read_text())
    rows = content["rows"]
    assert {row["list"].split()[0] for row in rows if "list" in row} == {"tiny"}
    assert ", tiny bfloat16" in content["title"]
    assert all(row["error"] < 0.01 for row in rows if "ours" in row["what"])


def test_nan_in_any_tensor_is_no_small_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = adamw_benchmark.TritonAdamW.step

    def step(optimizer: torch.optim.Optimizer) -> None:
        right(optimizer)
        optimizer.param_groups[0]["params"][-1].detach()[0] = torch.nan

    monkeypatch.setattr(adamw_benchmark.TritonAdamW, "step", step)
    monkeypatch.setattr(sys, "argv", ["benchmark", "--model", "tiny", "--peers", "none"])
    assert adamw_benchmark.main() == 1
    said = capsys.readouterr()
    assert "the first step is wrong, error nan" in said.out
    assert "wall_ms" not in said.out + said.err


def test_as_many_calls_as_asked_for_are_timed() -> None:
    calls: list[int] = []
    timing.wall_ms([lambda: calls.append(0), lambda: calls.append(1)], at_least_ms=0, at_least_calls=20, warmups=3)
    # three times
    assert (calls.count(0), calls.count(1)) == (33, 33)


def test_a_tensor_in_half_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    options = ["--shape", "64", "32", "--dtype", "float16", "--steps", "200", "--warmup", "20"]
    monkeypatch.setattr(sys, "argv", ["benchmark", *options, "--json", str(table), "--plot", str(picture)])
    assert adamw_benchmark.main() == 0
    whats = [row["what"] for row in json.loads(table.read_text())["rows"]]
    assert {"ours", "torch fused", "torch foreach", "torch for-loop", "floor"} <= set(whats)
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize("module", [adamw_benchmark, clip_benchmark], ids=["adamw", "clip"])
def test_shapes_that_are_none_are_refused(
    module: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--shape", "4", "0"])
    with pytest.raises(SystemExit):
        module.main()
    assert "expected a whole number from 1 on, got '0'" in capsys.readouterr().err
