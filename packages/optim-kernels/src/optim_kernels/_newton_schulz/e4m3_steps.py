"""The standard iteration of large matrices begins in e4m3 on Hopper, which multiplies twice as much a second: the first
step, and A² of the second.

    X₈ = e4m3(X)          A₈ = e4m3(X₈X₈ᵀ)          S₈ = e4m3(bA₈ + cA₈²)          X ← aX + S₈X₈

S is a correction: as long as singular values are small SX is little beside aX, where X keeps its 16 bits. What rounding
leaves in S or X₈ does not leave the rows or columns of X, as it is multiplied by the other, so that later steps do not
enlarge it as they enlarge what lies beside them. Sums have to be exact, or they would (`_hopper.e4m3_kernel`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optim_kernels._kernels.e4m3 import UNITS, empty_e4m3, to_e4m3
from optim_kernels._newton_schulz.coefficients import Triple
from optim_kernels._newton_schulz.config import NSConfig
from optim_kernels._newton_schulz.tile_choice import has_gluon, num_multiprocessors
from optim_kernels._newton_schulz.tiles import PING_PONG, PING_PONG_ROUNDS, symmetric_tiles

# S₈ for an S of 1: |bσ² + cσ⁴| ≤ 2.75 for σ ≤ 1 (keller) leaves it below e4m3's 448.
S_UNITS = 128.0


def starts_in_e4m3(count: int, m: int, n: int, config: NSConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``count`` m×n matrices of this compute dtype begin in e4m3: those whose products fill the chip."""
    if device.type != "cuda" or dtype != torch.float16 or not config.may_start_in_e4m3(m, n):
        return False
    if not has_gluon(device.index):
        return False
    return count * symmetric_tiles(m, PING_PONG) >= PING_PONG_ROUNDS * num_multiprocessors(device.index)


def first_step(x: Tensor, triple: Triple, out: Tensor, scale: Tensor | None = None) -> None:
    """Compute ``aX + (bA + cA²)X`` with X = ``scale x``, of norm 1 at most; ``x [batch, M, N]``, ``scale [batch]``."""
    a, b, c = triple
    batch, m, _ = x.shape
    narrow, transposed = to_e4m3(x, scale, with_transposed=True)
    gram, factor = (empty_e4m3(batch, m, m, x) for _ in range(2))
    _multiply(narrow, None, gram, alpha=1 / UNITS)
    _multiply(gram, None, factor, alpha=c * S_UNITS / UNITS**2, c=gram, beta=b * S_UNITS / UNITS)
    _multiply(factor, transposed, out, alpha=1 / (S_UNITS * UNITS), c=x, beta=a, scale=scale)


def quadratic(r: Tensor, b: float, c: float, out: Tensor) -> None:
    """Compute ``bR + cR²`` for symmetric ``R [batch, M, M]`` of norm 1 or little more; R² is of R in e4m3."""
    narrow, _ = to_e4m3(r)
    _multiply(narrow, None, out, alpha=c / UNITS**2, c=r, beta=b)


def _multiply(a: Tensor, b: Tensor | None, out: Tensor, **more: Any) -> None:
    from optim_kernels._hopper.e4m3_kernel import e4m3_product

    e4m3_product(a, b, out, programs=num_multiprocessors(a.device.index), **more)
