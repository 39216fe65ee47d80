"""The errors of this package, one tree under ``ValueError``.

RedistError
├── LayoutError            a layout contradicts itself, its shape or the given tensor
├── NotRepresentableError  the ownership is fine, but the asked-for notation cannot say it
├── PlanInfeasibleError    no plan fits the memory limit; carries the certificate
├── PlanMismatchError      ranks hold different plans
└── UnsupportedError       this package does not do that; the text says what to do instead
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


class RedistError(ValueError):
    """Anything this package refuses; the notebook's classes say so in a plain ``ValueError``."""


class LayoutError(RedistError):
    """A layout contradicts itself, the shape it is used with, or the given tensor."""


class NotRepresentableError(RedistError):
    """The ownership cannot be written in the notation that was asked for."""


class PlanInfeasibleError(RedistError):
    """No plan fits under the memory limit.

    Attributes:
        rank: the rank that needs most.
        terms: what that rank needs, in bytes, keyed by name.
        limit: the limit that was given, in bytes.
        proven: True if no method at all can stay under the limit, False if only ours cannot.
    """

    def __init__(self, rank: int, terms: dict[str, int], limit: int, *, proven: bool) -> None:
        self.rank, self.terms, self.limit, self.proven = rank, dict(terms), limit, proven
        parts = " + ".join(f"{name} {size}" for name, size in terms.items())
        verdict = "no method can stay below it" if proven else "none of the planners here stays below it"
        super().__init__(
            f"memory_limit={limit} bytes is too small: rank {rank} needs {parts} = {sum(terms.values())} bytes; "
            f"{verdict}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # unpickling makes the message again from these arguments
        return partial(PlanInfeasibleError, proven=self.proven), (self.rank, self.terms, self.limit), vars(self)


class PlanMismatchError(RedistError):
    """Ranks that should run one plan hold different ones."""


class UnsupportedError(RedistError):
    """Not done here; the text says what to do instead."""


@contextmanager
def noting(where: Callable[..., str], *arguments: object) -> Iterator[None]:
    """Add a note, ``where(*arguments)``, to errors of torch and its backends, which know nothing of plans."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(where(*arguments))
        raise
