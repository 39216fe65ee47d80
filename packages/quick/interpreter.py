"""Triton's interpreter without what it does for nothing: the same values by the same operations, in a fifth of time.

It looks for the functions of ``tl`` at every call of a kernel or a device function (`launches`), for the common
type of what has one type (`operators`, `functions`), builds a table of 18 dtypes for every number and a
shape of its own for every tensor, writes down the type of every argument, takes the upper halves of fp32 apart to make
bf16 of them, combines elements one at a time where ``tl.reduce`` is given a function, and computes sums and products of
integers again in 64 bits for an assertion that it makes only under ``debug``, an option that it never sets.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from quick.launches import install_launches

__all__ = ["install"]

_get_np_dtype = interpreter._get_np_dtype
_generic_reduce = interpreter.ReduceOps.generic_reduce
_tensor_init = tl.tensor.__init__
_block_type_init = tl.block_type.__init__
_operands = TritonSemantic.binary_op_type_checking_impl
_implicit_cvt = interpreter._implicit_cvt
_unwrap = tl.core._unwrap_if_constexpr
_any_to_tensor = TritonSemantic.to_tensor
_convert_any_float = interpreter._convert_float
_same_dtype = tl.dtype.__eq__
_np_dtypes: dict[str, np.dtype[Any]] = {}
_tensor_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
_shapes: dict[int, tuple[Any, Any, Any]] = {}
_arguments: dict[int, Any] = {}
_pointer_types: dict[torch.dtype, Any] = {}
# what two of one type have in common, whatever is done with them; a division makes fp16 and bf16 wider
_KEPT = {"int1", "int32", "uint32", "int64", "fp32", "fp64"}
# of these nothing is a constexpr
_PLAIN = {tl.tensor, tl.dtype, tl.pointer_type, int, float, bool, str, type(None)}
_TENSORS = {torch.Tensor, torch.nn.Parameter}
_block_shapes: dict[tuple[int, ...], tuple[Any, int, str]] = {}


def _np_dtype(dtype: Any) -> np.dtype[Any]:
    name = dtype.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _get_np_dtype(dtype)
    return _np_dtypes[name]


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    """Tensors of one shape share what says so."""
    shape = type.shape if type.is_block() else None
    found = _shapes.get(id(shape))
    if found is None:
        key = tuple(shape or ())
        if key not in _tensor_shapes:
            _tensor_init(self, handle, type)
            _tensor_shapes[key] = self.shape, self.numel
        found = _shapes[id(shape)] = (*_tensor_shapes[key], shape)  # itself as well, for no other to get its id
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel, _ = found


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
    """Operands of one type stay what they are."""
    if lhs.__class__ is rhs.__class__ is tl.tensor and lhs.dtype.name == rhs.dtype.name and lhs.dtype.name in _KEPT:
        return (lhs, rhs) if lhs.shape is rhs.shape else self.broadcast_impl_value(lhs, rhs)
    return _operands(self, lhs, rhs, *args, **options)


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


def _to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
    return x if x.__class__ is tl.tensor else _any_to_tensor(self, x, check_type)


def _convert_float(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
    """The upper half of fp32 is bf16, but for numbers so small that the interpreter makes others of them."""
    kinds = input_dtype.name, output_dtype.name
    if kinds == ("bf16", "fp32"):
        bits = input.view(np.uint16)
        if not ((bits & 0x7FFF) - np.uint16(1) < 0x7F).any():
            return bits.astype(np.uint32) << 16
    elif kinds == ("fp32", "bf16") and rounding_mode is None:
        bits = input.view(np.uint32)
        if not ((bits & 0x7FFFFFFF) - np.uint32(1) < 0x7FFFFF).any():
            return (bits >> 16).astype(np.uint16)
    return _convert_any_float(input, input_dtype, output_dtype, rounding_mode)


def _argument(arg: Any) -> Any:
    """A kernel's argument as a tensor of ``tl``: equal integers are one, and tensors of a dtype have one type."""
    if arg.__class__ is int:
        if arg not in _arguments:
            _arguments[arg] = _implicit_cvt(arg)
        return _arguments[arg]
    if arg.__class__ in _TENSORS and arg.dtype in _pointer_types:
        type = _pointer_types[arg.dtype]
        return tl.tensor(interpreter.TensorHandle(np.array([arg.data_ptr()], dtype=np.uint64), type), type)
    converted = _implicit_cvt(arg)
    if arg.__class__ in _TENSORS:
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
        install_launches()
        interpreter._get_np_dtype = _np_dtype
        interpreter.ReduceOps.generic_reduce = _reduce_lines
        TritonSemantic.binary_op_type_checking_impl = _operands_at_once
        TritonSemantic.to_tensor = _to_tensor
        interpreter._convert_float = _convert_float
        tl.tensor.__init__ = _init_tensor
        tl.block_type.__init__ = _init_block_type
        interpreter._implicit_cvt = _argument
        interpreter.TensorHandle.__init__ = _init_handle
        interpreter._validate_np_data_size = _fits
        tl.core._unwrap_if_constexpr = _unwrapped
        tl.dtype.__eq__ = _is_dtype
        options = interpreter.interpreter_builder.options
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
