"""The cheapest sequence of plain collectives from one layout to another, by A* over prime-factored mesh axes.

Every mesh axis is cut into prime factors, major to minor. A state says which factors split which dimension, in which
order, and which are pending; the others replicate. Dimensions are divided by nested chunks, factor after factor, so
that the last factors of a dimension can be dropped and added without moving the rest. With L elements on the fullest
rank and n ranks in a group, the moves and what a rank receives are

    slice            add an unused factor at the end of a dimension                         0
    gather           drop the last factors of a dimension, all at once                      (n - 1)·L
    all-to-all       move the last factors of a dimension to the end of another             (n - 1)/n·L; uneven: max
                                                                                            of L before and after
    permutation      any state with equal pieces: ranks swap what they hold, at most once   L
    reduce-scatter   move pending factors to the end of a dimension                         (n - 1)/n·L
    all-reduce       finish pending factors                                                 2(n - 1)/n·L
    change of block  a division that is not by chunks (cyclic, ragged, …) into one that is, or back, inside the group
                     of the dimension                                                       max(L before, L after)

The estimate is the receive bound of what is left. If in every dimension the factors of the state and those of the
target are one a prefix of the other, all ranks keep  K = product of n / max(P_state, P_target)  elements; else some
rank keeps none. It then has to receive |target| - K. It is never too large where sizes divide evenly, so the result
is a cheapest sequence there; where they do not, the volumes are those of the fullest rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import chain, count, permutations, product
from math import inf, prod
from typing import Literal, NamedTuple

from optim_redist.index_sets import same
from optim_redist.layout import Chunk, Kind, Layout, Mesh, Split

CollectiveOp = Literal[
    "slice", "all_gather", "all_to_all", "permute", "reduce_scatter", "all_reduce", "change_block", "init_partial"
]
Factors = tuple[int, ...]
# a division that is not by chunks carries one of these behind its factors
_AS_SOURCE, _AS_TARGET = -1, -2


@dataclass(frozen=True)
class CollectiveStep:
    """One collective of a sequence.

    Attributes:
        op: what it is.
        axes: axes of ``layout.mesh`` along which the ranks of a group differ; empty for a permutation, which pairs any.
        group_size: ranks in a group.
        layout: the layout after it, on the mesh of prime factors.
        recv: elements that the fullest rank receives, as counted in the module's table.
    """

    op: CollectiveOp
    axes: tuple[int, ...]
    group_size: int
    layout: Layout
    recv: int


def _is_foreign(factors: Factors) -> bool:
    """Whether a dimension is divided otherwise than by chunks."""
    return bool(factors) and factors[-1] < 0


class _State(NamedTuple):
    dims: tuple[Factors, ...]
    pending: Factors


class _Move(NamedTuple):
    op: CollectiveOp
    factors: Factors
    recv: int
    state: _State


def search_collectives(
    shape: Sequence[int],
    src: Layout,
    dst: Layout,
    *,
    latency: float = 0.0,
    max_live: int | None = None,
    max_expansions: int = 20_000,
) -> list[CollectiveStep] | None:
    """The cheapest sequence of collectives, None if the two sides are not grids over the same ranks in one order.

    Args:
        latency: what a step that sends anything costs beside its volume, in elements.
        max_live: elements that no rank may hold at any state; by default the larger of source and target.
        max_expansions: states to expand before the best sequence found so far is taken.
    """
    space = _Space.of(tuple(shape), src, dst)
    if space is None:
        return None
    live = max(space.start_size, space.target_size) if max_live is None else max_live
    moves = _Search(space, latency, live).run(max_expansions)
    return None if moves is None else space.as_steps(moves)


# -- the common grid of factors


def _prime_factors(n: int) -> list[int]:
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found


def _common_grid(src: Mesh, dst: Mesh) -> tuple[list[int], list[list[Factors]]] | None:
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
        sizes += _prime_factors(larger // smaller)
        place[smaller] = len(sizes)
    factors = []
    for mesh, steps in zip((src, dst), strides):
        factors.append([tuple(range(place[step * size], place[step])) for step, size in zip(steps, mesh.sizes)])
    return sizes, factors


class _Space:
    """The states between two layouts of one shape: their factors, sizes and moves."""

    def __init__(
        self, shape: tuple[int, ...], src: Layout, dst: Layout, sizes: list[int], factors: list[list[Factors]]
    ) -> None:
        self.shape, self.src, self.dst, self.sizes = shape, src, dst, sizes
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
        self.foreign: dict[tuple[int, int], Kind] = {}
        src_dims = self._dims(src, factors[0], _AS_SOURCE)
        dst_dims = self._dims(dst, factors[1], _AS_TARGET)
        for tensor_dim, (a, b) in enumerate(zip(src.dims, dst.dims)):
            here, there = src_dims[tensor_dim], dst_dims[tensor_dim]
            if a and b and a.kind == b.kind and here[-1:] == (_AS_SOURCE,) and here[:-1] == there[:-1]:
                src_dims[tensor_dim] = there
        self.start = _State(tuple(src_dims), tuple(sorted(src_pending)))
        self.target = _State(tuple(dst_dims), tuple(sorted(kept)))
        self._lengths: dict[tuple[int, Factors], int] = {}
        self.start_size, self.target_size = self.local_size(self.start), self.local_size(self.target)

    @classmethod
    def of(cls, shape: tuple[int, ...], src: Layout, dst: Layout) -> _Space | None:
        grid = _common_grid(src.mesh, dst.mesh)
        return None if grid is None else cls(shape, src, dst, *grid)

    def _dims(self, layout: Layout, factors: list[Factors], marker: int) -> list[Factors]:
        dims: list[Factors] = []
        for tensor_dim, split in enumerate(layout.dims):
            used = tuple(chain.from_iterable(factors[axis] for axis in split.axes)) if split else ()
            n_procs = prod(self.sizes[factor] for factor in used)
            if self.shape[tensor_dim] % n_procs:
                self.even[tensor_dim] = False
            if split and used:
                chunks = Chunk().index_sets(self.shape[tensor_dim], [self.sizes[factor] for factor in used])
                held = split.kind.index_sets(self.shape[tensor_dim], layout.axis_sizes(tensor_dim))
                if not all(map(same, chunks, held)):
                    self.foreign[tensor_dim, marker] = split.kind
                    used = (*used, marker)
            dims.append(used)
        return dims

    def group_size(self, factors: Factors) -> int:
        return prod(self.sizes[factor] for factor in factors if factor >= 0)

    def length(self, tensor_dim: int, factors: Factors) -> int:
        """The longest piece of a dimension."""
        key = (tensor_dim, factors)
        if key not in self._lengths:
            n = self.shape[tensor_dim]
            if _is_foreign(factors):
                layout = self.src if factors[-1] == _AS_SOURCE else self.dst
                sets = self.foreign[tensor_dim, factors[-1]].index_sets(n, layout.axis_sizes(tensor_dim))
                n = max(sum(run.length * run.repeats for run in held) for held in sets)
            else:
                for factor in factors:
                    n = -(-n // self.sizes[factor])
            self._lengths[key] = n
        return self._lengths[key]

    def local_size(self, state: _State) -> int:
        """Elements of the fullest rank."""
        size = 1
        for tensor_dim, factors in enumerate(state.dims):
            size *= self.length(tensor_dim, factors)
        return size

    def fits(self, tensor_dim: int, factors: Factors) -> bool:
        """Even dimensions are only cut evenly; others as one likes."""
        return not self.even[tensor_dim] or self.shape[tensor_dim] % self.group_size(factors) == 0

    def least_recv(self, state: _State, any_labels: bool) -> int:
        """What some rank must still receive before the target, or one with other labels, is reached."""
        if state.pending != self.target.pending:
            return self.target_size
        kept = 1
        for tensor_dim, (here, there) in enumerate(zip(state.dims, self.target.dims)):
            common = min(len(here), len(there))
            if not any_labels and here[:common] != there[:common] and not (_is_foreign(here) or _is_foreign(there)):
                return self.target_size
            kept *= min(self.length(tensor_dim, here), self.length(tensor_dim, there))
        return max(0, self.target_size - kept)

    # -- labels

    def relabelled(self, state: _State) -> _State:
        """The state with the smallest labels that leave the sizes of its factors where they are.

        Factors that are pending or divide otherwise than by chunks keep their labels.
        """
        fixed = {*state.pending, *chain.from_iterable(dim for dim in state.dims if _is_foreign(dim))}
        free: dict[int, list[int]] = {}
        for factor in range(self.num_factors - 1, -1, -1):
            if factor not in fixed:
                free.setdefault(self.sizes[factor], []).append(factor)
        dims = (
            dim if _is_foreign(dim) else tuple(free[self.sizes[factor]].pop() for factor in dim) for dim in state.dims
        )
        return _State(tuple(dims), state.pending)

    def permutations(self, state: _State) -> set[_State]:
        """What a permutation of ranks can make of the state, with the smallest labels.

        Where cuts are even, also the order of different sizes in a dimension is a matter of names. Pending factors
        and divisions other than by chunks are brought to what the target wants before ranks are permuted.
        """
        if state.pending != self.target.pending:
            return set()
        for here, there in zip(state.dims, self.target.dims):
            if here != there and (_is_foreign(here) or _is_foreign(there)):
                return set()
        orders = (
            set(permutations(dim)) if self.even[k] and len({self.sizes[f] for f in dim}) > 1 else {dim}
            for k, dim in enumerate(state.dims)
        )
        return {self.relabelled(_State(dims, state.pending)) for dims in product(*orders)}

    def labelled(self, moves: list[_Move]) -> list[_Move]:
        """The moves with labels put right: those behind the permutation named so that they end at the target.

        Every move behind it keeps the labels of the state before. Going backwards, a factor that is in use after the
        move has the name of its place there; one that the move has freed takes any free name of its size.
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
            state = _State(tuple(tuple(names[factor] for factor in dim) for dim in before.dims), before.pending)
        return [*moves[:first], moves[first]._replace(state=state), *named[::-1]]

    # -- moves

    def moves(self, state: _State, permuted: bool) -> Iterator[_Move]:
        """Every move but the permutation; behind it only those between divisions by chunks."""
        size = self.local_size(state)
        used = {*chain.from_iterable(state.dims), *state.pending}
        free = [factor for factor in range(self.num_factors) if factor not in used]
        yield from self._slices(state, free)
        for tensor_dim, factors in enumerate(state.dims):
            if _is_foreign(factors):
                if not permuted:
                    yield from self._moves_of_foreign(state, tensor_dim, size)
                continue
            if not permuted:
                yield from self._into_foreign_target(state, tensor_dim, size)
            n_procs = 1
            for first in range(len(factors) - 1, -1, -1):
                n_procs *= self.sizes[factors[first]]
                yield from self._leave(state, tensor_dim, factors[:first], factors[first:], n_procs, size)
        yield from self._reductions(state, size)

    def _put(self, state: _State, *changes: tuple[int, Factors]) -> _State:
        dims = list(state.dims)
        for tensor_dim, factors in changes:
            dims[tensor_dim] = factors
        return state._replace(dims=tuple(dims))

    def _slices(self, state: _State, free: list[int]) -> Iterator[_Move]:
        for tensor_dim, factors in enumerate(state.dims):
            if _is_foreign(factors):
                continue
            for factor in free:
                longer = (*factors, factor)
                if self.fits(tensor_dim, longer):
                    yield _Move("slice", (factor,), 0, self._put(state, (tensor_dim, longer)))
            wanted = self.target.dims[tensor_dim]
            if not factors and _is_foreign(wanted) and set(wanted[:-1]) <= set(free):
                yield _Move("slice", wanted[:-1], 0, self._put(state, (tensor_dim, wanted)))

    def _leave(
        self, state: _State, tensor_dim: int, left: Factors, moved: Factors, n_procs: int, size: int
    ) -> Iterator[_Move]:
        """Gather the last factors of a dimension, or take them to another."""
        yield _Move("all_gather", moved, (n_procs - 1) * size, self._put(state, (tensor_dim, left)))
        for other, there in enumerate(state.dims):
            if other == tensor_dim or _is_foreign(there):
                continue
            entries = [there + moved] if self.fits(other, there + moved) else []
            wanted = self.target.dims[other]
            if not there and _is_foreign(wanted) and set(wanted[:-1]) == set(moved):
                entries.append(wanted)
            for entry in entries:
                result = self._put(state, (tensor_dim, left), (other, entry))
                # where cuts are not even, a rank may keep nothing
                foreign = _is_foreign(state.dims[tensor_dim]) or _is_foreign(entry)
                even = self.even[tensor_dim] and self.even[other] and not foreign
                recv = size - size // n_procs if even else max(size, self.local_size(result))
                yield _Move("all_to_all", moved, recv, result)

    def _moves_of_foreign(self, state: _State, tensor_dim: int, size: int) -> Iterator[_Move]:
        """A dimension that is not divided by chunks is left as a whole, or changed into chunks of the same factors."""
        factors = state.dims[tensor_dim]
        chunked, wanted = factors[:-1], self.target.dims[tensor_dim]
        n_procs = self.group_size(chunked)
        yield from self._leave(state, tensor_dim, (), chunked, n_procs, size)
        for new in {chunked, wanted}:
            if new != factors and {f for f in new if f >= 0} == set(chunked):
                yield self._change_block(state, tensor_dim, new, chunked, size)

    def _into_foreign_target(self, state: _State, tensor_dim: int, size: int) -> Iterator[_Move]:
        factors, wanted = state.dims[tensor_dim], self.target.dims[tensor_dim]
        if factors and _is_foreign(wanted) and set(factors) == set(wanted[:-1]):
            yield self._change_block(state, tensor_dim, wanted, factors, size)

    def _change_block(self, state: _State, tensor_dim: int, new: Factors, group: Factors, size: int) -> _Move:
        result = self._put(state, (tensor_dim, new))
        return _Move("change_block", group, max(size, self.local_size(result)), result)

    def _reductions(self, state: _State, size: int) -> Iterator[_Move]:
        """Finish what the target does not keep pending, all factors of one operation together or one by one."""
        kept = set(self.target.pending)
        todo = [factor for factor in state.pending if factor not in kept]
        groups = {tuple(f for f in todo if self.ops[f] == op) for op in {self.ops[f] for f in todo}}
        for group in sorted(groups | {(factor,) for factor in todo}):
            n_procs = self.group_size(group)
            rest = state._replace(pending=tuple(factor for factor in state.pending if factor not in group))
            recv = size - size // n_procs
            yield _Move("all_reduce", group, 2 * recv, rest)
            for tensor_dim, factors in enumerate(state.dims):
                if not _is_foreign(factors) and self.fits(tensor_dim, factors + group):
                    yield _Move("reduce_scatter", group, recv, self._put(rest, (tensor_dim, factors + group)))

    # -- back to layouts

    def layout(self, state: _State, started: bool = False) -> Layout:
        """The state as a layout on the mesh of prime factors."""
        dims = []
        for tensor_dim, factors in enumerate(state.dims):
            kind = self.foreign[tensor_dim, factors[-1]] if _is_foreign(factors) else Chunk()
            axes = tuple(factor for factor in factors if factor >= 0)
            dims.append(Split(axes, kind) if axes else None)
        pending: dict[int | str, str] = {factor: self.ops[factor] for factor in state.pending}
        if started:
            for factor, op in self.started.items():
                pending[factor] = op
        return Layout(self.mesh, dims, pending)

    def as_steps(self, moves: list[_Move]) -> list[CollectiveStep]:
        """The moves as steps, consecutive slices as one."""
        steps: list[CollectiveStep] = []
        for move in moves:
            axes = tuple(sorted(move.factors))
            step = CollectiveStep(move.op, axes, self.group_size(axes) or 1, self.layout(move.state), move.recv)
            if move.op == "permute":
                step = replace(step, group_size=self.mesh.num_ranks)
            if steps and step.op == steps[-1].op == "slice":
                before = steps.pop()
                axes = tuple(sorted((*before.axes, *axes)))
                step = replace(step, axes=axes, group_size=self.group_size(axes))
            steps.append(step)
        if self.started:
            axes = tuple(sorted(self.started))
            last = moves[-1].state if moves else self.start
            steps.append(
                CollectiveStep("init_partial", axes, self.group_size(axes), self.layout(last, started=True), 0)
            )
        return steps


# -- the search

_Trail = tuple[_Move, "_Trail"] | None


class _Search:
    """A* with two layers: before and after the one permutation.

    A permutation may lead to any labelling of the pieces, and moves do not care how equal factors are called. Behind
    it, states are therefore told apart by the sizes of their factors only: each is kept with the smallest labels, and
    the labels are put right, backwards from the target, when the sequence is known.
    """

    def __init__(self, space: _Space, latency: float, live: int) -> None:
        self.space, self.latency, self.live = space, latency, live
        self.unlabelled_target = space.relabelled(space.target)
        self._estimates: dict[tuple[bool, _State], float] = {}

    def run(self, max_expansions: int) -> list[_Move] | None:
        space = self.space
        order = count()
        best: dict[tuple[bool, _State], float] = {(False, space.start): 0.0}
        # (f, latest first, cost so far, permuted yet, state, trail)
        queue: list[tuple[float, int, float, bool, _State, _Trail]] = [(0.0, 0, 0.0, False, space.start, None)]

        def push(cost: float, permuted: bool, move: _Move, trail: _Trail) -> None:
            key = (permuted, space.relabelled(move.state) if permuted else move.state)
            if cost < best.get(key, inf):
                bound = cost + self.estimate(key)
                if bound < inf:
                    best[key] = cost
                    heappush(queue, (bound, -next(order), cost, *key, (move, trail)))

        for _ in range(max_expansions):
            if not queue:
                return None
            _, _, cost, permuted, state, trail = heappop(queue)
            if cost > best[permuted, state]:
                continue
            if not permuted and state == space.target:
                return _moves_of(trail)
            if permuted and state == self.unlabelled_target:
                return space.labelled(_moves_of(trail))
            for move in space.moves(state, permuted):
                push(cost + move.recv + (self.latency if move.recv else 0.0), permuted, move, trail)
            if not permuted:
                size = space.local_size(state)
                for result in space.permutations(state):
                    push(cost + size + self.latency, True, _Move("permute", (), size, result), trail)
        return None

    def estimate(self, key: tuple[bool, _State]) -> float:
        """A lower bound of what is left; infinite where a rank would hold too much."""
        if key not in self._estimates:
            permuted, state = key
            found = inf
            if self.space.local_size(state) <= self.live:
                recv = self.space.least_recv(state, any_labels=permuted)
                found = recv + self.latency if recv else 0.0
            self._estimates[key] = found
        return self._estimates[key]


def _moves_of(trail: _Trail) -> list[_Move]:
    moves = []
    while trail is not None:
        move, trail = trail
        moves.append(move)
    return moves[::-1]
