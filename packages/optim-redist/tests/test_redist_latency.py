"""How long planning takes: ``python packages/optim-redist/tests/test_redist_latency.py`` prints the figures.

Cold means that nothing about the pair is cached: neither the plan nor the canonical forms, nor what the dimensions
share. CPU time of the thread, best of four.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from redist_cases import random_case

from optim_redist import Layout, Mesh, Program, Topology, bounds, plan, planning
from optim_redist.moves import Transfer


def cold_seconds(shape: tuple[int, ...], src: Layout, dst: Layout, *, repeats: int = 4) -> float:
    """Seconds to plan one pair with every cache empty."""
    best = float("inf")
    for _ in range(repeats):
        planning.clear_cache()
        src, dst = Layout.from_json(src.to_json()), Layout.from_json(dst.to_json())
        start = time.thread_time()
        plan(shape, "bf16", src, dst)
        best = min(best, time.thread_time() - start)
    return best


def quantiles(num_pairs: int) -> dict[str, float]:
    """p50, p90, p99 in seconds over random pairs of up to three mesh axes."""
    times = sorted(cold_seconds(*random_case(seed, "COBU")) for seed in range(num_pairs))
    return {f"p{q}": times[min(num_pairs - 1, num_pairs * q // 100)] for q in (50, 90, 99)}


def large_meshes() -> dict[str, float]:
    """Seconds for six binary axes and for 1024 ranks."""
    binary, grid, flat = Mesh((2,) * 6), Mesh((8, 16, 8)), Mesh(1024)
    shape = (64, 64, 64, 64)
    return {
        "6 binary axes": cold_seconds(
            shape, Layout(binary, [(0, 1), (2, 3), 4, 5]), Layout(binary, [(5, 4), 0, (1, 3), 2])
        ),
        "1024 ranks, 3 axes": cold_seconds(
            (4096, 4096, 64), Layout(grid, [(0, 1), 2, None]), Layout(grid, [2, (1, 0), None])
        ),
        "1024 ranks, 1 axis": cold_seconds((8192, 4096), Layout(flat, [0, None]), Layout(flat, [None, 0])),
    }


def test_planning_latency() -> None:
    # ten times the figures that an idle core reaches, so that a busy machine does not fail
    figures = quantiles(100)
    assert figures["p50"] < 1.5e-3
    assert figures["p99"] < 20e-3
    assert max(large_meshes().values()) < 50e-3


def test_cached_plans_cost_microseconds() -> None:
    shape, src, dst = random_case(3, "C")
    plan(shape, "bf16", src, dst)
    start = time.thread_time()
    for _ in range(1000):
        plan(shape, "bf16", src, dst)
    assert time.thread_time() - start < 0.1


def test_nodes_are_planned_in_well_under_a_second() -> None:
    mesh = Mesh((16, 8))
    start = time.thread_time()
    plan((1024, 1024), "bf16", Layout(mesh, [(0, 1), None]), Layout(mesh, [0, 1]), topology=Topology.nodes(8))
    assert time.thread_time() - start < 1.0


def test_hundreds_of_rounds_are_sized_in_seconds() -> None:
    mesh = Mesh((4, 16, 8))
    src, dst = Layout(mesh, [(0, 1), None]), Layout(mesh, [None, 0])
    start = time.thread_time()
    made = plan((4096, 4097), "bf16", src, dst, memory_limit=2 * bounds((4096, 4097), src, dst).memory + 2**16)
    # 1.7 s here, 9.1 s where the rounds of a box are added up one by one
    assert time.thread_time() - start < 5
    assert made.stages[0].rounds > 250


def test_a_rank_among_many_lists_its_own_transfers_only() -> None:
    mesh = Mesh(1024)
    rows, columns, whole = Layout(mesh, [0, None]), Layout(mesh, [None, 0]), Layout(mesh, [None, None], {0: "sum"})
    for src, dst in ((rows, columns), (whole, rows)):
        made = plan((8192, 4096), "bf16", src, dst, planners=["direct"])
        start = time.thread_time()
        program = Program(made, 5, None)
        # 0.15 s here, 7 s and 400 MB where the transfers of all ranks are listed
        assert time.thread_time() - start < 2
        (phase,) = program.stages[0].phases
        assert len(phase.sends) == len(phase.receives) == 1023


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (2, {}),
        # source, target and either buffer are 64 KiB each
        (1, {"memory_limit": 3 * 2**16}),
        (1, {"memory_limit": 3 * 2**16, "donate": True, "planners": ["packed"]}),
        (2, {"memory_limit": 2**30}),
    ],
    ids=["shared", "rounds", "packed", "unbound"],
)
def test_plans_and_programs_of_many_ranks_list_no_transfers_of_others(
    replicas: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _counted_transfers(monkeypatch)
    mesh = Mesh((128 // replicas, replicas))
    found = plan((2048, 2048), "bf16", Layout(mesh, [0, None]), Layout(mesh, [None, (0, 1)]), **options)
    (stage,) = found.stages
    assert stage.rounds > 1 or stage.method == "packed" or options.get("memory_limit") != 3 * 2**16
    program = Program(found, 5, None)
    peers = {message.peer for phase in program.stages[0].phases for message in (*phase.sends, *phase.receives)}
    assert len(peers) > 90
    # all ranks have 128² and more
    assert 0 < len(made) < 128 * 2 * (2 + stage.rounds)


def test_relays_of_many_ranks_list_no_transfers_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _counted_transfers(monkeypatch)
    mesh = Mesh(128)
    found = plan((2048, 2048), "bf16", Layout(mesh, [None, None], {0: "sum"}), Layout(mesh, [None, None]))
    assert "relay" in {other.planner for other in found.alternatives}
    assert not made
    relayed = plan((2048, 2048), "bf16", found.src, found.dst, planners=["relay"])
    for phase in Program(relayed, 5, None).stages[0].phases:
        assert len(phase.sends) == len(phase.receives) == 127
    assert 0 < len(made) < 128 * 5


def _counted_transfers(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list with an item for every transfer that is made."""
    made: list[None] = []
    fill = Transfer.__init__

    def counting(self: Transfer, *args: Any, **kwargs: Any) -> None:
        made.append(None)
        fill(self, *args, **kwargs)

    monkeypatch.setattr(Transfer, "__init__", counting)
    return made


if __name__ == "__main__":
    for name, seconds in {**quantiles(600), **large_meshes()}.items():
        print(f"{name:20} {seconds * 1e6:9.0f} µs")
