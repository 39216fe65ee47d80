"""The moves between multi-axis distributions, on plain tuples: one collective each.

A dimension of N elements that is split over mesh axes of total size P in blocks of b keeps block j (elements j·b up to
(j+1)·b) on the linear coordinate j mod P, row-major over its axes. From that rule follow four facts, and every move
below is made of them. With an axis of size s, old coordinate c:

    drop the last axis     j mod P div s     = (j div s) mod (P/s)    the rest holds blocks of b·s
    drop the first axis    j mod P mod (P/s) = j mod (P/s)            the rest holds blocks of b
    add an axis in front   the inverse of dropping the first: each rank keeps a part of what it has, block kept
    add an axis at the back the inverse of dropping the last: the block is divided by s

Anything else needs data from outside the group of the moved axes, except a permutation of ranks and a change of block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from math import prod
from typing import NamedTuple

UNSPLIT = -1
Axes = tuple[int, ...]
Mapping = tuple[Axes, ...]


class State(NamedTuple):
    """What distinguishes the distributions of one mesh: axes per dimension, major to minor, and block lengths."""

    mapping: Mapping
    blocks: tuple[int, ...]


class Move(NamedTuple):
    """One step: its printed name, the collective it is charged as, where it leads, and the size of its group."""

    name: str
    collective: str  # "split", "allgather", "alltoall" or "permute"
    state: State
    n_procs: int


def max_block_size(length: int, n_procs: int) -> int:
    """The longest block that leaves none of ``n_procs`` processes without an element of ``length``."""
    return length if n_procs == 1 else max(1, (length - 1) // (n_procs - 1))


def split_fits(length: int, n_procs: int, block: int) -> bool:
    """Whether blocks of ``block`` give every process at least one of ``length`` elements."""
    return length >= n_procs and block <= max_block_size(length, n_procs)


def local_length(length: int, n_procs: int, block: int, coordinate: int = 0) -> int:
    """How many of ``length`` elements a coordinate holds; coordinate 0 never holds fewer than another.

    Complete rounds of P blocks give b elements each, and the rest R < P·b gives this one what lies behind c·b.
    """
    rounds, rest = divmod(length, n_procs * block)
    return rounds * block + min(max(rest - coordinate * block, 0), block)


def axes_size(sizes: Sequence[int], axes: Iterable[int]) -> int:
    """The number of processes along ``axes`` together."""
    return prod([sizes[axis] for axis in axes])


def max_local_size(shape: tuple[int, ...], sizes: tuple[int, ...], state: State) -> int:
    """Elements of the most loaded rank."""
    total = 1
    for length, axes, block in zip(shape, state.mapping, state.blocks):
        total *= local_length(length, axes_size(sizes, axes), block) if axes else length
    return total


def replace_dims(state: State, *changes: tuple[int, Axes, int]) -> State:
    """``state`` with (dimension, axes, block) put in for each of ``changes``; a dimension without axes is unsplit."""
    mapping, blocks = list(state.mapping), list(state.blocks)
    for tensor_dim, axes, block in changes:
        mapping[tensor_dim] = axes
        blocks[tensor_dim] = block if axes else UNSPLIT
    return State(tuple(mapping), tuple(blocks))


def swapped_axes(axes: Axes, first: int, second: int) -> Axes:
    """``axes`` with two mesh axes exchanged."""
    if first not in axes and second not in axes:
        return axes
    return tuple([second if axis == first else first if axis == second else axis for axis in axes])


def swap_axes(state: State, first: int, second: int) -> State:
    """``state`` with two mesh axes exchanged wherever they are."""
    return State(tuple(swapped_axes(axes, first, second) for axes in state.mapping), state.blocks)


def block_candidates(sizes: Sequence[int], longest: int, blocks: Iterable[int]) -> tuple[int, ...]:
    """1, the given block lengths, and their multiples and divisors by sizes of mesh axes, up to ``longest``."""
    factors = {1}
    for size in sizes:
        factors |= {factor * size for factor in factors}
    candidates = set()
    for block in {1, *(block for block in blocks if block > 0)}:
        candidates |= {block * factor for factor in factors}
        candidates |= {block // factor for factor in factors if block % factor == 0}
    return tuple(sorted(candidate for candidate in candidates if candidate <= longest))


class Part:
    """How one dimension is split: axes, block length, elements of the most loaded rank, number of processes.

    ``DimensionMoves`` makes one object for each pair of axes and block, so parts are equal if they are identical.
    """

    __slots__ = ("axes", "block", "n_procs", "share")

    def __init__(self, axes: Axes, block: int, n_procs: int, share: int) -> None:
        self.axes, self.block, self.n_procs, self.share = axes, block, n_procs, share


Parts = tuple[Part, ...]


class DimensionMoves:
    """The parts of one tensor dimension and what moves make of them, each worked out when it is first asked for."""

    def __init__(self, length: int, sizes: tuple[int, ...], blocks: Iterable[int]) -> None:
        self._length, self._sizes, self._blocks = length, sizes, blocks
        self._candidates: tuple[int, ...] = ()
        self._parts: dict[tuple[Axes, int], Part] = {}
        self._made_afresh: dict[Axes, list[Part]] = {}
        self._changed: dict[Part, list[Part]] = {}

    def part(self, axes: Axes, block: int) -> Part | None:
        """The dimension split over ``axes`` in blocks of ``block``; None if that leaves a process empty."""
        found = self._parts.get((axes, block))
        if found is None:
            key = (axes, block if axes else UNSPLIT)
            n_procs = axes_size(self._sizes, axes)
            if axes and not split_fits(self._length, n_procs, block):
                return None
            share = local_length(self._length, n_procs, block) if axes else self._length
            # all blocks of an unsplit dimension mean the same
            found = self._parts[axes, block] = self._parts.setdefault(key, Part(*key, n_procs, share))
        return found

    def fitting(self, axes: Axes, block: int) -> Part:
        """``part`` where it is known to fit."""
        found = self.part(axes, block)
        assert found is not None
        return found

    def made_afresh(self, axes: Axes) -> list[Part]:
        """The dimension split over ``axes`` in blocks of each candidate that leaves no process empty."""
        found = self._made_afresh.get(axes)
        if found is None:
            if not self._candidates:
                self._candidates = block_candidates(self._sizes, self._length, self._blocks)
            parts = [self.part(axes, block) for block in self._candidates]
            found = self._made_afresh[axes] = [part for part in parts if part is not None]
        return found

    def changed(self, part: Part) -> list[Part]:
        """The same axes with another block that is a multiple or a divisor."""
        found = self._changed.get(part)
        if found is None:
            old = part.block
            found = self._changed[part] = [
                other
                for other in self.made_afresh(part.axes)
                if other is not part and (other.block % old == 0 or old % other.block == 0)
            ]
        return found


class Way(NamedTuple):
    """The moves by one collective to one mapping: one for each of ``parts`` of ``tensor_dim``, the rest as in ``base``.

    No parts means all that ``MoveSet.parts_of`` finds. A move's name ends in its block, printed as -1 if it is
    ``usual_block``; without such, it has no block in its name.
    """

    name: tuple[str | int, ...]
    collective: str
    n_procs: int
    mapping: Mapping
    base: Parts
    tensor_dim: int
    parts: Sequence[Part] = ()
    usual_block: int | None = 0

    def state(self, part: Part) -> Parts:
        """Where the move with ``part`` leads."""
        return (*self.base[: self.tensor_dim], part, *self.base[self.tensor_dim + 1 :])

    def move(self, part: Part) -> Move:
        """The move with ``part``, as printed."""
        words = self.name
        if self.usual_block is not None:
            words = (*words, UNSPLIT if part.block == self.usual_block else part.block)
        return Move("_".join(map(str, words)), self.collective, state_of(self.state(part)), self.n_procs)


def state_of(parts: Parts) -> State:
    """The state that consists of ``parts``."""
    return State(tuple([part.axes for part in parts]), tuple([part.block for part in parts]))


class MoveSet:
    """The moves out of a state for one shape and one mesh.

    Args:
        blocks: for each dimension, block lengths to consider, with their multiples and divisors by sizes of axes.
    """

    def __init__(self, shape: tuple[int, ...], sizes: tuple[int, ...], blocks: Sequence[Iterable[int]]) -> None:
        self._sizes = sizes
        self._dims = [DimensionMoves(length, sizes, given) for length, given in zip(shape, blocks)]
        self._equal_axes = [(i, j) for i, j in combinations(range(len(sizes)), 2) if sizes[i] == sizes[j]]

    def parts(self, state: State) -> Parts:
        """A compatible state by its parts."""
        return tuple([dim.fitting(axes, block) for dim, axes, block in zip(self._dims, *state)])

    def moves(self, state: State) -> list[Move]:
        """Every move whose result is compatible, one name for each way to get somewhere.

        Of several names for the same result by the same collective the first of the order below is kept.
        """
        kept: dict[tuple[State, str, int], Move] = {}
        for way in self.ways(self.parts(state)):
            for part in way.parts or self.parts_of(way):
                move = way.move(part)
                kept.setdefault((move.state, move.collective, move.n_procs), move)
        return list(kept.values())

    def parts_of(self, way: Way) -> list[Part]:
        """The parts that lead to the mapping of ``way``, if it does not say: any block, or any change of block."""
        dim = self._dims[way.tensor_dim]
        before = way.base[way.tensor_dim]
        return dim.changed(before) if before.axes else dim.made_afresh(way.mapping[way.tensor_dim])

    def ways(self, parts: Parts) -> list[Way]:
        """Every way to move on from a state."""
        mapping = tuple([part.axes for part in parts])
        used = [axis for axes in mapping for axis in axes]
        free = [axis for axis in range(len(self._sizes)) if axis not in used]
        found: list[Way] = []
        for tensor_dim in range(len(parts)):
            for axis in free:
                names = ("split", tensor_dim, axis), ("split_minor", tensor_dim, axis)
                self._enter(found, names, "split", 0, parts, mapping, tensor_dim, (axis,), 0)
        for source, part in enumerate(parts):
            if part.axes:
                self._alltoalls(found, parts, mapping, source, part)
        for first, second in self._equal_axes:
            if first in used or second in used:
                after = tuple([swapped_axes(axes, first, second) for axes in mapping])
                base = tuple([dim.fitting(axes, part.block) for dim, axes, part in zip(self._dims, after, parts)])
                found.append(Way(("permute", first, second), "permute", 2, after, base, 0, base[:1], None))
        self._gathers(found, parts, mapping, used)
        for tensor_dim, part in enumerate(parts):
            if part.axes:
                name = ("changeBlockSize", tensor_dim)
                found.append(Way(name, "alltoall", part.n_procs, mapping, parts, tensor_dim))
        return found

    def _enter(
        self,
        found: list[Way],
        names: tuple[tuple[str | int, ...], tuple[str | int, ...]],
        collective: str,
        n_procs: int,
        base: Parts,
        mapping: Mapping,
        tensor_dim: int,
        moved: Axes,
        usual_block: int,
    ) -> None:
        """The ways for axes to come to a dimension: with any block if it was unsplit, else in front or at the back."""
        dim, before = self._dims[tensor_dim], base[tensor_dim]
        head, axes, tail = mapping[:tensor_dim], before.axes, mapping[tensor_dim + 1 :]
        if not axes:
            after = (*head, moved, *tail)
            found.append(Way(names[0], collective, n_procs, after, base, tensor_dim, (), usual_block))
            return
        front = dim.part((*moved, *axes), before.block)
        if front is not None:
            usual = front.block if collective == "alltoall" else 0
            after = (*head, front.axes, *tail)
            found.append(Way(names[0], collective, n_procs, after, base, tensor_dim, (front,), usual))
        shorter, remainder = divmod(before.block, axes_size(self._sizes, moved))
        back = None if remainder else dim.part((*axes, *moved), shorter)
        if back is not None:
            usual = back.block if collective == "alltoall" else 0
            after = (*head, back.axes, *tail)
            found.append(Way(names[1], collective, n_procs, after, base, tensor_dim, (back,), usual))

    def _alltoalls(self, found: list[Way], parts: Parts, mapping: Mapping, source: int, part: Part) -> None:
        """The ways in which all axes of ``source``, or its last one, go to another dimension."""
        verbs = ("alltoall", "alltoall_mt", "alltoall"), ("alltoall_mf", "alltoall_minor", "alltoall_minor")
        for moved, (to_front, to_back, to_unsplit) in zip((part.axes, part.axes[-1:]), verbs):
            n_procs = axes_size(self._sizes, moved)
            # on axes of size 1 alone a block may outgrow its dimension
            left = self._dims[source].part(part.axes[: -len(moved)], part.block * n_procs)
            if left is not None:
                base = (*parts[:source], left, *parts[source + 1 :])
                after = (*mapping[:source], left.axes, *mapping[source + 1 :])
                for target, there in enumerate(parts):
                    if target != source:
                        front = to_front if there.axes else to_unsplit
                        names = (front, source, target), (to_back, source, target)
                        self._enter(found, names, "alltoall", n_procs, base, after, target, moved, part.block)
            if len(part.axes) == 1:
                break

    def _gathers(self, found: list[Way], parts: Parts, mapping: Mapping, used: list[int]) -> None:
        for tensor_dim, part in enumerate(parts):
            axes = part.axes
            if not axes:
                continue
            dim, (head, tail) = self._dims[tensor_dim], (mapping[:tensor_dim], mapping[tensor_dim + 1 :])
            size = self._sizes[axes[-1]]
            rests = [(axes[-1], dim.part(axes[:-1], part.block * size))]
            if len(axes) > 1:
                rests.append((axes[0], dim.part(axes[1:], part.block)))
            for axis, rest in rests:
                if rest is not None:
                    name, after = ("allgather", axis), (*head, rest.axes, *tail)
                    size = self._sizes[axis]
                    found.append(Way(name, "allgather", size, after, parts, tensor_dim, (rest,), None))
        if used:
            unsplit, replicated = ((),) * len(parts), tuple([dim.fitting((), UNSPLIT) for dim in self._dims])
            n_procs = axes_size(self._sizes, used)
            found.append(Way(("allgather", "*"), "allgather", n_procs, unsplit, replicated, 0, replicated[:1], None))
