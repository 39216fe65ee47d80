"""The distributed benchmark runs on two gloo ranks, every row agrees with exact mode, and ours sends what it must."""

import pytest
import torch

from benchmarks.dist_benchmark import largest_error, main
from optim_utils.testing import run_ranks


def run(rank, world_size, mode):
    report = main(["--models", "tiny", "--modes", mode, "--dtypes", "fp32", "--iterations", "2", "--warmup", "1"])
    return report.rows


def test_every_row_is_right_before_it_is_timed():
    for mode, most in (("adamw", 8), ("muon", 7)):
        rows = run_ranks(run, 2, mode)[0]
        assert len(rows) == most
        assert not [row for row in rows if "ms" not in row]
        sent = [row["wire_GB"] for row in rows if row["what"].startswith("ours")]
        # 2 f P of the 2-layer model in fp32, padding included
        assert sent == pytest.approx([sent[0]] * len(sent))
        assert 1.0e-4 < sent[0] < 1.25e-4


def test_nan_in_any_parameter_is_an_error():
    ones = [torch.ones(2), torch.ones(2)]
    assert largest_error(ones, ones) == 0
    assert not largest_error([ones[0], torch.full((2,), torch.nan)], ones) <= 1e9


def test_one_process_is_told_to_start_ranks(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="needs two ranks: torchrun --nproc-per-node 2"):
        main([])
