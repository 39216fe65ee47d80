"""Let this rank's fp32 masters follow what others write to their parameters between steps (``FollowedWrites``)."""

from __future__ import annotations

from typing import Any

from optim_dist._optimizers.kept_items import KeptItems
from optim_dist._optimizers.live import LiveOptimizer
from optim_dist._optimizers.shards import Shard
from optim_kernels.states import FollowedWrites, can_be_followed


class FollowedMasters:
    """The masters of one optimizer, over one plan."""

    def __init__(self) -> None:
        self._writes = FollowedWrites()

    def follow(self, optimizer: LiveOptimizer, kept: KeptItems | None = None) -> None:
        """Update the masters of parameters that others have written to since the last step.

        ``kept``: the buckets' items, which know the shards with masters, if all parameters are in buckets.
        """
        shards = _with_masters(optimizer, kept)
        if shards:
            masters = [optimizer.state[shard.parameter]["master"] for shard in shards]
            self._writes.follow([shard.parameter for shard in shards], [shard.value for shard in shards], masters)

    def followed(self, shard: Shard, state: dict[str, Any]) -> dict[str, Any]:
        """``state`` with the master that the next step would begin with, to be saved; nothing is changed.

        The master itself waits for the step: what stands in the parameter now, an average, say, may be taken back.
        """
        parameter = shard.parameter
        if "master" not in state or not can_be_followed(parameter) or not self._writes.written([parameter]):
            return state
        master, writes = state["master"].clone(), FollowedWrites()
        writes.note_written([parameter])
        writes.follow([parameter], [shard.value], [master])
        return {**state, "master": master}

    def note(self, optimizer: LiveOptimizer, kept: KeptItems | None = None) -> None:
        """Record that masters match their parameters: what is written to these from now on is followed."""
        self._writes.note([shard.parameter for shard in _with_masters(optimizer, kept)])


def _with_masters(optimizer: LiveOptimizer, kept: KeptItems | None) -> list[Shard]:
    """This rank's shards with an fp32 master, where writes to their parameters can be noticed."""
    if all(group.get("master_weights") != "fp32" for group in optimizer.param_groups):
        return []
    if kept is not None:
        return kept.with_masters
    found = (shard for shard in optimizer.shards() if "master" in optimizer.state.get(shard.parameter, {}))
    return [shard for shard in found if can_be_followed(shard.parameter)]
