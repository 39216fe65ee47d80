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

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import NamedTuple

UNSPLIT = -1
Axes = tuple[int, ...]
# mapping, collective and n_procs of a move -> whether it can be part of a plan that is wanted
Promising = Callable[[tuple[Axes, ...], str, int], bool]


class State(NamedTuple):
    """What distinguishes the distributions of one mesh: axes per dimension, major to minor, and block lengths."""

    mapping: tuple[Axes, ...]
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
    return prod(sizes[axis] for axis in axes)


@lru_cache(maxsize=65536)
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


def swap_axes(state: State, first: int, second: int) -> State:
    """``state`` with two mesh axes exchanged wherever they are."""
    exchanged = {first: second, second: first}
    mapping = tuple(tuple(exchanged.get(axis, axis) for axis in axes) for axes in state.mapping)
    return State(mapping, state.blocks)


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


class MoveSet:
    """The moves out of a state for one shape and one mesh.

    Args:
        blocks: for each dimension, block lengths to consider, with their multiples and divisors by sizes of axes.
    """

    def __init__(self, shape: tuple[int, ...], sizes: tuple[int, ...], blocks: Sequence[Iterable[int]]) -> None:
        self.shape = shape
        self.sizes = sizes
        self.candidates = [block_candidates(sizes, length, given) for length, given in zip(shape, blocks)]
        self.equal_axes = [(i, j) for i, j in combinations(range(len(sizes)), 2) if sizes[i] == sizes[j]]
        self._group_sizes: dict[Axes, int] = {}
        self._fitting: dict[tuple[int, Axes], tuple[int, ...]] = {}

    def moves(
        self,
        state: State,
        wanted: Callable[[State], bool] = lambda state: True,
        promising: Promising = lambda mapping, collective, n_procs: True,
    ) -> list[Move]:
        """Every move whose result is compatible and wanted, one name for each way to get somewhere.

        Of several names for the same result by the same collective the first of the order below is kept. Where many
        block lengths could follow, ``promising`` is asked first whether any of them is of use.
        """
        kept: dict[tuple[State, str, int], Move] = {}
        for move in self._all_moves(state, promising):
            key = (move.state, move.collective, move.n_procs)
            if key not in kept and wanted(move.state):
                kept[key] = move
        return list(kept.values())

    def _all_moves(self, state: State, promising: Promising) -> Iterator[Move]:
        used = {axis for axes in state.mapping for axis in axes}
        free = [axis for axis in range(len(self.sizes)) if axis not in used]
        for tensor_dim in range(len(self.shape)):
            for axis in free:
                yield from self._splits(state, tensor_dim, axis, promising)
        for source in range(len(self.shape)):
            if state.mapping[source]:
                for target in range(len(self.shape)):
                    if target != source:
                        yield from self._alltoalls(state, source, target, promising)
        yield from self._permutes(state, used)
        yield from self._gathers(state, used)
        yield from self._block_changes(state, promising)

    def _group_size(self, axes: Axes) -> int:
        found = self._group_sizes.get(axes)
        if found is None:
            found = self._group_sizes[axes] = axes_size(self.sizes, axes)
        return found

    def _fits(self, tensor_dim: int, axes: Axes, block: int) -> bool:
        return not axes or split_fits(self.shape[tensor_dim], self._group_size(axes), block)

    def _fitting_blocks(self, tensor_dim: int, axes: Axes) -> tuple[int, ...]:
        """The candidates that leave no process of ``axes`` without an element of the dimension."""
        found = self._fitting.get((tensor_dim, axes))
        if found is None:
            found = tuple(block for block in self.candidates[tensor_dim] if self._fits(tensor_dim, axes, block))
            self._fitting[tensor_dim, axes] = found
        return found

    def _splits(self, state: State, tensor_dim: int, axis: int, promising: Promising) -> Iterator[Move]:
        axes, block = state.mapping[tensor_dim], state.blocks[tensor_dim]
        if not axes:
            if not promising(replace_dims(state, (tensor_dim, (axis,), 1)).mapping, "split", 0):
                return
            for new in self._fitting_blocks(tensor_dim, (axis,)):
                result = replace_dims(state, (tensor_dim, (axis,), new))
                yield Move(f"split_{tensor_dim}_{axis}_{new}", "split", result, 0)
            return
        if self._fits(tensor_dim, (axis, *axes), block):
            result = replace_dims(state, (tensor_dim, (axis, *axes), block))
            yield Move(f"split_{tensor_dim}_{axis}_{block}", "split", result, 0)
        shorter, remainder = divmod(block, self.sizes[axis])
        if not remainder and self._fits(tensor_dim, (*axes, axis), shorter):
            result = replace_dims(state, (tensor_dim, (*axes, axis), shorter))
            yield Move(f"split_minor_{tensor_dim}_{axis}_{shorter}", "split", result, 0)

    def _alltoalls(self, state: State, source: int, target: int, promising: Promising) -> Iterator[Move]:
        axes, block = state.mapping[source], state.blocks[source]
        for moved, front_name, back_name in (
            (axes, "alltoall", "alltoall_mt"),
            (axes[-1:], "alltoall_mf", "alltoall_minor"),
        ):
            n_procs = self._group_size(moved)
            left = axes[: len(axes) - len(moved)]
            leave = (source, left, block * n_procs)
            # on axes of size 1 alone a block may outgrow its dimension
            if not self._fits(*leave):
                continue
            there, there_block = state.mapping[target], state.blocks[target]
            if not there:
                if not promising(replace_dims(state, leave, (target, moved, 1)).mapping, "alltoall", n_procs):
                    continue
                name = front_name if moved == axes else back_name
                for new in self._fitting_blocks(target, moved):
                    result = replace_dims(state, leave, (target, moved, new))
                    printed = UNSPLIT if new == block else new
                    yield Move(f"{name}_{source}_{target}_{printed}", "alltoall", result, n_procs)
                continue
            if self._fits(target, (*moved, *there), there_block):
                result = replace_dims(state, leave, (target, (*moved, *there), there_block))
                yield Move(f"{front_name}_{source}_{target}_-1", "alltoall", result, n_procs)
            shorter, remainder = divmod(there_block, n_procs)
            if not remainder and self._fits(target, (*there, *moved), shorter):
                result = replace_dims(state, leave, (target, (*there, *moved), shorter))
                yield Move(f"{back_name}_{source}_{target}_-1", "alltoall", result, n_procs)

    def _permutes(self, state: State, used: set[int]) -> Iterator[Move]:
        for first, second in self.equal_axes:
            if first in used or second in used:
                yield Move(f"permute_{first}_{second}", "permute", swap_axes(state, first, second), 2)

    def _gathers(self, state: State, used: set[int]) -> Iterator[Move]:
        for tensor_dim, axes in enumerate(state.mapping):
            size = self.sizes[axes[-1]] if axes else 1
            if axes and self._fits(tensor_dim, axes[:-1], state.blocks[tensor_dim] * size):
                result = replace_dims(state, (tensor_dim, axes[:-1], state.blocks[tensor_dim] * size))
                yield Move(f"allgather_{axes[-1]}", "allgather", result, size)
            if len(axes) > 1:
                result = replace_dims(state, (tensor_dim, axes[1:], state.blocks[tensor_dim]))
                yield Move(f"allgather_{axes[0]}", "allgather", result, self.sizes[axes[0]])
        if used:
            replicated = State(((),) * len(self.shape), (UNSPLIT,) * len(self.shape))
            yield Move("allgather_*", "allgather", replicated, axes_size(self.sizes, used))

    def _block_changes(self, state: State, promising: Promising) -> Iterator[Move]:
        for tensor_dim, axes in enumerate(state.mapping):
            block = state.blocks[tensor_dim]
            n_procs = self._group_size(axes)
            if not axes or not promising(state.mapping, "alltoall", n_procs):
                continue
            for new in self._fitting_blocks(tensor_dim, axes):
                if new != block and (new % block == 0 or block % new == 0):
                    result = replace_dims(state, (tensor_dim, axes, new))
                    yield Move(f"changeBlockSize_{tensor_dim}_{new}", "alltoall", result, n_procs)
