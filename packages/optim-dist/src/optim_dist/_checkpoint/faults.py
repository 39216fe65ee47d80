"""Failures of one rank as errors on every rank: otherwise the others would wait for it until the timeout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from optim_dist._reduction.collectives import Communicator


@contextmanager
def raised_together(communicator: Communicator, what: str, rank: int | None = None) -> Iterator[list[str]]:
    """Raise problems that any rank appends to the list, or its exception, as one ``RuntimeError`` on all ranks.

    Collective at its end. Nothing collective belongs inside: a rank that has failed would not take part.

    Args:
        rank: this rank's number in messages, if not that of ``communicator``.
    """
    problems: list[str] = []
    try:
        yield problems
    except Exception as error:
        found = described(communicator.rank if rank is None else rank, error)
        communicator.raise_together([*problems, found], what)
    communicator.raise_together(problems, what)


def described(rank: int, error: Exception) -> str:
    """The text of an error, with the rank that ran into it."""
    return f"rank {rank}: {type(error).__name__}: {error}"
