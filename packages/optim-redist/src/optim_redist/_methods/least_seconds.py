"""The least seconds in which any candidate of a planner can be done, without making one.

They follow from its number of exchanges, the bound on volume and what must cross the borders of groups. ``planners``
does not ask a planner whose least is no less than what another one's candidate takes.
"""

from __future__ import annotations

from collections.abc import Mapping

from optim_redist._inside import Inside
from optim_redist._methods.candidates import copied_elements
from optim_redist.lower_bounds import Bounds
from optim_redist.moves import Request
from optim_redist.problem import Problem


def least_of_one_hop(request: Request, limits: Bounds) -> float:
    """Least seconds in which what has to move can arrive, in as few as one exchange."""
    return _least(request, limits.lb, _crossing(limits))


def _crossing(limits: Bounds) -> dict[str, int]:
    """By level, the elements that have to cross the border that most have to cross."""
    found: dict[str, int] = {}
    for cut in limits.cuts:
        if cut.bandwidth:
            found[cut.level] = max(found.get(cut.level, 0), cut.inbound, cut.outbound)
    return found


def least_of_nearest(request: Request, limits: Bounds) -> float:
    """Least seconds of one exchange straight from holders; exact if no part has holders in several groups."""
    spread = request.groups.spread
    crossing = {
        level: max(max(group.direct_inbound, 0 if spread else group.direct_outbound) for group in groups)
        for level, groups in request.groups.levels.items()
    }
    return _least(request, limits.single_hop, crossing) + _least_copying(
        request, limits.direct_recv, limits.direct_send
    )


def least_of_gathering(request: Request, limits: Bounds) -> float:
    """Least seconds in which every rank receives all that it does not hold, straight from holders."""
    problem = request.problem
    total, num_ranks = problem.num_elements, len(problem.ranks)
    gathered = sent = total - limits.live_src
    if not problem.is_even:
        sent = -(-(total * num_ranks - sum(held for held, _ in problem.num_stored.values())) // num_ranks)
    crossing = {
        level: max(len(group.ranks) * (total - group.held) for group in groups)
        for level, groups in request.groups.levels.items()
    }
    # nothing moves while the rank takes its part of all that was gathered, which takes a call
    return _least(request, max(gathered, sent), crossing) + request.model.call_seconds


def _least(request: Request, moved: int, crossing: Mapping[str, int]) -> float:
    """Least seconds to move these elements in place on the busiest rank and, by level, across the busiest border."""
    model, width = request.model, request.itemsize
    seconds = min(model.least_seconds(moved * width), _least_divided(request, moved))
    for level, amount in crossing.items():
        if amount:
            seconds = max(seconds, model.call_seconds + model.border_seconds(level, amount * width))
    return seconds


def _least_divided(request: Request, moved: int) -> float:
    """Least seconds to move these elements on the busiest rank in two or more exchanges, or rounds.

    By a measured curve two that divide the bytes may be quicker than one of all bytes, and than one of all and one of
    none. But no exchange of b bytes is quicker than latency + b / bandwidth of the topology.
    """
    model, inner = request.model, request.model.topology
    return 2 * (model.call_seconds + inner.latency) + moved * request.itemsize / inner.rank_bandwidth


def _least_copying(request: Request, recv: int, send: int) -> float:
    """Least seconds of packing and unpacking on the way from source to target, without layouts between them."""
    return request.model.pack_seconds(copied_elements(request.problem, recv, send) * request.itemsize)


def least_of_two_hops(request: Request, limits: Bounds) -> float:
    """Least seconds of two exchanges that together move what has to move, however it is divided between them."""
    model, seconds = request.model, _least_divided(request, limits.lb)
    for level, amount in _crossing(limits).items():
        if amount:
            # the other exchange may cross the border, too, or not
            other = min(model.topology.latency, model.border_seconds(level, 0))
            crossing = model.border_seconds(level, amount * request.itemsize)
            seconds = max(seconds, 2 * model.call_seconds + crossing + other)
    return seconds


def least_of_stopping_over(request: Request, limits: Bounds) -> float:
    """Least seconds by way of another layout."""
    # where nothing moves in one of the two exchanges, a rank still takes its part
    return min(least_of_one_hop(request, limits) + request.model.call_seconds, least_of_two_hops(request, limits))


def least_of_sharing(request: Request, limits: Bounds) -> float:
    """Least seconds of the hierarchical planner.

    It takes two exchanges if it reduces, shares what was fetched, or lets needers forward. Otherwise it is one exchange
    straight from the nearest holders, as it is where needers that could forward have no room for it.
    """
    problem = request.problem
    if problem.num_contributions > 1:
        return least_of_stopping_over(request, limits)
    levels = list(request.groups.levels.values())
    copying = _least_copying(request, limits.recv, limits.send)
    if len(levels) > 1:
        return least_of_one_hop(request, limits) + copying
    two_hops, groups = least_of_two_hops(request, limits) + copying, levels[0]
    if any(cut.inbound and _shares(problem, group) for cut, group in zip(limits.cuts, groups)):
        return two_hops
    one_hop = least_of_nearest(request, limits)
    # if each part has its holders in one group, they send what they send in the direct exchange
    forwards = limits.direct_send > limits.lb or request.groups.spread
    if forwards and any(
        n > limits.lb * len(group.holders[part]) for group in groups for part, n in group.demand_here.items()
    ):
        return min(one_hop, two_hops)
    return one_hop


def _shares(problem: Problem, group: Inside) -> bool:
    """Whether several ranks of a group that lacks elements need the same ones from outside."""
    counts = group.targets.values()
    if max(counts) == 1 or min(counts) > 1:
        return max(counts) > 1
    return any(
        count > 1 and problem.num_needed(point) > group.held_of_target[point] for point, count in group.targets.items()
    )
