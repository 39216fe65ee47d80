"""Print the packages that a change touches, and those that depend on them, as a JSON list for a CI matrix.

    python .github/scripts/changed_packages.py BASE

A change outside of their folders (tool settings, the noxfile, a workflow, what all tests share) touches them all, but
documents and benchmarks there touch none.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PACKAGES = ("optim-utils", "optim-kernels", "optim-redist", "optim-dist")
FOLDER = Path(__file__).parents[2] / "packages"
DECLARED = {package: (FOLDER / package / "pyproject.toml").read_text() for package in PACKAGES}
DEPENDENTS = {package: {name for name, text in DECLARED.items() if f'"{package}>=' in text} for package in PACKAGES}


def affected(paths: list[str]) -> list[str]:
    """The packages to test when these paths changed."""
    found: set[str] = set()
    for path in paths:
        parts = path.split("/")
        if parts[0] == "packages" and len(parts) > 2 and parts[1] in DEPENDENTS:
            found |= {parts[1], *DEPENDENTS[parts[1]]}
        elif not (path.endswith(".md") or parts[0] in ("benchmarks", "LICENSE")):
            found |= set(PACKAGES)
    return [package for package in PACKAGES if package in found]


if __name__ == "__main__":
    # a file that moved counts where it was, too
    command = ["git", "diff", "--name-only", "--no-renames", f"{sys.argv[1]}...HEAD"]
    changed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    print(json.dumps(affected([path for path in changed if path])))
