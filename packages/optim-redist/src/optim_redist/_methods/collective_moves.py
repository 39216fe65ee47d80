"""The collectives that lead out of a state, and what the fullest rank receives in each.

With L elements on the fullest rank and n ranks in a group:

    slice            add an unused factor at the end of a dimension                      0
    gather           drop the last factors of a dimension, all at once                   (n - 1)·L
    all-to-all       move the last factors of a dimension to the end of another          (n - 1)/n·L, or the larger L
                                                                                         of before and after if uneven
    reduce-scatter   move pending factors to the end of a dimension                      (n - 1)/n·L
    all-reduce       finish pending factors                                              2(n - 1)/n·L
    change of block  chunks into another division of the same factors, or back, inside   the larger L of before and
                     the group of the dimension                                          after

One more move, a permutation of the ranks, has no group; ``collective_search`` adds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from optim_redist._methods.collective_states import Factors, Move, Space, State, is_foreign


def collective_moves(space: Space, state: State, permuted: bool) -> Iterator[Move]:
    """Every move but the permutation; if ``permuted``, only moves between divisions by chunks."""
    size = space.local_size(state)
    used = {*chain.from_iterable(state.dims), *state.pending}
    free = [factor for factor in range(space.num_factors) if factor not in used]
    yield from _slices(space, state, free)
    for tensor_dim, factors in enumerate(state.dims):
        if is_foreign(factors):
            if not permuted:
                yield from _moves_of_foreign(space, state, tensor_dim, size)
            continue
        if not permuted:
            yield from _into_foreign_target(space, state, tensor_dim, size)
        n_procs = 1
        for first in range(len(factors) - 1, -1, -1):
            n_procs *= space.sizes[factors[first]]
            yield from _leave(space, state, tensor_dim, factors[:first], factors[first:], n_procs, size)
    yield from _reductions(space, state, size)


def _put(state: State, *changes: tuple[int, Factors]) -> State:
    """The state with other factors on some dimensions."""
    dims = list(state.dims)
    for tensor_dim, factors in changes:
        dims[tensor_dim] = factors
    return state._replace(dims=tuple(dims))


def _slices(space: Space, state: State, free: list[int]) -> Iterator[Move]:
    for tensor_dim, factors in enumerate(state.dims):
        if is_foreign(factors):
            continue
        for factor in free:
            longer = (*factors, factor)
            if space.fits(tensor_dim, longer):
                yield Move("slice", (factor,), 0, _put(state, (tensor_dim, longer)))
        wanted = space.target.dims[tensor_dim]
        if not factors and is_foreign(wanted) and set(wanted[:-1]) <= set(free):
            yield Move("slice", wanted[:-1], 0, _put(state, (tensor_dim, wanted)))


def _leave(
    space: Space, state: State, tensor_dim: int, left: Factors, moved: Factors, n_procs: int, size: int
) -> Iterator[Move]:
    """Gather the last factors of a dimension, or take them to another."""
    yield Move("all_gather", moved, (n_procs - 1) * size, _put(state, (tensor_dim, left)))
    for other, there in enumerate(state.dims):
        if other == tensor_dim or is_foreign(there):
            continue
        entries = [there + moved] if space.fits(other, there + moved) else []
        wanted = space.target.dims[other]
        if not there and is_foreign(wanted) and set(wanted[:-1]) == set(moved):
            entries.append(wanted)
        for entry in entries:
            result = _put(state, (tensor_dim, left), (other, entry))
            # where cuts are not even, a rank may keep nothing
            foreign = is_foreign(state.dims[tensor_dim]) or is_foreign(entry)
            even = space.even[tensor_dim] and space.even[other] and not foreign
            recv = size - size // n_procs if even else max(size, space.local_size(result))
            yield Move("all_to_all", moved, recv, result)


def _moves_of_foreign(space: Space, state: State, tensor_dim: int, size: int) -> Iterator[Move]:
    """Moves of a foreign dimension: all its factors leave, or it changes to chunks or the target's division of them."""
    factors = state.dims[tensor_dim]
    chunked, wanted = factors[:-1], space.target.dims[tensor_dim]
    n_procs = space.group_size(chunked)
    yield from _leave(space, state, tensor_dim, (), chunked, n_procs, size)
    for new in {chunked, wanted}:
        if new != factors and {f for f in new if f >= 0} == set(chunked):
            yield _change_block(space, state, tensor_dim, new, chunked, size)


def _into_foreign_target(space: Space, state: State, tensor_dim: int, size: int) -> Iterator[Move]:
    factors, wanted = state.dims[tensor_dim], space.target.dims[tensor_dim]
    if factors and is_foreign(wanted) and set(factors) == set(wanted[:-1]):
        yield _change_block(space, state, tensor_dim, wanted, factors, size)


def _change_block(space: Space, state: State, tensor_dim: int, new: Factors, group: Factors, size: int) -> Move:
    result = _put(state, (tensor_dim, new))
    return Move("change_block", group, max(size, space.local_size(result)), result)


def _reductions(space: Space, state: State, size: int) -> Iterator[Move]:
    """Finish reductions that the target does not keep pending, all factors of one operation together or one by one."""
    kept = set(space.target.pending)
    todo = [factor for factor in state.pending if factor not in kept]
    groups = {tuple(f for f in todo if space.ops[f] == op) for op in {space.ops[f] for f in todo}}
    for group in sorted(groups | {(factor,) for factor in todo}):
        n_procs = space.group_size(group)
        rest = state._replace(pending=tuple(factor for factor in state.pending if factor not in group))
        recv = size - size // n_procs
        yield Move("all_reduce", group, 2 * recv, rest)
        for tensor_dim, factors in enumerate(state.dims):
            if not is_foreign(factors) and space.fits(tensor_dim, factors + group):
                yield Move("reduce_scatter", group, recv, _put(rest, (tensor_dim, factors + group)))
