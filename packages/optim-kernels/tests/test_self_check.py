"""``python -m optim_kernels``: what it reports, and its exit status."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from optim_kernels import __main__ as report
from optim_kernels import _kernels
from optim_kernels._impl import is_interpreted


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


@pytest.mark.slow
@pytest.mark.skipif(not is_interpreted(), reason="compiling every kernel takes minutes")
def test_every_kernel_is_checked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import GridExecutor

    launched: set[tuple[str, str]] = set()
    launch = GridExecutor.__call__

    def listen(self: Any, *args: Any, **options: Any) -> Any:
        launched.add((self.fn.__module__, self.fn.__name__))
        return launch(self, *args, **options)

    monkeypatch.setattr(GridExecutor, "__call__", listen)
    assert report.main(["--json"]) == 0
    checks = printed(capsys)["checks"]
    assert all(result.startswith("ok, error ") for result in checks.values())
    # tiles that large products alone take
    of_large = {("optim_kernels._kernels.symmetric", name) for name in ("quartered_kernel", "joined_kernel")}
    names = ("limits_kernel", "rounding_kernel", "diagonal_kernel")
    of_large |= {("optim_kernels._kernels.int8_rounding", name) for name in names}
    assert portable_kernels() - launched == of_large


def portable_kernels() -> set[tuple[str, str]]:
    """Module and name of all that a launch may be of, without Hopper's."""
    from triton.runtime import KernelInterface

    names = [f"{_kernels.__name__}.{module.name}" for module in pkgutil.iter_modules(_kernels.__path__)]
    modules = map(importlib.import_module, (*names, "optim_kernels.adamw_kernels", "optim_kernels.clip_kernels"))
    kernels = {value.fn for module in modules for value in vars(module).values() if isinstance(value, KernelInterface)}
    return {(fn.__module__, fn.__name__) for fn in kernels if re.search("_kernel(_of_one)?$", fn.__name__)}


def test_a_failure_is_in_the_report_and_in_the_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "run_checks", lambda: [("norm", report.outcome(lambda: (0.2, 0.1)))])
    assert report.main(["--json"]) == 1
    assert printed(capsys)["checks"] == {"norm": "FAILED: error 0.2, allowed 0.1"}
    assert report.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"python          {report.environment()['python']}"
    assert lines[-1] == f"{'norm':<44}FAILED: error 0.2, allowed 0.1"
    assert report.outcome(lambda: 1 / 0) == "FAILED: ZeroDivisionError: division by zero"  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [0, 1])
def test_nan_in_any_tensor_is_a_failure(place: int) -> None:
    found, ones = [torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(2)]
    found[place][1] = torch.nan
    assert report.outcome(lambda: (report.largest_difference(found, ones), 1.0)).startswith("FAILED: error nan")


def test_results_are_printed_as_they_come(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def checks() -> Iterator[tuple[str, str]]:
        assert "triton" in capsys.readouterr().out
        yield "norm", "ok, error 0"
        assert capsys.readouterr().out == f"{'norm':<44}ok, error 0\n"

    monkeypatch.setattr(report, "run_checks", checks)
    assert report.main([]) == 0


@pytest.mark.skipif(not is_interpreted(), reason="of the interpreter")
def test_without_numpy_the_interpreter_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_has_numpy", lambda: False)
    assert report.main(["--json"]) == 0
    found = printed(capsys)
    assert found["kernels"] == "not available: Triton's interpreter needs numpy"
    assert found["checks"] == {}
