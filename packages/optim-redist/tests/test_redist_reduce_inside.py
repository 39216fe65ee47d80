"""Reductions inside groups first: what crosses borders, proofs, values, and when they are not used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from redist_cases import combined, part_of, random_case, random_parts

from optim_redist import (
    CommModel,
    Cyclic,
    Layout,
    Mesh,
    Plan,
    RedistError,
    Topology,
    compile,
    plan,
    simulate,
    verify,
)
from optim_redist.plan_text import crossings
from optim_utils.testing import run_ranks

SHAPE = (64, 32)
N = 64 * 32


def _check_values(made: Plan) -> None:
    parts = random_parts(made.src, made.shape, most=9)
    wanted = combined(made.src, made.shape, parts)
    got = simulate(made, parts)
    for rank in made.dst.mesh.ranks:
        assert torch.equal(got[rank], part_of(wanted, made.dst, rank))


def _crossed(made: Plan) -> list[tuple[int, int]]:
    return [(inbound, outbound) for cut, inbound, outbound in crossings(made, made.bounds.cuts) if cut.level == "node"]


FLAT8, FLAT16, GRID = Mesh(8), Mesh(16), Mesh((2, 4))


@pytest.mark.parametrize(
    ("src", "dst", "per_node", "by_direct"),
    [
        # one mesh axis over two nodes: each gives half of its sum and gets the other half, then one finished half
        (Layout(FLAT8, [None, None], {0: "sum"}), Layout(FLAT8, [None, None]), N, 16 * N),
        (Layout(FLAT8, [None, None], {0: "sum"}), Layout(FLAT8, [0, None]), N // 2, 2 * N),
        (Layout(FLAT8, [None, None], {0: "sum"}), Layout(FLAT8, [None, 0]), N // 2, 2 * N),
        # four nodes: three quarters twice
        (Layout(FLAT16, [None, None], {0: "max"}), Layout(FLAT16, [None, None]), N * 3 // 2, 48 * N),
        # contributions across nodes, each replicated inside one
        (Layout(GRID, [None, None], {0: "sum"}), Layout(GRID, [None, None]), N, 4 * N),
        (Layout(GRID, [None, None], {0: "sum", 1: "sum"}), Layout(GRID, [1, None]), N, 4 * N),
        # pending inside nodes only
        (Layout(GRID, [0, None], {1: "sum"}), Layout(GRID, [0, 1]), 0, 0),
        (Layout(GRID, [0, None], {1: "sum"}), Layout(GRID, [None, (0, 1)]), N // 4, None),
    ],
    ids=["all-reduce", "scatter", "scatter columns", "4 nodes", "replicas", "two axes", "inside", "inside, then move"],
)
def test_what_crosses_a_border(src: Layout, dst: Layout, per_node: int, by_direct: int | None) -> None:
    made = plan(SHAPE, "float32", src, dst, topology=Topology.nodes(4), planners=["hierarchical"])
    verify(made)
    assert made.planner == "hierarchical"
    assert {max(pair) for pair in _crossed(made)} == {per_node}
    if by_direct is not None:
        direct = plan(SHAPE, "float32", src, dst, topology=Topology.nodes(4), planners=["direct"])
        assert {max(pair) for pair in _crossed(direct)} == {by_direct}
    _check_values(made)


@pytest.mark.slow
def test_random_reductions_are_proven_and_right() -> None:
    offered = 0
    for seed in range(150):
        shape, src, dst = random_case(seed, "P")
        if not src.partial or dst.partial or set(src.mesh.ranks) != set(dst.mesh.ranks):
            continue
        for topology in (Topology.nodes(2), Topology.from_mesh_axis(src.mesh, 0)):
            try:
                made = plan(shape, "float32", src, dst, topology=topology, planners=["hierarchical"])
            except RedistError as error:
                assert "none of the planners" in str(error)  # noqa: PT017
                continue
            verify(made)
            _check_values(made)
            verify(plan(shape, "float32", src, dst, topology=topology, donate=True))
            offered += 1
    assert offered > 20


def test_levels_nest() -> None:
    pairs, eights = Topology.nodes(2).levels[0], replace(Topology.nodes(8).levels[0], name="rack")
    tree = Topology(levels=(pairs, eights))
    src, dst = Layout(FLAT16, [None, None], {0: "avg"}), Layout(FLAT16, [None, None])
    made = plan(SHAPE, "float32", src, dst, topology=tree, planners=["hierarchical"])
    verify(made)
    _check_values(made)
    assert [stage.op for stage in made.stages] == ["reduce inside", "reduce inside", "reduce across", "hierarchical"]
    by_level = {cut.level: max(inbound, outbound) for cut, inbound, outbound in crossings(made, made.bounds.cuts)}
    # a pair shares with three others in its rack, and its part of that with the other rack; then both ways back
    assert by_level == {"node": 2 * N * 7 // 8, "rack": N}


def test_large_reductions_between_nodes_go_this_way_unless_the_order_is_fixed() -> None:
    src, dst = Layout(FLAT16, [None, None], {0: "sum"}), Layout(FLAT16, [None, None])
    model = CommModel.preset("nodes-400g")
    made = plan((8192, 8192), "bf16", src, dst, cost_model=model)
    assert made.planner == "hierarchical"
    verify(made)
    fixed = plan((8192, 8192), "bf16", src, dst, cost_model=model, deterministic=True)
    assert fixed.planner != "hierarchical"
    assert made.time < 0.5 * fixed.time
    with pytest.raises(RedistError, match="none of the planners"):
        plan((8, 8), "bf16", src, dst, cost_model=model, deterministic=True, planners=["hierarchical"])


def test_a_fixed_order_takes_no_sequence_of_several_reductions() -> None:
    mesh = Mesh((2, 2, 2))
    src, dst = Layout(mesh, [2], {0: "sum", 1: "sum"}), Layout(mesh, [(1, 2, 0)])
    # with nothing but volume to pay for, reducing over one axis after the other is cheaper
    model = CommModel("slow", Topology.flat(bandwidth=1e3, latency=0.0), {}, 1e18, 0.0)
    free, fixed = (
        plan((1024,), "bf16", src, dst, cost_model=model, budget=20_000, deterministic=fixed) for fixed in (False, True)
    )
    assert [step.op for step in free.steps].count("reduce_scatter") == 2
    assert sum(problem.num_contributions > 1 for problem in fixed.problems) == 1
    with pytest.raises(RedistError, match="none of the planners"):
        plan((1024,), "bf16", src, dst, deterministic=True, planners=["collectives"])
    # one collective that reduces everything keeps the order
    once = Layout(mesh, [2], {0: "sum"}), Layout(mesh, [(2, 0)])
    made = plan((1024,), "bf16", *once, deterministic=True, planners=["collectives"])
    assert [step.op for step in made.steps] == ["reduce_scatter"]


def test_what_is_dealt_out_is_not_split_further() -> None:
    # the only dimension is not divided by chunks, and a scalar has none
    for shape, dims in (((64,), [(1, Cyclic(1))]), ((), [])):
        task = shape, "float32", Layout(GRID, dims, {0: "sum"}), Layout(GRID, [None] * len(shape))
        with pytest.raises(RedistError, match="none of the planners"):
            plan(*task, topology=Topology.nodes(4), planners=["hierarchical"])
        made = plan(*task, topology=Topology.nodes(4))
        verify(made)
        _check_values(made)


def test_memory_limits_are_kept() -> None:
    src, dst = Layout(FLAT8, [None, None], {0: "sum"}), Layout(FLAT8, [0, None])
    free = plan((512, 512), "float32", src, dst, topology=Topology.nodes(4), planners=["hierarchical"])
    limit = free.peak_bytes - 400_000
    made = plan(
        (512, 512), "float32", src, dst, topology=Topology.nodes(4), planners=["hierarchical"], memory_limit=limit
    )
    assert max(stage.rounds for stage in made.stages) > 1
    assert verify(made).peak * 4 <= made.peak_bytes <= limit
    _check_values(made)


def _on_ranks(rank: int, world_size: int) -> list[str]:
    wrong = []
    for sizes in ((4,), (2, 2)):
        mesh = Mesh(sizes)
        pending = dict.fromkeys(range(mesh.num_axes), "sum")
        for partial, dims in (
            (pending, [None, None]),
            (pending, [0, None]),
            (dict.fromkeys(pending, "max"), [None, 0]),
            (dict.fromkeys(pending, "avg"), [None, None]),
            ({0: "sum"}, [0, None]),
        ):
            src, dst = Layout(mesh, [None, None], partial), Layout(mesh, dims)
            made = plan((10, 6), "float32", src, dst, topology=Topology.nodes(2), planners=["hierarchical"])
            parts = random_parts(src, (10, 6), most=9)
            wanted = part_of(combined(src, (10, 6), parts), dst, rank)
            program = compile(made)
            if not all(torch.equal(program(parts[rank]), wanted) for _ in range(2)):
                wrong.append(f"{src} to {dst}")
    return wrong


def test_on_ranks() -> None:
    assert run_ranks(_on_ranks, 4) == [[]] * 4
