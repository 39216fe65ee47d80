"""Names and sizes of element types, without importing torch."""

from __future__ import annotations

from collections.abc import Collection

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
# integers that torch stores and multiplies, but neither adds nor compares
_UNORDERED = ("uint16", "uint32", "uint64")

# real numbers that torch divides
_DIVIDED = ("float16", "bfloat16", "float32", "float64")


def dtype_name(dtype: object) -> str:
    """torch's name of an element type given as ``torch.dtype`` or as text, e.g. "bfloat16"."""
    name = str(dtype).removeprefix("torch.")
    name = _ALIAS.get(name, name)
    if name not in _ITEMSIZE:
        raise UnsupportedError(f"dtype {dtype!r} is unknown here; known are {sorted(_ITEMSIZE)}")
    return name


def itemsize(name: str) -> int:
    """Bytes of an element."""
    return _ITEMSIZE[name]


def why_not_combined(op: str, name: str) -> str | None:
    """Why an operation cannot combine contributions of this type, None if it can."""
    if name.startswith("float4"):
        return f"{name} has no arithmetic; convert to a type that has"
    # torch's any and all leave a sum and a product of bool pending: its sums and maxima are "or", the others "and"
    if op == "avg" and name == "bool":
        return "an average of bool is no bool; convert to a type that can be divided"
    if op != "product" and name in _UNORDERED:
        return f"torch neither adds nor compares {name}; convert to a signed type, or view sums as one"
    if op in ("min", "max") and name.startswith("complex"):
        return f"{name} has no order; min and max need real numbers"
    if op == "avg" and not name.startswith(("float", "bfloat", "complex")):
        return f"an average of {name} is no {name}; reduce with sum and divide yourself"
    return None


def check_started(ops: Collection[str], name: str, *, divide: bool = False) -> None:
    """Refuse pending reductions of a target that this element type cannot start, or not finish with the same value.

    To start one, one rank gets the value and the others the identity: negative zeros for a sum, ones for a product, the
    type's extremum for min and max. An average has no identity; every rank gets the value. With ``divide`` every rank
    gets an equal part of a sum, which is rounded.

    Raises:
        UnsupportedError: names the operation and the type.
    """
    for op in sorted(ops):
        reason = why_not_combined(op, name)
        if op == "sum" and name == "float8_e8m0fnu":
            reason = f"{name} has no zero; convert first"
        elif op == "avg" and (name == "float64" or name.startswith("complex")):
            reason = f"averaging equal {name} values rounds, there is no wider type to add them in; use sum"
        elif op == "product" and name.startswith("complex"):
            reason = (
                f"times one, {name} numbers with an infinite part get a NaN in the other, and -0 becomes 0; use sum"
            )
        elif op == "sum" and divide and name not in _DIVIDED:
            reason = f'partial_init="divide" is for {", ".join(_DIVIDED)}; leave it out'
        if reason:
            raise UnsupportedError(f"the target cannot start a pending {op} of {name}: {reason}")
