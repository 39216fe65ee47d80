"""What operators and functions of the tests' interpreter compute at once is what Triton's computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import numpy as np
from quick import interpreter as quick_interpreter
from quick import launches as quick_launches
from quick.functions import quick_function, quick_method
from quick.operators import quick_operator
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from optim_kernels._triton import tl

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU"),
    pytest.mark.skipif(not hasattr(interpreter, "_LangPatchScope"), reason="this version's is left as it is"),
]

FIRST = ["add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"]
LAST = [f"r{name}" for name in FIRST]
COMPARISONS = ["lt", "le", "gt", "ge", "eq", "ne"]
DTYPES = [tl.int1, tl.int32, tl.uint32, tl.int64, tl.float16, tl.float32, tl.float64]
SHAPES = [(), (4,), (2, 1), (2, 4)]
NUMBERS = [0, 3, -3, 31, 2**24 + 1, 2**31, 2**40, 0.1, -0.0, 1e-40, 1e39, np.inf, np.nan, True, tl.constexpr(2), None]


@pytest.fixture(autouse=True)
def _patched_language() -> Iterator[None]:
    scope = interpreter._LangPatchScope()
    interpreter._patch_lang_core(tl, scope)
    interpreter._patch_lang_tensor(tl.tensor, scope)
    yield
    scope.restore()


def tensor(dtype: tl.dtype, shape: tuple[int, ...], seed: int = 0) -> Any:
    data = np.random.default_rng(seed).integers(-5, 6, shape or 1)
    data = data.astype(np.uint64) if dtype.is_ptr() else (data % 7 if dtype.name[0] == "u" else data)
    data = data.astype(interpreter._get_np_dtype(dtype))
    return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def called(function: Any) -> Callable[..., Any]:
    return quick_launches._called_by(TritonSemantic(interpreter.interpreter_builder), function.__wrapped__)


def outcome(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """All that a kernel could see, or what kind of error there is."""
    # copies, for the interpreter makes unsigned numbers that it shifts signed
    own = [tl.tensor(each.handle.clone(), each.type) if isinstance(each, tl.tensor) else each for each in args]
    try:
        found = function(*own, **options)
    except Exception as error:
        return type(error)
    handle = found.handle
    about = repr((found.type, found.dtype, found.shape, found.numel, sorted(vars(found)), handle.dtype, handle.attr))
    return about, handle.data.dtype, handle.data.shape, handle.data.tobytes()


@pytest.mark.parametrize("name", [f"__{name}__" for name in (*FIRST, *LAST, *COMPARISONS)])
def test_operators(name: str) -> None:
    slow = called(getattr(tl.tensor, name))
    quick = quick_operator(name, slow)
    assert quick is not slow
    pointer = tl.pointer_type(tl.int16)
    with np.errstate(all="ignore"):
        for dtype, shape in product([*DTYPES, pointer], [(), (2, 1)]):
            operand = tensor(dtype, shape)
            # of every shape where it is computed at once, else numbers
            alike = [each for each in DTYPES if each.name[0] == dtype.name[0]]
            others = [*((each, (), 1) for each in DTYPES), *((each, tile, 1) for each in alike for tile in SHAPES[1:])]
            others += [(tl.int32, (2, 4), 1)] if dtype == pointer else []
            for other in (*(tensor(*each) for each in others), *NUMBERS):
                expected = outcome(slow, operand, other)
                assert outcome(quick, operand, other) == expected, (operand.type, getattr(other, "type", other))


@pytest.mark.parametrize("dtype", [tl.float32, tl.bfloat16, tl.int64, tl.int1, tl.pointer_type(tl.int8)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_casts_and_axes(shape: tuple[int, ...], dtype: tl.dtype) -> None:
    operand = tensor(dtype, shape)
    for name, function in (("to", tl.tensor.to), ("cast", tl.cast)):
        slow = called(function)
        quick = (quick_method if name == "to" else quick_function)(name, slow)
        for target in (*DTYPES, tl.bfloat16, tl.pointer_type(tl.int32), tl.constexpr(tl.float64)):
            assert outcome(quick, operand, target) == outcome(slow, operand, target), target
        for options in ({"bitcast": True}, {"fp_downcast_rounding": "rtz"}):
            assert outcome(quick, operand, tl.float16, **options) == outcome(slow, operand, tl.float16, **options)
    slow = called(tl.tensor.__getitem__)
    rest = (slice(None),) * len(shape)
    for slices in ((None, *rest), (*rest, None), rest, (None,), None, (*rest, 1), slice(None), (None, slice(None))):
        assert outcome(quick_method("__getitem__", slow), operand, slices) == outcome(slow, operand, slices), slices


@pytest.mark.parametrize("dtype", [tl.float32, tl.bfloat16, tl.int1, tl.pointer_type(tl.int8)], ids=str)
def test_choices(dtype: tl.dtype) -> None:
    slow = called(tl.where)
    quick = quick_function("where", slow)
    conditions = [tensor(tl.int1, shape, 2) for shape in SHAPES]
    others = [*(tensor(dtype, shape, 1) for shape in SHAPES), tensor(tl.float64, (4,)), 0, 0.5, None]
    for condition in conditions:
        for x in others:
            for y in others:
                assert outcome(quick, condition, x, y) == outcome(slow, condition, x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64], ids=str)
def test_loads(dtype: torch.dtype) -> None:
    slow = called(tl.load)
    quick = quick_function("load", slow)
    memory = torch.randn(8).to(dtype)
    kind = interpreter._implicit_cvt(memory).type
    for shape in SHAPES:
        places = np.arange(np.prod(shape, dtype=int)).reshape(shape or 1).astype(np.uint64)
        handle = interpreter.TensorHandle(memory.data_ptr() + places * memory.itemsize, kind)
        pointer = tl.tensor(handle, tl.block_type(kind, list(shape)) if shape else kind)
        masks = [None, *(tensor(tl.int1, each, 3) for each in SHAPES), tensor(tl.int32, shape)]
        for mask in masks:
            for other in (None, 0, 0.0, -0.0, tl.constexpr(0), 1.5, tensor(tl.float32, shape)):
                assert outcome(quick, pointer, mask, other) == outcome(slow, pointer, mask, other)
        for options in ({"cache_modifier": ".cg"}, {"eviction_policy": "evict"}, {"volatile": True, "mask": masks[1]}):
            assert outcome(quick, pointer, **options) == outcome(slow, pointer, **options)


def test_halves_of_fp32_are_bf16() -> None:
    """All of them, and all together, of which some are so small that Triton's makes other numbers of them."""
    few = np.arange(2**16, dtype=np.uint16)
    many = np.random.default_rng(0).integers(0, 2**32, 2**12, dtype=np.uint32)
    many = np.concatenate([many, [0, 2**31, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x800000, 0x7FFFFF]]).astype(np.uint32)
    for bits, kinds in ((few, (tl.bfloat16, tl.float32)), (many.view(np.float32), (tl.float32, tl.bfloat16))):
        words = bits.view(np.uint32 if bits.itemsize == 4 else np.uint16)
        small = 2 ** (7 if bits.itemsize == 2 else 23)
        magnitudes = words & words.dtype.type(2 ** (8 * bits.itemsize - 1) - 1)
        for chosen in (bits, bits[(magnitudes == 0) | (magnitudes >= small)]):
            found, expected = (
                convert(chosen, *kinds, None)
                for convert in (interpreter._convert_float, quick_interpreter._convert_any_float)
            )
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected)
