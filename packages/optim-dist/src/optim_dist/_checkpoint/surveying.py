"""What ranks have of a checkpoint together, and which of them reads which file.

    1. ranks that lack the manifest get it; all say which file names they see; each file is given to a rank that sees it
    2. that rank checks the file's size; if the file is not whole, the other ranks check theirs
    3. digests likewise: if a file is not as it was written, another copy is read

A checkpoint does not say where its files are: they may be moved, and copied to where they are missing. Ranks that share
a disk each list the folder, but only one asks about each file, because that is what costs a disk of many hosts most.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import platform
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from optim_dist._checkpoint import manifest as manifests
from optim_dist._checkpoint.faults import described
from optim_dist._checkpoint.manifest import COMMON, MANIFEST, CheckpointError, Manifest, rank_file
from optim_dist._checkpoint.sending import sent_to_all
from optim_dist._checkpoint.sites import as_set
from optim_dist._reduction.collectives import Communicator

_logger = logging.getLogger(__name__)

Found = TypeVar("Found")


@dataclass(frozen=True)
class Survey:
    """What ranks have of a checkpoint together, the same on all.

    Attributes:
        manifest: None if there is none, or ranks have different ones.
        problems: what the checkpoint lacks.
        readers: of every saved rank's file, which rank reads it; -1 if nobody can.
        common_readers: which ranks read the common file, the lowest of which sends it to the others.
    """

    manifest: Manifest | None
    problems: list[str]
    readers: Sequence[int] = ()
    common_readers: Sequence[int] = ()

    def read_by(self, rank: int) -> list[str]:
        """The names of the files that ``rank`` reads."""
        names = [rank_file(number) for number, reader in enumerate(self.readers) if reader == rank]
        return [*names, COMMON] if rank in self.common_readers else names

    def common_file(self, folder: Path, communicator: Communicator) -> io.BytesIO | None:
        """The common file as another rank has sent it, if any rank lacks it, else None; collective.

        Raises:
            OSError: on the rank that was to read it, after it has sent zeros, since the others wait.
            CheckpointError: on a rank where it arrives with a wrong digest, as these zeros do.
        """
        if self.manifest is None or len(self.common_readers) in (0, communicator.world_size):
            return None
        content, failure, source = b"", None, self.common_readers[0]
        if communicator.rank == source:
            try:
                content = (folder / COMMON).read_bytes()
            except OSError as error:
                failure = error
        sent = sent_to_all(content, self.manifest.files[COMMON][0], source, communicator)
        if failure is not None:
            raise failure
        if problems := manifests.verify_content(sent, COMMON, self.manifest):
            raise CheckpointError(folder, problems)
        return io.BytesIO(sent)

    def without_damaged(
        self, folder: Path, faults: Mapping[str, list[str]], communicator: Communicator, verify: bool
    ) -> tuple[Survey, list[str]]:
        """The survey with another copy in place of each damaged file; collective.

        Args:
            faults: what is wrong with the files that this rank was to read, keyed by name.
            verify: whether this rank compares digests of other copies.

        Returns:
            The survey, and what is wrong with files of which no copy is good.
        """
        faults_by_rank = communicator.gather_json(faults)
        damaged = sorted({name for of_rank in faults_by_rank for name in of_rank})
        if self.manifest is None or not damaged:
            return self, []
        for name, problems in faults.items():
            _logger.warning("%s is not used: %s", folder / name, "; ".join(problems))
        good = {COMMON: [rank for rank in self.common_readers if COMMON not in faults_by_rank[rank]]}
        # if the checkpoint lacks a file, nothing is loaded, so other copies do not matter
        names = [] if self.problems else [name for name in damaged if name != COMMON]
        others = self._other_copies(folder, names, communicator)
        new_faults_by_rank = communicator.gather_json(
            {
                name: manifests.verify_file(folder, name, self.manifest, with_digest=verify)
                for name, ranks in others.items()
                if communicator.rank in ranks
            }
        )
        for name, ranks in others.items():
            good[name] = [rank for rank in ranks if not new_faults_by_rank[rank][name]]
        readers = [
            (*good.get(name, ()), -1)[0] if name in damaged else reader
            for name, reader in zip(_files(self.manifest), self.readers)
        ]
        all_faults = [*faults_by_rank, *new_faults_by_rank]
        lost = [name for name in damaged if not good.get(name)]
        problems = [problem for name in lost for of_rank in all_faults for problem in of_rank.get(name, [])]
        return replace(self, readers=readers, common_readers=good[COMMON]), list(dict.fromkeys(problems))

    def _other_copies(self, folder: Path, names: Sequence[str], communicator: Communicator) -> dict[str, list[int]]:
        """Ranks that check other copies of damaged files: per host, one for each copy not read yet; collective."""
        assert self.manifest is not None, "without one nothing is read"
        mine = {}
        for name in names:
            with suppress(OSError):  # a disk that does not answer has no copy to offer
                mine[name] = _identity(folder, name, self.manifest)
        identities_by_rank = communicator.gather_json(mine)
        readers = dict(zip(_files(self.manifest), self.readers))
        others = {}
        for number, name in enumerate(names):
            seen_by: dict[str, list[int]] = {}
            for rank, identities in enumerate(identities_by_rank):
                if identities.get(name):
                    seen_by.setdefault(identities[name], []).append(rank)
            others[name] = [ranks[number % len(ranks)] for ranks in seen_by.values() if readers[name] not in ranks]
        return others


def survey(folder: Path, communicator: Communicator) -> Survey:
    """Look for a checkpoint in every rank's ``folder``; collective. Ranks without the manifest get it from another.

    Raises:
        CheckpointError: on every rank, if any could not look: a file that a disk does not show may still be there.
    """
    num_ranks = communicator.world_size
    mine = _View()

    def look() -> list[Any]:
        nonlocal mine
        mine = _view_of(folder)
        return [mine.identity, len(mine.content), mine.problems, platform.node(), str(folder)]

    identities, sizes, problems_by_rank, hosts, folders = zip(*_by_rank(folder, communicator, look))
    with_manifest = [rank for rank, identity in enumerate(identities) if identity is not None]
    if not with_manifest:
        return Survey(None, list(dict.fromkeys(chain.from_iterable(problems_by_rank))) or [manifests.ABSENT])
    if len({identities[rank] for rank in with_manifest}) > 1:
        return Survey(None, [f"ranks read different checkpoints: {', '.join(folders)}; let one rank choose for all"])
    # another rank's manifest takes the place of a damaged one
    if mine.problems:
        _logger.warning("%s is not used: %s", folder / MANIFEST, "; ".join(mine.problems))
    content, manifest = bytearray(mine.content), mine.manifest
    if len(with_manifest) < num_ranks:
        source = with_manifest[0]
        content = sent_to_all(mine.content, sizes[source], source, communicator)

    def look_for_files() -> str:
        nonlocal manifest
        # a rank with another version of this package may not understand it
        manifest = manifest or manifests.understood(folder, content)
        return _present(folder, manifest)

    present_by_rank = _by_rank(folder, communicator, look_for_files)
    assert manifest is not None, "ranks that have none were sent one"
    holders = _holders(folder, manifest, present_by_rank, communicator)
    problems = []
    if missing := [name for name, ranks in holders.items() if not ranks]:
        problems.append(f"{', '.join(missing)}: not whole on any rank; {_looked(list(zip(hosts, folders)))}")
    common_readers = holders.pop(COMMON)
    # files that nobody has are left to ranks that will say what is wrong with them
    return Survey(manifest, problems, shared_out(list(holders.values()), num_ranks), common_readers or range(num_ranks))


def _holders(
    folder: Path, manifest: Manifest, present_by_rank: Sequence[str], communicator: Communicator
) -> dict[str, list[int]]:
    """For each file the ranks that have it whole, by its size, out of those that see its name; collective."""
    me = communicator.rank
    files, present = _files(manifest), [int(bits, 16) for bits in present_by_rank]
    holders = {name: [rank for rank, bits in enumerate(present) if bits >> bit & 1] for bit, name in enumerate(files)}
    # all ranks that have the common file read it
    readers = [*shared_out([holders[name] for name in files[:-1]], len(present)), me]
    wanted = [name for name, reader in zip(files, readers) if reader == me and me in holders[name]]
    broken = _by_rank(folder, communicator, lambda: [name for name in wanted if not _identity(folder, name, manifest)])
    if doubtful := sorted(set(chain.from_iterable(broken))):
        to_check = [name for name in doubtful if me in holders[name]]
        whole = _by_rank(folder, communicator, lambda: [name for name in to_check if _identity(folder, name, manifest)])
        holders |= {name: [rank for rank, names in enumerate(whole) if name in names] for name in doubtful}
    return holders


@dataclass(frozen=True)
class _View:
    """What one rank sees of the manifest in its folder.

    Attributes:
        content, manifest, identity: the file's bytes, what they say, and their digest; empty, None and None if there is
        no manifest, or it cannot be understood.
        problems: what is wrong with the manifest.
    """

    content: bytes = b""
    manifest: Manifest | None = None
    identity: str | None = None
    problems: Sequence[str] = ()


def _view_of(folder: Path) -> _View:
    try:
        # not by is_file(), which in Python 3.14 is False for a file that cannot be accessed
        content = (folder / MANIFEST).read_bytes()
        return _View(content, manifests.understood(folder, content), hashlib.sha256(content).hexdigest())
    except (FileNotFoundError, NotADirectoryError):
        return _View()  # another rank may have it
    except CheckpointError as error:
        return _View(problems=error.problems)


def _present(folder: Path, manifest: Manifest) -> str:
    """The files whose names the folder has, by their places in ``_files``, in the form of ``as_set``."""
    present: set[str] = set()
    with suppress(FileNotFoundError, NotADirectoryError):
        present.update(os.listdir(folder))
    return as_set(bit for bit, name in enumerate(_files(manifest)) if name in present)


def _files(manifest: Manifest) -> list[str]:
    return [*map(rank_file, range(manifest.world_size)), COMMON]


def _identity(folder: Path, name: str, manifest: Manifest) -> str | None:
    """A file's identity, equal for all ranks of a host that see it; None if it is missing or of the wrong size."""
    try:
        found = (folder / name).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    is_whole = stat.S_ISREG(found.st_mode) and found.st_size == manifest.files.get(name, [-1])[0]
    # with the host, since hosts may number devices and files on their own disks alike
    return f"{platform.node()} {found.st_dev} {found.st_ino} {found.st_mtime_ns}" if is_whole else None


def _by_rank(folder: Path, communicator: Communicator, look: Callable[[], Found]) -> list[Found]:
    """What ``look`` gives on each rank; collective.

    Raises:
        CheckpointError: on every rank, if any could not look.
    """
    mine: Found | None = None
    failures: list[str] = []
    try:
        mine = look()
    except Exception as error:  # of any kind: the other ranks wait for what this one has found
        failures.append(described(communicator.rank, error))
    found, failed = zip(*communicator.gather_json([mine, failures]))
    if any(failed):
        raise CheckpointError(folder, list(chain.from_iterable(failed)))
    return list(found)


def shared_out(holders: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """The rank that reads each file: of those that have it, the one with the fewest so far, the lowest of these.

    A file that nobody has is left to a rank that will say what is wrong with it.
    """
    readers: list[int] = []
    num_read = [0] * num_ranks
    for number, ranks in enumerate(holders):
        readers.append(min(ranks or [number % num_ranks], key=lambda rank: (num_read[rank], rank)))
        num_read[readers[-1]] += 1
    return readers


def _looked(places: Sequence[tuple[str, str]]) -> str:
    """Which ranks looked where."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place, []).append(rank)
    return "; ".join(f"ranks {those} looked in {folder} on {host}" for (host, folder), those in ranks.items())
