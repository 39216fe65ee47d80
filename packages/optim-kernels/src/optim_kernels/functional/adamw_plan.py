"""Everything about an AdamW step that stays the same from step to step: checked and put on the device once.

A plan belongs to given parameters and states. Tensors of one device and one set of dtypes form a launch; a launch has
a chunk map, a table of records, a table of gradient addresses and a table of hyperparameters
(``optim_kernels.adamw_kernels`` says what is in them).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optim_kernels._impl import KERNEL_DTYPES, is_interpreted
from optim_kernels.multi_tensor import ChunkMap, DeviceTable, is_aligned, is_dense, keep_for_graphs
from optim_kernels.reference.adamw import AdamWScalars, Scalar


class Tuning(NamedTuple):
    """Elements of a chunk, elements that a program has in registers at a time, and warps of a program."""

    chunk: int
    tile: int
    num_warps: int


def tuning(bytes_per_element: int) -> Tuning:
    """The fastest of those measured on an H200 (``benchmarks/NOTES.md``), by the bytes read for an element.

    Narrow elements need few bytes and many instructions, so a program's fixed cost is spread over two tiles.
    """
    if is_interpreted():
        return Tuning(4096, 4096, 1)
    return Tuning(2048, 1024, 4) if bytes_per_element <= 12 else Tuning(1024, 1024, 2)


class AdamWPlan:
    """A planned AdamW step over given tensors; ``step`` runs it with this step's gradients and hyperparameters.

    ``AdamWPlan()`` is empty until ``prepare``, which plans anew whenever it is given other tensors than before.
    """

    def __init__(self) -> None:
        self._launches: list[_AdamWLaunch] = []
        # the arguments of the last `prepare`: the tensors themselves, so that none of their ids is given away
        self._planned: list[Any] = []
        self.num_tensors = 0

    @classmethod
    def build(
        cls, params: Sequence[Tensor], grads: Sequence[Tensor], *states: Sequence[Tensor], **options: Any
    ) -> AdamWPlan:
        """A plan for these tensors; the arguments are those of ``prepare``."""
        plan = cls()
        plan.prepare(params, grads, *states, **options)
        return plan

    def prepare(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        *,
        steps: Tensor | Sequence[Tensor],
        max_exp_avg_sqs: Sequence[Tensor | None] | None = None,
        masters: Sequence[Tensor | None] | None = None,
        groups: Sequence[int] | None = None,
        stochastic_rounding: bool | Sequence[bool] = False,
        seed: int | Sequence[int] = 0,
        indices: Sequence[int] | None = None,
        starts: Sequence[int] | None = None,
        present: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Check the tensors, sort them into launches and put their records on the device, unless that is done already.

        The arguments are those of ``adamw_``; ``groups`` says for each tensor which of the hyperparameters given to
        ``step`` are its own.

        Raises:
            ValueError: a tensor whose shape, dtype, device or memory layout the kernels cannot take.
        """
        count = len(params)
        each_step = [steps] * count if isinstance(steps, Tensor) else steps
        none: list[None] = [None] * count
        rows = list(
            zip(
                params,
                exp_avgs,
                exp_avg_sqs,
                max_exp_avg_sqs or none,
                masters or none,
                each_step,
                present or none,
                groups or [0] * count,
                range(count) if indices is None else indices,
                starts or [0] * count,
                stochastic_rounding if isinstance(stochastic_rounding, Sequence) else [stochastic_rounding] * count,
                seed if isinstance(seed, Sequence) else [seed] * count,
                strict=True,
            )
        )
        layouts = [(grad.dtype, grad.dim(), len(grad) if grad.dim() else 0) for grad in grads]
        planned = [layouts, *(item for row in rows for item in row)]
        if len(planned) == len(self._planned) and all(map(_same, planned, self._planned)):
            return
        tensors = [_Tensor(i, *row) for i, row in enumerate(rows)]
        by_signature: dict[tuple[Any, ...], list[_Tensor]] = {}
        for tensor, grad in zip(tensors, grads, strict=True):
            tensor.check(grad)
            by_signature.setdefault(tensor.signature(grad), []).append(tensor)
        _check_shared_steps(tensors, grads)
        self._launches = [_AdamWLaunch(members, grads) for members in by_signature.values()]
        self._planned = planned
        self.num_tensors = count

    @property
    def num_launches(self) -> int:
        """Kernel launches of a step."""
        return len(self._launches)

    @property
    def num_copied(self) -> int:
        """Gradients that the last step copied, because they lie in memory otherwise than their parameter."""
        return sum(len(launch.copies) for launch in self._launches)

    def refresh(self, grads: Sequence[Tensor]) -> None:
        """Take note of this step's gradients; tables are uploaded only where an address changed."""
        if len(grads) != self.num_tensors:
            raise ValueError(f"the plan is for {self.num_tensors} gradients, got {len(grads)}")
        for launch in self._launches:
            launch.refresh(grads)

    def step(
        self,
        grads: Sequence[Tensor],
        scalars: Sequence[AdamWScalars],
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        clip_factor: Tensor | None = None,
    ) -> None:
        """One step; ``scalars`` holds the hyperparameters of each group."""
        self.refresh(grads)
        for launch in self._launches:
            launch.run(scalars, grad_scale, found_inf, clip_factor)


class _Tensor:
    """One parameter with its state, as the kernel sees it."""

    def __init__(
        self,
        place: int,
        param: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        max_exp_avg_sq: Tensor | None,
        master: Tensor | None,
        step: Tensor,
        present: Tensor | None,
        group: int,
        index: int,
        start: int,
        stochastic_rounding: bool,
        seed: int,
    ) -> None:
        self.place = place
        self.param = param
        self.exp_avg = exp_avg
        self.exp_avg_sq = exp_avg_sq
        self.max_exp_avg_sq = max_exp_avg_sq
        self.master = master
        self.step = step
        self.present = present
        self.group = group
        self.index = index
        self.start = start
        self.stochastic_rounding = stochastic_rounding
        self.seed = seed

    def states(self) -> Iterable[tuple[str, Tensor | None]]:
        return (
            ("exp_avgs", self.exp_avg),
            ("exp_avg_sqs", self.exp_avg_sq),
            ("max_exp_avg_sqs", self.max_exp_avg_sq),
            ("masters", self.master),
        )

    def check(self, grad: Tensor) -> None:
        """Raise ``ValueError`` unless the kernels can update these tensors."""
        p, name = self.param, f"params[{self.place}]"
        if p.dtype not in KERNEL_DTYPES:
            raise ValueError(f"{name} is {p.dtype}; the kernels take {_names(KERNEL_DTYPES)}")
        if not is_dense(p):
            raise ValueError(f"{name} has strides {p.stride()} for shape {tuple(p.shape)}: its elements are not dense")
        for kind, state in self.states():
            if state is None:
                continue
            if state.shape != p.shape or state.device != p.device or not _same_layout(state, p):
                raise ValueError(
                    f"{kind}[{self.place}] must be like {name}, {_description(p)}, but is {_description(state)}"
                )
        for kind, moment in (("exp_avgs", self.exp_avg), ("exp_avg_sqs", self.exp_avg_sq)):
            if moment.dtype not in KERNEL_DTYPES:
                raise ValueError(f"{kind}[{self.place}] is {moment.dtype}; the kernels take {_names(KERNEL_DTYPES)}")
        if self.max_exp_avg_sq is not None and self.max_exp_avg_sq.dtype != self.exp_avg_sq.dtype:
            raise ValueError(
                f"max_exp_avg_sqs[{self.place}] is {self.max_exp_avg_sq.dtype}, exp_avg_sqs[{self.place}] "
                f"{self.exp_avg_sq.dtype}; they must agree"
            )
        if self.master is not None and self.master.dtype not in (torch.float32, torch.int16):
            raise ValueError(f"masters[{self.place}] must be float32 or int16, is {self.master.dtype}")
        if self.master is not None and self.master.dtype == torch.int16 and p.dtype != torch.bfloat16:
            raise ValueError(
                f"masters[{self.place}] is int16, which completes a bfloat16 parameter; {name} is {p.dtype}"
            )
        for kind, scalar in (("steps", self.step), ("present", self.present)):
            if scalar is not None and (
                scalar.numel() != 1 or scalar.dtype != torch.float32 or scalar.device != p.device
            ):
                raise ValueError(
                    f"{kind} of {name} must be one float32 element on {p.device}, is {_description(scalar)}"
                )
        self.check_grad(grad)

    def check_grad(self, grad: Tensor) -> None:
        """Raise ``ValueError`` unless ``grad`` is a gradient of this parameter that the kernels can read."""
        p = self.param
        if grad.dtype not in KERNEL_DTYPES:
            raise ValueError(f"grads[{self.place}] is {grad.dtype}; the kernels take {_names(KERNEL_DTYPES)}")
        sliced = grad.dim() == p.dim() + 1
        if (
            (grad.shape[1:] if sliced else grad.shape) != p.shape
            or grad.device != p.device
            or (sliced and not len(grad))
        ):
            raise ValueError(
                f"grads[{self.place}] must be like params[{self.place}], {_description(p)}, or a stack of such, but is "
                f"{_description(grad)}"
            )

    def has_layout_of(self, grad: Tensor) -> bool:
        """Whether ``grad``, or each slice of it, lies in memory as the parameter does."""
        return _same_layout(grad[0] if grad.dim() > self.param.dim() else grad, self.param)

    def in_own_layout(self, grad: Tensor) -> Tensor:
        """A copy of ``grad`` that lies in memory as the parameter does."""
        p, sliced = self.param, grad.dim() > self.param.dim()
        pieces = grad if sliced else grad[None]
        flat = torch.empty(pieces.numel(), dtype=grad.dtype, device=grad.device)
        copy = flat.as_strided(pieces.shape, (p.numel(), *p.stride())).copy_(pieces)
        return copy if sliced else copy[0]

    def signature(self, grad: Tensor) -> tuple[Any, ...]:
        """What tensors of one launch have in common."""
        return (
            self.param.device,
            self.param.dtype,
            grad.dtype,
            self.exp_avg.dtype,
            self.exp_avg_sq.dtype,
            self.max_exp_avg_sq is not None,
            None if self.master is None else self.master.dtype,
            len(grad) if grad.dim() > self.param.dim() else 1,
            self.present is not None,
            self.stochastic_rounding,
        )


def _check_shared_steps(tensors: Sequence[_Tensor], grads: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` if tensors share a step count that is not advanced once: in one launch, by all or none."""
    first: dict[int, tuple[int, Any]] = {}
    for tensor, grad in zip(tensors, grads):
        flag = None if tensor.present is None else tensor.present.data_ptr()
        kind = tensor.signature(grad), flag
        place, other = first.setdefault(tensor.step.data_ptr(), (tensor.place, kind))
        if other != kind:
            raise ValueError(
                f"params[{place}] and params[{tensor.place}] share a step count, but differ in dtypes, options or "
                "'present'; give each its own step tensor"
            )


class _AdamWLaunch:
    """The tensors of one signature: their tables and the compiled kernel."""

    def __init__(self, members: list[_Tensor], grads: Sequence[Tensor]) -> None:
        self._members = members
        self._signature = members[0].signature(grads[members[0].place])
        self._device = members[0].param.device
        self._slots = {step: slot for slot, step in enumerate(dict.fromkeys(m.step.data_ptr() for m in members))}
        self._counters = torch.zeros(len(self._slots), dtype=torch.int32, device=self._device)
        self._one = torch.ones((), dtype=torch.float32, device=self._device)
        self._zero = torch.zeros((), dtype=torch.float32, device=self._device)
        self._records, self._grads, self._hyperparameters = (DeviceTable(self._device) for _ in range(3))
        self._places = [member.place for member in members]
        self._key: list[Any] = []
        # learning rates on the device, kept while the launch may read them
        self._rates: list[Scalar] = []
        # gradients that had to be brought into their parameter's layout, kept while the launch may read them
        self.copies: list[Tensor] = []
        self._aligned: list[bool] | None = None
        self._chunks: ChunkMap

    def refresh(self, grads: Sequence[Tensor]) -> None:
        """Bring the table of gradient addresses up to date, and the chunks if an alignment changed."""
        own = [grads[place] for place in self._places]
        key = [*map(Tensor.data_ptr, own), *map(Tensor.stride, own), *map(Tensor.numel, own), *map(_dtype, own)]
        if key == self._key and not self.copies:
            return
        self.copies = []
        for i, (member, grad) in enumerate(zip(self._members, own)):
            member.check_grad(grad)
            if member.signature(grad) != self._signature:
                raise ValueError(f"grads[{member.place}] became {_description(grad)}; the plan is for another dtype")
            if not member.has_layout_of(grad):
                own[i] = member.in_own_layout(grad)
                self.copies.append(own[i])
        self._key = key
        slice_strides = [
            grad.stride(0) if grad.dim() > member.param.dim() else 0 for member, grad in zip(self._members, own)
        ]
        aligned = [self._is_aligned(*each) for each in zip(self._members, own, slice_strides)]
        if aligned != self._aligned:
            self._cut(aligned)
        rows = array("q")
        for grad, stride in zip(own, slice_strides):
            rows.extend((grad.data_ptr(), stride))
        self._grads.update(rows)

    def _is_aligned(self, member: _Tensor, grad: Tensor, slice_stride: int) -> bool:
        states = [state.data_ptr() for _, state in member.states() if state is not None]
        return is_aligned(member.param.data_ptr(), grad.data_ptr(), slice_stride * grad.element_size(), *states) and (
            not member.stochastic_rounding or member.start % 8 == 0
        )

    def _cut(self, aligned: list[bool]) -> None:
        """Cut the tensors into chunks, write their records and bind the kernel to the number of chunks."""
        from optim_kernels import adamw_kernels as kernels
        from optim_kernels._triton import TRITON_DTYPES, Launch

        members = self._members
        _, p_dtype, g_dtype, m_dtype, v_dtype, amsgrad, master_dtype, num_slices, presence, stochastic = self._signature
        tuned = tuning(sum(dtype.itemsize for dtype in (p_dtype, g_dtype, m_dtype, v_dtype)))
        self._aligned = aligned
        self._chunks = ChunkMap.build([m.param.numel() for m in members], aligned, tuned.chunk, self._device)
        slot_chunks = dict.fromkeys(self._slots, 0)
        for member, chunks in zip(members, self._chunks.tensors):
            slot_chunks[member.step.data_ptr()] += chunks.num_chunks
        records = array("q")
        for member, chunks in zip(members, self._chunks.tensors):
            record = kernels.Record(
                param=member.param.data_ptr(),
                exp_avg=member.exp_avg.data_ptr(),
                exp_avg_sq=member.exp_avg_sq.data_ptr(),
                max_exp_avg_sq=0 if member.max_exp_avg_sq is None else member.max_exp_avg_sq.data_ptr(),
                master=0 if member.master is None else member.master.data_ptr(),
                step=member.step.data_ptr(),
                present=0 if member.present is None else member.present.data_ptr(),
                numel=member.param.numel(),
                first_full=chunks.first_full,
                first_masked=chunks.first_masked,
                slot=self._slots[member.step.data_ptr()],
                slot_chunks=slot_chunks[member.step.data_ptr()],
                group=member.group,
                place=member.index,
                start=member.start,
                seed=member.seed & 0xFFFFFFFF,
            )
            records.extend(record)
        self._records.update(records)

        self._launch = Launch(
            kernels.adamw_kernel,
            self._chunks.num_chunks,
            (
                tuned.chunk,
                tuned.tile,
                tuned.tile if is_interpreted() else 128,
                *(TRITON_DTYPES[dtype] for dtype in (p_dtype, g_dtype, m_dtype, v_dtype)),
                amsgrad,
                {None: kernels.NO_MASTER, torch.float32: kernels.FP32_MASTER, torch.int16: kernels.SPLIT16}[
                    master_dtype
                ],
                stochastic,
                num_slices,
                presence,
            ),
            num_warps=tuned.num_warps,
        )

    def run(
        self,
        scalars: Sequence[AdamWScalars],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        clip_factor: Tensor | None,
    ) -> None:
        """Launch on the current stream."""
        rows = array("d")
        self._rates = [self._readable(each.lr) for each in scalars]
        for each, lr in zip(scalars, self._rates):
            rows.extend(hyperparameter_row(each._replace(lr=lr)))
        self._hyperparameters.update(rows)
        rates = [lr for lr in self._rates if isinstance(lr, Tensor)]
        keep_for_graphs(self._chunks.owners, self._counters, self._one, self._zero, *rates, *self.copies)
        self._launch(
            (
                self._chunks.owners,
                self._records.read(),
                self._grads.read(),
                self._hyperparameters.read(),
                self._counters,
                self._on_device(clip_factor, self._one),
                self._on_device(grad_scale, self._one),
                self._on_device(found_inf, self._zero),
            ),
            (self._chunks.num_chunks, self._chunks.num_full),
        )

    def _readable(self, lr: Scalar) -> Scalar:
        """A learning rate that the kernel can read: fp32 on its device, or a number."""
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            return lr.to(device=self._device, dtype=torch.float32)
        return lr

    def _on_device(self, value: Tensor | None, neutral: Tensor) -> Tensor:
        return neutral if value is None else value.to(device=self._device, dtype=torch.float32)


def hyperparameter_row(scalars: AdamWScalars) -> list[float]:
    """A group's row of the hyperparameter table (``adamw_kernels.Hyperparameters``)."""
    lr, beta1, beta2 = scalars.lr, _number(scalars.beta1), _number(scalars.beta2)
    address = 0
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        address, lr = lr.data_ptr(), 0.0
    return [
        float(lr),
        array("d", array("q", [address]).tobytes())[0],
        beta1,
        beta2,
        math.log2(beta1) if beta1 > 0 else -math.inf,
        math.log2(beta2) if beta2 > 0 else -math.inf,
        scalars.eps,
        scalars.weight_decay,
        -1.0 if scalars.maximize else 1.0,
    ]


_dtype = attrgetter("dtype")


def _same(a: Any, b: Any) -> bool:
    """Whether two planned arguments are one tensor, or equal numbers."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


def _number(x: Scalar) -> float:
    return x.item() if isinstance(x, Tensor) else x


def _same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape visit memory in the same order; strides of single elements do not matter."""
    return a.stride() == b.stride() or all(s == t for s, t, n in zip(a.stride(), b.stride(), a.shape) if n != 1)


def _description(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()} on {tensor.device}"


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
