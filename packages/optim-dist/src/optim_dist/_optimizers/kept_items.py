"""The items of buckets from step to step: a step is nearly always made of what the one before was made of.

The rule, for whoever keeps something of a list of items: **the same list object holds the same items, over the same
tensors, at the same places.** A list is dropped, and another made, as soon as one of these has changed:

    plan          by ``rebuild_plan()``, which drops all lists; who adds a group has other groups
    groups        the objects in ``param_groups``; not what is in them, which is the routes' to read in every step
    multipliers   which parameters have which
    state         of which parameters, the dicts, the tensors in them, and where and as what these lie in memory;
                  whether they have all that their options want
    gradients     the views of a bucket's reduced chunk

All of that is looked at in every step, by identity where that is enough, in a few passes without Python for each
parameter. Nobody has to say that he has changed something. Only of former states one does not wait for the next step to
let go: ``load_state_dict`` and ``rebuild_plan()`` drop at once all that was made of them, for their memory.

Parameters in no bucket have new items in every step, of which nothing is kept (``StepContext.are_kept``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from operator import is_
from typing import Any

from torch import Tensor

from optim_dist._optimizers.shards import Item, Shard
from optim_dist._reduction.storage import ParameterBucket
from optim_kernels.adamw_groups import KnownStates, can_be_followed

Groups = Sequence[dict[str, Any]]
State = Mapping[Tensor, dict[str, Any]]


class KeptItems:
    """The items of one plan's buckets, made of groups, multipliers and states as they were then.

    Args:
        multipliers: an object that is another once some have changed.
    """

    def __init__(
        self,
        shards: Mapping[ParameterBucket, Sequence[Shard]],
        groups: Groups,
        multipliers: object,
        state: State,
        item_of: Callable[[Shard], Item],
    ) -> None:
        self._items = {bucket: list(map(item_of, own)) for bucket, own in shards.items()}
        self._groups, self._multipliers = list(groups), multipliers
        items = [item for own in self._items.values() for item in own]
        self._completed = frozenset(id(item.shard.parameter) for item in items)
        # behind the items, which make states that there were not
        self._keys, self._states = list(state), list(state.values())
        self._contents = KnownStates(item.state for item in items)
        self._first_gradients: dict[ParameterBucket, Tensor | None] = {}

    def are_for(self, groups: Groups, multipliers: object, state: State, completed: Collection[int]) -> bool:
        """Whether items made now would be the same.

        Args:
            completed: by id the parameters whose states have all that their options want.
        """
        return (
            multipliers is self._multipliers
            and are_same(groups, self._groups)
            and are_same(state, self._keys)
            and are_same(state.values(), self._states)
            and self._completed.issubset(completed)
            and self._contents.are_unchanged()
        )

    @cached_property
    def with_masters(self) -> list[Shard]:
        """The shards that are updated by way of an fp32 master, and may have been written to since."""
        found = [item.shard for own in self._items.values() for item in own if "master" in item.state]
        return [shard for shard in found if can_be_followed(shard.parameter)]

    def of(self, bucket: ParameterBucket) -> list[Item]:
        """The items of a bucket: the same list as before if its gradients are the same, which come and go together."""
        items = self._items[bucket]
        if items and items[0].shard.gradient is not self._first_gradients.get(bucket):
            self._first_gradients[bucket] = items[0].shard.gradient
            items = self._items[bucket] = [*items]
        return items


def are_same(some: Collection[object], others: Sequence[object]) -> bool:
    """Whether they are the same objects in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))
