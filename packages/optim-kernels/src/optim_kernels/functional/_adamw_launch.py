"""The tensors of an AdamW plan that one launch updates: their tables on the device and the compiled kernel.

There are three tables. The chunk map and the records of the plan's tensors stay; the third table holds what a step may
change: first an ``address, slice stride`` for each gradient, then a row of hyperparameters for each group. A step in
which nothing changed uploads nothing, nor does one with other learning rates, which are arguments of the kernel where
there are few groups; any other step uploads the third table in one copy. A lone tensor needs no records: arguments say
where it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optim_kernels._dtensors import is_wrapper
from optim_kernels._graphs import is_capturing, keep_for_graphs
from optim_kernels._memory import ALIGNMENT, is_aligned
from optim_kernels._options import are_numbers, check_scalars, check_switches, check_values
from optim_kernels._tensor_lists import TensorList
from optim_kernels.functional._adamw_scalars import MOST_RATES, hyperparameter_rows, without_rates, write_betas
from optim_kernels.functional._adamw_tensor import PlannedTensor, addresses
from optim_kernels.functional._adamw_tuning import Tuning, code_chunks, division_of_one, tuning, tuning_of_one
from optim_kernels.functional._device_scalars import as_scalar, on_device, readable
from optim_kernels.functional._lists import description
from optim_kernels.multi_tensor import ChunkMap, ChunkSize, DeviceTable
from optim_kernels.reference.adamw import AdamWScalars
from optim_kernels.reference.storage import MASTER_KINDS

if TYPE_CHECKING:
    from optim_kernels._triton import Launch
    from optim_kernels.adamw_kernels import Record


class AdamWLaunch:
    """The tensors of one signature: their tables and the compiled kernel."""

    def __init__(self, members: list[PlannedTensor], grads: Sequence[Tensor], *, order: int, total: int) -> None:
        self.places = [member.place for member in members]
        # gradients that had to be brought into their parameter's layout, kept while the launch may read them
        self.copies: list[Tensor] = []
        # of their tensors no more than addresses is kept
        self._members = [member.parameter for member in members]
        self._signature = members[0].signature(grads[members[0].place])
        self._device = members[0].param.device
        self._slots = {step: slot for slot, step in enumerate(dict.fromkeys(m.step.data_ptr() for m in members))}
        self._bare_rows = [self._record(member) for member in members]
        self._states_aligned = [_is_aligned(member) for member in members]
        self._records, self._changing = DeviceTable(self._device), DeviceTable(self._device)
        # this launch's place among a step's launches on the device, and how many these are
        self._order, self._total = order, total
        self._own_aligned = self._states_aligned
        self._aligned: list[bool] = []
        # what the changing table holds, and whether it is uploaded
        self._addresses: list[int] = []
        self._kinds: list[Any] = []
        self._slice_strides: list[int] = []
        self._scalars: Sequence[AdamWScalars] = ()
        self._grad_rows = self._scalar_rows = b""
        self._is_uploaded = False
        # whether a capture fills the tables: they then have their content when that graph is replayed, for it alone
        self.filled_in_capture = False
        # learning rates and betas on the device, kept while the launch may read them
        self._scalar_tensors: list[Tensor] = []
        self._grads_view = self._scalars_view = self._changing.words
        # the words of the changing table of which the two are views
        self._viewed: Tensor | None = None
        # clip factor, gradient scale, found_inf
        self._factors: tuple[Tensor, ...] = ()
        self._is_of_one = False
        # the kernel's integer arguments, which stay as long as the gradients do, and rates
        self._numbers: tuple[int, ...] = ()
        self._rates: tuple[int, ...] = ()
        # programs and the kernel's ``num_full``; the map of a list's chunks
        self._division: tuple[int, int]
        self._map: Tensor | None = None
        self._rows: list[Record]

    def refresh(self, grads: TensorList) -> None:
        """Take note of this step's gradients, which are checked again only if they are of another kind than before."""
        if self.filled_in_capture:
            self._aligned, self._kinds, self.filled_in_capture = [], [], False
        addresses = grads.addresses
        are_alike = grads.kinds == self._kinds and not self.copies
        if are_alike and addresses == self._addresses:
            return
        # forget the old list first: a call that fails midway may leave tables of either list
        self._kinds = []
        if not are_alike or 0 in addresses:
            addresses = self._take(grads.tensors)
        aligned = [own and address % ALIGNMENT == 0 for own, address in zip(self._own_aligned, addresses)]
        if aligned != self._aligned:
            self._cut(aligned)
        self._numbers = self._division
        if self._is_of_one:
            self._numbers += self._arguments_of_one(addresses[0])
        else:
            rows = array("q", bytes(16 * len(addresses)))
            rows[0::2] = array("q", addresses)
            rows[1::2] = array("q", self._slice_strides)
            self._grad_rows = rows.tobytes()
            self._is_uploaded = False
        self._addresses, self._kinds = addresses, grads.kinds

    def _take(self, grads: Sequence[Tensor]) -> list[int]:
        """Check gradients of a new kind and copy those in another layout; return the addresses to read."""
        own = list(grads)
        self.copies = []
        for i, (member, grad) in enumerate(zip(self._members, own)):
            member.check_grad(grad)
            if (grad.dtype, member.num_slices(grad)) != (self._signature.grad, self._signature.num_slices):
                wanted = f"{self._signature.grad} and {self._signature.num_slices} slice(s)"
                raise ValueError(
                    f"{member.called('grads')} became {description(grad)}; the plan is for {wanted}: prepare it anew"
                )
            if is_wrapper(grad) or grad.is_neg() or not member.has_layout_of(grad):
                own[i] = member.in_own_layout(grad)
                self.copies.append(own[i])
        self._slice_strides = [
            grad.stride(0) if member.is_sliced(grad) else 0 for member, grad in zip(self._members, own)
        ]
        self._own_aligned = [
            aligned and is_aligned(stride * grad.element_size())
            for aligned, grad, stride in zip(self._states_aligned, own, self._slice_strides)
        ]
        return list(map(Tensor.data_ptr, own))

    def _cut(self, aligned: list[bool]) -> None:
        """Cut the tensors into chunks, write their records and bind the kernel to the number of chunks."""
        from optim_kernels.adamw_kernels import GROUPED_SIZE, MEMOS_SIZE

        self._aligned = []
        numels = [row.numel for row in self._bare_rows]
        on_gpu = self._device.type == "cuda"
        num_multiprocessors = torch.cuda.get_device_properties(self._device).multi_processor_count if on_gpu else 1
        tuned = tuning(self._signature, numels, num_multiprocessors)
        alone = division_of_one(numels[0], aligned[0], tuned, num_multiprocessors) if len(numels) == 1 else None
        # a list's tables are others than those of one tensor
        self._is_of_one, self._map, self._rates = alone is not None, None, ()
        self._scalars, self._grad_rows, self._is_uploaded = (), b"", False
        self._viewed = None
        if alone is not None:
            self._division, counts = alone, [alone[0]]
            tuned = tuning_of_one(tuned, numels[0], num_multiprocessors)
        else:
            sizes = [ChunkSize(tuned.chunk)] if tuned.chunk else code_chunks(num_multiprocessors)
            chunks = ChunkMap.build(numels, aligned, sizes, self._device, granule=tuned.chunk or 2 * tuned.tile)
            self._division, counts, self._map = (chunks.num_chunks, chunks.num_full), chunks.counts, chunks.words
        num_slots = len(self._slots)
        num_counters = GROUPED_SIZE if self._is_of_one and not tuned.chunk else num_slots
        self._counters = torch.zeros(num_counters, dtype=torch.int32, device=self._device)
        self._memos = torch.zeros(num_slots, MEMOS_SIZE, dtype=torch.int64, device=self._device)
        self._one = torch.ones((), dtype=torch.float32, device=self._device)
        self._zero = torch.zeros((), dtype=torch.float32, device=self._device)
        slot_chunks = dict.fromkeys(self._slots, 0)
        for row, count in zip(self._bare_rows, counts):
            slot_chunks[row.step] += count
        always = self._one.data_ptr()
        self._rows = [
            row._replace(present=row.present or always, slot_chunks=slot_chunks[row.step]) for row in self._bare_rows
        ]
        if not self._is_of_one:
            self._records.update(array("q", chain.from_iterable(self._rows)).tobytes())
        self._launch = self._bound_kernel(tuned)
        self._aligned, self.filled_in_capture = aligned, is_capturing(self._device)

    def _bound_kernel(self, tuned: Tuning) -> Launch:
        """The kernel for tensors of this signature, with its grid."""
        from optim_kernels import adamw_kernels as kernels
        from optim_kernels._triton import ALONE, FIRST, LATER, TRITON_DTYPES, Launch

        kind = self._signature
        stored = kernels.Format(
            param=TRITON_DTYPES[kind.param],
            grad=TRITON_DTYPES[kind.grad],
            exp_avg=TRITON_DTYPES[kind.exp_avg],
            exp_avg_sq=TRITON_DTYPES[kind.exp_avg_sq],
            amsgrad=kind.amsgrad,
            master=MASTER_KINDS[kind.master],
            stochastic=kind.stochastic_rounding,
            num_slices=kind.num_slices,
        )
        constants: tuple[Any, ...] = tuned.chunk, tuned.tile, tuned.tail_tile, stored
        if self._is_of_one:
            constants += (tuned.elements_first,)
        return Launch.overlapping(
            kernels.adamw_kernel_of_one if self._is_of_one else kernels.adamw_kernel,
            self._division[0],
            constants,
            self._device,
            overlap=ALONE if self._total == 1 else LATER if self._order else FIRST,
            num_warps=tuned.num_warps,
            maxnreg=tuned.max_registers,
        )

    def _record(self, member: PlannedTensor) -> Record:
        """The tensor's record, but for what depends on how it is cut."""
        from optim_kernels.adamw_kernels import Record

        exp_avg, exp_avg_scale = addresses(member.exp_avg)
        exp_avg_sq, exp_avg_sq_scale = addresses(member.exp_avg_sq)
        return Record(
            param=member.param.data_ptr(),
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            max_exp_avg_sq=_address(member.max_exp_avg_sq),
            master=_address(member.master),
            step=member.step.data_ptr(),
            present=_address(member.present),
            numel=member.param.numel(),
            slot=self._slots[member.step.data_ptr()],
            slot_chunks=0,
            group=member.group,
            place=member.index,
            start=member.start,
            seed=member.seed & 0xFFFFFFFF,
            exp_avg_scale=exp_avg_scale,
            exp_avg_sq_scale=exp_avg_sq_scale,
        )

    def get_ready(
        self,
        scalars: Sequence[AdamWScalars],
        *,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        clip_factor: Tensor | None,
    ) -> None:
        """Upload what ``run`` reads: hyperparameters, factors, and the gradients of the last ``refresh``."""
        numbers = are_numbers(chain.from_iterable(scalars))
        if not numbers:
            # groups that share all their hyperparameters, as those of `adamw_` mostly do, are checked once
            for each in {tuple(map(id, each)): each for each in scalars}.values():
                own = each._asdict()
                check_switches(maximize=own.pop("maximize"))
                check_scalars(**own)
                check_values([self._one], **own)
        if not numbers or scalars != self._scalars:
            self._set_scalars(scalars, numbers)
        if not self._is_uploaded:
            self._upload()
        if not numbers and any(on_device(beta) for each in scalars for beta in (each.beta1, each.beta2)):
            write_betas(self._scalars_view, scalars)
        self._factors = (
            as_scalar(clip_factor, self._one),
            as_scalar(grad_scale, self._one),
            as_scalar(found_inf, self._zero),
        )

    def run(self) -> None:
        """Launch on the current stream."""
        if is_capturing(self._device):
            self._records.keep_for_graph()
            self._changing.keep_for_graph()
            keep_for_graphs(self._counters, self._memos, self._one, self._zero, *self._scalar_tensors, *self.copies)
            if self._map is not None:
                keep_for_graphs(self._map)
        self._launch(self._tensors(), self._numbers + self._rates)

    def again(self) -> Callable[[], None]:
        """The launch of ``run`` outside of captures, as it is until the next ``refresh`` or ``get_ready``."""
        return self._launch.bound(self._tensors(), self._numbers + self._rates)

    def _tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the kernel takes, but for a lone tensor's, whose addresses are among its numbers."""
        changing = (self._scalars_view, self._counters, self._memos, *self._factors)
        if self._map is None:
            return changing
        return (self._map, self._records.words, self._grads_view, *changing)

    def _arguments_of_one(self, grad: int) -> tuple[int, ...]:
        """The kernel's arguments for a lone tensor, with its gradient at address ``grad``."""
        record = self._rows[0]
        return (
            record.param,
            grad,
            self._slice_strides[0],
            record.exp_avg,
            record.exp_avg_sq,
            record.max_exp_avg_sq,
            record.master,
            record.exp_avg_scale,
            record.exp_avg_sq_scale,
            record.step,
            record.present,
            record.numel,
            record.group,
            record.seed,
            record.place,
            record.start,
        )

    def renumber(self, scalars: Sequence[AdamWScalars]) -> bool:
        """Take other hyperparameters, all of them Python numbers; whether `again` is another launch by that."""
        before = self._scalars_view, self._rates
        self._set_scalars(scalars, True)
        if not self._is_uploaded:
            self._upload()
        return self._scalars_view is not before[0] or self._rates != before[1]

    def _set_scalars(self, scalars: Sequence[AdamWScalars], numbers: bool) -> None:
        # forget the old ones first: a call that fails midway, or is interrupted, may leave rates or rows of either
        self._scalars = ()
        if not numbers:
            scalars = [each._replace(lr=readable(each.lr, self._device)) for each in scalars]
        # first, since a number may be too large for a row
        rows = hyperparameter_rows(scalars)
        if self._is_of_one:
            rates, rows = without_rates(rows)
            self._rates = (rates[self._rows[0].group],)
        elif len(scalars) <= MOST_RATES:
            rates, rows = without_rates(rows)
            self._rates = (*rates, *[0] * (MOST_RATES - len(scalars)))
        else:
            self._rates = (0,) * MOST_RATES
        self._scalar_tensors = [] if numbers else [v for each in scalars for v in each if isinstance(v, Tensor)]
        if rows != self._scalar_rows:
            self._is_uploaded = False
            self._scalar_rows = rows
        # a copy, because the caller may write to its list
        self._scalars = list(scalars) if numbers else ()

    def _upload(self) -> None:
        self._changing.update(self._grad_rows + self._scalar_rows)
        words = self._changing.words
        # asked of the tensor, because a call that made it may have been interrupted before it made the views
        if words is not self._viewed:
            split = len(self._grad_rows) // 8
            self._grads_view = self._changing.part(0, split)
            self._scalars_view = self._changing.part(split)
            self._viewed = words
        self._is_uploaded = not is_capturing(self._device)


def _is_aligned(member: PlannedTensor) -> bool:
    """Whether parameter and state start at multiples of 16 bytes, and random bits at a block of 8 elements."""
    states = (addresses(state)[0] for _, state in member.states() if state is not None)
    blocks = not member.stochastic_rounding or member.start % 8 == 0
    return blocks and is_aligned(member.param.data_ptr(), *states)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
