"""The AdamW formula in registers: the scalars of a tensor's step, and the update of its elements.

    g <- s · g,  s = ±clip_factor / grad_scale
    m <- β1 m + (1 − β1) g
    v <- β2 v + (sqrt(1 − β2) g)²;  w <- max(w, v) with amsgrad, else w = v
    p <- p − (lr λ p + lr sqrt(1 − β2^t)/(1 − β1^t) · m / (sqrt(w) + eps sqrt(1 − β2^t)))

Root and quotient are one approximate instruction each, together good to 5e-7 of the step; everything else is rounded
once per operation, in the order written, so all storage formats see the same bits.
"""

from __future__ import annotations

from optim_kernels._kernels.approximations import rcp_approx, sqrt_approx
from optim_kernels._triton import div_rn, tl, triton, wide

# A group's row in the scalar table, in words of 8 bytes: an int64, numbers in fp64, and pairs of fp32 numbers. What is
# small beside 1 is formed in fp64 and rounded to fp32 once. That is done by whoever writes the row, as fp64 numbers
# take a GPU long to convert, and each program would do it anew.
ROW = (
    "lr_address",  # of an fp32 number on the device, or 0: the learning rate is in the row
    "beta1",
    "beta2",
    "log2_beta1",
    "log2_beta2",
    "weight_decay",
    "rates",  # lr, lr λ
    "betas",  # β1, β2
    "parts",  # ±(1 − β1), ±sqrt(1 − β2), below zero to maximize
    "eps",  # eps, 0
)
ROW_SIZE = len(ROW)
(
    _LR_ADDRESS,
    _BETA1,
    _BETA2,
    _LOG2_BETA1,
    _LOG2_BETA2,
    _WEIGHT_DECAY,
    _RATES,
    _BETAS,
    _PARTS,
    _EPS,
) = map(tl.constexpr, range(ROW_SIZE))


# A memo, which a step leaves for the next one, in such words: t in fp32, β1 and β2 in fp64, and ``1 − β1^t`` and
# ``sqrt(1 − β2^t)`` in fp32. There are two, for even and for odd t, so that one is read while the other is written.
# Forming the two powers in fp64 delays a lone small tensor by half a microsecond; in a long list that is hidden, and it
# is reading a memo that would cost time.
MEMO_SIZE = 4
_MEMO_SIZE = tl.constexpr(MEMO_SIZE)


@triton.jit
def _pair(word):
    """The two fp32 numbers of a word (int64), the lower half first."""
    return word.to(tl.int32).to(tl.float32, bitcast=True), (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def read_group(row, rates, memo, MEMO: tl.constexpr):
    """Load a group's row and, with ``MEMO``, its two memos, for ``scalars_of_step``; nothing here waits for memory.

    ``rates`` is what the row has a 0 for, or 0; with ``MEMO`` the row's own is not read.
    """
    numbers = (
        tl.load(row + _LR_ADDRESS),
        wide(rates) if MEMO else rates | tl.load(row + _RATES),
        tl.load(row + _BETAS),
        tl.load(row + _PARTS),
        tl.load(row + _EPS),
    )
    if MEMO:
        odd = memo + _MEMO_SIZE
        keys = (tl.load(row + _BETA1), tl.load(row + _BETA2))
        even_memo = (tl.load(memo), tl.load(memo + 1), tl.load(memo + 2), tl.load(memo + 3))
        odd_memo = (tl.load(odd), tl.load(odd + 1), tl.load(odd + 2), tl.load(odd + 3))
    else:
        keys = ()  # type: ignore[assignment]
        even_memo = ()  # type: ignore[assignment]
        odd_memo = ()  # type: ignore[assignment]
    return numbers, keys, even_memo, odd_memo


@triton.jit
def scalars_of_step(group, row, t, scale, MEMO: tl.constexpr):
    """The scalars of a tensor's update at step t (fp32).

    The betas; ``(1 − β1) s`` and ``sqrt(1 − β2) s``, which turn a gradient into its part of m and into the root of its
    part of v; eps, the decay and the step size.
    """
    numbers, keys, even_memo, odd_memo = group
    lr_address, rates, betas, parts, eps = numbers
    lr, decay = _pair(rates)
    if lr_address != 0:
        lr = tl.load(lr_address.to(tl.pointer_type(tl.float32)))
        decay = (lr.to(tl.float64) * _number(row, _WEIGHT_DECAY)).to(tl.float32)
    if MEMO:
        beta1, beta2 = keys
        even_t, even_beta1, even_beta2, corrections = even_memo
        odd_t, odd_beta1, odd_beta2, odd_corrections = odd_memo
        bias1, correction = _pair(corrections)
        if (_pair(odd_t)[0] == t) & (odd_beta1 == beta1) & (odd_beta2 == beta2):
            bias1, correction = _pair(odd_corrections)
        elif (_pair(even_t)[0] != t) | (even_beta1 != beta1) | (even_beta2 != beta2):
            bias1, correction = _corrections(row, t)
    else:
        bias1, correction = _corrections(row, t)
    beta1, beta2 = _pair(betas)
    g_to_m, g_to_root_v = _pair(parts)
    step_size = div_rn(lr, bias1) * correction
    return beta1, beta2, g_to_m * scale, g_to_root_v * scale, _pair(eps)[0] * correction, decay, step_size


@triton.jit
def leave_memo(row, t, memo):
    """Write the memo of step t, the next one, for its programs."""
    bias1, correction = _corrections(row, t)
    own = memo + (t.to(tl.int64) % 2) * _MEMO_SIZE
    halves = own.to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(halves, t)
    tl.store(own + 1, tl.load(row + _BETA1))
    tl.store(own + 2, tl.load(row + _BETA2))
    tl.store(halves + 6, bias1)
    tl.store(halves + 7, correction)


@triton.jit
def _corrections(row, t):
    """``1 − β1^t`` and ``sqrt(1 − β2^t)``, formed in fp64."""
    t = t.to(tl.float64)
    bias1 = 1.0 - tl.exp2(t * _number(row, _LOG2_BETA1))
    bias2 = 1.0 - tl.exp2(t * _number(row, _LOG2_BETA2))
    return bias1.to(tl.float32), tl.sqrt(bias2).to(tl.float32)


@triton.jit
def _number(row, place: tl.constexpr):
    """A row's number in fp64."""
    return tl.load(row + place).to(tl.float64, bitcast=True)


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
