"""Quantized tensors, lists of them and their context: what is shared, what is copied, what is warned of and refused."""

import copy
import logging
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optim_utils import BlockInfo, DTensorBlockInfo, shampoo_quantization
from optim_utils.low_bit import DYNAMIC8, INT8, MOMENT8, NF4, LowBitFormat, LowBitTensor, dequantize, quantize
from optim_utils.shampoo_checkpoint_utils import extract_state_dict_content
from optim_utils.shampoo_quantization import (
    FLOAT_DTYPES,
    DequantizeQuantizedTensorListContext,
    QuantizedTensor,
    QuantizedTensorList,
)
from optim_utils.testing import run_ranks

OVERWRITING = "Dequantized values are already stored; overwriting these values..."
OTHER_INPUT = (
    "Existing stored dequantized values.\n"
    "Writing quantized values with input tensor_list without using these stored dequantized values..."
)
NOTHING_STORED = "No stored dequantized values self.dequantized_value_list=None. Must first call dequantize_()."
NOT_SUPPORTED = "Quantization for torch.int64 is not yet supported!"

Row = tuple[Tensor, None, None]


def rows(*tensors: Tensor) -> list[Row]:
    return [(tensor, None, None) for tensor in tensors]


def bf16_list(count: int = 3) -> QuantizedTensorList:
    generator = torch.Generator().manual_seed(0)
    return QuantizedTensorList(rows(*(torch.randn(4, 5, generator=generator) for _ in range(count))), torch.bfloat16)


def test_example_eighteen() -> None:
    values = torch.randn(1000, 1000)
    quantized = QuantizedTensor.init_from_dequantized_tensor(
        dequantized_values=values, quantized_dtype=torch.bfloat16, block_info=BlockInfo(values, (0, "block_0"))
    )
    restored = quantized.dequantize(torch.float32)
    assert restored.dtype == torch.float32
    assert ((restored - values).abs() <= values.abs() * 2**-8).all()


@pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, INT8, MOMENT8], ids=str)
def test_storage_never_aliases_the_input_and_keeps_no_graph(dtype: torch.dtype) -> None:
    values = (torch.rand(7, 3) + 1).mT.requires_grad_()
    quantized = QuantizedTensor.init_from_dequantized_tensor(values, dtype)
    assert not quantized.quantized_values.requires_grad
    # whatever the input's strides are, as a block allocates it
    assert dtype not in FLOAT_DTYPES or quantized.quantized_values.is_contiguous()
    before = quantized.dequantize(torch.float32).clone()
    with torch.no_grad():
        values.zero_()
    assert torch.equal(quantized.dequantize(torch.float32), before)


def test_dequantize_gives_the_stored_tensor_only_in_its_own_dtype() -> None:
    stored = torch.randn(3).bfloat16()
    quantized = QuantizedTensor(stored)
    assert quantized.dequantize(torch.bfloat16) is stored
    assert quantized.dequantize(torch.float32) is not stored
    quantized.quantize(torch.ones(3))
    assert quantized.quantized_values is stored
    assert (stored == 1).all()
    with pytest.raises(ValueError, match=r"shape \(3,\) can't take one of shape \(1,\)"):
        quantized.quantize(torch.ones(1))


def test_arguments_have_the_originals_names_too() -> None:
    quantized = QuantizedTensor(torch.zeros(3))
    quantized.quantize(dequantized_tensor=torch.ones(3))
    assert quantized.dequantize(dequantized_dtype=torch.bfloat16).equal(quantized.dequantize(dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="give dtype, or dequantized_dtype in its place"):
        quantized.dequantize()
    with pytest.raises(TypeError, match="give tensor, or dequantized_tensor in its place"):
        quantized.quantize(torch.ones(3), dequantized_tensor=torch.ones(3))


def test_what_is_no_tensor_of_real_numbers_is_refused_by_name() -> None:
    quantized = QuantizedTensor(torch.zeros(3))
    with pytest.raises(TypeError, match=r"tensor must hold dense real numbers, got torch\.complex64"):
        quantized.quantize(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match="tensor must be a tensor, got a list"):
        quantized.quantize([1.0] * 3)  # type: ignore[arg-type]
    for dtype in (torch.bfloat16, INT8):
        with pytest.raises(TypeError, match="dequantized_values must hold dense real numbers"):
            QuantizedTensor.init_from_dequantized_tensor(torch.ones(3, dtype=torch.complex64), dtype)
        with pytest.raises(TypeError, match="dequantized_values must hold dense real numbers"):
            QuantizedTensor.init_from_dequantized_tensor(torch.eye(3).to_sparse(), dtype)
        with pytest.raises(TypeError, match="quantized values must be a tensor, got a list"):
            QuantizedTensorList([([1.0], None, None)], dtype)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="quantized values must be a tensor, got a NoneType"):
        QuantizedTensor(None)  # type: ignore[arg-type]


def test_ranges_are_for_integer_storage_which_can_be_built_but_not_used() -> None:
    low, high = torch.zeros(1), torch.ones(1)
    with pytest.raises(AssertionError, match=r"must be None for torch\.float32"):
        QuantizedTensor(torch.zeros(3), None, low, high)
    with pytest.raises(AssertionError, match="both be given, or neither"):
        QuantizedTensor(torch.zeros(3), None, low)
    with pytest.raises(AssertionError, match="must all be zero"):
        QuantizedTensor(torch.ones(3, dtype=torch.int64))
    for quantized in (
        QuantizedTensor(torch.zeros(3, dtype=torch.int64)),
        QuantizedTensor(torch.ones(3, dtype=torch.int64), None, low, high),
    ):
        assert isinstance(quantized.min_value, Tensor)
        assert quantized.max_value.shape == (1,)
        for use in (lambda q=quantized: q.dequantize(torch.float32), lambda q=quantized: q.quantize(torch.ones(3))):
            with pytest.raises(NotImplementedError) as error:
                use()
            assert str(error.value) == NOT_SUPPORTED
            assert "low_bit" in error.value.__notes__[0]
    for dtype in (torch.int64, torch.int8, torch.float8_e4m3fn):
        with pytest.raises(NotImplementedError) as error:
            QuantizedTensor.init_from_dequantized_tensor(torch.ones(3), dtype)
        assert str(error.value) == f"Quantization for {dtype} is not yet supported!"


def test_state_holds_the_values_alone_and_loads_in_place() -> None:
    values = torch.randn(6)
    quantized = QuantizedTensor(values.clone(), BlockInfo(values, (0, "b")))
    assert list(quantized.state_dict()) == ["quantized_values"]
    integers = QuantizedTensor(torch.zeros(3, dtype=torch.int64))
    assert list(integers.state_dict()) == ["quantized_values", "min_value", "max_value"]
    for fmt in (None, MOMENT8):
        source = QuantizedTensor.init_from_dequantized_tensor(values, fmt or torch.bfloat16)
        target = QuantizedTensor.init_from_dequantized_tensor(torch.zeros(6), fmt or torch.bfloat16)
        stored = target.quantized_values
        assert target.load_state_dict(copy.deepcopy(source.state_dict()), strict=True).ok
        assert target.quantized_values is stored
        assert torch.equal(target.dequantize(torch.float32), source.dequantize(torch.float32))


def test_example_four_and_nineteen() -> None:
    quantized = QuantizedTensorList(
        quantized_data=rows(*(torch.randn(500, 500) for _ in range(3))),
        quantized_dtype=torch.bfloat16,
        computation_dtype=torch.float32,
    )
    with DequantizeQuantizedTensorListContext(quantized):
        sums = [tensor.sum() for tensor in quantized.dequantized_value]
        assert {tensor.dtype for tensor in quantized.dequantized_value} == {torch.float32}
    assert all(total.isfinite() for total in sums)
    assert {tensor.dtype for tensor in quantized.quantized_value} == {torch.bfloat16}
    assert not quantized.is_dequantized_stored()

    five = QuantizedTensorList(rows(*(torch.randn(100, 100) for _ in range(5))), torch.bfloat16)
    with DequantizeQuantizedTensorListContext(five) as tensors:
        products = [torch.matmul(t, t.T) for t in tensors]
    assert products[0].shape == (100, 100)
    five.dequantize_()
    five.dequantized_value[1].zero_()
    five.quantize_()
    assert (five.quantized_value[1] == 0).all()
    three = five.compress((True, False, True, False, True))
    assert len(three) == 3
    assert [a is b for a, b in zip(three.quantized_value, five.quantized_value[::2])] == [True] * 3


def test_values_of_the_right_dtype_are_kept_and_others_converted() -> None:
    keep, convert = torch.randn(3).bfloat16(), torch.randn(3)
    quantized = QuantizedTensorList(rows(keep, convert), torch.bfloat16)
    assert quantized.quantized_value[0] is keep
    assert torch.equal(quantized.quantized_value[1], convert.bfloat16())
    with DequantizeQuantizedTensorListContext(quantized) as tensors:
        tensors[0].fill_(2)
    assert (keep == 2).all()
    element = QuantizedTensor(keep)
    assert QuantizedTensorList([element], torch.bfloat16).quantized_value[0] is keep


def test_equal_dtypes_share_the_stored_tuple() -> None:
    quantized = QuantizedTensorList(rows(torch.randn(3)), torch.float32)
    assert quantized.dequantize() is quantized.quantized_value
    with DequantizeQuantizedTensorListContext(quantized) as tensors:
        assert tensors[0] is quantized.quantized_value[0]
        tensors[0].fill_(7)
    assert (quantized.quantized_value[0] == 7).all()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_stored_tensors_may_be_given_in_another_order(compiled: bool) -> None:
    stored = QuantizedTensorList([(torch.full((4,), float(i)), None, None) for i in range(3)], torch.float32)

    def rotate() -> None:
        first, *others = stored.dequantize()
        stored.quantize([*others, first])

    (torch.compile(rotate, fullgraph=True, backend="aot_eager") if compiled else rotate)()
    assert [value[0].item() for value in stored.quantized_value] == [1, 2, 0]


def test_wrong_arguments() -> None:
    value = torch.randn(3)
    hint = QuantizedTensorList.__init__.__annotations__["quantized_data"]
    assert hint == "Sequence[tuple[Tensor, Tensor | None, Tensor | None]] | Sequence[QuantizedTensor]"
    for data in ([value], value, [QuantizedTensor(value), (value, None, None)], iter([]), [(value, None)]):
        with pytest.raises(TypeError) as error:
            QuantizedTensorList(data, torch.float32)  # type: ignore[arg-type]
        text = str(error.value)
        assert text.startswith(
            "quantized_data must be collections.abc.Sequence[tuple[torch.Tensor, torch.Tensor | None"
        )
        assert text.endswith(f"but get {type(data)}")
        assert error.value.__notes__ == ["give each tensor as (values, None, None)"]
    with pytest.raises(TypeError, match=r"quantized_dtype must be a torch\.dtype or a LowBitFormat, got 'bf16'"):
        QuantizedTensorList(rows(value), "bf16")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="quantized_tensor_list must be a QuantizedTensorList, got a list"):
        DequantizeQuantizedTensorListContext([value])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tensor_list has to be iterable, got a NoneType"):
        QuantizedTensorList(rows(value), torch.bfloat16).quantize(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"dtype has to be a torch\.dtype, got 'meta'"):
        QuantizedTensor(value).dequantize("meta")  # type: ignore[arg-type]
    with pytest.raises(AssertionError) as assertion:
        QuantizedTensorList(rows(value), torch.float32, torch.int64)
    assert str(assertion.value) == (
        "computation_dtype=torch.int64 is not supported! "
        "It must be one of (torch.float16, torch.bfloat16, torch.float32, torch.float64)!"
    )
    with pytest.raises(ValueError, match="rounding"):
        QuantizedTensorList(rows(value), torch.bfloat16, rounding="up")  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="for all values, or for none"):
        QuantizedTensorList([(value, value, value), (value, None, None)], torch.float32)
    with pytest.raises(AssertionError, match="for all values, or for none"):
        QuantizedTensorList([(value, value, None)], torch.float32)


def test_isinstance_of_the_elements_decides_before_anything_else_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    # tests written for the original make its check fail in this way
    monkeypatch.setattr(shampoo_quantization, "isinstance", lambda value, kind: False, raising=False)
    with pytest.raises(TypeError, match=r"quantized_data must be .* but get <class 'list'>"):
        QuantizedTensorList(rows(torch.zeros(2, dtype=torch.float16)), torch.float16, torch.float64)


def test_integer_lists_can_be_built_but_not_used() -> None:
    integers = QuantizedTensorList(rows(torch.zeros(3, dtype=torch.int64)), torch.int64)
    for use in (integers.dequantize, integers.dequantize_, lambda: integers.quantize([torch.ones(3)])):
        with pytest.raises(NotImplementedError) as error:
            use()
        assert str(error.value) == NOT_SUPPORTED
    low, high = torch.tensor([-1.0]), torch.tensor([1.0])
    with_range = QuantizedTensorList([(torch.ones(3, dtype=torch.int64), low, high)] * 2, torch.int64).compress([0, 1])
    assert (with_range.min_value_list, with_range.max_value_list) == ((low,), (high,))
    assert list(with_range.state_dict()) == ["quantized_value_list", "min_value_list", "max_value_list"]
    for value, dtype in ((torch.ones(3), torch.int64), (torch.zeros(3, dtype=torch.int64), torch.bfloat16)):
        with pytest.raises(TypeError, match="can't be stored as"):
            QuantizedTensorList(rows(value), dtype)
    with pytest.raises(TypeError, match="can't be stored as"):
        QuantizedTensorList(rows(quantize(torch.ones(3), INT8)), MOMENT8)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert all(record.args in (None, ()) for record in caplog.records)
    assert {record.name for record in caplog.records} <= {"optim_utils.shampoo_quantization"}
    found = [record.msg for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return found


def test_the_three_warnings(caplog: pytest.LogCaptureFixture) -> None:
    quantized = bf16_list()
    quantized.quantize_()
    assert messages(caplog) == [NOTHING_STORED]
    quantized.dequantize_()
    first = quantized.dequantized_value
    assert messages(caplog) == []
    quantized.dequantize_()
    assert messages(caplog) == [OVERWRITING]
    assert quantized.dequantized_value is not first
    quantized.quantize([torch.ones(4, 5)] * 3)
    assert messages(caplog) == [OTHER_INPUT]
    assert quantized.is_dequantized_stored()
    quantized.quantize_()
    assert messages(caplog) == []


def test_accessors_and_compress_mind_stored_values() -> None:
    quantized = bf16_list()
    with pytest.raises(AssertionError, match="not stored"):
        quantized.dequantized_value
    with pytest.raises(AssertionError, match="Inconsistent lengths between complete_list 3 and selector 2!"):
        quantized.compress((True, False))
    quantized.dequantize_()
    with pytest.raises(AssertionError, match="while dequantized values are stored"):
        quantized.compress((True, True, True))
    quantized.discard_()
    with pytest.raises(ValueError, match="as many tensors as are stored, 3, got 1"):
        quantized.quantize([torch.ones(4, 5)])
    with pytest.raises(ValueError, match=r"tensor 0 must have the stored shape \(4, 5\), got \(5,\)"):
        quantized.quantize([torch.ones(5)] * 3)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, INT8, DYNAMIC8], ids=str)
@pytest.mark.parametrize(
    "wrong",
    [
        [0.0] * 3,
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3).to_sparse(),
        torch.zeros(3, device="meta"),
        quantize(torch.zeros(3), NF4),
    ],
    ids=["list", "complex", "sparse", "meta", "quantized"],
)
def test_a_list_that_is_refused_is_not_written_in_part(
    dtype: torch.dtype | LowBitFormat, rounding: Literal["nearest", "stochastic"], wrong: object
) -> None:
    values = [(torch.zeros(size), None, None) for size in (2, 3)]
    quantized = QuantizedTensorList(values, dtype, rounding=rounding)
    with pytest.raises((TypeError, ValueError), match=r"tensor 1 (must|of shape)"):
        quantized.quantize([torch.ones(2), wrong])  # type: ignore[list-item]
    assert not any(tensor.any() for tensor in quantized.dequantize())


def test_integers_are_refused_before_they_are_written_only_where_codes_or_random_bits_are_made() -> None:
    quantized = bf16_list()
    quantized.quantize([torch.ones(4, 5, dtype=torch.int64)] * 3)
    assert all((tensor == 1).all() for tensor in quantized.quantized_value)
    low_bit = QuantizedTensorList([(torch.zeros(2), None, None)] * 2, INT8)
    with pytest.raises(TypeError, match=r"tensor 1 must hold dense floating-point numbers, got torch\.int64"):
        low_bit.quantize([torch.ones(2), torch.ones(2, dtype=torch.int64)])
    assert not any(tensor.any() for tensor in low_bit.dequantize())


def test_any_iterable_of_tensors_can_be_written() -> None:
    quantized = bf16_list()
    quantized.quantize(torch.ones(4, 5) for _ in range(3))  # type: ignore[arg-type]
    assert all((tensor == 1).all() for tensor in quantized.quantized_value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, INT8], ids=str)
def test_empty_lists_work_everywhere(dtype: torch.dtype) -> None:
    empty = QuantizedTensorList([], dtype)
    assert len(empty) == 0
    assert empty.dequantize() == ()
    empty.dequantize_()
    empty.quantize_()
    empty.quantize([])
    with DequantizeQuantizedTensorListContext(empty) as tensors:
        assert list(tensors) == []
    assert len(empty.compress(())) == 0
    assert empty.load_state_dict(empty.state_dict(), strict=True).ok


def test_half_overflow_gives_infinity_as_a_cast_does() -> None:
    quantized = QuantizedTensorList(rows(torch.zeros(2)), torch.float16)
    quantized.quantize([torch.tensor([1e6, -1e6])])
    assert quantized.quantized_value[0].tolist() == [math.inf, -math.inf]


@given(dtype=st.sampled_from(FLOAT_DTYPES), computation=st.sampled_from(FLOAT_DTYPES), seed=st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_every_pair_of_dtypes_is_a_pair_of_casts(dtype: torch.dtype, computation: torch.dtype, seed: int) -> None:
    value, update = torch.randn(2, 11, generator=torch.Generator().manual_seed(seed)).to(computation)
    quantized = QuantizedTensorList(rows(value.to(dtype)), dtype, computation)
    with DequantizeQuantizedTensorListContext(quantized) as tensors:
        assert torch.equal(tensors[0], value.to(dtype).to(computation))
        tensors[0].copy_(update)
    assert torch.equal(quantized.quantized_value[0], update.to(dtype))


def test_low_bit_lists() -> None:
    values = [torch.rand(3, 40), torch.rand(7)]
    quantized = QuantizedTensorList(rows(*values), MOMENT8)
    assert all(isinstance(value, LowBitTensor) for value in quantized.quantized_value)
    memory = quantized.quantized_value[0].codes.data_ptr()
    with DequantizeQuantizedTensorListContext(quantized) as tensors:
        assert torch.equal(tensors[0], dequantize(quantize(values[0], MOMENT8)))
        tensors[0].fill_(3)
    assert quantized.quantized_value[0].codes.data_ptr() == memory
    assert dequantize(quantized.quantized_value[0]).unique().tolist() == pytest.approx([3.0])
    kept = quantize(values[0], DYNAMIC8)
    assert QuantizedTensorList(rows(kept), DYNAMIC8).quantized_value[0] is kept
    assert QuantizedTensorList([QuantizedTensor(kept)], DYNAMIC8).quantized_value[0] is kept
    rounded = QuantizedTensorList(
        rows(values[0]), INT8, rounding="stochastic", generator=torch.Generator().manual_seed(0)
    )
    rounded.quantize([values[0]])
    assert ((dequantize(rounded.quantized_value[0]) - values[0]).abs() <= 1 / 127 + 1e-6).all()


def test_state_of_a_list_loads_in_place() -> None:
    for dtype in (torch.bfloat16, MOMENT8):
        source = QuantizedTensorList(rows(torch.rand(3), torch.rand(2, 2)), dtype)
        target = QuantizedTensorList(rows(torch.zeros(3), torch.zeros(2, 2)), dtype)
        stored = target.quantized_value
        assert list(source.state_dict()) == ["quantized_value_list"]
        assert target.load_state_dict(copy.deepcopy(source.state_dict()), strict=True).ok
        assert [a is b for a, b in zip(target.quantized_value, stored)] == [True, True]
        assert all(torch.equal(a, b) for a, b in zip(target.dequantize(), source.dequantize()))


def test_state_is_neither_saved_nor_loaded_beside_open_values() -> None:
    lists = {"momenta": bf16_list(1)}
    for use in (
        lambda: lists["momenta"].state_dict(),
        lambda: extract_state_dict_content(lists),
        lambda: lists["momenta"].load_state_dict({"quantized_value_list": [torch.zeros(4, 5)]}),
    ):
        with DequantizeQuantizedTensorListContext(lists["momenta"]), pytest.raises(RuntimeError, match="leave the con"):
            use()
    assert lists["momenta"].load_state_dict(lists["momenta"].state_dict(), strict=True).ok
    # of one dtype the values are the storage
    same = QuantizedTensorList(rows(torch.zeros(2)), torch.float32)
    with DequantizeQuantizedTensorListContext(same):
        assert same.load_state_dict({"quantized_value_list": [torch.ones(2)]}, strict=True).ok
    assert same.quantized_value[0].tolist() == [1, 1]


def test_nested_contexts_share_values_and_the_outermost_writes_back(caplog: pytest.LogCaptureFixture) -> None:
    quantized = bf16_list(1)
    with DequantizeQuantizedTensorListContext(quantized) as outer:
        outer[0].fill_(1)
        with DequantizeQuantizedTensorListContext(quantized, write_back=False) as inner:
            assert inner[0] is outer[0]
            inner[0].add_(1)
        assert quantized.is_dequantized_stored()
        outer[0].add_(1)
    assert (quantized.quantized_value[0] == 3).all()
    quantized.dequantize_()
    with DequantizeQuantizedTensorListContext(quantized) as tensors:
        tensors[0].fill_(9)
    assert quantized.is_dequantized_stored()
    assert (quantized.quantized_value[0] == 3).all()
    quantized.quantize_()
    assert (quantized.quantized_value[0] == 9).all()
    assert messages(caplog) == []


def test_a_context_can_be_used_again_and_inside_itself() -> None:
    quantized = bf16_list(2)
    context = DequantizeQuantizedTensorListContext(quantized)
    for value in (1, 2):
        with context as tensors:
            assert tensors is context
            with context:
                tensors[0].fill_(value)
        assert (quantized.quantized_value[0] == value).all()
    assert len(context) == 2
    with pytest.raises(AssertionError, match="not stored"):
        context[0]


@pytest.mark.parametrize(("on_exception", "expected"), [("discard", 1), ("keep", 5)])
def test_an_exception_discards_or_keeps(on_exception: str, expected: int) -> None:
    quantized = QuantizedTensorList(rows(torch.ones(3)), torch.bfloat16)
    with pytest.raises(ZeroDivisionError):
        with DequantizeQuantizedTensorListContext(quantized, on_exception=on_exception) as tensors:  # type: ignore[arg-type]
            tensors[0].fill_(5)
            1 / 0
    assert not quantized.is_dequantized_stored()
    assert (quantized.quantized_value[0] == expected).all()


def test_read_only_and_wrong_choices() -> None:
    quantized = QuantizedTensorList(rows(torch.ones(3)), torch.bfloat16)
    with DequantizeQuantizedTensorListContext(quantized, write_back=False) as tensors:
        tensors[0].fill_(5)
        assert [tensor.sum().item() for tensor in tensors] == [15]
    assert (quantized.quantized_value[0] == 1).all()
    assert not quantized.is_dequantized_stored()
    with pytest.raises(ValueError, match="on_exception"):
        DequantizeQuantizedTensorListContext(quantized, on_exception="maybe")  # type: ignore[arg-type]
    integers = QuantizedTensorList(rows(torch.zeros(3, dtype=torch.int64)), torch.int64)
    context = DequantizeQuantizedTensorListContext(integers)
    with pytest.raises(NotImplementedError), context:
        pass
    assert not integers.is_dequantized_stored()


def average_through_context(steps: int, beta: float, dtype: object, rounding: str, constant: bool = False) -> float:
    """Mean over 4096 lanes of v <- beta v + (1 - beta) g**2 from 0.25 on, stored in a list between the steps."""
    draws = torch.Generator().manual_seed(0)
    quantized = QuantizedTensorList(
        rows(torch.full((4096,), 0.25)),
        dtype,  # type: ignore[arg-type]
        rounding=rounding,  # type: ignore[arg-type]
        generator=torch.Generator().manual_seed(1),
    )
    for _ in range(steps):
        with DequantizeQuantizedTensorListContext(quantized) as (v,):
            g2 = 1.0 if constant else torch.randn(4096, generator=draws).square_()
            v.mul_(beta).add_((1 - beta) * g2)
    return quantized.quantized_value[0].double().mean().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, INT8])
def test_a_generator_is_of_no_use_to_nearest_rounding_and_does_no_harm(dtype) -> None:
    quantized = QuantizedTensorList(rows(torch.ones(3), torch.ones(3)), dtype, generator=torch.Generator())
    with DequantizeQuantizedTensorListContext(quantized) as tensors:
        tensors[0].fill_(2)
    assert torch.equal(quantized.dequantize()[0], torch.full((3,), 2.0))


def test_what_is_no_generator_is_refused_before_anything_is_computed() -> None:
    with pytest.raises(TypeError, match=r"generator must be a torch\.Generator or None, got 0"):
        QuantizedTensorList(rows(torch.ones(3)), torch.bfloat16, rounding="stochastic", generator=0)


def test_an_average_stalls_by_nearest_and_not_stochastically() -> None:
    exact = average_through_context(1000, 0.99, torch.float32, "nearest")
    assert abs(average_through_context(1000, 0.99, torch.bfloat16, "stochastic") - exact) <= 0.005
    assert average_through_context(1000, 0.99, torch.bfloat16, "nearest") - exact > 0.02


@pytest.mark.slow
def test_average_figures_of_ten_thousand_steps_through_the_context() -> None:
    exact = average_through_context(10_000, 0.999, torch.float32, "stochastic")
    assert abs(average_through_context(10_000, 0.999, torch.bfloat16, "stochastic") - exact) <= 0.005
    assert average_through_context(10_000, 0.999, torch.bfloat16, "stochastic", constant=True) == pytest.approx(
        1.0, abs=0.002
    )
    assert average_through_context(2000, 0.999, torch.bfloat16, "nearest", constant=True) == 0.25


@pytest.mark.parametrize("dtype", [torch.bfloat16, MOMENT8], ids=str)
def test_dequantize_and_context_compile_fullgraph(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    quantized = QuantizedTensorList(rows(torch.rand(4, 5), torch.rand(3)), dtype)
    decode = torch.compile(lambda q: q.dequantize(), fullgraph=True, backend="eager")
    assert all(torch.equal(a, b) for a, b in zip(decode(quantized), quantized.dequantize()))

    def double(q: QuantizedTensorList) -> None:
        with DequantizeQuantizedTensorListContext(q) as tensors:
            for tensor in tensors:
                tensor.mul_(2)

    twin = copy.deepcopy(quantized)
    double(twin)
    torch.compile(double, fullgraph=True, backend="eager")(quantized)
    assert not quantized.is_dequantized_stored()
    assert all(torch.equal(a, b) for a, b in zip(quantized.dequantize(), twin.dequantize()))


FRESH = """
import pickle, sys, torch
for path in sys.argv[1:]:
    quantized = pickle.load(open(path, "rb"))
    torch.save(quantized.dequantize(torch.float32), path + ".out")
"""


def test_pickle_in_a_fresh_process_and_deepcopy(tmp_path: Path) -> None:
    values = torch.randn(4, 6)
    info = BlockInfo(torch.randn(2), (0, "block_0"))
    paths = []
    for i, dtype in enumerate((torch.bfloat16, MOMENT8)):
        quantized = QuantizedTensor.init_from_dequantized_tensor(values, dtype, info)
        twin = copy.deepcopy(quantized)
        assert twin.block_info == info
        assert torch.equal(twin.dequantize(torch.float32), quantized.dequantize(torch.float32))
        twin.quantize(torch.zeros(4, 6))
        assert quantized.dequantize(torch.float32).any()
        paths.append(tmp_path / f"{i}")
        paths[-1].write_bytes(pickle.dumps(quantized))
    subprocess.run([sys.executable, "-c", FRESH, *map(str, paths)], check=True, timeout=120)
    assert torch.equal(torch.load(str(paths[0]) + ".out"), values.bfloat16().float())
    assert torch.equal(torch.load(str(paths[1]) + ".out"), dequantize(quantize(values, MOMENT8)))
    context = DequantizeQuantizedTensorListContext(bf16_list())
    for twin in (pickle.loads(pickle.dumps(context)), copy.deepcopy(context)):
        with twin as tensors:
            tensors[0].zero_()
        with context as tensors:
            assert tensors[0].any()


@pytest.mark.parametrize("stacks", [{}, {"_stacks": ((), ())}], ids=["0.2", "0.3"])
def test_lists_that_older_versions_pickled(stacks) -> None:
    quantized = bf16_list()
    quantized.dequantize()
    state = {name: value for name, value in vars(quantized).items() if name != "_stacks"} | stacks
    twin = QuantizedTensorList.__new__(QuantizedTensorList)
    twin.__setstate__(state)
    assert all(map(torch.equal, twin.dequantize(), quantized.dequantize()))


def test_a_context_that_fails_to_write_back_leaves_the_next_one_as_it_was() -> None:
    quantized = QuantizedTensorList([(torch.ones(2).bfloat16(), None, None)], torch.bfloat16, rounding="stochastic")
    with pytest.raises(ValueError, match="dst must be"), DequantizeQuantizedTensorListContext(quantized) as tensors:
        # what has another shape cannot be written
        tensors[0].resize_(3)
    assert not quantized.is_dequantized_stored()
    with DequantizeQuantizedTensorListContext(quantized) as tensors:
        tensors[0].fill_(4)
    assert torch.equal(quantized.quantized_value[0], torch.full((2,), 4.0).bfloat16())


def dtensor_rank(rank: int, world_size: int) -> None:
    from functools import partial

    import torch.distributed.tensor as dtensor
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,))
    allocate = partial(_sharded_zeros, mesh)
    whole = torch.rand(4, 256, generator=torch.Generator().manual_seed(0))
    info = DTensorBlockInfo(whole, (0, "block_0"), allocate_zeros_tensor=allocate)
    quantized = QuantizedTensor.init_from_dequantized_tensor(whole, torch.bfloat16, info)
    assert isinstance(quantized.quantized_values, dtensor.DTensor)
    assert torch.equal(quantized.quantized_values.full_tensor(), whole.bfloat16())
    mine = whole[2 * rank : 2 * rank + 2]
    local = QuantizedTensorList([quantized], torch.bfloat16)
    assert type(local.quantized_value[0]) is Tensor
    with DequantizeQuantizedTensorListContext(local) as tensors:
        assert torch.equal(tensors[0], mine.bfloat16().float())
        tensors[0].add_(1)
    assert torch.equal(quantized.quantized_values.full_tensor(), (whole.bfloat16().float() + 1).bfloat16())

    sharded = dtensor.distribute_tensor(whole, mesh, [dtensor.Shard(0)])
    low_bit = QuantizedTensor.init_from_dequantized_tensor(sharded, MOMENT8, info)
    local = QuantizedTensorList([low_bit], MOMENT8)
    with DequantizeQuantizedTensorListContext(local) as tensors:
        assert torch.equal(tensors[0], dequantize(quantize(mine, MOMENT8)))
        tensors[0].mul_(0.5)
    halved = dequantize(quantize(dequantize(quantize(whole, MOMENT8)) * 0.5, MOMENT8))
    assert torch.equal(low_bit.dequantize(torch.float32).full_tensor(), halved)

    # the block says how codes are sharded, also those of plain values and of a DTensor with other placements
    rows_of_codes = INT8.with_(layout="rows")
    for values in (whole, dtensor.distribute_tensor(whole, mesh, [dtensor.Shard(1)])):
        low_bit = QuantizedTensor.init_from_dequantized_tensor(values, rows_of_codes, info)
        assert torch.equal(low_bit.quantized_values.to_local().dequantize(), dequantize(quantize(mine, rows_of_codes)))
        low_bit.quantize(whole + 1)
        expected = dequantize(quantize(whole + 1, rows_of_codes))
        assert torch.equal(low_bit.dequantize(torch.float32).full_tensor(), expected)

    replicated = dtensor.distribute_tensor(whole, mesh, [dtensor.Replicate()])

    # without a block they stay DTensors, of any placements and beside plain ones
    alone = QuantizedTensor.init_from_dequantized_tensor(sharded, torch.bfloat16)
    assert alone.quantized_values.placements == sharded.placements
    other = dtensor.distribute_tensor(whole.bfloat16(), mesh, [dtensor.Shard(1)])
    plain = whole[0].bfloat16()
    mixed = QuantizedTensorList([(x, None, None) for x in (alone.quantized_values, plain, other)], torch.bfloat16)
    with DequantizeQuantizedTensorListContext(mixed) as tensors:
        assert [type(tensor) for tensor in tensors] == [dtensor.DTensor, Tensor, dtensor.DTensor]
        for tensor in tensors:
            tensor.add_(1)
    raised = (whole.bfloat16().float() + 1).bfloat16()
    assert torch.equal(alone.quantized_values.full_tensor(), raised)
    assert torch.equal(other.full_tensor(), raised)
    assert torch.equal(plain, raised[0])
    mixed.rounding = "stochastic"
    with pytest.raises(TypeError, match=r"plain tensors, got a DTensor: give this rank's part"):
        mixed.quantize([alone.dequantize(torch.float32), plain, other.float()])

    # whatever of a list is refused, nothing before it is written
    for dtype, stored, later, rounding, error, text in (
        (torch.bfloat16, sharded, whole, "nearest", TypeError, "tensor 1 must be a DTensor, as the stored one is"),
        (INT8, sharded, whole, "nearest", TypeError, "tensor 1 must be a DTensor, as the stored one is"),
        (INT8, whole, sharded, "nearest", TypeError, "tensor 1 must be a plain tensor, as the stored one is"),
        (torch.bfloat16, sharded, sharded, "stochastic", TypeError, "tensor 1: stochastic rounding takes plain"),
        (INT8, sharded, other.float(), "nearest", ValueError, "flat blocks .* run across its sharded dimension 1"),
        (INT8, replicated, replicated, "stochastic", ValueError, "replicas of a DTensor of shape .* would be rounded"),
    ):
        refused = QuantizedTensorList([(x, None, None) for x in (whole, stored)], dtype, rounding=rounding)
        before = refused.dequantize()[0].clone()
        with pytest.raises(error, match=text):
            refused.quantize([whole + 1, later])
        assert torch.equal(refused.dequantize()[0], before)


def _sharded_zeros(mesh: object, size: tuple[int, ...], dtype: torch.dtype, device: object) -> Tensor:
    import torch.distributed.tensor as dtensor

    return dtensor.zeros(size, dtype=dtype, device_mesh=mesh, placements=[dtensor.Shard(0)])


def test_blocks_of_dtensors_are_computed_on_by_their_local_part() -> None:
    run_ranks(dtensor_rank, 2)
