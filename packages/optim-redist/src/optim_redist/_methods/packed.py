"""The memory of the packed exchange: a donated source is packed as a whole and freed before the target is allocated.

Notation, in elements of one rank: S held, D needed, K of these kept, U sent and I received. The direct exchange holds
source, target and buffers, S + D + U + I, or in rounds S + D and smaller buffers. The packed exchange holds

    max( S + U + K,   U + K + D + I ):

first the source and all that is taken out of it, then what was taken out, the target and what arrives. Over all ranks
U + K sums to what D sums to, so this is not below S + D; but it takes one exchange where others need rounds.
"""

from __future__ import annotations

from optim_redist._methods.candidates import exchanges_of, step_of
from optim_redist.lower_bounds import Bounds
from optim_redist.moves import Candidate, Request, Stage, Volumes
from optim_redist.problem import Problem


def packed_peak(problem: Problem, exchange: Volumes, *, given: bool = False) -> int:
    """Elements that the fullest rank holds; a ``given`` target is held beside the source, too."""
    sent, received, kept = exchange.sent, exchange.received, problem.num_kept
    most = 0
    for rank, (src, dst) in problem.num_stored.items():
        taken = sent.get(rank, 0) + kept.get(rank, 0)
        most = max(most, taken + max(src + given * dst, dst + received.get(rank, 0)))
    return most


def packed_exchange(request: Request, limits: Bounds) -> Candidate:
    """The direct exchange of a source that is packed first; nothing else is held meanwhile."""
    problem, width, model = request.problem, request.itemsize, request.model
    (exchange,) = exchanges_of(problem, "packed", model.topology)
    moved = exchange.volumes
    peak = packed_peak(problem, moved) * width
    recv, send = limits.direct_recv, limits.direct_send
    step = step_of(request, "packed exchange", recv, send, peak, moved.borders, copied=recv + send)
    # what stays on a rank is copied twice: into a buffer and out of it
    kept = 2 * model.pack_seconds(max(problem.num_kept.values(), default=0) * width)
    step = step._replace(seconds=step.seconds + kept)
    return Candidate("packed", (Stage(step.op, "packed", problem.src, problem.dst),), (step,), limits.single_hop)


def can_be_packed(request: Request, limits: Bounds) -> bool:
    """Whether a limit may be met by packing a source first: it is donated, and moves as it is."""
    problem = request.problem
    limited = request.memory_limit is not None and request.donate
    return limited and problem.num_contributions == 1 and not problem.started and limits.lb > 0
