"""A pytest plugin that skips tests where they would start ranks.

For a second run of tests whose only purpose is coverage, which does not see into ranks: they take most of the time of
optim-dist's tests. All of them run with their package alone.
"""

from typing import Any

import pytest

import optim_utils.testing


def _skip(*args: Any, **options: Any) -> None:
    pytest.skip("starts ranks, into which coverage does not see; it runs with its package alone")


def pytest_configure() -> None:
    # before test modules import it
    optim_utils.testing.run_ranks = _skip  # type: ignore[assignment]
