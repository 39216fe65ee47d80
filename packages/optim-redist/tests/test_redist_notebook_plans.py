"""Plans by the notebook's redistributor: its third example, proofs, memory limits, and layouts it cannot express."""

import json
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redist_cases import part_of, random_case

from optim_redist import (
    Chunk,
    IdealLowerBoundsCM,
    Layout,
    Mesh,
    MultiAxisDist,
    OptimalRedist,
    Plan,
    RedistError,
    Topology,
    plan,
    simulate,
    verify,
)

SHAPE = (8, 8, 8, 4)
START = MultiAxisDist((4, 2, 4), ((0, 1), (), (), ()), 1)
TARGET = MultiAxisDist((4, 2, 4), ((), (1,), (0,), ()), (-1, 4, 2, -1))
# meshes of up to three axes, on which the search takes milliseconds
MESHES = [(4,), (2, 2), (2, 4), (3, 2), (2, 2, 2)]


def test_the_third_example_goes_through_what_optimal_redist_finds() -> None:
    made = plan(SHAPE, "bf16", START.to_layout(), TARGET.to_layout(), planners=["notebook"])
    verify(made)
    rows, cost = OptimalRedist(IdealLowerBoundsCM()).redistribute(SHAPE, START, TARGET)
    assert cost == 388.0
    assert made.planner == "notebook"
    assert [(step.op, step.layout) for step in made.steps] == [(name, str(d.to_layout())) for name, d, _ in rows[1:]]
    assert [step.recv for step in made.steps] == [0, 64, 32, 192]
    # gathering is charged seven times the 256 elements of a rank, and three rounds
    assert "charges these operations 388, gathering and splitting 1795" in str(made)
    # what the busiest rank receives over all steps stands beside the bound
    assert made.bounds.lb == 224
    assert made.volume_ratio == 288 / 224


def test_beside_others_it_is_an_alternative_and_by_default_it_is_not_asked() -> None:
    args = SHAPE, "bf16", START.to_layout(), TARGET.to_layout()
    made = plan(*args, planners=["direct", "notebook"])
    verify(made)
    assert made.planner == "direct"
    assert [(other.planner, other.reason[:5]) for other in made.alternatives] == [("notebook", "takes")]
    assert "notebook: takes" in made.explain()
    assert "notebook" not in {other.planner for other in plan(*args).alternatives}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_its_plans_are_proven(seed: int, donate: bool, nodes: bool) -> None:
    shape, src, dst = random_case(seed, "COB", MESHES)
    topology = Topology.from_mesh_axis(src.mesh, 0) if nodes and src.mesh.num_axes > 1 else None
    made = plan(shape, "bf16", src, dst, topology=topology, donate=donate, planners=["notebook"])
    verify(made)
    if not made.bounds.lb:
        assert made.planner == "local"
        return
    dist, target = (layout.to_multi_axis(shape) for layout in (src, dst))
    # every step is an operation of the notebook, by name
    for stage in made.stages:
        dist, _, _ = dist.apply(shape, stage.op, target)
        assert dist.to_layout().dims == stage.dst.dims or stage is made.stages[-1]
    assert dist == target
    again = Plan.from_json(json.loads(json.dumps(made.to_json())))
    assert again == made
    assert str(again) == str(made)
    limit = made.bounds.memory * 2 + 64 * 1024
    assert verify(plan(shape, "bf16", src, dst, memory_limit=limit, planners=["notebook"])).peak * 2 <= limit


@pytest.mark.parametrize(
    ("shape", "dist", "target"),
    [
        (SHAPE, START, TARGET),
        ((9, 10), MultiAxisDist((2, 3), [(1,), (0,)], 2), MultiAxisDist((2, 3), [(0,), ()], 2)),
        ((8, 12), MultiAxisDist((2, 2), [(0,), (1,)], 3), MultiAxisDist((2, 2), [(1,), (0,)], 3)),
    ],
    ids=["third example", "uneven", "swap"],
)
def test_its_plans_run(shape: tuple[int, ...], dist: MultiAxisDist, target: MultiAxisDist) -> None:
    import torch

    src, dst = dist.to_layout(), target.to_layout()
    made = plan(shape, "float32", src, dst, planners=["notebook"])
    assert made.planner == "notebook"
    full = torch.arange(prod(shape), dtype=torch.float32).reshape(shape)
    after = simulate(made, {rank: part_of(full, src, rank) for rank in src.mesh.ranks})
    assert all(torch.equal(after[rank], part_of(full, dst, rank)) for rank in dst.mesh.ranks)


def test_a_memory_limit_leaves_the_exchange() -> None:
    mesh = Mesh((2, 2, 2))
    src, dst = Layout(mesh, [(0, 1), 2]), Layout(mesh, [2, (1, 0)])
    shape = (512, 512)
    free = plan(shape, "bf16", src, dst, planners=["notebook"])
    limit = free.bounds.memory * 2 + 64 * 1024
    assert free.peak_bytes > limit
    made = plan(shape, "bf16", src, dst, memory_limit=limit, planners=["notebook"])
    verify(made)
    assert [step.op for step in made.steps] == ["exchange_*"]
    assert made.peak_bytes <= limit


@pytest.mark.parametrize(
    ("shape", "src", "dst", "why"),
    [
        ((8, 8), Layout(Mesh((2, 2)), [0, 1]), Layout(Mesh(4), [0, None]), "on one mesh, got"),
        ((8, 8), Layout(Mesh(4), [0, None]), Layout(Mesh(4, ranks=[3, 2, 1, 0]), [0, None]), "ranks in order"),
        ((8, 8), Layout(Mesh(4), [None, None], {0: "sum"}), Layout(Mesh(4), [0, None]), "nothing pending"),
        (
            (10, 8),
            Layout(Mesh((2, 2)), [((0, 1), Chunk()), None]),
            Layout(Mesh((2, 2)), [None, 0]),
            "dealt out in equal blocks",
        ),
        ((3, 8), Layout(Mesh(4), [0, None]), Layout(Mesh(4), [None, 0]), "leaves a process without any element"),
    ],
    ids=["two meshes", "order of ranks", "pending", "nested chunks", "empty rank"],
)
def test_what_it_cannot_express_is_refused_with_the_reason(shape, src, dst, why: str) -> None:
    with pytest.raises(RedistError, match=rf"none of the planners \['notebook'\] fits .*; notebook: .*{why}"):
        plan(shape, "bf16", src, dst, planners=["notebook"])
    # beside another it has nothing to offer
    made = plan(shape, "bf16", src, dst, planners=["direct", "notebook"])
    verify(made)
    assert (made.planner, made.alternatives) == ("direct", ())
