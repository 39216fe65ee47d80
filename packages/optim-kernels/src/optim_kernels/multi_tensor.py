"""Many tensors in one launch: how they are cut into chunks, and tables on the device that say where they are.

A chunk is what one program works on: ``chunk_size`` consecutive elements of one tensor, in memory order. Full chunks
of aligned tensors come first, so that a kernel knows from the chunk's number whether it may read 16 bytes at a time;
tails, and whole tensors that do not start at a multiple of 16 bytes, follow and are masked:

    tensor A (2.5 chunks), tensor B (unaligned, 1.5 chunks), tensor C (1 chunk)
    owners = A A C | A B B            num_full = 3, num_chunks = 6

Tables are uploaded only when their content changes, and a table that a CUDA graph reads is never written again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes


class TensorChunks(NamedTuple):
    """Where one tensor's chunks are: chunk number c is its element ``(c - first) * chunk_size`` and following."""

    first_full: int
    first_masked: int
    num_chunks: int


class ChunkMap(NamedTuple):
    """The chunks of a list of tensors: the tensor each belongs to, and each tensor's place among them."""

    owners: Tensor  # int32 [num_chunks], on the device
    num_full: int
    num_chunks: int
    tensors: list[TensorChunks]

    @classmethod
    def build(cls, numels: Sequence[int], aligned: Sequence[bool], chunk_size: int, device: torch.device) -> ChunkMap:
        """The map for tensors of ``numels`` elements; even an empty tensor has one (masked) chunk."""
        full = [numel // chunk_size if flag else 0 for numel, flag in zip(numels, aligned, strict=True)]
        total = [max(1, -(-numel // chunk_size)) for numel in numels]
        owners: list[int] = []
        for i, count in enumerate(full):
            owners += [i] * count
        num_full = first_masked = len(owners)
        tensors = []
        first_full = 0
        for i, (count, num_chunks) in enumerate(zip(full, total)):
            tensors.append(TensorChunks(first_full, first_masked - count, num_chunks))
            owners += [i] * (num_chunks - count)
            first_full += count
            first_masked += num_chunks - count
        on_device = _upload(torch.frombuffer(array("i", owners), dtype=torch.int32), device)
        return cls(on_device, num_full, len(owners), tensors)


def _upload(source: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, made without waiting; from pinned memory, as a graph capture asks for."""
    if device.type != "cuda":
        return source.clone()
    pinned = source.pin_memory()
    on_device = pinned.to(device, non_blocking=True)
    # a copy that is captured is repeated by every replay, from the same source
    keep_for_graphs(on_device, pinned)
    return on_device


# What captured graphs read: alive as long as the process, for nobody learns when a graph is gone. It is little: tables
# and counters, not parameters.
_OWNED_BY_GRAPHS: list[Tensor] = []


def keep_for_graphs(*tensors: Tensor) -> bool:
    """Whether the current stream is being captured; if so, the tensors are kept for the graph's replays."""
    capturing = tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing:
        _OWNED_BY_GRAPHS.extend(tensors)
    return capturing


class DeviceTable:
    """Rows of 64-bit numbers on the device, equal to those given to ``update`` last.

    A table that a captured launch reads is never written again: the next update makes a new one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._content = b""
        self._captured = False
        self._tensor = torch.empty(0, dtype=torch.int64, device=device)

    def update(self, rows: array[int] | array[float]) -> None:
        """Make ``rows`` (type code "q" or "d") the content; it is uploaded, without waiting, if it changed."""
        content = rows.tobytes()
        if content == self._content:
            return
        self._content = content
        source = torch.frombuffer(rows, dtype=torch.float64 if rows.typecode == "d" else torch.int64)
        if self._device.type != "cuda":
            self._tensor = source.clone()
            return
        if self._captured or self._tensor.shape != source.shape or self._tensor.dtype != source.dtype:
            self._tensor = torch.empty_like(source, device=self._device)
            self._captured = False
        pinned = source.pin_memory()
        # an upload that is captured is repeated by every replay, from the same source
        keep_for_graphs(self._tensor, pinned)
        self._tensor.copy_(pinned, non_blocking=True)

    def read(self) -> Tensor:
        """The table, for a launch on the current stream."""
        self._captured = keep_for_graphs(self._tensor) or self._captured
        return self._tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a range of memory without gap or overlap, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_aligned(*addresses: int) -> bool:
    """Whether all addresses are multiples of 16 bytes."""
    return all(address % ALIGNMENT == 0 for address in addresses)
