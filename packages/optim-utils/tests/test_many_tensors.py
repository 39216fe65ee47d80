"""Many tensors at once give what each gives alone."""

import pytest
import torch
from torch import Tensor

from optim_utils import (
    DYNAMIC8,
    INT4,
    INT8,
    UINT8_AFFINE,
    DequantizeQuantizedTensorListContext,
    QuantizedTensorList,
    dequantize,
    quantize,
)
from optim_utils import _many_tensors as many
from optim_utils._many_tensors import Stacks, decode_many, encode_many, round_many
from optim_utils.low_bit import LowBitFormat

SHAPES = [(4, 256), (7,), (), (0, 3), (256,), (3, 100), (2, 3, 128), (1024, 2), (5, 256)]


def numbers(*, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("fmt", [INT8, DYNAMIC8, UINT8_AFFINE, INT4], ids=lambda f: f"{f.code}{f.bits}")
@pytest.mark.parametrize("longest", [1 << 22, 2048], ids=["one row", "short rows"])
def test_codes_and_numbers(monkeypatch: pytest.MonkeyPatch, fmt: LowBitFormat, layout: str, longest: int) -> None:
    monkeypatch.setattr(many, "_MAX_ROW", longest)
    fmt = fmt.with_(layout=layout)
    targets = [quantize(x, fmt) for x in numbers()]
    for alone, together in zip(targets, decode_many(targets, torch.float32)):
        assert torch.equal(together, dequantize(alone))
    codes = [target.codes for target in targets]
    new = numbers(seed=1)
    encode_many(targets, new)
    for target, code, x in zip(targets, codes, new):
        assert target.codes is code
        assert torch.equal(target.codes, quantize(x, fmt).codes)
        assert torch.equal(target.scale, quantize(x, fmt).scale)


def test_rows_are_of_one_kind_and_not_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "_MAX_ROW", 100)
    sizes = [("a", 40), ("b", 10), ("a", 40), (None, 5), ("a", 40), ("b", 0), ("b", 51), ("a", 10), ("c", 1)]
    rows = list(many._rows(sizes))
    assert sorted(rows) == [[0, 2], [4, 7]]


def test_stochastic_rounding_and_codes_are_unbiased_in_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.full((4096,), 1 + 2.0**-10), torch.full((64, 64), 3 + 2.0**-9), torch.full((7,), 1.0).expand(7)]
    targets = [torch.empty(x.shape, dtype=torch.bfloat16) for x in numbers]
    round_many(targets, numbers, generator=generator)
    for target, x in zip(targets[:2], numbers):
        assert abs(target.double().mean() - x.double().mean()) <= 5 * 2.0**-7 / 64
    assert torch.equal(targets[2], torch.ones(7, dtype=torch.bfloat16))
    coded = [quantize(torch.rand(4096, generator=generator), DYNAMIC8) for _ in range(2)]
    x = torch.cat([torch.full((4095,), 0.3331), torch.ones(1)])
    # the largest of each block is stored exactly; the rest is a mixture of two codes
    encode_many(coded, [x, x], stochastic=True, generator=generator)
    for target in coded:
        decoded = dequantize(target)
        assert decoded[:3840].unique().numel() == 1
        assert decoded[3840:-1].unique().numel() == 2


def test_stacks_keep_shapes_devices_and_strides_and_see_new_tensors() -> None:
    shapes = [(2, 3), (4,), (2, 3), (), (0, 3), (0, 3), (2, 3)]
    given = (*(torch.randn(shape) for shape in shapes), torch.randn(3, 2).t(), torch.randn(2, 3).bfloat16())
    stacks = Stacks.of(given)
    assert stacks.stacks == [[0, 2, 6]]
    made = stacks.converted(torch.float64)
    for new, old in zip(made, given, strict=True):
        assert (new.shape, new.dtype, new.stride()) == (old.shape, torch.float64, old.stride())
        assert torch.equal(new, old.double())
    stored = QuantizedTensorList([(torch.ones(2), None, None)], torch.bfloat16)
    stored.dequantize_()
    stored.quantize_()
    stored.quantized_value_list = (torch.ones(3, dtype=torch.bfloat16),)
    assert stored.dequantize()[0].shape == (3,)


@pytest.mark.parametrize("shape", [(4, 64), (256,), (3,), ()], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("fmt", [torch.bfloat16, INT8, INT8.with_(layout="rows"), UINT8_AFFINE, INT4], ids=str)
def test_for_autograd_values_are_tensors_of_their_own(
    fmt: LowBitFormat | torch.dtype, count: int, shape: tuple[int, ...]
) -> None:
    given = [torch.full(shape, 1.0 + i) for i in range(count)]
    quantized = QuantizedTensorList([(x, None, None) for x in given], fmt)
    before = [x.clone() for x in quantized.dequantize()]
    weight = torch.full(shape, 3.0, requires_grad=True)
    with DequantizeQuantizedTensorListContext(quantized, write_back=False) as values:
        loss = (values[0] * weight).sum()
        for value in values[1:]:
            value.mul_(2)
        loss.backward()
        values[0].mul_(weight)
        assert not any(value._is_view() for value in values[1:])
        changed = [value.detach() for value in values]
    assert torch.equal(weight.grad, before[0])
    for value, old, factor in zip(changed, before, [3, 2, 2]):
        assert torch.equal(value, old * factor)


def test_a_tensor_decoded_without_gradients_can_be_changed_with_them() -> None:
    weight = torch.full((4, 64), 3.0, requires_grad=True)
    with torch.no_grad():
        numbers = quantize(torch.ones(4, 64), INT8).dequantize()
    numbers.mul_(weight).sum().backward()
    assert torch.equal(weight.grad, torch.ones(4, 64))
