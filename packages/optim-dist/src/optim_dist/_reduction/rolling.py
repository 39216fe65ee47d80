"""Parameters whose gradients are not kept: these pass through a few rolling buffers; only own chunks' sums stay.

    .grad of a bucket's parameters --copy--> buffer --reduce--> sum of the own chunk --add--> ``sums`` of the bucket

Memory beside the parameters: ``NUM_BUFFERS`` times the largest bucket, C elements of ``sums`` per bucket (as many again
for each level of a ``PassTree``), and the ``.grad`` of buckets that are not full yet. ``.grad`` is None once the
bucket's reduction was launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from optim_dist._reduction.collectives import Communicator
from optim_dist._reduction.storage import (
    Contribution,
    ParameterBucket,
    check_gradient,
    flat_view,
    move_parameters,
)
from optim_dist._reduction.tree import PassTree
from optim_dist.plan import BucketPlan, ParameterSpec

NUM_BUFFERS = 3  # one is filled, one travels, one is added up


@dataclass(eq=False, kw_only=True)
class StreamedBucket(ParameterBucket):
    """Parameters, and the sum of this rank's chunk of gradients over the micro-batches of a step."""

    sums: Tensor
    specs: Sequence[ParameterSpec]  # of the members
    tree: PassTree | None = None  # if passes are added up in pairs
    missing: set[int] = field(default_factory=set)  # places of members without a gradient for the next reduction
    is_over: bool = False  # the last reduction of this step was launched
    is_fresh: bool = True  # nothing was added to this step's sums yet

    def check_gradients(self) -> None:
        for member in self.members:
            gradient = member.parameter.grad
            if gradient is None:
                continue
            if self.is_over:
                raise RuntimeError(
                    f"the gradient of {member.name} was assigned after its bucket had been reduced for the last time "
                    "in this step; with gradients='streamed' assign gradients before, or use 'resident'"
                )
            check_gradient(member, gradient, self.plan)

    def presence(self) -> list[bool]:
        return [had or m.parameter.grad is not None for had, m in zip(self.present, self.members)]

    def begin_pass(self) -> None:
        """Expect a gradient of every member once more."""
        self.missing.update(range(len(self.members)))

    def restart(self) -> None:
        """Begin a step: the next gradients belong to it."""
        self.begin_pass()
        self.present = [False] * len(self.members)
        self.is_over, self.is_fresh = False, True
        if self.tree is not None:
            self.tree.restart()

    def free_gradients(self) -> None:
        self.sums = self.sums.new_empty(0)
        self.tree = None

    def add(self, found: Tensor) -> None:
        """Add the sum of one reduction."""
        if self.tree is not None:
            self.tree.add(found)
        elif self.is_fresh:
            self.sums.copy_(found)
            self.is_fresh = False
        else:
            self.sums.add_(found)

    def take_gradients(self, places: Places) -> list[Tensor]:
        """Move gradients into a buffer, with zeros for missing ones; return the tensors that were ``.grad``."""
        targets, found, zeros = [], [], list(places.gaps)
        for place, (member, target) in enumerate(zip(self.members, places.members)):
            gradient = member.parameter.grad
            if gradient is None:
                zeros.append(target)
                continue
            targets.append(target)
            found.append(gradient)
            self.present[place] = True
            member.parameter.grad = None
        if found:
            torch._foreach_copy_(targets, found)
        if zeros:
            torch._foreach_zero_(zeros)
        return found


def build_streamed_bucket(
    plan: BucketPlan,
    specs: Sequence[ParameterSpec],
    parameters: Sequence[Tensor],
    communicator: Communicator,
    *,
    sums_dtype: Callable[[BucketPlan], torch.dtype],
    num_paired: int | None,
) -> StreamedBucket:
    """Move parameters into a new bucket that keeps the sum of this rank's chunk of gradients, in its ``sums_dtype``.

    ``num_paired``: how many passes are added up in pairs; None: passes are added one by one.
    """
    values, members = move_parameters(plan, specs, parameters, communicator)
    sums = values.new_zeros(plan.chunk, dtype=sums_dtype(plan))
    bucket = StreamedBucket(
        plan=plan,
        rank=communicator.rank,
        values=values,
        members=members,
        sums=sums,
        tree=None if num_paired is None else PassTree(sums, num_paired),
        specs=[specs[slot.parameter] for slot in plan.slots],
    )
    bucket.restart()
    return bucket


@dataclass(frozen=True)
class Places:
    """A buffer seen as a bucket's gradients: all of it, each member's part, and the gaps that belong to no member."""

    flat: Tensor
    members: list[Tensor]
    gaps: list[Tensor]
    wire: Tensor | None  # of the same length, if gradients travel in another dtype

    def contribution(self, bucket: StreamedBucket) -> Contribution:
        return Contribution(
            plan=bucket.plan, rank=bucket.rank, gradients=self.flat, wire=self.wire, sums_dtype=bucket.sums.dtype
        )


class Buffer:
    """Memory that is lent to one reduction after another, whatever its bucket."""

    def __init__(self, buckets: Sequence[StreamedBucket], communicator: Communicator) -> None:
        storage: dict[torch.device, int] = {}
        wires: dict[torch.device, int] = {}
        for bucket in buckets:
            device, plan = bucket.values.device, bucket.plan
            storage[device] = max(storage.get(device, 0), plan.gradient_nbytes)
            if plan.wire_dtype != plan.grad_dtype:
                wires[device] = max(wires.get(device, 0), plan.numel * plan.wire_dtype.itemsize)
        zeros = partial(communicator.zeros, dtype=torch.uint8)
        self._storage = {device: zeros(number, device=device) for device, number in storage.items()}
        self._wires = {device: zeros(number, device=device) for device, number in wires.items()}
        self._places: dict[StreamedBucket, Places] = {}

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in (*self._storage.values(), *self._wires.values()))

    def places(self, bucket: StreamedBucket) -> Places:
        """The buffer seen as a bucket's gradients."""
        if bucket not in self._places:
            device, plan = bucket.values.device, bucket.plan
            flat = _seen_as(self._storage[device], plan.grad_dtype, plan.numel)
            wire = None
            if plan.wire_dtype != plan.grad_dtype:
                wire = _seen_as(self._wires[device], plan.wire_dtype, plan.numel)
            views = [flat_view(flat, slot.offset, spec) for slot, spec in zip(plan.slots, bucket.specs)]
            self._places[bucket] = Places(flat, views, [flat[start:stop] for start, stop in _gaps(plan)], wire)
        return self._places[bucket]


def _gaps(plan: BucketPlan) -> list[tuple[int, int]]:
    """The intervals of a bucket that belong to no parameter."""
    gaps, end = [], 0
    for start, size in sorted((slot.offset, size) for slot, size in zip(plan.slots, plan.sizes) if size):
        if start > end:
            gaps.append((end, start))
        end = start + size
    return [*gaps, (end, plan.numel)] if end < plan.numel else gaps


def _seen_as(storage: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
    return storage[: numel * dtype.itemsize].view(dtype)
