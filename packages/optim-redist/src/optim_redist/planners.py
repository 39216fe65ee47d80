"""The planners: each turns a request into candidates, costed by one model.

local         nothing has to move
direct        one exchange, every element straight from a holder
relay         a reduction that is combined at one rank and handed on
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optim_redist._direct import direct_phases
from optim_redist._dtypes import itemsize
from optim_redist._relay import relay_phases
from optim_redist.cost import CommModel
from optim_redist.errors import RedistError
from optim_redist.layout import Layout
from optim_redist.lower_bounds import Bounds
from optim_redist.moves import Phase
from optim_redist.problem import Problem


@dataclass(frozen=True)
class Stage:
    """From one layout to the next by one method."""

    op: str
    method: str
    src: Layout
    dst: Layout

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, "method": self.method, "src": self.src.to_json(), "dst": self.dst.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Stage:
        return cls(data["op"], data["method"], Layout.from_json(data["src"]), Layout.from_json(data["dst"]))


@dataclass(frozen=True)
class Step:
    """One exchange of a plan: a row of its table.

    Attributes:
        op: what it does.
        ranks: who takes part.
        layout: where the elements are afterwards, as text.
        recv, send: elements of the busiest receiver and of the busiest sender.
        bytes: bytes of the busier of the two.
        seconds: predicted time.
        peak: bytes that the fullest rank holds during the step.
    """

    op: str
    ranks: tuple[int, ...]
    layout: str
    recv: int
    send: int
    bytes: int
    seconds: float
    peak: int


@dataclass(frozen=True)
class Request:
    """What a planner is asked for."""

    problem: Problem
    dtype: str
    model: CommModel
    memory_limit: int | None = None
    donate: bool = False

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def smallest_chunk(self) -> int:
        """Bytes of staging that chunked plans need at least."""
        return 64 * 1024


@dataclass(frozen=True)
class Candidate:
    """A complete plan before the choice."""

    planner: str
    stages: tuple[Stage, ...]
    steps: tuple[Step, ...]
    busiest: int

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def peak_bytes(self) -> int:
        return max((step.peak for step in self.steps), default=0)


_METHODS: dict[str, Callable[[Problem], list[Phase]]] = {"direct": direct_phases, "relay": relay_phases}


def phases_of(problem: Problem, stage: Stage) -> list[Phase]:
    """The transfers of a stage."""
    if stage.method not in _METHODS:
        raise RedistError(f"this version knows the methods {sorted(_METHODS)}, the plan uses {stage.method!r}")
    return _METHODS[stage.method](problem)


def candidates(request: Request, limits: Bounds, asked: Sequence[str] | None = None) -> list[Candidate]:
    """What every planner offers, in a fixed order."""
    if limits.lb == 0 and request.problem.num_contributions == 1:
        return [_local(request, limits)]
    known = {"direct": _direct, "relay": _relay}
    names = list(known) if asked is None else list(asked)
    unknown = set(names) - {*known, "local"}
    if unknown:
        raise RedistError(f"planners are {sorted([*known, 'local'])}, got {sorted(unknown)}")
    found = [known[name](request, limits) for name in names if name in known]
    offered = [candidate for candidate in found if candidate is not None]
    if not offered:
        raise RedistError(f"none of the planners {names} has a plan for this redistribution; ask for 'direct' as well")
    return offered


def _local(request: Request, limits: Bounds) -> Candidate:
    problem, width = request.problem, request.itemsize
    stage = Stage("local", "direct", problem.src, problem.dst)
    seconds = request.model.pack_seconds(limits.live * width)
    step = Step("local", problem.ranks, str(problem.dst), 0, 0, 0, seconds, limits.memory * width)
    return Candidate("local", (stage,), (step,), 0)


def _direct(request: Request, limits: Bounds) -> Candidate:
    problem, width = request.problem, request.itemsize
    recv, send = limits.direct_recv, limits.direct_send
    moved = max(recv, send) * width
    seconds = request.model.seconds("all_to_all", moved) + 2 * request.model.pack_seconds(moved)
    peak = (limits.memory + recv + send) * width
    step = Step("exchange", problem.ranks, str(problem.dst), recv, send, moved, seconds, peak)
    return Candidate("direct", (Stage("exchange", "direct", problem.src, problem.dst),), (step,), max(recv, send))


def _relay(request: Request, limits: Bounds) -> Candidate | None:
    problem, width, model = request.problem, request.itemsize, request.model
    if problem.num_contributions == 1 or problem.dst_replicas == 1:
        return None
    steps, busiest = [], {0: 0, 1: 0}
    for phase in relay_phases(problem):
        recv, send = max(phase.received().values(), default=0), max(phase.sent().values(), default=0)
        busiest[0] += recv
        busiest[1] += send
        moved = max(recv, send) * width
        seconds = model.seconds("all_to_all", moved) + 2 * model.pack_seconds(moved)
        peak = (limits.memory + recv + send) * width
        steps.append(Step(phase.name, problem.ranks, str(problem.dst), recv, send, moved, seconds, peak))
    stage = Stage("reduce and share", "relay", problem.src, problem.dst)
    return Candidate("relay", (stage,), tuple(steps), max(busiest.values()))
