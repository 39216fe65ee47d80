"""What a plan is made of: transfers between two ranks, gathered into phases that run as one exchange each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from optim_redist.boxes import Box, volume


@dataclass(frozen=True)
class Transfer:
    """One box of elements from one rank to another, or, with ``sender == receiver``, from source to target.

    Attributes:
        box: index sets of the global tensor, and of the kept contributions behind them.
        read: where the sender finds it: in its source tensor or in the part of its target that an earlier phase filled.
        contribution: which of the pending contributions it carries; -1 for finished values.
    """

    sender: int
    receiver: int
    box: Box
    read: Literal["src", "dst"] = "src"
    contribution: int = -1

    @property
    def num_elements(self) -> int:
        return volume(self.box)


@dataclass(frozen=True)
class Phase:
    """Transfers that run together, as one exchange; all reads come before all writes.

    Attributes:
        name: what the phase does, as printed.
        transfers: sorted by sender, receiver and box, so that both ends of a message agree on its order.
    """

    name: str
    transfers: tuple[Transfer, ...]

    @classmethod
    def of(cls, name: str, transfers: Iterable[Transfer]) -> Phase:
        return cls(name, tuple(sorted(transfers, key=lambda t: (t.sender, t.receiver, t.contribution, t.box))))

    def received(self) -> dict[int, int]:
        """Elements that every rank receives from others."""
        return _totals((t.receiver, t) for t in self.transfers)

    def sent(self) -> dict[int, int]:
        """Elements that every rank sends to others."""
        return _totals((t.sender, t) for t in self.transfers)


def _totals(pairs: Iterable[tuple[int, Transfer]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for rank, transfer in pairs:
        if transfer.sender != transfer.receiver:
            found[rank] = found.get(rank, 0) + transfer.num_elements
    return found
