"""`run_ranks`: results in rank order, and the failures of ranks that raise, die or do not finish."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from pickle import PicklingError

import pytest
import torch

from optim_utils.testing import RankFailure, run_ranks


def summed(rank: int, world_size: int, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    total = tensor * (rank + 1)
    torch.distributed.all_reduce(total)
    return rank, total


def failing(rank: int, world_size: int, how: str) -> None:
    if rank == 1 and how == "raises":
        raise KeyError("of this rank")
    if rank == 1 and how == "dies":
        os._exit(3)
    if rank == 1 or how == "raises":
        time.sleep(60)


def test_results_come_in_rank_order() -> None:
    for rank, (found, total) in enumerate(run_ranks(summed, 3, torch.ones(2))):
        assert found == rank
        assert total.tolist() == [6.0, 6.0]


def test_there_is_a_rank() -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        run_ranks(summed, 0, torch.ones(2))


def test_what_cannot_be_pickled_is_refused_with_what_to_give() -> None:
    with pytest.raises((AttributeError, TypeError, PicklingError)) as error:
        run_ranks(lambda rank, world_size: rank, 2)
    assert "give a function of a module" in error.value.__notes__[0]


@pytest.mark.parametrize("guarded", [False, True])
def test_a_program_that_ranks_cannot_import_is_told_how(guarded: bool, tmp_path: Path) -> None:
    lines = ["from optim_utils.testing import run_ranks", "def ranked(rank, world_size):", "    return rank"]
    call = "print(run_ranks(ranked, 2, init_process_group=False))"
    lines += ['if __name__ == "__main__":', f"    {call}"] if guarded else [call]
    (tmp_path / "program.py").write_text("\n".join(lines))
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=120)
    if guarded:
        assert done.stdout == "[0, 1]\n"
    else:
        advice = 'see its output, and call run_ranks under `if __name__ == "__main__":` of a file'
        assert f"rank 0 died with exit code 1; {advice}" in done.stderr


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", r"^rank 1 of 2 failed:\n(.|\n)*KeyError: 'of this rank'\n$"),
        ("dies", "^rank 1 died with exit code 3$"),
        ("waits", r"^ranks \[1\] were still running after 3.0 s$"),
    ],
)
def test_failures_say_what_became_of_the_rank(how: str, message: str) -> None:
    with pytest.raises(RankFailure, match=message):
        run_ranks(failing, 2, how, timeout=3.0 if how == "waits" else 60.0, init_process_group=False)
