"""What an update sees: the part of each parameter that this rank owns, and the step's scalars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.gradient_dtype import grad_dtype
from optim_dist._reduction.storage import ParameterBucket
from optim_dist.plan import ParameterSpec
from optim_kernels.muon_groups import MuonPlanner
from optim_kernels.states import master_of
from optim_utils.param_groups import MatrixView


@dataclass(eq=False)
class Shard:
    """The elements ``[start, stop)`` of ``parameter``, in memory order, that this rank updates.

    ``value`` and ``gradient`` have the parameter's shape for matrices and on one rank, the local part's shape for
    DTensors, else one dimension. State has the shape of ``value``.
    """

    parameter: Tensor
    name: str
    index: int  # in the plan
    number: int  # among all parameters of the groups; it chooses the bits of stochastic rounding
    group: int  # in param_groups
    start: int
    stop: int
    value: Tensor
    gradient: Tensor | None = None
    view: MatrixView | None = None  # the matrices inside, if not the last two dimensions
    is_consecutive: bool = True  # False for a DTensor's part that is no interval of elements; start is 0 then

    @property
    def like(self) -> Tensor:
        """The tensor that new state is made like: a DTensor's state is a DTensor of the same layout."""
        return self.parameter if isinstance(self.parameter, DTensor) else self.value

    @property
    def grad(self) -> Tensor:
        assert self.gradient is not None, "only shards with a gradient are updated"
        return self.gradient

    @property
    def gradient_or_zeros(self) -> Tensor:
        """The gradient, or zeros if it is missing: for groups with ``missing_grad="zero"``."""
        if self.gradient is None:
            return torch.zeros_like(self.value, dtype=grad_dtype(self.parameter))
        return self.gradient


def takes_zeros(shard: Shard, group: Mapping[str, Any]) -> bool:
    """Whether the group takes a missing gradient of this shard for zeros.

    It does not for a frozen parameter: zeros would still move it by its momentum, and decay it.
    """
    return group.get("missing_grad") == "zero" and shard.parameter.requires_grad


class Item(NamedTuple):
    """A shard with its group's hyperparameters and its state."""

    shard: Shard
    group: dict[str, Any]
    state: dict[str, Any]

    @property
    def master(self) -> Tensor | None:
        """The state's master weights of either kind, if it has any."""
        return master_of(self.state)


@dataclass(frozen=True)
class StepContext:
    """Scalars of one step, all on the device.

    Args:
        factor: what gradients are multiplied by: 1/W, the clip factor, the caller's. None stands for 1.
        grad_scale: what gradients are divided by (``GradScaler``).
        found_inf: non-zero: leave everything untouched.
        are_kept: whether lists of items follow the rule of ``kept_items``. If not, a list is for this step alone and
            must not be kept: it would keep gradients alive that everybody else has dropped.
        counts: for each parameter of the plan, on how many ranks it has a gradient. None: all shards have one.
        present: for each, whether this rank itself has one.
        new_planner: makes a planner that steps Muon's matrices, with the same options in every step.
    """

    factor: Tensor | None = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    are_kept: bool = False
    counts: Tensor | None = None
    present: Sequence[float] = ()
    new_planner: Callable[[], MuonPlanner] = MuonPlanner

    @property
    def may_repeat(self) -> bool:
        """Whether consecutive steps of these items may be alike: lists are kept, and no gradient is missing."""
        return self.are_kept and self.counts is None

    def count(self, shard: Shard) -> Tensor | None:
        """The counter of ranks that have a gradient for the shard; None if this rank, or every shard, has one."""
        return None if self.counts is None or self.present[shard.index] else self.counts[shard.index]


class Route(Protocol):
    """How one update works: what it reads of a group, what state it needs, and how it is applied."""

    def check_group(self, group: dict[str, Any], *, stepped: bool) -> None:
        """Refuse options and parameters that make no sense.

        Args:
            stepped: whether schedules may have changed the numbers since the optimizer was built; a learning rate may
                then be below 0, as ``LinearLR`` misses 0 by a rounding error.
        """

    def views(self, group: dict[str, Any]) -> Sequence[MatrixView | None]:
        """How each parameter is read as matrices; None where that does not matter."""

    def block(self, parameter: Tensor, group: Mapping[str, Any]) -> int:
        """How many elements of a parameter share a scale in its state, 1 without scales; cuts are between blocks."""

    def complete_state(self, shard: Shard, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Create what ``state`` lacks for the group's options."""

    def check_state(self, shard: Shard, group: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Refuse, by the parameter's name, a complete ``state`` that others have changed to what cannot be updated."""

    def encode_state(self, shard: Shard, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Turn the moments of a loaded ``state`` into 8-bit codes; for shards whose ``block`` is more than 1."""

    def update(self, items: Sequence[Item], context: StepContext, cache: dict[Any, Any]) -> None:
        """Make one step of ``items``; ``kept_items`` says what holds while their list is the same object.

        ``cache`` is the route's own, kept from step to step.
        """

    def forget(self, cache: dict[Any, Any]) -> None:
        """Drop all states that ``cache`` holds: others have taken their place."""


def bucket_shards(bucket: ParameterBucket, specs: Sequence[ParameterSpec], entries: Sequence[Entry]) -> list[Shard]:
    """What this rank owns of a bucket; gradients are set by ``attach_gradients``."""
    shards = []
    for piece in bucket.plan.pieces(bucket.rank):
        spec, entry = specs[piece.parameter], entries[piece.parameter]
        value = bucket.values[piece.offset : piece.offset + piece.stop - piece.start]
        if bucket.plan.route == "muon" or bucket.plan.world_size == 1:
            value = value.as_strided(spec.shape, spec.stride)
        shards.append(make_shard(entry, piece.parameter, piece.start, piece.stop, value))
    return shards


def make_shard(entry: Entry, index: int, start: int, stop: int, value: Tensor) -> Shard:
    """The elements ``[start, stop)`` of an entry, without a gradient."""
    return Shard(entry.parameter, entry.name, index, entry.number, entry.group, start, stop, value, view=entry.view)


def attach_gradients(bucket: ParameterBucket, shards: Sequence[Shard], reduced: Tensor) -> None:
    """Set every shard's gradient to its view of this rank's reduced chunk, unless it is that already."""
    if shards and shards[0].gradient is not None and bucket.attached == reduced.data_ptr():
        return
    bucket.attached = reduced.data_ptr()
    base = bucket.rank * bucket.plan.chunk
    for shard, piece in zip(shards, bucket.plan.pieces(bucket.rank)):
        begin = piece.offset - base
        gradient = reduced[begin : begin + piece.stop - piece.start]
        shard.gradient = gradient.as_strided(shard.value.shape, shard.value.stride())
