"""Planning figures of optim-redist beside DTensor's two planners: volumes, cuts, memory and time to plan.

No process group and no tensor is needed: plans are compared by what their steps count, per most loaded rank. With L
elements on a rank and n ranks in a group, a gather counts (n - 1)·L, an all-to-all (n - 1)/n·L, a slice nothing.
"""

from __future__ import annotations

import importlib.util
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, _redistribute  # noqa: PLC2701 - what is measured is private
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta  # noqa: PLC2701

from optim_redist import (
    Block,
    Chunk,
    CommModel,
    Cyclic,
    Layout,
    LayoutError,
    Mesh,
    RedistError,
    Topology,
    bounds,
    plan,
    planning,
    verify,
)
from optim_redist._collective_search import search_collectives  # noqa: PLC2701 - counted as the examples count
from optim_redist.plan_text import crossings

CASES = Path(__file__).parents[1] / "packages" / "optim-redist" / "tests" / "redist_cases.py"
# the greedy planner's and the minimum-cost planner's constants decide on small tensors; 64 times larger they do not
SCALE = 64


def load_cases() -> ModuleType:
    """The generator of random redistributions that the tests use."""
    spec = importlib.util.spec_from_file_location("redist_cases", CASES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- DTensor's planners


@dataclass(frozen=True)
class TheirPlan:
    """What a plan of DTensor moves: elements per rank, across nodes numbered by mesh axis 0, and at most held."""

    recv: float
    into_node: float
    live: int
    seconds: float


def dtensor_plan(case: Any, *, graph: bool) -> TheirPlan | None:
    """DTensor's plan for a case; None where it cannot be asked: other kinds, meshes, or orders for the greedy one."""
    mesh = case.src.mesh
    if case.dst.mesh != mesh or mesh.ranks != tuple(range(mesh.num_ranks)):
        return None
    device_mesh = DeviceMesh("cpu", torch.arange(mesh.num_ranks).reshape(mesh.sizes), _init_backend=False, _rank=0)
    shape = [n * SCALE if graph else n for n in case.shape]
    specs = [_spec(layout, shape, case.shape, device_mesh) for layout in (case.src, case.dst)]
    if None in specs:
        return None
    ordered = any(
        split is not None and list(split.axes) != sorted(split.axes) for side in case[1:] for split in side.dims
    )
    if ordered and not graph:
        return None
    _redistribute.clear_redistribute_planner_cache()
    started = time.perf_counter()
    steps = _redistribute._gen_transform_infos_non_cached(specs[0], specs[1], graph)
    spent = time.perf_counter() - started
    return _count(steps, list(specs[0].placements), case.shape, mesh.sizes, spent)


def _spec(layout: Layout, shape: Sequence[int], true_shape: Sequence[int], mesh: DeviceMesh) -> DTensorSpec | None:
    """The layout as DTensor knows it, for sizes that all its axes divide."""
    if layout.partial:
        return None
    placements: list[Any] = [Replicate()] * mesh.ndim
    order = []
    for tensor_dim, split in enumerate(layout.dims):
        if split is None:
            continue
        sizes = layout.axis_sizes(tensor_dim)
        block = true_shape[tensor_dim] // prod(sizes)
        if true_shape[tensor_dim] % prod(sizes) or split.kind not in (Block(), Chunk(), Cyclic(max(1, block))):
            return None
        for axis in split.axes:
            placements[axis] = Shard(tensor_dim)
        order.append(ShardOrderEntry(tensor_dim, split.axes))
    strides = tuple(prod(shape[k + 1 :]) for k in range(len(shape)))
    meta = TensorMeta(torch.Size(shape), strides, torch.float32)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta, shard_order=tuple(order))


def _count(
    steps: Iterable[Any], placements: list[Any], shape: Sequence[int], mesh: Sequence[int], spent: float
) -> TheirPlan:
    def held() -> int:
        sizes = list(shape)
        for axis, placement in enumerate(placements):
            if placement.is_shard():
                sizes[placement.dim] = -(-sizes[placement.dim] // mesh[axis])
        return prod(sizes)

    recv = into_node = 0.0
    live = held()
    per_node = prod(mesh[1:])
    for step in steps:
        before, after = step.src_dst_placements
        n, size = mesh[step.mesh_dim], held()
        moved = 0.0
        if before.is_shard():
            moved = (n - 1) * size if after.is_replicate() else (n - 1) / n * size
        recv += moved
        into_node += moved * per_node if step.mesh_dim == 0 else 0.0
        placements[step.mesh_dim] = after
        live = max(live, held())
    return TheirPlan(recv, into_node, live, spent)


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
        "at_bound": f"{sum(ratio <= 1 + 1e-9 for ratio in ratios) / len(ratios):.1%}",
        "max": round(max(ratios), 2),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(seconds)
    return {
        "cases": len(ordered),
        "p50_us": round(1e6 * ordered[len(ordered) // 2], 1),
        "p99_us": round(1e6 * ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 1),
        "max_us": round(1e6 * ordered[-1], 1),
    }


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started


def cold_plan(case: Any, **options: Any) -> tuple[Any, float]:
    """A plan made with no plan cached, and the seconds it took."""
    planning.clear_cache()
    return timed(lambda: plan(case.shape, "bfloat16", case.src, case.dst, **options))


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


def volumes(cases: Sequence[Any]) -> list[dict[str, Any]]:
    """Volume of the busiest rank over the lower bound, on one level of ranks."""
    ours: list[float] = []
    chosen: list[float] = []
    one_hop: list[float] = []
    theirs: dict[str, list[float]] = {"greedy": [], "graph": []}
    beside: dict[str, list[float]] = {"greedy": [], "graph": []}
    for case in cases:
        limits = bounds(case.shape, case.src, case.dst)
        if not limits.lb:
            continue
        made, _ = cold_plan(case, planners=["direct"])
        ours.append(made.volume_ratio)
        chosen.append(cold_plan(case, cost_model=_without_latency(Topology.flat()))[0].volume_ratio)
        one_hop.append(made.volume_ratio * limits.lb / limits.single_hop)
        for name in theirs:
            found = dtensor_plan(case, graph=name == "graph")
            if found is not None:
                theirs[name].append(found.recv / limits.lb)
                beside[name].append(made.volume_ratio)
    rows = [
        {"goal": "flat volume / LB", "planner": "ours, direct", **_spread(ours)},
        {"goal": "flat volume / LB", "planner": "ours, bytes alone decide", **_spread(chosen)},
        {"goal": "flat volume / best single hop", "planner": "ours, direct", **_spread(one_hop)},
    ]
    for name, ratios in theirs.items():
        rows.append({"goal": "flat volume / LB", "planner": f"DTensor {name}", **_spread(ratios)})
        rows.append(
            {"goal": "flat volume / LB", "planner": f"ours where DTensor {name} plans", **_spread(beside[name])}
        )
    return rows


def cuts(cases: Sequence[Any]) -> list[dict[str, Any]]:
    """What enters the fullest node, mesh axis 0 numbering the nodes, over what has to; bytes alone decide."""
    ratios: dict[str, list[float]] = {"ours": [], "ours, direct": [], "DTensor greedy": [], "DTensor graph": []}
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
        for name in ("greedy", "graph"):
            found = dtensor_plan(case, graph=name == "graph")
            if found is not None:
                ratios[f"DTensor {name}"].append(found.into_node / needed)
    return [{"goal": "into nodes / cut", "planner": name, **_spread(values)} for name, values in ratios.items()]


def _without_latency(topology: Topology) -> CommModel:
    """A model in which only bytes take time, so that the small tensors here are planned like large ones."""
    levels = tuple(replace(level, latency=0.0) for level in topology.levels)
    return CommModel("bytes", replace(topology, latency=0.0, levels=levels), pack_bandwidth=1e18, call_seconds=0.0)


def collectives(cases: Sequence[Any]) -> list[dict[str, Any]]:
    """The best sequence of plain collectives over the lower bound, what it holds, and how long the search takes."""
    ratios, seconds, over = [], [], 0
    for case in cases:
        limits = bounds(case.shape, case.src, case.dst)
        if not limits.lb or _spec_missing(case):
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


def _spec_missing(case: Any) -> bool:
    mesh = case.src.mesh
    if case.dst.mesh != mesh or mesh.ranks != tuple(range(mesh.num_ranks)):
        return True
    device_mesh = DeviceMesh("cpu", torch.arange(mesh.num_ranks).reshape(mesh.sizes), _init_backend=False, _rank=0)
    return any(_spec(layout, case.shape, case.shape, device_mesh) is None for layout in case[1:])


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
        share = f"{over / max(1, total):.1%}"
        rows.append(
            {
                "goal": "live > max(src, dst)",
                "planner": f"DTensor {name}",
                "cases": total,
                "share": share,
                "max": round(worst, 2),
            }
        )
    return rows


def latency(cases: Sequence[Any]) -> list[dict[str, Any]]:
    """Time to make a plan that is not cached, and to look up one that is."""
    up_to_four = [case for case in cases if case.src.mesh.num_axes <= 4]
    rows = [
        {"goal": "time to plan, to 4 axes", "planner": "ours", **_percentiles([cold_plan(c)[1] for c in up_to_four])}
    ]
    for name in ("greedy", "graph"):
        found = [dtensor_plan(case, graph=name == "graph") for case in up_to_four]
        spent = [plan.seconds for plan in found if plan is not None]
        rows.append({"goal": "time to plan, to 4 axes", "planner": f"DTensor {name}", **_percentiles(spent)})
    for title, extra in (("6 binary axes, 4-D", _binary_cases(6, 40)), ("1024 ranks", _large_cases(20))):
        rows.append(
            {"goal": f"time to plan, {title}", "planner": "ours", **_percentiles([cold_plan(c)[1] for c in extra])}
        )
    cached = []
    for case in up_to_four[:200]:
        cold_plan(case)
        cached.append(timed(lambda case=case: plan(case.shape, "bfloat16", case.src, case.dst))[1])
    rows.append({"goal": "time to look up a plan", "planner": "ours", **_percentiles(cached)})
    return rows


def _random_layout(rng: random.Random, mesh: Mesh, num_dims: int) -> Layout:
    dims: list[list[int]] = [[] for _ in range(num_dims)]
    for axis in rng.sample(range(mesh.num_axes), mesh.num_axes):
        if rng.random() < 0.75:
            rng.choice(dims).append(axis)
    return Layout(mesh, [tuple(axes) or None for axes in dims])


def _binary_cases(num_axes: int, count: int) -> list[Any]:
    case_type = load_cases().Case
    rng, mesh = random.Random(0), Mesh((2,) * num_axes)
    return [case_type((64,) * 4, _random_layout(rng, mesh, 4), _random_layout(rng, mesh, 4)) for _ in range(count)]


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
    examples = [case for _, _, case in module.example_cases()]
    expressible = [module.random_case(seed, families="CO") for seed in range(num_random)]
    ordinary = [module.random_case(seed, families="COBU") for seed in range(num_random)]
    everything = [module.random_case(seed) for seed in range(num_random)]
    return [
        {"goal": "coverage, all families", "planner": "ours", **coverage(examples + everything)},
        *volumes(examples + ordinary),
        *cuts(examples + ordinary[: num_random // 2]),
        *collectives(examples + expressible[: num_random // 2]),
        *memory(examples + expressible),
        *latency(examples + ordinary),
    ]
