"""The tensors of an AdamW plan that one launch updates: their tables on the device and the compiled kernel."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optim_kernels._impl import is_interpreted
from optim_kernels.functional._adamw_scalars import hyperparameter_row
from optim_kernels.functional._adamw_tensor import PlannedTensor, description
from optim_kernels.multi_tensor import ChunkMap, DeviceTable, is_aligned, keep_for_graphs
from optim_kernels.reference.adamw import AdamWScalars, Scalar

_dtype = attrgetter("dtype")


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


class AdamWLaunch:
    """The tensors of one signature: their tables and the compiled kernel."""

    def __init__(self, members: list[PlannedTensor], grads: Sequence[Tensor]) -> None:
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
                raise ValueError(f"grads[{member.place}] became {description(grad)}; the plan is for another dtype")
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

    def _is_aligned(self, member: PlannedTensor, grad: Tensor, slice_stride: int) -> bool:
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
