"""Whether messages lie in one piece of their tensor, so that a program exchanges them there and copies nothing.

A message is a box: in every dimension k of a rank's part, the indices that another rank's part shares with it. If it
leaves some of them out, dimension k is cut. The box is one piece of contiguous memory if what it has of a cut dimension
is one run, and one index of every dimension before.
"""

from __future__ import annotations

from typing import Literal

from optim_redist.overlap import Overlap
from optim_redist.problem import Problem


def leaves_in_place(problem: Problem) -> bool:
    """Whether every message lies in one piece of its sender's part."""
    return _is_one_piece(problem, "src")


def arrives_in_place(problem: Problem) -> bool:
    """Whether every message lies in one piece of its receiver's part, and is no contribution to be combined."""
    return problem.num_contributions == 1 and _is_one_piece(problem, "dst")


def _is_one_piece(problem: Problem, which: Literal["src", "dst"]) -> bool:
    longest = 1  # the most indices of a dimension before that a message has
    for o in problem.overlaps[: len(problem.shape)]:
        is_cut, is_run, size = _cut(o, which)
        if is_cut and not (is_run and longest == 1):
            return False
        longest = max(longest, size)
    return True


def _cut(o: Overlap, which: Literal["src", "dst"]) -> tuple[bool, bool, int]:
    """Whether the other side's parts cut this side's, whether they cut out runs, and the longest that they cut out."""
    here, there = (o.src, o.dst) if which == "src" else (o.dst, o.src)
    if here is there or len(there.sizes) == 1:
        return False, True, max(here.sizes)
    is_run = there.cuts is not None
    if len(here.sizes) == 1:
        return True, is_run, max(there.sizes)
    is_cut, longest = False, 0
    for i, row in enumerate(o.common):
        for j, n in row.items():
            is_cut |= n < here.sizes[i if which == "src" else j]
            longest = max(longest, n)
    return is_cut, is_run, longest
