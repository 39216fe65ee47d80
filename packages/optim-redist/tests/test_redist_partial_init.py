"""Pending reductions of a target that begin as equal parts of the value: what each rank gets, and what that costs."""

from __future__ import annotations

import json
import random
from typing import Any, cast

import pytest
import torch
from redist_cases import combined, contributions_of, part_of, random_case, random_parts
from redist_memory import Live, NoWire
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import redistribute_local_tensor

from optim_redist import (
    Layout,
    LayoutError,
    Mesh,
    Plan,
    RedistError,
    RepeatedExchange,
    Topology,
    UnsupportedError,
    bounds,
    plan,
    redistribute,
    redistribute_local,
    redistribute_many,
    simulate,
    verify,
)
from optim_redist.cli import main
from optim_redist.problem import Problem
from optim_redist.program import Program, compile
from optim_utils.testing import run_ranks

LINE = Mesh(4)
ROWS, WHOLE = Layout(LINE, [0, None]), Layout(LINE, [None, None])
SUM = Layout(LINE, [None, None], {0: "sum"})


def _random_task(seed: int) -> tuple[tuple[int, ...], Layout, Layout]:
    """A move to a target of which some or all free axes have a sum pending, from a source that may have one, too."""
    draw = random.Random(seed)
    shape, src, dst = random_case(seed, "COBURIEKMM", [(4,), (2, 2), (3, 2), (2, 3, 2), (2, 2, 2)])
    free = [axis for axis in dst.replicated_axes if dst.mesh.sizes[axis] > 1]
    some = draw.sample(free, draw.randint(min(1, len(free)), len(free)))
    ops = {axis: draw.choice(["sum", "sum", "avg"]) for axis in some}
    pending = [axis for axis in src.replicated_axes if draw.random() < 0.3]
    return shape, Layout(src.mesh, src.dims, dict.fromkeys(pending, "sum")), Layout(dst.mesh, dst.dims, ops)


def _sources(shape: tuple[int, ...], src: Layout) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Every rank's part, of whole numbers, and what the parts stand for."""
    parts = random_parts(src, shape, most=9)
    return parts, combined(src, shape, parts)


@pytest.mark.parametrize("nodes", [False, True], ids=["flat", "nodes"])
def test_every_rank_gets_an_equal_part(nodes: bool) -> None:
    divided = exact = 0
    planners = set()
    for seed in range(500):
        shape, src, dst = _random_task(seed)
        if not dst.partial:
            continue
        problem = Problem(shape, src, dst, "divide")
        parts, value = _sources(shape, src)
        topology = Topology.nodes(2) if nodes else None
        made = plan(shape, "float32", src, dst, topology=topology, partial_init="divide")
        verify(made)
        found = simulate(made, parts)
        found = {rank: found[rank] for rank in dst.mesh.ranks}
        # no dimension is added for contributions that are kept
        if len(problem.overlaps) == len(shape):
            exact += 1
            for rank, part in found.items():
                assert torch.equal(part, part_of(value, dst, rank) / problem.divisor), seed
        # whole numbers are divided and added up again without rounding, but by 3
        if 3 not in [dst.mesh.sizes[axis] for axis, _ in dst.partial]:
            assert torch.equal(combined(dst, shape, found), value), seed
        divided += problem.divisor > 1
        planners.add(made.planner)
    assert divided > 60
    assert exact > 200
    assert planners >= {"direct", "local", *(["hierarchical", "nearest"] if nodes else [])}


CUBE = Mesh((2, 2, 2))
SPLIT, TWICE, BEGIN = Layout(CUBE, [(0, 1), None]), Layout(CUBE, [1, None]), Layout(Mesh(2), [0, None])
LARGEST = Layout(CUBE, [0, None], {1: "max", 2: "max"})


@pytest.mark.parametrize(
    ("name", "src", "limited"),
    [
        ("direct", SPLIT, True),
        ("nearest", TWICE, True),
        ("forward", BEGIN, True),
        ("hierarchical", SPLIT, True),
        ("collectives", SPLIT, False),
        ("direct", LARGEST, True),
        ("relay", LARGEST, True),
        ("scatter", LARGEST, False),
        ("collectives", LARGEST, False),
    ],
)
def test_every_planner_divides(name: str, src: Layout, limited: bool) -> None:
    shape, dst = (16, 8), Layout(CUBE, [2, None], {0: "sum", 1: "sum"})
    full = torch.randint(-9, 9, shape).float()
    parts = {rank: part_of(full - contributions_of(src, rank), src, rank) for rank in src.mesh.ranks}
    topology = None if name == "forward" else Topology.nodes(4)
    for limit in [None, 4 * bounds(shape, src, dst).memory + 48][: 1 + limited]:
        made = plan(
            shape, "float32", src, dst, planners=[name], partial_init="divide", memory_limit=limit, topology=topology
        )
        assert made.planner == name
        verify(made)
        assert made.volume_ratio >= 1
        for rank, part in simulate(made, parts).items():
            assert torch.equal(part, part_of(full, dst, rank) / 4)


def test_all_coordinates_need_the_value() -> None:
    # rows of four ranks; a sum at one coordinate needs them at rank 0 alone, one of equal parts on every rank
    owner, divide = (bounds((8, 6), ROWS, SUM, partial_init=init) for init in ("owner", "divide"))
    assert (owner.recv, owner.send, owner.lb) == (36, 12, 36)
    assert divide._replace(lb_kind=owner.lb_kind) == bounds((8, 6), ROWS, WHOLE)._replace(lb_kind=owner.lb_kind)
    assert sum(verify(plan((8, 6), "float32", ROWS, SUM)).received.values()) == 36
    assert sum(verify(plan((8, 6), "float32", ROWS, SUM, partial_init="divide")).received.values()) == 4 * 36
    # what is there already is divided in place of being moved
    for init, held in (("owner", 96), ("divide", 96)):
        made = plan((8, 6), "float32", WHOLE, SUM, partial_init=init)
        assert (made.planner, made.communicates, made.peak_bytes) == ("local", False, 4 * held)
    # an average of copies takes what a sum of equal parts takes
    average = Layout(LINE, [None, None], {0: "avg"})
    assert bounds((8, 6), ROWS, average) == divide == bounds((8, 6), ROWS, average, partial_init="divide")


@pytest.mark.parametrize("limit", [None, 2**12], ids=["free", "rounds"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_division_takes_no_memory_of_its_own(dtype: torch.dtype, limit: int | None) -> None:
    shape = (128, 96)
    for src in (ROWS, WHOLE, Layout(LINE, [None, None], {0: "max"})):
        fixed = plan(shape, dtype, src, SUM, partial_init="divide").bounds.memory * dtype.itemsize
        limited = None if limit is None else fixed + limit
        made = plan(shape, dtype, src, SUM, partial_init="divide", memory_limit=limited)
        program = Program(made, 0, cast(Any, NoWire()))
        source = torch.zeros(src.local_shape(shape, 0), dtype=dtype)
        program(source)
        with Live() as live:
            source.view(-1)
            program(source)
        assert live.peak <= made.peak_bytes


def test_a_part_is_never_the_source_itself() -> None:
    value = torch.tensor([3.0, -2.0])
    whole, pending = Layout(Mesh(1), [None]), Layout(Mesh(1), [None], {0: "sum"})
    # on one rank nothing begins
    assert redistribute_local(value, (2,), whole, pending, partial_init="divide") is value
    made = plan((2,), "float32", Layout(Mesh(2), [None]), Layout(Mesh(2), [None], {0: "sum"}), partial_init="divide")
    program = Program(made, 1, None)
    found = program(value, copy=False)
    assert found.tolist() == [1.5, -1.0]
    assert value.tolist() == [3.0, -2.0]
    with pytest.raises(LayoutError, match="out shares memory with the source"):
        program(value, value)
    out = torch.zeros(4)[::2]
    assert program(value, out) is out
    assert out.tolist() == [1.5, -1.0]


def test_the_way_to_begin_is_part_of_the_plan() -> None:
    owner = plan((8, 6), "float32", ROWS, SUM)
    divide = plan((8, 6), "float32", ROWS, SUM, partial_init="divide")
    assert owner is plan((8, 6), "float32", ROWS, SUM, partial_init="owner")
    assert owner.hash != divide.hash
    assert 'plan.partial_init: "divide"' in divide.canonical_text().splitlines()
    assert "partial_init" not in owner.canonical_text()
    assert "sums begin as equal parts of the value" in str(divide)
    assert "sums begin" not in str(owner)
    for made in (owner, divide):
        # the owner's JSON is what versions without the option wrote
        data = json.loads(json.dumps(made.to_json()))
        assert ("partial_init" in data) == (made is divide)
        again = Plan.from_json(data)
        assert (again, again.hash) == (made, made.hash)
        verify(again)
    # where nothing is divided, the option makes no other plan
    for dst in (WHOLE, Layout(LINE, [None, None], {0: "avg"}), Layout(LINE, [0, None])):
        assert plan((8, 6), "float32", SUM, dst, partial_init="divide").hash == plan((8, 6), "float32", SUM, dst).hash
    assert plan((8, 6), "float32", SUM, SUM, partial_init="divide").hash == plan((8, 6), "float32", SUM, SUM).hash
    with pytest.raises(RedistError, match="partial_init is"):
        Plan.from_json({**divide.to_json(), "partial_init": 3})
    with pytest.raises(RedistError, match="its transfers are 36 and 12"):
        verify(Plan.from_json({**divide.to_json(), "partial_init": "owner"}))


def test_what_cannot_be_divided_is_refused() -> None:
    for call in (bounds, lambda *task, **options: plan(task[0], "bf16", *task[1:], **options)):
        with pytest.raises(UnsupportedError, match='partial_init is "owner" or "divide", got \'split\''):
            call((8, 6), ROWS, WHOLE, partial_init="split")
        for op in ("max", "min", "product"):
            with pytest.raises(UnsupportedError, match=f"the target starts a pending {op}, which has no n-th parts"):
                call((8, 6), ROWS, Layout(LINE, [None, None], {0: op}), partial_init="divide")
    for dtype in ("int32", "uint8", "complex64", "float8_e5m2"):
        with pytest.raises(
            UnsupportedError, match=f"cannot start a pending sum of {dtype}: .* is for float16, bfloat16"
        ):
            plan((8, 6), dtype, ROWS, SUM, partial_init="divide")
        # a sum that is kept is not divided
        assert plan((8, 6), dtype, SUM, SUM, partial_init="divide").planner == "local"
    for init in ("owner", "divide"):
        made = plan((8, 6), "float32", WHOLE, SUM, partial_init=init)
        with pytest.raises(UnsupportedError, match="without partial sums"):
            RepeatedExchange([made], torch.device("cpu"))


def test_the_command_line_takes_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    task = ["--shape", "8,6", "--mesh", "4", "--src", "S(0)", "--dst", "Partial(sum)", "--dtype", "float32", "--json"]
    for init, made in (("owner", plan((8, 6), "float32", ROWS, SUM)), ("divide", _divided())):
        assert main(["plan", *task, "--partial-init", init]) == 0
        assert Plan.from_json(json.loads(capsys.readouterr().out)).hash == made.hash
        assert main(["bound", *task, "--partial-init", init]) == 0
        assert json.loads(capsys.readouterr().out)["send"] == made.bounds.send
    assert main(["plan", *task[:-3], "--dtype", "int8", "--partial-init", "divide"]) == 2
    assert "cannot start a pending sum of int8" in capsys.readouterr().err


def _divided() -> Plan:
    return plan((8, 6), "float32", ROWS, SUM, partial_init="divide")


def _like_dtensor(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    full = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for before in ([Replicate(), Replicate()], [Shard(0), Replicate()], [Shard(0), Shard(1)]):
            for after in ([Partial(), Replicate()], [Partial(), Partial()], [Shard(1), Partial()]):
                tensor = distribute_tensor(full.to(dtype), mesh, before)
                spec = DTensorSpec(mesh, tuple(after), tensor_meta=tensor._spec.tensor_meta)
                # torch begins sums of replicas alone, and not in its public functions
                middle = [Replicate() if placement == Partial() else placement for placement in after]
                value = tensor.redistribute(placements=middle)
                theirs = redistribute_local_tensor(value.to_local(), value._spec, spec)
                ours = redistribute(tensor, placements=after, partial_init="divide")
                assert ours.placements == tuple(after)
                assert torch.equal(ours.to_local(), theirs)
                owned = redistribute(tensor, placements=after)
                assert torch.equal(owned.full_tensor(), full.to(dtype))
                assert not torch.equal(owned.to_local(), ours.to_local())
    handle = redistribute(tensor, placements=[Partial(), Replicate()], partial_init="divide", async_op=True)
    assert torch.equal(handle.wait().to_local(), full.to(dtype) / 2)
    # to a mesh of other ranks, and with a gradient
    line = init_device_mesh("cpu", (4,))
    leaf = distribute_tensor(full, mesh, [Shard(0), Replicate()]).requires_grad_()
    moved = redistribute(leaf, line, [Partial()], partial_init="divide")
    assert torch.equal(moved.to_local(), full / 4)
    redistribute(moved, placements=[Replicate()]).to_local().square().sum().backward()
    assert isinstance(leaf.grad, DTensor)
    assert torch.allclose(leaf.grad.full_tensor(), 2 * full)


def test_parts_are_those_of_dtensor() -> None:
    run_ranks(_like_dtensor, 4)


def _on_ranks(rank: int, world: int) -> None:
    full = torch.arange(48.0).reshape(8, 6)
    mine = part_of(full, ROWS, rank)
    assert torch.equal(redistribute_local(mine, (8, 6), ROWS, SUM, partial_init="divide"), full / 4)
    handle = redistribute_local(mine, (8, 6), ROWS, SUM, partial_init="divide", async_op=True)
    assert torch.equal(handle.wait(), full / 4)
    assert torch.equal(redistribute_local(mine, (8, 6), ROWS, SUM), full if rank == 0 else full * 0)
    # there and back is the identity, whatever the losses are
    for rule in ("replicate", "adjoint"):
        leaf = mine.clone().requires_grad_()
        there = redistribute_local(leaf, (8, 6), ROWS, SUM, partial_init="divide", grad=rule)
        back = redistribute_local(there, (8, 6), SUM, ROWS, grad=rule)
        assert torch.equal(back, mine)
        (2 * back).sum().backward()
        assert torch.equal(leaf.grad, torch.full_like(mine, 2.0))
    made = plan((8, 6), "float32", ROWS, SUM, partial_init="divide", memory_limit=4 * (48 + 12) + 64)
    assert made.steps[0].rounds > 1
    assert torch.equal(compile(made)(mine), full / 4)
    largest = Layout(LINE, [None, None], {0: "max"})
    for limit in (None, 4 * 4 * 96 + 2**16):
        items = {
            "moved": (mine, (8, 6), ROWS, SUM),
            "here": (full, (8, 6), WHOLE, SUM),
            "reduced": (full * rank, (8, 6), largest, SUM),
            "averaged": (mine, (8, 6), ROWS, Layout(LINE, [None, None], {0: "avg"})),
            "kept": (mine, (8, 6), ROWS, ROWS),
        }
        found = redistribute_many(items, partial_init="divide", memory_limit=limit)
        assert torch.equal(found["moved"], full / 4)
        assert torch.equal(found["here"], full / 4)
        assert torch.equal(found["reduced"], 3 * full / 4)
        assert torch.equal(found["averaged"], full)
        assert torch.equal(found["kept"], mine)
        assert torch.equal(redistribute_many([items["here"]])[0], full if rank == 0 else full * 0)


def test_parts_arrive_on_ranks() -> None:
    run_ranks(_on_ranks, 4)
