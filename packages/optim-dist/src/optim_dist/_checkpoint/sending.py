"""Files from rank to rank, in pieces of bounded size, whatever the size of the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from optim_dist._checkpoint import manifest as manifests
from optim_dist._checkpoint.faults import described
from optim_dist._reduction.collectives import Communicator

PIECE = 2**24  # bytes; a rank holds one piece that it sends and one that it receives


class Copy(NamedTuple):
    """A file that one rank has and another one is to have."""

    name: str
    source: int
    target: int


class Courier:
    """Does one rank's part of copying files between folders that ranks do not share.

    Args:
        files: size and digest of each file, which arriving files must match.
        addresses: the global rank of every rank of the checkpoint.
        communicator: of all ranks, on the CPU.

    Attributes:
        problems: what went wrong on this rank; it goes on sending and receiving, because other ranks wait for it.
    """

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, Sequence[Any]],
        *,
        rank: int,
        addresses: Mapping[int, int],
        communicator: Communicator,
    ) -> None:
        self._folder, self._files = folder, files
        self._rank, self._addresses, self._communicator = rank, addresses, communicator
        self.problems: list[str] = []

    def copy(self, copies: Iterable[Copy]) -> None:
        """Do this rank's sends and receives; collective, with the same ``copies`` on every rank."""
        for each in _in_rounds(copies):
            out = next((copy for copy in each if copy.source == self._rank), None)
            into = next((copy for copy in each if copy.target == self._rank), None)
            arriving = self._exchanged(out, into)
            if into is not None:
                self._write(into, arriving)
            for _ in arriving:
                pass  # send the rest of ``out``, and receive what could not be written

    def _write(self, into: Copy, arriving: Iterator[bytearray]) -> None:
        try:
            found = manifests.write_durably(self._folder / into.name, partial(_write_each, arriving))
        except Exception as error:
            if self._communicator.is_lost:
                raise
            self.problems.append(described(self._rank, error))
        else:
            if found != list(self._files[into.name]):
                self.problems.append(
                    f"rank {self._rank}: {into.name} has not arrived as rank {into.source} had written it"
                )

    def _exchanged(self, out: Copy | None, into: Copy | None) -> Iterator[bytearray]:
        """Yield the pieces of ``into``, sending one of ``out`` for each, so that ranks do not wait in a circle."""
        num_out, num_into = (0 if copy is None else self._files[copy.name][0] for copy in (out, into))
        for start in range(0, max(num_out, num_into), PIECE):
            works = []
            received = bytearray(max(0, min(PIECE, num_into - start)))
            if into is not None and received:
                works.append(self._communicator.receive(_as_tensor(received), self._addresses[into.source]))
            if out is not None and start < num_out:
                piece = self._read(out, start, min(PIECE, num_out - start))
                works.append(self._communicator.send(_as_tensor(piece), self._addresses[out.target]))
            for work in works:
                work.wait()
            if received:
                yield received

    def _read(self, out: Copy, start: int, num_bytes: int) -> bytearray:
        piece = bytearray(num_bytes)
        try:
            with (self._folder / out.name).open("rb") as stream:
                stream.seek(start)
                stream.readinto(piece)
        except OSError as error:
            self.problems.append(described(self._rank, error))
        return piece


def sent_to_all(content: bytes, num_bytes: int, source: int, communicator: Communicator) -> bytearray:
    """``content`` of rank ``source``, as ``num_bytes`` bytes, on every rank; collective."""
    found = bytearray(num_bytes)
    if communicator.rank == source:
        found[: len(content)] = content
    for start in range(0, num_bytes, PIECE):
        piece = _as_tensor(found)[start : start + PIECE]
        sent = piece.to(communicator.device)
        communicator.broadcast_(sent, source)
        piece.copy_(sent)
    return found


def _in_rounds(copies: Iterable[Copy]) -> list[list[Copy]]:
    """Group copies into rounds, in each of which a rank sends at most one and receives at most one."""
    rounds: list[list[Copy]] = []
    busy: list[set[tuple[str, int]]] = []
    for copy in copies:
        ends = {("source", copy.source), ("target", copy.target)}
        number = next((number for number, taken in enumerate(busy) if not taken & ends), len(rounds))
        if number == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[number].append(copy)
        busy[number] |= ends
    return rounds


def _write_each(pieces: Iterable[bytearray], stream: IO[bytes]) -> None:
    for piece in pieces:
        stream.write(piece)


def _as_tensor(content: bytearray) -> torch.Tensor:
    return torch.frombuffer(content, dtype=torch.uint8)
