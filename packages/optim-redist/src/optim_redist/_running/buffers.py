"""The buffers of an exchange: in the tensors themselves where messages lie there in one piece, else in one of our own.

A span is a run of elements in one memory. Spans that follow each other are cut out of it together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple, cast

import torch
from torch import Tensor

from optim_redist._running.copies import Pair
from optim_redist._running.views import View, dense_strides, is_dense
from optim_redist.moves import Which

Part = tuple[Which, View]  # a piece of a message: in which tensor, and where there


class Span(NamedTuple):
    """Elements one behind the other in a tensor, or with ``which`` None in a buffer of our own."""

    which: Which | None
    start: int
    size: int


class Buffers:
    """Where the buffers of an exchange lie.

    Attributes:
        spans: of every buffer.
        packing: the copies between tensors and the buffer of our own, as they are made to fill it.
        num_elements: of that buffer.
        needs_own: whether any buffer lies in it, if only an empty one.
        numbers: of every buffer, its place among those that lie in other places, in the order of memory.
        sizes: of these.
        is_one: whether they follow each other in one memory, or there are none.
        is_flat: whether, in addition, no two messages share a buffer.
    """

    def __init__(self, spans: list[Span], packing: list[Pair], num_elements: int) -> None:
        self.spans = spans
        self.packing = packing
        self.num_elements = num_elements
        self._runs: list[list[Span]] = []
        for span in dict.fromkeys(spans):
            last = self._runs[-1][-1] if self._runs else None
            if last is not None and last.which == span.which and last.start + last.size == span.start:
                self._runs[-1].append(span)
            else:
                self._runs.append([span])
        self.needs_own = any(span.which is None for span in spans)
        number = {span: k for k, span in enumerate(chain.from_iterable(self._runs))}
        self.numbers = [number[span] for span in spans]
        self.sizes = [span.size for span in number]
        self.is_one = len(self._runs) <= 1
        self.is_flat = self.is_one and len(spans) == len(number)

    def unpacking(self) -> list[Pair]:
        """``packing`` the other way round, where our own buffer takes the place of the source."""
        return [Pair("src", write, read) for _, read, write in self.packing]

    @property
    def run(self) -> Span:
        """The memory of all buffers, if it is one: nothing of our own if there are none."""
        if not self._runs:
            return Span(None, 0, 0)
        first, last = self._runs[0][0], self._runs[0][-1]
        return Span(first.which, first.start, last.start + last.size - first.start)

    def cut(self, own: Tensor | None, tensors: Mapping[Which, Tensor | None], dtype: torch.dtype) -> list[Tensor]:
        """The buffers, as flat views of our own buffer and of the resolved tensors, in elements of ``dtype``."""
        found: list[Tensor] = []
        for run in self._runs:
            memory = self._memory(run, own, tensors, dtype)
            if len(run) == 1:
                found.append(memory)
            else:
                num_elements = run[-1].start + run[-1].size - run[0].start
                ratio = memory.numel() // max(1, num_elements)
                found += memory.split_with_sizes([span.size * ratio for span in run])
        return [found[number] for number in self.numbers]

    def _memory(
        self, run: Sequence[Span], own: Tensor | None, tensors: Mapping[Which, Tensor | None], dtype: torch.dtype
    ) -> Tensor:
        which, start, _ = run[0]
        if which is None:
            # it may have been filled in wider elements
            memory = cast(Tensor, own).view(dtype)
            if run[-1].start + run[-1].size - start == self.num_elements:
                return memory
            ratio = memory.numel() // self.num_elements
        else:
            memory, ratio = cast(Tensor, tensors[which]), 1
        total = run[-1].start + run[-1].size - start
        memory = memory.as_strided((total * ratio,), (1,), memory.storage_offset() + start * ratio)
        return memory if memory.dtype == dtype else memory.view(dtype)


def buffers_of(
    messages: Sequence[Sequence[Part]], *, separate: bool, in_place: bool, shared: bool = False, lane: int = 1
) -> Buffers:
    """The buffers of these messages.

    With ``separate`` every message is a group, else all messages are one group. With ``in_place``, a group that is one
    piece of memory needs no copy and is its own buffer. With ``shared``, groups of the same views share a buffer, so
    that what several replicas get is packed once; when receiving, contributions to one place have the same views and
    need a buffer each. Every buffer begins at a multiple of ``lane`` elements: in our own memory there may be gaps.
    """
    groups = [list(message) for message in messages] if separate else [[part for m in messages for part in m]]
    spans: list[Span] = []
    packing: list[Pair] = []
    known: dict[tuple[Part, ...], Span] = {}
    place = 0
    for parts in groups:
        if shared and tuple(parts) in known:
            spans.append(known[tuple(parts)])
            continue
        span = _span_of(parts) if in_place else None
        if span is not None and span.start % lane == 0:
            spans.append(span)
            continue
        start = place = -(-place // lane) * lane
        for which, view in parts:
            packing.append(Pair(which, view, (view[0], dense_strides(view[0]), place)))
            place += prod(view[0])
        spans.append(Span(None, start, place - start))
        known[tuple(parts)] = spans[-1]
    return Buffers(spans, packing, place)


def _span_of(parts: Sequence[Part]) -> Span | None:
    """The one span that all parts together are, if they lie in one memory one after the other in this order."""
    if len({which for which, _ in parts}) != 1:
        return None
    end = start = parts[0][1][2]
    for _, (sizes, strides, offset) in parts:
        if offset != end or not is_dense(sizes, strides):
            return None
        end = offset + prod(sizes)
    return Span(parts[0][0], start, end - start)
