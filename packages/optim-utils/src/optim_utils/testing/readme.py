"""Run the examples of a document, so that what it shows is what happens."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

_NAME = "readme_examples"
# a fenced block whose first line says python; a word after it, as in ```python skip, is kept in `flags`
_BLOCK = re.compile(r"^(?P<indent> *)``` *python(?P<flags>[^\n]*)\n(?P<code>.*?)^ *```", re.MULTILINE | re.DOTALL)


@contextmanager
def _module() -> Iterator[dict[str, Any]]:
    """The namespace of a module that can be found by its name, as dataclasses and pickle need it."""
    module = ModuleType(_NAME)
    sys.modules[_NAME] = module
    try:
        yield vars(module)
    finally:
        del sys.modules[_NAME]


def run_readme(path: str | os.PathLike[str], *, shared: bool = True) -> int:
    """Execute every ``python`` block of a Markdown file, in order; return how many there were.

    The blocks are run in an empty folder of their own, in one namespace (or, if not ``shared``, each in a fresh one).
    A failing block raises what it raised, with the document and the line in the traceback. A block marked
    ``python skip`` is left out: for what needs several GPUs or hours.

    Raises:
        ValueError: if the document has no block to run, because a test of it would then show nothing.
    """
    document = Path(path).resolve()
    text = document.read_text(encoding="utf-8")
    count = 0
    with tempfile.TemporaryDirectory(prefix="readme-") as folder, chdir(folder), _module() as namespace:
        for block in _BLOCK.finditer(text):
            if "skip" in block["flags"].split():
                continue
            indent = block["indent"]
            code = "".join(line.removeprefix(indent) for line in block["code"].splitlines(keepends=True))
            # blank lines in front, so that a traceback shows the line of the document
            lines_before = text.count("\n", 0, block.start("code"))
            if not shared:
                namespace.clear()
                namespace["__name__"] = _NAME
            # without the future statement of this module, which the reader's program does not have; with assert
            # statements even under `python -O`
            program = compile("\n" * lines_before + code, str(document), "exec", dont_inherit=True, optimize=0)
            exec(program, namespace)
            count += 1
    if count == 0:
        raise ValueError(f"{document} has no python block to run")
    return count
