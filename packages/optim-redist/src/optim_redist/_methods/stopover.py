"""Under a memory limit: two exchanges, with a stopover in a layout of smaller parts, in place of many rounds of one.

Notation, in elements of one rank: S held, D needed, M of the layout between them, L the limit. One exchange has
L - S - D for its buffers, and runs in as many rounds as what it moves has times this room. If the source is donated,
the two exchanges have

    L - S - M   and   L - M - D,

as the source is freed when M is there. So M should be small: the axes that replicate in the source, or those that do in
the target, divide dimensions. In the first case nothing moves before the source is freed, as M is a part of what each
rank has; in the second M is a part of what each rank needs, which the needers gather in the end.

Contributions are combined on the parts of M. A part takes fewer of them, so this can also pay if the source is kept and
the second exchange has no more than L - S - M - D.
"""

from __future__ import annotations

from optim_redist._methods.candidates import counted, from_phases, has_room, joined, one_exchange
from optim_redist._methods.packed import can_be_packed, packed_exchange
from optim_redist._methods.scatter import scattered, sliced
from optim_redist._methods.spread import spread
from optim_redist.layout import Layout
from optim_redist.lower_bounds import Bounds, bounds_of
from optim_redist.moves import Candidate, Request
from optim_redist.problem import Problem


def stopover(request: Request, limits: Bounds) -> Candidate | None:
    """The quickest way through a layout of smaller parts; None if none fits."""
    problem, found = request.problem, []
    for middle in _middles(problem):
        parts = request.through(problem.src, [middle, problem.dst])
        chosen = [_quickest(part) for part in parts] if all(map(has_room, parts)) else [None]
        fitting = [one for one in chosen if one is not None]
        if len(fitting) == len(parts):
            found.append(joined("stopover", fitting))
    return min(found, key=lambda way: way.seconds, default=None)


def can_stop_over(request: Request, limits: Bounds) -> bool:
    """Whether a limit may leave two exchanges more room than one."""
    return request.memory_limit is not None and (request.donate or request.problem.num_contributions > 1)


def _middles(problem: Problem) -> list[Layout]:
    """Layouts in which axes that replicate in the source, or in the target, divide dimensions."""
    found = sliced(problem)
    if problem.num_contributions > 1:
        found += scattered(problem)
    if problem.dst_replicas > 1 and not problem.dst.partial:
        found += spread(problem)
    return found


def _quickest(request: Request) -> Candidate | None:
    """The quickest exchange that fits under the limit."""
    problem, limits = request.problem, bounds_of(request.problem)
    moves = limits.lb > 0
    found = [one_exchange(request, limits, "exchange" if moves else "slice")]
    if can_be_packed(request, limits):
        found.append(packed_exchange(request, limits))
    if moves and request.has_borders and problem.num_contributions == 1:
        found.append(from_phases("hierarchical", request))
    fitting = [one for one in found if request.allows(one.peak_bytes)]
    return counted(min(fitting, key=lambda one: one.seconds), request) if fitting else None
