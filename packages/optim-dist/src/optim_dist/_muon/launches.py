"""The elementwise parts of a Muon step on shards, in one launch each where optim-kernels can, else by ``plain_torch``.

Shards of one rule and dtypes go into one launch, whatever their groups' hyperparameters. The shards of a launch, and so
what it keeps on the device, stay the same from step to step. Shards are sorted again when one begins or ceases to take
part, or when a group's options or a tensor's kind (``KnownKinds``) have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from optim_dist._muon.plain_torch import apply_updates, momenta, scales, takes_part
from optim_dist._optimizers.shards import Item, StepContext
from optim_kernels.functional import MuonMomenta, MuonUpdates
from optim_kernels.multi_tensor import KnownKinds
from optim_kernels.muon_groups import rule_of
from optim_utils.param_groups import MatrixView

P = TypeVar("P")


@dataclass
class Launch(Generic[P]):
    """The shards of one launch, by their places in the batch.

    Args:
        groups: for each shard, the number of its group in this launch.
        first: for each group, the place of one of its shards.
        scales: for each shard, the factor on its learning rate.
    """

    plan: P
    places: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    def of(self, each: Sequence[Any]) -> list[Any]:
        """The entries for this launch's shards of a list with one entry per shard of the batch."""
        return [each[place] for place in self.places]

    def by_group(self, items: Sequence[Item], option: str) -> list[Any]:
        """The value of an option in each group of this launch."""
        return [items[place].group[option] for place in self.first]


class LaunchSorter(Generic[P]):
    """Which launch takes which shards of a batch.

    Args:
        make: makes what ``Launch.plan`` is.
        rule: names of the fields of ``reference.muon.MuonRule`` that all shards of a launch have in common.

    Attributes:
        launches: as of the last ``follow``.
        rest: places of the shards that are in no launch.
        reasons: keyed by index in the plan, why shards that take part are in no launch.
    """

    def __init__(self, make: Callable[[], P], *rule: str) -> None:
        self._make, self._rule = make, rule
        self._kept: dict[Hashable, P] = {}
        self._known = KnownKinds()
        self._seen: tuple[Any, ...] | None = None
        self.launches: list[Launch[P]] = []
        self.rest: list[int] = []
        self.reasons: dict[int, str] = {}

    def follow(
        self,
        items: Sequence[Item],
        lists: Sequence[Sequence[Tensor | None]],
        why_not: Callable[[int], str | None],
        scale_of: Callable[[int], float],
    ) -> None:
        """Sort the shards of ``items`` into launches, unless nothing has changed.

        Args:
            lists: the tensors that a launch works on, each list with one entry per shard; a shard with None in the
                first list does not take part.
            why_not: why a launch cannot take the shard at a place, or None.
        """
        groups = {id(item.group): item.group for item in items}
        seen = (
            [id(item.group) for item in items],
            [(group["impl"], rule_of(group), group["stochastic_rounding"]) for group in groups.values()],
            [[tensor is None for tensor in each] for each in lists],
            self._known.of([tensor for each in lists for tensor in each if tensor is not None]),
        )
        if seen == self._seen:
            return
        self._seen, self.rest, self.reasons = None, [], {}
        found: dict[Hashable, Launch[P]] = {}
        for place, (item, *tensors) in enumerate(zip(items, *lists, strict=True)):
            reason = None
            if tensors[0] is not None:
                reason = _why_plain_torch(item.group, item.shard.value) or why_not(place)
            if tensors[0] is None or reason is not None:
                self.rest.append(place)
                if reason is not None:
                    self.reasons[item.shard.index] = reason
                continue
            rule = rule_of(item.group)
            dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
            key = (*(getattr(rule, name) for name in self._rule), dtypes)
            if key not in found:
                found[key] = Launch(self._kept.setdefault(key, self._make()))
            _append(found[key], items, place, scale_of(place))
        self._kept = {key: launch.plan for key, launch in found.items()}
        self.launches, self._seen = list(found.values()), seen


def _append(launch: Launch[Any], items: Sequence[Item], place: int, scale: float) -> None:
    group = items[place].group
    number = next((i for i, first in enumerate(launch.first) if items[first].group is group), len(launch.first))
    if number == len(launch.first):
        launch.first.append(place)
    launch.places.append(place)
    launch.groups.append(number)
    launch.scales.append(scale)


def _why_plain_torch(group: Mapping[str, Any], value: Tensor) -> str | None:
    """Why the group's ``impl`` rules out a launch, or None."""
    if group["impl"] == "torch":
        return "impl='torch'"
    return f"it is on {value.device.type}" if group["impl"] == "auto" and not value.is_cuda else None


class Momenta:
    """The momentum of a batch's shards: ``plain_torch.momenta`` in launches that are kept."""

    def __init__(self) -> None:
        self.sorter = LaunchSorter(MuonMomenta, "nesterov", "maximize")

    def run(self, items: Sequence[Item], context: StepContext, us: Sequence[Tensor]) -> None:
        """Update every shard's momentum by its gradient, and write each shard's U, zeros for a matrix left alone."""
        grads = [item.shard.gradient_or_zeros if takes_part(item) else None for item in items]
        buffers = [item.state["momentum_buffer"] for item in items]

        def why_not(place: int) -> str | None:
            grad = grads[place]
            return None if grad is None else MuonMomenta.why_not(grad, buffers[place], us[place])

        self.sorter.follow(items, [grads, buffers, us], why_not, lambda _: 1.0)
        for launch in self.sorter.launches:
            rule = rule_of(items[launch.places[0]].group)
            launch.plan.step(
                launch.of(grads),
                launch.of(buffers),
                launch.of(us),
                momentum=launch.by_group(items, "momentum"),
                groups=launch.groups,
                nesterov=rule.nesterov,
                maximize=rule.maximize,
                clip_factor=context.factor,
                grad_scale=context.grad_scale,
            )
        rest = self.sorter.rest
        if rest:
            momenta([items[place] for place in rest], context, [us[place] for place in rest])


class Updates:
    """The update of a batch's shards: ``plain_torch.apply_updates`` in launches that are kept."""

    def __init__(self) -> None:
        self.sorter = LaunchSorter(MuonUpdates, "cautious")

    def run(self, items: Sequence[Item], views: Sequence[MatrixView], updates: Sequence[Tensor]) -> None:
        """Update every parameter's shard by the shard of its direction in ``updates``."""
        values = [item.shard.value if takes_part(item) else None for item in items]
        masters = [item.master for item in items]
        steps = [item.state["step"] if item.group["stochastic_rounding"] else None for item in items]

        def why_not(place: int) -> str | None:
            value = values[place]
            given = updates[place], masters[place], steps[place]
            return None if value is None else MuonUpdates.why_not(value, *given)

        lists = [values, updates, masters, steps]
        self.sorter.follow(items, lists, why_not, lambda place: scales(items[place], views[place])[0])
        for launch in self.sorter.launches:
            first = launch.places[0]
            given = [items[place] for place in launch.places]
            launch.plan.step(
                launch.of(values),
                launch.of(updates),
                lr=launch.by_group(items, "lr"),
                weight_decay=launch.by_group(items, "weight_decay"),
                groups=launch.groups,
                scales=launch.scales,
                cautious=rule_of(items[first].group).cautious,
                masters=None if masters[first] is None else launch.of(masters),
                steps=None if steps[first] is None else launch.of(steps),
                seed=[item.group["seed"] for item in given],
                indices=[item.shard.number for item in given],
                starts=[item.shard.start for item in given],
            )
        rest = self.sorter.rest
        if rest:
            apply_updates(
                [items[place] for place in rest], [views[place] for place in rest], [updates[place] for place in rest]
            )
