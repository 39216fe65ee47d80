"""What the README shows is what happens."""

from pathlib import Path

import pytest

from optim_utils.testing.readme import run_readme


@pytest.mark.installed
@pytest.mark.filterwarnings("ignore:.*capturable.*:UserWarning")
def test_examples_run() -> None:
    assert run_readme(Path(__file__).parent.parent / "README.md") >= 2
