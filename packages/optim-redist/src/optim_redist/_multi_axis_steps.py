"""The moves out of a distribution: first which axes go from where to where, then, where it matters, what they make.

A ``Step`` is (source, target, moved), with dimensions as numbers:

    split      (None, d, (k,))      unused axis k comes to d          alltoall     (d, e, moved)    axes go from d to e
    allgather  (d, None, (k,))      axis k leaves d                   new block    (d, d, ())
    permute    (None, None, (i, j))                                   gather all   (None, None, ())

One step can lead to several states: axes come to the front or the back of a dimension, with blocks of several shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from math import prod

from optim_redist._multi_axis_moves import Axes, Mapping, Move, State, axes_size
from optim_redist._multi_axis_names import name_of
from optim_redist._multi_axis_parts import Dimension, Part

Parts = tuple[Part, ...]
Step = tuple[int | None, int | None, Axes]


# A step out of a mapping, what it is charged as ("split", "allgather", "alltoall", "permute" or "exchange") and for how
# many processes (0 for a split, which is free), and what it can make of a state's code at best: ``code & kept |
# arrived``, digits of the axes that stay and the best of those that move.
# (collective, processes, step, kept, arrived)
Candidate = tuple[str, int, Step, int, int]


class MoveSet:
    """The moves out of a state for one shape and one mesh.

    Args:
        blocks: for each dimension, block lengths to consider, with their multiples and divisors by sizes of axes.
        code_of: the code of a dimension with these axes in one of these blocks.
        arrivals: for each dimension, the best code of each axis that comes to it.
        merged: whether states may leave blocks open that cost the same.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        sizes: tuple[int, ...],
        blocks: Sequence[Iterable[int]],
        code_of: Callable[[int, Axes, tuple[int, ...]], int] = lambda tensor_dim, axes, blocks: 0,
        arrivals: Sequence[Sequence[int]] | None = None,
        *,
        merged: bool = False,
    ) -> None:
        self._sizes, self._arrivals = sizes, arrivals or [[0] * len(sizes)] * len(shape)
        self._dims = [
            Dimension(tensor_dim, length, sizes, given, code_of, merged=merged)
            for tensor_dim, (length, given) in enumerate(zip(shape, blocks))
        ]
        self._equal_axes = [pair for pair in combinations(range(len(sizes)), 2) if sizes[pair[0]] == sizes[pair[1]]]
        self._candidates: dict[Mapping, list[Candidate]] = {}
        # those into unused axes and those out of one dimension, which many mappings have in common
        self._splits: dict[Axes, list[Candidate]] = {}
        self._departures: dict[tuple[int, Axes], list[Candidate]] = {}

    def parts(self, state: State) -> Parts:
        """A compatible state by its parts."""
        return tuple([dim.parts(axes, (block,))[0] for dim, axes, block in zip(self._dims, *state)])

    def candidates(self, mapping: Mapping) -> list[Candidate]:
        """Every step out of the states with a mapping."""
        found = self._candidates.get(mapping)
        if found is None:
            # the best that axes come to where each axis is
            places = {axis: arrivals for axes, arrivals in zip(mapping, self._arrivals) for axis in axes}
            unused = tuple([axis for axis in range(len(self._sizes)) if axis not in places])
            if unused not in self._splits:
                self._splits[unused] = self._list_splits(unused)
            found = self._candidates[mapping] = self._splits[unused].copy()
            for dim in enumerate(mapping):
                if dim[1]:
                    if dim not in self._departures:
                        self._departures[dim] = self._list_departures(*dim)
                    found += self._departures[dim]
            self._list_permutations(found, places)
            if len(places) > 1:
                found.append(("allgather", axes_size(self._sizes, [*places]), (None, None, ()), 0, 0))
        return found

    def _list_splits(self, unused: Axes) -> list[Candidate]:
        return [
            ("split", 0, (None, target, (axis,)), -1, arrivals[axis])
            for axis in unused
            for target, arrivals in enumerate(self._arrivals)
        ]

    def _list_departures(self, source: int, axes: Axes) -> list[Candidate]:
        """All axes or the last one go to another dimension, the last or the first is gathered, or the block changes."""
        found: list[Candidate] = []
        sizes, last = self._sizes, axes[-1]
        one = ~(7 << 3 * last)
        for target, arrivals in enumerate(self._arrivals):
            if target != source:
                found.append(("alltoall", sizes[last], (source, target, (last,)), one, arrivals[last]))
        found.append(("allgather", sizes[last], (source, None, (last,)), one, 0))
        n_procs, kept = sizes[last], one
        if len(axes) > 1:
            n_procs, kept = axes_size(sizes, axes), ~sum(7 << 3 * axis for axis in axes)
            for target, arrivals in enumerate(self._arrivals):
                if target != source:
                    arrived = sum(arrivals[axis] for axis in axes)
                    found.append(("alltoall", n_procs, (source, target, axes), kept, arrived))
            first = axes[0]
            found.append(("allgather", sizes[first], (source, None, (first,)), ~(7 << 3 * first), 0))
        arrived = sum(self._arrivals[source][axis] for axis in axes)
        found.append(("alltoall", n_procs, (source, source, ()), kept, arrived))
        return found

    def _list_permutations(self, found: list[Candidate], places: dict[int, Sequence[int]]) -> None:
        for first, second in self._equal_axes:
            if first in places or second in places:
                arrived = (places[first][second] if first in places else 0) | (
                    places[second][first] if second in places else 0
                )
                kept = ~(7 << 3 * first | 7 << 3 * second)
                found.append(("permute", 2, (None, None, (first, second)), kept, arrived))

    def after(self, parts: Parts, step: Step) -> list[Parts]:
        """The states to which a step leads; none if a process would be left empty."""
        source, target, moved = step
        dims = self._dims
        if source is None and target is None:
            if moved:
                return [tuple([dim.swap(part, *moved) for dim, part in zip(dims, parts)])]
            return [tuple([part for dim in dims for part in dim.parts((), ())])]
        if source is not None and source == target:
            return _replaced(parts, source, dims[source].change(parts[source]))
        found = [parts]
        if source is not None:
            found = _replaced(parts, source, dims[source].leave(parts[source], moved))
        if target is not None:
            came = dims[target].enter(parts[target], moved)
            found = [after for base in found for after in _replaced(base, target, came)]
        return found

    def moves(self, state: State) -> list[Move]:
        """Every move whose result is compatible, once for each collective and number of processes."""
        kept: dict[tuple[State, str, int], Move] = {}
        parts = self.parts(state)
        for collective, n_procs, step, *_ in self.candidates(state.mapping):
            for after in self.after(parts, step):
                result = state_of(after)
                if (result, collective, n_procs) not in kept:
                    name = name_of(collective, state, result)
                    elements = prod([part.share for part in after])
                    kept[result, collective, n_procs] = Move(name, collective, result, n_procs, elements)
        return list(kept.values())


def state_of(parts: Parts) -> State:
    """The state that consists of ``parts``, the shortest blocks where several are possible."""
    return State(tuple([part.axes for part in parts]), tuple([part.blocks[0] for part in parts]))


def _replaced(parts: Parts, tensor_dim: int, choices: Sequence[Part]) -> list[Parts]:
    """``parts`` with each of the choices for one dimension."""
    before, behind = parts[:tensor_dim], parts[tensor_dim + 1 :]
    return [(*before, part, *behind) for part in choices]
