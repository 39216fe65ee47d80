"""Flat storage of parameters as views of one bucket, whatever becomes of their gradients.

A bucket holds flat ``values`` of W equal chunks, of which rank r owns chunk r; every parameter is a view of them. What
a reducer is given is a ``Contribution``: this rank's gradients in the same layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optim_dist._reduction.collectives import Communicator, Waitable
from optim_dist.plan import BucketPlan, ParameterSpec


@dataclass(eq=False, kw_only=True)
class Member:
    """A parameter in its bucket, and its view there."""

    name: str
    index: int  # in the plan
    parameter: Tensor
    value: Tensor
    address: int
    arrived: bool = False  # a gradient, in any backward pass since the last step
    entered: bool = False  # the forward of a module that holds it has run since the last step


@dataclass(eq=False, kw_only=True)
class ParameterBucket:
    """The storage of parameters, and the gather that fills it, until that has been waited for."""

    plan: BucketPlan
    rank: int
    values: Tensor
    members: Sequence[Member]
    gathering: Waitable | None = None
    gathered: torch.cuda.Event | None = None  # behind it in the stream that waited for it, for others to wait for
    divided: bool = False  # gradients were divided by W before they were added, for the sums to fit
    attached: int = -1  # address of the sums that shards' gradients are views of
    deferred: bool = False  # step() has ended before its gather, and nobody has waited for all since
    waits_at_step: bool = False  # a parameter of it is used where no hook sees it
    num_copied: int = 0  # gradients found outside the bucket, since construction
    present: list[bool] = field(default_factory=list)  # members that had a gradient when they were reduced in this step

    def __post_init__(self) -> None:
        # of all members, which every step goes through several times
        self._parameters = [member.parameter for member in self.members]
        self._addresses = [member.address for member in self.members]

    def check_gradients(self) -> None:
        """Refuse gradients that cannot be reduced, before any rank is told of them, or that changed since they were."""
        raise NotImplementedError

    def presence(self) -> list[bool]:
        """Which members have a gradient, or had one when they were reduced."""
        raise NotImplementedError

    def drop_gradients(self) -> None:
        """Set gradients that are views of the bucket to None."""

    def release(self) -> None:
        """Give parameters, and gradients that are views, storages of their own.

        Those that have left for another bucket stay there.
        """
        for member in self.members:
            if member.parameter.data_ptr() == member.address:
                member.parameter.data = member.value.clone()

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
    """A bucket's gradients on their way to their owners: what a reducer takes, and all that is in flight with it."""

    plan: BucketPlan
    rank: int
    gradients: Tensor
    wire: Tensor | None = None  # gradients in the dtype of the wire, if that is another
    received: Tensor | None = None  # exact reducer: W contributions to the own chunk
    sums: Tensor | None = None  # the own chunk's reduced gradient
    sums_dtype: torch.dtype | None = None  # of those, where a reducer that can choose was told nothing; the gradients'
    work: Waitable | None = None
    full: torch.cuda.Event | None = None  # behind which the gradients are what they are now, if that is known
    divided: bool = False  # see ``ParameterBucket``

    def own(self, flat: Tensor) -> Tensor:
        """The chunk of this rank."""
        return flat[self.rank * self.plan.chunk : (self.rank + 1) * self.plan.chunk]


def move_parameters(
    plan: BucketPlan, specs: Sequence[ParameterSpec], parameters: Sequence[Tensor], communicator: Communicator
) -> tuple[Tensor, list[Member]]:
    """New flat storage, and the parameters as views of it; they and what refers to them keep their identity."""
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


def found_nothing(counts: Tensor | None, buckets: Iterable[ParameterBucket]) -> bool:
    """Whether ranks have reduced gradients, for a norm, of which no rank had any: those to come begin the step.

    ``counts``, on how many ranks each parameter had one, are the same everywhere, and so is the answer. They are read,
    which waits for the device, only if this rank had none.
    """
    return counts is not None and not any(any(bucket.present) for bucket in buckets) and not counts.any().item()


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one interval of memory, each once, whatever the order of the dimensions."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape) if sz != 1):
        if stride != expected and tensor.numel() > 0:
            return False
        expected *= size
    return True


def check_gradient(member: Member, gradient: Tensor, plan: BucketPlan) -> None:
    """Refuse a gradient that a bucket cannot take."""
    if gradient.layout is not torch.strided:
        raise RuntimeError(
            f"the gradient of {member.name} is {gradient.layout}; make it dense (sparse=False in its embedding)"
        )
    if gradient.shape != member.value.shape or gradient.dtype != plan.grad_dtype:
        raise RuntimeError(
            f"the gradient of {member.name} is {gradient.dtype} {tuple(gradient.shape)}, where this optimizer takes "
            f"{plan.grad_dtype} {tuple(member.value.shape)}; give it such a one, leave its grad_dtype alone, "
            "and choose by grad_dtype= of the optimizer"
        )
