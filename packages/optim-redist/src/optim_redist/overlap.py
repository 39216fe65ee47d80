"""One tensor dimension of a redistribution: what source and target coordinates hold of it and share.

A contiguous division is known by its cut points alone, so what two of them share is found by one sweep. Index sets are
made only for what has to be moved, or where a division is not contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from optim_redist._tools.lazy import lazy
from optim_redist.index_sets import IndexSet, intersect, interval, num_below, size
from optim_redist.layout import Kind

# (kind, None for a dimension that is not split; sizes of the axes that split it)
Division = tuple[Kind | None, tuple[int, ...]]


class Side:
    """How one side divides the dimension.

    Attributes:
        cuts: cut points of a contiguous division, else None.
        sizes: for every coordinate, the number of indices that it holds.
        is_even: whether all coordinates hold equally many.
    """

    def __init__(self, n: int, division: Division) -> None:
        self._n, (self._kind, self._axis_sizes) = n, division
        self.cuts: Sequence[int] | None
        if self._kind is None:
            self.cuts, self.sizes, self.is_even = (0, n), [n], True
            return
        self.cuts = cuts = self._kind.cut_points(n, self._axis_sizes)
        if isinstance(cuts, range):
            self.sizes, self.is_even = [cuts.step] * (len(cuts) - 1), True
            return
        self.sizes = list(map(size, self.sets)) if cuts is None else [b - a for a, b in pairwise(cuts)]
        self.is_even = self.sizes.count(self.sizes[0]) == len(self.sizes)

    @lazy
    def sets(self) -> tuple[IndexSet, ...]:
        """What every coordinate holds."""
        return (interval(0, self._n),) if self._kind is None else self._kind.index_sets(self._n, self._axis_sizes)


class Overlap:
    """One dimension of size ``n``, divided by a source and a target.

    Attributes:
        src, dst: the two divisions, one object if they are equal.
        alike: how many indices every source coordinate shares with every target coordinate, if that is one number: one
            side divides the dimension evenly and the other does not split it; else None.
    """

    def __init__(self, n: int, src: Division, dst: Division) -> None:
        self.n = n
        self.src = Side(n, src)
        self.dst = self.src if dst == src else Side(n, dst)
        self.alike: int | None = None
        if len(self.src.sizes) == 1 and self.dst.is_even:
            self.alike = self.dst.sizes[0]
        elif len(self.dst.sizes) == 1 and self.src.is_even:
            self.alike = self.src.sizes[0]

    @lazy
    def common(self) -> list[dict[int, int]]:
        """For every source coordinate i the target coordinates j that it meets, ascending, and in how many indices:

        ``common[i] = {j: n_k(i, j)}``.
        """
        src, dst = self.src, self.dst
        if len(src.sizes) == 1:
            return [{j: n for j, n in enumerate(dst.sizes) if n}]
        if len(dst.sizes) == 1:
            return [{0: n} if n else {} for n in src.sizes]
        if src is dst:
            return [{i: n} if n else {} for i, n in enumerate(src.sizes)]
        if src.cuts is not None and dst.cuts is not None:
            return _sweep(src.cuts, dst.cuts)
        if src.cuts is not None:
            return _common_by_cuts(src.cuts, dst.sets)
        if dst.cuts is not None:
            found: list[dict[int, int]] = [{} for _ in src.sizes]
            for j, row in enumerate(_common_by_cuts(dst.cuts, src.sets)):
                for i, n in row.items():
                    found[i][j] = n
            return found
        found = [{} for _ in src.sizes]
        for i, a in enumerate(src.sets):
            for j, b in enumerate(dst.sets):
                if a and b and a[0].start < b[-1].stop and b[0].start < a[-1].stop and (n := size(intersect(a, b))):
                    found[i][j] = n
        return found

    @lazy
    def before(self) -> list[dict[int, int]]:
        """For every entry of ``common``, the sum of the entries before it in its row."""
        return [dict(zip(row, accumulate(row.values(), initial=0))) for row in self.common]

    @lazy
    def from_src(self) -> list[list[tuple[int, IndexSet]]]:
        """For every source coordinate, the target coordinates it meets and the indices they share."""
        here, there = self.src.sets, self.dst.sets
        return [[(j, intersect(here[i], there[j])) for j in row] for i, row in enumerate(self.common)]

    @lazy
    def from_dst(self) -> list[list[tuple[int, IndexSet]]]:
        """For every target coordinate, the source coordinates it meets and the indices they share."""
        found: list[list[tuple[int, IndexSet]]] = [[] for _ in self.dst.sizes]
        for i, row in enumerate(self.from_src):
            for j, common in row:
                found[j].append((i, common))
        return found


def _sweep(src: Sequence[int], dst: Sequence[int]) -> list[dict[int, int]]:
    """``common`` of two contiguous divisions, given by their cut points."""
    found: list[dict[int, int]] = [{} for _ in range(len(src) - 1)]
    i = j = at = 0
    while i + 1 < len(src) and j + 1 < len(dst):
        end, other = src[i + 1], dst[j + 1]
        stop = end if end < other else other
        if stop > at:
            found[i][j] = stop - at
            at = stop
        if end == stop:
            i += 1
        if other == stop:
            j += 1
    return found


def _common_by_cuts(cuts: Sequence[int], sets: Sequence[IndexSet]) -> list[dict[int, int]]:
    """``common`` of a contiguous division, given by its cut points, and of sets, by their indices below each cut."""
    found: list[dict[int, int]] = [{} for _ in range(len(cuts) - 1)]
    for j, held in enumerate(sets):
        below = [num_below(held, cut) for cut in cuts]
        for row, (a, b) in zip(found, pairwise(below)):
            if a < b:
                row[j] = b - a
    return found


@lru_cache(maxsize=4096)
def overlap(n: int, src: Division, dst: Division) -> Overlap:
    """The overlap of two divisions; cached."""
    return Overlap(n, src, dst)
