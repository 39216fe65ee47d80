"""Scripts in a process of their own: in the one that runs the tests Triton may interpret kernels, and none may hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def lines_of(script: str, *arguments: str, count: int, stdin: str | None = None, timeout: float = 500) -> list[Any]:
    """What the last ``count`` lines that a Python script prints say, as JSON."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, input=stdin, env=environment, capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()[-count:]]
