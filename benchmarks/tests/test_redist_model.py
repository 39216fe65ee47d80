"""The figures of a cost model's predictions, and that they are made on running ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import redist_model
from benchmarks.redist_model import Measured, judged


def _row(move: str, predicted: float, measured: float, *, chosen: bool) -> Measured:
    return Measured(move, move, 1, "direct", ((int(1e6 * predicted), 0),), predicted, measured, chosen)


def test_what_is_judged() -> None:
    rows = [
        _row("a", 1.0, 1.0, chosen=True),
        _row("a", 2.0, 4.0, chosen=False),
        _row("b", 3.0, 2.0, chosen=True),
        _row("b", 4.0, 1.9, chosen=False),
    ]
    found = judged(rows)
    # 4% more than the quickest is no wrong choice; 5.3% is
    assert found["chosen"] == 0.5
    assert judged([rows[0], rows[1]])["chosen"] == 1.0
    assert found["error"] == pytest.approx(0.5)
    # by predictions 1, 2, 3, 4, by measurements 1, 4, 3, 2
    assert found["correlation"] == pytest.approx(0.2)


def test_equal_values_share_a_rank() -> None:
    assert redist_model._rank_correlation([1, 1, 2, 3], [5, 5, 6, 7]) == pytest.approx(1.0)
    assert redist_model._rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)


def test_moves_reach_other_ranks() -> None:
    pairs = list(redist_model.moves(4))
    assert len({(src, dst) for src, dst in pairs}) == len(pairs) > 30
    assert all(max(*src.mesh.ranks, *dst.mesh.ranks) < 4 for src, dst in pairs)
    assert any(not {*src.mesh.ranks} & {*dst.mesh.ranks} for src, dst in pairs)


def test_plans_are_measured_on_gloo_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.json"
    options = ["--ranks", "2", "--sizes", "4KiB", "--repeats", "1", "--model", "flat", "--json", str(out)]
    assert redist_model.main(options) == 0
    assert "correlation" in capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    plans = [row for row in rows if "predicted" in row]
    assert [row["MiB"] for row in rows if "MiB" in row] == ["0.00390625", "all"]
    assert len(plans) > 10
    assert all(row["measured"] > 0 for row in plans)
    # one plan is chosen of every redistribution
    assert sum(row["chosen"] for row in plans) == len({(row["src"], row["dst"]) for row in plans})


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--ranks", "1"], "one rank exchanges nothing"), (["--model", "h100"], "presets are")],
    ids=["one rank", "unknown model"],
)
def test_what_cannot_be_measured_is_refused(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        redist_model.main(options)
    assert words in capsys.readouterr().err
