"""A plan as text for people: the table of its steps, its distance from the lower bounds, and why it was chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from optim_redist._inside import Inside
from optim_redist._methods.candidates import whole_phases
from optim_redist._methods.node_volumes import node_volumes
from optim_redist._methods.own import is_in_order
from optim_redist._multi_axis.notebook import notebook_charges
from optim_redist.cost import Topology
from optim_redist.lower_bounds import Bounds, Cut, bounds_of, least_inside_groups
from optim_redist.moves import Phase
from optim_redist.planners import UNSEARCHED, best_relay
from optim_redist.plans import Plan, check_plan
from optim_redist.problem import Problem
from optim_redist.units import align, format_bytes, format_seconds

Traffic = dict[tuple[int, int], int]
Crossed = tuple[Cut, int, int]  # a group, and the elements that go into it and out of it

_BOUND_MEANING = {
    "receive": "what the neediest rank lacks",
    "send": "what the holders of one part alone have and others need, shared among them",
    "reduction": "what adding up contributions takes",
}


def traffic(plan: Plan) -> Traffic:
    """Elements that go from one rank to another, over all steps of the plan."""
    found: Traffic = {}
    for _, phases in plan.phases:
        for phase in phases:
            for pair, count in phase.traffic.items():
                found[pair] = found.get(pair, 0) + count
    return found


def crossings(plan: Plan, cuts: Sequence[Cut]) -> list[Crossed]:
    """For every group of ranks, the elements that the plan brings into it and out of it."""
    found = [[0, 0] for _ in cuts]
    for stage, problem in zip(plan.stages, plan.problems, strict=True) if cuts else ():
        for total, (inbound, outbound) in zip(found, _crossed(problem, stage.method, plan.topology, cuts)):
            total[0] += inbound
            total[1] += outbound
    return [(cut, inbound, outbound) for cut, (inbound, outbound) in zip(cuts, found)]


def _crossed(problem: Problem, method: str, topology: Topology, cuts: Sequence[Cut]) -> list[tuple[int, int]]:
    """The elements that one stage brings into and out of every group."""
    if is_in_order(problem, method, topology) and problem.src_replicas == 1:
        # every element comes straight from its only holder
        groups = [Inside(problem, cut.ranks) for cut in cuts]
        return [(group.direct_inbound, group.direct_outbound) for group in groups]
    nodes = None
    if method == "hierarchical" and problem.num_contributions == 1:
        nodes = node_volumes(problem, topology, bounds_of(problem).lb)
    if nodes is not None:
        known = {group.ranks: (inbound, outbound) for group, inbound, outbound in nodes.crossed}
        if all(cut.ranks in known for cut in cuts):
            return [known[cut.ranks] for cut in cuts]
    return _listed(whole_phases(problem, method, topology), cuts)


def _listed(phases: Iterable[Phase], cuts: Sequence[Cut]) -> list[tuple[int, int]]:
    """The elements that go into and out of every group, summed over all transfers."""
    groups: dict[int, set[int]] = {}
    for number, cut in enumerate(cuts):
        for rank in cut.ranks:
            groups.setdefault(rank, set()).add(number)
    inbound, outbound = [0] * len(cuts), [0] * len(cuts)
    nowhere: set[int] = set()
    for phase in phases:
        for (sender, receiver), count in phase.traffic.items():
            here, there = groups.get(sender, nowhere), groups.get(receiver, nowhere)
            if here != there:
                for number in there - here:
                    inbound[number] += count
                for number in here - there:
                    outbound[number] += count
    return list(zip(inbound, outbound))


def worst_cut(crossed: Iterable[Crossed]) -> tuple[Cut, float, bool] | None:
    """The group with the largest ratio of traffic across its border to what has to cross it; None without groups.

    The ratio is that of the direction in which more goes, of those in which something has to go; the last value says
    whether this is out of the group. Groups across whose border nothing has to go come last, since what holders of the
    same share among them need not go out of any one group.
    """
    found = []
    for cut, inbound, outbound in crossed:
        ways = [(cut.inbound > 0, inbound, cut.inbound, False), (cut.outbound > 0, outbound, cut.outbound, True)]
        is_needed, used, needed, leaves = max(ways, key=lambda way: way[:2])
        ratio = used / needed if needed else 1.0 if not used else float("inf")
        found.append((is_needed, ratio, cut, leaves))
    if not found:
        return None
    _, ratio, cut, leaves = max(found, key=lambda group: group[:2])
    return cut, ratio, leaves


def plan_table(plan: Plan, crossed: Sequence[Crossed] | None = None) -> str:
    """The text of ``print(plan)``; ``crossed`` is the result of ``crossings`` if it is known already."""
    width = plan.itemsize
    shape = "×".join(map(str, plan.shape)) or "scalar"
    head = [
        f"{shape} {plan.dtype}, {_num_ranks(plan)} ranks, by {plan.planner}; model {plan.model}, plan {plan.hash[:12]}",
        f"  from  {plan.src} on {plan.src.mesh}",
        f"  to    {plan.dst} on {plan.dst.mesh}" + _beginning(plan),
    ]
    rows = [("step", "operation", "group", "layout after", "receives", "sends", "time", "peak")]
    for number, step in enumerate(plan.steps, 1):
        rows.append(
            (
                str(number),
                step.op,
                f"{len(step.ranks)} ranks",
                step.layout,
                format_bytes(step.recv * width),
                format_bytes(step.send * width),
                format_seconds(step.seconds),
                format_bytes(step.peak),
            )
        )
    table = align(rows, right=(0, 4, 5, 6, 7)) if plan.steps else "nothing to do: every rank holds what it needs"
    return "\n".join([*head, table, *_footer(plan, crossings(plan, plan.bounds.cuts) if crossed is None else crossed)])


def _num_ranks(plan: Plan) -> int:
    return len({*plan.src.mesh.ranks, *plan.dst.mesh.ranks})


def _footer(plan: Plan, crossed: Sequence[Crossed]) -> list[str]:
    limits, width = plan.bounds, plan.itemsize
    lines = []
    if limits.lb:
        bound = f"{limits.lb} elements, {format_bytes(limits.lb * width)} ({limits.lb_kind})"
        lines.append(
            f"no plan moves less than {bound} on its busiest rank; this one moves {plan.volume_ratio:.2f} × that"
        )
    else:
        lines.append("no rank lacks anything, so nothing is sent")
    worst = worst_cut(crossed)
    if worst is not None and limits.lb:
        cut, ratio, leaves = worst
        way, needed = ("out of", cut.outbound) if leaves else ("into", cut.inbound)
        where = f"{way} the {cut.level} of ranks {_span(cut.ranks)}"
        if needed:
            least = format_bytes(needed * width)
            lines.append(f"{where} go at least {least}; this plan crosses its border {ratio:.2f} × as much as needed")
        else:
            found = ", and nothing does" if ratio == 1 else "; this plan crosses its border nevertheless"
            lines.append(f"nothing has to go {where}{found}")
        lines += _busy_inside(plan)
    limit = "" if plan.memory_limit is None else f", limit {format_bytes(plan.memory_limit)}"
    both = f"source and target alone take {format_bytes(limits.memory * width)}"
    if plan.peak_bytes < limits.memory * width and not plan.donate:
        both = "a part that stays is source and target at once"
    lines.append(f"memory {format_bytes(plan.peak_bytes)} at peak; {both}{limit}")
    lines.append(
        f"time {format_seconds(plan.time)}" + (f", {plan.gap:.0%} above the bound on time" if limits.seconds else "")
    )
    if plan.planner == "notebook":
        charged, gathering = notebook_charges(plan.shape, plan.stages)
        lines.append(
            f"the notebook's OptimalRedist: its own model charges these operations {charged:g}, "
            f"gathering and splitting {gathering:g}"
        )
    return [*lines, _why(plan)]


def _busy_inside(plan: Plan) -> list[str]:
    """A line on why a plan that brings nothing into a group twice has a rank busier than the bound, if it has one."""
    if plan.planner != "hierarchical" or plan.src.partial or plan.volume_ratio <= 1:
        return []
    found = [(least_inside_groups(plan.problem, level.group_of), level.name) for level in plan.topology.levels]
    least, group = max(found, key=lambda level: level[0])
    if least > plan.bounds.lb:
        return [
            f"as nothing enters a {group} that has it, ranks that hold what others in theirs need send "
            f"{least / plan.bounds.lb:.2f} × that bound at least"
        ]
    if len(plan.steps) == 1:
        # nothing is sent on: it is what any plan of one step moves
        return []
    return [f"as everything enters a {group} once, ranks that fetch it send it on to others in theirs"]


def _why(plan: Plan) -> str:
    """One line: the nearest alternative that the plan was preferred to."""
    others = [other for other in plan.alternatives if other.reason != UNSEARCHED]
    if not others:
        return f"chosen: {plan.planner} is the only candidate"
    nearest = min(others, key=lambda other: other.seconds)
    return f"chosen: {plan.planner} is the fastest that fits; next is {nearest.planner}: {nearest.reason}"


def _span(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")


def _beginning(plan: Plan) -> str:
    return "" if plan.partial_init == "owner" else "; sums begin as equal parts of the value on all ranks"


def explain(plan: Plan) -> str:
    """The table, what the bounds mean for this plan, what limits its time, and what every alternative would cost."""
    check_plan(plan)
    crossed = crossings(plan, plan.bounds.cuts)
    lines = [plan_table(plan, crossed), "", "What no plan can beat"]
    lines += [f"  {line}" for line in [*bounds_lines(plan.bounds, plan.itemsize, crossed), *_relays(plan)]]
    lines += ["", "What decides the time", f"  {_binding(plan, crossed)}", "", "Why this one"]
    if not plan.alternatives:
        lines.append(f"  {plan.planner} was the only candidate")
    else:
        lines.append(f"  {plan.planner} takes {format_seconds(plan.time)} by the model {plan.model}")
        for other in plan.alternatives:
            lines.append(f"  {other.planner}: {other.reason}")
    return "\n".join(lines)


def bounds_lines(limits: Bounds, width: int, crossed: Sequence[Crossed] | None = None) -> list[str]:
    """The bounds in words, one per line; with ``crossed``, also what a plan brings into and out of every group."""
    lines = [
        f"a rank must receive {limits.recv} elements, {format_bytes(limits.recv * width)}: {_BOUND_MEANING['receive']}",
        f"a rank must send {limits.send} elements, {format_bytes(limits.send * width)}: {_BOUND_MEANING['send']}",
    ]
    if limits.reduction:
        lines.append(
            f"reducing moves {limits.reduction} elements on the busiest rank, {format_bytes(limits.reduction * width)}"
        )
    lines.append(f"together: {limits.lb} elements, {format_bytes(limits.lb * width)} ({limits.lb_kind})")
    if limits.single_hop > limits.lb:
        lines.append(
            f"in one step, straight from holders, the busiest rank moves {limits.single_hop}: {_above(limits)}"
        )
    borders = [(cut, 0, 0) for cut in limits.cuts] if crossed is None else crossed
    for cut, inbound, outbound in borders if limits.lb else ():
        text = f"the {cut.level} of ranks {_span(cut.ranks)}: {format_bytes(cut.inbound * width)} must enter, "
        text += f"{format_bytes(cut.outbound * width)} must leave"
        if crossed is not None:
            text += f"; with this plan {format_bytes(inbound * width)} and {format_bytes(outbound * width)} do"
        lines.append(text)
    lines.append(f"source and target together take {format_bytes(limits.memory * width)} on the fullest rank")
    if limits.seconds:
        lines.append(f"so it takes at least {format_seconds(limits.seconds)}")
    return lines


def _above(limits: Bounds) -> str:
    """Why a plan of one step is above the bound."""
    if limits.direct_recv > limits.lb:
        return "a needer receives every contribution; others could combine some first"
    return "several ranks need what one has; they could pass it on among themselves"


def _relays(plan: Plan) -> list[str]:
    """How far relays close the gap between a plan of one step and the bound."""
    limits = plan.bounds
    if limits.single_hop <= limits.lb:
        return []
    name, moved = best_relay(plan.problem, limits)
    closed = (limits.single_hop - moved) / (limits.single_hop - limits.lb)
    line = f"relayed, {name} would move {moved}, which closes {closed:.0%} of the gap"
    if closed >= 0.5:
        return [line]
    if not closed:
        line = "no relay would move less"
    why = "only ranks that need an element can pass it on without receiving more, and these have no room left"
    if plan.src.partial:
        why = "contributions have to meet at some rank, which then receives them; the bound counts holders and needers"
    return [f"{line}; no closer, since {why}"]


def _binding(plan: Plan, crossed: Sequence[Crossed]) -> str:
    """What would have to improve for the plan to become faster."""
    if not plan.communicates:
        return "nothing is sent; only local copies take time"
    step = max(plan.steps, key=lambda step: step.seconds)
    slowest = max((max(i, o) * plan.itemsize / cut.bandwidth for cut, i, o in crossed if cut.bandwidth), default=0.0)
    if slowest > 0.5 * plan.time:
        return f"the border of a group: crossing it takes {format_seconds(slowest)}"
    # of the candidates only those that do not fit are quicker
    quicker = [other for other in plan.alternatives if other.seconds < plan.time and other.reason != UNSEARCHED]
    if plan.memory_limit is not None and (quicker or any(step.rounds > 1 for step in plan.steps)):
        return (
            f"memory: the plan takes {format_bytes(plan.peak_bytes)} of the {format_bytes(plan.memory_limit)} allowed"
        )
    if step.seconds > 10 * step.bytes / plan.topology.rank_bandwidth:
        sizes = {step.bytes for step in plan.steps}
        most = format_bytes(max(sizes)) + (" each" if len(sizes) == 1 else " at most")
        return f"latency: {len(plan.steps)} step(s) of {most} are too small to fill the wire"
    side = "receive" if step.recv >= step.send else "send"
    return f"{side} on the busiest rank: {format_bytes(step.bytes)} in {format_seconds(step.seconds)} of step {step.op}"
