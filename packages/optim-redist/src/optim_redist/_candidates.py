"""Whole plans before the choice: the phases of a method or a way through layouts, with what they cost and hold.

A step takes as long as its busiest rank moves bytes and as its borders let through, and packing and unpacking; each
rank holds source, target, the buffers of one round, and what it keeps aside meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optim_redist._chunked import in_rounds
from optim_redist._direct import direct_phases
from optim_redist._forward import forward_phases
from optim_redist._hierarchical import border_volumes, hierarchical_phases
from optim_redist._relay import relay_phases
from optim_redist.cost import Topology
from optim_redist.errors import RedistError
from optim_redist.layout import Layout
from optim_redist.lower_bounds import Bounds, bounds_of
from optim_redist.moves import Candidate, Phase, Request, Stage, Step
from optim_redist.problem import Problem

_MAX_ROUNDS = 2**16


def phases_of(problem: Problem, stage: Stage, topology: Topology) -> list[Phase]:
    """The transfers of a stage, round by round."""
    phases = whole_phases(problem, stage.method, topology)
    return [part for phase in phases for part in in_rounds(problem, phase, stage.rounds)]


def whole_phases(problem: Problem, method: str, topology: Topology) -> list[Phase]:
    if method in ("direct", "packed"):
        return direct_phases(problem, topology)
    if method == "forward":
        return forward_phases(problem, bounds_of(problem).lb)
    if method == "relay":
        return relay_phases(problem)
    if method == "hierarchical":
        return hierarchical_phases(problem, topology)
    raise RedistError(f"this version does not know the method {method!r} of the plan")


def one_exchange(request: Request, limits: Bounds, op: str = "exchange") -> Candidate:
    problem, width = request.problem, request.itemsize
    held = limits.memory + limits.direct_recv + limits.direct_send
    if request.aside:
        held += max(request.aside.values())
    peak = held * width + partial_bytes(request)
    if request.has_borders or (request.memory_limit is not None and peak > request.memory_limit):
        return from_phases("direct", request, op=op)
    # without borders and in one round the bounds say all there is to know: no transfer has to be listed
    combined = limits.direct_recv if problem.num_contributions > 1 else 0
    step = step_of(request, op, limits.direct_recv, limits.direct_send, peak, combined=combined)
    return Candidate("direct", (Stage(op, "direct", problem.src, problem.dst),), (step,), limits.single_hop)


def from_layouts(planner: str, request: Request, layouts: Sequence[tuple[str, Layout]]) -> Candidate:
    """A sequence of layouts, each reached by a direct exchange from the one before."""
    problem = request.problem
    # the caller keeps the source while later stages run, unless it is given up
    aside = {} if request.donate else {rank: src for rank, (src, _) in problem.num_stored.items()}
    stages: list[Stage] = []
    steps: list[Step] = []
    busiest = 0
    part = request
    src = problem.src
    for op, layout in layouts:
        part = request.between(src, layout, aside if stages else {})
        chosen = one_exchange(part, bounds_of(part.problem), op)
        stages += chosen.stages
        steps += chosen.steps
        busiest += chosen.busiest
        src = layout
    return Candidate(planner, tuple(stages), tuple(steps), busiest)


def from_ways(request: Request, src: Layout, way: Sequence[tuple[str, str, Layout]]) -> Candidate:
    """A sequence of layouts, each reached by a method of its own."""
    aside = {} if request.donate else {rank: held for rank, (held, _) in request.problem.num_stored.items()}
    parts: list[Candidate] = []
    for op, method, layout in way:
        part = request.between(src, layout, aside if parts else {})
        parts.append(from_phases(method, part, op=None if method == "hierarchical" else op))
        src = layout
    stages = tuple(stage for part in parts for stage in part.stages)
    steps = tuple(step for part in parts for step in part.steps)
    return Candidate("hierarchical", stages, steps, sum(part.busiest for part in parts))


def from_phases(method: str, request: Request, *, op: str | None = None) -> Candidate:
    """A stage of one method, in as few rounds as the memory limit allows, costed by its transfers."""
    problem = request.problem
    phases = whole_phases(problem, method, request.model.topology)
    rounds = _num_rounds(request, phases)
    stage = Stage(op or method, method, problem.src, problem.dst, rounds)
    totals: dict[tuple[str, int], int] = {}
    steps = []
    for phase in phases:
        sent, received = phase.sent(), phase.received()
        for side, counts in (("send", sent), ("recv", received)):
            for rank, count in counts.items():
                totals[side, rank] = totals.get((side, rank), 0) + count
        recv, send = max(received.values(), default=0), max(sent.values(), default=0)
        peak = max(_peak_bytes(request, part) for part in in_rounds(problem, phase, rounds))
        borders = border_volumes(phase, request.model.topology) if request.has_borders else {}
        combined = recv if any(transfer.contribution >= 0 for transfer in phase.transfers) else 0
        steps.append(step_of(request, op or phase.name, recv, send, peak, borders, rounds=rounds, combined=combined))
    return Candidate(method, (stage,), tuple(steps), max(totals.values(), default=0))


def _num_rounds(request: Request, phases: Sequence[Phase]) -> int:
    """As few rounds as keep every rank under the memory limit; 1 without a limit or where rounds do not help."""
    if request.memory_limit is None:
        return 1
    buffers_of_none = _peak_bytes(request, Phase("", ()))
    rounds, room = 1, request.memory_limit - buffers_of_none
    # with an element a round and rank no more rounds can help
    volumes = [n for phase in phases for counts in (phase.sent(), phase.received()) for n in counts.values()]
    while rounds <= min(max(volumes, default=1), _MAX_ROUNDS):
        parts = [part for phase in phases for part in in_rounds(request.problem, phase, rounds)]
        peak = max(_peak_bytes(request, part) for part in parts)
        if peak <= request.memory_limit:
            return rounds
        if room <= 0:
            return 1
        rounds = 2 * rounds if rounds > 1 else max(2, -(-(peak - buffers_of_none) // room))
    return 1


def _peak_bytes(request: Request, phase: Phase) -> int:
    """Bytes that the fullest rank holds during a phase: source, target, both buffers, and what is kept aside."""
    sent, received, aside = phase.sent(), phase.received(), request.aside
    elements = max(
        src + dst + sent.get(rank, 0) + received.get(rank, 0) + aside.get(rank, 0)
        for rank, (src, dst) in request.problem.num_stored.items()
    )
    return elements * request.itemsize + partial_bytes(request)


def partial_bytes(request: Request) -> int:
    """Bytes of partial results, which are kept in fp32 or in the tensor's own type if that is wider."""
    if request.problem.num_contributions == 1:
        return 0
    return max(dst for _, dst in request.problem.num_stored.values()) * max(4, request.itemsize)


def step_of(
    request: Request,
    op: str,
    recv: int,
    send: int,
    peak: int,
    borders: Mapping[tuple[str, int], Sequence[int]] | None = None,
    *,
    rounds: int = 1,
    combined: int = 0,
) -> Step:
    """One exchange, costed: the busiest rank, every border, and packing and unpacking."""
    model, width, problem = request.model, request.itemsize, request.problem
    moved = max(recv, send) * width
    seconds = rounds * model.seconds("all_to_all", moved / rounds) if moved else 0.0
    for (level, _), (inbound, outbound) in (borders or {}).items():
        seconds = max(seconds, model.call_seconds + model.border_seconds(level, max(inbound, outbound) * width))
    # adding a contribution to an fp32 partial result reads it, and reads and writes that
    seconds += model.pack_seconds((send + recv) * width + combined * (width + 8) / 2)
    return Step(op, problem.ranks, str(problem.dst), recv, send, moved, seconds, peak, rounds)
