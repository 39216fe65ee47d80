"""Ranks that see the same folder are a site: a disk that all share is one, disks of single hosts are as many.

    save   every rank puts its file into the hidden folder, still empty: whoever finds it there is of the same site. The
           lowest rank of a site, its head, does there what is done once in a folder
    load   ranks say which files they have, whole by their size, and each is read by one that has it

A checkpoint does not say where its files are: they may be moved, and copied to where they are missing.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from optim_dist._checkpoint import manifest as manifests
from optim_dist._checkpoint.faults import described
from optim_dist._checkpoint.manifest import COMMON, MANIFEST, CheckpointError, Manifest, rank_file
from optim_dist._checkpoint.sending import Copy, sent_to_all
from optim_dist._reduction.collectives import Communicator


def seen_in(folder: Path, num_ranks: int) -> list[int]:
    """The ranks that have put their file into ``folder``, ascending.

    To be called once all have: a network's file system may show what it has listed before.
    """
    names = {file.name for file in folder.iterdir()}
    return [rank for rank in range(num_ranks) if rank_file(rank) in names]


def as_set(numbers: Iterable[int]) -> str:
    """Numbers as the bits of one, in hexadecimal: what each rank says of each other should be short."""
    return hex(sum(1 << number for number in numbers))


def in_sites(seen: Sequence[str]) -> list[list[int]]:
    """Ranks by site, the one of rank 0 in front, from the set of ranks that each rank sees.

    Raises:
        ValueError: if a rank sees another that does not see what it sees.
    """
    sites: dict[str, list[int]] = {}
    for rank, its in enumerate(seen):
        sites.setdefault(its, []).append(rank)
    for its, members in sites.items():
        if its != as_set(members):
            raise ValueError(
                f"ranks {members} see files of other ranks that do not see all of theirs; give ranks either one folder "
                "or folders of their own, on disks that show everybody the same"
            )
    return list(sites.values())


def copies_of(sites: Sequence[Sequence[int]], num_copies: int) -> list[Copy]:
    """Which file goes from which rank to which: the first one's to every site, each rank's to the sites behind its own.

    Raises:
        ValueError: if there are not as many sites.
    """
    if num_copies > len(sites):
        raise ValueError(
            f"copies={num_copies} takes as many folders that ranks do not share, on hosts of their own; there "
            f"{'is 1' if len(sites) == 1 else f'are {len(sites)}'}, of ranks {', of ranks '.join(map(str, sites))}"
        )
    found = [Copy(COMMON, 0, others[0]) for others in sites[1:]]
    for distance in range(1, num_copies):
        for place, members in enumerate(sites):
            others = sites[(place + distance) % len(sites)]
            found += [Copy(rank_file(rank), rank, others[number % len(others)]) for number, rank in enumerate(members)]
    return found


@dataclass(frozen=True)
class Survey:
    """What ranks have of a checkpoint together, the same on all.

    Attributes:
        manifest: None if there is none, or ranks have different ones.
        problems: what it lacks.
        readers: of every saved rank's file, which rank reads it.
        common_from: which rank sends the common file to all; None where each reads it, if there is one.
    """

    manifest: Manifest | None
    problems: list[str]
    readers: Sequence[int] = ()
    common_from: int | None = None

    def common_file(self, folder: Path, communicator: Communicator) -> io.BytesIO | None:
        """The common file as another rank has sent it, if any rank lacks it; collective.

        Raises:
            OSError: on the rank that was to read it, once the others have what they wait for, with a wrong digest.
        """
        if self.manifest is None or self.common_from is None:
            return None
        content, failure = b"", None
        if communicator.rank == self.common_from:
            try:
                content = (folder / COMMON).read_bytes()
            except OSError as error:
                failure = error
        sent = sent_to_all(content, self.manifest.files[COMMON][0], self.common_from, communicator)
        if failure is not None:
            raise failure
        return io.BytesIO(sent)


def survey(folder: Path, communicator: Communicator) -> Survey:
    """Look for a checkpoint in every rank's ``folder``; collective. Ranks without the manifest get it from another.

    Raises:
        CheckpointError: on every rank, if any could not look: what a disk does not show may be there all the same.
    """
    manifest: Manifest | None = None
    identity: str | None = None
    content, held = b"", ""
    problems: list[str] = []
    failures: list[str] = []
    try:
        # not by is_file(), which is False in Python 3.14 for what cannot be looked at
        content = (folder / MANIFEST).read_bytes()
        manifest = manifests.understood(folder, content)
        identity = hashlib.sha256(content).hexdigest()
        held = as_set(_whole_files(folder, manifest))
    except (FileNotFoundError, NotADirectoryError):
        pass  # what is not here may be somewhere else
    except CheckpointError as error:
        problems += error.problems
    except Exception as error:  # of any kind: the other ranks wait for what this one has found
        failures.append(described(communicator.rank, error))
    mine = [identity, len(content), held, problems, failures, platform.node(), str(folder)]
    identities, sizes, holdings, found, failed, hosts, folders = zip(*communicator.gather_json(mine))
    if any(failed):
        raise CheckpointError(folder, [failure for rank in failed for failure in rank])
    having = [rank for rank, each in enumerate(identities) if each is not None]
    problems = list(dict.fromkeys(problem for rank in found for problem in rank))
    if not having and not problems:
        problems = [manifests.ABSENT]
    if len({identities[rank] for rank in having}) > 1:
        problems.append(f"ranks read different checkpoints: {', '.join(folders)}; let one rank choose for all")
    if problems:
        return Survey(None, problems)
    if len(having) < communicator.world_size:
        sent = sent_to_all(content, sizes[having[0]], having[0], communicator)
        manifest = manifest or manifests.understood(folder, sent)
    assert manifest is not None, "ranks that have none were sent one"
    return _shared_out(manifest, [int(each or "0", 16) for each in holdings], list(zip(hosts, folders)))


def _whole_files(folder: Path, manifest: Manifest) -> list[int]:
    """Which files are here and of the right size; the common file's number is behind those of all ranks'."""
    with os.scandir(folder) as entries:
        sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    wanted = [manifest.files.get(name, [None])[0] for name in _names(manifest)]
    return [number for number, name in enumerate(_names(manifest)) if sizes.get(name, -1) == wanted[number]]


def _names(manifest: Manifest) -> list[str]:
    return [*map(rank_file, range(manifest.world_size)), COMMON]


def _shared_out(manifest: Manifest, holdings: Sequence[int], places: Sequence[tuple[str, str]]) -> Survey:
    """Who reads what: of the ranks that have a file the one with the fewest so far, the lowest of those.

    A file that nobody has is left to one that will say what is wrong with it.
    """
    world_size = len(holdings)
    having = [
        [rank for rank in range(world_size) if holdings[rank] >> number & 1]
        for number in range(manifest.world_size + 1)
    ]
    readers: list[int] = []
    num_read = [0] * world_size
    for number, ranks in enumerate(having[:-1]):
        readers.append(min(ranks or [number % world_size], key=lambda rank: (num_read[rank], rank)))
        num_read[readers[-1]] += 1
    missing = [name for name, ranks in zip(_names(manifest), having) if not ranks]
    problems = [f"{', '.join(missing)}: not whole on any rank; {_looked(places)}"] if missing else []
    is_alike = len(having[-1]) in (0, world_size)
    return Survey(manifest, problems, readers, None if is_alike else having[-1][0])


def _looked(places: Sequence[tuple[str, str]]) -> str:
    """Which ranks looked where."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place, []).append(rank)
    return "; ".join(f"ranks {its} looked in {folder} on {host}" for (host, folder), its in ranks.items())
