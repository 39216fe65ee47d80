"""The README's examples run, and its commands name things that exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from optim_utils.testing import run_readme

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def commands() -> list[str]:
    """Every line of the README's bash blocks, without its comment."""
    blocks = re.findall(r"^```bash\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_examples_run() -> None:
    assert run_readme(README) == 5


@pytest.mark.parametrize("command", [c for c in commands() if "train_gpt.py" in c])
def test_main_job_commands_run(command: str, tmp_path: Path) -> None:
    words = command.removeprefix("uv run ").split()
    launcher = ["-m", "torch.distributed.run"] if words[0] == "torchrun" else []
    words = [sys.executable, *launcher, *(word for word in words if word != "torchrun")]
    # the same command at a size that takes seconds; of a repeated option the last one counts
    sizes = {"model": "tiny", "steps": 4, "batch-size": 4, "context": 32, "eval-batches": 1, "device": "cpu"}
    tiny = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    finished = subprocess.run(
        [*words, *tiny, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "curves.png").exists()


def test_test_command_is_the_one_that_ci_runs() -> None:
    assert "uv run nox" in commands()
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("uv run nox")
