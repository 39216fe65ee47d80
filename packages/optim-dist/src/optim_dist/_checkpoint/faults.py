"""Failures of one rank as errors on every rank: otherwise the others would wait for it until the timeout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from optim_dist._checkpoint.manifest import CheckpointError
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


@dataclass
class Problems:
    """What ``rank`` finds wrong with a checkpoint, collected until ranks tell each other.

    Attributes:
        found: the texts.
        cause: the exception that the latest of them came from.
    """

    rank: int
    found: list[str] = field(default_factory=list)
    cause: Exception | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note an exception of any kind instead of raising it, as the other ranks wait for what this one has found."""
        try:
            yield
        except Exception as error:
            self.found += error.problems if isinstance(error, CheckpointError) else [described(self.rank, error)]
            self.cause = error

    def raise_with(self, by_rank: Iterable[Sequence[str]], path: Path) -> None:
        """Raise ``CheckpointError`` with what all ranks have found, if any has found something.

        Args:
            by_rank: the texts of every rank, this one included.
        """
        if found := list(dict.fromkeys(text for texts in by_rank for text in texts)):
            raise CheckpointError(path, found) from self.cause


def described(rank: int, error: Exception) -> str:
    """The text of an error, with the rank that ran into it."""
    return f"rank {rank}: {type(error).__name__}: {error}"
