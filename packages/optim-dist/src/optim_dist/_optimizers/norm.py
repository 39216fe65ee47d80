"""Gradient norms in two halves: powers summed by each rank over its own part, combined on every rank alike.

    p = 2     sqrt(sum_r sum_i g_i^2)            sums in fp64 (``optim_kernels.clip.sum_of_squares``)
    p = inf   max_r max_i |g_i|
    else      (sum_r sum_i |g_i|^p)^(1/p)        p = 0 counts what is not zero

The W sums travel in one small message and are added in rank order, so that every rank has the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from optim_dist._reduction.collectives import Communicator
from optim_kernels.clip import sum_of_squares

# gradients of this rank, and what they are multiplied by before the update; None is one
Part = tuple[Sequence[Tensor], Tensor | None]


def norm_over_ranks(parts: Sequence[Part], norm_type: float, communicator: Communicator) -> Tensor:
    """The norm of all parts of all ranks together: 0-dim, fp64. Collective."""
    mine = torch.stack([_power_sum(gradients, norm_type, communicator.device) for gradients, _ in parts])
    norms = []
    for powers, (_, factor) in zip(communicator.gather_message(mine).unbind(1), parts):
        norm = _combine_powers(powers, norm_type)
        norms.append(norm if factor is None or norm_type == 0 else norm * factor)
    return combine_norms(norms, norm_type)


def combine_norms(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of several vectors' norms, as if they were one vector: 0-dim, in the norms' dtype."""
    if len(norms) == 1:
        return norms[0]
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
    return torch.linalg.vector_norm(stacked, norm_type if norm_type != 0 else 1)


def _power_sum(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """This rank's half: 0-dim, fp64, on ``device``."""
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    if norm_type == 2:
        return sum_of_squares(gradients).to(device, torch.float64)
    wide = [gradient.double().abs() for gradient in gradients]
    if math.isinf(norm_type):
        return torch.stack([gradient.amax().to(device) for gradient in wide]).amax()
    return torch.stack([(g.ne(0).double() if norm_type == 0 else g**norm_type).sum().to(device) for g in wide]).sum()


def _combine_powers(powers: Tensor, norm_type: float) -> Tensor:
    """The norm from every rank's half ``[W]``: 0-dim, fp64."""
    if math.isinf(norm_type):
        return powers.amax()
    total = powers[0]
    for power in powers[1:]:
        total = total + power
    return total if norm_type == 0 else total.sqrt() if norm_type == 2 else total ** (1 / norm_type)
