"""Planning figures of optim-redist beside DTensor's two planners: volumes, cuts, memory and time to plan.

No process group and no tensor is needed: plans are compared by what their steps count, per most loaded rank. Times
are CPU times of one thread with every cache empty and layouts that nobody has used before; of all cases in turn, five
times over, each case's least, so that a slow second of the machine does not count. A row with ``required`` says in
``met`` whether it is kept.
"""

from __future__ import annotations

import importlib.util
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, islice
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.redist_peers import dtensor_plan, is_inexpressible
from optim_redist import (
    CommModel,
    IdealLowerBoundsCM,
    Layout,
    LayoutError,
    MemoryConstrainedRedist,
    Mesh,
    NaiveGathererRedist,
    OptimalRedist,
    RedistError,
    Redistributor,
    Topology,
    bounds,
    plan,
    planning,
    same_ownership,
    verify,
)
from optim_redist._methods.collective_search import search_collectives  # noqa: PLC2701 - counted as the examples count
from optim_redist.errors import NotRepresentableError
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


# -- figures


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


def required(row: dict[str, Any], **most: float) -> dict[str, Any]:
    """The row with what its figures may be at most, and whether they are."""
    text = ", ".join(f"{name} <= {limit:g}" for name, limit in most.items())
    return {**row, "required": text, "met": "yes" if all(row[name] <= limit for name, limit in most.items()) else "no"}


def _percentiles(seconds: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(seconds)
    return {
        "cases": len(ordered),
        "p50_us": round(1e6 * ordered[len(ordered) // 2], 1),
        "p99_us": round(1e6 * ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 1),
        "max_us": round(1e6 * ordered[-1], 1),
    }


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What the call returns and the CPU seconds of this thread that it took."""
    started = time.thread_time()
    result = call()
    return result, time.thread_time() - started


def cold_plan(case: Any, **options: Any) -> tuple[Any, float]:
    """A plan made with nothing cached, and the seconds it took."""
    planning.clear_cache()
    src, dst = (Layout.from_json(layout.to_json()) for layout in (case.src, case.dst))
    return timed(lambda: plan(case.shape, "bfloat16", src, dst, **options))


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
        {"goal": "collectives: time to search", "planner": "ours", **_percentiles(seconds)},
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


def _least_times(calls: Sequence[Callable[[], float]], repeats: int = 5) -> list[float]:
    """The least of what each call says it took, all of them in turn ``repeats`` times over."""
    return [min(times) for times in zip(*([call() for call in calls] for _ in range(repeats)))]


def _cold_times(cases: Sequence[Any], nodes: bool = False) -> dict[str, Any]:
    """How long plans take, with the ranks of each coordinate on mesh axis 0 as a node or all alike."""

    def spent(case: Any) -> Callable[[], float]:
        options = {"topology": Topology.from_mesh_axis(case.src.mesh, 0)} if nodes else {}
        return lambda: cold_plan(case, **options)[1]

    return _percentiles(_least_times([spent(case) for case in cases]))


def latency(cases: Sequence[Any], everything: Sequence[Any]) -> list[dict[str, Any]]:
    """Time to make a plan that is not cached, and to look up one that is."""
    up_to_four = [case for case in cases if case.src.mesh.num_axes <= 4]
    between = [case for case in everything if case.src.mesh.num_axes > 1 and case.src.mesh == case.dst.mesh]

    def ours(title: str, figures: dict[str, Any], **most: float) -> dict[str, Any]:
        return required({"goal": f"time to {title}", "planner": "ours", **figures}, **most)

    rows = [
        ours("plan, to 4 axes", _cold_times(up_to_four), p50_us=150, p99_us=2000),
        ours("plan, to 4 axes, all families", _cold_times(everything), p99_us=2000),
        ours("plan, between nodes", _cold_times(between, nodes=True), p99_us=2000),
        ours("plan, 4 binary axes, 4-D", _cold_times([_binary_case(4, seed) for seed in range(100)]), max_us=10_000),
        ours("plan, 6 binary axes, 4-D", _cold_times([_binary_case(6, seed) for seed in range(40)]), max_us=10_000),
        ours("plan, 1024 ranks", _cold_times(_large_cases(20)), max_us=5000),
    ]
    for name in ("greedy", "graph"):
        found = [dtensor_plan(case, graph=name == "graph", repeats=3) for case in up_to_four]
        spent = [plan.seconds for plan in found if plan is not None]
        rows.append({"goal": "time to plan, to 4 axes", "planner": f"DTensor {name}", **_percentiles(spent)})
    cached = []
    for case in up_to_four[:200]:
        cold_plan(case)
        cached.append(
            min(timed(lambda case=case: plan(case.shape, "bfloat16", case.src, case.dst))[1] for _ in range(5))
        )
    return [*rows, ours("look up a plan", _percentiles(cached), p99_us=40), *notebook_latency(up_to_four)]


def notebook_latency(cases: Sequence[Any]) -> list[dict[str, Any]]:
    """Time that the notebook's redistributors take where ``MultiAxisDist`` expresses both sides."""
    pairs = []
    for case in cases:
        try:
            sides = [layout.to_multi_axis(case.shape) for layout in case[1:]]
        except NotRepresentableError:
            continue
        if all(side.compatible(case.shape) for side in sides):
            pairs.append((case.shape, *sides))

    def spent(redistributor: Redistributor, pair: Any) -> Callable[[], float]:
        def call() -> float:
            planning.clear_cache()
            return timed(lambda: redistributor.redistribute(*pair))[1]

        return call

    rows = []
    for kind in (NaiveGathererRedist, MemoryConstrainedRedist, OptimalRedist):
        redistributor = kind(IdealLowerBoundsCM())
        figures = _percentiles(_least_times([spent(redistributor, pair) for pair in pairs]))
        row = {"goal": "time to search, notebook", "planner": kind.__name__, **figures}
        rows.append(required(row, p50_us=150, p99_us=2000))
    return rows


def _random_layout(rng: random.Random, mesh: Mesh, num_dims: int) -> Layout:
    dims: list[list[int]] = [[] for _ in range(num_dims)]
    for axis in rng.sample(range(mesh.num_axes), mesh.num_axes):
        if rng.random() < 0.75:
            rng.choice(dims).append(axis)
    return Layout(mesh, [tuple(axes) or None for axes in dims])


def _binary_case(num_axes: int, seed: int) -> Any:
    rng, mesh = random.Random(seed), Mesh((2,) * num_axes)
    return load_cases().Case((64,) * 4, _random_layout(rng, mesh, 4), _random_layout(rng, mesh, 4))


def _large_cases(count: int) -> list[Any]:
    case_type = load_cases().Case
    rng, cases = random.Random(1), []
    for _ in range(count):
        mesh = Mesh(rng.choice([(1024,), (32, 32), (8, 128), (16, 8, 8)]))
        cases.append(case_type((4096, 4096), _random_layout(rng, mesh, 2), _random_layout(rng, mesh, 2)))
    return cases


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
