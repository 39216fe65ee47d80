"""Names and sizes of element types, without importing torch."""

from __future__ import annotations

from typing import Any

from optim_redist.errors import UnsupportedError

_ITEMSIZE = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "complex32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
_ALIAS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
    "fp8": "float8_e4m3fn",
    "long": "int64",
    "int": "int32",
}


def dtype_name(dtype: Any) -> str:
    """torch's name of an element type given as ``torch.dtype`` or as text, e.g. "bfloat16"."""
    name = str(dtype).removeprefix("torch.")
    name = _ALIAS.get(name, name)
    if name not in _ITEMSIZE:
        raise UnsupportedError(f"dtype {dtype!r} is unknown here; known are {sorted(_ITEMSIZE)}")
    return name


def itemsize(name: str) -> int:
    """Bytes of an element."""
    return _ITEMSIZE[name]


def is_floating(name: str) -> bool:
    """Whether an average of such elements is of the same type."""
    return name.startswith(("float", "bfloat", "complex"))
