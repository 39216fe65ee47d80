"""Arguments that many functions take: shapes, dtypes and what is iterated over, with errors that name them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import TypeVar

import torch

T = TypeVar("T")


def sizes_of(shape: Sequence[int], name: str = "shape") -> tuple[int, ...]:
    """The sizes of a shape as ints, so that products of them do not wrap around as those of NumPy's integers do.

    Raises:
        TypeError: for what is no sequence of integers; an iterator would be used up.
        ValueError: for a negative size.
    """
    if torch.compiler.is_compiling():
        return tuple(shape)
    try:
        len(shape)
        # a symbolic size that becomes an int loses its symbol
        sizes = tuple([size if isinstance(size, torch.SymInt) else index(size) for size in shape])
    except TypeError:
        raise TypeError(f"{name} must hold integers, the sizes of a tensor, got {shape!r}") from None
    if min(sizes, default=0) < 0:
        raise ValueError(f"{name}={sizes} must hold the sizes of a tensor, none of them negative")
    return sizes


def integer(value: int, name: str) -> int:
    """``value`` as an int of Python's own; the error for what is no integer names the argument."""
    try:
        return index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} must be an integer") from None


def iterated(values: Iterable[T], name: str) -> Iterator[T]:
    """``iter(values)``; the error for what is not iterable names the argument."""
    try:
        return iter(values)
    except TypeError:
        raise TypeError(f"{name} has to be iterable, got a {type(values).__name__}") from None


def check_torch_dtype(dtype: object) -> None:
    """Raise TypeError for what is no ``torch.dtype``: torch takes a text in its place for the name of a device."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype has to be a torch.dtype, got {dtype!r}")
