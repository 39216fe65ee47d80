"""Flat storage: parameters and gradients as views of one bucket each, and the rules that keep gradients honest.

A bucket holds two flat tensors of W equal chunks, ``values`` and ``gradients``; every parameter and its ``.grad`` is a
view of the same elements of both. Reductions and gathers run in place, so nothing is stacked or copied back.

An in-place reduction destroys the local sums. Adding to them afterwards would be silently wrong, so every gradient
view has a version counter of its own (autograd's), noted when the bucket is reduced:

    counter unchanged             the gradient is the reduced one; nobody has written to it since
    counter + 1 in the hook       autograd added to a reduced gradient: an error
    counter + 2 or more           somebody zeroed it first (``zero_grad(set_to_none=False)``): a fresh gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, eq, is_

import torch
from torch import Tensor

from optim_dist._reduction.collectives import Communicator
from optim_dist._reduction.storage import (
    Contribution,
    Member,
    ParameterBucket,
    check_gradient,
    flat_view,
    move_parameters,
)
from optim_dist.plan import BucketPlan, ParameterSpec

_grad = attrgetter("grad")

_REMEDY = (
    "call zero_grad() after every step(), before whichever backward pass reaches it next; to add up several before one "
    "step, give their number as accumulation_steps= or put all but the last under no_sync()"
)


@dataclass(eq=False, kw_only=True)
class ResidentMember(Member):
    """A member whose ``.grad`` is the view ``gradient`` while its gradient is in the bucket."""

    gradient: Tensor
    place: int = -1  # in the bucket
    arrivals: int = 0  # backward passes since the last step, without those that only accumulate


@dataclass(eq=False, kw_only=True)
class Bucket(Contribution, ParameterBucket):
    """Storages, members and collectives in flight; it owns a collective's buffers until that has been waited for."""

    members: Sequence[ResidentMember]
    launched: bool = False
    missing: int = 0  # members whose last gradient of this step has not arrived
    _full_versions: list[int] | None = None  # versions of the gradients when the bucket was noted as full

    def __post_init__(self) -> None:
        super().__post_init__()
        self._gradients = [member.gradient for member in self.members]
        self._gradient_addresses = list(map(Tensor.data_ptr, self._gradients))
        # the gradients' versions when they were reduced last
        self._reduced_versions = [-1] * len(self.members)
        for place, member in enumerate(self.members):
            member.place = place

    def check_gradients(self) -> None:
        self._renew_moved()
        if self.launched:
            self._check_unchanged()
            return
        versions = [gradient._version for gradient in self._gradients]
        if self._all_in_place() and not any(map(eq, versions, self._reduced_versions)):
            return
        for member in self.members:
            gradient = member.parameter.grad
            if gradient is not None and gradient is not member.gradient:
                check_gradient(member, gradient, self.plan)
            elif self._is_reduced_and_untouched(member):
                raise RuntimeError(
                    f"the gradient of {member.name} was reduced in an earlier step and has not changed since: {_REMEDY}"
                )

    @torch.no_grad()
    def collect_gradients(self) -> list[Tensor]:
        """Bring every gradient into the bucket: copy strays in and return them, fill missing ones with zeros."""
        if self._all_in_place():
            self.present = [True] * len(self.members)
            return []
        targets, strays, absent = [], [], []
        for member in self.members:
            gradient = member.parameter.grad
            if gradient is None:
                absent.append(member.gradient)
            elif gradient is not member.gradient:
                targets.append(member.gradient)
                strays.append(gradient)
                member.parameter.grad = member.gradient
        if targets:
            torch._foreach_copy_(targets, strays)
            self.num_copied += len(targets)
        if absent:
            torch._foreach_zero_(absent)
        self.present = [member.parameter.grad is not None for member in self.members]
        return strays

    def note_full(self) -> None:
        """Note that all of this step's gradients are in the bucket: readers need not wait for later work."""
        self._full_versions = [gradient._version for gradient in self._gradients]
        if self.gradients.is_cuda:
            current = torch.cuda.current_stream(self.gradients.device)
            self.full = current.record_event(self.full)

    def forget_full(self) -> None:
        """Undo ``note_full``: readers of the gradients wait for all work of the current stream."""
        self._full_versions = self.full = None

    @property
    def is_as_noted(self) -> bool:
        """Whether the bucket was noted as full, and nobody has changed a gradient since."""
        return (
            self._full_versions is not None
            and self._all_in_place()
            and self._full_versions == [gradient._version for gradient in self._gradients]
        )

    def presence(self) -> list[bool]:
        return self.present if self.launched else [parameter.grad is not None for parameter in self._parameters]

    def _all_in_place(self) -> bool:
        """Whether every member has a gradient, and it is the view of the bucket."""
        return all(map(is_, map(_grad, self._parameters), self._gradients))

    def _renew_moved(self) -> None:
        """Replace views that ``.data = ...`` has moved out of the bucket; what they hold counts as assigned."""
        if list(map(Tensor.data_ptr, self._gradients)) == self._gradient_addresses:
            return
        for slot, member, address in zip(self.plan.slots, self.members, self._gradient_addresses):
            if member.gradient.data_ptr() != address:
                shape, strides = member.value.shape, member.value.stride()
                member.gradient = self.gradients.data[slot.offset :].as_strided(shape, strides).data
                self._gradients[member.place] = member.gradient
                self._reduced_versions[member.place] = -1

    def _is_reduced_and_untouched(self, member: ResidentMember) -> bool:
        is_in_place = member.parameter.grad is member.gradient
        return is_in_place and member.gradient._version == self._reduced_versions[member.place]

    def _check_unchanged(self) -> None:
        for member, was_present in zip(self.members, self.present):
            unchanged = self._is_reduced_and_untouched(member) if was_present else member.parameter.grad is None
            if not unchanged:
                raise RuntimeError(
                    f"the gradient of {member.name} was assigned or changed after its bucket was reduced; change "
                    "gradients before clip_grad_norm_() and, if backward reduces (accumulation_steps= or no_sync()), "
                    "build the optimizer with overlap=False, and leave DistributedDataParallel out, which changes them "
                    "too; to give the step up, call zero_grad()"
                )

    def drop_gradients(self) -> None:
        for member in self.members:
            if member.parameter.grad is member.gradient:
                member.parameter.grad = None

    def free_gradients(self) -> None:
        self.gradients = nothing = self.gradients.new_empty(0)
        self.wire = self.received = self.sums = None
        self._gradients = []
        for member in self.members:
            member.gradient = nothing

    def release(self) -> None:
        if self.launched:  # for a step that was not made: sums are no gradients of this rank
            self.drop_gradients()
        for member in self.members:
            if member.parameter.grad is member.gradient:
                member.parameter.grad = member.gradient.clone()
        super().release()

    def note_reduced(self) -> None:
        """Remember the gradients' versions: from here on they hold reduced values."""
        self._reduced_versions = [gradient._version for gradient in self._gradients]

    def check_arrival(self, member: ResidentMember) -> None:
        """Refuse a gradient that autograd added to one already reduced."""
        added_in_place = member.parameter.grad is member.gradient
        version_of_sum = self._reduced_versions[member.place] + 1
        if self.launched or (added_in_place and member.gradient._version == version_of_sum):
            raise RuntimeError(
                f"a gradient of {member.name} arrived after its bucket was reduced: {_REMEDY}. (A module that "
                "torch.utils.checkpoint runs several times in one pass gives one each time if use_reentrant=True; pass "
                "False.)"
            )


def build_bucket(
    plan: BucketPlan, specs: Sequence[ParameterSpec], parameters: Sequence[Tensor], communicator: Communicator
) -> Bucket:
    """Move parameters into a new bucket with gradients beside them."""
    values, moved = move_parameters(plan, specs, parameters, communicator)
    gradients = communicator.zeros(plan.numel, plan.grad_dtype, values.device)
    wire = None
    if plan.wire_dtype != plan.grad_dtype:
        wire = communicator.zeros(plan.numel, plan.wire_dtype, values.device)
    members = []
    for slot, member in zip(plan.slots, moved):
        # .data gives each view a version counter of its own; views of one base would share it
        gradient = flat_view(gradients.data, slot.offset, specs[slot.parameter]).data
        members.append(ResidentMember(**vars(member), gradient=gradient))
    return Bucket(
        plan=plan,
        rank=communicator.rank,
        values=values,
        gradients=gradients,
        wire=wire,
        members=members,
        missing=len(members),
    )
