"""What travels between two ranks: a list of pieces of a tensor.

A piece is evenly spaced in the tensor, so it is one ``as_strided`` view and one slot of the flat buffer, and packing
takes one copy per piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import cast

from torch import Tensor

from optim_redist._running.copies import Copy
from optim_redist._running.views import View, as_bits, view_of
from optim_redist.index_sets import Run
from optim_redist.moves import Which

Piece = tuple[Run, ...]
LOCAL = -1  # in place of a peer: no message, the pieces stay within this rank


@dataclass
class Message:
    """What travels between this rank and ``peer`` in one phase; with ``peer`` = LOCAL, what is copied within this rank.

    Attributes:
        pieces: places in the tensor, in the order in which they lie in the buffer.
        read: for each piece, in which of the sender's tensors it lies.
        contributions: which contribution each piece carries, FINISHED for finished values.
        num_elements: elements of all pieces.
    """

    peer: int
    pieces: list[Piece] = field(default_factory=list)
    read: list[Which] = field(default_factory=list)
    contributions: list[int] = field(default_factory=list)
    num_elements: int = 0
    _views: dict[tuple[int, ...], list[View]] = field(default_factory=dict)

    def add(self, piece: Piece, read: Which, contribution: int) -> None:
        self.pieces.append(piece)
        self.read.append(read)
        self.contributions.append(contribution)
        self.num_elements += prod(run.length * run.repeats for run in piece)

    def views(self, strides: tuple[int, ...]) -> list[View]:
        """The pieces' views in a tensor of these strides."""
        if strides not in self._views:
            self._views[strides] = [_as_view(piece, strides) for piece in self.pieces]
        return self._views[strides]

    def packing(self, slot: Tensor, src: Tensor | None, dst: Tensor | None) -> Iterator[Copy]:
        """The copies that bring the message, out of the sender's tensors, into its part of a flat buffer."""
        tensors = {"src": _bits(src), "dst": _bits(dst)}
        place = 0
        for k, read in enumerate(self.read):
            tensor = cast(Tensor, tensors[read])
            view = self.views(tensor.stride())[k]
            size = prod(view[0])
            yield slot[place : place + size].view(view[0]), view_of(tensor, view)
            place += size

    def unpacking(self, slot: Tensor, dst: Tensor) -> Iterator[Copy]:
        """The copies that bring the message out of its part of a flat buffer."""
        target, place = as_bits(dst), 0
        for view in self.views(target.stride()):
            size = prod(view[0])
            yield view_of(target, view), slot[place : place + size].view(view[0])
            place += size


def slots(messages: Sequence[Message], buffer: Tensor) -> list[tuple[Message, Tensor]]:
    """Every message with its part of a flat buffer."""
    found, place = [], 0
    for message in messages:
        found.append((message, buffer[place : place + message.num_elements]))
        place += message.num_elements
    return found


def _as_view(piece: Piece, strides: Sequence[int]) -> View:
    """Sizes, strides and offset of a piece in a tensor of these strides."""
    sizes: list[int] = []
    steps: list[int] = []
    offset = 0
    for run, stride in zip(piece, strides):
        offset += run.start * stride
        if run.repeats > 1:
            sizes.append(run.repeats)
            steps.append(run.stride * stride)
        sizes.append(run.length)
        steps.append(stride)
    return tuple(sizes), tuple(steps), offset


def _bits(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else as_bits(tensor)
