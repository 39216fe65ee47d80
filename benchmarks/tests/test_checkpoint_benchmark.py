"""The benchmark of checkpoints runs on two gloo ranks, and has a row for each way of saving."""

import os

import torch

from benchmarks.checkpoint_benchmark import measure, parse
from optim_utils.testing import run_ranks


def run(rank, world_size, folder):
    report = measure(parse(["--megabytes", "8", "--trials", "1", "--folder", folder]), torch.device("cpu"))
    return None if report is None else report.rows


def test_every_way_is_measured(tmp_path):
    rows = run_ranks(run, 2, str(tmp_path))[0]
    assert [row["what"] for row in rows] == ["a step alone", "save", "save, async_", "dcp.save", "dcp.async_save"]
    assert all(row["stall_ms"] <= row["complete_ms"] for row in rows[1:])
    assert all(row["step_ms"] for row in (rows[0], rows[2], rows[4]))
    assert os.listdir(tmp_path) == []
