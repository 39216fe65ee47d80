"""Attributes that are computed when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Owner = TypeVar("Owner")
Value = TypeVar("Value")


class lazy(Generic[Owner, Value]):
    """A method without arguments as an attribute: computed once, then found in the instance's ``__dict__``.

    It is ``functools.cached_property`` without the lock, which costs more than computing many of the values; so two
    threads may both compute a value. From python>=3.12 on, ``cached_property`` has no lock and can replace it.
    """

    def __init__(self, compute: Callable[[Owner], Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type[Owner], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type[Owner]) -> lazy[Owner, Value]: ...

    @overload
    def __get__(self, instance: Owner, owner: type[Owner]) -> Value: ...

    def __get__(self, instance: Any, owner: object) -> Any:
        if instance is None:
            return self
        found = instance.__dict__[self._name] = self._compute(instance)
        return found
