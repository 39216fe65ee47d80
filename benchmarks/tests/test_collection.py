"""``pytest`` without a path, as `noxfile.py` runs it where there is a GPU, imports the tests of all packages."""

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_two_modules_of_tests_have_one_name() -> None:
    """They lie in no packages, so a name is a module's only one, helpers of tests included."""
    folders = [*ROOT.glob("packages/*/tests"), Path(__file__).parent]
    names = Counter(path.name for folder in folders for path in folder.glob("*.py"))
    assert len(folders) == 5
    assert [name for name, count in names.items() if count > 1] == []
