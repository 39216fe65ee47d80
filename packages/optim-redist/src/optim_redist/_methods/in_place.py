"""Whether messages lie in one piece of their tensor, so that a program exchanges them there and copies nothing.

A message is a box: in every dimension k of a rank's part, the indices that another rank's part shares with it. If it
leaves some of them out, dimension k is cut. The box is one piece of contiguous memory if what it has of a cut dimension
is one run, and one index of every dimension before.
"""

from __future__ import annotations

from optim_redist.overlap import Overlap
from optim_redist.problem import Problem


def in_place(problem: Problem) -> tuple[bool, bool]:
    """Whether every message lies in one piece of its sender's part, and whether in one piece of its receiver's.

    Contributions that are combined do not arrive in place.
    """
    leaves, arrives = True, problem.num_contributions == 1
    is_long = False  # whether messages have more than one index of a dimension before
    for o in problem.overlaps[: len(problem.shape)]:
        if not (leaves or arrives):
            break
        src, dst = o.src, o.dst
        if src is dst or len(src.sizes) == len(dst.sizes) == 1:
            size = max(src.sizes)
        else:
            cuts_src, cuts_dst, size = _cut(o)
            # a contiguous part cuts out a run
            leaves = leaves and not (cuts_src and (is_long or dst.cuts is None))
            arrives = arrives and not (cuts_dst and (is_long or src.cuts is None))
        is_long = is_long or size > 1
    return leaves, arrives


def _cut(o: Overlap) -> tuple[bool, bool, int]:
    """Whether the target cuts parts of the source, whether the source cuts those of the target, the longest piece."""
    src, dst = o.src.sizes, o.dst.sizes
    if len(dst) == 1:
        return False, True, max(src)
    if len(src) == 1:
        return True, False, max(dst)
    cuts_src = cuts_dst = False
    longest = 0
    for i, row in enumerate(o.common):
        for j, n in row.items():
            cuts_src = cuts_src or n < src[i]
            cuts_dst = cuts_dst or n < dst[j]
            longest = max(longest, n)
    return cuts_src, cuts_dst, longest
