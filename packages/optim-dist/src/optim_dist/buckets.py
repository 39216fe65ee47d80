"""Flat storage: parameters and gradients as views of one bucket each, and the rules that keep gradients honest.

A bucket holds two flat tensors of W equal chunks, ``values`` and ``gradients``; every parameter and its ``.grad`` is a
view of the same elements of both. Reductions and gathers run in place, so nothing is stacked or copied back.

An in-place reduction destroys the local sums. Adding to them afterwards would be silently wrong, so every gradient
view has a version counter of its own (autograd's), noted when the bucket is reduced:

    counter unchanged             the gradient is the reduced one, nobody has written since
    counter + 1 in the hook       autograd added to a reduced gradient: an error
    counter + 2 or more           somebody zeroed it first (``zero_grad(set_to_none=False)``): a fresh gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

_REMEDY = (
    "call zero_grad() after every step(); to add up several backward passes before one, "
    "pass accumulation_steps= or put all but the last under no_sync()"
)


@dataclass(eq=False, kw_only=True)
class ResidentMember(Member):
    """``gradient`` is the view that ``.grad`` is while a gradient is in the bucket."""

    gradient: Tensor
    reduced_version: int = -1
    arrivals: int = 0  # backward passes since the last step that may reduce

    def reduced_and_untouched(self) -> bool:
        return self.parameter.grad is self.gradient and self.gradient._version == self.reduced_version


@dataclass(eq=False, kw_only=True)
class Bucket(Contribution, ParameterBucket):
    """Storages, members and what is in flight; it owns every buffer of a collective until that has been waited for."""

    members: Sequence[ResidentMember]
    launched: bool = False
    missing: int = 0  # members whose last gradient of this step has not arrived

    def check_gradients(self) -> None:
        if self.launched:
            self._check_unchanged()
            return
        for member in self.members:
            gradient = member.parameter.grad
            if gradient is not None and gradient is not member.gradient:
                check_gradient(member, gradient, self.plan)
            elif member.reduced_and_untouched():
                raise RuntimeError(
                    f"the gradient of {member.name} was reduced in an earlier step and has not changed since: {_REMEDY}"
                )

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Bring every gradient into the bucket: strays are copied in, missing ones are zeros."""
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

    def presence(self) -> list[bool]:
        return self.present if self.launched else [member.parameter.grad is not None for member in self.members]

    def _check_unchanged(self) -> None:
        for member, was_present in zip(self.members, self.present):
            unchanged = member.reduced_and_untouched() if was_present else member.parameter.grad is None
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

    def release(self) -> None:
        if self.launched:  # by a step that was not made: what is reduced is no gradient of this rank
            self.drop_gradients()
        for member in self.members:
            if member.parameter.grad is member.gradient:
                member.parameter.grad = member.gradient.clone()
        super().release()

    def note_reduced(self) -> None:
        """Remember the gradients' versions: from here on they hold reduced values."""
        for member in self.members:
            member.reduced_version = member.gradient._version

    def check_arrival(self, member: ResidentMember) -> None:
        """Refuse a gradient that autograd added to one already reduced."""
        added_in_place = member.parameter.grad is member.gradient
        if self.launched or (added_in_place and member.gradient._version == member.reduced_version + 1):
            raise RuntimeError(f"a gradient of {member.name} arrived after its bucket was reduced: {_REMEDY}")


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
