"""Norms and scaling of gradients by the kernels: tables, scratch and launches behind ``optim_kernels.clip``."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from optim_kernels import reference
from optim_kernels._impl import Impl, is_interpreted, use_triton
from optim_kernels.multi_tensor import ChunkMap, DeviceTable, is_aligned, is_dense, keep_for_graphs

# Elements of a tile (four make a chunk) and threads of a program; programs for each multiprocessor of the device.
TILE, NUM_WARPS, PROGRAMS_PER_SM = 1024, 4, 8
INTERPRETED_TILE = 1024


class GradientNorm:
    """The norm of gradients of one device and dtype in one launch, and their scaling in another."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self._dtype = device, dtype
        self._rows = DeviceTable(device)
        self._counter = torch.zeros((), dtype=torch.int32, device=device)
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        self._key: list[tuple[int, int]] = []
        self._chunked: tuple[list[int], list[bool]] | None = None
        self._launches: dict[Any, Callable[..., None]] = {}
        self._chunks: ChunkMap
        self._partials: Tensor

    def refresh(self, grads: Sequence[Tensor]) -> None:
        """Take note of where the gradients are; nothing is uploaded unless that changed."""
        key = [(grad.data_ptr(), grad.numel()) for grad in grads]
        if key != self._key:
            self._key = key
            chunked = [numel for _, numel in key], [is_aligned(address) for address, _ in key]
            if chunked != self._chunked:
                self._cut(*chunked)
        rows = array("q")
        for (address, numel), chunks in zip(key, self._chunks.tensors):
            rows.extend((address, numel, chunks.first_full, chunks.first_masked))
        self._rows.update(rows)

    def _cut(self, numels: list[int], aligned: list[bool]) -> None:
        self._chunked = numels, aligned
        self._tile = INTERPRETED_TILE if is_interpreted() else TILE
        self._chunks = ChunkMap.build(numels, aligned, 4 * self._tile, self.device)
        self._num_programs = min(self._chunks.num_chunks, _num_programs(self.device))
        self._partials = torch.empty(self._num_programs, dtype=torch.float64, device=self.device)
        self._launches.clear()

    def norm(self, norm_type: float, max_norm: float, result: Tensor, total: Tensor | None = None) -> None:
        """Write ``[norm, clip factor]`` to the fp32 ``result``, and Σ|g|^p (or the maximum) to the fp64 ``total``."""
        launch = self._launches.get(norm_type)
        if launch is None:
            launch = self._launches[norm_type] = self._norm_launch(norm_type)
        keep_for_graphs(self._chunks.owners, self._partials, self._counter, self._total)
        launch(
            (
                self._chunks.owners,
                self._rows.read(),
                self._partials,
                self._counter,
                self._total if total is None else total,
                result,
            ),
            (self._chunks.num_chunks, self._chunks.num_full, float(max_norm)),
        )

    def scale_(self, factor: Tensor) -> None:
        """Multiply the gradients by the fp32 ``factor`` unless it is 1 or more."""
        launch = self._launches.get("scale")
        if launch is None:
            launch = self._launches["scale"] = self._scale_launch()
        keep_for_graphs(self._chunks.owners)
        launch((self._chunks.owners, self._rows.read(), factor), (self._chunks.num_chunks, self._chunks.num_full))

    def _norm_launch(self, norm_type: float) -> Callable[..., None]:
        from optim_kernels import clip_kernels as kernels
        from optim_kernels._triton import TRITON_DTYPES, Launch

        norm = kernels.INF_NORM if norm_type == math.inf else int(norm_type)
        vector = 16 // self._dtype.itemsize
        partials = 1 << (self._num_programs - 1).bit_length()
        return Launch(
            kernels.norm_kernel,
            self._num_programs,
            (TRITON_DTYPES[self._dtype], norm, self._tile, vector, partials),
            num_warps=NUM_WARPS,
        )

    def _scale_launch(self) -> Callable[..., None]:
        from optim_kernels import clip_kernels as kernels
        from optim_kernels._triton import TRITON_DTYPES, Launch

        return Launch(
            kernels.scale_kernel,
            min(self._chunks.num_chunks, 2 * _num_programs(self.device)),
            (TRITON_DTYPES[self._dtype], self._tile),
            num_warps=NUM_WARPS,
        )


class GradientNorms:
    """Norms of gradients of any devices and dtypes: one ``GradientNorm`` for each, kept from step to step."""

    def __init__(self, impl: Impl = "auto") -> None:
        self._impl = impl
        self._parts: dict[Any, GradientNorm] = {}

    def norm_and_factor(self, grads: Sequence[Tensor], norm_type: float, max_norm: float) -> tuple[Tensor, Tensor]:
        """``(norm, clip factor)``, 0-d on the first gradient's device, without a synchronisation on one device."""
        parts = self._refreshed(grads, norm_type)
        if parts is not None and len(parts) == 1:
            result = torch.empty(2, dtype=torch.float32, device=grads[0].device)
            parts[0].norm(norm_type, max_norm, result)
            return result[0], result[1]
        norm = self._combined(parts, grads, norm_type)
        return norm, reference.clip_factor(norm, max_norm)

    def norm(self, grads: Sequence[Tensor], norm_type: float) -> Tensor:
        """The norm alone."""
        return self.norm_and_factor(grads, norm_type, 1.0)[0]

    def totals(self, grads: Sequence[Tensor], norm_type: float) -> list[Tensor]:
        """Σ|g|^p, or the maximum, of the gradients of each device and dtype: 0-d fp64."""
        parts = self._refreshed(grads, norm_type)
        return [] if parts is None else [self._total(part, norm_type) for part in parts]

    def scale_(self, grads: Sequence[Tensor], factor: Tensor) -> bool:
        """Multiply by the factor; ``False``, and nothing done, if the kernels cannot."""
        parts = self._refreshed(grads, 2.0, in_place=True)
        for part in parts or []:
            part.scale_(factor.to(device=part.device, dtype=torch.float32))
        return parts is not None

    def _refreshed(
        self, grads: Sequence[Tensor], norm_type: float, *, in_place: bool = False
    ) -> list[GradientNorm] | None:
        """The parts that know these gradients; ``None`` if the kernels cannot read one of them."""
        names = (f"gradient {i}" for i in range(len(grads)))
        if not reference.is_kernel_norm(norm_type) or not all(map(partial(use_triton, self._impl), grads, names)):
            return None
        if not all(map(is_dense, grads)):
            if in_place:
                return None
            grads = [grad if is_dense(grad) else grad.contiguous() for grad in grads]
        by_kind: dict[Any, list[Tensor]] = {}
        for grad in grads:
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        parts = []
        for (device, dtype), members in by_kind.items():
            stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
            key = (device, dtype, stream, len(members))
            if key not in self._parts:
                self._parts[key] = GradientNorm(device, dtype)
            self._parts[key].refresh(members)
            parts.append(self._parts[key])
        return parts

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
        part.norm(norm_type, 1.0, torch.empty(2, dtype=torch.float32, device=part.device), total)
        return total


def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
