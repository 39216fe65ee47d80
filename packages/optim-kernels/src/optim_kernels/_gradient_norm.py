"""Norms and scaling of gradients by the kernels: tables, scratch and launches behind ``optim_kernels.clip``."""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from optim_kernels import reference
from optim_kernels._dtensors import is_wrapper
from optim_kernels._impl import Impl, use_triton
from optim_kernels.multi_tensor import (
    ALIGNMENT,
    ChunkMap,
    ChunkSize,
    DeviceTable,
    KnownKinds,
    TensorList,
    is_capturing,
    is_cuda,
    is_dense,
    keep_for_graphs,
)

if TYPE_CHECKING:
    from optim_kernels._triton import Launch

# Elements of a tile of the norm (four make a chunk) and threads of a program; programs for each multiprocessor of the
# device; bytes of a tile of the scaling.
TILE, NUM_WARPS, PROGRAMS_PER_SM = 1024, 4, 8
SCALED_BYTES = 4096
# Lists of gradients of one length that a ``GradientNorms`` for all remembers, by their first address.
MOST_LISTS = 32
# Calls in graphs that find a zeroed counter; where there are more, a graph zeroes its own.
MOST_CAPTURED = 255


class GradientNorm:
    """The norm of gradients of one device and dtype in one launch, and their scaling in another."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self._dtype = device, dtype
        self._rows = DeviceTable(device)
        # one for eager calls, and for each captured one its own
        self._counters = list(torch.zeros(1 + MOST_CAPTURED, dtype=torch.int32, device=device).unbind())
        self._counter = self._counters.pop()
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        # the last norm's; the norm itself is a tensor of its own, for the caller keeps it
        self.factor = torch.zeros((), dtype=torch.float32, device=device)
        self._addresses: list[int] = []
        self._numels: list[int] = []
        self._aligned: list[bool] = []
        self._launches: dict[Any, Launch] = {}
        self._chunks: ChunkMap
        self._partials: Tensor

    def knows(self, addresses: list[int], numels: list[int]) -> bool:
        """Whether these gradients were the last."""
        return addresses == self._addresses and numels == self._numels

    def for_graph(self) -> GradientNorm:
        """One for a call that is being captured and may be replayed beside others: the same tables, own scratch."""
        own = copy.copy(self)
        own._counter = self._counters.pop() if self._counters else torch.zeros_like(self._counter)
        own._total, own._partials = torch.empty_like(self._total), torch.empty_like(self._partials)
        own.factor = torch.empty_like(self.factor)
        return own

    def refresh(self, addresses: list[int], numels: list[int]) -> None:
        """Take note of where the gradients are; nothing is uploaded unless that changed.

        The lists are kept, and recognised when they come again.
        """
        if addresses is self._addresses and numels is self._numels:
            return
        if self.knows(addresses, numels):
            self._addresses, self._numels = addresses, numels
            return
        if 0 in addresses and any(numel and not address for address, numel in zip(addresses, numels)):
            raise ValueError("a gradient has elements but no memory: its storage was freed")
        # nothing is known until all is done: a call that fails may leave tables of either list
        self._addresses = []
        aligned = [address % ALIGNMENT == 0 for address in addresses]
        if aligned != self._aligned or numels != self._numels:
            self._cut(numels, aligned)
        rows = array("q", bytes(8 * 2 * len(addresses)))
        rows[0::2], rows[1::2] = array("q", addresses), array("q", numels)
        self._rows.update(rows.tobytes())
        if is_capturing(self.device):
            # tables that a graph fills are there when it has been replayed, for it alone
            self._aligned = []
        else:
            self._addresses, self._numels = addresses, numels

    def _cut(self, numels: list[int], aligned: list[bool]) -> None:
        self._aligned = []
        self._chunks = ChunkMap.build(numels, aligned, [ChunkSize(4 * TILE)], self.device)
        self._num_programs = min(self._chunks.num_chunks, _num_programs(self.device))
        self._partials = torch.empty(self._num_programs, dtype=torch.float64, device=self.device)
        self._launches.clear()
        self._aligned = aligned

    def _keep_if_captured(self) -> None:
        if is_capturing(self.device):
            self._rows.keep_for_graph()
            keep_for_graphs(self._chunks.words, self._partials, self._counter, self._total, self.factor)

    def norm(self, norm_type: float, max_norm: float, total: Tensor | None = None) -> Tensor:
        """The norm, fp32; ``factor`` is then what clips it, and the fp64 ``total`` is Σ|g|^p (or the maximum)."""
        launch = self._launches.get(norm_type)
        if launch is None:
            launch = self._launches[norm_type] = self._norm_launch(norm_type)
        self._keep_if_captured()
        chunks, total, norm = self._chunks, self._total if total is None else total, torch.empty_like(self.factor)
        launch(
            (chunks.words, self._rows.words, self._partials, self._counter, total, norm, self.factor),
            (chunks.num_chunks, chunks.num_full, float(max_norm)),
        )
        return norm

    def scale_(self, factor: Tensor) -> None:
        """Multiply the gradients by the fp32 ``factor`` unless it is 1 or more."""
        launch = self._launches.get("scale")
        if launch is None:
            launch = self._launches["scale"] = self._scale_launch()
        self._keep_if_captured()
        launch((self._chunks.words, self._rows.words, factor), (self._chunks.num_chunks, self._chunks.num_full))

    def _norm_launch(self, norm_type: float) -> Launch:
        from optim_kernels import clip_kernels as kernels
        from optim_kernels._triton import TRITON_DTYPES

        norm = kernels.INF_NORM if norm_type == math.inf else int(norm_type)
        vector = 16 // self._dtype.itemsize
        partials = 1 << (self._num_programs - 1).bit_length()
        return self._launch(kernels.norm_kernel, (TRITON_DTYPES[self._dtype], norm, TILE, vector, partials))

    def _scale_launch(self) -> Launch:
        from optim_kernels import clip_kernels as kernels
        from optim_kernels._triton import TRITON_DTYPES

        constants = (TRITON_DTYPES[self._dtype], 4 * TILE, SCALED_BYTES // self._dtype.itemsize)
        return self._launch(kernels.scale_kernel, constants)

    def _launch(self, kernel: Any, constants: tuple[Any, ...]) -> Launch:
        """One under whose end the next may start, where the device can do that."""
        from optim_kernels._triton import ALONE, NO_OVERLAP, Launch, can_overlap

        overlap = ALONE if can_overlap(self.device) else NO_OVERLAP
        options: dict[str, Any] = {"launch_pdl": True} if overlap else {}
        return Launch(kernel, self._num_programs, (*constants, overlap), num_warps=NUM_WARPS, **options)


class _Split(NamedTuple):
    """A list of gradients by device and dtype."""

    kinds: list[Any]
    addresses: list[int]
    devices: list[torch.device]
    # of each part: device, dtype, and the places of its gradients in the list
    parts: list[tuple[torch.device, torch.dtype, list[int]]]
    # whether the kernels can read all of them where they are
    is_dense: bool


class GradientNorms:
    """Norms of gradients of any devices and dtypes: one ``GradientNorm`` for each, kept from step to step.

    Args:
        any_stream: whether calls come from anywhere: for many lists, and in several streams at once, each of which then
            has scratch of its own. Otherwise it is one list, whose addresses may change.
    """

    def __init__(self, impl: Impl = "auto", *, any_stream: bool = False) -> None:
        self._impl = impl
        self._any_stream = any_stream
        self._parts: dict[Any, dict[int, GradientNorm]] = {}
        self._split: _Split | None = None
        self._kinds = KnownKinds()

    def norm_and_factor(
        self, grads: Sequence[Tensor] | TensorList, norm_type: float, max_norm: float
    ) -> tuple[Tensor, Tensor]:
        """``(norm, clip factor)``, 0-d on the first gradient's device, without a synchronisation on one device.

        The factor is overwritten by the next call.
        """
        seen = self.look_at(grads)
        parts = self._refreshed(seen, norm_type)
        if parts is not None and len(parts) == 1:
            return parts[0].norm(norm_type, max_norm), parts[0].factor
        norm = self._combined(parts, grads.tensors if isinstance(grads, TensorList) else grads, norm_type)
        return norm, reference.clip_factor(norm, max_norm)

    def clip_(self, grads: Sequence[Tensor], norm_type: float, max_norm: float) -> Tensor | None:
        """The norm of the gradients, scaled down to ``max_norm``; ``None`` if the kernels cannot scale them."""
        seen = self.look_at(grads)
        parts = self._refreshed(seen, norm_type, in_place=True)
        if seen is None or parts is None:
            return None
        if len(parts) == 1:
            _count_as_changed(seen)
            norm = parts[0].norm(norm_type, max_norm)
            parts[0].scale_(parts[0].factor)
            return norm
        norm, factor = self.norm_and_factor(seen, norm_type, max_norm)
        self.scale_(seen, factor)
        return norm

    def norm(self, grads: Sequence[Tensor], norm_type: float) -> Tensor:
        """The norm alone."""
        return self.norm_and_factor(grads, norm_type, 1.0)[0]

    def norm_in_one_launch(self, grads: Sequence[Tensor], norm_type: float) -> Tensor | None:
        """The norm alone, by kernels alone; ``None`` where more is needed."""
        seen = self.look_at(grads)
        parts = self._refreshed(seen, norm_type)
        return parts[0].norm(norm_type, 1.0) if parts is not None and len(parts) == 1 else None

    def totals(self, grads: Sequence[Tensor], norm_type: float) -> list[Tensor]:
        """Σ|g|^p, or the maximum, of the gradients of each device and dtype: 0-d fp64."""
        seen = self.look_at(grads)
        parts = self._refreshed(seen, norm_type)
        return [] if parts is None else [self._total(part, norm_type) for part in parts]

    def scale_(self, grads: Sequence[Tensor] | TensorList, factor: Tensor) -> bool:
        """Multiply by the factor; ``False``, and nothing done, if the kernels cannot."""
        seen = self.look_at(grads)
        parts = self._refreshed(seen, 2.0, in_place=True)
        if seen is None or parts is None:
            return False
        _count_as_changed(seen)
        for part in parts:
            part.scale_(factor.to(device=part.device, dtype=torch.float32))
        return True

    def look_at(self, grads: Sequence[Tensor] | TensorList) -> TensorList | None:
        """The gradients as the kernels take them, to be looked at once for several calls; ``None`` if they cannot."""
        if isinstance(grads, TensorList):
            return grads
        if self._impl == "torch" or not grads or (self._impl == "auto" and not grads[0].is_cuda):
            return None
        try:
            return TensorList(grads, self._kinds)
        except RuntimeError:  # a sparse tensor has no address
            return None

    def _refreshed(
        self, seen: TensorList | None, norm_type: float, *, in_place: bool = False
    ) -> list[GradientNorm] | None:
        """The parts that know these gradients; ``None`` if the kernels cannot read one of them.

        The caller keeps ``seen`` until it has launched: with it go the copies of gradients that are not dense.
        """
        if seen is None or not seen.tensors or not reference.is_kernel_norm(norm_type):
            return None
        split = self._split_of(seen)
        if split is None:
            return None
        addresses, numels = split.addresses, split.kinds[1]
        if not split.is_dense:
            if in_place:
                return None
            readable = [grad if is_dense(grad) else grad.detach().contiguous() for grad in seen.tensors]
            seen.copies = [copy for copy, grad in zip(readable, seen.tensors) if copy is not grad]
            addresses = list(map(Tensor.data_ptr, readable))
        parts = []
        for device, dtype, places in split.parts:
            own_addresses, own_numels = addresses, numels
            if len(split.parts) > 1:
                own_addresses, own_numels = ([values[place] for place in places] for values in (addresses, numels))
            part = self._part(device, dtype, own_addresses, own_numels)
            part.refresh(own_addresses, own_numels)
            parts.append(part)
        return parts

    def _part(self, device: torch.device, dtype: torch.dtype, addresses: list[int], numels: list[int]) -> GradientNorm:
        """The part that knows these gradients, or else one that has to learn where they are."""
        kind = (device, dtype, len(addresses), _stream(device) if self._any_stream else 0)
        if self._any_stream and is_capturing(device):
            # with tables that know the gradients, if there was a warm-up in whatever stream: else every replay would
            # repeat the upload
            for other, parts in self._parts.items():
                if other[:-1] == kind[:-1] and addresses[0] in parts and parts[addresses[0]].knows(addresses, numels):
                    return parts[addresses[0]].for_graph()
            return GradientNorm(device, dtype)
        if kind not in self._parts and is_capturing(device):
            return GradientNorm(device, dtype)
        parts = self._parts.setdefault(kind, {})
        part = parts.get(addresses[0])
        if part is None:
            oldest = next(iter(parts), 0)
            known = MOST_LISTS if self._any_stream else 1
            part = parts[addresses[0]] = parts.pop(oldest) if len(parts) == known else GradientNorm(device, dtype)
        return part

    def _split_of(self, grads: TensorList) -> _Split | None:
        """The gradients by device and dtype, as last time if they are as then; ``None`` if the kernels cannot."""
        split = self._split
        if split is not None and grads.kinds == split.kinds and grads.addresses == split.addresses:
            return split
        devices = [grad.device for grad in grads.tensors]
        if split is None or grads.kinds != split.kinds or devices != split.devices:
            if not all(use_triton(self._impl, grad, f"gradient {i}") for i, grad in enumerate(grads.tensors)):
                return None
            # those of DTensors, say: torch adds up over ranks
            if any(map(is_wrapper, grads.tensors)):
                return None
            by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
            for place, grad in enumerate(grads.tensors):
                by_kind.setdefault((grad.device, grad.dtype), []).append(place)
            parts = [(*kind, places) for kind, places in by_kind.items()]
            dense = all(map(is_dense, grads.tensors))
        else:
            parts, dense = split.parts, split.is_dense
        split = self._split = _Split(grads.kinds, grads.addresses, devices, parts, dense)
        return split

    def _combined(self, parts: list[GradientNorm] | None, grads: Sequence[Tensor], norm_type: float) -> Tensor:
        if parts is None:
            return reference.total_norm(grads, norm_type)
        totals = torch.stack([self._total(part, norm_type).to(grads[0].device) for part in parts])
        if norm_type == math.inf:
            norm = totals.amax()
        else:
            norm = totals.sum().sqrt() if norm_type == 2 else totals.sum()
        return norm.to(torch.float32)

    @staticmethod
    def _total(part: GradientNorm, norm_type: float) -> Tensor:
        total = torch.empty((), dtype=torch.float64, device=part.device)
        part.norm(norm_type, 1.0, total)
        return total


def _count_as_changed(grads: TensorList) -> None:
    """For autograd, which then refuses to differentiate through values that are gone."""
    torch.autograd.graph.increment_version(grads.tensors)


def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def _stream(device: torch.device) -> int:
    """The stream that a launch on the device would go to."""
    if not is_cuda(device):
        return 0
    from optim_kernels._triton import current_stream

    return current_stream(device)
