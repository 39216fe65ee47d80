"""A folder whose docstring says "What is where" says it of every module in it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = [path.parent for path in ROOT.glob("packages/*/src/**/__init__.py") if "What is where" in path.read_text()]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: "/".join(folder.parts[-2:]))
def test_every_module_is_listed(folder: Path) -> None:
    listed = re.findall(r"\w+…?", ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "")
    families = tuple(name[:-1] for name in listed if name.endswith("…"))
    modules = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
    assert [name for name in modules if name not in listed and not name.startswith(families)] == []
