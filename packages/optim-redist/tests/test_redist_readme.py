"""The README: every python block runs, and so does every command that needs no other machine."""

import re
import shlex
from pathlib import Path

from optim_redist.cli import main
from optim_utils.testing import run_readme

README = Path(__file__).parents[1] / "README.md"


def test_python_blocks_run(capsys):
    assert run_readme(README) >= 6
    shown = capsys.readouterr().out
    assert "no plan moves less than 512 elements" in shown
    assert "split_2_2_2" in shown


def test_commands_run(capsys):
    commands = re.findall(
        r"^optim-redist +((?:plan|explain|bound) .*)$", README.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(commands) == 3
    for command in commands:
        assert main(shlex.split(command)) == 0, command
        assert main([*shlex.split(command), "--json"]) == 0, command
    assert "together: 448 elements" in capsys.readouterr().out
