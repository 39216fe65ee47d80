"""Boxes: products of one index set a dimension. What a rank holds, needs or sends is a box or a few."""

from __future__ import annotations

from collections.abc import Sequence
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
    """The box divided at element counts ``0 = points[0] <= points[1] <= … = volume``: a list of boxes each share.

    Shares are slabs of one dimension if some dimension allows it. Else they are ranges of the row-major order, each
    of which is at most 2·d - 1 boxes.
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
