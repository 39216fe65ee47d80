"""Process groups that optimizers make for themselves: under one name on all ranks, and used again.

torch has no end for one of several groups up to 2.13: later ones would take its name, and what it has left in the
store. So a closed optimizer gives its group back, to the next of the same ranks that wants one alike.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

# What is alike: ranks, backend and timeout.
Kind = tuple[tuple[int, ...], str, timedelta]

# The names of groups that were given back, as torch knows them.
_spare: dict[Kind, set[str]] = {}

_NUMBER = "number in the name of a process group"
_SPARE = "names of process groups that were given back"
_OTHERWISE = (
    "does not make a process group for its optimizer as this one does; give every rank the same timeout= and "
    "accumulation_steps=, and the first no_sync() in the same step"
)


class Connected(Protocol):
    """Ranks that can tell each other something, as those of a communicator."""

    ranks: list[int]

    def gather_json(self, value: Any) -> list[Any]:
        """What every rank says. Collective."""


def device_types(group: dist.ProcessGroup | None) -> list[str]:
    """The types of devices for which the group has collectives; none where there will be none, as of one rank."""
    if not dist.is_initialized() or dist.get_world_size(group) < 2:
        return []
    found = group or dist.group.WORLD
    assert found is not None, "torch.distributed is initialized"
    # not by what was asked for, of which split groups may have less
    return sorted({device.type for device in found._device_types})


def own_group(
    given: dist.ProcessGroup | None, met: Connected, device: torch.device, timeout: float | None
) -> tuple[dist.ProcessGroup, Kind]:
    """A group of the same ranks and backend, in which nobody else's collectives are, and what ``give_back`` wants.

    Collective.

    Args:
        met: connects these ranks.
        timeout: seconds that a collective may take; those of ``given`` if None.
    """
    group = given or dist.group.WORLD
    assert group is not None, "torch.distributed is initialized"
    ranks, backend = dist.get_process_group_ranks(group), dist.get_backend_config(group)
    if ranks != sorted(ranks):
        raise ValueError(f"the ranks of process_group must ascend for a group like it to be made, got {ranks}")
    limit = group._get_backend(device).options._timeout if timeout is None else timedelta(seconds=timeout)
    kind: Kind = (tuple(ranks), backend, limit)
    # destroy_process_group() ends them
    known: dict[str, dist.ProcessGroup] = {name: each for each, name in dist.distributed_c10d._world.pg_names.items()}
    spare = _spare.setdefault(kind, set())
    spare.intersection_update(known)
    common = set(spare).intersection(*gathered(met, _SPARE, sorted(spare), _OTHERWISE))
    if common:
        name = min(common)
        spare.remove(name)
        return known[name], kind
    return new_group(ranks, [met], limit, backend), kind


def give_back(kind: Kind, group: dist.ProcessGroup) -> None:
    """Nothing is under way in a group of ``own_group``, and nothing comes any more from who had it."""
    name = dist.distributed_c10d._world.pg_names.get(group)
    if name is not None:
        _spare.setdefault(kind, set()).add(name)


def new_group(
    ranks: Sequence[int],
    met: Sequence[Connected],
    timeout: timedelta | None = None,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """A process group that ``ranks`` make without the others; ``met`` connect them. Collective among them alone."""
    with _one_name(met):
        try:
            return dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
        except RuntimeError as error:
            raise RuntimeError(
                f"ranks {list(ranks)} did not meet to make a process group of their own: one of them has ended or "
                "raised an error, which says why, or was given another timeout= or accumulation_steps= "
                f"(torch: {error})"
            ) from error


@contextmanager
def _one_name(met: Sequence[Connected]) -> Iterator[None]:
    """Let the next group have one name on all ranks: torch puts a number into it that each rank counts by itself, and
    ranks with different names wait for each other.

    Up to torch 2.13 that is how many groups a rank is in: those in fewer make groups of themselves, which wait for
    nobody, until they are in as many. Later it is how many a rank took part in making, and every other group's name has
    that number, too: torch is lent one that nothing else counts up to, so that a rank that takes no part goes on
    counting like the others.
    """
    world = dist.distributed_c10d._world
    if torch.__version__ < "2.14":  # compared as versions
        num_groups = len(world.pg_names)
        for _ in range(_largest(met, num_groups) - num_groups):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        yield
        return
    count, world.group_count = world.group_count, _largest(met, secrets.randbits(62))
    try:
        yield
    finally:
        world.group_count = count


def _largest(met: Sequence[Connected], number: int) -> int:
    """Of the numbers of all ranks that make a group."""
    for communicator in met:
        number = max(gathered(communicator, _NUMBER, number, _OTHERWISE))
    return number


def gathered(communicator: Connected, what: str, mine: Any, otherwise: str) -> list[Any]:
    """What every rank says of ``what``; ``otherwise`` is what is said of one that says something else."""
    every = communicator.gather_json({what: mine})
    for rank, found in zip(communicator.ranks, every):
        if not isinstance(found, dict) or what not in found:
            raise RuntimeError(f"rank {rank} {otherwise}")
    return [found[what] for found in every]
