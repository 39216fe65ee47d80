"""The notebook's answer to a request: the operations that ``OptimalRedist`` finds, as layouts to go through.

Notation: p processes in a group, L elements on the most loaded rank before an operation. The sequence minimises

    sum over operations of  ceil(log2 p) + (p - 1)·L      (a permutation 1 + p·L, a split 0),

the notebook's own model, ``IdealLowerBoundsCM``. That is not the time of a plan: it charges an all-to-all p times what
a rank sends, so sequences of small groups win. A plan made of the sequence is costed in seconds like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from optim_redist._multi_axis.layout import from_layout
from optim_redist.collective_costs import Cost, IdealLowerBoundsCM
from optim_redist.errors import NotRepresentableError
from optim_redist.layout import Layout
from optim_redist.moves import Stage
from optim_redist.multi_axis import MultiAxisDist
from optim_redist.redistributors import NaiveGathererRedist, OptimalRedist

_COLLECTIVES = {"allgather": "allgather", "permute": "permute", "split": None}


def notebook_layouts(
    shape: tuple[int, ...], src: Layout, dst: Layout, max_elements: int | None
) -> list[tuple[str, Layout]]:
    """The operations from ``src`` to ``dst`` by their printed names, each with the layout after it.

    Args:
        max_elements: elements that a rank may hold at a layout between the two; None: any number.

    Raises:
        NotRepresentableError: if ``MultiAxisDist`` cannot express the two on one mesh, or leaves a process empty.
    """
    start, target = _ends(shape, src, dst)
    rows, _ = OptimalRedist(IdealLowerBoundsCM(), memory_limit=max_elements).redistribute(shape, start, target)
    found = [(name, Layout(src.mesh, dist.to_layout().dims)) for name, dist, _ in rows[1:]]
    # the last row is the target; the plan ends in the target as the caller gave it
    return [*found[:-1], (found[-1][0], dst)]


def notebook_charges(shape: tuple[int, ...], stages: Sequence[Stage]) -> tuple[float, float]:
    """What the notebook's model charges for the operations of ``stages``, and for gathering all and splitting."""
    start, target = _ends(shape, stages[0].src, stages[-1].dst)
    model, total, dist = IdealLowerBoundsCM(), Cost(), start
    for stage in stages:
        dist, elements, n_procs = dist.apply(shape, stage.op, target)
        collective = _COLLECTIVES.get(stage.op.partition("_")[0], "alltoall")
        if collective is not None:
            total += getattr(model, collective)(n_procs, elements)
    _, gathering = NaiveGathererRedist(model, epsilon=0.0).redistribute(shape, start, target)
    return total.scalar(epsilon=0.0), gathering


def _ends(shape: tuple[int, ...], src: Layout, dst: Layout) -> tuple[MultiAxisDist, MultiAxisDist]:
    if src.mesh.sizes != dst.mesh.sizes:
        raise NotRepresentableError(
            f"MultiAxisDist goes from one distribution to another on one mesh, got {src.mesh} and {dst.mesh}"
        )
    found = []
    for layout in (src, dst):
        dist = from_layout(layout, shape)
        if not dist.compatible(shape):
            raise NotRepresentableError(f"{dist} leaves a process without any element of shape {shape}")
        found.append(dist)
    return found[0], found[1]
