"""The planners: each turns a request into a candidate, costed by one model.

    local         nothing has to move
    direct        one exchange, every element straight from a holder, no rank sending more than it has to
    nearest       the same, but always from a holder in the same group where there is one
    spread        without groups: target ranks that need the same first get a part of it each, which they then gather
    forward       the exchange in several hops, where a single hop would keep a holder too busy
    relay         a reduction: each element is combined at one rank that needs it, which hands it on to the others
    scatter       a reduction: each contributor combines a part, then the finished parts move on
    hierarchical  every group fetches what it lacks once, then shares it; reductions run inside the groups first
    collectives   the best sequence of plain collectives that never holds more than the larger of source and target;
                  searched if asked for by name or by a budget; no plan of a deterministic reduction if it reduces in
                  several steps
    notebook      the operations that the notebook's ``OptimalRedist`` finds where ``MultiAxisDist`` expresses both
                  sides; only if asked for by name, as its search takes milliseconds on three mesh axes and up to
                  seconds on four or five
    packed        under a memory limit: the direct exchange of a donated source that is freed before the target is made
    stopover      under a memory limit, where no other is one exchange of one round: a donated source, or contributions,
                  in two exchanges through a layout whose smaller parts leave more room for buffers
    naive         gather everything everywhere, then slice: the baseline

Under a memory limit each exchange runs in as many rounds as its buffers require. A planner that provably cannot be
quicker than a candidate found before, one that fits, is not asked; the plan then says so among its alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from optim_redist._methods.candidates import from_layouts, from_phases, from_way, one_exchange
from optim_redist._methods.collective_search import search_collectives
from optim_redist._methods.least_seconds import (
    least_of_gathering,
    least_of_nearest,
    least_of_one_hop,
    least_of_sharing,
    least_of_stopping_over,
    least_of_two_hops,
)
from optim_redist._methods.packed import can_be_packed, packed_exchange
from optim_redist._methods.reduce_inside import ways_to_reduce
from optim_redist._methods.scatter import scattered
from optim_redist._methods.spread import spread
from optim_redist._methods.stopover import can_stop_over, stopover
from optim_redist._multi_axis.notebook import notebook_layouts
from optim_redist.cost import CommModel
from optim_redist.errors import NotRepresentableError, RedistError
from optim_redist.layout import Layout
from optim_redist.lower_bounds import Bounds
from optim_redist.moves import Candidate, Request, Stage, Step
from optim_redist.problem import Problem
from optim_redist.units import format_seconds

UNSEARCHED = "takes a search, which is made with a budget or if asked for by name"
Losers = list[tuple[str, float, str]]  # planner, seconds it takes at least, why it was not asked


def candidates(request: Request, limits: Bounds, asked: Sequence[str] | None = None) -> tuple[list[Candidate], Losers]:
    """The planners' candidates, in a fixed order, and the applicable planners that were not asked, with the reason."""
    if asked is not None and set(asked) - {"local", *_PLANNERS}:
        raise RedistError(f"planners are {['local', *_PLANNERS]}, got {list(asked)}")
    if limits.lb == 0:
        return [_local(request, limits)], []
    found: list[Candidate] = []
    hopeless: Losers = []
    refused: list[str] = []
    best = float("inf")
    for name in _DEFAULT if asked is None else [name for name in _PLANNERS if name in asked]:
        planner = _PLANNERS[name]
        if not planner.applies(request, limits):
            continue
        if asked is None and planner.spares_rounds and any(_fits_in_one(one, request) for one in found):
            continue
        if asked is None and found:
            least = planner.least_seconds(request, limits)
            if least >= best:
                at_least, possible = format_seconds(least), format_seconds(best)
                reason = f"not tried, as it takes at least {at_least} and {possible} is possible"
                hopeless.append((name, least, reason))
                continue
            if planner.searches and not request.budget:
                hopeless.append((name, least, UNSEARCHED))
                continue
        try:
            candidate = planner.make(request, limits)
        except NotRepresentableError as error:
            refused.append(f"; {name}: {error}")
            continue
        if candidate is not None:
            found.append(candidate)
            if request.allows(candidate.peak_bytes):
                best = min(best, candidate.seconds)
    if not found:
        raise RedistError(
            f"none of the planners {_DEFAULT if asked is None else list(asked)} fits this redistribution"
            + ("" if asked is None else "; ask for 'direct' as well")
            + "".join(refused)
        )
    return found, hopeless


def _fits_in_one(candidate: Candidate, request: Request) -> bool:
    """Whether it is one exchange of one round, which ways of two exchanges are hardly quicker than."""
    return request.allows(candidate.peak_bytes) and [step.rounds for step in candidate.steps] == [1]


def best_relay(problem: Problem, limits: Bounds) -> tuple[str, int]:
    """Where one step is above the bound, the planner with the least busy rank, and what that rank moves."""
    request = Request(problem, 1, CommModel.preset("flat"))
    names = ("relay", "scatter") if problem.num_contributions > 1 else ("forward",)
    made = [_PLANNERS[name].make(request, limits) for name in names if _PLANNERS[name].applies(request, limits)]
    found = [(candidate.busiest, candidate.planner) for candidate in made if candidate is not None]
    moved, name = min([*found, (limits.single_hop, "direct")])
    return name, moved


def held_without_moves(problem: Problem) -> int:
    """Elements that the fullest rank holds where nothing moves: a part that stays whole is its own target."""
    if problem.is_even and not problem.started and problem.divisor == 1:
        held, needed = problem.held_by_all, problem.needed_by_all
        return held if held == needed else held + needed
    stored = problem.num_stored.items()
    return max(held if problem.stays_whole(rank) else held + needed for rank, (held, needed) in stored)


def _local(request: Request, limits: Bounds) -> Candidate:
    problem, width = request.problem, request.itemsize
    stage = Stage("local", "direct", problem.src, problem.dst)
    seconds = request.model.pack_seconds(limits.live * width)
    peak = held_without_moves(problem) * width
    step = Step("local", problem.ranks, str(problem.dst), 0, 0, 0, seconds, peak)
    return Candidate("local", (stage,), (step,), 0)


def _naive(request: Request, limits: Bounds) -> Candidate:
    everywhere = Layout(request.problem.src.mesh, [None] * request.problem.src.num_dims)
    return from_layouts("naive", request, [("all_gather", everywhere), ("slice", request.problem.dst)])


def _collectives(request: Request, limits: Bounds) -> Candidate | None:
    problem = request.problem
    steps = search_collectives(problem.shape, problem.src, problem.dst, max_expansions=request.budget or 20_000)
    if not steps:
        return None
    # each reducing step rounds its results, and starts the order of ranks anew
    if request.deterministic and sum(step.op in ("all_reduce", "reduce_scatter") for step in steps) > 1:
        return None
    layouts = [(step.op, step.layout) for step in steps]
    # the last state is the target, written on the mesh of prime factors; the plan ends in the target as given
    layouts[-1] = (layouts[-1][0], problem.dst)
    return from_layouts("collectives", request, layouts)


def _scatter(request: Request, limits: Bounds) -> Candidate | None:
    """Of two ways to scatter, both in two exchanges, the one whose busiest rank moves less."""
    dst = request.problem.dst
    found = [
        from_layouts("scatter", request, [("reduce", layout), ("exchange", dst)])
        for layout in scattered(request.problem)
    ]
    return min(found, key=lambda c: c.busiest, default=None)


def _spread(request: Request, limits: Bounds) -> Candidate | None:
    ways = [[("exchange", middle), ("all_gather", request.problem.dst)] for middle in spread(request.problem)]
    found = [from_layouts("spread", request, way) for way in ways]
    return min(found, key=lambda one: (not request.allows(one.peak_bytes), one.seconds), default=None)


def _can_be_spread(request: Request, limits: Bounds) -> bool:
    problem = request.problem
    finished = not (problem.src.partial or problem.dst.partial)
    return finished and problem.dst_replicas > 1 and limits.single_hop > limits.lb and not request.has_borders


def _hierarchical(request: Request, limits: Bounds) -> Candidate | None:
    problem = request.problem
    if problem.num_contributions == 1:
        return from_phases("hierarchical", request)
    reducing = ways_to_reduce(problem.shape, problem.src, problem.dst, request.model.topology)
    if reducing is None:
        return None
    src, ways = reducing
    found = [from_way(request, src, way) for way in ways]
    return min(found, key=lambda c: (not request.allows(c.peak_bytes), c.seconds, len(c.steps)))


def _can_be_hierarchical(request: Request, limits: Bounds) -> bool:
    problem = request.problem
    whole = problem.num_contributions == 1
    return request.has_borders and (whole or not (request.deterministic or problem.dst.partial))


def _notebook(request: Request, limits: Bounds) -> Candidate:
    problem = request.problem
    most = None if request.memory_limit is None else request.memory_limit // request.itemsize
    found = from_layouts("notebook", request, notebook_layouts(problem.shape, problem.src, problem.dst, most))
    if request.allows(found.peak_bytes):
        return found
    # what OptimalRedist falls back to where nothing else stays inside the limits
    return from_layouts("notebook", request, [("exchange_*", problem.dst)])


def _can_gather(request: Request, limits: Bounds) -> bool:
    return not (request.problem.src.partial or request.problem.dst.partial) and _on_one_set_of_ranks(request, limits)


def _on_one_set_of_ranks(request: Request, limits: Bounds) -> bool:
    here, there = request.problem.src.mesh.ranks, request.problem.dst.mesh.ranks
    return here == there or set(here) == set(there)


class _Planner(NamedTuple):
    make: Callable[[Request, Bounds], Candidate | None]
    least_seconds: Callable[[Request, Bounds], float]
    applies: Callable[[Request, Bounds], bool] = lambda request, limits: True
    # when it is asked though not named: with a budget only; where nothing else fits in one exchange of one round; never
    searches: bool = False
    spares_rounds: bool = False
    by_name_only: bool = False


_PLANNERS = {
    "direct": _Planner(one_exchange, least_of_one_hop),
    "nearest": _Planner(
        lambda request, limits: one_exchange(request, limits, method="nearest"),
        least_of_nearest,
        lambda request, limits: request.has_borders and request.groups.spread,
    ),
    "spread": _Planner(_spread, least_of_stopping_over, _can_be_spread),
    "forward": _Planner(
        lambda request, limits: from_phases("forward", request),
        least_of_two_hops,
        lambda request, limits: request.problem.num_contributions == 1 and limits.single_hop > limits.lb,
    ),
    "relay": _Planner(
        lambda request, limits: from_phases("relay", request),
        least_of_two_hops,
        lambda request, limits: request.problem.num_contributions > 1 and request.problem.dst_replicas > 1,
    ),
    "scatter": _Planner(
        _scatter,
        least_of_stopping_over,
        lambda request, limits: request.problem.num_contributions > 1 and limits.direct_recv > limits.lb,
    ),
    "hierarchical": _Planner(_hierarchical, least_of_sharing, _can_be_hierarchical),
    "packed": _Planner(packed_exchange, least_of_one_hop, can_be_packed),
    "stopover": _Planner(stopover, least_of_stopping_over, can_stop_over, spares_rounds=True),
    "collectives": _Planner(_collectives, least_of_one_hop, _on_one_set_of_ranks, searches=True),
    "notebook": _Planner(_notebook, least_of_one_hop, by_name_only=True),
    "naive": _Planner(_naive, least_of_gathering, _can_gather),
}
_DEFAULT = [name for name, planner in _PLANNERS.items() if not planner.by_name_only]
