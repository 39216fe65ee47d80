"""The planners: each turns a request into a candidate, costed by one model.

    local         nothing has to move
    direct        one exchange, every element straight from a holder
    naive         gather everything everywhere, then slice: what a plan is measured against
    forward       the exchange in two hops where one keeps a holder too busy
    relay         a reduction that is combined at one rank and handed on
    hierarchical  every group fetches what it lacks once, then shares it
    collectives   the best sequence of plain collectives; searched if asked for by name or by a budget

Under a memory limit each exchange runs in as many rounds as its buffers require. A planner that provably cannot beat
what is already there is not asked; the plan then says so among its alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optim_redist._chunked import in_rounds
from optim_redist._collective_search import search_collectives
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
    return [part for phase in _whole_phases(problem, stage.method, topology) for part in in_rounds(phase, stage.rounds)]


def _whole_phases(problem: Problem, method: str, topology: Topology) -> list[Phase]:
    if method == "direct":
        return direct_phases(problem, topology)
    if method == "forward":
        return forward_phases(problem, bounds_of(problem).lb)
    if method == "relay":
        return relay_phases(problem)
    if method == "hierarchical":
        return hierarchical_phases(problem, topology)
    raise RedistError(f"this version does not know the method {method!r} of the plan")


def candidates(
    request: Request, limits: Bounds, asked: Sequence[str] | None = None
) -> tuple[list[Candidate], list[tuple[str, float, str]]]:
    """What the planners offer, in a fixed order, and (planner, least seconds, reason) of those that cannot win."""
    if asked is not None and set(asked) - {"local", *_PLANNERS}:
        raise RedistError(f"planners are {['local', *_PLANNERS]}, got {list(asked)}")
    if limits.lb == 0 and request.problem.num_contributions == 1:
        return [_local(request, limits)], []
    found: list[Candidate] = []
    hopeless = []
    for name, planner in _PLANNERS.items():
        if asked is not None and name not in asked:
            continue
        if asked is None and name == "collectives" and not request.budget:
            continue
        if asked is None and found:
            least = _least_seconds(name, request, limits)
            best = min(candidate.seconds for candidate in found)
            if least >= best and request.memory_limit is None:
                hopeless.append((name, least, f"takes at least {least * 1e6:.1f} µs, {best * 1e6:.1f} µs is possible"))
                continue
        candidate = planner(request, limits)
        if candidate is not None:
            found.append(candidate)
    if not found:
        raise RedistError(
            f"none of the planners {list(asked or ())} fits this redistribution; ask for 'direct' as well"
        )
    return found, hopeless


def _least_seconds(name: str, request: Request, limits: Bounds) -> float:
    """What any candidate of a planner takes at least: its number of exchanges, and the bound on volume."""
    model, volume = request.model, limits.lb * request.itemsize
    if name == "naive":
        gathered = (request.problem.num_elements - limits.live_src) * request.itemsize
        return model.seconds("all_to_all", gathered) + 2 * model.pack_seconds(gathered)
    num_hops = 1 if name in ("direct", "collectives") else 2
    crossing = max((max(c.inbound, c.outbound) / c.bandwidth for c in limits.cuts if c.bandwidth), default=0.0)
    seconds = model.seconds("all_to_all", volume) + (num_hops - 1) * model.seconds("all_to_all", 0)
    return max(seconds + model.pack_seconds(volume), crossing * request.itemsize)


def _local(request: Request, limits: Bounds) -> Candidate:
    problem, width = request.problem, request.itemsize
    stage = Stage("local", "direct", problem.src, problem.dst)
    seconds = request.model.pack_seconds(limits.live * width)
    step = Step("local", problem.ranks, str(problem.dst), 0, 0, 0, seconds, limits.memory * width)
    return Candidate("local", (stage,), (step,), 0)


def _direct(request: Request, limits: Bounds) -> Candidate | None:
    problem = request.problem
    if request.has_borders or request.is_tight(limits.memory + limits.direct_recv + limits.direct_send):
        return _from_phases("direct", request, limits)
    combined = limits.direct_recv if problem.num_contributions > 1 else 0
    step = _step(request, "exchange", limits.direct_recv, limits.direct_send, limits.memory, {}, combined=combined)
    return Candidate("direct", (Stage("exchange", "direct", problem.src, problem.dst),), (step,), limits.single_hop)


def _forward(request: Request, limits: Bounds) -> Candidate | None:
    if request.problem.num_contributions > 1 or limits.single_hop == limits.lb:
        return None
    return _from_phases("forward", request, limits)


def _relay(request: Request, limits: Bounds) -> Candidate | None:
    if request.problem.num_contributions == 1 or request.problem.dst_replicas == 1:
        return None
    return _from_phases("relay", request, limits)


def _hierarchical(request: Request, limits: Bounds) -> Candidate | None:
    if not request.has_borders or request.problem.num_contributions > 1:
        return None
    return _from_phases("hierarchical", request, limits)


def _naive(request: Request, limits: Bounds) -> Candidate | None:
    problem = request.problem
    if problem.src.partial or problem.dst.partial or set(problem.src.mesh.ranks) != set(problem.dst.mesh.ranks):
        return None
    everywhere = Layout(problem.src.mesh, [None] * problem.src.num_dims)
    return _from_layouts("naive", request, [("all_gather", everywhere), ("slice", problem.dst)])


def _collectives(request: Request, limits: Bounds) -> Candidate | None:
    problem = request.problem
    steps = search_collectives(problem.shape, problem.src, problem.dst, max_expansions=request.budget or 20_000)
    if not steps:
        return None
    layouts = [(step.op, step.layout) for step in steps]
    # the last state is the target, written on the mesh of prime factors; the plan ends in the target as given
    layouts[-1] = (layouts[-1][0], problem.dst)
    return _from_layouts("collectives", request, layouts)


_PLANNERS: dict[str, Callable[[Request, Bounds], Candidate | None]] = {
    "direct": _direct,
    "forward": _forward,
    "relay": _relay,
    "hierarchical": _hierarchical,
    "collectives": _collectives,
    "naive": _naive,
}


def _from_layouts(planner: str, request: Request, layouts: Sequence[tuple[str, Layout]]) -> Candidate:
    """A sequence of layouts, each reached by a direct exchange from the one before."""
    src = request.problem.src
    stages: list[Stage] = []
    steps: list[Step] = []
    busiest = 0
    for op, layout in layouts:
        part = request.between(src, layout)
        limits = bounds_of(part.problem, itemsize=request.itemsize)
        chosen = _from_phases("direct", part, limits, op=op)
        stages += chosen.stages
        steps += chosen.steps
        busiest += chosen.busiest
        src = layout
    return Candidate(planner, tuple(stages), tuple(steps), busiest)


def _from_phases(method: str, request: Request, limits: Bounds, *, op: str | None = None) -> Candidate:
    """A stage of one method, in as few rounds as the memory limit allows, costed by its transfers."""
    problem, width = request.problem, request.itemsize
    phases = _whole_phases(problem, method, request.model.topology)
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
        peak = max(_peak(problem, part) for part in in_rounds(phase, rounds))
        borders = border_volumes(phase, request.model.topology) if request.has_borders else {}
        name = op or phase.name
        combined = recv if problem.num_contributions > 1 and phase is phases[0] else 0
        step = _step(request, name, recv, send, 0, borders, rounds=rounds, peak=peak * width, combined=combined)
        steps.append(step)
    return Candidate(method, (stage,), tuple(steps), max(totals.values(), default=0))


def _num_rounds(request: Request, phases: Sequence[Phase]) -> int:
    """As few rounds as keep every rank under the memory limit; 1 without a limit or where rounds do not help."""
    if request.memory_limit is None or request.problem.num_contributions > 1:
        return 1
    room = request.memory_limit // request.itemsize
    rounds = 1
    while rounds < _MAX_ROUNDS:
        peaks = [_peak(request.problem, part) for phase in phases for part in in_rounds(phase, rounds)]
        if max(peaks) <= room:
            return rounds
        stored = max(map(sum, request.problem.num_stored.values()))
        if stored >= room:
            return 1
        rounds = max(
            2 * rounds if rounds > 1 else 2, -(-(max(peaks) - stored) // (room - stored)) if rounds == 1 else 0
        )
    return 1


def _peak(problem: Problem, phase: Phase) -> int:
    """Elements that the fullest rank holds during a phase: source, target and both buffers."""
    sent, received = phase.sent(), phase.received()
    stored = problem.num_stored
    return max(sum(stored[rank]) + sent.get(rank, 0) + received.get(rank, 0) for rank in problem.ranks)


def _step(
    request: Request,
    op: str,
    recv: int,
    send: int,
    memory: int,
    borders: dict[tuple[str, int], list[int]],
    *,
    rounds: int = 1,
    peak: int | None = None,
    combined: int = 0,
) -> Step:
    """One exchange, costed: the busiest rank, every border, and packing and unpacking."""
    model, width = request.model, request.itemsize
    moved = max(recv, send) * width
    seconds = rounds * model.seconds("all_to_all", moved / rounds) if moved else 0.0
    for (level, _), (inbound, outbound) in borders.items():
        seconds = max(seconds, model.call_seconds + model.border_seconds(level, max(inbound, outbound) * width))
    seconds += model.pack_seconds(send * width) + model.pack_seconds(recv * width)
    # adding a contribution to an fp32 partial result reads it, and reads and writes that
    seconds += model.pack_seconds(combined * (width + 8) / 2)
    if peak is None:
        peak = (memory + recv + send) * width
    if request.problem.num_contributions > 1:
        # partial results are kept in fp32, or in the tensor's own type if that is wider
        peak += max(dst for _, dst in request.problem.num_stored.values()) * max(4, width)
    problem = request.problem
    return Step(op, problem.ranks, str(problem.dst), recv, send, moved, seconds, peak, rounds)
