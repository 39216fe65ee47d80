"""Process groups that optimizers make for themselves: under one name on all ranks, and reused.

Up to 2.13 torch cannot end one of several groups: a later group would get its name, and what it has left in the store.
So an optimizer that is closed, or gone with no reduction unfinished, gives its group back. The next one that needs a
group of the same kind takes it, once it was given back on all ranks.
"""

from __future__ import annotations

import hashlib
import secrets
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

# Groups of the same kind can replace each other: ranks, backend and timeout.
Kind = tuple[tuple[int, ...], str, timedelta]

# The names of groups that were given back, as torch knows them; those of another default group may get the same names.
_spare: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Kind, set[str]]] = weakref.WeakKeyDictionary()

_NUMBER = "number in the name of a process group"
_SPARE = "names of process groups that were given back"
_OTHERWISE = (
    "does not make a process group for its optimizer as this one does; give every rank the same timeout= and "
    "accumulation_steps=, and the first no_sync() in the same step"
)


class Connected(Protocol):
    """Ranks that can exchange JSON values, as a communicator's can."""

    ranks: list[int]

    def gather_json(self, value: object) -> list[Any]:
        """``value`` of every rank, in rank order. Collective."""


def device_types(group: dist.ProcessGroup | None) -> list[str]:
    """The types of devices for which the group has collectives; empty if none will run, as with one rank."""
    if not dist.is_initialized() or dist.get_world_size(group) < 2:
        return []
    found = group or dist.group.WORLD
    assert found is not None, "torch.distributed is initialized"
    # not from the backends that were asked for: split groups may have fewer
    return sorted({device.type for device in found._device_types})


def own_group(
    given: dist.ProcessGroup | None, met: Connected, device: torch.device, timeout: float | None
) -> tuple[dist.ProcessGroup, Kind]:
    """A group of the same ranks and backend for the caller's collectives alone, and its kind, for ``give_back``.

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
    known: dict[str, dist.ProcessGroup] = {name: each for each, name in dist.distributed_c10d._world.pg_names.items()}
    spare = _spare_of(kind)
    spare.intersection_update(known)  # torch may have ended some
    common = set(spare).intersection(*gathered(met, _SPARE, sorted(spare), _OTHERWISE))
    if common:
        name = min(common)
        spare.remove(name)
        return known[name], kind
    return new_group(ranks, [met], limit, backend), kind


def give_back(kind: Kind, group: dist.ProcessGroup) -> None:
    """Make a group of ``own_group`` a spare one: nothing is in flight in it, and its former user launches no more."""
    name = dist.distributed_c10d._world.pg_names.get(group)
    if name is not None:
        _spare_of(kind).add(name)


def _spare_of(kind: Kind) -> set[str]:
    """The names of this kind's spare groups beside the present default group."""
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialized"
    return _spare.setdefault(world, {}).setdefault(kind, set())


def new_group(
    ranks: Sequence[int],
    met: Sequence[Connected],
    timeout: timedelta | None = None,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """A new process group of ``ranks``, which are connected by ``met``. Collective among these ranks alone."""
    with _one_name(ranks, met), _made_by(ranks):
        try:
            return dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
        except RuntimeError as error:
            raise RuntimeError(
                f"ranks {list(ranks)} did not meet to make a process group of their own: one of them has ended or "
                "raised an error, which says why, or was given another timeout= or accumulation_steps= "
                f"(torch: {error})"
            ) from error


@contextmanager
def _one_name(ranks: Sequence[int], met: Sequence[Connected]) -> Iterator[None]:
    """Let the group that is made inside have the same name on all of its ranks.

    torch puts a number into the name that each rank counts by itself; ranks with different names wait for each other.
    Up to torch 2.13 it is the number of groups that the rank is in: ranks in fewer groups make groups of one rank,
    which wait for nobody, until they are in as many, and in so many that no other group has the name, as one may that
    was made before somebody ended a group. Later it is the number of groups that the rank took part in
    making, and it is in every other group's name, too: so the count is replaced by a random one that no rank will
    reach, and then restored, so that it still equals that of ranks that took no part.
    """
    world = dist.distributed_c10d._world
    if torch.__version__ < "2.14":  # compared as versions
        number = _largest(met, len(world.pg_names))
        while (free := _largest(met, _first_free(ranks, number))) > number:
            number = free
        for _ in range(number - len(world.pg_names)):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        yield
        return
    count, world.group_count = world.group_count, _largest(met, secrets.randbits(62))
    try:
        yield
    finally:
        world.group_count = count


def _first_free(ranks: Sequence[int], number: int) -> int:
    """The first number from ``number`` on with which, up to torch 2.13, no group has the name of one of ``ranks``."""
    names = set(dist.distributed_c10d._world.pg_names.values())
    members = "_".join(map(str, ranks))
    while hashlib.sha1(f"{members}_{number}".encode(), usedforsecurity=False).hexdigest() in names:
        number += 1
    return number


@contextmanager
def _made_by(ranks: Sequence[int]) -> Iterator[None]:
    """Let the group that is made inside be made by its own ranks alone.

    In a world that is bound to devices (``init_process_group(device_id=)``) torch splits the world's communicator, in
    which all ranks of the world have to take part: those that do not would do so with the next group that they make,
    and be in a communicator of other ranks than they asked for. Meanwhile the world is unbound, and the group connects
    with its first collective, as in a world that never was bound.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialized"
    device = world.bound_device_id
    if device is None or len(ranks) == world.size():
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def _largest(met: Sequence[Connected], number: int) -> int:
    """The largest ``number`` of all ranks that make a group."""
    for communicator in met:
        number = max(gathered(communicator, _NUMBER, number, _OTHERWISE))
    return number


def gathered(communicator: Connected, what: str, mine: object, otherwise: str) -> list[Any]:
    """``mine`` of every rank; a rank that sends no ``what`` is an error, which says ``otherwise`` of that rank."""
    every = communicator.gather_json({what: mine})
    for rank, found in zip(communicator.ranks, every):
        if not isinstance(found, dict) or what not in found:
            raise RuntimeError(f"rank {rank} {otherwise}")
    return [found[what] for found in every]
