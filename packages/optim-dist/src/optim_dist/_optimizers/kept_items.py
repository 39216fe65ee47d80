"""The items of buckets, kept from step to step: nearly every step has the same items as the one before.

Code that caches something for a list of items may rely on this rule: **the same list object holds the same items, over
the same tensors, at the same addresses.** A list is replaced by another as soon as one of these has changed:

    plan          ``rebuild_plan()`` drops all lists; an added group counts as a change of groups
    groups        the objects in ``param_groups``, not their contents, which routes read in every step
    multipliers   which parameters have which
    state         which parameters have one, its dicts, the tensors in these, and their memory and layout;
                  whether states have all keys that their options require
    gradients     the views of a bucket's reduced chunk

Every step checks all of these, by identity where that is enough, in a few passes without Python code for each
parameter, so that no code has to announce a change. Only old states are dropped before the next step, to free their
memory: ``load_state_dict`` and ``rebuild_plan()`` drop at once everything that was made of them.

Parameters in no bucket have new items in every step, for which nothing is kept (``StepContext.are_kept``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor

from optim_dist._optimizers.shards import Item, Shard
from optim_dist._reduction.storage import ParameterBucket
from optim_kernels.states import KnownStates, can_be_followed

Groups = Sequence[dict[str, Any]]
State = Mapping[Tensor, dict[str, Any]]


class KeptItems:
    """The items of one plan's buckets, made of groups, multipliers and states as they are at construction.

    Args:
        multipliers: an object that is replaced by another when multipliers change.
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
        self._complete_ids = frozenset(id(item.shard.parameter) for item in items)
        # after the items, as making them creates missing states
        self._keys, self._states = list(state), list(state.values())
        self._contents = KnownStates(item.state for item in items)
        self._first_gradients: dict[ParameterBucket, Tensor | None] = {}

    def are_for(self, groups: Groups, multipliers: object, state: State, complete_ids: Collection[int]) -> bool:
        """Whether items made now would be the same.

        Args:
            complete_ids: of parameters whose states have all keys that their options require.
        """
        return (
            multipliers is self._multipliers
            and are_same(groups, self._groups)
            and are_same(state, self._keys)
            and are_same(state.values(), self._states)
            and self._complete_ids.issubset(complete_ids)
            and self._contents.are_unchanged()
        )

    @cached_property
    def with_masters(self) -> list[Shard]:
        """The shards with an fp32 master, where writes to their parameters can be noticed."""
        found = [item.shard for own in self._items.values() for item in own if "master" in item.state]
        return [shard for shard in found if can_be_followed(shard.parameter)]

    def of(self, bucket: ParameterBucket) -> list[Item]:
        """A bucket's items: the same list as before if its gradients, which all change together, are the same."""
        items = self._items[bucket]
        if items and items[0].shard.gradient is not self._first_gradients.get(bucket):
            self._first_gradients[bucket] = items[0].shard.gradient
            items = self._items[bucket] = [*items]
        return items


class HeldStates:
    """An optimizer's state as it is at construction: its dicts, and the objects in these."""

    def __init__(self, state: State) -> None:
        self._keys, self._dicts = list(state), list(state.values())
        # live views, which show what the dicts hold later
        self._contents = [each.values() for each in self._dicts]
        self._held = list(chain.from_iterable(self._contents))

    def are_those_of(self, state: State) -> bool:
        """Whether they are the same objects; a tensor may have got other memory all the same."""
        is_same = are_same(state, self._keys) and are_same(state.values(), self._dicts)
        return is_same and are_same(list(chain.from_iterable(self._contents)), self._held)


def are_same(some: Collection[object], others: Sequence[object]) -> bool:
    """Whether they are the same objects in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))
