"""Low-bit formats: how far off they are, block by block and element by element, and what never happens."""

import itertools
import math
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optim_utils import low_bit
from optim_utils._low_bit.codes import code_of
from optim_utils.low_bit import (
    DYNAMIC8,
    DYNAMIC8_UNSIGNED,
    FP8_E4M3,
    FP8_E5M2,
    INT4,
    INT8,
    LOG4_UNSIGNED,
    MOMENT8,
    NF4,
    OCTAL8,
    OCTAL8_UNSIGNED,
    OCTAL_MOMENT8,
    QUINTIC8_UNSIGNED,
    UINT8_AFFINE,
    LowBitFormat,
    LowBitTensor,
    aligned_bounds,
    dequantize,
    from_plain,
    quantize,
    quantize_into,
    to_plain,
)

PRESETS = {name: getattr(low_bit, name) for name in low_bit.__all__ if isinstance(getattr(low_bit, name), LowBitFormat)}
every_preset = pytest.mark.parametrize("fmt", PRESETS.values(), ids=PRESETS)
every_layout = pytest.mark.parametrize("layout", ["flat", "rows"])


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    """Gaussian, log-normal over many decades, and squares of Gaussians."""
    torch.manual_seed(0)
    size = (1024, 1024)
    return {"N": torch.randn(size), "L": torch.exp(3 * torch.randn(size) - 12), "C": torch.randn(size) ** 2}


# format, bytes an element, input -> (relative L2 error, share of non-zeros turned zero, rms of ln(decoded / x))
TABLE: list[tuple[LowBitFormat, float, dict[str, tuple[float, float, float]]]] = [
    (INT8, 1.063, {"N": (6.0e-3, 1, math.inf), "L": (3.3e-3, 0.68, math.inf)}),
    (INT8.with_(block_size=256), 1.016, {"N": (7.1e-3, 1, math.inf), "L": (5.4e-3, 0.83, math.inf)}),
    (UINT8_AFFINE, 1.031, {"N": (6.5e-3, 1, math.inf), "L": (3.3e-3, 0, math.inf)}),
    (DYNAMIC8, 1.016, {"N": (1.1e-2, 1, math.inf), "L": (1.45e-3, 0.023, math.inf)}),
    (DYNAMIC8_UNSIGNED, 1.016, {"L": (7.2e-4, 0, 0.30)}),
    (MOMENT8, 1.016, {"L": (8.2e-4, 0, 0.05), "C": (7.1e-3, 0, 0.023)}),
    (OCTAL8, 1.016, {"N": (1.1e-2, 1, math.inf), "L": (1.45e-3, 0.023, math.inf)}),
    (OCTAL8_UNSIGNED, 1.016, {"L": (7.2e-4, 0, 0.30)}),
    (OCTAL_MOMENT8, 1.016, {"L": (8.2e-4, 0, 0.052), "C": (7.1e-3, 0, 0.023)}),
    (FP8_E4M3, 1.016, {"N": (2.65e-2, 1, math.inf), "L": (2.6e-3, 0.082, math.inf)}),
    (FP8_E5M2, 1.016, {"N": (5.3e-2, 1, math.inf), "L": (5.0e-3, 1e-4, math.inf)}),
    (INT4, 0.531, {"N": (0.12, 1, math.inf)}),
    (NF4, 0.531, {"N": (0.097, 1, math.inf)}),
    (LOG4_UNSIGNED, 0.531, {"L": (2.0e-2, 0, 0.45), "C": (0.26, 0, 0.34)}),
]


@pytest.mark.parametrize(
    ("fmt", "size", "limits"), TABLE, ids=[f"{f.code}-{f.bits}-{f.companding}-{f.block_size}" for f, _, _ in TABLE]
)
def test_errors_stay_within_the_table(
    inputs: dict[str, Tensor], fmt: LowBitFormat, size: float, limits: dict[str, tuple[float, float, float]]
) -> None:
    assert fmt.bytes_per_element == pytest.approx(size, abs=6e-4)
    for name, (relative_limit, lost_limit, log_limit) in limits.items():
        x = inputs[name]
        decoded = dequantize(quantize(x, fmt))
        assert ((decoded - x).norm() / x.norm()).item() <= relative_limit
        assert ((decoded == 0) & (x != 0)).double().mean().item() <= lost_limit
        if log_limit < math.inf:
            assert (decoded / x).log().square().mean().sqrt().item() <= log_limit


def test_four_bit_symmetric_codes_lose_small_numbers(inputs: dict[str, Tensor]) -> None:
    for fmt in (INT4, NF4):
        assert (dequantize(quantize(inputs["L"], fmt)) == 0).double().mean() > 0.9


magnitudes = st.one_of(
    st.just(0.0),
    st.floats(2.0**-149, 2.0**126, width=32),
    st.floats(-12, 0).map(lambda e: float(torch.tensor(10.0**e))),
)
blocks = st.lists(st.tuples(magnitudes, st.booleans()), min_size=1, max_size=40).map(
    lambda pairs: torch.tensor([-m if negative else m for m, negative in pairs], dtype=torch.float32)
)
BLOCK = 16


def per_block(x: Tensor) -> list[Tensor]:
    return [part.double() for part in x.split(BLOCK)]


def decoded_blocks(x: Tensor, fmt: LowBitFormat) -> list[Tensor]:
    return per_block(dequantize(quantize(x, fmt.with_(block_size=BLOCK))))


def slack(x: Tensor) -> Tensor:
    """What a few fp32 roundings of numbers up to the block's largest may add."""
    return x.abs().max() * 2e-7 + 2.0**-148


@given(x=blocks)
@settings(max_examples=60, deadline=None)
def test_integer_codes_err_by_half_a_step(x: Tensor) -> None:
    for part, decoded in zip(per_block(x), decoded_blocks(x, INT8)):
        assert ((decoded - part).abs() <= part.abs().max() / 254 + slack(part)).all()
    for part, decoded in zip(per_block(x), decoded_blocks(x, INT4)):
        assert ((decoded - part).abs() <= part.abs().max() / 14 + slack(part)).all()


@given(x=blocks)
@settings(max_examples=60, deadline=None)
def test_affine_codes_err_by_half_a_step(x: Tensor) -> None:
    for part, decoded in zip(per_block(x), decoded_blocks(x, UINT8_AFFINE)):
        assert ((decoded - part).abs() <= (part.max() - part.min()) / 510 + slack(part)).all()
        assert decoded.min() >= part.min() - slack(part)


@pytest.mark.parametrize(
    ("fmt", "relative", "normal"),
    [(FP8_E4M3, 2.0**-4, 2.0**-6 / 448), (FP8_E5M2, 2.0**-3, 2.0**-14 / 57344)],
    ids=["e4m3", "e5m2"],
)
@given(x=blocks)
@settings(max_examples=60, deadline=None)
def test_float8_codes_err_by_half_an_ulp(fmt: LowBitFormat, relative: float, normal: float, x: Tensor) -> None:
    for part, decoded in zip(per_block(x), decoded_blocks(x, fmt)):
        in_range = part.abs() >= part.abs().max() * normal * (1 + 1e-6)
        assert ((decoded - part).abs() <= part.abs() * relative + slack(part))[in_range].all()


@pytest.mark.parametrize(
    "fmt", [DYNAMIC8, DYNAMIC8_UNSIGNED, OCTAL8, OCTAL8_UNSIGNED, LOG4_UNSIGNED, NF4], ids=lambda f: f.code
)
@given(x=blocks)
@settings(max_examples=60, deadline=None)
def test_tabulated_codes_err_by_half_the_local_gap(fmt: LowBitFormat, x: Tensor) -> None:
    numbers = torch.tensor(code_of(fmt).ascending[0], dtype=torch.float64)
    for part, decoded in zip(per_block(x), decoded_blocks(x, fmt)):
        part = part.clamp(min=0) if fmt.unsigned else part
        y = part / part.abs().max() * code_of(fmt).peak if part.any() else part
        upper = torch.bucketize(y, numbers).clamp(1, len(numbers) - 1)
        gap = numbers[upper] - numbers[upper - 1]
        # below the first code of a one-sided map, the whole gap: what is positive goes up
        share = torch.where((upper == 1) & fmt.unsigned, 1.0, 0.5)
        bound = gap * share / code_of(fmt).peak * part.abs().max()
        # beyond the negative end of the signed dynamic map, half the gap on the inner side
        assert ((decoded - part).abs() <= bound + slack(part)).all()


@given(x=blocks)
@settings(max_examples=60, deadline=None)
def test_root_companding_errs_by_half_the_local_gap_of_the_roots(x: Tensor) -> None:
    for fmt in (MOMENT8, OCTAL_MOMENT8):
        code = code_of(fmt)
        numbers = torch.tensor(code.ascending[0], dtype=torch.float64)
        for part, decoded in zip(per_block(x), decoded_blocks(x, fmt)):
            root = part.clamp(min=0).sqrt()
            y = root / root.max() * code.peak if root.any() else root
            upper = torch.bucketize(y, numbers).clamp(1, len(numbers) - 1)
            gap = (numbers[upper] - numbers[upper - 1]) * torch.where(upper == 1, 1.0, 0.5)
            # 2**-75 is the root of what underflows to the smallest fp32
            assert ((decoded.sqrt() - root).abs() <= gap / code.peak * root.max() + slack(root) + 2.0**-74).all()


@pytest.mark.parametrize(
    "fmt", [f for f in PRESETS.values() if f.unsigned], ids=[n for n, f in PRESETS.items() if f.unsigned]
)
@given(x=blocks)
@settings(max_examples=60, deadline=None)
def test_one_sided_codes_keep_positive_numbers_positive_and_clamp_the_rest(fmt: LowBitFormat, x: Tensor) -> None:
    decoded = dequantize(quantize(x, fmt.with_(block_size=BLOCK)))
    assert ((decoded > 0) == (x > 0)).all()
    assert (decoded[x <= 0] == 0).all()
    if (x < 0).any():
        with pytest.raises(ValueError, match="negative"):
            quantize(x, fmt, validate=True)
    else:
        quantize(x, fmt, validate=True)


@pytest.mark.slow
@every_preset
@given(x=blocks)
@settings(max_examples=40, deadline=None)
def test_quantizing_what_was_dequantized_reproduces_the_codes(fmt: LowBitFormat, x: Tensor) -> None:
    # roots and steps of tiny numbers lose bits to underflow; the signed dynamic map has no -1
    x = torch.where(x.abs() < 1e-20, 0.0, x)
    if fmt == DYNAMIC8:
        x = torch.cat([x.abs().max()[None].expand(1), x[: BLOCK - 1]])
    if fmt.has_offset:
        x = x.abs()
    once = quantize(x, fmt.with_(block_size=BLOCK))
    again = quantize(dequantize(once), once.fmt)
    assert torch.equal(again.codes, once.codes)


@every_preset
def test_zero_blocks_are_exactly_zero_and_non_finite_blocks_entirely_nan(fmt: LowBitFormat) -> None:
    fmt = fmt.with_(block_size=4)
    x = torch.tensor([0.0] * 4 + [1, 2, math.nan, 0] + [1, math.inf, 0, 3] + [1.0, 2, 3, 4] + [0.0, 5, -math.inf])
    decoded = dequantize(quantize(x, fmt))
    assert (decoded[:4] == 0).all()
    assert decoded[4:12].isnan().all()
    assert decoded[12:16].isfinite().all()
    assert decoded[16:].isnan().all()
    zeros = torch.zeros_like(quantize(x, fmt))
    assert (dequantize(zeros) == 0).all()


@every_preset
def test_extreme_magnitudes(fmt: LowBitFormat) -> None:
    largest = torch.finfo(torch.float32).max
    for scale in (largest, 2.0**-126, 2.0**-140):
        x = torch.tensor([1.0, 0.5, 0.0, 1.0]) * scale
        decoded = dequantize(quantize(x, fmt))
        assert decoded.isfinite().all()
        assert decoded[0].item() == pytest.approx(scale, rel=2.5e-2)
        assert (decoded - x).abs().max() <= 0.3 * scale
    if fmt.has_offset:
        both_ends = dequantize(quantize(torch.tensor([largest, -largest]), fmt))
        assert both_ends.tolist() == pytest.approx([largest, -largest], rel=1e-6)


@every_preset
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_a_block_that_ends_at_the_largest_number_stays_finite(fmt: LowBitFormat, stochastic: bool) -> None:
    x = torch.randn(100, 16, generator=torch.Generator().manual_seed(0))
    x = x / x.abs().amax(dim=1, keepdim=True) * torch.finfo(torch.float32).max
    decoded = dequantize(quantize(x, fmt.with_(block_size=16), stochastic=stochastic))
    assert decoded.isfinite().all()


SHAPES = [(), (0,), (1,), (7,), (3, 0), (5, 33), (2, 3, 16), (4, 1)]


@every_preset
@every_layout
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape_round_trips(fmt: LowBitFormat, layout: str, shape: tuple[int, ...]) -> None:
    fmt = fmt.with_(block_size=8, layout=layout)
    x = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    q = quantize(x, fmt)
    assert q.shape == x.shape
    assert q.codes.dtype == torch.uint8
    assert q.scale.dtype == torch.float32
    rows, last = (math.prod(shape[:-1]), shape[-1] if shape else 1)
    if layout == "rows":
        assert tuple(q.scale.shape) == (*shape[:-1], -(-last // 8))
        assert q.codes.numel() == rows * (last if fmt.bits == 8 else -(-last // 2))
    else:
        assert tuple(q.scale.shape) == (-(-x.numel() // 8),)
        assert q.codes.numel() == -(-x.numel() * fmt.bits // 8)
    if fmt.bits == 8:
        assert q.codes.shape == x.shape
    decoded = dequantize(q)
    assert decoded.shape == x.shape
    assert decoded.is_contiguous()
    assert ((decoded - x).abs() <= 0.75).all()


class LargestTensor(TorchDispatchMode):
    """Knows how many elements the largest tensor has that an operation gives."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *map(Tensor.numel, tensors)])
        return made


@every_preset
@pytest.mark.parametrize("size", [3, 6])
def test_rows_shorter_than_a_block_are_not_filled_up_to_one(fmt: LowBitFormat, size: int) -> None:
    # as those of a convolution's weight
    x = torch.rand(500, size)
    with LargestTensor() as largest:
        q = quantize(x, fmt.with_(layout="rows"))
        decoded = q.dequantize()
    assert largest.numel <= 500 * (size + size % 2)
    if size % 2 == 0:
        alone = quantize(x, fmt.with_(block_size=size))
        assert torch.equal(q.codes.flatten(), alone.codes.flatten())
        assert torch.equal(decoded, alone.dequantize())


@every_layout
@pytest.mark.parametrize("columns", [16, 17, 31, 32, 33, 64])
def test_no_size_is_taken_for_a_constant(layout: str, columns: int) -> None:
    torch._dynamo.reset()
    fmt = INT8.with_(block_size=32, layout=layout)
    compiled = torch.compile(lambda x: dequantize(quantize(x, fmt)), fullgraph=True, backend="eager")
    x = torch.randn(5, columns)
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(x, dim)
    assert torch.equal(compiled(x), dequantize(quantize(x, fmt)))


@every_preset
@every_layout
def test_strides_do_not_matter_and_the_input_stays(fmt: LowBitFormat, layout: str) -> None:
    fmt = fmt.with_(block_size=8, layout=layout)
    x = torch.randn(6, 10, dtype=torch.float64).t()[:, ::2]
    before = x.clone()
    strided, dense = quantize(x, fmt), quantize(x.float().contiguous(), fmt)
    assert torch.equal(strided.codes, dense.codes)
    assert torch.equal(strided.scale, dense.scale)
    assert torch.equal(x, before)
    assert strided.dtype == torch.float32


@every_preset
@given(cut=st.integers(0, 6), size=st.integers(1, 50))
@settings(max_examples=10, deadline=None)
def test_an_aligned_part_of_the_quantized_is_the_quantized_part(fmt: LowBitFormat, cut: int, size: int) -> None:
    fmt = fmt.with_(block_size=8)
    x = torch.randn(size, generator=torch.Generator().manual_seed(size))
    cut = min(8 * cut, size)
    whole = quantize(x, fmt)
    for part, of_whole in ((x[:cut], whole[:cut]), (x[cut:], whole[cut:])):
        expected = quantize(part, fmt)
        assert torch.equal(of_whole.codes, expected.codes)
        assert torch.equal(of_whole.scale, expected.scale)


@every_preset
def test_rows_are_cut_anywhere_along_leading_dimensions(fmt: LowBitFormat) -> None:
    fmt = fmt.with_(block_size=8, layout="rows")
    x = torch.randn(5, 3, 19)
    whole = quantize(x, fmt)
    for part, of_whole in (
        (x[1:4], whole[1:4]),
        (x[:, 1:], whole[:, 1:]),
        (x[..., 8:], whole[..., 8:]),
        (x[..., 8:16], whole.narrow(2, 8, 8)),
    ):
        expected = quantize(part, fmt)
        assert of_whole.shape == part.shape
        assert torch.equal(of_whole.codes, expected.codes)
        assert torch.equal(of_whole.scale, expected.scale)
        assert of_whole.codes.untyped_storage().data_ptr() == whole.codes.untyped_storage().data_ptr()
    assert [tuple(part.shape) for part in whole.split(2)] == [(2, 3, 19), (2, 3, 19), (1, 3, 19)]
    assert [tuple(part.shape) for part in whole.split([8, 11], dim=-1)] == [(5, 3, 8), (5, 3, 11)]


@pytest.mark.parametrize("shape", [(0, 4), (0, 4, 2), (4, 0), (2, 0, 3)], ids=str)
def test_what_is_empty_is_cut_anywhere(shape: tuple[int, ...]) -> None:
    q = quantize(torch.zeros(shape), INT8.with_(block_size=64))
    for dim in range(len(shape)):
        assert [part.shape for part in q.split(1, dim)] == [part.shape for part in torch.zeros(shape).split(1, dim)]
    rows = quantize(torch.zeros(*shape, 24), INT8.with_(block_size=8, layout="rows"))
    assert rows[..., 8:16].scale.shape == (*shape, 1)


def test_unaligned_cuts_name_the_next_aligned_offset() -> None:
    flat = quantize(torch.randn(6, 20), INT8.with_(block_size=8))
    with pytest.raises(ValueError, match=r"element 20 .* next aligned offset is 24, the next aligned index 2"):
        flat[1:]
    with pytest.raises(ValueError, match="run across dimension 1"):
        flat[:, :8]
    assert flat[2:4].shape == (2, 20)
    rows = quantize(torch.randn(6, 20), INT8.with_(block_size=8, layout="rows"))
    with pytest.raises(ValueError, match=r"element 5 .* next aligned offset is 8"):
        rows[:, 5:]
    with pytest.raises(ValueError, match="next aligned index 20"):
        rows[:, :17]
    with pytest.raises(NotImplementedError, match="step"):
        rows[::2]


@given(numel=st.integers(0, 10_000), parts=st.integers(1, 20), block_size=st.integers(1, 300))
@settings(deadline=None)
def test_aligned_bounds_cover_everything_evenly(numel: int, parts: int, block_size: int) -> None:
    bounds = aligned_bounds(numel, parts, block_size)
    assert len(bounds) == parts
    assert bounds[0][0] == 0
    assert bounds[-1][1] == numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    assert all(start % block_size == 0 or start == numel for start, _ in bounds)
    sizes = [-(-(stop - start) // block_size) for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1


def test_bounds_of_numpys_integers_do_not_wrap_around() -> None:
    assert aligned_bounds(np.uint8(200), np.uint8(3), np.uint8(64)) == aligned_bounds(200, 3, 64)
    most = np.int32(2**31 - 1)
    assert aligned_bounds(most, np.int32(3), np.int32(64)) == aligned_bounds(2**31 - 1, 3, 64)


def test_dtypes_and_out() -> None:
    x = torch.randn(40)
    q = quantize(x.bfloat16(), INT8)
    assert q.dtype == torch.bfloat16
    assert dequantize(q).dtype == torch.bfloat16
    assert dequantize(q, torch.float32).dtype == torch.float32
    assert quantize(x, INT8, dtype=torch.float16).dtype == torch.float16
    out = torch.empty(40, dtype=torch.float64)
    assert dequantize(q, out=out) is out
    assert torch.equal(out.float(), dequantize(q, torch.float32))
    with pytest.raises(ValueError, match="out must be"):
        dequantize(q, out=torch.empty(3))
    with pytest.raises(TypeError, match="int64"):
        quantize(torch.ones(3, dtype=torch.int64), INT8)
    with pytest.raises(TypeError, match="quantized already"):
        quantize(q, INT8)
    with pytest.raises(ValueError, match="stochastic=True"):
        quantize(x, INT8, seed=1)


@every_preset
def test_quantize_into_fills_given_buffers(fmt: LowBitFormat) -> None:
    x = torch.randn(3, 100)
    expected = quantize(x, fmt)
    codes, scale = torch.full_like(expected.codes, 77), torch.full_like(expected.scale, 7.0)
    offset = None if expected.offset is None else torch.full_like(expected.offset, 7.0)
    quantize_into(codes, scale, x, fmt, offset=offset)
    assert torch.equal(codes, expected.codes)
    assert torch.equal(scale, expected.scale)
    if not fmt.has_offset:
        with pytest.raises(ValueError, match="scale of a tensor of shape"):
            quantize_into(codes, scale[:-1], x, fmt)


@every_preset
def test_stochastic_codes_average_to_the_number(fmt: LowBitFormat) -> None:
    x = torch.linspace(0.3, 1.0, 64)
    check_average(x, fmt, repeats=2000)
    assert (decoded_at_random(x, fmt, repeats=100).std(0) > 0).sum() > 32
    first, again = (quantize(x, fmt, stochastic=True, seed=5) for _ in range(2))
    assert torch.equal(first.codes, again.codes)
    generator = torch.Generator().manual_seed(3)
    first = quantize(x, fmt, stochastic=True, generator=generator)
    second = quantize(x, fmt, stochastic=True, generator=generator.manual_seed(3))
    assert torch.equal(first.codes, second.codes)


@pytest.mark.parametrize("fmt", [MOMENT8, OCTAL_MOMENT8], ids=["dynamic", "octal"])
def test_stochastic_codes_of_roots_average_to_the_number_not_to_its_root(fmt: LowBitFormat) -> None:
    # down to where neighbouring roots differ by their own size, and the square of their mean is not that of the squares
    check_average(torch.logspace(-11, 0, 64), fmt, repeats=20_000)


def check_average(x: Tensor, fmt: LowBitFormat, *, repeats: int) -> None:
    decoded = decoded_at_random(x, fmt, repeats=repeats)
    error = (decoded.mean(0) - x).abs()
    # a probability is a multiple of 2**-16, and one more rounding of fp32
    assert (error <= 5 * decoded.std(0) / math.sqrt(repeats) + 2e-5 * x).all()


def decoded_at_random(x: Tensor, fmt: LowBitFormat, *, repeats: int) -> Tensor:
    many = x.expand(repeats, len(x)).contiguous()
    return dequantize(quantize(many, fmt.with_(block_size=len(x)), stochastic=True, seed=5)).double()


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [INT8, UINT8_AFFINE, MOMENT8, OCTAL8, FP8_E4M3, NF4], ids=lambda f: f.code)
def test_functional_forms_compile_fullgraph(fmt: LowBitFormat) -> None:
    torch._dynamo.reset()  # the formats share their frames, and recompilations are limited
    x = torch.randn(9, 50)
    encode = torch.compile(lambda x: quantize(x, fmt), fullgraph=True, backend="eager")
    decode = torch.compile(lambda q: dequantize(q), fullgraph=True, backend="eager")
    expected = quantize(x, fmt)
    assert torch.equal(encode(x).codes, expected.codes)
    assert torch.equal(encode(x).scale, expected.scale)
    assert torch.equal(decode(expected), dequantize(expected))
    at_random = torch.compile(lambda x: quantize(x, fmt, stochastic=True, seed=3), fullgraph=True, backend="eager")
    assert torch.equal(at_random(x).codes, quantize(x, fmt, stochastic=True, seed=3).codes)


@pytest.mark.parametrize("fmt", [MOMENT8, QUINTIC8_UNSIGNED], ids=lambda fmt: fmt.code)
def test_averages_that_stall_in_bf16_do_not_at_eight_bits(fmt: LowBitFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    beta, exact = 0.99, torch.full((4096,), 0.25)
    v = quantize(exact, fmt)
    for _ in range(600):
        g2 = torch.randn(4096, generator=generator).square_()
        exact = beta * exact + (1 - beta) * g2
        v = quantize(beta * dequantize(v) + (1 - beta) * g2, fmt)
    assert (dequantize(v) > 0).all()
    assert dequantize(v).mean().item() == pytest.approx(exact.mean().item(), rel=0.05)


def test_formats_are_checked() -> None:
    assert LowBitFormat.from_ints(MOMENT8.to_ints()) == MOMENT8
    assert {type(value) for value in NF4.to_ints().values()} == {int}
    scaled = {
        "INT8": 1 + 4 / 64,
        "UINT8_AFFINE": 1 + 8 / 256,
        **dict.fromkeys(("INT4", "NF4", "LOG4_UNSIGNED"), 17 / 32),
    }
    assert {name: fmt.bytes_per_element for name, fmt in PRESETS.items()} == {
        **dict.fromkeys(PRESETS, 65 / 64),
        **scaled,
    }
    assert {name for name, fmt in PRESETS.items() if fmt.companding == "sqrt"} == {"MOMENT8", "OCTAL_MOMENT8"}
    with pytest.raises(ValueError, match="no 4-bit code 'dynamic'"):
        DYNAMIC8.with_(bits=4)
    # equal to 8, but a checkpoint would hold what a load refuses
    for bits in (8.0, np.int64(8), [8], None):
        with pytest.raises(ValueError, match="bits must be an int, 4 or 8, got "):
            INT8.with_(bits=bits)
    with pytest.raises(ValueError, match="even"):
        INT4.with_(block_size=3)
    with pytest.raises(ValueError, match="block_size"):
        INT8.with_(block_size=0)
    with pytest.raises(ValueError, match="layout"):
        INT8.with_(layout="columns")
    with pytest.raises(ValueError, match="non-negative"):
        INT8.with_(companding="sqrt")
    with pytest.raises(ValueError, match=r"companding must be one of \('none', 'sqrt'\), got 'root'"):
        MOMENT8.with_(companding="root")
    with pytest.raises(ValueError, match="scale_dtype"):
        INT8.with_(scale_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="not the ints"):
        LowBitFormat.from_ints({"code": "int"})
    with pytest.raises(ValueError, match="offset"):
        LowBitTensor(torch.zeros(3, dtype=torch.uint8), torch.zeros(1), None, UINT8_AFFINE, (3,))


@pytest.mark.parametrize("fmt", [torch.int8, "INT8", None], ids=str)
def test_what_is_no_format_is_refused(fmt: object) -> None:
    with pytest.raises(TypeError, match="fmt has to be a LowBitFormat, such as INT8, got "):
        quantize(torch.randn(4), fmt)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_a_low_bit_tensor_passes_for_no_other_dtype_than_its_plain_form_knows(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"one of .* got {dtype}"):
        quantize(torch.randn(4), INT8, dtype=dtype)
    for no_dtype in (0, torch.zeros(2)):
        with pytest.raises(TypeError, match="the dtype of a LowBitTensor has to be one of"):
            quantize(torch.randn(4), INT8, dtype=no_dtype)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=f"one of .* got {dtype}"):
        LowBitTensor(torch.zeros(3, dtype=torch.uint8), torch.zeros(1), None, INT8, (3,), dtype)


def test_float8_tensors_need_another_dtype() -> None:
    x = torch.randn(4).to(torch.float8_e5m2)
    with pytest.raises(TypeError, match=r"got torch\.float8_e5m2; give another dtype="):
        quantize(x, INT8)
    assert quantize(x, INT8, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [INT8, UINT8_AFFINE, INT4], ids=lambda fmt: fmt.code)
def test_inductor_decodes_the_last_block_of_a_run(fmt: LowBitFormat) -> None:
    """On a CPU it cuts loops into blocks, and left what no block divides unwritten (torch 2.13)."""
    length = 2 * fmt.block_size + fmt.block_size // 2 + 8
    q = quantize(torch.rand(length), fmt)
    torch._dynamo.reset()
    # what inductor has kept knows of changes to the code that tensor subclasses run only if torch asks them for a hash
    with torch._functorch.config.patch(enable_autograd_cache=False):
        doubled = torch.compile(lambda q: 2 * dequantize(q), fullgraph=True, dynamic=False)(q)
    assert torch.equal(doubled, 2 * dequantize(q))


@pytest.mark.slow
def test_formats_are_compiled_one_after_another() -> None:
    # ints that differ between calls would become symbols, of which no format can be made
    torch._dynamo.reset()
    x = torch.randn(300)
    for fmt in (INT8, MOMENT8, NF4, INT8.with_(block_size=128), NF4):
        coded = torch.compile(lambda x, fmt: quantize(x, fmt), fullgraph=True, backend="eager")(x, fmt)
        assert coded.fmt == fmt
        assert torch.equal(coded.codes, quantize(x, fmt).codes)
        again = torch.compile(lambda x, fmt: quantize(x, fmt), fullgraph=True, backend="eager")(x, coded.fmt)
        assert torch.equal(again.codes, coded.codes)

    def negated(q: LowBitTensor) -> Tensor:
        quantize_into(q.codes, q.scale, -x, q.fmt)
        return from_plain(to_plain(q)).codes

    for q in (quantize(x, INT8), quantize(x, NF4)):
        assert torch.equal(torch.compile(negated, fullgraph=True, backend="eager")(q), quantize(-x, q.fmt).codes)


def test_a_format_made_in_compiled_code() -> None:
    def in_blocks_of_22(x: Tensor) -> Tensor:
        return quantize(x, MOMENT8.with_(block_size=22)).codes

    torch._dynamo.reset()
    x = torch.rand(100)
    compiled = torch.compile(in_blocks_of_22, fullgraph=True, backend="eager")
    found = compiled(x)
    assert torch.equal(found, in_blocks_of_22(x))
    # the format is known by now
    assert torch.equal(found, compiled(x))


@pytest.mark.slow
def test_a_format_that_another_process_pickled_is_compiled() -> None:
    script = (
        "import pickle, sys, torch; from optim_utils.low_bit import quantize\n"
        "fmt = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "encode = torch.compile(lambda x, fmt: quantize(x, fmt).codes, fullgraph=True, backend='eager')\n"
        "for fmt in (fmt, fmt.with_(block_size=24)):\n"
        "    assert torch.equal(encode(torch.ones(99), fmt), quantize(torch.ones(99), fmt).codes)\n"
    )
    pickled = pickle.dumps(INT8.with_(block_size=26))
    subprocess.run([sys.executable, "-c", script, pickled.hex()], check=True)


def test_what_is_no_tensor_of_the_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="quantize takes a floating tensor, got a list"):
        quantize([1.0], INT8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"dense tensor, got torch\.sparse_coo of shape \(3, 3\); give x\.to_dense\(\)"):
        quantize(torch.eye(3).to_sparse(), INT8)
    for function in (dequantize, to_plain):
        with pytest.raises(TypeError, match=r"takes a LowBitTensor, got a torch\.float32 tensor of shape \(3,\)"):
            function(torch.ones(3))  # type: ignore[operator]
    with pytest.raises(TypeError, match="from_plain takes the dict that to_plain makes, got a Tensor"):
        from_plain(torch.ones(3))  # type: ignore[arg-type]
    q = quantize(torch.ones(3), INT8)
    with pytest.raises(TypeError, match="fmt has to be a LowBitFormat, such as INT8, got a dtype"):
        from_plain(to_plain(q), torch.int8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fmt has to be a LowBitFormat, such as INT8, got a str"):
        LowBitTensor(*q.parts, "INT8", (3,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="out must be a plain tensor, as the codes of t are, got a list"):
        dequantize(q, out=[0.0] * 3)  # type: ignore[arg-type]
    # to torch a text in place of a dtype is the name of a device
    for wrong in ("meta", "bf16", 3):
        with pytest.raises(TypeError, match=rf"dtype has to be a torch\.dtype, got {wrong!r}"):
            dequantize(q, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got 'float32'; give another dtype="):
        quantize(torch.ones(3), INT8, dtype="float32")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="block_size of aligned_bounds must be an integer, got a float"):
        aligned_bounds(8, 2, 1.5)  # type: ignore[arg-type]


def test_quantize_into_writes_nothing_but_the_codes_of_a_dense_real_tensor() -> None:
    codes, scale, x = torch.full((3,), 7, dtype=torch.uint8), torch.full((1,), 7.0), torch.ones(3)
    with pytest.raises(TypeError, match=r"scale must be a torch\.float32 tensor of shape \(1,\), got a NoneType"):
        quantize_into(codes, None, x, INT8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"codes must be a torch\.uint8 tensor of shape \(3,\), got a list"):
        quantize_into([7, 7, 7], scale, x, INT8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="quantize_into takes a tensor x, got a list"):
        quantize_into(codes, scale, [1.0] * 3, INT8)  # type: ignore[arg-type]
    for wrong in (torch.ones(3, dtype=torch.complex64), x.to_sparse()):
        with pytest.raises(TypeError, match=r"dense real tensor, got torch\.(complex64|float32) in layout .* \(3,\)"):
            quantize_into(codes, scale, wrong, INT8)
    with pytest.raises(ValueError, match=r"^int codes have no offset, got one$"):
        quantize_into(codes, scale, x, INT8, offset=torch.zeros(1))
    assert codes.tolist() == [7, 7, 7]
    assert scale.item() == 7


def test_roots_are_the_nearest_on_every_machine() -> None:
    x = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0))
    exact = x.double().sqrt()
    largest = exact.view(-1, 256).amax(1)
    assert torch.equal(quantize(x, MOMENT8).scale, largest.float())


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@every_preset
def test_torchs_default_dtype_changes_no_code(fmt: LowBitFormat, default: torch.dtype) -> None:
    numbers = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    for x in (numbers, numbers * 2.0**-100):
        expected = quantize(x, fmt)
        decoded = dequantize(expected)
        torch.set_default_dtype(default)
        try:
            found = quantize(x, fmt)
            again = dequantize(found)
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(a is b or torch.equal(a, b) for a, b in zip(found.parts, expected.parts))
        assert again.dtype == torch.float32
        assert torch.equal(again, decoded)
