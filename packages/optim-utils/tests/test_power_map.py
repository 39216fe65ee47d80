"""The power maps: exact thresholds, errors below those of the dynamic map, and moments that stay what they are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optim_utils._low_bit.codes import code_of
from optim_utils._low_bit.power_map import cube, encode_power, fifth_power
from optim_utils.low_bit import CUBIC8, QUINTIC8_UNSIGNED, LowBitFormat, dequantize, quantize

EXPONENT = {CUBIC8: 3, QUINTIC8_UNSIGNED: 5}
LARGEST = {CUBIC8: 127, QUINTIC8_UNSIGNED: 255}
both = pytest.mark.parametrize("fmt", EXPONENT, ids=lambda f: f.code)


@both
def test_the_codes_of_all_thresholds_and_their_neighbours(fmt: LowBitFormat) -> None:
    power, digits = (cube, 7) if fmt == CUBIC8 else (fifth_power, 8)
    m = torch.arange(1, LARGEST[fmt] + 1)
    at = power((m - 0.5) * 2.0**-digits)
    below, above = (torch.nextafter(at, torch.tensor(side)) for side in (0.0, 1.0))
    assert torch.equal(encode_power(at, power, digits), m.int())
    assert torch.equal(encode_power(above, power, digits), m.int())
    assert torch.equal(encode_power(below, power, digits), m.int() - 1)


@both
def test_numbers_are_the_powers(fmt: LowBitFormat) -> None:
    numbers, codes = code_of(fmt).ascending
    ranks = torch.arange(-LARGEST[fmt] if fmt == CUBIC8 else 0, LARGEST[fmt] + 1).double()
    expected = (ranks / (LARGEST[fmt] + 1)) ** EXPONENT[fmt]
    torch.testing.assert_close(torch.tensor(numbers).double(), expected, rtol=2e-7, atol=0)
    assert codes == [int(rank) % 256 for rank in ranks]


@both
def test_errors_are_below_those_of_the_dynamic_map(fmt: LowBitFormat) -> None:
    """The figures that DYNAMIC8 (first moments) and MOMENT8 (second) have to keep, and smaller ones."""
    torch.manual_seed(0)
    normal = torch.randn(1024, 1024)
    spread = torch.exp(3 * torch.randn(1024, 1024) - 12)
    squares = torch.randn(1024, 1024) ** 2
    if fmt == CUBIC8:
        assert relative_error(normal, fmt) <= 9.0e-3
        assert relative_error(spread, fmt) <= 1.1e-3
        assert ((dequantize(quantize(spread, fmt)) == 0) & (spread != 0)).double().mean() <= 0.015
        return
    assert relative_error(spread, fmt) <= 6.7e-4
    assert relative_error(squares, fmt) <= 6.6e-3
    for x, limit in ((spread, 0.048), (squares, 0.018)):
        decoded = dequantize(quantize(x, fmt))
        assert (decoded / x).log().square().mean().sqrt() <= limit


def relative_error(x: Tensor, fmt: LowBitFormat) -> float:
    return float((dequantize(quantize(x, fmt)) - x).norm() / x.norm())


magnitudes = st.one_of(st.just(0.0), st.floats(2.0**-100, 2.0**100, width=32), st.floats(2.0**-20, 1.0, width=32))


@both
@given(x=st.lists(st.tuples(magnitudes, st.booleans()), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_roots_err_by_half_a_step(fmt: LowBitFormat, x: list[tuple[float, bool]]) -> None:
    signed = torch.tensor([-m if negative and fmt == CUBIC8 else m for m, negative in x])
    q = quantize(signed, fmt.with_(block_size=16))
    for part, decoded in zip(signed.double().split(16), dequantize(q).double().split(16)):
        largest = part.abs().max()
        root, found = ((each / largest).abs() ** (1 / EXPONENT[fmt]) for each in (part, decoded))
        # what is positive keeps at least the first number
        share = torch.where((found * LARGEST[fmt]).round() == 1, 1.0, 0.5) if fmt == QUINTIC8_UNSIGNED else 0.5
        if largest > 0:
            assert ((root - found).abs() <= (share + 1e-4) / LARGEST[fmt]).all()
            assert (decoded.sign() * part.sign() >= 0).all()


@both
def test_compiled_whole(fmt: LowBitFormat) -> None:
    torch._dynamo.reset()
    x = torch.randn(9, 50)
    encode = torch.compile(lambda x: quantize(x, fmt), fullgraph=True, backend="eager")
    expected = quantize(x, fmt)
    assert torch.equal(encode(x).codes, expected.codes)
    assert math.isfinite(float(dequantize(expected).sum()))
