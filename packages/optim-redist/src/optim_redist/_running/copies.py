"""Strided copies between tensors' memory: in few calls, and as wide as their alignment allows.

Views at even distances are one view with a dimension more, so what goes to several ranks is often packed by one copy:

    n views of sizes s at offsets a, a + d, …, a + (n - 1)·d  =  a view of sizes (n, *s) at offset a with strides (d, …)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple, cast

import torch
from torch import Tensor

from optim_redist._running.views import WIDE, Form, View, as_bits, is_dense, view_of
from optim_redist.moves import Which

Copy = tuple[Tensor, Tensor]  # to, from

# torch's kernels take views of up to 16 dimensions; those of a tensor's own and of repeated runs come on top
_MOST_DIMS = 10


class Pair(NamedTuple):
    """Two views of equal sizes: where elements are read, in which of a rank's tensors, and where they are written."""

    which: Which
    read: View
    write: View


class Copies:
    """Strided copies from tensors into one target.

    Copying 16 bytes at a time, whatever the element type, keeps strided copies at the speed of the memory. That is
    possible where rows, strides and offsets are whole multiples of 16 bytes.
    """

    def __init__(self, pairs: Sequence[Pair], itemsize: int, forms: Sequence[Form]) -> None:
        """``forms``: that of every tensor that takes part."""
        self.pairs = merged(pairs)
        self._which = {pair.which for pair in self.pairs}
        self._wide = _widened(self.pairs, itemsize, forms)

    def run(self, sources: Mapping[Which, Tensor | None], target: Tensor | None) -> None:
        """Make the copies, of resolved tensors."""
        if self.pairs:
            copies = self.between(sources, target)
            copy_views([to for to, _ in copies], [source for _, source in copies])

    def between(self, sources: Mapping[Which, Tensor | None], target: Tensor | None) -> list[Copy]:
        """The copies, of resolved tensors."""
        if not self.pairs:
            return []
        assert target is not None, "copies have a target"
        used = {which: cast(Tensor, sources[which]) for which in self._which}
        if self._wide and _is_aligned(target) and all(map(_is_aligned, used.values())):
            pairs, to = self._wide, target.view(torch.complex128)
            used = {which: tensor.view(torch.complex128) for which, tensor in used.items()}
        else:
            pairs, to = self.pairs, as_bits(target)
            used = {which: as_bits(tensor) for which, tensor in used.items()}
        return [(view_of(to, pair.write), view_of(used[pair.which], pair.read)) for pair in pairs]

    def fills(self, num_elements: int) -> bool:
        """Whether one copy writes all of a buffer of so many elements, in their order."""
        if len(self.pairs) != 1:
            return False
        sizes, strides, offset = self.pairs[0].write
        return offset == 0 and prod(sizes) == num_elements and is_dense(sizes, strides)

    def packed(self, sources: Mapping[Which, Tensor | None]) -> Tensor:
        """The dense buffer that one copy fills, with fewer calls than ``run`` takes."""
        (which,) = self._which
        source = cast(Tensor, sources[which])
        if self._wide and _is_aligned(source):
            view = view_of(source.view(torch.complex128), self._wide[0].read)
        else:
            view = view_of(as_bits(source), self.pairs[0].read)
        return view.clone(memory_format=torch.contiguous_format)


# -- fewer copies


def merged(pairs: Sequence[Pair]) -> list[Pair]:
    """The same copies, those of equal views at even distances as one."""
    found = list(pairs)
    while True:
        fewer = _merged_once(found)
        if len(fewer) == len(found):
            return found
        found = fewer


def _merged_once(pairs: Sequence[Pair]) -> list[Pair]:
    found: list[Pair] = []
    start = 0
    while start < len(pairs):
        stop, distance = start + 1, None
        while stop < len(pairs) and (step := _distance(pairs[stop - 1], pairs[stop])) is not None:
            if distance is not None and step != distance:
                break
            stop, distance = stop + 1, step
        first = pairs[start]
        if distance is not None:
            count = stop - start
            views = zip((first.read, first.write), distance)
            read, write = (((count, *v[0]), (step, *v[1]), v[2]) for v, step in views)
            first = Pair(first.which, read, write)
        found.append(first)
        start = stop
    return found


def _distance(a: Pair, b: Pair) -> tuple[int, int] | None:
    """How far the views of b are behind those of a, if they are alike and both can be views of one dimension more."""
    if a.which != b.which or a.read[:2] != b.read[:2] or a.write[:2] != b.write[:2] or len(a.read[0]) >= _MOST_DIMS:
        return None
    read, write = b.read[2] - a.read[2], b.write[2] - a.write[2]
    # what is read may be read for several places
    return (read, write) if read >= 0 and write > 0 else None


# -- wider copies


def _widened(pairs: Sequence[Pair], itemsize: int, forms: Sequence[Form]) -> list[Pair]:
    """The copies in elements of 16 bytes; none if one of them or a tensor's form does not allow it."""
    lane = WIDE // itemsize
    if lane <= 1 or not all(_is_wide(*form, lane) for form in forms):
        return []
    found = []
    for pair in pairs:
        read, write = _in_lanes(pair.read, lane), _in_lanes(pair.write, lane)
        if read is None or write is None:
            return []
        found.append(Pair(pair.which, read, write))
    return found


def _is_wide(shape: tuple[int, ...], strides: tuple[int, ...], lane: int) -> bool:
    """Whether a tensor of this shape and strides can be seen as one of elements ``lane`` times as wide."""
    if not shape:
        return False
    return shape[-1] % lane == 0 and strides[-1] == 1 and all(stride % lane == 0 for stride in strides[:-1])


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % WIDE == 0 and tensor.storage_offset() * tensor.element_size() % WIDE == 0


def _in_lanes(view: View, lane: int) -> View | None:
    sizes, strides, offset = view
    if not sizes or strides[-1] != 1 or sizes[-1] % lane or offset % lane or any(s % lane for s in strides[:-1]):
        return None
    return (*sizes[:-1], sizes[-1] // lane), (*(s // lane for s in strides[:-1]), 1), offset // lane


# -- making copies


def copy_views(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy view by view, in one call if there are several."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(list(targets), list(sources))


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
