"""From every rank's snapshot to a folder with its final name: the half of a save that may run in the background.

    1. each rank creates its file, still empty, in a hidden folder: ranks that find each other's files are one site
    2. each rank writes its file, the first one ``common.pt``, too
    3. sizes and digests go to all; if there are several sites, the common file to each, and copies from one to another
    4. the head of each site, its lowest rank, writes the manifest and, once all sites are complete, renames the folder
    5. the heads remove old checkpoints, if any are to go

Nothing here reads the optimizer or the model: training may have gone on.
"""

from __future__ import annotations

import errno
import glob
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optim_dist._checkpoint import manifest as manifests
from optim_dist._checkpoint.background import on_cpu
from optim_dist._checkpoint.common import packed_readable, without_tensors_of_model
from optim_dist._checkpoint.contents import saved_parameters
from optim_dist._checkpoint.faults import raised_together
from optim_dist._checkpoint.manifest import NONCE, Manifest
from optim_dist._checkpoint.removal import Choice, remove_leftovers, remove_old
from optim_dist._checkpoint.sending import Copy, Courier
from optim_dist._checkpoint.sites import as_set, copies_of, in_sites, seen_in
from optim_dist._reduction.collectives import Communicator
from optim_dist.plan import ParameterSpec, Piece

LATEST = "latest"

_OWN_DIRECTORY = "give every job a directory of its own"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes; ``common`` is empty on all but the first."""

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
    """Where a checkpoint goes, and what becomes of older ones."""

    folder: Path
    nonce: str
    old: Choice | None = None  # None keeps all
    copies: int = 1  # of each rank's file, in as many sites
    may_be_fewer: bool = False  # whether fewer copies will do if there are fewer sites

    @property
    def temporary(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.{self.nonce[:NONCE]}.tmp")

    @property
    def failed(self) -> str:
        """What the error of a failed save begins with."""
        return f"checkpoint {self.folder} was not saved"


class _Report(NamedTuple):
    """What a rank tells the others once it has written its files."""

    rank: int
    written: dict[str, list[Any]]  # size and digest of each file
    state: dict[str, Any]
    seen: str  # the ranks whose files it sees, in the form of ``as_set``
    torch_version: str


def write(snapshot: Snapshot, to: Destination, communicator: Communicator) -> None:
    """Write a checkpoint; collective over the ranks of ``communicator``, in whatever order it has them.

    Raises:
        RuntimeError: on every rank, with what failed on any.
    """
    _Writer(snapshot, to, communicator).run()


class _Writer:
    """One rank's part of writing a checkpoint, in the phases above."""

    def __init__(self, snapshot: Snapshot, to: Destination, communicator: Communicator) -> None:
        self._snapshot, self._to, self._communicator = snapshot, to, communicator
        self._rank = snapshot.rank
        self._is_head = True  # of its site; assumed until it has seen others' files

    def run(self) -> None:
        communicator, temporary = self._communicator, self._to.temporary
        try:
            self._create_file()
            gathered = [_Report(*each) for each in communicator.gather_json(self._write_files())]
            addresses = {report.rank: address for report, address in zip(gathered, communicator.ranks, strict=True)}
            reports = sorted(gathered, key=attrgetter("rank"))
            files = {name: entry for report in reports for name, entry in report.written.items()}
            copies = self._copies(reports)
            # several sites meet in the group on the CPU, whose long timeout suits ranks that wait for slower ones
            wire = on_cpu(communicator) if copies else communicator
            courier = Courier(temporary, files, rank=self._rank, addresses=addresses, communicator=wire)
            courier.copy(copies)
            with raised_together(wire, self._to.failed, self._rank) as problems, _known_if_gone(temporary):
                problems += courier.problems
                if self._is_head:
                    self._write_manifest(reports, files)
                    if not copies:
                        _give_name(temporary, self._to.folder)
            if copies:
                # once everything is on the disks of all sites
                with raised_together(wire, self._to.failed, self._rank), _known_if_gone(temporary):
                    if self._is_head:
                        _give_name(temporary, self._to.folder)
        finally:
            # by the rank that renames it alone: one that gave up waiting could remove what is about to get its name
            if self._is_head:
                shutil.rmtree(temporary, ignore_errors=True)
        if self._to.old is not None:
            failed = f"checkpoint {self._to.folder} is complete, but older ones were not removed"
            with raised_together(communicator, failed, self._rank):
                if self._is_head:
                    remove_old(self._to.folder, self._to.old)

    def _create_file(self) -> None:
        """Create this rank's file, by which the other ranks of its site see it."""
        temporary = self._to.temporary
        with raised_together(self._communicator, self._to.failed, self._rank):
            temporary.mkdir(parents=True, exist_ok=True)
            with _known_if_gone(temporary):
                (temporary / manifests.rank_file(self._rank)).touch()

    def _write_files(self) -> _Report:
        """Write this rank's file, and on the first rank the common one; find out whether this rank is its site's head.

        Returns what the other ranks are to know of it.
        """
        temporary, snapshot = self._to.temporary, self._snapshot
        file, written = manifests.rank_file(self._rank), {}
        with raised_together(self._communicator, self._to.failed, self._rank), _known_if_gone(temporary):
            seen = seen_in(temporary, snapshot.world_size)
            if self._rank not in seen:  # another rank has made the folder again since
                raise FileNotFoundError(temporary / file)
            self._is_head = seen[0] == self._rank
            if self._is_head:
                _clean(self._to)
            written[file] = manifests.write_durably(temporary / file, lambda stream: torch.save(snapshot.parts, stream))
            if self._rank == 0:
                packed_readable(without_tensors_of_model(snapshot.common))
                written[manifests.COMMON] = manifests.write_durably(
                    temporary / manifests.COMMON, lambda stream: torch.save(snapshot.common, stream)
                )
        return _Report(self._rank, written, snapshot.state, as_set(seen), torch.__version__)

    def _copies(self, reports: Sequence[_Report]) -> list[Copy]:
        """Which files go from which rank to which, so that each site has what it should; none if there is one site.

        Raises:
            RuntimeError: if ranks do not fall into sites, or there are fewer sites than copies wanted.
        """
        to = self._to
        try:
            sites = in_sites([report.seen for report in reports])
            copies = copies_of(sites, min(to.copies, len(sites)) if to.may_be_fewer else to.copies)
        except ValueError as error:
            raise RuntimeError(f"{to.failed}:\n  {error}") from error
        if self._rank == 0:
            _warn_of_few(to, len(sites))
        return copies

    def _write_manifest(self, reports: Sequence[_Report], files: dict[str, list[Any]]) -> None:
        """Write what a complete checkpoint has beside the files of the ranks, all flushed to the disk."""
        temporary, snapshot = self._to.temporary, self._snapshot
        parameters = saved_parameters(snapshot.specs, snapshot.pieces, [report.state for report in reports])
        manifest = Manifest(snapshot.world_size, snapshot.plan, files, parameters)
        # rank 0's version of torch, so that all sites write the same bytes
        manifest.write(temporary, reports[0].torch_version)
        manifests.write_durably(temporary / LATEST, lambda stream: stream.write(self._to.folder.name.encode()))
        manifests.flush_folder(temporary)


def _warn_of_few(to: Destination, num_sites: int) -> None:
    """Warn if there are fewer copies than asked for, or single ones on several hosts."""
    if num_sites < to.copies:
        _logger.warning(
            "%s: each rank's file is there in %d copies in place of %d, as ranks have no more folders of their own",
            to.folder,
            num_sites,
            to.copies,
        )
    elif num_sites > to.copies == 1:
        _logger.warning(
            "%s: that is a folder of its own on %d hosts, and each rank's file is in one alone; copies=2 makes it two",
            to.folder,
            num_sites,
        )


@contextmanager
def _known_if_gone(temporary: Path) -> Iterator[None]:
    """Say why a file in a save's hidden folder may not be found."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{temporary} is gone: it was removed by another process that saves to the same path, say; {_OWN_DIRECTORY}"
        ) from error


def _clean(to: Destination) -> None:
    """Remove what killed saves to this path, and killed removals in its directory, have left.

    Temporary folders of other paths may still be written.
    """
    for left in to.folder.parent.glob(f".{glob.escape(to.folder.name)}.{'[0-9a-f]' * NONCE}.tmp"):
        if left != to.temporary:
            # under another name first: if it is still written, it cannot get its own while it loses its files
            with suppress(OSError):  # in nobody's way if it cannot be removed
                left.rename(left.with_suffix(".removed"))
    remove_leftovers(to.folder.parent)


def _give_name(temporary: Path, folder: Path) -> None:
    """Give a complete checkpoint its name, and make it the latest; this takes no more space on the disk."""
    try:
        temporary.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise FileExistsError(
            f"{folder} exists by now: another process has saved to the same path; {_OWN_DIRECTORY}"
        ) from error
    (folder / LATEST).replace(folder.parent / LATEST)
    manifests.flush_folder(folder.parent)
