"""States between two layouts: which prime factors of the mesh axes split which dimension of the tensor.

Every mesh axis is cut into prime factors, major to minor. A state says which factors split which dimension, in which
order, and which are pending; the others replicate. A dimension is divided by nested chunks, factor after factor, so
that its last factors can be dropped and added without moving the rest. A dimension of the source or the target that
is divided otherwise (cyclic, ragged, …) is foreign: a marker follows its factors, and all of them come and go together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, permutations, product
from math import prod
from typing import Literal, NamedTuple

from optim_redist.index_sets import IndexSet, same, size
from optim_redist.layout import Chunk, Kind, Layout, Mesh, Split, Strided
from optim_redist.ownership import normal_form, simplest_kind

CollectiveOp = Literal[
    "slice", "all_gather", "all_to_all", "permute", "reduce_scatter", "all_reduce", "change_block", "init_partial"
]
Factors = tuple[int, ...]
# markers behind the factors of foreign dimensions
AS_SOURCE, AS_TARGET = -1, -2


class State(NamedTuple):
    """Factors of every dimension, major to minor, and the factors along which contributions are pending."""

    dims: tuple[Factors, ...]
    pending: Factors


class Move(NamedTuple):
    """A collective along some factors, what the fullest rank receives, and where it leads."""

    op: CollectiveOp
    factors: Factors
    recv: int
    state: State


def is_foreign(factors: Factors) -> bool:
    """Whether a dimension is divided otherwise than by chunks."""
    return bool(factors) and factors[-1] < 0


def prime_factors(n: int) -> list[int]:
    """The primes whose product is n, ascending."""
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found


def common_grid(src: Mesh, dst: Mesh) -> tuple[list[int], list[list[Factors]]] | None:
    """Prime sizes, major to minor, of a grid that refines both meshes, and the factors of every axis of each."""
    if src.ranks != dst.ranks:
        return None
    strides = []
    for mesh in (src, dst):
        strides.append([prod(mesh.sizes[axis + 1 :]) for axis in range(mesh.num_axes)])
    cuts = sorted({src.num_ranks, *strides[0], *strides[1]}, reverse=True)
    sizes: list[int] = []
    place = {src.num_ranks: 0}
    for larger, smaller in zip(cuts, [*cuts[1:], 1]):
        if larger % smaller:
            return None
        sizes += prime_factors(larger // smaller)
        place[smaller] = len(sizes)
    factors = []
    for mesh, steps in zip((src, dst), strides):
        factors.append([tuple(range(place[step * size], place[step])) for step, size in zip(steps, mesh.sizes)])
    return sizes, factors


class Space:
    """The states between two layouts of one shape: their factors, sizes and labels."""

    def __init__(
        self, shape: tuple[int, ...], src: Layout, dst: Layout, sizes: list[int], factors: list[list[Factors]]
    ) -> None:
        self.shape, self.sizes = shape, sizes
        self.mesh = Mesh(sizes, ranks=src.mesh.ranks)
        self.ops: dict[int, str] = {}
        for layout, axes in ((dst, factors[1]), (src, factors[0])):
            self.ops |= {factor: op for axis, op in layout.partial for factor in axes[axis]}
        src_pending = {factor: op for axis, op in src.partial for factor in factors[0][axis]}
        dst_pending = {factor: op for axis, op in dst.partial for factor in factors[1][axis]}
        # a reduction that only the target has pending starts from a replicated factor, at the very end and for free
        kept = {factor for factor, op in dst_pending.items() if src_pending.get(factor) == op}
        self.started = {factor: op for factor, op in dst_pending.items() if factor not in kept}
        self.num_factors = len(sizes)
        self.even = [True] * len(shape)
        # by foreign dimension and marker: the index sets of its coordinates, and the kind that gives them
        self.foreign: dict[tuple[int, int], tuple[Sequence[IndexSet], Kind]] = {}
        src_dims = self._dims(src, factors[0], AS_SOURCE)
        dst_dims = self._dims(dst, factors[1], AS_TARGET)
        for tensor_dim, (here, there) in enumerate(zip(src_dims, dst_dims)):
            if is_foreign(here) and is_foreign(there) and here[:-1] == there[:-1]:
                held, wanted = self.foreign[tensor_dim, AS_SOURCE][0], self.foreign[tensor_dim, AS_TARGET][0]
                if all(map(same, held, wanted)):
                    src_dims[tensor_dim] = there
        self.start = State(tuple(src_dims), tuple(sorted(src_pending)))
        self.target = State(tuple(dst_dims), tuple(sorted(kept)))
        self._lengths: dict[tuple[int, Factors], int] = {}
        self.start_size, self.target_size = self.local_size(self.start), self.local_size(self.target)

    @classmethod
    def of(cls, shape: tuple[int, ...], src: Layout, dst: Layout) -> Space | None:
        grid = common_grid(src.mesh, dst.mesh)
        return None if grid is None else cls(shape, src, dst, *grid)

    def _dims(self, layout: Layout, factors: list[Factors], marker: int) -> list[Factors]:
        dims: list[Factors] = []
        for tensor_dim, split in enumerate(layout.dims):
            used = tuple(chain.from_iterable(factors[axis] for axis in split.axes)) if split else ()
            n, sizes = self.shape[tensor_dim], [self.sizes[factor] for factor in used]
            if n % prod(sizes):
                self.even[tensor_dim] = False
            if split and used:
                held = split.kind.index_sets(n, layout.axis_sizes(tensor_dim))
                if not all(map(same, Chunk().index_sets(n, sizes), held)):
                    kind = split.kind
                    if isinstance(kind, Chunk | Strided) and len(sizes) != len(split.axes):
                        # these kinds cut axis by axis, and here axes are cut into factors
                        kind = simplest_kind(list(map(normal_form, held)), n, sizes)
                    self.foreign[tensor_dim, marker] = held, kind
                    used = (*used, marker)
            dims.append(used)
        return dims

    def group_size(self, factors: Factors) -> int:
        return prod(self.sizes[factor] for factor in factors if factor >= 0)

    def length(self, tensor_dim: int, factors: Factors) -> int:
        """The length of a dimension's longest piece."""
        key = (tensor_dim, factors)
        if key not in self._lengths:
            n = self.shape[tensor_dim]
            if is_foreign(factors):
                n = max(map(size, self.foreign[tensor_dim, factors[-1]][0]))
            else:
                for factor in factors:
                    n = -(-n // self.sizes[factor])
            self._lengths[key] = n
        return self._lengths[key]

    def local_size(self, state: State) -> int:
        """Elements of the fullest rank."""
        size = 1
        for tensor_dim, factors in enumerate(state.dims):
            size *= self.length(tensor_dim, factors)
        return size

    def fits(self, tensor_dim: int, factors: Factors) -> bool:
        """Whether factors may divide a dimension: even dimensions are only cut evenly, others in any way."""
        return not self.even[tensor_dim] or self.shape[tensor_dim] % self.group_size(factors) == 0

    def least_recv(self, state: State, any_labels: bool) -> int:
        """What some rank must still receive to reach the target, or, with ``any_labels``, one with other labels."""
        if state.pending != self.target.pending:
            return self.target_size
        kept = 1
        for tensor_dim, (here, there) in enumerate(zip(state.dims, self.target.dims)):
            common = min(len(here), len(there))
            if not any_labels and here[:common] != there[:common] and not (is_foreign(here) or is_foreign(there)):
                return self.target_size
            kept *= min(self.length(tensor_dim, here), self.length(tensor_dim, there))
        return max(0, self.target_size - kept)

    # -- labels

    def relabelled(self, state: State) -> State:
        """The state with each factor replaced by the smallest free label of the same size.

        Pending factors and factors of foreign dimensions keep their labels.
        """
        fixed = {*state.pending, *chain.from_iterable(dim for dim in state.dims if is_foreign(dim))}
        free: dict[int, list[int]] = {}
        for factor in range(self.num_factors - 1, -1, -1):
            if factor not in fixed:
                free.setdefault(self.sizes[factor], []).append(factor)
        dims = (
            dim if is_foreign(dim) else tuple(free[self.sizes[factor]].pop() for factor in dim) for dim in state.dims
        )
        return State(tuple(dims), state.pending)

    def permutations(self, state: State) -> set[State]:
        """The states to which a permutation of ranks can lead, with the smallest labels.

        Where cuts are even, it can also reorder factors of different sizes within a dimension. It is only allowed once
        pending factors and foreign dimensions are as in the target.
        """
        if state.pending != self.target.pending:
            return set()
        for here, there in zip(state.dims, self.target.dims):
            if here != there and (is_foreign(here) or is_foreign(there)):
                return set()
        orders = []
        for dim, even in zip(state.dims, self.even):
            # reordering factors of one size only changes labels; a marker keeps its place
            exchangeable = even and not is_foreign(dim) and len({self.sizes[factor] for factor in dim}) > 1
            orders.append(set(permutations(dim)) if exchangeable else {dim})
        return {self.relabelled(State(dims, state.pending)) for dims in product(*orders)}

    def labelled(self, moves: list[Move]) -> list[Move]:
        """The moves with true labels: those after the permutation are relabelled so that they end at the target.

        A move keeps the labels of the state before it. Going backwards, a factor that is in use after a move gets the
        label at its place there; a factor that the move has freed gets any free label of its size.
        """
        first = next(k for k, move in enumerate(moves) if move.op == "permute")
        state, named = self.target, []
        for k in range(len(moves) - 1, first, -1):
            before = self.relabelled(moves[k - 1].state)
            names = dict(zip(chain.from_iterable(moves[k].state.dims), chain.from_iterable(state.dims)))
            taken = {*names.values(), *state.pending}
            for factor in chain.from_iterable(before.dims):
                if factor not in names:
                    size = self.sizes[factor]
                    names[factor] = next(f for f in range(self.num_factors) if f not in taken and self.sizes[f] == size)
                    taken.add(names[factor])
            for factor in moves[k].factors:
                names.setdefault(factor, factor)
            named.append(moves[k]._replace(state=state, factors=tuple(names[factor] for factor in moves[k].factors)))
            state = State(tuple(tuple(names[factor] for factor in dim) for dim in before.dims), before.pending)
        return [*moves[:first], moves[first]._replace(state=state), *named[::-1]]

    def layout(self, state: State, started: bool = False) -> Layout:
        """The state as a layout on the mesh of prime factors."""
        dims = []
        for tensor_dim, factors in enumerate(state.dims):
            kind = self.foreign[tensor_dim, factors[-1]][1] if is_foreign(factors) else Chunk()
            axes = tuple(factor for factor in factors if factor >= 0)
            dims.append(Split(axes, kind) if axes else None)
        pending: dict[int | str, str] = {factor: self.ops[factor] for factor in state.pending}
        if started:
            for factor, op in self.started.items():
                pending[factor] = op
        return Layout(self.mesh, dims, pending)
