"""The memory of the packed exchange: a donated source is packed as a whole and freed before the target is allocated.

Notation, in elements of one rank: S held, D needed, K of these kept, U sent and I received. The direct exchange holds
source, target and buffers, S + D + U + I, or in rounds S + D and smaller buffers. The packed exchange holds

    max( S + U + K,   U + K + D + I ):

first the source and all that is taken out of it, then what was taken out, the target and what arrives. Over all ranks
U + K sums to what D sums to, so this is not below S + D; but it takes one exchange where others need rounds.
"""

from __future__ import annotations

from optim_redist.moves import Volumes
from optim_redist.problem import Problem


def packed_peak(problem: Problem, exchange: Volumes, *, given: bool = False) -> int:
    """Elements that the fullest rank holds; a ``given`` target is held beside the source, too."""
    sent, received, kept = exchange.sent, exchange.received, problem.num_kept
    most = 0
    for rank, (src, dst) in problem.num_stored.items():
        taken = sent.get(rank, 0) + kept.get(rank, 0)
        most = max(most, taken + max(src + given * dst, dst + received.get(rank, 0)))
    return most
