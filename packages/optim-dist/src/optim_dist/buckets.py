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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from optim_dist.plan import BucketPlan, ParameterSpec

if TYPE_CHECKING:
    from optim_dist._reduction.collectives import Waitable

_REMEDY = (
    "call zero_grad() after every step(); to add up several backward passes before one, "
    "pass accumulation_steps= or put all but the last under no_sync()"
)


@dataclass(eq=False)
class Member:
    """A parameter in its bucket. ``gradient`` is the view that ``.grad`` is while a gradient is in the bucket."""

    name: str
    index: int  # in the plan
    parameter: Tensor
    value: Tensor
    gradient: Tensor
    address: int
    reduced_version: int = -1
    arrivals: int = 0  # backward passes since the last step that may reduce
    arrived: bool = False  # any backward pass since the last step
    entered: bool = False  # the forward of a module that holds it has run since the last step

    def reduced_and_untouched(self) -> bool:
        return self.parameter.grad is self.gradient and self.gradient._version == self.reduced_version


@dataclass(eq=False)
class Bucket:
    """Storages, members and what is in flight; it owns every buffer of a collective until that has been waited for."""

    plan: BucketPlan
    rank: int
    values: Tensor
    gradients: Tensor
    members: list[Member]
    wire: Tensor | None = None  # gradients in the dtype of the wire, if that is another
    received: Tensor | None = None  # exact reducer: W contributions to the own chunk
    sums: Tensor | None = None  # the own chunk's reduced gradient
    work: Waitable | None = None
    gathering: Waitable | None = None
    gathered: torch.cuda.Event | None = None  # behind it in the stream that waited for it, for others to wait for
    launched: bool = False
    divided: bool = False  # gradients were divided by W before they were added, for the sums to fit
    missing: int = 0  # members whose last gradient of this step has not arrived
    present: list[bool] = field(default_factory=list)
    attached: int = -1  # address of the sums that shards' gradients are views of
    deferred: bool = False  # step() has ended before its gather, and nobody has waited for all since
    waits_at_step: bool = False  # a parameter of it is used where no hook sees it
    num_copied: int = 0  # gradients found outside the bucket, since construction

    def own(self, flat: Tensor) -> Tensor:
        """The chunk of this rank."""
        return flat[self.rank * self.plan.chunk : (self.rank + 1) * self.plan.chunk]

    def finish_gathering(self) -> None:
        """Let the current stream wait for the latest gather, if that may still be in flight."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            if self.values.is_cuda and not torch.cuda.is_current_stream_capturing():
                self.gathered = torch.cuda.Event()
                self.gathered.record(torch.cuda.current_stream(self.values.device))
        # what goes into a graph cannot wait for what does not
        elif self.gathered is not None and not torch.cuda.is_current_stream_capturing():
            if self.gathered.query():
                self.gathered = None
            else:
                torch.cuda.current_stream(self.values.device).wait_event(self.gathered)

    def check_gradients(self) -> None:
        """Refuse gradients that cannot be reduced, before any rank is told of them, or that changed since they were."""
        if self.launched:
            self._check_unchanged()
            return
        for member in self.members:
            gradient = member.parameter.grad
            if gradient is not None and gradient is not member.gradient:
                _check_gradient(member, gradient)
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
        """Which members have a gradient, or had one when they were reduced."""
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

    def release(self) -> None:
        """Give parameters and gradients storages of their own; those that have left for another bucket stay there."""
        for member in self.members:
            if member.parameter.grad is member.gradient:
                member.parameter.grad = member.gradient.clone()
            if member.parameter.data_ptr() == member.address:
                member.parameter.data = member.value.clone()

    def note_reduced(self) -> None:
        """Remember the gradients' versions: from here on they hold reduced values."""
        for member in self.members:
            member.reduced_version = member.gradient._version

    def check_arrival(self, member: Member) -> None:
        """Refuse a gradient that autograd added to one already reduced."""
        added_in_place = member.parameter.grad is member.gradient
        if self.launched or (added_in_place and member.gradient._version == member.reduced_version + 1):
            raise RuntimeError(f"a gradient of {member.name} arrived after its bucket was reduced: {_REMEDY}")

    def check_pointers(self) -> None:
        """Refuse parameters that have left the bucket."""
        for member in self.members:
            if member.parameter.data_ptr() != member.address:
                raise RuntimeError(
                    f"parameter {member.name} is no longer a view of its bucket (.to(), .data = ... or a swapped "
                    "parameter); build the optimizer after the model is on its device and in its dtype"
                )


def build_bucket(plan: BucketPlan, specs: Sequence[ParameterSpec], parameters: Sequence[Tensor], rank: int) -> Bucket:
    """Move parameters into a new bucket; they and what refers to them keep their identity."""
    values = torch.zeros(plan.numel, dtype=plan.dtype, device=parameters[plan.slots[0].parameter].device)
    gradients = torch.zeros_like(values, dtype=plan.grad_dtype)
    members = []
    for slot in plan.slots:
        spec, parameter = specs[slot.parameter], parameters[slot.parameter]
        value = flat_view(values, slot.offset, spec)
        value.copy_(parameter.detach())
        parameter.data = value
        # .data gives each view a version counter of its own; views of one base would share it
        gradient = flat_view(gradients.data, slot.offset, spec).data
        members.append(Member(spec.name, slot.parameter, parameter, value, gradient, parameter.data_ptr()))
    return Bucket(plan, rank, values, gradients, members, missing=len(members))


def flat_view(flat: Tensor, offset: int, spec: ParameterSpec) -> Tensor:
    """The view of ``flat`` at ``offset`` with the parameter's shape and strides."""
    return flat[offset : offset + spec.numel].as_strided(spec.shape, spec.stride)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one interval of memory, each once, whatever the order of the dimensions."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape) if sz != 1):
        if stride != expected and tensor.numel() > 0:
            return False
        expected *= size
    return True


def _check_gradient(member: Member, gradient: Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise RuntimeError(
            f"the gradient of {member.name} is {gradient.layout}; make it dense (sparse=False in its embedding)"
        )
    if gradient.shape != member.gradient.shape or gradient.dtype != member.gradient.dtype:
        raise RuntimeError(
            f"the gradient of {member.name} is {gradient.dtype} {tuple(gradient.shape)}, where this optimizer takes "
            f"{member.gradient.dtype} {tuple(member.gradient.shape)}; give it such a one, leave its grad_dtype alone, "
            "and choose by grad_dtype= of the optimizer"
        )
