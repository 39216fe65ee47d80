"""The moves out of a distribution: first which axes go from where to where, then, on demand, where that leads.

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

from optim_redist._multi_axis.moves import Axes, DimsMapping, Move, State, axes_size
from optim_redist._multi_axis.names import name_of
from optim_redist._multi_axis.parts import Dimension, Part

Parts = tuple[Part, ...]
Step = tuple[int | None, int | None, Axes]

# Steps out of a mapping with equal price and bound: (collective, processes, kept, arrived, steps). They are charged as
# the collective ("split", "allgather", "alltoall", "permute" or "exchange") of so many processes (0 for a split, which
# is free). The best that they can make of a state's code is ``code & kept | arrived``: the digits of axes that stay,
# and the best digits of axes that move.
AlikeSteps = tuple[str, int, int, int, list[Step]]


class MoveSet:
    """The moves out of a state for one shape and one mesh.

    Args:
        blocks: for each dimension, block lengths to consider, with their multiples and divisors by sizes of axes.
        code_of: the code of a dimension with these axes in one of these blocks.
        arrivals: for each dimension, the best code of each axis that comes to it.
        merged: whether states may leave open which of several blocks that cost the same a dimension has.
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
        # for each axis, the dimensions grouped by the digit with which the axis arrives there
        self._places: list[dict[int, list[int]]] = [{} for _ in sizes]
        for tensor_dim, digits in enumerate(self._arrivals):
            for places, arrived in zip(self._places, digits):
                places.setdefault(arrived, []).append(tensor_dim)
        self._dims = [
            Dimension(tensor_dim, length, sizes, given, code_of, merged=merged)
            for tensor_dim, (length, given) in enumerate(zip(shape, blocks))
        ]
        self._equal_axes = [pair for pair in combinations(range(len(sizes)), 2) if sizes[pair[0]] == sizes[pair[1]]]
        self._steps_from: dict[DimsMapping, list[AlikeSteps]] = {}
        # splits of unused axes, steps out of one dimension, and permutations: many mappings have them in common
        self._splits: dict[Axes, list[AlikeSteps]] = {}
        self._departures: dict[tuple[int, Axes], list[AlikeSteps]] = {}
        self._permutations: dict[tuple[int, int | None, int, int | None], AlikeSteps] = {}

    def parts(self, state: State) -> Parts:
        """The parts of a compatible state."""
        return tuple([dim.parts(axes, (block,))[0] for dim, axes, block in zip(self._dims, *state)])

    def steps_from(self, mapping: DimsMapping) -> list[AlikeSteps]:
        """Every step out of the states with this mapping."""
        found = self._steps_from.get(mapping)
        if found is None:
            where = {axis: tensor_dim for tensor_dim, axes in enumerate(mapping) for axis in axes}
            unused = tuple([axis for axis in range(len(self._sizes)) if axis not in where])
            if unused not in self._splits:
                self._splits[unused] = self._list_splits(unused)
            found = self._steps_from[mapping] = self._splits[unused].copy()
            for dim in enumerate(mapping):
                if dim[1]:
                    if dim not in self._departures:
                        self._departures[dim] = self._list_departures(*dim)
                    found += self._departures[dim]
            for i, j in self._equal_axes:
                if i in where or j in where:
                    key = i, where.get(i), j, where.get(j)
                    if key not in self._permutations:
                        self._permutations[key] = self._permutation(*key)
                    found.append(self._permutations[key])
        return found

    def _list_splits(self, unused: Axes) -> list[AlikeSteps]:
        """Each unused axis goes to each dimension, or all axes in use are gathered."""
        found: list[AlikeSteps] = [
            ("split", 0, -1, arrived, [(None, target, (axis,)) for target in targets])
            for axis in unused
            for arrived, targets in self._places[axis].items()
        ]
        used = [size for axis, size in enumerate(self._sizes) if axis not in unused]
        if len(used) > 1:
            found.append(("allgather", prod(used), 0, 0, [(None, None, ())]))
        return found

    def _list_departures(self, source: int, axes: Axes) -> list[AlikeSteps]:
        """All axes or the last one go to another dimension, the last or the first is gathered, or the block changes."""
        sizes, last = self._sizes, axes[-1]
        n_procs, kept = sizes[last], ~(7 << 3 * last)
        found: list[AlikeSteps] = [("allgather", n_procs, kept, 0, [(source, None, (last,))])]
        for arrived, targets in self._places[last].items():
            steps: list[Step] = [(source, target, (last,)) for target in targets if target != source]
            if steps:
                found.append(("alltoall", n_procs, kept, arrived, steps))
        if len(axes) > 1:
            first = axes[0]
            found.append(("allgather", sizes[first], ~(7 << 3 * first), 0, [(source, None, (first,))]))
            n_procs, kept = axes_size(sizes, axes), ~sum(7 << 3 * axis for axis in axes)
            together: dict[int, list[Step]] = {}
            for target, arrivals in enumerate(self._arrivals):
                if target != source:
                    arrived = sum(arrivals[axis] for axis in axes)
                    together.setdefault(arrived, []).append((source, target, axes))
            found += [("alltoall", n_procs, kept, arrived, steps) for arrived, steps in together.items()]
        arrived = sum(self._arrivals[source][axis] for axis in axes)
        found.append(("alltoall", n_procs, kept, arrived, [(source, source, ())]))
        return found

    def _permutation(self, first: int, at: int | None, second: int, other: int | None) -> AlikeSteps:
        """Two axes take each other's place, in dimensions ``at`` and ``other`` or out of use."""
        arrived = 0
        if at is not None:
            arrived |= self._arrivals[at][second]
        if other is not None:
            arrived |= self._arrivals[other][first]
        return "permute", 2, ~(7 << 3 * first | 7 << 3 * second), arrived, [(None, None, (first, second))]

    def after(self, parts: Parts, step: Step) -> list[Parts]:
        """The states to which a step leads; none if a process would be left empty."""
        source, target, moved = step
        dims = self._dims
        if source is None:
            if target is not None:
                return _replaced(parts, target, dims[target].enter(parts[target], moved))
            if moved:
                return [tuple([dim.swap(part, *moved) for dim, part in zip(dims, parts)])]
            return [tuple([part for dim in dims for part in dim.parts((), ())])]
        if source == target:
            return _replaced(parts, source, dims[source].change(parts[source]))
        rests = dims[source].leave(parts[source], moved)
        if target is None:
            return _replaced(parts, source, rests)
        found, came = [], dims[target].enter(parts[target], moved)
        for rest in rests:
            after = list(parts)
            after[source] = rest
            for part in came:
                after[target] = part
                found.append(tuple(after))
        return found

    def moves(self, state: State) -> list[Move]:
        """Every move whose result is compatible."""
        found, parts = [], self.parts(state)
        for collective, n_procs, *_, steps in self.steps_from(state.mapping):
            for after in [after for step in steps for after in self.after(parts, step)]:
                result, elements = state_of(after), prod([part.share for part in after])
                found.append(Move(name_of(collective, state, result), collective, result, n_procs, elements))
        return found


def state_of(parts: Parts) -> State:
    """The state that consists of ``parts``, the shortest blocks where several are possible."""
    return State(tuple([part.axes for part in parts]), tuple([part.blocks[0] for part in parts]))


def _replaced(parts: Parts, tensor_dim: int, choices: Sequence[Part]) -> list[Parts]:
    """``parts`` with each of the choices for one dimension."""
    found, after = [], list(parts)
    for part in choices:
        after[tensor_dim] = part
        found.append(tuple(after))
    return found
