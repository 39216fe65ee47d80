"""Sums in a fixed binary tree over all micro-batches of a step: no bit depends on which rank had which micro-batch.

Letters: W = ranks, k = backward passes of a step on each; both are powers of two. The micro-batch of pass j on rank r
is leaf j W + r of the tree, so that the tree depends on the product W k alone:

    W = 4, k = 1         W = 2, k = 2                W = 1, k = 4
    (r0+r1)+(r2+r3)      (j0r0+j0r1)+(j1r0+j1r1)     (j0+j1)+(j2+j3)

Each pass adds the contributions of its ranks in pairs (``sum_in_pairs``), and the sums of passes are added in pairs as
they come (``PassTree``), all in fp32 (fp64 for fp64). A missing gradient contributes zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def sum_in_pairs(contributions: Tensor | Sequence[Tensor]) -> Tensor:
    """``contributions [W, C]`` added up, neighbours first: ``[C]``, in fp32 (fp64 for fp64), not rounded yet."""
    wide = torch.promote_types(torch.float32, contributions[0].dtype)
    if len(contributions) == 1:
        return contributions[0].to(wide, copy=True)
    totals = [left.to(wide) + right for left, right in zip(contributions[::2], contributions[1::2])]
    while len(totals) > 1:
        totals = [left.add_(right) for left, right in zip(totals[::2], totals[1::2])]
    return totals[0]


class PassTree:
    """Adds up 2^d passes in pairs, like a binary counter: level l holds a sum of 2^l passes while bit l is one.

    Args:
        root: the tensor that gets the sum of all passes.
    """

    def __init__(self, root: Tensor, num_passes: int) -> None:
        self._levels = [*(torch.empty_like(root) for _ in range(num_passes.bit_length() - 1)), root]
        self._num_added = 0

    @property
    def nbytes(self) -> int:
        """Bytes beside the root."""
        return sum(level.nbytes for level in self._levels[:-1])

    def add(self, found: Tensor) -> None:
        """Add the sum of the next pass."""
        level, carry = 0, found
        while self._num_added >> level & 1:
            carry = self._levels[level].add_(carry)
            level += 1
        self._levels[level].copy_(carry)
        self._num_added += 1

    def restart(self) -> None:
        """Begin a step: the next pass is its first."""
        self._num_added = 0
