"""Candidates, plans before the choice: the phases of a method or of a way through layouts, with time and memory.

The time of a step is what its busiest rank or its busiest border needs, whichever is longer, plus packing and
unpacking what is not exchanged in place; or that of a library's collective, where one does the step. Each rank holds
source, target, the buffers of one round, and what it keeps aside meanwhile. If the largest of these together, of
whichever ranks, are within the limit, they are the peak, and what each rank moves is not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from optim_redist._methods.borders import crossings
from optim_redist._methods.chunked import COMBINED_AT_ONCE, in_rounds, largest_part, parts_of_grid
from optim_redist._methods.direct import direct_phases
from optim_redist._methods.exchanges import DirectExchange, Exchange, moved_in_order, relayed
from optim_redist._methods.forward import forward_phases
from optim_redist._methods.hierarchical import hierarchical_phases
from optim_redist._methods.in_place import in_place
from optim_redist._methods.library import bytes_received, library_collective
from optim_redist._methods.node_volumes import node_volumes
from optim_redist._methods.own import is_in_order
from optim_redist._methods.reduce_inside import Way
from optim_redist._methods.relay import relay_phases
from optim_redist.cost import Topology
from optim_redist.errors import RedistError
from optim_redist.layout import Layout
from optim_redist.lower_bounds import Bounds, bounds_of
from optim_redist.moves import MAX_ROUNDS, Candidate, Phase, Request, Stage, Step, Volumes, added_up
from optim_redist.problem import Point, Problem


def phases_of(problem: Problem, stage: Stage, topology: Topology) -> list[Phase]:
    """The transfers of a stage, round by round."""
    phases = whole_phases(problem, stage.method, topology)
    return [part for phase in phases for part in in_rounds(problem, phase, stage.rounds)]


def whole_phases(problem: Problem, method: str, topology: Topology) -> list[Phase]:
    """The transfers of a method, each exchange in one piece."""
    if method in ("direct", "packed"):
        return direct_phases(problem, topology)
    if method == "nearest":
        return direct_phases(problem, topology, nearest=True)
    if method in ("forward", "hierarchical") and problem.num_contributions > 1:
        raise RedistError(f"the method {method!r} of the plan moves finished values, and this stage reduces")
    if method == "forward":
        return forward_phases(problem, bounds_of(problem).lb)
    if method == "relay":
        return relay_phases(problem)
    if method == "hierarchical":
        return hierarchical_phases(problem, topology)
    raise RedistError(f"this version does not know the method {method!r} of the plan")


def exchanges_of(problem: Problem, method: str, topology: Topology) -> Sequence[Exchange]:
    """The exchanges of a method, each in one piece, with what they move."""
    if is_in_order(problem, method, topology):
        return [DirectExchange(problem, topology)]
    if method == "relay":
        return relayed(problem, topology)
    return [Exchange.of(problem, phase, topology) for phase in whole_phases(problem, method, topology)]


def one_exchange(
    request: Request, limits: Bounds, op: str = "exchange", method: Literal["direct", "nearest"] = "direct"
) -> Candidate:
    """One exchange straight from holders; if it fits in one round, bounds and sums give its cost without transfers."""
    problem, width = request.problem, request.itemsize
    send = limits.direct_send
    borders: Mapping[str, int] = {}
    if request.has_borders:
        limit = send if method == "direct" else None
        borders, busiest = crossings(problem, request.model.topology, limit)
        send = max(send, busiest)
    held = limits.memory + limits.direct_recv + send
    if request.aside:
        held += max(request.aside.values())
    peak = held * width + partial_bytes(request)
    if not request.allows(peak):
        return from_phases(method, request, op=op)
    step = _library_step(request, op, limits, peak) if method == "direct" else None
    if step is None:
        combined = limits.direct_recv if problem.num_contributions > 1 else 0
        copied = copied_elements(problem, limits.direct_recv, send)
        step = step_of(request, op, limits.direct_recv, send, peak, borders, copied=copied, combined=combined)
    stage = Stage(op, method, problem.src, problem.dst)
    return Candidate(method, (stage,), (step,), max(limits.direct_recv, send))


def copied_elements(problem: Problem, recv: int, send: int) -> int:
    """What the busiest rank packs and unpacks in an exchange, or copies if nothing moves."""
    if not recv and not send:
        return max(problem.num_kept.values(), default=0)
    leaves, arrives = in_place(problem)
    # contributions are combined where they have arrived
    unpacks = not arrives and problem.num_contributions == 1
    return recv * unpacks + send * (not leaves)


def _library_step(request: Request, op: str, limits: Bounds, peak: int) -> Step | None:
    """The step of a library's collective, if one does it all; volumes are those of the exchange it stands for."""
    problem, width, model = request.problem, request.itemsize, request.model
    if not model.has_library or request.has_borders or not limits.direct_recv:
        return None
    name = library_collective(problem)
    reduces = problem.num_contributions > 1
    # the library's minima and maxima of floats ignore NaN
    if name is None or (reduces and (request.deterministic or {op for op, _ in problem.reduced} & {"min", "max"})):
        return None
    copied = 0 if name == "all_gather" or (name == "reduce_scatter" and in_place(problem)[0]) else limits.live_src
    seconds = model.seconds(name, bytes_received(name, problem, width)) + model.pack_seconds(copied * width)
    moved = limits.single_hop * width
    ranks, layout = problem.ranks, str(problem.dst)
    return Step(op, ranks, layout, limits.direct_recv, limits.direct_send, moved, seconds, peak)


def from_layouts(planner: str, request: Request, layouts: Sequence[tuple[str, Layout]]) -> Candidate:
    """A sequence of layouts, each reached by a direct exchange from the one before."""
    parts = request.through(request.problem.src, [layout for _, layout in layouts])
    if not all(map(has_room, parts)):
        # no rounds, which may be many, make it fit
        parts = [replace(part, memory_limit=None) for part in parts]
    made = [counted(one_exchange(part, bounds_of(part.problem), op), part) for (op, _), part in zip(layouts, parts)]
    return joined(planner, made)


def has_room(request: Request) -> bool:
    """Whether the limit holds source, target and the partial results of the smallest rounds."""
    return request.memory_limit is None or _peak_bytes(request, {}, {}, MAX_ROUNDS) <= request.memory_limit


def from_way(request: Request, src: Layout, way: Way) -> Candidate:
    """A sequence of layouts, each reached by a method of its own."""
    parts = request.through(src, [layout for _, _, layout in way])
    return joined("hierarchical", [from_phases(method, part, op=op) for (op, method, _), part in zip(way, parts)])


def counted(part: Candidate, request: Request) -> Candidate:
    """The candidate of one exchange with what each rank moves, where that is known without listing transfers."""
    if part.moved is None and is_in_order(request.problem, "direct", request.model.topology):
        part.moved = moved_in_order(request.problem)
    return part


def joined(planner: str, parts: Sequence[Candidate]) -> Candidate:
    """One candidate after the other. Where it is not known what each rank moves, the busiest rank counts for all."""
    stages = tuple(stage for part in parts for stage in part.stages)
    steps = tuple(step for part in parts for step in part.steps)
    known = [part.moved for part in parts if part.moved is not None]
    sent, received = added_up(moved[0] for moved in known), added_up(moved[1] for moved in known)
    busiest = max([*sent.values(), *received.values()], default=0)
    busiest += sum(part.busiest for part in parts if part.moved is None)
    return Candidate(planner, stages, steps, busiest, (sent, received) if len(known) == len(parts) else None)


def from_phases(method: str, request: Request, *, op: str | None = None) -> Candidate:
    """A stage of one method, in rounds if the memory limit requires it, costed by what its exchanges move."""
    problem, topology = request.problem, request.model.topology
    found: list[Volumes] | None = None
    rounds = 1
    if method == "hierarchical" and request.memory_limit is None:
        nodes = node_volumes(problem, topology, bounds_of(problem).lb)
        found = None if nodes is None else nodes.exchanges
    if found is None:
        exchanges = exchanges_of(problem, method, topology)
        rounds = _num_rounds(request, exchanges)
        found = [exchange.volumes for exchange in exchanges]
    steps = []
    for number, moved in enumerate(found):
        recv, send = max(moved.received.values(), default=0), max(moved.sent.values(), default=0)
        if rounds == 1:
            peak = _peak_bytes(request, moved.sent, moved.received)
        else:
            peak = _peak_bytes(request, exchanges[number].fullest_round(rounds), {}, rounds)
        combined = recv if moved.reduces else 0
        copied = copied_elements(problem, recv, send)
        borders = moved.borders
        steps.append(
            step_of(
                request, op or moved.name, recv, send, peak, borders, rounds=rounds, copied=copied, combined=combined
            )
        )
    # between the hops the elements are in no layout
    steps[:-1] = [step._replace(layout="on the way") for step in steps[:-1]]
    stage = Stage(op or method, method, problem.src, problem.dst, rounds)
    sent, received = added_up(moved.sent for moved in found), added_up(moved.received for moved in found)
    busiest = max([*sent.values(), *received.values()], default=0)
    return Candidate(method, (stage,), tuple(steps), busiest, (sent, received))


def _num_rounds(request: Request, exchanges: Sequence[Exchange]) -> int:
    """The rounds that keep every rank under the memory limit; 1 without a limit, or if no number of rounds can.

    Where only the largest number of rounds falls short, it is that. The peak falls with the number of rounds, but for
    rounding. So growing steps up from a lower bound find a number that suffices, and bisection the least one above
    those that failed, to within a hundredth of it.
    """
    limit = request.memory_limit
    if limit is None or not exchanges:
        return 1

    def fits(rounds: int) -> bool:
        return all(_peak_bytes(request, exchange.fullest_round(rounds), {}, rounds) <= limit for exchange in exchanges)

    if fits(1) or _peak_bytes(request, {}, {}, MAX_ROUNDS) >= limit:
        return 1
    whole = [exchange.fullest_round(1) for exchange in exchanges]
    # more rounds than the busiest rank has elements cannot help
    most = min(max(max(moved.values(), default=1) for moved in whole), MAX_ROUNDS)
    rounds = min(max(_least_rounds(request, limit, moved) for moved in whole), most)
    failed, step = rounds - 1, max(1, rounds // 16)
    while not fits(rounds):
        if rounds == most:
            return most
        failed, rounds, step = rounds, min(rounds + step, most), 2 * step
    while rounds - failed > 1 + rounds // 128:
        middle = (failed + rounds) // 2
        failed, rounds = (failed, middle) if fits(middle) else (middle, rounds)
    # more rounds than a reduction's grid has parts would be empty
    return rounds if request.problem.num_contributions == 1 else parts_of_grid(request.problem, rounds)


def _least_rounds(request: Request, limit: int, moved: Mapping[int, int]) -> int:
    """A lower bound on the rounds of an exchange: one of them has at least the mean of what a rank moves in all."""
    found, width, partial = 2, request.itemsize, partial_bytes(request)
    for rank, (src, dst) in request.problem.num_stored.items():
        buffers = moved.get(rank, 0) * width + partial
        room = limit - (src + dst + request.aside.get(rank, 0)) * width
        found = max(found, -(-buffers // room))
    return found


def _peak_bytes(request: Request, sent: Mapping[int, int], received: Mapping[int, int], rounds: int = 1) -> int:
    """Bytes that the fullest rank holds during an exchange: source, target, both buffers, and what is kept aside."""
    aside = request.aside
    elements = max(
        src + dst + sent.get(rank, 0) + received.get(rank, 0) + aside.get(rank, 0)
        for rank, (src, dst) in request.problem.num_stored.items()
    )
    return elements * request.itemsize + partial_bytes(request, rounds)


def partial_bytes(request: Request, rounds: int = 1, points: Collection[Point] | None = None) -> int:
    """The most bytes of a round's partial results at any target point, or at any of ``points``.

    They are in fp32 for narrower types, complex or not, and in fp64 for averages of fp32.

    Other types are combined in the target. Narrower contributions are converted first: all of one in 8-bit types, else
    slice by slice.
    """
    problem, width = request.problem, {1: 4, 2: 4}.get(request.itemsize, 0)
    if request.of_complex_halves or (request.itemsize == 4 and any(op == "avg" for op, _ in problem.reduced)):
        width = 8
    if problem.num_contributions == 1 or not width:
        return 0
    some = problem.dst_points.values() if points is None else points
    part = max(map(largest_part(problem, rounds), some), default=0)
    return width * (part + (part if request.itemsize == 1 else min(part, COMBINED_AT_ONCE)))


def step_of(
    request: Request,
    op: str,
    recv: int,
    send: int,
    peak: int,
    borders: Mapping[str, int],
    *,
    rounds: int = 1,
    copied: int,
    combined: int = 0,
) -> Step:
    """The step of one exchange, with the time of its busiest rank and borders, and of packing and unpacking."""
    model, width, problem = request.model, request.itemsize, request.problem
    moved = max(recv, send) * width
    # where nothing moves, the host still copies
    seconds = rounds * model.seconds("all_to_all", moved / rounds) if moved else model.call_seconds
    for level, crossing in borders.items():
        seconds = max(seconds, rounds * (model.call_seconds + model.border_seconds(level, crossing * width / rounds)))
    # combining reads a contribution, and reads and writes an fp32 partial result: width + 8 bytes
    seconds += model.pack_seconds(copied * width + combined * (width + 8) / 2)
    return Step(op, problem.ranks, str(problem.dst), recv, send, moved, seconds, peak, rounds)
