"""What the tests' own interpreter does sooner is what Triton's does."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import numpy as np
from quick import interpreter as quick_interpreter
from quick import launches as quick_launches
from triton.runtime import interpreter

from optim_kernels._triton import tl, triton

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU"),
    pytest.mark.skipif(not hasattr(interpreter, "_LangPatchScope"), reason="this version's is left as it is"),
]


@triton.jit
def _mixed(a, b):
    """Neither associative nor commutative, so that the order shows."""
    return a * 0.5 - b


@triton.jit
def _reductions_kernel(x, out, AXIS: tl.constexpr, KEEP: tl.constexpr):
    lanes = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tile = _mixed(2.0 * tl.load(x + lanes), 0.0)  # x again, by a device function
    total = tl.reduce(tile, AXIS, _mixed, keep_dims=KEEP)
    tl.store(out + tl.arange(0, 8 if AXIS == 0 else 4), tl.reshape(total, [8 if AXIS == 0 else 4]))


@pytest.mark.parametrize("keep", [False, True], ids=["", "keep"])
@pytest.mark.parametrize("axis", [0, 1])
def test_reductions_are_the_same(axis: int, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 8)
    found = []
    for generic in (interpreter.ReduceOps.generic_reduce, quick_interpreter._generic_reduce):
        monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", generic)
        found.append(torch.full((8 if axis == 0 else 4,), torch.nan))
        _reductions_kernel[(1,)](x, found[-1], axis, keep)
    assert torch.equal(*found)
    expected = x.select(axis, 0)
    for i in range(1, x.shape[axis]):
        expected = expected * 0.5 - x.select(axis, i)
    torch.testing.assert_close(found[0], expected)


def test_tl_is_left_as_it_was_found() -> None:
    """Also by a kernel whose device function was called, and by one that failed in it."""
    before = {name: getattr(tl, name) for name in dir(tl)}
    _reductions_kernel[(1,)](torch.randn(4, 8), torch.empty(8), 0, False)
    with pytest.raises(Exception, match="axis 5 out of bounds"):
        _reductions_kernel[(1,)](torch.randn(4, 8), torch.empty(4), 5, False)
    assert {name: getattr(tl, name) for name in dir(tl)} == before


@pytest.mark.parametrize("package", [tl, tl.core, tl.tensor, tl.math], ids=str)
def test_the_same_is_patched(package: Any) -> None:
    before = dict(inspect.getmembers(package))
    found = []
    for patch in (interpreter._patch_builtin, quick_launches._patch_builtin):
        scope = interpreter._LangPatchScope()
        patch(package, interpreter.interpreter_builder, scope)
        patch(package, interpreter.interpreter_builder, scope)  # again, and nothing is left to patch
        found.append([name for _, name, _ in scope._changes])
        scope.restore()
        assert dict(inspect.getmembers(package)) == before
    assert found[0] == found[1]
    # not of those that were found: kernels of earlier tests may have left some patched
    assert len(quick_launches.builtins_of(package)) > 10


@pytest.mark.parametrize("dtype", [tl.int1, tl.bfloat16, tl.float8e5, tl.uint32, tl.pointer_type(tl.int8)], ids=str)
def test_dtypes_are_the_same(dtype: tl.dtype) -> None:
    for each in (dtype, tl.block_type(dtype, [2])):
        assert interpreter._get_np_dtype(each) == quick_interpreter._get_np_dtype(each)
        assert interpreter._get_np_dtype(each) == quick_interpreter._get_np_dtype(each)


@pytest.mark.parametrize("shape", [[1], [4, 8], tl.core.tuple([4, 8]), [tl.constexpr(16)]], ids=str)
@pytest.mark.parametrize("dtype", [tl.bfloat16, tl.pointer_type(tl.int8)], ids=str)
def test_tensors_and_their_types_are_the_same(dtype: tl.dtype, shape: Any) -> None:
    """At the first of a shape, and at those that share what it has left."""
    twin = tl.block_type.__new__(tl.block_type)
    quick_interpreter._block_type_init(twin, dtype, shape)
    for _ in range(2):
        block = tl.block_type(dtype, shape)
        with pytest.raises(AssertionError):
            tl.block_type(dtype, tuple(shape))
        assert repr(vars(block)) == repr({name: vars(twin)[name] for name in vars(block)})
        assert vars(block).keys() == vars(twin).keys()
        assert block == twin
        for each in (block, dtype):
            found, expected = tl.tensor(None, each), tl.tensor.__new__(tl.tensor)
            quick_interpreter._tensor_init(expected, None, each)
            assert vars(found).keys() == vars(expected).keys()
            assert repr(found.shape) == repr(expected.shape)
            assert repr(found.numel) == repr(expected.numel)
            assert (found.type, found.dtype) == (expected.type, expected.dtype)


@triton.jit
def _integers_kernel(x, out):
    one = tl.load(x)
    tl.store(out, one + one)
    tl.store(out + 1, one * one)
    tl.store(out + 2, one - 2 * one)


@pytest.mark.parametrize("sanitize", [False, True])
def test_no_overflow_of_integers_was_found_before_either(sanitize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter computes whether there is one, and passes over it."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    assert not builder.options.sanitize_overflow
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=sanitize))
    largest = torch.tensor([2**31 - 1], dtype=torch.int32)
    out = torch.empty(3, dtype=torch.int32)
    with np.errstate(over="ignore"):
        _integers_kernel[(1,)](largest, out)
    assert out.tolist() == [-2, 1, -(2**31) + 1]
