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
from functools import cache
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from torch._C._dynamo import guards as dynamo_guards
except ImportError:
    dynamo_guards = None  # type: ignore[assignment]

ALIGNMENT = 16  # bytes
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


def is_capturing(device: torch.device) -> bool:
    """Whether launches on the device are being captured into a CUDA graph."""
    # fake tensors may be on a GPU that this machine lacks
    return is_cuda(device) and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@cache
def is_cuda(device: torch.device) -> bool:
    """Whether the device is a GPU; cached, because ``device.type`` takes three times as long."""
    return device.type == "cuda"


# Tensors that captured graphs read, alive as long as the process, since nothing tells when a graph is gone. Most are
# small: tables and counters, never parameters, but also copies of gradients that lie otherwise than their parameter.
_OWNED_BY_GRAPHS: list[Tensor] = []


def keep_for_graphs(*tensors: Tensor) -> None:
    """Keep tensors that a captured launch reads, for the graph's replays."""
    _OWNED_BY_GRAPHS.extend(tensors)


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


class TensorList:
    """Tensors as the host sees them in one pass: where they lie (``addresses``), and what they are (``kinds``).

    Two lists with equal addresses and kinds are the same to a kernel. An address alone says too little: memory that
    was freed comes back as another dtype or layout.

    Args:
        known: the kinds of earlier lists from the same caller.
    """

    def __init__(self, tensors: Sequence[Tensor], known: KnownKinds | None = None) -> None:
        self.tensors = tensors
        # dense copies that the kernels read in place of other tensors; they live as long as the list
        self.copies: list[Tensor] = []
        self.addresses = list(map(Tensor.data_ptr, tensors))
        self.kinds = _kinds(tensors) if known is None else known.of(tensors)


def _kinds(tensors: Sequence[Tensor]) -> list[Any]:
    """Dtypes, numbers of elements, whether each is contiguous, and shapes and strides of those that are not.

    If any are lazily negated (``is_neg``), a last entry says which.
    """
    contiguous, negated = list(map(Tensor.is_contiguous, tensors)), list(map(Tensor.is_neg, tensors))
    kinds: list[Any] = [list(map(_dtype, tensors)), list(map(Tensor.numel, tensors)), contiguous]
    if not all(contiguous):
        kinds.append([(t.shape, t.stride()) for t, plain in zip(tensors, contiguous) if not plain])
    if any(negated):
        kinds.append(("negated", negated))
    return kinds


_dtype = attrgetter("dtype")

# Not torch's public API: where it is gone, kinds are read tensor by tensor.
TensorGuards: Any = getattr(dynamo_guards, "TensorGuards", None)


def _guards(tensors: Sequence[Tensor]) -> Any:
    """Check of other tensors' types, dtypes, devices, shapes and strides against these; ``None`` if torch lacks it."""
    if TensorGuards is None:
        return None
    return TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )


class KnownKinds:
    """The kinds of a list that comes again and again, recognised by one call for all its tensors.

    That call is Dynamo's check of a compiled function's arguments: types, dtypes, devices, shapes and strides. It holds
    no tensor and takes half as long as `_kinds`, but making it takes ten times as long: so it is made once, when a list
    comes for the second time.

    Args:
        with_shapes: whether contiguous tensors of different shapes, but equally many elements, differ in kind, and
            tensors on different devices.
    """

    def __init__(self, *, with_shapes: bool = False) -> None:
        self._with_shapes = with_shapes
        # kinds, whether they came again, and the check; one tuple, since lists may come from several threads
        self._last: tuple[list[Any], bool, Any] = [[]], False, None

    def of(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The kinds of these tensors: the same list object as long as they stay the same."""
        last, came_again, guards = self._last
        if guards is not None and len(tensors) == len(last[0]) and guards.check(*tensors):
            return last
        kinds = _kinds(tensors)
        if self._with_shapes:
            kinds.append([(tensor.shape, tensor.device) for tensor in tensors])
        if kinds != last:
            self._last = kinds, False, None
            return kinds
        # if a check failed on something kernels ignore (the autograd state, say), a new one would fail as well
        if not came_again:
            guards = _guards(tensors)
        self._last = last, True, guards
        return last


class KnownAddresses:
    """Addresses and kinds of tensors, to tell whether tables on the device still describe them.

    A tensor that stays the same object may move: ``tensor.data = tensor.data.to(device)``, ``share_memory_()``, a
    storage that is freed for a while. Or its kind changes at the same address: ``tensor.data = tensor.data.t()``.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._known = KnownKinds(with_shapes=True)
        self._kinds = self._known.of(tensors)
        self._addresses = list(map(Tensor.data_ptr, tensors))

    def are_those_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors have the addresses and kinds of those given at first."""
        return list(map(Tensor.data_ptr, tensors)) == self._addresses and self._known.of(tensors) == self._kinds


def why_not_in_place(tensor: Tensor) -> str | None:
    """What keeps a kernel from going through a tensor in the order of memory; ``None`` where it can."""
    if tensor.is_neg():
        return "it is negated lazily, as imaginary parts of conjugates are"
    return None if is_dense(tensor) else "its elements are not dense in memory"


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


def has_overlaps(tensor: Tensor) -> bool:
    """Whether elements of a tensor share their place in memory, as in one that is expanded; it cannot be written."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape))


def sharing_memory(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """The places of two tensors of which one begins inside the other; one with gaps counts as its first element."""
    spans = []
    for place, tensor in enumerate(tensors):
        if tensor.numel() and not tensor.is_meta:
            begin, numel = tensor.data_ptr(), tensor.numel() if is_dense(tensor) else 1
            spans.append((str(tensor.device), begin, begin + numel * tensor.element_size(), place))
    for (device, _, end, one), (next_device, begin, _, other) in pairwise(sorted(spans)):
        if device == next_device and begin < end:
            return min(one, other), max(one, other)
    return None


def is_aligned(*addresses: int) -> bool:
    """Whether all addresses are multiples of 16 bytes."""
    return all(address % ALIGNMENT == 0 for address in addresses)
