"""Views of tensors' memory, and copies between them as wide as their alignment allows.

A view is sizes, strides and an offset relative to a tensor's first element. Tensors are copied as integers of their
elements' width, so that every bit arrives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import cast

import torch
from torch import Tensor

from optim_redist.errors import LayoutError
from optim_redist.moves import Which

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDE = 16  # bytes

View = tuple[tuple[int, ...], tuple[int, ...], int]
Rows = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides of a tensor
FLAT: Rows = ((_WIDE,), (1,))  # stands for any buffer
Copy = tuple[Tensor, Tensor]  # to, from


def as_bits(tensor: Tensor) -> Tensor:
    """The ``resolved`` tensor as integers of its width, so that copies keep every bit; 16-byte elements stay."""
    tensor = tensor.detach()
    bits = bits_type(tensor.dtype)
    return tensor if tensor.dtype == bits else tensor.view(bits)


def arrived(tensor: Tensor | None) -> Tensor | None:
    """The tensor, waited for if it is the result of a functional collective of torch.

    Until it is waited for, such a result is a wrapper without memory of its own to read in place or to give up.
    """
    # there is no such tensor unless its class has been imported
    package = sys.modules.get("torch.distributed._functional_collectives")
    if package is not None and isinstance(tensor, package.AsyncCollectiveTensor):
        return cast(Tensor, tensor.wait())
    return tensor


def refuse_dtensor(tensor: Tensor | None, what: str) -> None:
    """Raise LayoutError for a DTensor: its shape is that of the whole tensor, not of the rank's part that is needed."""
    # there is no DTensor unless its class has been imported, which takes seconds
    package = sys.modules.get("torch.distributed.tensor")
    if package is not None and isinstance(tensor, package.DTensor):
        raise LayoutError(f"{what} is a DTensor, this takes its part: give .to_local(), or the DTensor to redistribute")


def resolved(tensor: Tensor | None) -> Tensor | None:
    """The tensor with its values in its memory and without autograd history.

    A view of a complex tensor may have a conjugation or negation pending, and torch refuses to combine contributions
    of which one requires a gradient.
    """
    return None if tensor is None else tensor.detach().resolve_conj().resolve_neg()


def refuse_unwritable(out: Tensor, what: str) -> None:
    """Raise LayoutError for a tensor with several elements in one place, or whose memory holds other values."""
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride())):
        raise LayoutError(f"{what} is expanded, with several of its elements in one place; give memory for each")
    if out.is_conj() or out.is_neg():
        raise LayoutError(
            f"{what} is a view with a pending conjugation or negation, which cannot be written through; give the "
            "tensor it views"
        )


def extent(tensor: Tensor) -> tuple[int, int] | None:
    """The addresses of the tensor's first byte and of the byte behind its last; None if it has no bytes."""
    if tensor.is_meta or not tensor.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def bits_type(dtype: torch.dtype) -> torch.dtype:
    """The integer type of the same width; the type itself if there is none."""
    return _BITS.get(dtype.itemsize, dtype)


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def view_of(tensor: Tensor, view: View) -> Tensor:
    """The view, given relative to the tensor's first element."""
    sizes, strides, offset = view
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)


class Copies:
    """Strided copies from tensors into one target, as wide as their alignment allows.

    Copying 16 bytes at a time, whatever the element type, keeps strided copies at the speed of the memory. That is
    possible where rows, strides and offsets are whole multiples of 16 bytes.
    """

    def __init__(self, pairs: list[tuple[Which, View, View]], itemsize: int, rows: Sequence[Rows]) -> None:
        self.pairs = pairs
        self.lane = _WIDE // itemsize
        self.wide: list[tuple[Which, View, View]] | None = None
        if pairs and self.lane > 1 and all(_is_wide(*row, self.lane) for row in rows):
            found = [(which, _widened(a, self.lane), _widened(b, self.lane)) for which, a, b in pairs]
            if all(a is not None and b is not None for _, a, b in found):
                self.wide = found  # type: ignore[assignment]

    def run(self, sources: Mapping[Which, Tensor | None], target: Tensor | None) -> None:
        """Make the copies; the tensors are given as bits."""
        copies = self.between(sources, target)
        copy_views([to for to, _ in copies], [source for _, source in copies])

    def between(self, sources: Mapping[Which, Tensor | None], target: Tensor | None) -> list[Copy]:
        """The copies, of tensors that are given as bits."""
        if not self.pairs:
            return []
        assert target is not None, "copies have a target"
        used = {which: cast(Tensor, sources[which]) for which in {which for which, _, _ in self.pairs}}
        pairs = self.pairs
        if self.wide is not None and all(_is_aligned(tensor) for tensor in (*used.values(), target)):
            pairs = self.wide
            used = {which: tensor.view(torch.complex128) for which, tensor in used.items()}
            target = target.view(torch.complex128)
        return [(view_of(target, there), view_of(used[which], here)) for which, here, there in pairs]


def _is_wide(shape: tuple[int, ...], strides: tuple[int, ...], lane: int) -> bool:
    """Whether a tensor of this shape and strides can be seen as one of elements ``lane`` times as wide."""
    if not shape:
        return False
    return shape[-1] % lane == 0 and strides[-1] == 1 and all(stride % lane == 0 for stride in strides[:-1])


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % _WIDE == 0 and tensor.storage_offset() * tensor.element_size() % _WIDE == 0


def _widened(view: View, lane: int) -> View | None:
    sizes, strides, offset = view
    if not sizes or strides[-1] != 1 or sizes[-1] % lane or offset % lane or any(s % lane for s in strides[:-1]):
        return None
    return (*sizes[:-1], sizes[-1] // lane), (*(s // lane for s in strides[:-1]), 1), offset // lane


def buffers_of(
    messages: Sequence[Sequence[tuple[Which, View]]], *, separate: bool, in_place: bool, shared: bool = False
) -> tuple[list[tuple[Which | None, View]], list[tuple[Which, View, View]], int]:
    """The exchange's buffers for these messages; copies (tensor, view, slot) into or out of our own buffer; its size.

    With ``separate`` every message is a group, else all messages are one group. With ``in_place``, a group that is one
    piece of memory needs no copy and is its own buffer. With ``shared``, groups of the same views share a buffer, so
    that what several replicas get is packed once; when receiving, contributions to one place have the same views and
    need a buffer each.
    """
    groups = [list(message) for message in messages] if separate else [[part for m in messages for part in m]]
    buffers: list[tuple[Which | None, View]] = []
    copies: list[tuple[Which, View, View]] = []
    known: dict[tuple[tuple[Which, View], ...], tuple[Which | None, View]] = {}
    place = 0
    for parts in groups:
        if shared and tuple(parts) in known:
            buffers.append(known[tuple(parts)])
            continue
        span = (
            _dense_span([view for _, view in parts]) if in_place and len({which for which, _ in parts}) == 1 else None
        )
        if span is not None:
            buffers.append((parts[0][0], span))
            continue
        start = place
        for which, view in parts:
            copies.append((which, view, (view[0], _dense_strides(view[0]), place)))
            place += prod(view[0])
        buffers.append((None, ((place - start,), (1,), start)))
        known[tuple(parts)] = buffers[-1]
    return buffers, copies, place


def _dense_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _dense_span(views: Sequence[View]) -> View | None:
    """The one flat view that all views together are, if they lie in memory one after the other in this order."""
    end = start = views[0][2]
    for sizes, strides, offset in views:
        if offset != end or not _is_dense(sizes, strides):
            return None
        end = offset + prod(sizes)
    return (end - start,), (1,), start


def copy_views(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy view by view, in one call if there are several."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(list(targets), list(sources))


def copy_together(copies: Iterable[Copy]) -> None:
    """Make copies, each between views of equal shape, in one call for all contiguous ones of a dtype."""
    Together(copies).run()


class Together:
    """Copies, each between views of equal shape, made in one call for all contiguous ones of a dtype."""

    def __init__(self, copies: Iterable[Copy]) -> None:
        self._others: list[Copy] = []
        self._dense: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for target, source in copies:
            if target.is_contiguous() and source.is_contiguous():
                targets, sources = self._dense.setdefault(target.dtype, ([], []))
                targets.append(target.view(-1))
                sources.append(source.view(-1))
            else:
                self._others.append((target, source))

    def run(self) -> None:
        """Make the copies; can be repeated as long as the tensors stay."""
        for target, source in self._others:
            target.copy_(source)
        for targets, sources in self._dense.values():
            copy_views(targets, sources)
