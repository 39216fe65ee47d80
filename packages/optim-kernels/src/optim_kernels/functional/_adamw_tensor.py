"""One parameter of an AdamW plan, with its state: what the kernels can take, and what tensors of one launch share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optim_kernels._dtensors import is_dtensor, is_wrapper
from optim_kernels._impl import KERNEL_DTYPES
from optim_kernels._memory import is_dense
from optim_kernels.functional._lists import Layout, called, description
from optim_utils.low_bit import CUBIC8, QUINTIC8_UNSIGNED, LowBitFormat, LowBitTensor

# elements that share a scale where moments are 8-bit codes
CODE_BLOCK = CUBIC8.block_size


class Signature(NamedTuple):
    """What tensors of one launch have in common: the device, the dtypes, and what the kernel is compiled for.

    ``torch.uint8`` stands for moments in 8-bit codes.
    """

    device: torch.device
    param: torch.dtype
    grad: torch.dtype
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    amsgrad: bool
    master: torch.dtype | None
    num_slices: int
    stochastic_rounding: bool


@dataclass(eq=False, slots=True)
class PlannedParameter:
    """One parameter of an AdamW plan, as a launch knows it that has its gradients to look at: without its memory."""

    place: int  # in the lists that the plan was given
    name: str | None  # for errors
    layout: Layout

    def called(self, kind: str) -> str:
        """How errors call a tensor of a kind."""
        return called(kind, self.place, self.name)

    def check_grad(self, grad: Tensor) -> None:
        """Raise ``ValueError`` unless ``grad`` is a gradient of this parameter that the kernels can read."""
        p = self.layout
        if grad.dtype not in KERNEL_DTYPES:
            raise ValueError(f"{self.called('grads')} is {grad.dtype}; the kernels take {_names(KERNEL_DTYPES)}")
        sliced = grad.dim() == len(p.shape) + 1
        if (
            (grad.shape[1:] if sliced else grad.shape) != p.shape
            or grad.device != p.device
            or (sliced and not len(grad))
        ):
            raise ValueError(
                f"{self.called('grads')} must be like {self.called('params')}, {p}, or a stack of such, "
                f"but is {description(grad)}"
            )
        if is_dtensor(grad) or not is_wrapper(grad):
            _check_memory(self.called("grads"), grad)

    def is_sliced(self, grad: Tensor) -> bool:
        """Whether ``grad`` has slices to sum up: a dimension more than the parameter."""
        return grad.dim() > len(self.layout.shape)

    def num_slices(self, grad: Tensor) -> int:
        """How many slices of ``grad`` are summed up."""
        return len(grad) if self.is_sliced(grad) else 1

    def has_layout_of(self, grad: Tensor) -> bool:
        """Whether ``grad``, or each slice of it, lies in memory as the parameter does."""
        return self.layout.is_that_of(grad[0] if self.is_sliced(grad) else grad)

    def in_own_layout(self, grad: Tensor) -> Tensor:
        """A copy of ``grad`` that lies in memory as the parameter does."""
        p, sliced = self.layout, self.is_sliced(grad)
        pieces = grad if sliced else grad[None]
        flat = torch.empty(pieces.numel(), dtype=grad.dtype, device=grad.device)
        copy = flat.as_strided(pieces.shape, (p.shape.numel(), *p.strides)).copy_(pieces)
        return copy if sliced else copy[0]


@dataclass(eq=False, slots=True)
class PlannedTensor(PlannedParameter):
    """One parameter with its state, as the kernel sees it."""

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    master: Tensor | None
    step: Tensor
    present: Tensor | None
    group: int
    index: int  # with the seed, the key of its random bits
    start: int
    stochastic_rounding: bool
    seed: int

    @property
    def parameter(self) -> PlannedParameter:
        """What a launch keeps of it: no tensor, whose memory others may want to have back."""
        return PlannedParameter(self.place, self.name, self.layout)

    def states(self) -> Iterable[tuple[str, Tensor | None]]:
        """The state tensors, each with its kind."""
        return (
            ("exp_avgs", self.exp_avg),
            ("exp_avg_sqs", self.exp_avg_sq),
            ("max_exp_avg_sqs", self.max_exp_avg_sq),
            ("masters", self.master),
        )

    def check(self, grad: Tensor) -> None:
        """Raise ``ValueError`` unless the kernels can update these tensors."""
        p, name = self.param, self.called("params")
        if p.dtype not in KERNEL_DTYPES:
            raise ValueError(f"{name} is {p.dtype}; the kernels take {_names(KERNEL_DTYPES)}")
        if not is_dense(p):
            raise ValueError(f"{name} has strides {p.stride()} for shape {tuple(p.shape)}: its elements are not dense")
        _check_memory(name, p)
        _check_sign(name, p)
        for kind, state in self.states():
            if state is None:
                continue
            _check_memory(self.called(kind), state)
            _check_sign(self.called(kind), state)
            if state.shape != p.shape or state.device != p.device or not self.layout.is_that_of(state):
                raise ValueError(f"{self.called(kind)} must be like {name}, {self.layout}, but is {description(state)}")
        self._check_moment("exp_avgs", self.exp_avg, CUBIC8)
        self._check_moment("exp_avg_sqs", self.exp_avg_sq, QUINTIC8_UNSIGNED)
        if self.max_exp_avg_sq is not None:
            # a running maximum in codes would round up and never fall
            like = torch.float32 if isinstance(self.exp_avg_sq, LowBitTensor) else self.exp_avg_sq.dtype
            if self.max_exp_avg_sq.dtype != like:
                raise ValueError(
                    f"{self.called('max_exp_avg_sqs')} is {self.max_exp_avg_sq.dtype}; beside "
                    f"{self.called('exp_avg_sqs')}, {_stored_as(self.exp_avg_sq)}, it must be {like}"
                )
        if self.master is not None and self.master.dtype not in (torch.float32, torch.int16):
            raise ValueError(f"{self.called('masters')} must be float32 or int16, is {self.master.dtype}")
        if self.master is not None and self.master.dtype == torch.int16 and p.dtype != torch.bfloat16:
            raise ValueError(
                f"{self.called('masters')} is int16, which completes a bfloat16 parameter; {name} is {p.dtype}"
            )
        for kind, scalar in (("steps", self.step), ("present", self.present)):
            if scalar is None:
                continue
            _check_memory(f"{kind} of {name}", scalar)
            if scalar.numel() != 1 or scalar.dtype != torch.float32 or scalar.device != p.device:
                raise ValueError(
                    f"{kind} of {name} must be one float32 element on {p.device}, is {description(scalar)}"
                )
        self.check_grad(grad)

    def _check_moment(self, kind: str, moment: Tensor, fmt: LowBitFormat) -> None:
        if isinstance(moment, LowBitTensor):
            if moment.fmt != fmt:
                raise ValueError(f"{self.called(kind)} has codes {moment.fmt}; the kernels take {fmt}")
            if not self.param.is_contiguous():
                raise ValueError(
                    f"{self.called(kind)} is in 8-bit codes, whose blocks follow row-major order, but "
                    f"{self.called('params')} has strides {self.param.stride()}"
                )
        elif moment.dtype not in KERNEL_DTYPES:
            raise ValueError(f"{self.called(kind)} is {moment.dtype}; the kernels take {_names(KERNEL_DTYPES)}")

    def signature(self, grad: Tensor) -> Signature:
        """What this tensor has in common with others of its launch."""
        return Signature(
            self.param.device,
            self.param.dtype,
            grad.dtype,
            stored_dtype(self.exp_avg),
            stored_dtype(self.exp_avg_sq),
            self.max_exp_avg_sq is not None,
            None if self.master is None else self.master.dtype,
            self.num_slices(grad),
            self.stochastic_rounding,
        )


def addresses(moment: Tensor) -> tuple[int, int]:
    """The address of a moment, and of the scales of its codes (0 without codes)."""
    if isinstance(moment, LowBitTensor):
        return moment.codes.data_ptr(), moment.scale.data_ptr()
    return moment.data_ptr(), 0


def with_memory(value: object) -> list[Tensor]:
    """The tensors that store a value of a state: for 8-bit codes both codes and scales; none if it has no address.

    A user may keep anything beside what a step reads: numbers, sparse masks.
    """
    if isinstance(value, LowBitTensor):
        return [value.codes, value.scale]
    return [value] if isinstance(value, Tensor) and value.layout is torch.strided else []


def stored_dtype(moment: Tensor) -> torch.dtype:
    """The dtype that a moment is stored in; ``torch.uint8`` stands for 8-bit codes."""
    return torch.uint8 if isinstance(moment, LowBitTensor) else moment.dtype


def _stored_as(moment: Tensor) -> str:
    return "8-bit codes" if isinstance(moment, LowBitTensor) else str(moment.dtype)


def check_shared_steps(tensors: Sequence[PlannedTensor], grads: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` if tensors that share a step count differ in kind or ``present``: it must advance once."""
    first: dict[int, tuple[str, Any]] = {}
    for tensor, grad in zip(tensors, grads):
        flag = None if tensor.present is None else tensor.present.data_ptr()
        kind = tensor.signature(grad), flag
        name, other = first.setdefault(tensor.step.data_ptr(), (tensor.called("params"), kind))
        if other != kind:
            raise ValueError(
                f"{name} and {tensor.called('params')} share a step count, but differ in dtypes, options or 'present'; "
                "give each its own step tensor"
            )


def _check_memory(name: str, tensor: Tensor) -> None:
    """Raise if the tensor has no memory: it is a DTensor, or its storage was resized to nothing."""
    if is_dtensor(tensor):
        raise TypeError(f"{name} is a DTensor, and the kernels take memory of this rank; give its to_local()")
    if tensor.numel() and addresses(tensor)[0] == 0:
        raise ValueError(f"{name}, {description(tensor)}, has no memory: its storage was freed")


def _check_sign(name: str, tensor: Tensor) -> None:
    """Raise ``ValueError`` for a lazily negated tensor, which would have to be written negated."""
    if tensor.is_neg():
        raise ValueError(f"{name}, {description(tensor)}, is negated lazily; give its resolve_neg()")


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
