"""The norm of gradients of one device and dtype, and their scaling: tables, scratch and launches."""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optim_kernels._graphs import is_capturing, keep_for_graphs
from optim_kernels._memory import ALIGNMENT
from optim_kernels.multi_tensor import ChunkMap, ChunkSize, DeviceTable

if TYPE_CHECKING:
    from optim_kernels._triton import Launch

# For the norm: elements of a tile (four tiles make a chunk), warps of a program, programs per multiprocessor. For the
# scaling: bytes of a tile.
TILE, NUM_WARPS, PROGRAMS_PER_SM = 1024, 4, 8
SCALED_BYTES = 4096
# Captured calls that get a counter zeroed beforehand; each further call zeroes its own inside its graph.
MOST_CAPTURED = 255


class NormLaunches:
    """The norm of gradients of one device and dtype in one launch, and their scaling in another."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self._dtype = device, dtype
        self._rows = DeviceTable(device)
        # one counter for eager calls, and one for each captured call, which is cut off when it is needed
        counters = torch.zeros(1 + MOST_CAPTURED, dtype=torch.int32, device=device)
        self._counter, self._counters = counters[0], map(counters.__getitem__, range(1, 1 + MOST_CAPTURED))
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        # the last norm's clip factor
        self.factor = torch.zeros((), dtype=torch.float32, device=device)
        self._addresses: list[int] = []
        self._numels: list[int] = []
        self._aligned: list[bool] = []
        self._launches: dict[Any, Launch] = {}
        self._chunks: ChunkMap
        self._partials: Tensor
        self._forget_launched()

    def knows(self, addresses: list[int], numels: list[int]) -> bool:
        """Whether these are the gradients of the last ``refresh``."""
        return addresses == self._addresses and numels == self._numels

    def for_graph(self) -> NormLaunches:
        """A copy for a captured call, which may be replayed beside others: the same tables, its own scratch."""
        own = copy.copy(self)
        counter = next(self._counters, None)
        own._counter = torch.zeros_like(self._counter) if counter is None else counter
        own._total, own._partials = torch.empty_like(self._total), torch.empty_like(self._partials)
        own.factor = torch.empty_like(self.factor)
        own._forget_launched()
        return own

    def refresh(self, addresses: list[int], numels: list[int]) -> None:
        """Take note of where the gradients are; nothing is uploaded unless that changed.

        The lists are kept, so that the same list objects are recognised at once.
        """
        if addresses is self._addresses and numels is self._numels:
            return
        if self.knows(addresses, numels):
            self._addresses, self._numels = addresses, numels
            return
        # forget the old list first: a call that fails midway may leave tables of either list
        self._addresses = []
        self._forget_launched()
        aligned = [address % ALIGNMENT == 0 for address in addresses]
        if aligned != self._aligned or numels != self._numels:
            self._cut(numels, aligned)
        rows = array("q", bytes(8 * 2 * len(addresses)))
        rows[0::2], rows[1::2] = array("q", addresses), array("q", numels)
        self._rows.update(rows.tobytes())
        if is_capturing(self.device):
            # a captured upload happens when the graph is replayed, so no other launch may rely on these tables
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

    def _forget_launched(self) -> None:
        # the latest norm's list of addresses, order, limit and launch, and the list and launch of `clip_` behind it:
        # each with its list, since another thread may bring another one while a launch is under way
        self._norm_again: tuple[list[int] | None, float, float, Callable[[Tensor], None] | None] = None, 0.0, 0.0, None
        self._scale_again: tuple[list[int] | None, Callable[[], None] | None] = None, None

    def _keep_if_captured(self) -> None:
        if is_capturing(self.device):
            self._rows.keep_for_graph()
            keep_for_graphs(self._chunks.words, self._partials, self._counter, self._total, self.factor)

    def norm(self, norm_type: float, max_norm: float) -> Tensor:
        """The norm, fp32; also sets ``factor``, which clips it."""
        self._keep_if_captured()
        # a new tensor each time, because the caller keeps it
        norm, max_norm, addresses = torch.empty_like(self.factor), float(max_norm), self._addresses
        known, order, limit, again = self._norm_again
        # not of zeros, which are equal although their signs may differ
        if again is not None and known is addresses and order == norm_type and limit == max_norm != 0.0:
            again(norm)
        else:
            launch, arguments = self._norm_launch(norm_type), self._norm_arguments(self._total, max_norm)
            launch(*arguments, (norm,))
            self._norm_again = addresses, norm_type, max_norm, launch.bound_but_result(*arguments)
        return norm

    def total(self, norm_type: float) -> Tensor:
        """Σ|g|^p, or the maximum, 0-d fp64; also sets ``factor``."""
        self._keep_if_captured()
        total, norm = torch.empty_like(self._total), torch.empty_like(self.factor)
        self._norm_launch(norm_type)(*self._norm_arguments(total, 1.0), (norm,))
        return total

    def clip_(self, norm_type: float, max_norm: float) -> Tensor:
        """Scale the gradients down to ``max_norm``; return their norm before."""
        norm, addresses = self.norm(norm_type, max_norm), self._addresses
        known, again = self._scale_again
        if again is not None and known is addresses:
            again()
        else:
            launch, arguments = self._scale_launch(), self._scale_arguments(self.factor)
            launch(*arguments)
            self._scale_again = addresses, launch.bound(*arguments)
        return norm

    def scale_(self, factor: Tensor) -> None:
        """Multiply the gradients by the fp32 ``factor`` unless it is 1 or more."""
        self._keep_if_captured()
        self._scale_launch()(*self._scale_arguments(factor))

    def _norm_arguments(self, total: Tensor, max_norm: float) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
        chunks = self._chunks
        return (
            (chunks.words, self._rows.words, self._partials, self._counter, total, self.factor),
            (chunks.num_chunks, chunks.num_full, max_norm),
        )

    def _scale_arguments(self, factor: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return (self._chunks.words, self._rows.words, factor), (self._chunks.num_chunks, self._chunks.num_full)

    def _norm_launch(self, norm_type: float) -> Launch:
        launch = self._launches.get(norm_type)
        if launch is None:
            from optim_kernels import clip_kernels as kernels
            from optim_kernels._triton import TRITON_DTYPES

            norm = kernels.INF_NORM if norm_type == math.inf else int(norm_type)
            vector = 16 // self._dtype.itemsize
            partials = 1 << (self._num_programs - 1).bit_length()
            launch = self._launch(kernels.norm_kernel, (TRITON_DTYPES[self._dtype], norm, TILE, vector, partials))
            self._launches[norm_type] = launch
        return launch

    def _scale_launch(self) -> Launch:
        launch = self._launches.get("scale")
        if launch is None:
            from optim_kernels import clip_kernels as kernels
            from optim_kernels._triton import TRITON_DTYPES

            constants = (TRITON_DTYPES[self._dtype], 4 * TILE, SCALED_BYTES // self._dtype.itemsize)
            launch = self._launches["scale"] = self._launch(kernels.scale_kernel, constants)
        return launch

    def _launch(self, kernel: Any, constants: tuple[Any, ...]) -> Launch:
        from optim_kernels._triton import Launch

        return Launch.overlapping(kernel, self._num_programs, constants, self.device, num_warps=NUM_WARPS)


def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
