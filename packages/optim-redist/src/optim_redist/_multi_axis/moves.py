"""The moves between multi-axis distributions, on plain tuples: one collective each.

A dimension of N elements that is split over mesh axes of total size P in blocks of b keeps block j (elements j·b up to
(j+1)·b) on the linear coordinate j mod P, row-major over its axes. From that rule follow four facts, of which every
move is composed. For an axis of size s:

    drop the last axis     j mod P div s     = (j div s) mod (P/s)    the rest holds blocks of b·s
    drop the first axis    j mod P mod (P/s) = j mod (P/s)            the rest holds blocks of b
    add an axis in front   the inverse of dropping the first: each rank keeps a part of what it has, block kept
    add an axis at the back the inverse of dropping the last: the block is divided by s

Anything else needs data from outside the group of the moved axes, except a permutation of ranks and a change of block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from operator import index
from typing import Any, NamedTuple

UNSPLIT = -1
Axes = tuple[int, ...]
DimsMapping = tuple[Axes, ...]


def whole_numbers(values: Any, argument: str, what: str) -> tuple[int, ...]:
    """The numbers, or the one number, as ints; a fraction would lose its part behind the point."""
    try:
        return tuple(map(index, values)) if isinstance(values, Iterable) else (index(values),)
    except TypeError:
        raise ValueError(f"{argument} has whole numbers as {what}, got {values!r}") from None


class State(NamedTuple):
    """What distinguishes the distributions of one mesh: axes per dimension, major to minor, and block lengths."""

    mapping: DimsMapping
    blocks: tuple[int, ...]


class Move(NamedTuple):
    """One step: its printed name, the collective it is charged as, where it leads, and the size of its group.

    ``elements``: how many the most loaded rank holds after it.
    """

    name: str
    collective: str  # "split", "allgather", "alltoall" or "permute"
    state: State
    n_procs: int
    elements: int


def max_block_size(length: int, n_procs: int) -> int:
    """The longest block that leaves none of ``n_procs`` processes without an element of ``length``."""
    return length if n_procs == 1 else max(1, (length - 1) // (n_procs - 1))


def split_fits(length: int, n_procs: int, block: int) -> bool:
    """Whether blocks of ``block`` give every process at least one of ``length`` elements."""
    return length >= n_procs and block <= max_block_size(length, n_procs)


def local_length(length: int, n_procs: int, block: int, coordinate: int = 0) -> int:
    """How many of ``length`` elements a coordinate holds; coordinate 0 never holds fewer than another.

    Complete rounds of P blocks give b elements each; of the R < P·b left, coordinate c gets up to b, from c·b on.
    """
    rounds, rest = divmod(length, n_procs * block)
    if not coordinate:
        return rounds * block + min(rest, block)
    return rounds * block + min(max(rest - coordinate * block, 0), block)


def axes_size(sizes: Sequence[int], axes: Sequence[int]) -> int:
    """The number of processes along ``axes`` together."""
    return sizes[axes[0]] if len(axes) == 1 else prod([sizes[axis] for axis in axes])


def max_local_size(shape: tuple[int, ...], sizes: tuple[int, ...], state: State) -> int:
    """Elements of the most loaded rank."""
    total = 1
    for length, axes, block in zip(shape, state.mapping, state.blocks):
        if axes:
            length = local_length(length, axes_size(sizes, axes), block)
        total *= length
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
