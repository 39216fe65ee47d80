"""The AdamW formula in registers: the scalars of a tensor's step, and the update of its elements.

    g <- s · g,  s = ±clip_factor / grad_scale
    m <- β1 m + (1 − β1) g
    v <- β2 v + (sqrt(1 − β2) g)²;  w <- max(w, v) with amsgrad, else w = v
    p <- p − (lr λ p + lr sqrt(1 − β2^t)/(1 − β1^t) · m / (sqrt(w) + eps sqrt(1 − β2^t)))

Root and quotient are one approximate instruction each, together good to 5e-7 of the step; everything else is rounded
once per operation, in the order written, so all storage formats see the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

from optim_kernels._kernels.approximations import rcp_approx, sqrt_approx
from optim_kernels._triton import div_rn, sqrt_rn, tl, triton, wide


class Hyperparameters(NamedTuple):
    """A group's row in the scalar table, as fp64; an ``lr_address`` of 0 means that ``lr`` was given on the host."""

    lr: float
    lr_address: int
    beta1: float
    beta2: float
    log2_beta1: float
    log2_beta2: float
    eps: float
    weight_decay: float
    sign: float


HYPERPARAMETERS_SIZE = len(Hyperparameters._fields)
_LR, _LR_ADDRESS, _BETA1, _BETA2, _LOG2_BETA1, _LOG2_BETA2, _EPS, _WEIGHT_DECAY, _SIGN = map(
    tl.constexpr, range(HYPERPARAMETERS_SIZE)
)


# A memo, which a step leaves for the next one: ``t, β1, β2, 1 − β1^t, sqrt(1 − β2^t)``. There are two, for even and for
# odd t, so that one is read while the other is written. Forming the two powers in fp64 delays a lone small tensor by
# half a microsecond; in a long list that is hidden, and it is reading a memo that would cost time.
MEMO_SIZE = 8
_MEMO_SIZE = tl.constexpr(MEMO_SIZE)


@triton.jit
def read_group(row, lr_bits, memo, MEMO: tl.constexpr):
    """Load a group's row and, with ``MEMO``, its two memos, for ``scalars_of_step``; nothing here waits for memory.

    With ``MEMO`` the learning rate is not in the row: ``lr_bits`` is its pattern.
    """
    numbers = (
        wide(lr_bits).to(tl.float64, bitcast=True) if MEMO else tl.load(row + _LR),
        tl.load(row + _LR_ADDRESS).to(tl.int64, bitcast=True),
        tl.load(row + _BETA1),
        tl.load(row + _BETA2),
        tl.load(row + _EPS),
        tl.load(row + _WEIGHT_DECAY),
        tl.load(row + _SIGN),
    )
    if MEMO:
        odd = memo + _MEMO_SIZE
        even_memo = (tl.load(memo), tl.load(memo + 1), tl.load(memo + 2), tl.load(memo + 3), tl.load(memo + 4))
        odd_memo = (tl.load(odd), tl.load(odd + 1), tl.load(odd + 2), tl.load(odd + 3), tl.load(odd + 4))
    else:
        even_memo = ()  # type: ignore[assignment]
        odd_memo = ()  # type: ignore[assignment]
    return numbers, even_memo, odd_memo


@triton.jit
def scalars_of_step(group, row, t, scale, MEMO: tl.constexpr):
    """The scalars of a tensor's update at step t: those small beside 1 are formed in fp64 and rounded to fp32 once.

    The betas; ``(1 − β1) s`` and ``sqrt(1 − β2) s``, which turn a gradient into its part of m and into the root of its
    part of v; eps, the decay and the step size.
    """
    numbers, even_memo, odd_memo = group
    lr, lr_address, beta1, beta2, eps, weight_decay, sign = numbers
    if lr_address != 0:
        lr = tl.load(lr_address.to(tl.pointer_type(tl.float32))).to(tl.float64)
    if MEMO:
        even_t, even_beta1, even_beta2, bias1, correction = even_memo
        odd_t, odd_beta1, odd_beta2, odd_bias1, odd_correction = odd_memo
        if (odd_t == t) & (odd_beta1 == beta1) & (odd_beta2 == beta2):
            bias1, correction = odd_bias1, odd_correction
        elif (even_t != t) | (even_beta1 != beta1) | (even_beta2 != beta2):
            bias1, correction = _corrections(row, t)
    else:
        bias1, correction = _corrections(row, t)
    scale = scale * sign.to(tl.float32)
    g_to_m = scale * (1.0 - beta1).to(tl.float32)
    g_to_root_v = scale * sqrt_rn((1.0 - beta2).to(tl.float32))
    correction = correction.to(tl.float32)
    step_size = div_rn(lr.to(tl.float32), bias1.to(tl.float32)) * correction
    eps = eps.to(tl.float32) * correction
    decay = (lr * weight_decay).to(tl.float32)
    return beta1.to(tl.float32), beta2.to(tl.float32), g_to_m, g_to_root_v, eps, decay, step_size


@triton.jit
def leave_memo(row, t, memo):
    """Write the memo of step t, the next one, for its programs."""
    bias1, correction = _corrections(row, t)
    own = memo + (t.to(tl.int64) % 2) * _MEMO_SIZE
    tl.store(own, t)
    tl.store(own + 1, tl.load(row + _BETA1))
    tl.store(own + 2, tl.load(row + _BETA2))
    tl.store(own + 3, bias1)
    tl.store(own + 4, correction)


@triton.jit
def _corrections(row, t):
    """``1 − β1^t`` and ``sqrt(1 − β2^t)`` in fp64."""
    bias1 = 1.0 - tl.exp2(t * tl.load(row + _LOG2_BETA1))
    bias2 = 1.0 - tl.exp2(t * tl.load(row + _LOG2_BETA2))
    return bias1, tl.sqrt(bias2)


@triton.jit
def adamw(p, g, m, v, w, scalars, AMSGRAD: tl.constexpr, ROUNDED: tl.constexpr):
    """The new ``(p, m, v, w)``, by explicit multiply-adds so that all variants round alike, but for a ``ROUNDED`` p.

    As that p is rounded to 16 bits afterwards, one multiply-add for each of its two terms is enough.
    """
    beta1, beta2, g_to_m, g_to_root_v, eps, decay, step_size = scalars
    m = tl.fma(m, beta1, g * g_to_m)
    root = g * g_to_root_v
    v = tl.fma(v, beta2, root * root)
    if AMSGRAD:
        w = tl.maximum(w, v, propagate_nan=tl.PropagateNan.ALL)
    else:
        w = v
    # an infinite w makes the ratio zero, as its reciprocal is zero
    ratio = m * rcp_approx(sqrt_approx(w) + eps)
    if ROUNDED:
        p = tl.fma(-step_size, ratio, tl.fma(-decay, p, p))
    else:
        p = p - tl.fma(p, decay, step_size * ratio)
    return p, m, v, w
