"""Triton's interpreter without what it does for nothing: the same values by the same operations, thrice as fast.

It looks through all of ``tl`` at every call of a kernel or a device function, builds a table of 18 dtypes for every
number and a shape of its own for every tensor, writes down the type of every argument, looks for the common type of
what has one type, combines elements one at a time where ``tl.reduce`` is given a function, and computes sums and
products of integers again in 64 bits for an assertion that it makes only under ``debug``, an option that it never sets.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

__all__ = ["install"]

_patch_lang = interpreter._patch_lang
_patch_builtins = interpreter._patch_builtin
_get_np_dtype = interpreter._get_np_dtype
_generic_reduce = interpreter.ReduceOps.generic_reduce
_tensor_init = tl.tensor.__init__
_block_type_init = tl.block_type.__init__
_operands = TritonSemantic.binary_op_type_checking_impl
_implicit_cvt = interpreter._implicit_cvt
_unwrap = tl.core._unwrap_if_constexpr
_same_dtype = tl.dtype.__eq__
_builtins: dict[Any, list[str]] = {}
_langs: dict[Any, list[Any]] = {}
_np_dtypes: dict[str, np.dtype[Any]] = {}
_tensor_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
_integers: dict[int, Any] = {}
_arguments: dict[int, Any] = {}
_pointer_types: dict[torch.dtype, Any] = {}
# what two of one type have in common, whatever is done with them; a division makes fp16 and bf16 wider
_KEPT = {"int1", "int32", "uint32", "int64", "fp32", "fp64"}
_OFFSETS = {"int32", "int64"}
# of these nothing is a constexpr
_PLAIN = {tl.tensor, tl.dtype, tl.pointer_type, int, float, bool, str, type(None)}
_block_shapes: dict[tuple[int, ...], tuple[Any, int, str]] = {}


def _patch_lang_once(fn: Any) -> Any:
    """A device function that a kernel calls finds ``tl`` as the kernel has patched it: nothing is left to patch."""
    if fn not in _langs:
        modules = filter(inspect.ismodule, fn.__globals__.values())
        _langs[fn] = [module for module in modules if module in (tl, tl.core)]
    if any(tl.core.is_builtin(lang.load) for lang in _langs[fn]):
        return _patch_lang(fn)
    return interpreter._LangPatchScope()


def _builtins_of(pkg: Any) -> list[str]:
    if pkg not in _builtins:
        _builtins[pkg] = [name for name, member in inspect.getmembers(pkg) if tl.core.is_builtin(member)]
    return _builtins[pkg]


def _patch_builtins_by_name(pkg: Any, builder: Any, scope: Any) -> None:
    """By names that were looked for once; what is patched already is no builtin now."""
    semantic = TritonSemantic(builder)
    for name in _builtins_of(pkg):
        member = getattr(pkg, name)
        if tl.core.is_builtin(member):
            scope.set_attr(pkg, name, _called_by(semantic, getattr(member, "__wrapped__", member)))


def _called_by(semantic: Any, member: Any) -> Any:
    """What is called so needs no test that it was."""

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    return call


def _np_dtype(dtype: Any) -> np.dtype[Any]:
    name = dtype.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _get_np_dtype(dtype)
    return _np_dtypes[name]


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    """Tensors of one shape share what says so."""
    shape = tuple(type.shape) if type.is_block() else ()
    if shape not in _tensor_shapes:
        _tensor_init(self, handle, type)
        _tensor_shapes[shape] = self.shape, self.numel
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _tensor_shapes[shape]


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Types of one shape share it; Python's own tuples are refused, as before."""
    key = tuple(shape)
    if key not in _block_shapes or isinstance(shape, tuple):
        _block_type_init(self, element_ty, shape)
        _block_shapes[key] = self.shape, self.numel, str(self.shape)
    self.element_ty = element_ty
    self.shape, self.numel, written = _block_shapes[key]
    self.name = f"<{written}, {element_ty}>"


def _operands_at_once(self: Any, lhs: Any, rhs: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
    """Operands of one type stay what they are, and a number beside integers has their type.

    Most operations of a kernel are such, as they compute addresses. A pointer, of which an operation that takes one
    says so, stays as well, and so does its offset.
    """
    if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor):
        name, other = lhs.dtype.name, rhs.dtype.name
        if name == other and name in _KEPT:
            return (lhs, rhs) if lhs.shape is rhs.shape else self.broadcast_impl_value(lhs, rhs)
        if other in _OFFSETS and args[:1] == (True,) and isinstance(lhs.dtype, tl.pointer_type):
            return self.broadcast_impl_value(lhs, rhs)
    elif _are_integers(lhs, rhs) or (_is_integer(rhs) and args[:1] == (True,) and _is_pointer(lhs)):
        return self.broadcast_impl_value(lhs, _integer(self, rhs))
    elif _are_integers(rhs, lhs):
        return self.broadcast_impl_value(_integer(self, lhs), rhs)
    return _operands(self, lhs, rhs, *args, **options)


def _is_pointer(tensor: Any) -> bool:
    return isinstance(tensor, tl.tensor) and isinstance(tensor.dtype, tl.pointer_type)


def _is_integer(number: Any) -> bool:
    return number.__class__ is int and -(2**31) <= number < 2**31


def _are_integers(tensor: Any, number: Any) -> bool:
    return _is_integer(number) and isinstance(tensor, tl.tensor) and tensor.dtype.name == "int32"


def _integer(semantic: Any, number: int) -> Any:
    if number not in _integers:
        _integers[number] = semantic.scalar_constant(number, tl.int32)
    return _integers[number]


def _init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    """Refuses data of another size than its type says, as before."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if not _fits(data, dtype):
        self.__post_init__()


def _fits(data: Any, dtype: Any) -> bool:
    return isinstance(dtype, tl.pointer_type) or data.itemsize * 8 <= max(dtype.primitive_bitwidth, 8)


def _unwrapped(o: Any) -> Any:
    return o if o.__class__ in _PLAIN else _unwrap(o)


def _is_dtype(self: Any, other: Any) -> bool:
    return self is other or _same_dtype(self, other)


def _argument(arg: Any) -> Any:
    """A kernel's argument as a tensor of ``tl``: equal integers are one, and tensors of a dtype have one type."""
    if arg.__class__ is int:
        if arg not in _arguments:
            _arguments[arg] = _implicit_cvt(arg)
        return _arguments[arg]
    if arg.__class__ is torch.Tensor and arg.dtype in _pointer_types:
        type = _pointer_types[arg.dtype]
        return tl.tensor(interpreter.TensorHandle(np.array([arg.data_ptr()], dtype=np.uint64), type), type)
    converted = _implicit_cvt(arg)
    if arg.__class__ is torch.Tensor:
        _pointer_types[arg.dtype] = converted.type
    return converted


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
    """From here on, where kernels are interpreted.

    Only on versions whose interpreter leaves ``tl`` as it found it, which are those from 3.6 on.
    """
    if os.environ.get("TRITON_INTERPRET") == "1" and hasattr(interpreter, "_LangPatchScope"):
        # now: device functions leave most of ``tl.core`` patched, and kernels its reductions alone as they were
        for pkg in (tl, tl.core, tl.tensor, tl.math):
            _builtins_of(pkg)
        interpreter._patch_lang = _patch_lang_once
        interpreter._patch_builtin = _patch_builtins_by_name
        interpreter._get_np_dtype = _np_dtype
        interpreter.ReduceOps.generic_reduce = _reduce_lines
        TritonSemantic.binary_op_type_checking_impl = _operands_at_once
        tl.tensor.__init__ = _init_tensor
        tl.block_type.__init__ = _init_block_type
        interpreter._implicit_cvt = _argument
        interpreter.TensorHandle.__init__ = _init_handle
        interpreter._validate_np_data_size = _fits
        tl.core._unwrap_if_constexpr = _unwrapped
        tl.dtype.__eq__ = _is_dtype
        options = interpreter.interpreter_builder.options
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
