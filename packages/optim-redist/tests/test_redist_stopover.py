"""Under a memory limit, two exchanges through smaller parts in place of many rounds of one."""

from __future__ import annotations

from itertools import permutations, product
from random import Random
from typing import Any, cast

import pytest
import torch
from redist_cases import FAMILIES, combined, part_of, random_case, random_parts
from redist_memory import Live, NoWire

from optim_redist import (
    CommModel,
    Layout,
    Mesh,
    Plan,
    PlanInfeasibleError,
    RedistError,
    bounds,
    plan,
    simulate,
    verify,
)
from optim_redist.layout import Chunk
from optim_redist.program import Program

GRID = Mesh((2, 4))
ROWS, COLUMNS = Layout(GRID, [1, None]), Layout(GRID, [None, 1])


@pytest.mark.parametrize(
    ("dst", "ops"),
    [
        # halves of the target's columns, which are gathered when the source is gone; halves of rows, which are left
        (COLUMNS, [("packed exchange", 1), ("exchange", 2)]),
        (Layout(GRID, [(0, 1), None]), [("slice", 1), ("packed exchange", 1)]),
        (Layout(GRID, [None, None]), [("slice", 1), ("exchange", 14)]),
    ],
    ids=["to replicas", "from replicas", "gather"],
)
def test_a_donated_source_with_little_room_goes_through_smaller_parts(dst: Layout, ops: list[tuple[str, int]]) -> None:
    shape = (1024, 1024)
    limit = 4 * bounds(shape, ROWS, dst).memory + 2**14
    made, in_rounds = (
        plan(shape, "float32", ROWS, dst, donate=True, memory_limit=limit, planners=names)
        for names in (None, ["direct", "spread", "packed"])
    )
    assert (made.planner, [(stage.op, stage.rounds) for stage in made.stages]) == ("stopover", ops)
    # 64 to 387 rounds
    assert made.time < in_rounds.time / 20
    assert verify(made).peak * 4 <= made.peak_bytes <= limit
    assert made.to_json() == Plan.from_json(made.to_json()).to_json()
    assert "by stopover" in made.explain()
    for rank in (0, 5):
        program = Program(made, rank, cast(Any, NoWire()))
        program(torch.zeros(ROWS.local_shape(shape, rank)))
        source = torch.zeros(ROWS.local_shape(shape, rank))
        with Live() as live:
            source.view(-1)
            program(source)
        assert live.peak <= made.peak_bytes


def test_it_is_offered_where_others_take_rounds() -> None:
    def offered(memory_limit: int | None, *, donate: bool = True) -> bool:
        made = plan((1024, 1024), "float32", ROWS, COLUMNS, donate=donate, memory_limit=memory_limit)
        return "stopover" in {made.planner, *(other.planner for other in made.alternatives)}

    # what the packed exchange takes
    enough = 44 * 2**16
    assert offered(enough - 1)
    assert not offered(enough)
    assert not offered(None)
    # a kept source leaves no more room
    assert not offered(enough - 1, donate=False)
    with pytest.raises(RedistError, match="none of the planners"):
        plan((1024, 1024), "float32", ROWS, COLUMNS, donate=True, planners=["stopover"])


def test_less_than_source_and_target_can_be_enough() -> None:
    # eight ranks hold a half and need another half; in between each has an eighth
    mesh = Mesh((2, 2, 2))
    src, dst = Layout(mesh, [0, None]), Layout(mesh, [None, 1])
    least = 4 * bounds((64, 64), src, dst).memory
    made = plan((64, 64), "float32", src, dst, donate=True, memory_limit=least - 2**10)
    assert made.planner == "stopover"
    verify(made)
    with pytest.raises(PlanInfeasibleError):
        plan((64, 64), "float32", src, dst, memory_limit=least - 2**10)


def test_any_stopover_is_right() -> None:
    moved = 0
    for seed in range(60):
        draw, case = Random(seed), random_case(seed, FAMILIES + "PPP", [(4,), (2, 2), (3, 2), (2, 2, 2)])
        deterministic = draw.random() < 0.5
        try:
            free = plan(case.shape, "float32", case.src, case.dst, donate=True, deterministic=deterministic)
            least = 4 * free.bounds.memory
            limit = least + draw.randint(0, max(0, free.peak_bytes - least))
            options = {"donate": draw.random() < 0.7, "deterministic": deterministic, "memory_limit": limit}
            made = plan(case.shape, "float32", case.src, case.dst, planners=["stopover"], **options)
        except RedistError:
            # nothing replicates and nothing is reduced, or there is no room
            continue
        verify(made)
        parts = random_parts(case.src, case.shape, seed=seed)
        got = simulate(made, parts)
        whole = combined(case.src, case.shape, parts)
        if case.dst.partial:
            assert torch.equal(combined(case.dst, case.shape, {rank: got[rank] for rank in case.dst.mesh.ranks}), whole)
        else:
            assert all(torch.equal(got[rank], part_of(whole, case.dst, rank)) for rank in case.dst.mesh.ranks), seed
        reduced = [problem.num_contributions > 1 for problem in made.problems]
        assert sum(reduced) <= 1
        moved += made.communicates
    assert moved > 10


def _every_layout(mesh: Mesh, num_dims: int) -> list[Layout]:
    """Every way in which axes split dimensions by chunks, in any order, or replicate."""
    found = []
    for places in product([None, *range(num_dims)], repeat=mesh.num_axes):
        axes = [[axis for axis, place in enumerate(places) if place == dim] for dim in range(num_dims)]
        for orders in product(*(list(permutations(used)) for used in axes)):
            found.append(Layout(mesh, [(order, Chunk()) if order else None for order in orders]))
    return found


def test_no_way_through_another_layout_is_much_quicker() -> None:
    limited = 0
    for seed in range(40):
        draw = Random(seed)
        mesh, shape = Mesh(draw.choice([(4,), (2, 2), (3, 2)])), (draw.choice([64, 67]), draw.choice([32, 96]))
        layouts = _every_layout(mesh, 2)
        src, dst = draw.sample(layouts, 2)
        model = CommModel.preset(draw.choice(["flat", "nccl"]))
        free = plan(shape, "float32", src, dst, donate=True, cost_model=model)
        least = 4 * free.bounds.memory
        limit = least + max(2**8, (free.peak_bytes - least) // draw.choice([3, 10, 30]))
        options: dict[str, Any] = {"donate": True, "cost_model": model, "memory_limit": limit}
        made = plan(shape, "float32", src, dst, **options)
        if all(step.rounds == 1 for step in made.steps):
            continue
        limited += 1
        for middle in layouts:
            try:
                first = plan(shape, "float32", src, middle, **options)
                then = first if first.time > made.time else plan(shape, "float32", middle, dst, **options)
            except PlanInfeasibleError:
                continue
            # one step more than both plans, if nothing moves in one
            assert made.time <= 1.5 * (first.time + then.time + model.call_seconds), (seed, middle)
    assert limited > 5


def test_a_way_through_smaller_parts_may_be_quicker_than_what_fits_in_one_round() -> None:
    src, dst = Layout(Mesh((4, 2)), [0, None], {1: "sum"}), Layout(Mesh((4, 2)), [None, None])
    options: dict[str, Any] = {"cost_model": CommModel.preset("h200x4"), "memory_limit": 28 * 2**20}
    made = plan((2048, 2048), "bf16", src, dst, **options)
    # the direct exchange takes rounds, and scattering the sum does not
    others = plan((2048, 2048), "bf16", src, dst, planners=["direct", "relay", "scatter"], **options)
    assert [step.rounds for step in others.steps] == [1, 1]
    assert made.planner == "stopover"
    assert made.time < 0.85 * others.time
    verify(made)


def test_it_is_asked_wherever_the_direct_exchange_takes_rounds() -> None:
    asked = 0
    for seed in range(200):
        shape, src, dst = random_case(seed, "P", [(4,), (2, 2), (2, 4)])
        try:
            free = plan(shape, "bf16", src, dst)
            least = 2 * free.bounds.memory
            limit = Random(seed).randint(least, max(least, free.peak_bytes))
            made, direct, through = (
                plan(shape, "bf16", src, dst, planners=names, memory_limit=limit)
                for names in (None, ["direct"], ["stopover"])
            )
        except RedistError:
            continue
        if direct.steps[0].rounds > 1:
            asked += 1
            assert made.time <= through.time, seed
    assert asked > 10
