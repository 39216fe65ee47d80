"""The closed forms of the 8-bit maps against the maps themselves: exact fractions and a brute-force nearest search."""

import itertools
from bisect import bisect_left
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from optim_utils._low_bit.codes import Code, code_of
from optim_utils.low_bit import DYNAMIC8, DYNAMIC8_UNSIGNED, OCTAL8, OCTAL8_UNSIGNED, LowBitFormat

FORMATS = {
    "dynamic": DYNAMIC8,
    "dynamic_unsigned": DYNAMIC8_UNSIGNED,
    "octal": OCTAL8,
    "octal_unsigned": OCTAL8_UNSIGNED,
}


def dynamic_map(first: int) -> list[Fraction]:
    """Midpoints of ``first * 2**i`` equal intervals of each decade, and 0 and 1, ascending."""
    numbers = [Fraction(0), Fraction(1)]
    for i in range(7):
        top, n = Fraction(10) ** (i - 6), first * 2**i
        width = (top - top / 10) / n
        numbers += [top / 10 + width * (k + Fraction(1, 2)) for k in range(n)]
    return sorted(numbers)


def octal_map(digits: int, count: int) -> list[Fraction]:
    """The points that cut each [8**(i - D), 8**(i - D + 1)] into 2**i equal intervals, and 0, ascending."""
    numbers = [Fraction(0)]
    for i in range(digits):
        bottom = Fraction(8) ** (i - digits)
        numbers += [bottom + 7 * bottom * k / 2**i for k in range(2**i)]
    return numbers[:count]


MAGNITUDES = {
    "dynamic": dynamic_map(1),
    "dynamic_unsigned": dynamic_map(2),
    "octal": octal_map(7, 128),
    "octal_unsigned": octal_map(8, 256),
}


def exact_map(name: str) -> list[Fraction]:
    """All numbers by code: two's complement for signed ones, where the dynamic byte 0x80 is +1."""
    magnitudes = MAGNITUDES[name]
    if name.endswith("unsigned"):
        return magnitudes
    return [
        *magnitudes[:128],
        Fraction(1) if name == "dynamic" else -magnitudes[127],
        *(-m for m in magnitudes[127:0:-1]),
    ]


def used_codes(name: str) -> list[int]:
    return [code for code in range(256) if name != "octal" or code != 128]


@pytest.fixture(params=list(FORMATS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def code(name: str) -> Code:
    return code_of(FORMATS[name])


def test_maps_have_the_stated_shape(name: str) -> None:
    numbers = [exact_map(name)[c] for c in used_codes(name)]
    assert len(set(numbers)) == len(numbers)
    assert exact_map(name)[0] == 0
    assert float(max(numbers)) == code(name).peak


def test_decode_gives_the_map(name: str) -> None:
    codes = used_codes(name)
    decoded = code(name).decode(torch.tensor(codes, dtype=torch.int32)).tolist()
    for c, number in zip(codes, decoded):
        exact = exact_map(name)[c]
        # two roundings: of the factor and of the product; octal numbers are exact
        assert abs(Fraction(number) - exact) <= (abs(exact) * Fraction(2, 2**24) if "dynamic" in name else 0)


def test_the_table_of_a_code_is_its_closed_form(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    assert torch.equal(code(name).look_up(codes), code(name).decode(codes.int()))


def interesting(name: str) -> Tensor:
    """Every number, every middle of two, every end of a decade or octade, with 3 fp32 neighbours each side."""
    numbers = sorted(exact_map(name)[c] for c in used_codes(name))
    points = [*numbers, *((a + b) / 2 for a, b in itertools.pairwise(numbers))]
    points += [Fraction(10) ** -i for i in range(10)] + [Fraction(8) ** -i for i in range(10)]
    near = torch.tensor([float(p) for p in points], dtype=torch.float32)
    near = torch.cat([near, -near]) if "unsigned" not in name else near
    patterns = near.view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)
    y = patterns.flatten().view(torch.float32)
    return y[(y.abs() <= code(name).peak) & ((y >= 0) | ("unsigned" not in name))]


def spread(name: str) -> Tensor:
    """Numbers of all magnitudes: every 1001st fp32 pattern up to the peak."""
    top = torch.tensor(code(name).peak).view(torch.int32).item()
    y = torch.arange(0, int(top) + 1, 1001, dtype=torch.int32).view(torch.float32)
    return y if "unsigned" in name else torch.cat([-y.flip(0), y])


def test_encode_finds_the_nearest(name: str) -> None:
    y = interesting(name)
    codes = code(name).encode(y)
    exact = exact_map(name)
    order = sorted(exact[c] for c in used_codes(name))
    for number, c in zip(y.tolist(), codes.tolist()):
        position = bisect_left(order, Fraction(number))
        nearest = min(abs(Fraction(number) - order[i]) for i in (position - 1, position) if 0 <= i < len(order))
        # ties and fp32 rounding of the boundary: at most 3 ulp of y farther than the nearest
        assert abs(Fraction(number) - exact[c]) <= nearest + Fraction(abs(number)) * Fraction(3, 2**23)


def test_encode_is_monotonic_over_all_magnitudes_and_inverts_decode(name: str) -> None:
    numbers = code(name).decode(code(name).encode(spread(name)))
    assert (numbers.diff() >= 0).all()
    codes = torch.tensor(used_codes(name), dtype=torch.int32)
    assert torch.equal(code(name).encode(code(name).decode(codes)), codes)


def test_codes_beyond_the_ends() -> None:
    tiny = torch.tensor([0.0, 2.0**-149, 1e-30, 1e-8])
    for fmt in FORMATS.values():
        assert code_of(fmt).encode(tiny).tolist() == [0, 0, 0, 0]
    # The signed dynamic map has no -1.
    assert code_of(DYNAMIC8).encode(torch.tensor([1.0, -1.0])).tolist() == [0x80, 0x81]
    assert code_of(DYNAMIC8).decode(torch.tensor([0x80, 0x81])).tolist() == pytest.approx([1.0, -0.99296875])
    assert code_of(OCTAL8).encode(torch.tensor([1.0, -1.0]) * code_of(OCTAL8).peak).tolist() == [0x7F, 0x81]


@pytest.mark.parametrize("fmt", [LowBitFormat("int"), LowBitFormat("e4m3"), *FORMATS.values()], ids=lambda f: f.code)
def test_random_neighbours_bracket_and_average(fmt: LowBitFormat) -> None:
    code = code_of(fmt)
    numbers, codes = code.ascending
    assert code.decode(torch.tensor(codes, dtype=torch.int32)).tolist() == numbers
    y = torch.rand(64, generator=torch.Generator().manual_seed(0)) * code.peak
    uniform = (torch.arange(1 << 12) + 0.5) / (1 << 12)
    decoded = code.decode(code.encode_at_random(y.expand(1 << 12, 64), uniform[:, None].expand(1 << 12, 64)))
    upper = torch.bucketize(y, torch.tensor(numbers))
    below, above = torch.tensor(numbers)[upper - 1], torch.tensor(numbers)[upper]
    assert ((decoded == below) | (decoded == above)).all()
    assert ((decoded.double().mean(0) - y).abs() <= (above - below) / (1 << 12) + 1e-7).all()
    # what is a number of the map stays it, and what a rounding put beyond its ends becomes them
    given = torch.tensor([numbers[0] * (1 + 2.0**-22), *numbers, numbers[-1] * (1 + 2.0**-22)])
    for chance in (0.0, 1 - 2.0**-24):
        stayed = code.encode_at_random(given, torch.full_like(given, chance))
        assert code.decode(stayed).tolist() == [numbers[0], *numbers, numbers[-1]]
