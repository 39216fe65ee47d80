"""How long optim-redist takes to plan, and to look up a plan, beside DTensor's two planners.

Times are CPU times of one thread with every cache empty and layouts that nobody has used before; of all cases in turn,
five times over, each case's least, so that a slow second of the machine does not count. A row with ``required`` says in
``met`` whether it is kept.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.redist_peers import dtensor_plan
from optim_redist import (
    IdealLowerBoundsCM,
    Layout,
    MemoryConstrainedRedist,
    Mesh,
    NaiveGathererRedist,
    OptimalRedist,
    Redistributor,
    Topology,
    plan,
    planning,
)
from optim_redist.errors import NotRepresentableError


class Case(NamedTuple):
    """A redistribution."""

    shape: tuple[int, ...]
    src: Layout
    dst: Layout


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


def percentiles(seconds: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(seconds)
    return {
        "cases": len(ordered),
        "p50_us": round(1e6 * ordered[len(ordered) // 2], 1),
        "p99_us": round(1e6 * ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 1),
        "max_us": round(1e6 * ordered[-1], 1),
    }


def required(row: dict[str, Any], **most: float) -> dict[str, Any]:
    """The row with what its figures may be at most, and whether they are."""
    text = ", ".join(f"{name} <= {limit:g}" for name, limit in most.items())
    return {**row, "required": text, "met": "yes" if all(row[name] <= limit for name, limit in most.items()) else "no"}


def _least_times(calls: Sequence[Callable[[], float]], repeats: int = 5) -> list[float]:
    """The least of what each call says it took, all of them in turn ``repeats`` times over."""
    return [min(times) for times in zip(*([call() for call in calls] for _ in range(repeats)))]


def _cold_times(cases: Sequence[Any], nodes: bool = False) -> dict[str, Any]:
    """How long plans take, with the ranks of each coordinate on mesh axis 0 as a node or all alike."""

    def spent(case: Any) -> Callable[[], float]:
        options = {"topology": Topology.from_mesh_axis(case.src.mesh, 0)} if nodes else {}
        return lambda: cold_plan(case, **options)[1]

    return percentiles(_least_times([spent(case) for case in cases]))


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
        rows.append({"goal": "time to plan, to 4 axes", "planner": f"DTensor {name}", **percentiles(spent)})
    cached = []
    for case in up_to_four[:200]:
        cold_plan(case)
        cached.append(
            min(timed(lambda case=case: plan(case.shape, "bfloat16", case.src, case.dst))[1] for _ in range(5))
        )
    return [*rows, ours("look up a plan", percentiles(cached), p99_us=40), *notebook_latency(up_to_four)]


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
        figures = percentiles(_least_times([spent(redistributor, pair) for pair in pairs]))
        row = {"goal": "time to search, notebook", "planner": kind.__name__, **figures}
        rows.append(required(row, p50_us=150, p99_us=2000))
    return rows


def _random_layout(rng: random.Random, mesh: Mesh, num_dims: int) -> Layout:
    dims: list[list[int]] = [[] for _ in range(num_dims)]
    for axis in rng.sample(range(mesh.num_axes), mesh.num_axes):
        if rng.random() < 0.75:
            rng.choice(dims).append(axis)
    return Layout(mesh, [tuple(axes) or None for axes in dims])


def _binary_case(num_axes: int, seed: int) -> Case:
    rng, mesh = random.Random(seed), Mesh((2,) * num_axes)
    return Case((64,) * 4, _random_layout(rng, mesh, 4), _random_layout(rng, mesh, 4))


def _large_cases(count: int) -> list[Case]:
    rng, cases = random.Random(1), []
    for _ in range(count):
        mesh = Mesh(rng.choice([(1024,), (32, 32), (8, 128), (16, 8, 8)]))
        cases.append(Case((4096, 4096), _random_layout(rng, mesh, 2), _random_layout(rng, mesh, 2)))
    return cases
