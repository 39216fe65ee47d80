"""Move the state of parameters in buckets to another plan: to other owners, cut elsewhere, bit for bit.

It does what saving a checkpoint and loading it under the other plan would, without files, and one state key at a time:
so only one kind of state exists twice. States of DTensors, and of one rank, stay where they are, with their parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from optim_dist._checkpoint.codes import Flat, decode_where_cut, in_files
from optim_dist._checkpoint.contents import (
    SCALARS,
    describe_state,
    flat_part,
    pieces_of,
    put_read_state,
    saved_parameters,
    state_of_part,
)
from optim_dist._checkpoint.manifest import SavedParameter
from optim_dist._checkpoint.reshard import exchange, streams
from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.live import LiveOptimizer
from optim_dist._optimizers.shards import Shard
from optim_dist.plan import Plan


@dataclass(frozen=True)
class MovedState:
    """The state that this rank owns under the new plan.

    Args:
        described: a description of each parameter's state, keyed by the parameter's name in the new plan.
        parts: the flat parts that this rank has received, keyed by name and state key.
    """

    described: dict[str, SavedParameter]
    parts: dict[str, dict[str, Tensor]]

    def put(self, optimizer: LiveOptimizer) -> None:
        """Give the state to ``optimizer``, which has the new plan by now."""
        found: list[tuple[Shard, SavedParameter, dict[str, Any]]] = []
        for shard in optimizer.shards():
            saved = self.described.get(shard.name)
            if saved is not None and (saved.state or saved.scalars):
                found.append((shard, saved, {}))
        # key by key: the parts of one may be views of the same memory, which is free once all have been copied
        for key in dict.fromkeys(key for _, saved, _ in found for key in saved.state):
            for shard, saved, state in found:
                if key in saved.state:
                    part = self.parts.get(shard.name, {}).pop(key, None)
                    state[key] = state_of_part(part, saved.state[key], shard)
        for shard, saved, state in found:
            put_read_state(optimizer, shard, state, saved)


def take_state(optimizer: LiveOptimizer, plan: Plan, found: Sequence[Entry]) -> MovedState:
    """Exchange the state of parameters in buckets that ``plan``, made for ``found``, still has; drop that of others.

    Collective over several ranks. State of DTensors, and of one rank, stays in ``optimizer`` if ``found`` has it.
    """
    communicator, former = optimizer.communicator, optimizer.plan
    numbers = {id(entry.parameter): number for number, entry in enumerate(found)}
    in_buckets = [communicator.world_size > 1 and not spec.sharding for spec in former.parameters]
    moving: dict[str, int] = {}
    specs = []
    for spec, entry, is_in_bucket in zip(former.parameters, optimizer.entries, in_buckets, strict=True):
        name, number = "", numbers.get(id(entry.parameter))
        if is_in_bucket and number is not None:
            # the new plan's, as the model may have renamed it, and given its former name to another
            name = plan.parameters[number].name
            moving[name] = number
        specs.append(replace(spec, name=name))
    pieces = [pieces_of(optimizer, index) for index in range(len(specs))]
    described = communicator.gather_json(describe_state(optimizer, specs, pieces))
    saved = [each for each in saved_parameters(specs, pieces, described) if each.name in moving]
    mine = {
        specs[shard.index].name: {
            key: flat_part(value, shard)
            for key, value, *_ in in_files(optimizer.kept_state(shard))
            if key not in SCALARS
        }
        for shard in optimizer.shards()
        if specs[shard.index].name in moving
    }
    for entry, is_in_bucket in zip(optimizer.entries, in_buckets):
        if is_in_bucket or id(entry.parameter) not in numbers:
            optimizer.state.pop(entry.parameter, None)
    # 8-bit codes become numbers where the new plan cuts through their blocks
    saved = decode_where_cut(saved, plan.parameters, {communicator.rank: mine})
    known = {each.name: each for each in saved}

    def read(_: int, name: str, key: str) -> Flat:
        return mine[name].pop(key)

    moved = MovedState(known, {})
    for stream in streams(
        saved, range(communicator.world_size), lambda name: plan.ranges(moving[name]), with_values=False
    ):
        for name, key, _, part in exchange([stream], read, communicator):
            moved.parts.setdefault(name, {})[key] = part
    return moved
