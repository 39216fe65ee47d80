"""``python -m optim_kernels``: what it reports, and its exit status."""

from __future__ import annotations

import json
from typing import Any

import pytest

from optim_kernels import __main__ as report
from optim_kernels._impl import is_interpreted


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


@pytest.mark.skipif(not is_interpreted(), reason="compiling every kernel takes minutes")
def test_every_kernel_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--json"]) == 0
    checks = printed(capsys)["checks"]
    assert len(checks) == 17
    assert all(result.startswith("ok, error ") for result in checks.values())


def test_a_failure_is_in_the_report_and_in_the_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "run_checks", lambda: {"norm": report.outcome(lambda: (0.2, 0.1))})
    assert report.main(["--json"]) == 1
    assert printed(capsys)["checks"] == {"norm": "FAILED: error 0.2, allowed 0.1"}


@pytest.mark.skipif(not is_interpreted(), reason="of the interpreter")
def test_without_numpy_the_interpreter_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_has_numpy", lambda: False)
    assert report.main(["--json"]) == 0
    found = printed(capsys)
    assert found["kernels"] == "not available: Triton's interpreter needs numpy"
    assert found["checks"] == {}
