"""Moments in 8 bits: CUBIC8 for the first, QUINTIC8_UNSIGNED for the second, as ``optim_utils.low_bit`` defines them.

A tile is a block of 256 elements, eight of them in a row for each thread of a warp. With ``a`` its largest magnitude
and ``f = m / 2**D`` for code m:

    decode:  f³ · scale  (signs, D = 7);  f⁵ · scale  (D = 8)
    encode:  scale = a / peak, y = |x| · peak / a, m = y^(1/3) or y^(1/5) in units of 2**-D, rounded

The GPU's approximate logarithm and power give the root, a little too low. It is rounded by adding a number so large
that its last bit is worth ``2**-D``: the low byte of the sum is m. A root a little too high is rounded too, but only in
sum: all those of a thread are added to one such number. If that sum is the sum of the codes, no edge between two codes
lies between the low root and the high one, and the codes are exact. In a twelfth of the blocks the sums differ; then y
is compared with the edge between the two codes, as the format defines it. So it is in blocks that have a code of zero,
which only zero may have, numbers that are not finite, or a largest magnitude without a reciprocal: their sum is NaN or
another value that no codes give.
"""

from __future__ import annotations

from optim_kernels._kernels.approximations import known_again, power_approx, rcp_approx
from optim_kernels._kernels.moment_scales import FIRST_PEAK, FP32_MAX, SECOND_PEAK
from optim_kernels._triton import INTERPRETED, div_rn, tl, triton

# A block whose largest magnitude is below the first is multiplied by the second before anything is divided by that.
_SMALL = tl.constexpr(2.0**-80)
_RAISE = tl.constexpr(2.0**100)
# Times 2**116 it is less than half a unit of the sum of roots, which drops it; times 2**126 it is 256 units.
_LARGE_SHARE = tl.constexpr(2.0**-126)
# From the first edge between two codes on, an H200's estimate of a root is off by -5.3e-7 to 7.4e-7, and by another
# 1.6e-7, as its argument is not rounded like the format's. Made this much lower it is never too high, and then made
# this much wider never too low.
LOWER = tl.constexpr(9.7e-7)
WIDER = tl.constexpr(1.0 + 15 * 2.0**-23)


@triton.jit
def _fractions(codes, SIGNED: tl.constexpr):
    """``m / 2**D`` of codes, one by one (uint8) or four in a word (uint32)."""
    if codes.dtype == tl.uint32:
        # each byte becomes the last bits of a large number, which is then subtracted: 65536 + (code + 128) / 128, since
        # two's complement ascends once the sign bit is flipped, and without signs 32768 + code / 256
        if SIGNED:
            f0, f1, f2, f3 = _fractions_of_word(codes ^ 0x80808080, "0x47800000", "0f47800080")
        else:
            f0, f1, f2, f3 = _fractions_of_word(codes, "0x47000000", "0f47000000")
        f = tl.reshape(tl.join(tl.join(f0, f2), tl.join(f1, f3)), [4 * codes.shape[0]])
    elif SIGNED:
        f = codes.to(tl.int8, bitcast=True).to(tl.float32) * 0.0078125
    else:
        f = codes.to(tl.float32) * 0.00390625
    return f


@triton.jit
def _fractions_of_word(word, upper: tl.constexpr, origin: tl.constexpr):
    """fp32 numbers of each of a word's four bytes below the bits ``upper`` (hexadecimal), minus ``origin``."""
    return tl.inline_asm_elementwise(
        "{.reg .b32 x;"
        + "prmt.b32 x, $4, "
        + upper
        + ", 0x7650; sub.f32 $0, x, "
        + origin
        + ";"
        + "prmt.b32 x, $4, "
        + upper
        + ", 0x7651; sub.f32 $1, x, "
        + origin
        + ";"
        + "prmt.b32 x, $4, "
        + upper
        + ", 0x7652; sub.f32 $2, x, "
        + origin
        + ";"
        + "prmt.b32 x, $4, "
        + upper
        + ", 0x7653; sub.f32 $3, x, "
        + origin
        + ";}",
        "=f,=f,=f,=f,r",
        [word],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def decode_first(codes, scale):
    """First moments from signed codes."""
    f = _fractions(codes, True)
    return f * f * f * scale


@triton.jit
def decode_second(codes, scale, underflows):
    """Second moments from codes; a nonzero code never gives zero."""
    f = _fractions(codes, False)
    square = f * f
    x = square * square * f * scale
    if underflows:
        least = tl.where(f != 0.0, 1, 0).to(tl.float32, bitcast=True)
        x = tl.where(x == 0.0, least, x)
    return x


@triton.jit
def encode(m, v, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Codes of a tile's first moments, second moments or both, and their largest magnitudes.

    A thread's eight codes are in two words (int32), in the order of its elements.
    """
    # two sums: of roots taken too high, on a number whose last bit is worth 2**-8, and of codes
    estimate = 32768.0, 0x47000000
    m_words, v_words, m_largest, v_largest, m_doubts, doubts = (), (), 0.0, 0.0, 0, 0
    if FIRST:
        m_words, m_largest, estimate = _round_first(m, estimate)
        m_doubts = _doubts(estimate)
        doubts = m_doubts
    if SECOND:
        v_words, v_largest, estimate = _round_second(v, estimate)
        doubts = _doubts(estimate) | _zeros(v_words)
    # true in a twelfth of the blocks
    if _anywhere(doubts):
        if FIRST:
            m_words = _settled_first(m, m_largest, m_words, m_doubts)
        if SECOND:
            v_words = _settled_second(v, v_largest, v_words, _doubts(estimate) - m_doubts)
    return m_words, v_words, m_largest, v_largest


@triton.jit
def _round_first(x, estimate):
    """Codes of a tile's first moments, their largest magnitude, and ``estimate`` with these codes and roots added."""
    largest = _largest(x, True)
    root = power_approx(tl.abs(x) * (rcp_approx(largest) * (FIRST_PEAK * (1.0 - 3 * LOWER))), 1 / 3)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    signed = (root.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    # half of the large number (65536) is added once more, so that below zero the low byte is two's complement
    words = _packed(signed + 98304.0)
    total, codes = estimate
    # adds nothing, until the reciprocal nears the subnormal numbers, which count as zero: then enough to be seen
    total = tl.fma(largest, _LARGE_SHARE, total)
    # a half, as these codes are in units of 1 / 128
    total = _with_roots(total, root, WIDER * 0.5)
    return words, largest, (total, _with_codes(codes, words, True))


@triton.jit
def _round_second(x, estimate):
    """Codes of a tile's second moments, their largest magnitude, and ``estimate`` with these codes and roots added."""
    largest = _largest(x, False)
    root = power_approx(tl.abs(x) * (rcp_approx(largest) * (SECOND_PEAK * (1.0 - 5 * LOWER))), 1 / 5)
    words = _packed(root + 32768.0)
    total, codes = estimate
    total = _with_roots(total, root, WIDER)
    return words, largest, (total, _with_codes(codes, words, False))


@triton.jit
def _doubts(estimate):
    """Zero (int32) in each thread whose codes so far are exact: no root was near an edge between two codes."""
    total, codes = estimate
    return total.to(tl.int32, bitcast=True) - codes


@triton.jit
def _zeros(words):
    """Zero (int32) in each thread that has no code of zero."""
    w0, w1 = words
    return (((w0 - 0x01010101) & ~w0) | ((w1 - 0x01010101) & ~w1)) & -0x7F7F7F80


@triton.jit
def _anywhere(doubts):
    """Whether ``doubts`` are not zero in some thread."""
    return tl.max(doubts.to(tl.uint32, bitcast=True), axis=0) != 0


@triton.jit
def _settled_first(x, largest, words, doubts):
    """The codes of first moments, exact."""
    if _anywhere(doubts):
        words = _exact_first(x, largest)
    return words


@triton.jit
def _settled_second(x, largest, words, doubts):
    """The codes of second moments, exact."""
    w0, w1 = words
    # computed again, so that no register holds the first ``_zeros`` of these words till here
    w0 = known_again(w0.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    if _anywhere(doubts | _zeros((w0, w1))):
        words = _exact_second(x, largest)
    return words


@triton.jit
def _exact_first(x, largest):
    """The codes of ``_round_first`` as the format defines them, whatever the block holds."""
    y = _scaled(x, known_again(largest), FIRST_PEAK)
    f = (power_approx(y * (1.0 - 3 * LOWER), 1 / 3) + 65536.0) - 65536.0
    h = f + 0.00390625
    # h³ has at most 24 bits, so this difference has the sign of the exact one
    f = tl.where(tl.fma(h * h, h, -y) <= 0.0, f + 0.0078125, f)
    return _packed(tl.where(x < 0.0, -f, f) + 98304.0)


@triton.jit
def _exact_second(x, largest):
    """The codes of ``_round_second`` as the format defines them; positive numbers get at least code 1."""
    y = _scaled(x, known_again(largest), SECOND_PEAK)
    m = tl.maximum(power_approx(y * (1.0 - 5 * LOWER), 1 / 5), 0.00390625) + 32768.0
    h = m - 32767.998046875
    square = h * h
    m = tl.where(y >= square * square * h, m + 0.00390625, m)
    return _packed(tl.where(x > 0.0, m, 32768.0))


@triton.jit
def codes_in_words(words):
    """A thread's eight codes in two words (int32), as one tensor of words in order (uint32)."""
    w0, w1 = words
    return tl.reshape(tl.join(w0, w1), [2 * w0.shape[0]]).to(tl.uint32, bitcast=True)


@triton.jit
def codes_one_by_one(words):
    """The same codes as single numbers (uint8)."""
    w0, w1 = words
    low = tl.join(tl.join(w0, w1), tl.join(w0 >> 16, w1 >> 16))
    codes = tl.join(low, low >> 8)
    return tl.reshape(codes, [8 * w0.shape[0]]).to(tl.uint8)


@triton.jit
def _eight(x):
    """The eight adjacent elements of each thread, one tensor for each of the eight places."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0] // 8, 2, 2, 2]))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _with_roots(total, root, wider: tl.constexpr):
    """``total`` plus a thread's roots, each made wider and rounded to 2**-8, the last bit of ``total``."""
    r0, r1, r2, r3, r4, r5, r6, r7 = _eight(root)
    total = tl.fma(r1, wider, tl.fma(r0, wider, total))
    total = tl.fma(r3, wider, tl.fma(r2, wider, total))
    total = tl.fma(r5, wider, tl.fma(r4, wider, total))
    return tl.fma(r7, wider, tl.fma(r6, wider, total))


@triton.jit
def _packed(x):
    """The low bytes of a thread's eight numbers in two words (int32)."""
    x0, x1, x2, x3, x4, x5, x6, x7 = _eight(x.to(tl.int32, bitcast=True))
    return _word(x0, x1, x2, x3), _word(x4, x5, x6, x7)


@triton.jit
def _word(x0, x1, x2, x3):
    """The low bytes of four words in one."""
    if INTERPRETED:
        word = (x0 & 0xFF) | ((x1 & 0xFF) << 8) | ((x2 & 0xFF) << 16) | (x3 << 24)
    else:
        word = tl.inline_asm_elementwise(
            "{.reg .b32 a, b; prmt.b32 a, $1, $2, 0x0040; prmt.b32 b, $3, $4, 0x0040; prmt.b32 $0, a, b, 0x5410;}",
            "=r,r,r,r,r",
            [x0, x1, x2, x3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return word


@triton.jit
def _with_codes(codes, words, SIGNED: tl.constexpr):
    """``codes`` plus the magnitudes of a thread's eight codes."""
    w0, w1 = words
    return _with_bytes(_with_bytes(codes, w0, SIGNED), w1, SIGNED)


@triton.jit
def _with_bytes(total, word, SIGNED: tl.constexpr):
    """``total`` plus the magnitudes of a word's four bytes, in one instruction."""
    if INTERPRETED:
        for i in tl.static_range(4):
            byte = word << (24 - 8 * i)
            if SIGNED:
                total += tl.abs(byte >> 24)
            else:
                total += (byte >> 24) & 0xFF
    elif SIGNED:
        total = _byte_sum("{.reg .b32 z; mov.b32 z, 0; vabsdiff4.u32.s32.s32.add $0, $1, z, $2;}", word, total)
    else:
        total = _byte_sum("dp4a.u32.u32 $0, $1, 0x01010101, $2;", word, total)
    return total


@triton.jit
def _byte_sum(instruction: tl.constexpr, word, total):
    return tl.inline_asm_elementwise(instruction, "=r,r,r", [word, total], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest_of_three(a, b, c):
    """Of integers, in one instruction."""
    return tl.inline_asm_elementwise(
        "{.reg .s32 x; max.s32 x, $1, $2; max.s32 $0, x, $3;}",
        "=r,r,r,r",
        [a, b, c],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _largest(x, SIGNED: tl.constexpr):
    """The block's largest magnitude, NaN if one is; without ``SIGNED`` no number is below zero."""
    # first within a thread, then over the warp, which has an instruction for integers: patterns of magnitudes are
    # ordered as the numbers are, and NaN is the largest
    if INTERPRETED:
        own = tl.reduce(tl.reshape(tl.abs(x), [x.shape[0] // 8, 8]), 1, _larger).to(tl.int32, bitcast=True)
    elif SIGNED:
        x0, x1, x2, x3, x4, x5, x6, x7 = _eight(tl.abs(x))
        a = _larger(x0, x1).to(tl.int32, bitcast=True)
        b = _larger(x2, x3).to(tl.int32, bitcast=True)
        c = _larger(x4, x5).to(tl.int32, bitcast=True)
        d = _larger(x6, x7).to(tl.int32, bitcast=True)
        own = tl.maximum(_largest_of_three(a, b, c), d)
    else:
        x0, x1, x2, x3, x4, x5, x6, x7 = _eight(x.to(tl.int32, bitcast=True))
        own = _largest_of_three(_largest_of_three(_largest_of_three(x0, x1, x2), x3, x4), x5, x6)
        own = tl.maximum(own, x7)
    return tl.max(own, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(x, largest, PEAK: tl.constexpr):
    """Magnitudes, with the largest of each block brought to PEAK, as the format defines it."""
    # small numbers, whose reciprocal may be infinite, are raised first
    up = tl.where(largest < _SMALL, _RAISE, 1.0)
    finite = largest <= FP32_MAX
    factor = tl.where(finite & (largest > 0.0), div_rn(1.0, largest * up) * PEAK, 0.0)
    return tl.where(finite, tl.abs(x), 0.0) * up * factor
