"""Moments in 8 bits: CUBIC8 for the first, QUINTIC8_UNSIGNED for the second, as ``optim_utils.low_bit`` defines them.

A tile is one block of 256 elements. With ``a`` its largest magnitude and ``f = m / 2**D`` for code m:

    decode:  f³ · scale  (signs, D = 7);  f⁵ · scale  (D = 8)
    encode:  scale = a / peak, y = |x| · peak / a, m = y^(1/3) or y^(1/5) in units of 2**-D, rounded

The root is estimated by the GPU's approximate logarithm and power, a little too low, and rounded by adding a number so
large that its last bit is worth ``2**-D``: the low byte of the sum is m. What is a little too high is rounded as well.
Where the two differ, as they do in a twentieth of the blocks, y is compared with the edge between the two codes, as the
format says it.
"""

from __future__ import annotations

from optim_kernels._approximations import known_again, power_approx, reciprocal
from optim_kernels._triton import div_rn, tl, triton

BLOCK = tl.constexpr(256)  # elements that share a scale
_LOG2_BLOCK = tl.constexpr(8)
MOST_BLOCKS = tl.constexpr(32)  # of a chunk
_FIRST_PEAK = tl.constexpr(127.0**3 / 2.0**21)
_SECOND_PEAK = tl.constexpr(0.9806207418441772)  # (255 / 256)**5, multiplied in fp32

_FP32_MAX = tl.constexpr(3.4028234663852886e38)
_SMALL, _LARGE = tl.constexpr(2.0**-80), tl.constexpr(2.0**120)
_RAISE = tl.constexpr(2.0**100)
_LEAST_SCALE = tl.constexpr(2.0**-100)
# An H200's estimate of a root is off by -5.3e-7 to 7.4e-7, from the first edge between two codes on. This much lower it
# is never too high, and this much wider then never too low.
LOG2_MARGIN = tl.constexpr(-1.2e-6)
WIDER = tl.constexpr(1.0 + 2.0**-19)


@triton.jit
def _fractions(codes, SIGNED: tl.constexpr):
    """``m / 2**D`` of codes, one by one (uint8) or four in a word (uint32)."""
    if codes.dtype == tl.uint32:
        # each byte becomes the last bits of a large number, which is then subtracted; with the sign bit flipped, two's
        # complement ascends: 65536 + (code + 128) / 128, and without signs 32768 + code / 256
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
    """The four bytes of each word below the upper bits of a number, less ``origin``, both written in hexadecimal."""
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
def read_scales(address, first, end):
    """The scales of the blocks from element ``first`` up to ``end``, at most 32 of them: a thread of a warp has one."""
    blocks = tl.arange(0, MOST_BLOCKS)
    pointer = address.to(tl.pointer_type(tl.float32)) + (first >> _LOG2_BLOCK)
    return tl.load(pointer + blocks, mask=blocks < (end - first + BLOCK - 1) >> _LOG2_BLOCK, other=0.0)


@triton.jit
def write_scales(address, first, end, scales):
    """Store what ``read_scales`` read."""
    blocks = tl.arange(0, MOST_BLOCKS)
    pointer = address.to(tl.pointer_type(tl.float32)) + (first >> _LOG2_BLOCK)
    tl.store(pointer + blocks, scales, mask=blocks < (end - first + BLOCK - 1) >> _LOG2_BLOCK)


@triton.jit
def scale_of(scales, block):
    """The scale of one block, as a number."""
    own = tl.where(tl.arange(0, MOST_BLOCKS) == block, scales.to(tl.int32, bitcast=True), 0)
    return tl.sum(own, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def with_scale(scales, block, scale):
    """``scales`` with that of one block replaced."""
    return tl.where(tl.arange(0, MOST_BLOCKS) == block, scale, scales)


@triton.jit
def decode_first(codes, scale):
    """First moments from signed codes."""
    f = _fractions(codes, True)
    return f * f * f * scale


@triton.jit
def decode_second(codes, scale):
    """Second moments from codes; a nonzero code never gives zero."""
    f = _fractions(codes, False)
    square = f * f
    x = square * square * f * scale
    # below this scale the product may underflow
    if (scale < _LEAST_SCALE) & (scale > 0.0):
        least = tl.where(f != 0.0, 1, 0).to(tl.float32, bitcast=True)
        x = tl.where(x == 0.0, least, x)
    return x


@triton.jit
def encode_first(x):
    """Codes (uint8) of the first moments of a block, and its scale."""
    largest = _largest(x)
    y, scale = _scaled(x, largest, _FIRST_PEAK)
    root = power_approx(y, 1 / 3, LOG2_MARGIN).to(tl.int32, bitcast=True)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    root = (root | sign).to(tl.float32, bitcast=True)
    # half of the large number is added once more, so that below zero the low byte is two's complement
    m = root + 98304.0
    if _differ(m, tl.fma(root, WIDER, 98304.0)):
        y, _ = _scaled(x, known_again(largest), _FIRST_PEAK)
        f = tl.abs(m - 98304.0)
        h = f + 0.00390625
        # h³ has at most 24 bits, so this difference has the sign of the exact one
        f = tl.where(tl.fma(h * h, h, -y) <= 0.0, f + 0.0078125, f)
        m = tl.where(x < 0.0, -f, f) + 98304.0
    return m.to(tl.int32, bitcast=True).to(tl.uint8), scale


@triton.jit
def encode_second(x):
    """Codes (uint8) of the second moments of a block, and its scale; what is positive gets at least code 1."""
    largest = _largest(x)
    y, scale = _scaled(x, largest, _SECOND_PEAK)
    root = power_approx(y, 1 / 5, LOG2_MARGIN)
    m = tl.maximum(root, 0.00390625) + 32768.0
    if _differ(m, tl.fma(root, WIDER, 32768.0)):
        y, _ = _scaled(x, known_again(largest), _SECOND_PEAK)
        h = m - 32767.998046875
        square = h * h
        m = tl.where(y >= square * square * h, m + 0.00390625, m)
        m = tl.where(x > 0.0, m, 32768.0)
    return m.to(tl.int32, bitcast=True).to(tl.uint8), scale


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _differ(a, b):
    """Whether two positive tiles differ anywhere."""
    differences = a.to(tl.int32, bitcast=True) ^ b.to(tl.int32, bitcast=True)
    own = tl.reduce(tl.reshape(differences, [a.shape[0] // 8, 8]), 1, _or)
    return tl.max(own, axis=0) != 0


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(x):
    """The largest magnitude of a block, NaN if one is."""
    x = tl.abs(x)
    # first within a thread, then over the warp, which has an instruction for integers: patterns of magnitudes are
    # ordered as the numbers are, and NaN is the largest
    own = tl.reduce(tl.reshape(x, [x.shape[0] // 8, 8]), 1, _larger)
    return tl.max(own.to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(x, largest, PEAK: tl.constexpr):
    """``(y, scale)``: the block's magnitudes with the largest brought to PEAK, and what takes that back."""
    x = tl.abs(x)
    if (largest >= _SMALL) & (largest <= _LARGE):
        y = x * (reciprocal(largest) * PEAK)
        scale = largest * (1 / PEAK)
    else:
        finite = largest <= _FP32_MAX
        up = tl.where(largest < _SMALL, _RAISE, 1.0)
        factor = tl.where(finite & (largest > 0.0), div_rn(1.0, largest * up) * PEAK, 0.0)
        y = tl.where(finite, x, 0.0) * up * factor
        scale = tl.where(finite, tl.minimum(largest * (1 / PEAK), _FP32_MAX), float("nan"))
    return y, scale
