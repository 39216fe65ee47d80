"""Boxes: products of one index set per dimension. What a rank holds, needs or sends is one box or a few."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod

from optim_redist.index_sets import IndexSet, intersect, size, take

Box = tuple[IndexSet, ...]


def volume(box: Box) -> int:
    """The number of elements."""
    return prod(map(size, box))


def intersect_boxes(a: Box, b: Box) -> Box | None:
    """The elements in both, None if there are none."""
    common = tuple(intersect(x, y) for x, y in zip(a, b))
    return common if all(common) else None


def cut(box: Box, points: Sequence[int]) -> list[list[Box]]:
    """Cut the box into shares, lists of boxes, at element counts ``0 = points[0] <= points[1] <= … = volume``.

    Shares are slabs of one dimension if some dimension can be cut at all these counts. Else they are ranges of the
    row-major order, each of at most 2·d - 1 boxes.
    """
    sizes = [size(indices) for indices in box]
    total = prod(sizes)
    assert (points[0], points[-1]) == (0, total), "shares must cover the box"
    for k, length in enumerate(sizes):
        inner = total // length
        if all(point % inner == 0 for point in points):
            return [
                [box[:k] + (take(box[k], start // inner, stop // inner),) + box[k + 1 :]] if start < stop else []
                for start, stop in pairwise(points)
            ]
    return [_row_major_range(box, sizes, start, stop) for start, stop in pairwise(points)]


def _row_major_range(box: Box, sizes: list[int], start: int, stop: int) -> list[Box]:
    if start >= stop:
        return []
    if not box:
        return [()]
    inner = prod(sizes[1:])
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)

    def rows(a: int, b: int, rest: list[Box]) -> list[Box]:
        return [(take(box[0], a, b), *other) for other in rest]

    if first == last:
        return rows(first, first + 1, _row_major_range(box[1:], sizes[1:], head, tail))
    found: list[Box] = []
    if head:
        found += rows(first, first + 1, _row_major_range(box[1:], sizes[1:], head, inner))
        first += 1
    if first < last:
        found += rows(first, last, [box[1:]])
    if tail:
        found += rows(last, last + 1, _row_major_range(box[1:], sizes[1:], 0, tail))
    return found


def fair_shares(total: int, num_shares: int) -> list[int]:
    """``total`` in whole parts that differ by at most one, larger ones first."""
    whole, rest = divmod(total, num_shares)
    return [whole + 1] * rest + [whole] * (num_shares - rest)


class DisjointBoxes:
    """Pairwise disjoint boxes, indexed so that those near another box are found without looking at all of them.

    A box's extent in a dimension is the distance from its first index to one past its last. For every dimension and
    every number of bits, one list has the boxes whose extent has so many, sorted by first index. Of that list, only
    boxes that start less than 2^bits before another box can reach it.

    Attributes:
        num_elements: elements of all boxes together.
    """

    def __init__(self, boxes: Iterable[Box] = ()) -> None:
        self.num_elements = 0
        self._boxes: list[Box] = []
        # for every dimension, keyed by the bits of the extent: (first index, number of the box), sorted
        self._starts: list[dict[int, list[tuple[int, int]]]] = []
        for box in boxes:
            self.add(box)

    def add(self, box: Box) -> None:
        """Put in a box that has no element in common with the others."""
        if not self._boxes:
            self._starts = [{} for _ in box]
        for by_bits, indices in zip(self._starts, box):
            start, stop = _ends(indices)
            insort(by_bits.setdefault((stop - start).bit_length(), []), (start, len(self._boxes)))
        self._boxes.append(box)
        self.num_elements += volume(box)

    def num_common(self, box: Box) -> int:
        """How many elements of ``box`` lie in these boxes."""
        found = 0
        for other in self._near(box):
            common = intersect_boxes(box, other)
            if common is not None:
                found += volume(common)
        return found

    def _near(self, box: Box) -> Iterable[Box]:
        """The boxes that may meet ``box``: those that may reach it in the dimension in which the fewest may."""
        if not self._boxes or not box:
            return self._boxes
        slices = [list(_reaching(by_bits, *_ends(indices))) for by_bits, indices in zip(self._starts, box)]
        fewest = min(slices, key=lambda found: sum(last - first for _, first, last in found))
        return (self._boxes[number] for starts, first, last in fewest for _, number in starts[first:last])


def _ends(indices: IndexSet) -> tuple[int, int]:
    """The first index of a set, and one past the last."""
    return indices[0].start, max(run.stop for run in indices)


def _reaching(
    by_bits: dict[int, list[tuple[int, int]]], start: int, stop: int
) -> Iterator[tuple[list[tuple[int, int]], int, int]]:
    """For each list of boxes, the slice (list, first, last) of those that may reach ``start … stop - 1``."""
    for bits, starts in by_bits.items():
        yield starts, bisect_left(starts, (start - (1 << bits) + 1,)), bisect_left(starts, (stop,))
