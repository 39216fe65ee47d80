"""Every folder says in its docstring what is where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import optim_redist

ROOT = Path(optim_redist.__file__).parent
FOLDERS = [ROOT, *sorted(path.parent for path in ROOT.glob("*/__init__.py"))]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_names_what_is_in_it(folder: Path) -> None:
    _, _, listed = (folder / "__init__.py").read_text().partition("What is where:")
    named = set(re.findall(r"\w+", listed.partition('"""')[0]))
    here = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    assert here - {"__init__", "__main__"} <= named
