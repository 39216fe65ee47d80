"""The ways to divide a tensor dimension among the coordinates of its mesh axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from optim_redist._mesh import int_tuple
from optim_redist._tools.lazy import lazy
from optim_redist.errors import LayoutError
from optim_redist.index_sets import IndexSet, from_intervals, interval, intervals, strided


@dataclass(frozen=True)
class Kind:
    """How a dimension is divided among the P coordinates of its axes."""

    def index_sets(self, n: int, axis_sizes: Sequence[int]) -> tuple[IndexSet, ...]:
        """What each of the ``prod(axis_sizes)`` coordinates holds of a dimension of size ``n``."""
        cuts = self.cut_points(n, axis_sizes)
        assert cuts is not None, "a kind that is not contiguous says its index sets itself"
        return tuple(interval(start, stop) for start, stop in pairwise(cuts))

    def cut_points(self, n: int, axis_sizes: Sequence[int]) -> Sequence[int] | None:
        """The P + 1 points between which the coordinates hold one interval each, in order; None if not contiguous."""
        return None

    def text(self, names: Sequence[str]) -> str:
        """The text of a dimension that is divided this way over mesh axes with these names."""
        return ".".join(names)


@dataclass(frozen=True)
class Block(Kind):
    """Contiguous blocks of ceil(n / P); trailing ones are short or empty."""

    def cut_points(self, n: int, axis_sizes: Sequence[int]) -> Sequence[int]:
        total = prod(axis_sizes)
        block = -(-n // total)
        if block * total == n:
            return range(0, n + 1, block) if block else (0,) * (total + 1)
        return [min(n, c * block) for c in range(total + 1)]


@dataclass(frozen=True)
class Chunk(Kind):
    """``torch.chunk`` axis after axis: each cuts the n indices left by the axes before into blocks of ceil(n / p)."""

    def cut_points(self, n: int, axis_sizes: Sequence[int]) -> Sequence[int]:
        points: Sequence[int] = (0, n)
        for p in axis_sizes:
            finer = [0]
            for start, stop in pairwise(points):
                block = -(-(stop - start) // p)
                finer += (min(stop, start + c * block) for c in range(1, p + 1))
            points = finer
        return points

    def text(self, names: Sequence[str]) -> str:
        return "/".join(names) if len(names) > 1 else f"{names[0]}/"


@dataclass(frozen=True)
class Strided(Kind):
    """Axis after axis like ``Chunk``, but an axis with split factor s cuts what is left into s pieces first.

    Each piece is then cut into p chunks, and coordinate c holds the c-th chunk of every piece, concatenated: torch's
    ``_StridedShard``. With all factors 1 this is ``Chunk``.

    ``flat`` cuts into all s·p chunks at once, as torch 2.9 did; the result differs where sizes are uneven.
    """

    split_factors: tuple[int, ...]
    flat: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "split_factors", int_tuple(self.split_factors, "split factors"))
        if any(factor < 1 for factor in self.split_factors):
            raise LayoutError(f"split factors are 1 or more, got {self.split_factors}")
        # a text that says no would count as True
        if not isinstance(self.flat, bool):
            raise LayoutError(f"flat is True or False, got {self.flat!r}")

    def index_sets(self, n: int, axis_sizes: Sequence[int]) -> tuple[IndexSet, ...]:
        if len(self.split_factors) != len(axis_sizes):
            raise LayoutError(f"{len(axis_sizes)} mesh axes need as many split factors, got {self.split_factors}")
        held = [[(0, n)] if n else []]
        for p, factor in zip(axis_sizes, self.split_factors):
            taken: list[list[tuple[int, int]]] = []
            for pieces in held:
                if self.flat:
                    every = _cut_in_chunks(pieces, factor * p)
                    cut = [every[k : k + p] for k in range(0, len(every), p)]
                else:
                    cut = [_cut_in_chunks(piece, p) for piece in _cut_in_chunks(pieces, factor)]
                # pieces may have fewer chunks than p
                taken += ([run for chunks in cut for chunk in chunks[c : c + 1] for run in chunk] for c in range(p))
            held = taken
        return tuple(from_intervals(pieces) for pieces in held)

    def text(self, names: Sequence[str]) -> str:
        mark = "@@" if self.flat else "@"
        return "/".join(f"{name}{mark}{factor}" for name, factor in zip(names, self.split_factors))


def _cut_in_chunks(pieces: list[tuple[int, int]], count: int) -> list[list[tuple[int, int]]]:
    """``torch.chunk`` of the indices that the intervals list, without empty chunks: ``count`` lists of intervals or
    fewer, the last one short."""
    total = sum(stop - start for start, stop in pieces)
    length = max(1, -(-total // count))
    chunks: list[list[tuple[int, int]]] = [[] for _ in range(-(-total // length))]
    done = 0
    for start, stop in pieces:
        while start < stop:
            chunk, used = divmod(done, length)
            taken = min(stop - start, length - used)
            chunks[chunk].append((start, start + taken))
            start, done = start + taken, done + taken
    return chunks


@dataclass(frozen=True)
class Cyclic(Kind):
    """Blocks of ``block`` indices dealt out in turn: block j belongs to coordinate j mod P."""

    block: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or isinstance(self.block, bool) or self.block < 1:
            raise LayoutError(f"Cyclic needs a block of at least 1 index, a whole number, got {self.block!r}")

    def cut_points(self, n: int, axis_sizes: Sequence[int]) -> Sequence[int] | None:
        total = prod(axis_sizes)
        return [min(n, c * self.block) for c in range(total + 1)] if self.block * total >= n else None

    def index_sets(self, n: int, axis_sizes: Sequence[int]) -> tuple[IndexSet, ...]:
        b, total = self.block, prod(axis_sizes)
        whole, tail = divmod(n, b)
        sets = []
        for c in range(total):
            held = strided(c * b, b, total * b, (whole - c + total - 1) // total)
            if tail and whole % total == c:
                held += interval(whole * b, n)
            sets.append(from_intervals((r.start, r.stop) for r in held) if all(r.repeats == 1 for r in held) else held)
        return tuple(sets)

    def text(self, names: Sequence[str]) -> str:
        return f"{'.'.join(names)}~{self.block}"


@dataclass(frozen=True)
class Ragged(Kind):
    """Contiguous pieces between P + 1 non-decreasing cut points, the first 0 and the last n."""

    cuts: tuple[int, ...]

    def __init__(self, cuts: Iterable[int]) -> None:
        points = int_tuple(cuts, "cut points")
        if len(points) < 2 or points[0] != 0 or list(points) != sorted(points):
            raise LayoutError(f"cut points start at 0 and never decrease, got {points}")
        object.__setattr__(self, "cuts", points)

    def cut_points(self, n: int, axis_sizes: Sequence[int]) -> Sequence[int]:
        total = prod(axis_sizes)
        if len(self.cuts) != total + 1 or self.cuts[-1] != n:
            raise LayoutError(
                f"a dimension of size {n} cut for {total} coordinates needs {total + 1} cut points from 0 to {n}, "
                f"got {self.cuts}"
            )
        return self.cuts

    def text(self, names: Sequence[str]) -> str:
        return f"{'.'.join(names)}!{':'.join(map(str, self.cuts))}"


@dataclass(frozen=True)
class Intervals(Kind):
    """Any sorted disjoint intervals per coordinate; together they cover the dimension."""

    table: tuple[tuple[tuple[int, int], ...], ...]

    def __init__(self, table: Iterable[Iterable[Sequence[int]]]) -> None:
        try:
            given = tuple(tuple((start, stop) for start, stop in row) for row in table)
            rows = tuple(tuple((int(start), int(stop)) for start, stop in row) for row in given)
        except (TypeError, ValueError):
            raise LayoutError(f"a coordinate's intervals are pairs (start, stop), got {table!r}") from None
        if rows != given:
            raise LayoutError(f"the ends of intervals are whole numbers, got {given}")
        for row in rows:
            ends = [end for piece in row for end in piece]
            if ends != sorted(ends):
                raise LayoutError(f"the intervals of a coordinate are sorted and disjoint, got {row}")
        object.__setattr__(self, "table", rows)

    @classmethod
    def of_sets(cls, sets: Iterable[IndexSet]) -> Intervals:
        """The kind whose coordinates hold these sets; nothing is checked."""
        made = cls.__new__(cls)
        vars(made)["table"] = tuple([tuple(intervals(held)) for held in sets])
        return made

    @lazy
    def _pieces(self) -> list[tuple[int, int]]:
        return sorted([(start, stop) for row in self.table for start, stop in row if start < stop])

    @lazy
    def _sets(self) -> tuple[IndexSet, ...]:
        return tuple(map(from_intervals, self.table))

    def index_sets(self, n: int, axis_sizes: Sequence[int]) -> tuple[IndexSet, ...]:
        total = prod(axis_sizes)
        if len(self.table) != total:
            raise LayoutError(f"{total} coordinates need as many rows of intervals, got {len(self.table)}")
        ends = [0] + [end for piece in self._pieces for end in piece] + [n]
        if any(ends[k] != ends[k + 1] for k in range(0, len(ends), 2)):
            raise LayoutError(f"the intervals must cover 0 … {n} once, got {self._pieces}")
        return self._sets

    def text(self, names: Sequence[str]) -> str:
        rows = "|".join(",".join(f"{start}:{stop}" for start, stop in row) for row in self.table)
        return f"{'.'.join(names)}{{{rows}}}"


KINDS: dict[str, type[Kind]] = {
    "block": Block,
    "chunk": Chunk,
    "strided": Strided,
    "cyclic": Cyclic,
    "ragged": Ragged,
    "intervals": Intervals,
}
