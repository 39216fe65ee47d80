"""The graph of mappings: which axes are on which dimension, in what order, and which moves lead from one to another."""

from __future__ import annotations

from itertools import combinations

from optim_redist._multi_axis_moves import Axes, Mapping, axes_size, swapped_axes


def all_mappings(num_axes: int, num_dims: int) -> list[Mapping]:
    """Every way to put distinct axes, in order, on the dimensions; axes may stay unused."""
    mappings: list[Mapping] = [((),) * num_dims]
    for axis in range(num_axes):
        mappings += [
            (*mapping[:tensor_dim], (*axes[:place], axis, *axes[place:]), *mapping[tensor_dim + 1 :])
            for mapping in mappings
            for tensor_dim, axes in enumerate(mapping)
            for place in range(len(axes) + 1)
        ]
    return mappings


class MappingGraph:
    """The mappings of one mesh and, for each, those from which one move other than a leap leads to it."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._equal_axes = [(i, j) for i, j in combinations(range(len(sizes)), 2) if sizes[i] == sizes[j]]
        self._ends: dict[Axes, list[tuple[Axes, Axes, int]]] = {}

    def leading_to(self, mapping: Mapping) -> list[tuple[Mapping, str, int]]:
        """The (mapping, collective, n_procs) before such a move."""
        found: list[tuple[Mapping, str, int]] = []
        sizes = self._sizes
        used = [axis for axes in mapping for axis in axes]
        free = [axis for axis in range(len(sizes)) if axis not in used]
        for tensor_dim, axes in enumerate(mapping):
            head, tail = mapping[:tensor_dim], mapping[tensor_dim + 1 :]
            # a gather has freed the first or the last axis
            for axis in free:
                found.append(((*head, (axis, *axes), *tail), "allgather", sizes[axis]))
                if axes:
                    found.append(((*head, (*axes, axis), *tail), "allgather", sizes[axis]))
            if not axes:
                continue
            # a split has added the first or the last axis
            found.append(((*head, axes[1:], *tail), "split", 0))
            if len(axes) > 1:
                found.append(((*head, axes[:-1], *tail), "split", 0))
            # an all-to-all has brought the first or the last axes: all that another dimension had, or its last one
            for moved, rest, n_procs in self._ends.get(axes) or self._ends_of(axes):
                for source, there in enumerate(mapping):
                    if source != tensor_dim and (not there or len(moved) == 1):
                        before = list(mapping)
                        before[tensor_dim], before[source] = rest, there + moved
                        found.append((tuple(before), "alltoall", n_procs))
        for first, second in self._equal_axes:
            if first in used or second in used:
                before = [swapped_axes(axes, first, second) for axes in mapping]
                found.append((tuple(before), "permute", 2))
        return found

    def _ends_of(self, axes: Axes) -> list[tuple[Axes, Axes, int]]:
        """The first or last axes, any number of them, each with the rest and the number of their processes."""
        cuts = range(1, len(axes))
        ends = [(axes, ()), *((axes[:n], axes[n:]) for n in cuts), *((axes[n:], axes[:n]) for n in cuts)]
        self._ends[axes] = found = [(moved, rest, axes_size(self._sizes, moved)) for moved, rest in ends]
        return found
