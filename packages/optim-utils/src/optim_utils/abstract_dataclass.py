"""Abstract bases for configurations written as dataclasses.

A family of configurations has a base that nobody should build and children that are ordinary dataclasses::

    @dataclass(init=False)
    class OptimizerConfig(AbstractDataclass): ...      # abstract: Python refuses to build it

    @dataclass
    class AdamWConfig(OptimizerConfig):                # concrete: @dataclass writes its __init__
        lr: float = 1e-3

What makes a child concrete is an ``__init__``: written by hand, or by ``@dataclass``, even if it has no fields.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

__all__ = ["AbstractDataclass", "FrozenAbstractDataclass"]


class _Abstract(ABC):
    __slots__ = ()

    @abstractmethod
    def __init__(self, *args: object, **kwargs: object) -> None:
        """Do nothing, so that a hand-written ``__init__`` may call ``super().__init__()``."""


@dataclass(init=False)
class AbstractDataclass(_Abstract):
    """The base of mutable configurations: no fields, and an abstract ``__init__`` that does nothing."""

    __slots__ = ()


@dataclass(init=False, frozen=True)
class FrozenAbstractDataclass(_Abstract):
    """The base of ``@dataclass(frozen=True)`` configurations, which dataclasses refuse to derive from a mutable one."""

    __slots__ = ()
