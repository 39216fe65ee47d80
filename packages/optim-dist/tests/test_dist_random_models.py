"""Random models, layouts and numbers of ranks, with random use: the bits of one process (``dist_random_models``)."""

from pathlib import Path

import pytest
from dist_random_models import RandomModel, run

from optim_utils.testing import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_random_models(world_size: int, tmp_path: Path) -> None:
    run_ranks(run, world_size, RandomModel, range(3), 12, str(tmp_path), timeout=120)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("first", range(1000, 1200, 20))
def test_many_random_models(world_size: int, first: int, tmp_path: Path) -> None:
    run_ranks(run, world_size, RandomModel, range(first, first + 20), 20, str(tmp_path), timeout=600)
