"""Gradient norms in two halves: each rank sums powers over its own part, and every rank combines the sums alike.

    p = 2     sqrt(sum_r sum_i g_i^2)            sums in fp64 (``optim_kernels.clip.sum_of_squares``)
    p = inf   max_r max_i |g_i|
    else      (sum_r sum_i |g_i|^p)^(1/p)        p = 0 counts what is not zero

The W sums travel in one small message and are added in rank order, so that every rank has the same bits.

With ``is_exact`` the result does not depend on the number of ranks either. The largest |g_i| is below 2^e. Each square,
in units of 4^e, is cut into two integers of 30 bits; their int64 sums over up to 2^33 elements are exact in any order:

    4^-e g_i^2 = 2^-30 a_i + 2^-60 b_i + less than 2^-60,        norm = 2^e sqrt(2^-30 sum a_i + 2^-60 sum b_i)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from optim_dist._reduction.collectives import Communicator
from optim_kernels.clip import sum_of_squares

_ELEMENTS_AT_ONCE = 2**22

# gradients of this rank, and the factor that multiplies them before the update; None stands for 1
Part = tuple[Sequence[Tensor], Tensor | None]


def check_norm_type(norm_type: float, is_exact: bool) -> None:
    """Refuse norms for which ``is_exact`` has no exact sums, before any rank has begun to take one."""
    if is_exact and norm_type not in (2, 0, math.inf):
        raise ValueError(f"with order='tree' norm_type must be 2, inf or 0, whose sums are exact, got {norm_type}")


def norm_over_ranks(parts: Sequence[Part], norm_type: float, communicator: Communicator, *, is_exact: bool) -> Tensor:
    """The norm of all parts of all ranks together: 0-dim, fp64. Collective."""
    if is_exact and norm_type == 2:
        norms = [_exact_norm(gradients, communicator) for gradients, _ in parts]
    else:
        mine = torch.stack([_power_sum(gradients, norm_type, communicator.device) for gradients, _ in parts])
        norms = [_combine_powers(powers, norm_type) for powers in communicator.gather_numbers(mine).unbind(1)]
    factors = [None if norm_type == 0 else factor for _, factor in parts]
    norms = [norm if factor is None else norm * factor for norm, factor in zip(norms, factors)]
    return combine_norms(norms, norm_type)


def combine_norms(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of several vectors' norms, as if they were one vector: 0-dim, in the norms' dtype."""
    if len(norms) == 1:
        return norms[0]
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
    return torch.linalg.vector_norm(stacked, norm_type if norm_type != 0 else 1)


def _exact_norm(gradients: Sequence[Tensor], communicator: Communicator) -> Tensor:
    """The 2-norm of all ranks' gradients: 0-dim, fp64, the same bits however they are spread over ranks."""
    device = communicator.device
    largest = communicator.gather_numbers(_power_sum(gradients, math.inf, device).reshape(1)).amax()
    is_usual = torch.isfinite(largest) & (largest > 0)
    exponent = torch.frexp(torch.where(is_usual, largest, 1.0)).exponent
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    for gradient in gradients:
        for some in gradient.reshape(-1).split(_ELEMENTS_AT_ONCE):
            square = torch.ldexp(some.double(), -exponent.to(some.device)).square_() * 2.0**30
            high = square.floor()
            low = (square - high).mul_(2.0**30).floor_()
            sums += torch.stack([part.to(torch.int64).sum() for part in (high, low)]).to(device)
    high, low = communicator.gather_numbers(sums).sum(0).double()
    norm = torch.ldexp(torch.sqrt(high * 2.0**-30 + low * 2.0**-60), exponent)
    return torch.where(is_usual, norm, largest)


def _power_sum(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """This rank's sum of powers, or its maximum: 0-dim, fp64, on ``device``."""
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
    """The norm from the ``_power_sum`` of every rank ``[W]``: 0-dim, fp64."""
    if math.isinf(norm_type):
        return powers.amax()
    total = powers[0]
    for power in powers[1:]:
        total = total + power
    return total if norm_type == 0 else total.sqrt() if norm_type == 2 else total ** (1 / norm_type)
