"""Removal of old checkpoints, of which none is ever half gone: it loses its name first, then its files.

    NAME  ->  .NAME.<nonce>.removed  ->  nothing

If a process is killed in between, what it leaves has no name under which it could be loaded, and the next save into the
same directory removes it. Several processes may save there: that another one was first is no error.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from optim_dist._checkpoint.manifest import MANIFEST, NONCE, CheckpointError, read_manifest

# from the complete checkpoints in a directory, the oldest first, to those that are to be removed
Choice = Callable[[list[Path]], list[Path]]


def all_but_the_newest(keep: int) -> Choice:
    """The choice of all checkpoints that are older than the ``keep`` newest."""
    return lambda found: found[:-keep]


def remove_old(folder: Path, choice: Choice) -> None:
    """Remove what ``choice`` picks among the checkpoints beside ``folder``, which was just written and stays."""
    for old in choice(complete_beside(folder)):
        if old != folder:
            remove(old)


def complete_beside(folder: Path) -> list[Path]:
    """The complete checkpoints in the directory of ``folder``, itself included, the oldest first.

    A folder with a manifest that can be read is a checkpoint; other folders, and links, are somebody else's.
    """
    found = []
    for other in folder.parent.iterdir():
        if other.name.startswith(".") or other.is_symlink():
            continue
        try:
            read_manifest(other)
            written = (other / MANIFEST).stat().st_mtime_ns
        except (CheckpointError, OSError):  # also for a folder that may not be read, or is gone by now
            continue
        # ``folder`` comes last even if clocks and file systems do not tell two saves apart
        found.append((other == folder, written, other))
    return [other for _, _, other in sorted(found)]


def remove(folder: Path) -> None:
    """Remove a checkpoint; whenever the process is killed, there is all of it or none."""
    nameless = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:NONCE]}.removed")
    with suppress(FileNotFoundError):
        folder.rename(nameless)
        if nameless.is_symlink():
            nameless.unlink()  # a link to a folder that somebody has moved: the folder is theirs
        else:
            shutil.rmtree(nameless)


def remove_leftovers(directory: Path) -> None:
    """Remove what an interrupted ``remove`` has left in ``directory``; failures are ignored."""
    for left in directory.glob(f".*.{'[0-9a-f]' * NONCE}.removed"):
        shutil.rmtree(left, ignore_errors=True)
