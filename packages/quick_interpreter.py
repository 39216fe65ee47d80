"""Triton's interpreter without what it repeats for nothing: the same values by the same operations, in half the time.

It looks through all of ``tl`` at every call of a device function, builds a table of 18 dtypes for every number, and
combines elements one at a time where ``tl.reduce`` is given a function.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

__all__ = ["install"]

_patch_lang = interpreter._patch_lang
_get_np_dtype = interpreter._get_np_dtype
_generic_reduce = interpreter.ReduceOps.generic_reduce
_langs: dict[Any, list[Any]] = {}
_np_dtypes: dict[str, np.dtype[Any]] = {}


def _patch_lang_once(fn: Any) -> Any:
    """A device function that a kernel calls finds ``tl`` as the kernel has patched it: nothing is left to patch."""
    if fn not in _langs:
        modules = filter(inspect.ismodule, fn.__globals__.values())
        _langs[fn] = [module for module in modules if module in (tl, tl.core)]
    if any(tl.core.is_builtin(lang.load) for lang in _langs[fn]):
        return _patch_lang(fn)
    return interpreter._LangPatchScope()


def _np_dtype(dtype: Any) -> np.dtype[Any]:
    name = dtype.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _get_np_dtype(dtype)
    return _np_dtypes[name]


def _reduce_lines(self: Any, input: tuple[Any, ...]) -> list[Any]:
    """Along an axis in its order as before, but all lines of a tile at once."""
    if self.axis is None or len(input[0].shape) == 1:
        return _generic_reduce(self, input)

    def entries(i: int) -> list[Any]:
        return [self.to_tensor(x.handle.data.take(i, self.axis), x.dtype) for x in input]

    total = entries(0)
    for i in range(1, input[0].handle.data.shape[self.axis]):
        combined = self.combine_fn.fn(*total, *entries(i))
        combined = combined if isinstance(combined, tuple) else (combined,)
        total = [self.to_tensor(y.handle.data, x.dtype) for x, y in zip(input, combined, strict=True)]
    if self.keep_dims:
        total = [self.to_tensor(np.expand_dims(y.handle.data, self.axis), y.dtype) for y in total]
    return total


def install() -> None:
    """From here on; on versions whose interpreter leaves ``tl`` as it found it, which are those from 3.6 on."""
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _patch_lang_once
        interpreter._get_np_dtype = _np_dtype
        interpreter.ReduceOps.generic_reduce = _reduce_lines
