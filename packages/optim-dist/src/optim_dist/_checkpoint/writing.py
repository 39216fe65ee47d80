"""From what every rank has to say to a folder with a name: the half of a save that may run in the background.

    1. each rank its file, the first one ``common.pt``, into a hidden folder
    2. sizes and digests to all
    3. the first rank the manifest, then the name
    4. the first rank removes old checkpoints, if any are to go

Nothing here looks at the optimizer or the model, which may have gone on.
"""

from __future__ import annotations

import glob
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optim_dist._checkpoint import manifest as manifests
from optim_dist._checkpoint.common import packed_readable, without_tensors_of_model
from optim_dist._checkpoint.contents import saved_parameters
from optim_dist._checkpoint.faults import raised_together
from optim_dist._checkpoint.manifest import NONCE, Manifest
from optim_dist._checkpoint.removal import Choice, remove_leftovers, remove_old
from optim_dist._reduction.collectives import Communicator
from optim_dist.plan import ParameterSpec, Piece

LATEST = "latest"


@dataclass(frozen=True)
class Contents:
    """What one rank writes; ``common`` and ``pieces`` are the first one's alone."""

    rank: int
    world_size: int
    plan: str
    specs: Sequence[ParameterSpec]
    pieces: Sequence[Sequence[Piece]]
    parts: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    common: dict[str, Any]


@dataclass(frozen=True)
class Destination:
    """Where it goes."""

    folder: Path
    nonce: str
    old: Choice | None = None  # None keeps all

    @property
    def temporary(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.{self.nonce[:NONCE]}.tmp")

    @property
    def failed(self) -> str:
        """What is said of a save that failed."""
        return f"checkpoint {self.folder} was not saved"


def write(contents: Contents, to: Destination, communicator: Communicator) -> None:
    """Write a checkpoint; collective over the ranks of ``communicator``, in whatever order it has them.

    Raises:
        RuntimeError: on every rank, with what failed on any.
    """
    temporary, rank, is_first = to.temporary, contents.rank, contents.rank == 0
    written: dict[str, list[Any]] = {}
    try:
        with raised_together(communicator, to.failed, rank):
            temporary.mkdir(parents=True, exist_ok=True)
            file = manifests.rank_file(rank)
            written[file] = manifests.write_durably(temporary / file, lambda stream: torch.save(contents.parts, stream))
            if is_first:
                packed_readable(without_tensors_of_model(contents.common))
                written[manifests.COMMON] = manifests.write_durably(
                    temporary / manifests.COMMON, lambda stream: torch.save(contents.common, stream)
                )
        every = sorted(communicator.gather_json([rank, written, contents.state]), key=lambda found: found[0])
        with raised_together(communicator, to.failed, rank):
            if is_first:
                files = {name: entry for _, found, _ in every for name, entry in found.items()}
                _check_shared(temporary, files)
                parameters = saved_parameters(contents.specs, contents.pieces, [state for *_, state in every])
                Manifest(contents.world_size, contents.plan, files, parameters).write(temporary)
                _finish(temporary, to.folder)
    finally:
        # by the rank that renames it, when all went well: another that gave up waiting would remove what gets its name
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
    if to.old is not None:
        failed = f"checkpoint {to.folder} is complete, but older ones were not removed"
        with raised_together(communicator, failed, rank):
            if is_first:
                remove_old(to.folder, to.old)


def clean(folder: Path) -> None:
    """Remove what killed saves to this path have left, and killed removals beside it.

    Temporary folders of other paths may still be written.
    """
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.{'[0-9a-f]' * NONCE}.tmp"):
        shutil.rmtree(left, ignore_errors=True)  # in nobody's way if it cannot be removed
    remove_leftovers(folder.parent)


def _check_shared(folder: Path, files: Iterable[str]) -> None:
    """Refuse a folder in which the first rank does not see what the others have written."""
    elsewhere = [name for name in files if not (folder / name).is_file()]
    if elsewhere:
        raise FileNotFoundError(
            f"{', '.join(elsewhere)} of other ranks cannot be seen in {folder}; give every rank the same path, on a "
            "disk that all of them share"
        )


def _finish(temporary: Path, folder: Path) -> None:
    """Give a whole checkpoint its name, and make it the latest; what needs space on the disk comes before."""
    manifests.write_durably(temporary / LATEST, lambda stream: stream.write(folder.name.encode()))
    manifests.flush_folder(temporary)
    temporary.rename(folder)
    (folder / LATEST).replace(folder.parent / LATEST)
    manifests.flush_folder(folder.parent)
