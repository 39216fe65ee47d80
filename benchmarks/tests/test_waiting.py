"""What streams that wait cost: the rows on a GPU, and what is said without one."""

from __future__ import annotations

import pytest
import torch

from benchmarks import waiting


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="streams wait on GPUs alone, and there is none"):
        waiting.main([])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_kind_of_wait_has_a_row() -> None:
    rows = waiting.main(["--runs", "1"]).rows
    assert len(rows) == 12
    assert all(0 < row["least"] == row["us"] < 1000 for row in rows)
