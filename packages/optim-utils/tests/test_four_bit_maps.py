"""The maps of four bits against their tables, and codes against a search for the nearest number."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optim_utils._low_bit.four_bit_maps import decode_log, decode_nf4, encode_log, encode_nf4

# Dettmers et al., QLoRA, appendix E, from the code of zero on
NF4_NUMBERS = [
    *(0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0, -1.0, -0.6961928009986877),
    *(-0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495),
]
LOG_NUMBERS = [0.0, *(10 ** (-6 * (15 - code) / 14) for code in range(1, 16))]

CODES = torch.arange(16, dtype=torch.int32)


def test_nf4_numbers_are_exactly_those_of_the_paper() -> None:
    assert torch.equal(decode_nf4(CODES), torch.tensor(NF4_NUMBERS))


def test_log_numbers_are_fifteen_steps_over_six_decades_and_zero() -> None:
    torch.testing.assert_close(decode_log(CODES).double(), torch.tensor(LOG_NUMBERS).double(), rtol=3e-7, atol=0)
    assert decode_log(CODES)[0] == 0
    assert decode_log(CODES)[15] == 1


@pytest.mark.parametrize(
    ("encode", "decode", "lowest"), [(encode_nf4, decode_nf4, -1.0), (encode_log, decode_log, 0.0)], ids=["nf4", "log"]
)
def test_codes_are_the_nearest(
    encode: Callable[[Tensor], Tensor], decode: Callable[[Tensor], Tensor], lowest: float
) -> None:
    numbers = decode(CODES).double()
    middles = (numbers.sort().values[1:] + numbers.sort().values[:-1]) / 2
    tiny = 10 ** -torch.linspace(0, 9, 20_001)
    near = torch.cat([middles.float(), middles.float().nextafter(torch.tensor(2.0)), numbers.float(), tiny])
    y = torch.cat([near, -near, torch.linspace(lowest, 1, 100_001)])
    y = y[(y >= lowest) & (y <= 1)]
    error = (numbers[encode(y).long()] - y.double()).abs()
    nearest = (numbers - y.double()[:, None]).abs().min(dim=1).values
    assert (error <= nearest + 3e-7 * y.abs()).all()
    assert torch.equal(encode(decode(CODES)), CODES)
