"""Flat storage of parameters as views of one bucket, for gradients that are kept and gradients that are not.

A bucket holds flat ``values`` of W equal chunks, of which rank r owns chunk r; every parameter is a view of them. The
input of a reducer is a ``Contribution``: this rank's gradients in the same layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from optim_dist._reduction.collectives import Communicator, Waitable
from optim_dist.plan import BucketPlan, ParameterSpec


@dataclass(eq=False, kw_only=True)
class Member:
    """A parameter in its bucket: ``value`` is its view there."""

    name: str
    index: int  # in the plan
    parameter: Tensor
    value: Tensor
    address: int
    arrived: bool = False  # a gradient has, in any backward pass since the last step
    entered: bool = False  # the forward of a module that holds it has run since the last step


@dataclass(eq=False, kw_only=True)
class ParameterBucket:
    """The flat storage of some parameters, and the latest gather into it until the gather has been waited for."""

    plan: BucketPlan
    rank: int
    values: Tensor
    members: Sequence[Member]
    gathering: Waitable | None = None
    gathered: torch.cuda.Event | None = None  # after the wait in the stream that waited, for other streams
    is_averaged: bool = False  # reduced gradients are averages already, not sums, so that they fit fp16
    attached: int = -1  # address of the reduced chunk that shards' gradients are views of
    deferred: bool = False  # step() left its gather in flight, and nobody has waited for all gathers since
    waits_at_step: bool = False  # one of its parameters is used where no hook sees it
    num_copied: int = 0  # gradients found outside the bucket, since construction
    present: list[bool] = field(default_factory=list)  # per member: had it a gradient when reduced in this step

    def __post_init__(self) -> None:
        # kept as lists, because every step goes through all members several times
        self._parameters = [member.parameter for member in self.members]
        self._addresses = [member.address for member in self.members]

    def check_gradients(self) -> None:
        """Refuse gradients that cannot be reduced, before any rank is told of them, or that changed after reduction."""
        raise NotImplementedError

    def presence(self) -> list[bool]:
        """Which members have a gradient, or had one when they were reduced."""
        raise NotImplementedError

    def drop_gradients(self) -> None:
        """Set gradients that are views of the bucket to None."""

    def free_gradients(self) -> None:
        """Let go of the memory for gradients; the parameters have none, and nothing is reduced here any more."""

    def release(self) -> None:
        """Give parameters, and gradients that are views, storages of their own.

        A parameter that has moved to another bucket stays there.
        """
        for member in self.members:
            if member.parameter.data_ptr() == member.address:
                member.parameter.data = member.value.clone()

    def finish_gathering(self) -> None:
        """Let the current stream wait for the latest gather, if it may still be in flight."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            if self.values.is_cuda and not torch.cuda.is_current_stream_capturing():
                self.gathered = torch.cuda.Event()
                self.gathered.record(torch.cuda.current_stream(self.values.device))
        # a stream that is being captured cannot wait for an event from outside the capture
        elif self.gathered is not None and not torch.cuda.is_current_stream_capturing():
            if self.gathered.query():
                self.gathered = None
            else:
                torch.cuda.current_stream(self.values.device).wait_event(self.gathered)

    def check_pointers(self) -> None:
        """Refuse parameters that have left the bucket."""
        if list(map(Tensor.data_ptr, self._parameters)) == self._addresses:
            return
        for member in self.members:
            if member.parameter.data_ptr() != member.address:
                raise RuntimeError(
                    f"parameter {member.name} is no longer a view of its bucket (.to(), .data = ... or a swapped "
                    "parameter); build the optimizer after the model is on its device and in its dtype"
                )


@dataclass(eq=False, kw_only=True)
class Contribution:
    """A bucket's gradients on their way to their owners: the input of a reducer, and all that is in flight with it."""

    plan: BucketPlan
    rank: int
    gradients: Tensor
    wire: Tensor | None = None  # gradients in the dtype of the wire, if it differs
    received: Tensor | None = None  # exact reducer: W contributions to the own chunk
    sums: Tensor | None = None  # the own chunk's reduced gradient
    sums_dtype: torch.dtype | None = None  # if an exact reducer was given none; None: the gradients'
    work: Waitable | None = None
    full: torch.cuda.Event | None = None  # after the last write to the gradients, if that was noted
    is_averaged: bool = False  # see ``ParameterBucket``

    def own(self, flat: Tensor) -> Tensor:
        """The chunk of this rank."""
        return flat[self.rank * self.plan.chunk : (self.rank + 1) * self.plan.chunk]


def move_parameters(
    plan: BucketPlan, specs: Sequence[ParameterSpec], parameters: Sequence[Tensor], communicator: Communicator
) -> tuple[Tensor, list[Member]]:
    """Move parameters into new flat storage; they become views of it, but stay the same objects."""
    values = communicator.zeros(plan.numel, plan.dtype, parameters[plan.slots[0].parameter].device)
    members = []
    for slot in plan.slots:
        spec, parameter = specs[slot.parameter], parameters[slot.parameter]
        value = flat_view(values, slot.offset, spec)
        value.copy_(parameter.detach())
        parameter.data = value
        members.append(
            Member(name=spec.name, index=slot.parameter, parameter=parameter, value=value, address=parameter.data_ptr())
        )
    return values, members


def flat_view(flat: Tensor, offset: int, spec: ParameterSpec) -> Tensor:
    """The view of ``flat`` at ``offset`` with the parameter's shape and strides."""
    return flat[offset : offset + spec.numel].as_strided(spec.shape, spec.stride)


def no_rank_had_gradients(counts: Tensor | None, buckets: Iterable[ParameterBucket]) -> bool:
    """Whether ranks have reduced for a norm when none of them had a gradient: the next gradients then begin the step.

    ``counts`` (for each parameter, on how many ranks it had a gradient) are the same everywhere, and so is the answer.
    Reading them waits for the device, so they are read only if this rank had no gradient.
    """
    return counts is not None and not any(any(bucket.present) for bucket in buckets) and not counts.any().item()


def check_gradient(member: Member, gradient: Tensor, plan: BucketPlan) -> None:
    """Refuse a gradient that a bucket cannot take."""
    check_kind(member.name, gradient)
    if gradient.shape != member.value.shape or gradient.dtype != plan.grad_dtype:
        raise RuntimeError(
            f"the gradient of {member.name} is {gradient.dtype} {tuple(gradient.shape)}, where this optimizer takes "
            f"{plan.grad_dtype} {tuple(member.value.shape)}; give it such a one, leave its grad_dtype alone, "
            "and choose by grad_dtype= of the optimizer"
        )


def check_kind(name: str, gradient: Tensor, *, of_dtensor: bool = False) -> None:
    """Refuse a gradient that is not dense, and a DTensor as that of a plain parameter."""
    if gradient.layout is not torch.strided:
        raise RuntimeError(
            f"the gradient of {name} is {gradient.layout}; make it dense (sparse=False in its embedding)"
        )
    # torch makes one under ``implicit_replication``
    if isinstance(gradient, DTensor) and not of_dtensor:
        raise RuntimeError(
            f"the gradient of {name} is a DTensor, but the parameter is none; make the parameter one, too "
            "(distribute_tensor), or compute with it where no DTensors are"
        )
