"""What a plan is made of.

A transfer carries a box of elements from one rank to another. A phase is a set of transfers that run as one exchange.
A stage leads from one layout to the next by one method, which gives its phases. A step is a phase as a row of the
plan's table. A candidate is a complete plan that may be chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from optim_redist._inside import Groups
from optim_redist._tools.files import record
from optim_redist._tools.lazy import lazy
from optim_redist.boxes import Box, volume
from optim_redist.cost import CommModel
from optim_redist.errors import RedistError
from optim_redist.layout import Layout
from optim_redist.problem import Problem

Which = Literal["src", "dst"]  # which of a rank's tensors: its part of the source, or of the target
FINISHED = -1  # in place of a contribution's number: no reduction is pending, or it is done
MAX_ROUNDS = 2**16  # of a stage


@dataclass(frozen=True)
class Transfer:
    """One box of elements from one rank to another, or, with ``sender == receiver``, from its source to its target.

    Attributes:
        box: index sets of the global tensor's dimensions, then of the axes whose contributions are kept.
        read: where the sender finds it: in its source tensor or in the part of its target that an earlier phase filled.
        contribution: which of the pending contributions it carries; FINISHED for finished values.
    """

    sender: int
    receiver: int
    box: Box
    read: Which = "src"
    contribution: int = FINISHED

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
        return self._totals[1]

    def sent(self) -> dict[int, int]:
        """Elements that every rank sends to others."""
        return self._totals[0]

    @lazy
    def traffic(self) -> dict[tuple[int, int], int]:
        """Elements sent, keyed by (sender, receiver), for every two ranks of which one sends to the other."""
        found: dict[tuple[int, int], int] = {}
        # many transfers share one box object
        volumes: dict[int, int] = {}
        for t in self.transfers:
            if t.sender != t.receiver:
                count = volumes.get(id(t.box))
                if count is None:
                    count = volumes[id(t.box)] = t.num_elements
                pair = t.sender, t.receiver
                found[pair] = found.get(pair, 0) + count
        return found

    @lazy
    def _totals(self) -> tuple[dict[int, int], dict[int, int]]:
        sent: dict[int, int] = {}
        received: dict[int, int] = {}
        for (sender, receiver), count in self.traffic.items():
            sent[sender] = sent.get(sender, 0) + count
            received[receiver] = received.get(receiver, 0) + count
        return sent, received


def added_up(counts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """The sums of several counts, rank by rank."""
    found: dict[int, int] = {}
    for of_one in counts:
        for rank, count in of_one.items():
            found[rank] = found.get(rank, 0) + count
    return found


class Volumes(NamedTuple):
    """What an exchange moves: all that its cost depends on.

    Attributes:
        name: what the exchange does, as printed.
        sent, received: elements, keyed by rank.
        borders: for every level with traffic across it, elements into or out of the group where most cross.
        reduces: whether contributions are combined on the way.
    """

    name: str
    sent: dict[int, int]
    received: dict[int, int]
    borders: dict[str, int]
    reduces: bool = False


class Stage(NamedTuple):
    """The way from one layout to the next by one method; every exchange runs in ``rounds`` parts."""

    op: str
    method: str
    src: Layout
    dst: Layout
    rounds: int = 1

    def to_json(self) -> dict[str, Any]:
        found = {"op": self.op, "method": self.method, "rounds": self.rounds}
        return {**found, "src": self.src.to_json(), "dst": self.dst.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Stage:
        layouts = {"src": Layout.from_json(data["src"]), "dst": Layout.from_json(data["dst"])}
        made = record(cls, {**data, **layouts})
        if not 1 <= made.rounds <= MAX_ROUNDS:
            raise RedistError(f"a stage runs in 1 to {MAX_ROUNDS} rounds, got {made.rounds}")
        return made


class Step(NamedTuple):
    """One exchange of a plan: a row of its table.

    Attributes:
        op: what it does.
        ranks: who takes part.
        layout: where the elements are afterwards, as text; "on the way" between the hops to the next layout.
        recv, send: elements of the busiest receiver and of the busiest sender.
        bytes: bytes of the busier of the two.
        seconds: predicted time.
        peak: bytes that no rank of the step exceeds during it. Of a step in one round it may be the largest source and
            target, the most received and the most sent together, though no rank has all of these.
        rounds: parts in which it runs.
    """

    op: str
    ranks: tuple[int, ...]
    layout: str
    recv: int
    send: int
    bytes: int
    seconds: float
    peak: int
    rounds: int = 1


@dataclass
class Request:
    """What a planner is asked for.

    Attributes:
        itemsize: bytes of an element.
        donate: whether the source is given up once it has been read.
        budget: states that a search may expand.
        deterministic: whether contributions have to be combined in rank order.
        of_complex_halves: whether elements are complex numbers of two fp16, which are combined in two fp32.
        aside: keyed by rank: elements held besides source and target while this part of the way runs.
    """

    problem: Problem
    itemsize: int
    model: CommModel
    memory_limit: int | None = None
    donate: bool = False
    budget: int = 0
    aside: Mapping[int, int] = field(default_factory=dict)
    deterministic: bool = False
    of_complex_halves: bool = False

    @property
    def has_borders(self) -> bool:
        """Whether the ranks lie in more than one group of the topology."""
        return bool(self.model.topology.levels and self.groups)

    def allows(self, peak_bytes: int) -> bool:
        """Whether the memory limit, if there is one, leaves room for this peak."""
        return self.memory_limit is None or peak_bytes <= self.memory_limit

    @property
    def groups(self) -> Groups:
        """What the groups of the topology hold and need."""
        return self.problem.groups(self.model.topology)

    def through(self, src: Layout, layouts: Iterable[Layout]) -> list[Request]:
        """The request for each part of the way from ``src`` through these layouts, of which the last is the target.

        After the first part the source is kept aside, as its caller keeps it, unless it is donated.
        """
        kept = {} if self.donate else {rank: held for rank, (held, _) in self.problem.num_stored.items()}
        parts: list[Request] = []
        for dst in layouts:
            parts.append(replace(self, problem=self.problem.between(src, dst), aside=kept if parts else {}))
            src = dst
        return parts


@dataclass
class Candidate:
    """A complete plan that may be chosen.

    Attributes:
        planner: the name of the planner that offers it.
        stages, steps: what it does and what that costs.
        busiest: elements that the busiest rank sends or receives over all steps.
        moved: (sent, received), elements by rank over all steps, where that has been counted.
        seconds, peak_bytes: the seconds of all steps together, and the peak of the step that holds most.
    """

    planner: str
    stages: tuple[Stage, ...]
    steps: tuple[Step, ...]
    busiest: int
    moved: tuple[Mapping[int, int], Mapping[int, int]] | None = None
    seconds: float = field(init=False, default=0.0)
    peak_bytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        for step in self.steps:
            self.seconds += step.seconds
            self.peak_bytes = max(self.peak_bytes, step.peak)
