"""The main command of CI, with a stand-in for uv that says how it is called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAID = "torch==2.13.0+cpu"


@pytest.mark.parametrize(
    ("places", "pins"),
    [("{wheels}", True), ("https://example.org/wheels {wheels}", True), ("https://example.org/wheels /missing", False)],
    ids=["folder", "address-and-folder", "no-folder"],
)
def test_places_that_are_no_folders_are_left_to_uv(tmp_path: Path, places: str, pins: bool) -> None:
    wheels, tools = tmp_path / "wheels", tmp_path / "tools"
    wheels.mkdir()
    tools.mkdir()
    (wheels / "torch-2.13.0+cpu-cp312-cp312-linux_x86_64.whl").touch()
    (tools / "uv").write_text('#!/bin/sh\necho "uv $* on ${UV_PYTHON:-any} from $UV_FIND_LINKS"\n')
    (tools / "uv").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    environment |= {"PATH": f"{tools}:{environment['PATH']}", "PIP_FIND_LINKS": places.format(wheels=wheels)}
    found = subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, check=True).stdout
    links = environment["PIP_FIND_LINKS"].replace(" ", ",")
    pinned = [f"uv lock --quiet --upgrade-package {SAID} on 3.12 from {links}"] if pins else []
    assert found.splitlines() == [*pinned, f"uv run nox on {'3.12' if pins else 'any'} from {links}"]
