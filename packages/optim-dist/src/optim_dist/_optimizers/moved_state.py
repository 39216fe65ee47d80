"""State that goes along when parameters in buckets get another plan: to other owners, cut elsewhere, bit for bit.

It is what a checkpoint does from one plan to another, without files, and one state key at a time: so only one kind of
state is there twice. States of DTensors, and of one rank, lie where their parameters do, and stay there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optim_dist._checkpoint.codes import Flat, in_files, joined, with_numbers
from optim_dist._checkpoint.contents import (
    SCALARS,
    describe_state,
    flat_part,
    pieces_of,
    saved_parameters,
    state_of_part,
)
from optim_dist._checkpoint.manifest import SavedParameter
from optim_dist._checkpoint.reshard import exchange, streams
from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.live import LiveOptimizer
from optim_dist.plan import Plan


@dataclass(frozen=True)
class MovedState:
    """What this rank is to own under the new plan.

    Args:
        described: by name what is known of the state of each parameter.
        parts: by name and key the flat parts that have come here.
    """

    described: dict[str, SavedParameter]
    parts: dict[str, dict[str, Tensor]]

    def put(self, optimizer: LiveOptimizer) -> None:
        """Give it to ``optimizer``, which has the new plan by now."""
        for shard in optimizer.shards():
            known = self.described.get(shard.name)
            if known is None or not (known.state or known.scalars):
                continue
            mine = self.parts.get(shard.name, {})
            state: dict[str, Any] = {}
            for key, description in known.state.items():
                state[key] = state_of_part(mine.pop(key, None), description, shard)
            joined(state, known)
            for key, value in known.scalars.items():
                state[key] = torch.full((), value, dtype=torch.float32, device=shard.value.device)
            optimizer.put_state(shard, state)


def take_state(optimizer: LiveOptimizer, plan: Plan, found: Sequence[Entry]) -> MovedState:
    """Exchange the state of those in buckets that ``plan``, for ``found``, has too; what it has not is dropped.

    Collective over several ranks. ``optimizer`` keeps the state of DTensors, or of one rank, of ``found`` alone.
    """
    communicator, former = optimizer.communicator, optimizer.plan
    numbers = {id(entry.parameter): number for number, entry in enumerate(found)}
    in_buckets = [communicator.world_size > 1 and not spec.sharding for spec in former.parameters]
    moving = {
        entry.name: numbers[id(entry.parameter)]
        for entry, is_in_bucket in zip(optimizer.entries, in_buckets)
        if is_in_bucket and id(entry.parameter) in numbers
    }
    specs = list(former.parameters)
    described = communicator.gather_json(describe_state(optimizer, specs))
    pieces = [pieces_of(optimizer, index) for index in range(len(specs))]
    saved = [each for each in saved_parameters(specs, pieces, described) if each.name in moving]
    mine = {
        shard.name: {
            key: flat_part(value, shard)
            for key, value, *_ in in_files(optimizer.kept_state(shard))
            if key not in SCALARS
        }
        for shard in optimizer.shards()
        if shard.name in moving
    }
    for entry, is_in_bucket in zip(optimizer.entries, in_buckets):
        if is_in_bucket or id(entry.parameter) not in numbers:
            optimizer.state.pop(entry.parameter, None)
    # of 8-bit states, where the new plan cuts through their blocks
    saved = with_numbers(saved, plan.parameters, {communicator.rank: mine})
    known = {each.name: each for each in saved}

    def read(_: int, name: str, key: str) -> Flat:
        return mine[name].pop(key)

    moved = MovedState(known, {})
    for stream in streams(
        saved, range(communicator.world_size), lambda name: plan.ranges(moving[name]), with_values=False
    ):
        place = communicator.rank, communicator.ranks, communicator.group, communicator.device
        for name, key, _, part in exchange([stream], read, *place):
            moved.parts.setdefault(name, {})[key] = part
    return moved
