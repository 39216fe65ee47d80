"""A rank that dies: the others end with an error within the timeout; none hangs."""

import os
import signal
import time

import pytest
import torch
from torch import nn

from optim_dist import TritonDistAdamW
from optim_utils.testing import RankFailure, run_ranks


def lose_a_rank(rank, world_size, folder):
    parameter = nn.Parameter(torch.ones(100))
    optimizer = TritonDistAdamW([("w", parameter)], timeout=5)
    for step in range(3):
        if step == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        parameter.grad = torch.ones(100)
        start = time.monotonic()
        try:
            optimizer.step()
        except RuntimeError as error:
            with open(f"{folder}/rank-{rank}", "w") as file:
                file.write(f"{time.monotonic() - start} {error}")
            raise
        optimizer.zero_grad()


def test_a_killed_rank_ends_the_others_with_an_error(tmp_path):
    with pytest.raises(RankFailure, match="exit code -9"):
        run_ranks(lose_a_rank, 3, str(tmp_path), timeout=60)


def stall(rank, world_size, folder):
    parameter = nn.Parameter(torch.ones(100))
    optimizer = TritonDistAdamW([("w", parameter)], timeout=1)
    parameter.grad = torch.ones(100)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 1:
        time.sleep(4)
        return "slept"
    parameter.grad = torch.ones(100)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        optimizer.step()
    return time.monotonic() - start


def test_a_stalled_rank_ends_the_wait_at_the_timeout(tmp_path):
    waited = run_ranks(stall, 2, str(tmp_path), timeout=60)[0]
    assert 0.8 < waited < 3.8
