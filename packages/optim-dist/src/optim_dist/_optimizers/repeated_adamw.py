"""AdamW's update of items that repeat from step to step: a step reads only hyperparameters, once per group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from optim_dist._optimizers.shards import Item, StepContext
from optim_kernels.adamw_groups import AdamWStep


class RepeatedAdamW:
    """The update of these items by kernels, as long as their list is the same object (``kept_items``).

    All items have gradients, and the kernels accept all of them.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        groups = {id(item.group): item.group for item in items}
        numbers = {key: number for number, key in enumerate(groups)}
        self._items, self._groups = items, list(groups.values())
        self._options = list(map(UpdateOptions.of, self._groups))
        gradients = [item.shard.grad for item in items]
        self._step = AdamWStep(
            self._groups,
            [item.shard.value for item in items],
            [item.state for item in items],
            gradients,
            members=[numbers[id(item.group)] for item in items],
            places=[item.shard.number for item in items],
            starts=[item.shard.start for item in items],
        )
        self._gradients = self._step.look_at(gradients)

    def is_for(self, items: Sequence[Item]) -> bool:
        """Whether ``items`` is the list this was made for, and its groups' ``UpdateOptions`` have not changed."""
        return items is self._items and list(map(UpdateOptions.of, self._groups)) == self._options

    def run(self, context: StepContext) -> None:
        """One step, with the hyperparameters that the groups have now."""
        self._step.run(
            self._groups,
            self._gradients,
            grad_scale=context.grad_scale,
            found_inf=context.found_inf,
            clip_factor=context.factor,
        )


class UpdateOptions(NamedTuple):
    """The options of a group that a plan is made for: items in which they differ take calls of their own."""

    amsgrad: bool
    stochastic_rounding: bool
    seed: int

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> UpdateOptions:
        at_random = bool(group.get("stochastic_rounding"))
        return cls(bool(group.get("amsgrad")), at_random, int(group.get("seed", 0)) if at_random else 0)
