"""What fails on one rank, as an error on every rank: else the others wait for it until the timeout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from optim_dist._reduction.collectives import Communicator


@contextmanager
def raised_together(communicator: Communicator, what: str, rank: int | None = None) -> Iterator[list[str]]:
    """Problems that any rank appends to the list, or runs into, as one ``RuntimeError`` on all; collective at its end.

    Nothing collective belongs inside: a rank that has failed does not take part in it.

    Args:
        rank: what this one is called, if not as in ``communicator``.
    """
    problems: list[str] = []
    try:
        yield problems
    except Exception as error:
        found = described(communicator.rank if rank is None else rank, error)
        communicator.raise_together([*problems, found], what)
    communicator.raise_together(problems, what)


def described(rank: int, error: Exception) -> str:
    """Which rank ran into what."""
    return f"rank {rank}: {type(error).__name__}: {error}"
