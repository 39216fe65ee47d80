"""Operators of Triton's interpreter at once, where there is nothing to convert: the same values by the same operations.

Most of what a kernel computes are addresses, of single numbers, for which numpy takes a microsecond and the interpreter
twenty. It passes a dozen functions which look for the common type of what has one type, and writes numbers out to the
shape of what they are combined with before numpy does that by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

__all__ = ["is_negative_zero", "made", "quick_operator", "type_of"]

_Array = np.ndarray[Any, Any]
_Handle, _tensor, _constexpr, _pointer = interpreter.TensorHandle, tl.tensor, tl.constexpr, tl.pointer_type

_FLOATS = {"fp32", "fp64"}
_INTEGERS = {"int32", "int64", "uint32", "uint64"}
# two dtypes of which one holds all that the other does
_WIDER = {
    **dict.fromkeys([("int32", "int64"), ("int64", "int32")], tl.int64),
    **dict.fromkeys([("fp32", "fp64"), ("fp64", "fp32")], tl.float64),
}
# a comparison makes numbers tensors of 32 bits first, which does nothing to those that become these
_COMPARED = {"fp32", "int32", "int64"}
_RANGES = {"int32": (-(2**31), 2**31), "int64": (-(2**31), 2**31), "uint32": (0, 2**32), "uint64": (0, 2**32)}
# what there is to convert of Python's numbers, which may be too large for the dtype, or of another kind
_CONVERTED = object()

_numbers: dict[tuple[str, Any, Any], Any] = {}
_types: dict[tuple[str, tuple[int, ...]], Any] = {}


def _quotient(lhs: _Array, rhs: _Array) -> _Array:
    """Rounded towards zero, as ``InterpreterBuilder.create_idiv``."""
    return (lhs - np.fmod(lhs, rhs)) // rhs


_ARITHMETIC: dict[str, tuple[Callable[..., _Array], set[str]]] = {
    "add": (np.add, _FLOATS | _INTEGERS),
    "sub": (np.subtract, _FLOATS | _INTEGERS),
    "mul": (np.multiply, _FLOATS | _INTEGERS),
    "truediv": (np.divide, _FLOATS),
    "floordiv": (_quotient, _INTEGERS),
    "mod": (np.fmod, _FLOATS | _INTEGERS),
    "and": (np.bitwise_and, _INTEGERS | {"int1"}),
    "or": (np.bitwise_or, _INTEGERS | {"int1"}),
    "xor": (np.bitwise_xor, _INTEGERS | {"int1"}),
    "lshift": (np.left_shift, _INTEGERS),
    "rshift": (np.right_shift, _INTEGERS),
}
_SHIFTS = {np.left_shift, np.right_shift}
_COMPARISONS: dict[str, Callable[..., _Array]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


def quick_operator(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    """A method of ``tl.tensor``, by its name, that asks the interpreter's only where there is something to convert."""
    plain = name[2:-2] if name.startswith("__") else ""
    if plain in _ARITHMETIC:
        return _forward(*_ARITHMETIC[plain], None, operator, takes_pointers=plain == "add")
    if plain in _COMPARISONS:
        return _forward(_COMPARISONS[plain], _FLOATS | _INTEGERS | {"int1"}, tl.int1, operator)
    if plain[:1] == "r" and plain[1:] in _ARITHMETIC:
        return _backward(*_ARITHMETIC[plain[1:]], operator)
    return operator


def _forward(
    function: Callable[..., _Array],
    dtypes: set[str],
    result: Any,
    operator: Callable[..., Any],
    takes_pointers: bool = False,
) -> Callable[..., Any]:
    """With the tensor at the left; ``result`` is another dtype than that of the operands, or None."""

    def call(lhs: Any, rhs: Any) -> Any:
        dtype = lhs.dtype
        name = dtype.name
        if rhs.__class__ is _tensor:
            other = rhs.dtype.name
            if name == other and name in dtypes:
                data, kept = function(lhs.handle.data, rhs.handle.data), lhs.handle.dtype.scalar
                if data.itemsize > lhs.handle.data.itemsize:  # of unsigned numbers that a shift has made signed
                    return operator(lhs, rhs)
            elif (name, other) in _WIDER and name in dtypes:  # numpy makes the other wider, too
                kept = dtype = _WIDER[name, other]
                data = function(lhs.handle.data, rhs.handle.data)
            elif takes_pointers and dtype.__class__ is _pointer and other in ("int32", "int64"):
                data, kept = lhs.handle.data + _width(dtype) * rhs.handle.data.astype(np.uint64), lhs.handle.dtype
            else:
                return operator(lhs, rhs)
            if result is None and dtype is lhs.dtype and (lhs.shape is rhs.shape or not rhs.shape.values):
                return _made_like(lhs, data, kept)
            return made(data, kept, type_of(dtype if result is None else result, data, lhs, rhs))
        if takes_pointers and dtype.__class__ is _pointer:
            number = _number(rhs, "int32")
            if number is not _CONVERTED:
                return _made_like(lhs, lhs.handle.data + _width(dtype) * number.astype(np.uint64), lhs.handle.dtype)
        elif name in dtypes and (result is None or name in _COMPARED):
            number = _number(rhs, name)
            if number is not _CONVERTED and (function not in _SHIFTS or 0 <= number[0] < 32):
                data = function(lhs.handle.data, number)
                if result is None:
                    return _made_like(lhs, data, lhs.handle.dtype.scalar)
                return made(data, lhs.handle.dtype.scalar, type_of(result, data, lhs))
        return operator(lhs, rhs)

    return call


def _backward(function: Callable[..., _Array], dtypes: set[str], operator: Callable[..., Any]) -> Callable[..., Any]:
    """With the tensor at the right, and a number at the left."""

    def call(rhs: Any, lhs: Any) -> Any:
        dtype = rhs.dtype
        number = _number(lhs, dtype.name) if dtype.name in dtypes else _CONVERTED
        if number is _CONVERTED:
            return operator(rhs, lhs)
        return _made_like(rhs, function(number, rhs.handle.data), dtype)

    return call


def _number(number: Any, dtype: str) -> Any:
    """A number of Python as an element of the dtype, if it becomes one whatever it is combined with."""
    if number.__class__ is _constexpr:
        number = number.value
    if (number.__class__ is not int and number.__class__ is not float) or is_negative_zero(number):
        return _CONVERTED
    key = dtype, number.__class__, number
    found = _numbers.get(key)
    if found is None:
        found = _numbers[key] = _converted(number, dtype)
    return found


def is_negative_zero(number: Any) -> bool:
    """Whether it is one, which equals zero, and of which some versions of the interpreter forget the sign."""
    return not number and math.copysign(1, number) < 0


def _converted(number: Any, dtype: str) -> Any:
    if dtype in _RANGES and number.__class__ is int:
        first, end = _RANGES[dtype]
        return np.array([number], dtype=dtype) if first <= number < end else _CONVERTED
    if dtype == "fp32" and (number == 0 or 2.0**-126 <= abs(number) <= 2.0**127):
        return np.array([number], dtype=np.float32)
    if dtype == "fp64" and number == number:
        return np.array([number], dtype=np.float64)
    return _CONVERTED


def _width(pointer: Any) -> int:
    return max(1, pointer.element_ty.primitive_bitwidth // 8)


def type_of(dtype: Any, data: _Array, *operands: Any) -> Any:
    """That of a result: a number's if all operands are numbers, else that of a tile."""
    if not any(operand.shape.values for operand in operands):
        return dtype
    key = dtype.name, data.shape
    found = _types.get(key)
    if found is None or found.element_ty is not dtype:
        found = _types[key] = tl.block_type(dtype, list(data.shape))
    return found


def made(data: _Array, dtype: Any, type: Any) -> Any:
    """A tensor of ``tl``."""
    handle = _Handle.__new__(_Handle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    return _tensor(handle, type)


def _made_like(operand: Any, data: _Array, dtype: Any) -> Any:
    """A tensor of the type of another, which says all about it."""
    handle, tensor = _Handle.__new__(_Handle), _tensor.__new__(_tensor)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    tensor.handle, tensor.type, tensor.dtype = handle, operand.type, operand.dtype
    tensor.shape, tensor.numel = operand.shape, operand.numel
    return tensor
