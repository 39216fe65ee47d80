"""Sites: ranks that see the same folder. A disk that all ranks share makes one site, hosts' own disks one each.

Every rank puts its file, still empty, into the hidden folder of a save: ranks that find it there are of the same site.
The lowest rank of a site, its head, does what is to be done once in a folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from optim_dist._checkpoint.manifest import COMMON, rank_file
from optim_dist._checkpoint.sending import Copy


def seen_in(folder: Path, num_ranks: int) -> list[int]:
    """The ranks that have put their file into ``folder``, ascending.

    Call it once all ranks have done so: a network file system may repeat an earlier listing.
    """
    names = {file.name for file in folder.iterdir()}
    return [rank for rank in range(num_ranks) if rank_file(rank) in names]


def as_set(numbers: Iterable[int]) -> str:
    """A set of numbers as the bits of one number, in hexadecimal: short, for each rank sends a set of ranks."""
    return hex(sum(1 << number for number in numbers))


def in_sites(seen: Sequence[str]) -> list[list[int]]:
    """The ranks of each site, the site of rank 0 first, from the set (``as_set``) of ranks that each rank sees.

    Raises:
        ValueError: if a rank sees another rank that does not see the same set.
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
    """Which file goes from which rank to which: the common file to every site, each rank's to the sites after its own.

    Raises:
        ValueError: if there are fewer sites than ``num_copies``.
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
