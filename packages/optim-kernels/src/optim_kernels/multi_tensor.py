"""Many tensors in one launch: how they are cut into chunks, and tables on the device that say where they are.

A chunk is what one program works on: consecutive elements of one tensor, in memory order. One word describes it:

    tensor << 40 | size << 34 | start        size and start in units of 256 elements

Full chunks of aligned tensors come first, so that a kernel knows from the chunk's number whether it may read 16 bytes
at a time; tails, and whole tensors that do not start at a multiple of 16 bytes, follow and are masked:

    tensor A (2.5 chunks), tensor B (unaligned, 1.5 chunks), tensor C (1 chunk)
    chunks = A A C | A B B            num_full = 3, num_chunks = 6

Tables are uploaded only when their content changes, and a table that a CUDA graph reads is never written again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from optim_kernels._graphs import is_capturing, keep_for_graphs

# optim-dist 0.12 takes these from here
from optim_kernels._memory import has_overlaps as has_overlaps
from optim_kernels._memory import is_dense as is_dense
from optim_kernels._tensor_lists import KnownKinds as KnownKinds

UNIT = 256  # elements
# CUDA takes so many bytes of a copy out of any memory at once, and for more of them it waits for the device. In half of
# the time that pinned memory takes the host, most of which goes into giving it back. (An H200 with CUDA 13.)
STAGED = 16384  # bytes
TENSOR_SHIFT, SIZE_SHIFT = 40, 34  # bits


class ChunkSize(NamedTuple):
    """Elements of a chunk, and how many of the list's next elements are cut into such chunks (``None``: the rest)."""

    size: int
    extent: int | None = None


class ChunkMap(NamedTuple):
    """The chunks of a list of tensors, and how many each tensor has."""

    words: Tensor  # int64 [num_chunks], on the device
    num_full: int
    num_chunks: int
    counts: list[int]

    @classmethod
    def build(
        cls,
        numels: Sequence[int],
        aligned: Sequence[bool],
        sizes: Sequence[ChunkSize],
        device: torch.device,
        *,
        granule: int | None = None,
    ) -> ChunkMap:
        """The map for tensors of ``numels`` elements; even an empty tensor has one (masked) chunk.

        Full chunks have a multiple of ``granule`` elements, by default the last of ``sizes``.
        """
        granule = granule or sizes[-1].size
        ends = [numel // granule * granule if flag else 0 for numel, flag in zip(numels, aligned, strict=True)]
        counts = [0] * len(numels)
        words: list[Tensor] = []
        extents = iter(sizes)
        size, room = next(extents)
        for i, end in enumerate(ends):
            start = 0
            while start < end:
                if room == 0:
                    size, room = next(extents)
                stop = end if room is None else min(end, start + room)
                words.append(_words(i, start, stop, size))
                counts[i] += len(words[-1])
                room = None if room is None else room - (stop - start)
                start = stop
        num_full = sum(counts)
        for i, (numel, end) in enumerate(zip(numels, ends)):
            if end < numel or counts[i] == 0:
                words.append(_words(i, end, max(numel, 1), sizes[-1].size))
                counts[i] += len(words[-1])
        content = torch.cat(words)
        on_device = torch.empty(len(content), dtype=torch.int64, device=device)
        # torch comes without numpy, too
        upload(ctypes.string_at(content.data_ptr(), content.nbytes), on_device)
        return cls(on_device, num_full, len(content), counts)


def _words(tensor: int, start: int, stop: int, size: int) -> Tensor:
    """The words of the chunks between two elements of a tensor; the last may be smaller."""
    # on the host whatever torch.set_default_device says
    starts = torch.arange(start, stop, size, dtype=torch.int64, device="cpu")
    sizes = (stop - starts).clamp_(max=size)
    return (tensor << TENSOR_SHIFT) + ((sizes + UNIT - 1) // UNIT << SIZE_SHIFT) + starts // UNIT


def upload(content: bytes, on_device: Tensor) -> None:
    """Fill a tensor without waiting."""
    if not on_device.is_cuda:
        ctypes.memmove(on_device.data_ptr(), content, len(content))
        return
    capturing = is_capturing(on_device.device)
    if 0 < len(content) <= STAGED and not capturing:
        on_device.copy_(torch.frombuffer(bytearray(content), dtype=on_device.dtype), non_blocking=True)
        return
    # torch pools pinned memory and reuses it once no copy reads it any more, so this soon allocates nothing new
    numel = len(content) // on_device.element_size()
    pinned = torch.empty(numel, dtype=on_device.dtype, device="cpu", pin_memory=True)
    ctypes.memmove(pinned.data_ptr(), content, len(content))
    on_device.copy_(pinned, non_blocking=True)
    if capturing:
        # a copy that is captured is repeated by every replay, from the same source
        keep_for_graphs(on_device, pinned)


def _empty_words(count: int, device: torch.device) -> Tensor:
    # a tensor made in inference mode cannot be written outside of it, and the first norm may be computed there
    with torch.inference_mode(False):
        return torch.empty(count, dtype=torch.int64, device=device)


class DeviceTable:
    """64-bit words on the device, equal to those given to ``update`` last.

    A table that a captured launch reads is never written again: the next update makes a new one. A table that is filled
    during a capture has its content only when that graph is replayed, so no other launch may read it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._content = b""
        self._captured = False
        self.words = torch.empty(0, dtype=torch.int64, device=device)

    def update(self, content: bytes) -> bool:
        """Upload ``content``, without waiting, if it changed; return whether ``words`` is a new tensor."""
        if content == self._content:
            return False
        # an upload that fails leaves unknown content
        self._content = b""
        capturing = is_capturing(self._device)
        is_new = capturing or self._captured or 8 * self.words.numel() != len(content)
        words = _empty_words(len(content) // 8, self._device) if is_new else self.words
        upload(content, words)
        if is_new:
            self.words, self._captured = words, capturing
        if not capturing:
            self._content = content
        return is_new

    @torch.inference_mode(False)
    def part(self, start: int, stop: int | None = None, *, dtype: torch.dtype = torch.int64) -> Tensor:
        """The words from ``start`` to ``stop`` as numbers of ``dtype``, which can be written in and out of any mode."""
        return self.words[start:stop].view(dtype)

    def keep_for_graph(self) -> None:
        """Take note that a launch which reads ``words`` is being captured."""
        self._captured = True
        keep_for_graphs(self.words)
