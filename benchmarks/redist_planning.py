"""Planning figures of optim-redist beside DTensor's two planners: volumes, cuts, memory, and times to plan.

No process group and no tensor is needed: plans are compared by what their steps count, per most loaded rank. Times are
those of `redist_planning_times`.
"""

from __future__ import annotations

import importlib.util
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, islice
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.redist_peers import dtensor_plan, is_inexpressible
from benchmarks.redist_planning_times import cold_plan, latency, percentiles, timed
from optim_redist import (
    CommModel,
    LayoutError,
    RedistError,
    Topology,
    bounds,
    same_ownership,
    verify,
)
from optim_redist._methods.collective_search import search_collectives  # noqa: PLC2701 - counted as the examples count
from optim_redist.plan_text import crossings
from optim_redist.planners import best_relay
from optim_redist.problem import Problem

CASES = Path(__file__).parents[1] / "packages" / "optim-redist" / "tests" / "redist_cases.py"
# the families in the numbers in which the example file was drawn: even in mesh order, in any order, cyclic, uneven
MIX = "C" * 15 + "O" * 6 + "B" * 7 + "U" * 4


def load_cases() -> ModuleType:
    """The generator of random redistributions that the tests use."""
    spec = importlib.util.spec_from_file_location("redist_cases", CASES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def geomean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def _spread(ratios: Sequence[float]) -> dict[str, Any]:
    """How a list of ratios to a bound is spread."""
    if not ratios:
        return {"cases": 0}
    return {
        "cases": len(ratios),
        "geomean": round(geomean(ratios), 4),
        "above_%": round(100 * (geomean(ratios) - 1), 2),
        "at_bound_%": round(100 * sum(ratio <= 1 + 1e-9 for ratio in ratios) / len(ratios), 1),
        "max": round(max(ratios), 2),
    }


def coverage(cases: Sequence[Any]) -> dict[str, Any]:
    """How many cases of all families are planned, and how many of those plans the symbolic verifier proves."""
    planned = proven = silent = still = 0
    for case in cases:
        try:
            made, _ = cold_plan(case)
        except LayoutError:
            raise
        except RedistError:
            continue
        planned += 1
        verify(made)
        proven += 1
        if made.bounds.lb == 0:
            still += 1
            silent += not made.communicates
    return {"cases": len(cases), "planned": planned, "proven": proven, "bound_0": still, "of_those_silent": silent}


def volumes(cases: Sequence[Any], family_of: Callable[[int], str]) -> list[dict[str, Any]]:
    """Volume of the busiest rank over the lower bound, on one level of ranks; ``family_of`` names a case's family."""
    one_hop: dict[str, list[float]] = {}
    relayed: list[float] = []
    single: list[float] = []
    theirs: dict[str, list[float]] = {"greedy": [], "graph": []}
    beside: dict[str, list[float]] = {"greedy": [], "graph": []}
    for number, case in enumerate(cases):
        limits = bounds(case.shape, case.src, case.dst)
        if not limits.lb:
            continue
        made, _ = cold_plan(case, planners=["direct"])
        ratio = made.volume_ratio
        one_hop.setdefault(family_of(number), []).append(ratio)
        single.append(ratio * limits.lb / limits.single_hop)
        relayed.append(cold_plan(case, planners=["forward"])[0].volume_ratio if ratio > 1 else ratio)
        for name in theirs:
            found = dtensor_plan(case, graph=name == "graph")
            if found is not None:
                theirs[name].append(found.recv / limits.lb)
                beside[name].append(made.volume_ratio)
    everything = [ratio for ratios in one_hop.values() for ratio in ratios]
    rows = [
        {"goal": "flat volume / LB", "planner": "ours, one hop", **_spread(everything)},
        *(
            {"goal": "flat volume / LB", "planner": f"ours, one hop, {family}", **_spread(ratios)}
            for family, ratios in sorted(one_hop.items())
        ),
        {"goal": "flat volume / LB", "planner": "ours, forwarded where one hop is above", **_spread(relayed)},
        {"goal": "flat volume / best single hop", "planner": "ours, one hop", **_spread(single)},
    ]
    for name, ratios in theirs.items():
        rows.append({"goal": "flat volume / LB", "planner": f"DTensor {name}", **_spread(ratios)})
        rows.append(
            {"goal": "flat volume / LB", "planner": f"ours where DTensor {name} plans", **_spread(beside[name])}
        )
    return rows


def gaps(cases: Sequence[Any]) -> list[dict[str, Any]]:
    """How much of the gap between one hop and the bound relays leave, and whether the text says why more cannot go."""
    left: dict[str, list[float]] = {"values": [], "reductions": []}
    explained = 0
    for case in cases:
        limits = bounds(case.shape, case.src, case.dst)
        if limits.single_hop <= limits.lb:
            continue
        problem = Problem(case.shape, case.src, case.dst)
        _, moved = best_relay(problem, limits)
        share = (moved - limits.lb) / (limits.single_hop - limits.lb)
        left["values" if problem.num_contributions == 1 else "reductions"].append(share)
        if share > 0.5:
            explained += "no closer, since" in cold_plan(case)[0].explain()
    rows = [
        {
            "goal": "gap of one hop closed by half or more",
            "planner": f"ours, {what}",
            "cases": len(shares),
            "count": sum(share <= 0.5 for share in shares),
            "mean_left": round(statistics.fmean(shares or [0.0]), 3),
        }
        for what, shares in left.items()
    ]
    others = sum(share > 0.5 for shares in left.values() for share in shares)
    return [*rows, {"goal": "the others say why", "planner": "ours", "cases": others, "count": explained}]


def cuts(cases: Sequence[Any]) -> list[dict[str, Any]]:
    """What enters the fullest node, mesh axis 0 numbering the nodes, over what has to; bytes alone decide."""
    ratios: dict[str, list[float]] = {"ours": [], "ours, direct": [], "DTensor greedy": [], "DTensor graph": []}
    busiest: list[float] = []
    for case in cases:
        mesh = case.src.mesh
        if mesh.num_axes < 2 or case.dst.mesh != mesh:
            continue
        topology = Topology.from_mesh_axis(mesh, 0)
        limits = bounds(case.shape, case.src, case.dst, topology)
        needed = max((cut.inbound for cut in limits.cuts), default=0)
        if not needed:
            continue
        for name, options in (("ours", {}), ("ours, direct", {"planners": ["direct"]})):
            made, _ = cold_plan(case, cost_model=_without_latency(topology), **options)
            ratios[name].append(max(inbound for _, inbound, _ in crossings(made, limits.cuts)) / needed)
            if name == "ours":
                busiest.append(made.volume_ratio)
        for name in ("greedy", "graph"):
            found = dtensor_plan(case, graph=name == "graph")
            if found is not None:
                ratios[f"DTensor {name}"].append(found.into_node / needed)
    rows = [{"goal": "into nodes / cut", "planner": name, **_spread(values)} for name, values in ratios.items()]
    return [*rows, {"goal": "busiest rank / LB, with nodes", "planner": "ours", **_spread(busiest)}]


def _without_latency(topology: Topology) -> CommModel:
    """A model in which only bytes take time, so that the small tensors here are planned like large ones."""
    levels = tuple(replace(level, latency=0.0) for level in topology.levels)
    return CommModel("bytes", replace(topology, latency=0.0, levels=levels), pack_bandwidth=1e18, call_seconds=0.0)


def collectives(cases: Sequence[Any]) -> list[dict[str, Any]]:
    """The best sequence of plain collectives over the lower bound, what it holds, and how long the search takes."""
    ratios, seconds, over = [], [], 0
    for case in cases:
        limits = bounds(case.shape, case.src, case.dst)
        if not limits.lb or is_inexpressible(case):
            continue
        steps, spent = timed(lambda case=case: search_collectives(case.shape, case.src, case.dst))
        if steps is None:
            continue
        seconds.append(spent)
        ratios.append(sum(step.recv for step in steps) / limits.lb)
        over += any(prod(step.layout.local_shape(case.shape, 0)) > limits.live for step in steps)
    return [
        {"goal": "collectives only / LB", "planner": "ours", **_spread(ratios)},
        {"goal": "collectives: holds more than max(src, dst)", "planner": "ours", "cases": len(ratios), "count": over},
        {"goal": "collectives: time to search", "planner": "ours", **percentiles(seconds)},
    ]


def exhaustive(examples: Sequence[tuple[str, dict[str, Any], Any]]) -> dict[str, Any]:
    """How many sequences of collectives are as short as the example file's, which an exhaustive search has found."""
    compared = equal = 0
    for _, row, case in examples:
        best = row.get("best_collective_sequence_recv")
        if best is not None:
            steps = search_collectives(case.shape, case.src, case.dst) or []
            compared += 1
            equal += sum(step.recv for step in steps) == best
    return {"goal": "collectives: equal to exhaustive search", "planner": "ours", "cases": compared, "count": equal}


def memory(cases: Sequence[Any]) -> list[dict[str, Any]]:
    """How many plans hold more live elements than the larger of source and target."""
    rows = []
    for name in ("greedy", "graph"):
        over, worst, total = 0, 1.0, 0
        for case in cases:
            found = dtensor_plan(case, graph=name == "graph")
            if found is None:
                continue
            live = bounds(case.shape, case.src, case.dst).live
            total += 1
            over += found.live > live
            worst = max(worst, found.live / live)
        share = round(100 * over / max(1, total), 1)
        rows.append(
            {
                "goal": "live > max(src, dst)",
                "planner": f"DTensor {name}",
                "cases": total,
                "share_%": share,
                "max": round(worst, 2),
            }
        )
    return rows


def rows_of(num_random: int) -> list[dict[str, Any]]:
    """Every planning figure, over the example file and ``num_random`` random redistributions of each kind."""
    module = load_cases()
    named = module.example_cases()
    examples = [case for _, _, case in named]
    expressible = [module.random_case(seed, families="CO") for seed in range(num_random)]
    everything = [module.random_case(seed, families=module.FAMILIES + "P") for seed in range(num_random)]
    # as in the example file, source and target differ
    drawn = ((seed, module.random_case(seed, families=MIX)) for seed in count())
    seeds, ordinary = zip(*islice((pair for pair in drawn if not same_ownership(*pair[1][1:], pair[1][0])), num_random))

    def family_of(number: int) -> str:
        # the first that ``random_case`` draws
        return "examples" if number < len(examples) else random.Random(seeds[number - len(examples)]).choice(MIX)

    return [
        {"goal": "coverage, all families", "planner": "ours", **coverage(examples + everything)},
        *volumes([*examples, *ordinary], family_of),
        *gaps([*examples, *ordinary, *everything]),
        *cuts([*examples, *ordinary[: num_random // 2]]),
        exhaustive(named),
        *collectives(examples + expressible[: num_random // 2]),
        *memory(examples + expressible),
        *latency([*examples, *ordinary], everything),
    ]
