"""The training benchmark runs on two gloo ranks, and every way to step trains alike before it is timed."""

import pytest
import torch

from benchmarks.training_benchmark import WAYS, main, ways_for
from optim_utils.testing import run_ranks


def run(rank, world_size, mode):
    report = main(["--modes", mode, "--dtype", "fp32", "--steps", "2", "--runs", "1"])
    return report.rows


@pytest.mark.parametrize("mode", ["adamw", "muon"])
def test_every_way_trains_alike_before_it_is_timed(mode):
    rows = run_ranks(run, 2, mode)[0]
    assert [row["what"] for row in rows] == ways_for(mode)
    assert len(rows) == len(WAYS) - (mode == "muon") - 2 * (not torch.cuda.is_available())
    assert not [row for row in rows if "ms" not in row]
    falls = [row["fall"] for row in rows if row["what"] != "compute alone"]
    assert falls[0] > 0.02
    assert falls == pytest.approx([falls[0]] * len(falls), rel=0.1)


def test_one_process_is_told_to_start_ranks(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="needs two ranks: torchrun --nproc-per-node 2"):
        main([])
