"""Old checkpoints go, and none is ever half gone: it loses its name first, then its files.

    NAME  ->  .NAME.<nonce>.removed  ->  nothing

What a process that was killed in between leaves has no name under which it could be loaded, and is removed by the next
save into the same directory. Several processes may save there: what another one has removed first is gone all the same.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from optim_dist._checkpoint.manifest import MANIFEST, NONCE, CheckpointError, read_manifest

# of the complete checkpoints in a directory, the oldest first, those that are to go
Choice = Callable[[list[Path]], list[Path]]


def all_but_the_newest(keep: int) -> Choice:
    """Whatever is older than the ``keep`` newest."""
    return lambda found: found[:-keep]


def remove_old(folder: Path, choice: Choice) -> None:
    """Remove what ``choice`` says of the checkpoints beside ``folder``, which was just written and stays."""
    for old in choice(complete_beside(folder)):
        if old != folder:
            remove(old)


def complete_beside(folder: Path) -> list[Path]:
    """The complete checkpoints in the directory of ``folder``, itself included, the one finished first in front.

    A folder is one if it has a manifest that can be read: others, and links, are somebody else's.
    """
    found = []
    for other in folder.parent.iterdir():
        if other.name.startswith(".") or other.is_symlink():
            continue
        try:
            read_manifest(other)
            written = (other / MANIFEST).stat().st_mtime_ns
        except (CheckpointError, OSError):  # of what may not be looked into, or is gone by now, too
            continue
        # the one just written last, even where clocks and file systems tell two saves not apart
        found.append((other == folder, written, other))
    return [other for _, _, other in sorted(found)]


def remove(folder: Path) -> None:
    """Remove a checkpoint; whenever the process is killed, there is all of it or none."""
    nameless = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:NONCE]}.removed")
    with suppress(FileNotFoundError):
        folder.rename(nameless)
        if nameless.is_symlink():
            nameless.unlink()  # of a folder that somebody has moved, which is theirs
        else:
            shutil.rmtree(nameless)


def remove_leftovers(directory: Path) -> None:
    """Remove what ``remove`` has left there; in nobody's way if that fails."""
    for left in directory.glob(f".*.{'[0-9a-f]' * NONCE}.removed"):
        shutil.rmtree(left, ignore_errors=True)
