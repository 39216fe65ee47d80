"""The examples of the README run."""

from pathlib import Path

from optim_utils.testing.readme import run_readme


def test_readme_examples_run():
    assert run_readme(Path(__file__).parents[1] / "README.md") == 3
