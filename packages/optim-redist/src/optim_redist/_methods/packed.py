"""A donated source packed as a whole before the target takes memory: one exchange where others need rounds.

Notation, in elements of one rank: S held, D needed, K of these kept, U sent and I received. The direct exchange holds
source, target and buffers, S + D + U + I, and in rounds S + D and smaller buffers. Packed first,

    max( S + U + K,   U + K + D + I )

are held: the source with all that is taken out of it, then that and the target with what arrives. Over all ranks U + K
sums to what D sums to, so this is not below S + D; but it takes one exchange.
"""

from __future__ import annotations

from optim_redist.moves import Volumes
from optim_redist.problem import Problem


def packed_peak(problem: Problem, exchange: Volumes, *, given: bool = False) -> int:
    """Elements that the fullest rank holds; with the target ``given``, that is held beside the source, too."""
    sent, received, kept = exchange.sent, exchange.received, problem.num_kept
    most = 0
    for rank, (src, dst) in problem.num_stored.items():
        taken = sent.get(rank, 0) + kept.get(rank, 0)
        most = max(most, taken + max(src + given * dst, dst + received.get(rank, 0)))
    return most
