"""The README's examples run, and the runner of examples can fail."""

import subprocess
import sys
from pathlib import Path

import pytest

from optim_utils.testing import run_readme

pytestmark = pytest.mark.installed

README = Path(__file__).parents[1] / "README.md"


def test_every_example_of_the_readme_runs():
    assert run_readme(README) >= 10


def test_a_failing_example_is_found_at_its_line(tmp_path):
    document = tmp_path / "doc.md"
    document.write_text("# Title\n\n```python\nx = 1\n```\ntext\n```python\nassert x == 2, 'x is not 2'\n```\n")
    with pytest.raises(AssertionError, match="x is not 2") as error:
        run_readme(document)
    entry = error.traceback[-1]
    assert entry.lineno + 1 == 8
    assert str(entry.path) == str(document)


def test_a_failing_example_is_found_under_python_o_too(tmp_path):
    document = tmp_path / "doc.md"
    document.write_text("```python\nassert 1 == 2, 'they differ'\n```\n")
    code = f"from optim_utils.testing import run_readme\nrun_readme({str(document)!r})"
    done = subprocess.run([sys.executable, "-O", "-c", code], stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 1
    assert "AssertionError: they differ" in done.stderr


def test_namespaces_and_skipped_blocks(tmp_path):
    document = tmp_path / "doc.md"
    document.write_text(
        "```python\nx = 1\nopen('file', 'w').close()\n```\n"
        "```python skip\nraise RuntimeError\n```\n"
        "```\nnot python\n```\n"
        "- in a list\n  ```python\n  if x:\n      y = x\n  ```\n"
    )
    assert run_readme(document) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["doc.md"]
    with pytest.raises(NameError):
        run_readme(document, shared=False)


def test_a_space_before_the_language_hides_no_block(tmp_path):
    document = tmp_path / "doc.md"
    document.write_text("``` python\nx = 1\n```\n``` python skip\nraise RuntimeError\n```\n```text\nno python\n```\n")
    assert run_readme(document) == 1


def test_annotations_are_evaluated_as_in_the_readers_program(tmp_path):
    document = tmp_path / "doc.md"
    document.write_text("```python\ndef f(x: NotImported): ...\nf.__annotations__\n```\n")
    with pytest.raises(NameError, match="NotImported"):
        run_readme(document)


def test_a_document_without_examples_is_an_error(tmp_path):
    document = tmp_path / "doc.md"
    document.write_text("nothing\n")
    with pytest.raises(ValueError, match="no python block"):
        run_readme(document)
