"""Reductions that cross the border of a group once: first inside every group, then between them.

Mesh axes that split no dimension are cut into their prime factors. Level by level from the innermost, the factors
along which ranks stay in one group of the level come to split a dimension: pending factors by a reduce-scatter,
replicating ones by a slice. Each of the k groups that contribute then holds every element once, on one rank. For N
elements with k contributions left that q groups need, borders are crossed by at most

    k·q·N        straight to the needers, if no two needers of an element are in one group
    (k + q)·N    scattered over the pending factors too, then fetched once by every group

elements, less what stays inside. So an element crosses a group's border once per contribution, or once when finished.
The dimension that is split is the one that leaves most elements where the target needs them.

Values are rounded to the tensor's type after each of these steps, so plans that must reduce in rank order do not use
this method.
"""

from __future__ import annotations

from collections.abc import Sequence

from optim_redist._methods.dividing import cut_axes, free_axes, split_further
from optim_redist.cost import Level, Topology
from optim_redist.layout import Layout, Mesh
from optim_redist.problem import Problem

Way = list[tuple[str | None, str, Layout]]  # operation, None for those of the method; method; layout after it


def ways_to_reduce(
    shape: tuple[int, ...], src: Layout, dst: Layout, topology: Topology
) -> tuple[Layout, list[Way]] | None:
    """The source on a mesh with cut axes, and the ways of several steps from there to the target; None without any.

    The target must have nothing pending.
    """
    start = cut_axes(src)
    chosen: tuple[int, int, int, list[Layout]] | None = None
    for tensor_dim in range(len(shape)):
        inside = _inside(shape, start, tensor_dim, topology.levels)
        if inside is not None:
            problem = Problem(shape, inside[-1] if inside else start, dst)
            score = sum(problem.num_kept.values()), -max(held for held, _ in problem.num_stored.values())
            # of dimensions with equal scores the first is kept
            if chosen is None or score > chosen[:2]:
                chosen = (*score, tensor_dim, inside)
    if chosen is None:
        return None
    _, _, tensor_dim, inside = chosen
    way: Way = [("reduce inside", "direct", layout) for layout in inside]
    last = inside[-1] if inside else start
    if not last.partial:
        return start, [[*way, (None, "hierarchical", dst)]]
    ways = []
    needers = Problem(shape, last, dst).needers.values()
    outermost = topology.levels[-1]
    # with nothing to reduce inside, this is the direct exchange
    if way and all(len({outermost.group_of(rank) for rank in ranks}) == len(ranks) for ranks in needers):
        ways.append([*way, ("reduce across", "direct", dst)])
    scattered = split_further(shape, last, tensor_dim, [axis for axis, _ in last.partial])
    if scattered is not None and any(len(ranks) > 1 for ranks in needers):
        ways.append([*way, ("reduce across", "direct", scattered), (None, "hierarchical", dst)])
    return (start, ways) if ways else None


def _inside(shape: tuple[int, ...], src: Layout, tensor_dim: int, levels: Sequence[Level]) -> list[Layout] | None:
    """The layout after each level that has anything to reduce inside; None if the dimension cannot be split so."""
    found: list[Layout] = []
    layout = src
    for level in levels:
        free = [axis for axis in free_axes(layout) if _stays_inside(layout.mesh, axis, level)]
        # as long as something is left to reduce, replicating axes are split, too, so that replicas share the sending
        if not free or not layout.partial:
            continue
        split = split_further(shape, layout, tensor_dim, free)
        if split is None:
            return None
        layout = split
        found.append(layout)
    return found


def _stays_inside(mesh: Mesh, mesh_axis: int, level: Level) -> bool:
    """Whether ranks that differ on one axis only are always in one group."""
    groups: dict[tuple[int, ...], int] = {}
    for rank, point in mesh.coordinates.items():
        others = (*point[:mesh_axis], *point[mesh_axis + 1 :])
        if groups.setdefault(others, level.group_of(rank)) != level.group_of(rank):
            return False
    return True
