"""The CI matrix: which packages a change touches."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".github" / "scripts" / "changed_packages.py"
ALL = ["optim-utils", "optim-kernels", "optim-redist", "optim-dist"]


def load() -> object:
    spec = importlib.util.spec_from_file_location("changed_packages", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([], []),
        (["packages/optim-utils/src/optim_utils/balance.py"], ALL),
        (["packages/optim-kernels/tests/test_muon.py"], ["optim-kernels", "optim-dist"]),
        (["packages/optim-redist/README.md", "packages/optim-dist/pyproject.toml"], ["optim-redist", "optim-dist"]),
        (["noxfile.py"], ALL),
        (["README.md", "benchmarks/report.py"], []),
    ],
    ids=["nothing", "base", "with-dependent", "two", "settings", "documents"],
)
def test_matrix(paths: list[str], expected: list[str]) -> None:
    assert load().affected(paths) == expected
