"""Muon in plain torch: the definition of what the kernels compute, in any floating dtype.

For one matrix (r × c) with parameter p, gradient g, momentum buffer B and, with ``beta2``, second moment V:

    g <- ±g · clip_factor
    B <- μB + (1 − μ)g,      U = (1 − μ)g + μB  with ``nesterov``, else B
    U_i <- U_i (‖U‖/√r) / max(‖U_i‖, 1e-6)                          every row, with ``row_equilibrate``
    O = NewtonSchulz(U)
    O <- O √min(r, c) / max(‖O‖, 1e-6)                              with ``renormalize``
    V <- β2 V + (1 − β2) q,  q = mean of O² over columns (r ≥ c) or rows,   with ``beta2`` (NorMuon)
    O <- O s ‖O‖ / max(‖O s‖, 1e-10),  s = rsqrt(max(V, 1e-10))             with ``beta2``
    lr' = lr · scale
    p <- p (1 − lr λ) − lr' O                                       plain
    p <- p − lr' O − lr' λ p [O p ≥ 0]                              ``cautious``

The arithmetic is in fp32, or fp64 where a tensor is fp64, whatever the tensors are stored in: O comes from the
unrounded B (in the kernels from B as it is stored), and every stored value is rounded once. Gradients are never
written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from optim_kernels._options import check_switches, is_one_of
from optim_kernels.reference.newton_schulz import frobenius_norm

Scalar: TypeAlias = float | Tensor
ScaleRule: TypeAlias = Literal["original", "match_rms_adamw", "spectral_unclamped", "keller", "none"]
Orthogonalize: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class MuonRule:
    """The choices of a Muon update that do not change from step to step.

    Args:
        nesterov: U looks one step ahead.
        scale: the factor of the learning rate: ``"original"`` √max(1, r/c), ``"match_rms_adamw"`` 0.2 √max(r, c),
            ``"spectral_unclamped"`` √(r/c), ``"keller"`` √max(1, r/c) of the last two dimensions of the whole
            parameter, ``"none"`` 1.
        row_equilibrate, renormalize, cautious: see the module's formulas.
        maximize: climb instead of descend.
    """

    nesterov: bool = True
    scale: ScaleRule = "original"
    row_equilibrate: bool = False
    renormalize: bool = False
    cautious: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        check_scale(self.scale)
        for name in ("nesterov", "row_equilibrate", "renormalize", "cautious", "maximize"):
            check_switches(**{name: getattr(self, name)})
            # kernels are compiled for it: 1 and NumPy's would be others than True
            object.__setattr__(self, name, bool(getattr(self, name)))


def check_scale(rule: str) -> None:
    """Raise ``ValueError`` unless ``rule`` is a `ScaleRule`."""
    if not is_one_of(rule, get_args(ScaleRule)):
        raise ValueError(f"scale must be one of {get_args(ScaleRule)}, got {rule!r}")


def lr_scale(rule: ScaleRule, matrix_shape: Sequence[int], param_shape: Sequence[int]) -> float:
    """The learning rate's factor for a matrix ``(..., r, c)`` inside a parameter of ``param_shape``."""
    rows, columns = (param_shape if rule == "keller" else matrix_shape)[-2:]
    if rows == 0 or columns == 0 or rule == "none":
        return 1.0
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if rule == "spectral_unclamped":
        return math.sqrt(rows / columns)
    return math.sqrt(max(1.0, rows / columns))


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: fp64 where any tensor is fp64, else fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def momentum_(
    grad: Tensor,
    buffer: Tensor,
    *,
    momentum: Scalar,
    rule: MuonRule,
    clip_factor: Tensor | None = None,
) -> Tensor:
    """Move ``buffer`` towards ``grad`` and return U, in fp32 or fp64; U shares no storage with either."""
    wide = wide_dtype(grad, buffer)
    g = grad.to(wide)
    if rule.maximize:
        g = -g
    if clip_factor is not None:
        g = g * clip_factor.to(g.device, wide)
    mean = momentum * buffer.to(wide) + (1 - momentum) * g
    buffer.copy_(mean)
    # a sparse gradient can be added to other tensors, but these not to it
    return momentum * mean + (1 - momentum) * g if rule.nesterov else mean


def row_equilibrate(u: Tensor) -> Tensor:
    """Rows of ``u [..., r, c]`` brought to one norm, ‖U‖/√r, so that ‖U‖ stays."""
    # summed in fp64, as in `frobenius_norm`
    row_norms = torch.linalg.vector_norm(u, dim=-1, keepdim=True, dtype=torch.float64)
    target = frobenius_norm(u) / math.sqrt(max(1, u.shape[-2]))
    return u / row_norms.clamp(min=1e-6).to(u.dtype) * target.to(u.dtype)


def renormalize(o: Tensor) -> Tensor:
    """``o [..., r, c]`` brought to the norm of an orthogonal matrix, √min(r, c)."""
    norm = torch.linalg.vector_norm(o, dim=(-2, -1), keepdim=True)
    return o * (math.sqrt(min(o.shape[-2:])) / norm.clamp(min=1e-6))


def second_moment_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of V for matrices ``(..., r, c)``: one value per row if r ≥ c, else one per column."""
    *batch, rows, columns = shape
    return (*batch, rows, 1) if rows >= columns else (*batch, 1, columns)


def normalize_variance_(o: Tensor, second_moment: Tensor, beta2: Scalar) -> Tensor:
    """Update V in place from ``o [..., r, c]`` and return O / √V, rescaled to the norm of O (NorMuon)."""
    if o.numel() == 0:
        return o  # the mean of no numbers is NaN, which V would keep
    mean_squares = o.square().mean(dim=-1 if o.shape[-2] >= o.shape[-1] else -2, keepdim=True)
    v = beta2 * second_moment.to(o.dtype) + (1 - beta2) * mean_squares
    second_moment.copy_(v)
    scaled = o * v.clamp(min=1e-10).rsqrt()
    norm = torch.linalg.vector_norm(o, dim=(-2, -1), keepdim=True)
    return scaled * (norm / torch.linalg.vector_norm(scaled, dim=(-2, -1), keepdim=True).clamp(min=1e-10))


def direction_(u: Tensor, orthogonalize: Orthogonalize, rule: MuonRule, v: Tensor | None, beta2: Scalar) -> Tensor:
    """The update direction O of matrices ``u [..., r, c]``; V is moved when it is given."""
    if rule.row_equilibrate:
        u = row_equilibrate(u)
    o = orthogonalize(u)
    if rule.renormalize:
        o = renormalize(o)
    return o if v is None else normalize_variance_(o, v, beta2)


def updated(p: Tensor, o: Tensor, *, lr: Scalar, scale: float, weight_decay: Scalar, cautious: bool) -> Tensor:
    """The new values of ``p``, in the dtype of the arithmetic; nothing is changed in place."""
    p = p.to(o.dtype)
    step_size = lr * scale
    if cautious:
        return p - step_size * o - step_size * weight_decay * p * (o * p >= 0)
    return p * (1 - lr * weight_decay) - step_size * o


def muon_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    orthogonalize: Orthogonalize,
    lr: Scalar,
    weight_decay: Scalar = 0.0,
    momentum: Scalar = 0.95,
    rule: MuonRule | None = None,
    second_moments: Sequence[Tensor] | None = None,
    beta2: Scalar = 0.0,
    clip_factor: Tensor | None = None,
) -> None:
    """One Muon step on every ``(..., r, c)`` tensor, in place: each tensor its own matrix, or batch of matrices."""
    rule = rule or MuonRule()
    for i, (p, grad, buffer) in enumerate(zip(params, grads, momentum_buffers, strict=True)):
        u = momentum_(grad, buffer, momentum=momentum, rule=rule, clip_factor=clip_factor)
        o = direction_(u, orthogonalize, rule, None if second_moments is None else second_moments[i], beta2)
        scale = lr_scale(rule.scale, p.shape, p.shape)
        p.copy_(updated(p, o, lr=lr, scale=scale, weight_decay=weight_decay, cautious=rule.cautious))
