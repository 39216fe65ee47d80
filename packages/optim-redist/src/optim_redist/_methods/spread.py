"""Replicas that grow in number: each needer first gets a part of what it needs, then the needers gather.

Notation: n elements that a rank needs, h ranks that hold an element, q ranks that need it, q > h. In one exchange each
holder sends n·q/h, and in the hops of "forward" it is as busy as that or waits for others. If the replicating axes of
the target divide a dimension, the holders send each element once, and then every needer sends its n/q to q - 1 others:
two exchanges, in which no rank moves more than 2·n if h holders have no more than n together.

Axes are cut into their prime factors. Each factor divides the dimension that stays most even; among equally even ones,
the dimension that leaves the neediest rank least to fetch from the source. The order of the factors decides which parts
go to the ranks that have them already.
"""

from __future__ import annotations

from functools import partial

from optim_redist._methods.dividing import cut_axes, divided
from optim_redist.layout import Layout
from optim_redist.problem import Problem


def spread(problem: Problem) -> list[Layout]:
    """The target with its replicating axes dividing dimensions, in up to two ways; none if nothing can be divided.

    Of rows that ranks 0 and 1 have, for ranks 0 … 3, the first way gives rank r quarter r, so that rank 1 sends both
    quarters of its half; the second gives each of ranks 0 and 1 a quarter of its own half.
    """
    layout = cut_axes(problem.dst)
    axes = [axis for axis in layout.replicated_axes if layout.mesh.sizes[axis] > 1]
    orders = [axes, axes[::-1]] if len(axes) > 1 else [axes]
    cost = partial(_largest_and_missing, problem)
    found = [divided(problem.shape, layout, order, cost) for order in orders]
    return [middle for middle in found if middle is not None]


def _largest_and_missing(problem: Problem, layout: Layout) -> tuple[int, int]:
    """What the fullest rank holds of a layout, and what the neediest lacks of it in the source."""
    towards = problem.between(problem.src, layout)
    needed, kept = towards.needed_sizes, towards.num_kept
    missing = max(needed[point] - kept.get(rank, 0) for rank, point in towards.dst_points.items())
    return max(needed.values()), missing
