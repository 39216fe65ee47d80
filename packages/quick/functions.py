"""Functions of ``tl`` at once, where there is nothing to convert: loads, choices, casts and new axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from quick.operators import is_negative_zero, made, type_of

__all__ = ["quick_function", "quick_method"]

_tensor, _constexpr, _pointer = tl.tensor, tl.constexpr, tl.pointer_type
_load = interpreter._interpreter.load

_INTEGERS = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
_FLOATS = {"fp32", "fp64"}
# between these a cast is numpy's; of others the interpreter has its own, or goes another way
_CAST = _INTEGERS | _FLOATS
_CHOSEN = _CAST | {"int1", "fp16", "bf16"}
# what says nothing where there is no cache
_OPTIONS: dict[str, set[Any]] = {
    "cache_modifier": {"", ".ca", ".cg", ".cv"},
    "eviction_policy": {"", "evict_first", "evict_last"},
    "volatile": {False, True},
}
_ALL = slice(None)
_TARGETS = {tl.dtype, tl.pointer_type}

_ones: dict[tuple[int, ...], Any] = {}
_zeros: dict[tuple[Any, tuple[int, ...]], Any] = {}


def quick_function(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ``tl``, by its name, that asks the interpreter's only where there is something to convert."""
    return {"load": _loading, "where": _choosing, "cast": _casting}.get(name, _as_it_is)(function)


def quick_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """As a method of ``tl.tensor``."""
    return {"to": _casting, "__getitem__": _indexing}.get(name, _as_it_is)(method)


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    def call(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
        kind = pointer.dtype if pointer.__class__ is _tensor else None
        if kind.__class__ is not _pointer or not _say_nothing(options) or not _is_zero(other):
            return load(pointer, mask, other, **options)
        dtype, data = kind.element_ty, pointer.handle.data
        if dtype.name == "int1" or dtype.is_block() or (mask is None and other is not None):
            return load(pointer, mask, other, **options)
        if mask is None:
            taken = _ones.get(data.shape)
            if taken is None:
                taken = _ones[data.shape] = np.ones(data.shape, dtype=bool)
        elif mask.__class__ is _tensor and mask.shape is pointer.shape and mask.dtype.name == "int1":
            taken = mask.handle.data
        else:
            return load(pointer, mask, other, **options)
        number = interpreter._get_np_dtype(dtype)
        key = number, data.shape
        zeros = _zeros.get(key)
        if zeros is None:
            zeros = _zeros[key] = np.zeros(data.shape, dtype=number)
        return made(_load(data, taken, zeros, number), dtype, type_of(dtype, data, pointer))

    return call


def _say_nothing(options: dict[str, Any]) -> bool:
    return all(
        (value.__class__ is str or value.__class__ is bool) and value in _OPTIONS.get(name, ())
        for name, value in options.items()
    )


def _is_zero(other: Any) -> bool:
    if other.__class__ is _constexpr:
        other = other.value
    if other.__class__ is int or other.__class__ is float:
        return bool(other == 0) and not is_negative_zero(other)
    return other is None


def _choosing(where: Callable[..., Any]) -> Callable[..., Any]:
    def call(condition: Any, x: Any, y: Any) -> Any:
        if (
            x.__class__ is y.__class__ is condition.__class__ is _tensor
            and condition.dtype.name == "int1"
            and x.dtype.name in _CHOSEN
            and x.dtype.name == y.dtype.name
        ):
            data = np.where(condition.handle.data, x.handle.data, y.handle.data)
            return made(data, y.handle.dtype.scalar, type_of(x.dtype, data, condition, x, y))
        return where(condition, x, y)

    return call


def _casting(cast: Callable[..., Any]) -> Callable[..., Any]:
    def call(input: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        target = dtype.value if dtype.__class__ is _constexpr else dtype
        if input.__class__ is _tensor and target.__class__ in _TARGETS and not args and not kwargs:
            name = input.dtype.name
            if target.__class__ is _pointer:
                if name == "int64":
                    data = input.handle.data.view(np.uint64)
                    return made(data, target, type_of(target, data, input))
                return cast(input, dtype)
            if name == target.name:
                return input
            if target.name in _CAST and (name in _CAST or name == "int1"):
                data = input.handle.data.astype(interpreter._get_np_dtype(target))
                return made(data, target, type_of(target, data, input))
        return cast(input, dtype, *args, **kwargs)

    return call


def _indexing(index: Callable[..., Any]) -> Callable[..., Any]:
    def call(input: Any, slices: Any) -> Any:
        if slices.__class__ is tuple and input.shape.values:
            axes = sum(1 for each in slices if each is not None)
            if axes == len(input.shape.values) and all(each is None or each == _ALL for each in slices):
                data = input.handle.data[slices]
                return made(data, input.handle.dtype.scalar, type_of(input.dtype, data, input))
        return index(input, slices)

    return call
