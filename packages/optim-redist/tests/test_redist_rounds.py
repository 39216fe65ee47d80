"""Memory: rounds of exchanges and of reductions, sources that are given up, and what plans claim to hold."""

from __future__ import annotations

import random
import time
from functools import partial
from itertools import pairwise, product
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from redist_cases import FAMILIES, combined, contributions_of, part_of, random_case, replicated_contributions
from redist_memory import Live, NoWire

from optim_redist import (
    CommModel,
    Cyclic,
    Intervals,
    Layout,
    LayoutError,
    Mesh,
    Plan,
    PlanInfeasibleError,
    Ragged,
    Strided,
    Topology,
    UnsupportedError,
    bounds,
    boxes,
    plan,
    redistribute_local,
    simulate,
    verify,
)
from optim_redist._methods.chunked import RoundSizes, fullest_round, in_rounds, parts_of_grid, points_of
from optim_redist._methods.direct import direct_phases
from optim_redist._methods.exchanges import DirectExchange, Exchange, relayed
from optim_redist._methods.relay import relay_phases
from optim_redist._running.given import resolved
from optim_redist._running.one_call import has_room_for_copies
from optim_redist.boxes import Box, DisjointBoxes, cut, intersect_boxes, volume
from optim_redist.execute import program_for
from optim_redist.layout import Kind
from optim_redist.problem import Problem
from optim_redist.program import Program
from optim_utils.testing import run_ranks


def _contributions(layout: Layout, shape: tuple[int, ...]) -> dict[int, torch.Tensor]:
    """What every rank contributes: small whole numbers, so that sums are exact in any order."""
    fulls = {}
    for rank in layout.mesh.ranks:
        number = contributions_of(layout, rank)
        generator = torch.Generator().manual_seed(number)
        fulls[rank] = part_of(torch.randint(-9, 9, shape, generator=generator).float(), layout, rank)
    return fulls


@pytest.mark.parametrize("rounds_of", ["direct", "relay"])
def test_reductions_in_rounds(rounds_of: str) -> None:
    mesh = Mesh((2, 2, 2))
    src = Layout(mesh, [2, None], {0: "sum", 1: "sum"})
    for dst in (Layout(mesh, [None, None]), Layout(mesh, [(0, 1), 2]), Layout(mesh, [None, 0], {1: "max"})):
        if rounds_of == "relay" and Problem((16, 8), src, dst).dst_replicas == 1:
            continue
        free = plan((16, 8), "float32", src, dst, planners=[rounds_of])
        # source and target stay; the buffers may take half
        fixed = 4 * free.bounds.memory
        limit = fixed + (free.peak_bytes - fixed) // 2
        made = plan((16, 8), "float32", src, dst, planners=[rounds_of], memory_limit=limit)
        assert made.stages[0].rounds > 1
        assert verify(made).peak * 4 <= made.peak_bytes <= limit
        parts = _contributions(src, (16, 8))
        wanted = combined(src, (16, 8), parts)
        got = simulate(made, parts)
        assert torch.equal(combined(dst, (16, 8), got) if dst.partial else _joined(dst, got), wanted)


SUMMED = Layout(Mesh(4), [None, None], {0: "sum"})
AVERAGED = Layout(Mesh(4), [None, None], {0: "avg"})
ROWS, COLUMNS, WHOLE = (Layout(Mesh(4), dims) for dims in ([0, None], [None, 0], [None, None]))
REPLICAS = Layout(Mesh((2, 2, 2)), [None, None], {1: "sum", 2: "sum"}), Layout(Mesh((2, 2, 2)), [None, 2])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("spare", [None, 2**14, 2**12], ids=["free", "16 KiB", "4 KiB"])
@pytest.mark.parametrize(
    ("dtype", "src", "dst"),
    [
        (torch.float32, ROWS, COLUMNS),
        (torch.bfloat16, ROWS, WHOLE),
        (torch.bfloat16, SUMMED, ROWS),
        (torch.float32, SUMMED, COLUMNS),
        (torch.float32, AVERAGED, WHOLE),
        (torch.float8_e5m2, SUMMED, WHOLE),
        (torch.complex32, SUMMED, WHOLE),
        (torch.bfloat16, SUMMED, Layout(Mesh(4), [(0, Cyclic(3)), None])),
        (torch.bfloat16, *REPLICAS),
    ],
    ids=["move", "gather", "sum", "fp32 sum", "average", "fp8 sum", "complex32 sum", "dealt sum", "replicas"],
)
def test_no_rank_holds_more_than_its_plan_claims(
    dtype: torch.dtype, src: Layout, dst: Layout, spare: int | None
) -> None:
    shape = (128, 96)
    fixed = plan(shape, dtype, src, dst).bounds.memory * dtype.itemsize
    made = plan(shape, dtype, src, dst, memory_limit=None if spare is None else fixed + spare)
    assert spare != 2**12 or made.stages[0].rounds > 1
    for rank in src.mesh.ranks:
        program = Program(made, rank, cast(Any, NoWire()))
        source = torch.zeros(src.local_shape(shape, rank)).to(dtype)
        program(source)
        with Live() as live:
            source.view(-1)
            program(source)
        assert live.peak <= made.peak_bytes


def test_large_contributions_are_converted_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (1024, 768)
    for dtype, src in ((torch.bfloat16, SUMMED), (torch.float32, AVERAGED)):
        made = plan(shape, dtype, src, WHOLE, planners=["direct"])
        # source, target, three contributions each way, partial results, and a slice of a contribution
        width = 2 * dtype.itemsize
        assert made.peak_bytes == prod(shape) * (8 * dtype.itemsize + width) + 2**18 * width
        source = torch.randn(shape).to(dtype)
        program = Program(made, 0, cast(Any, NoWire()))
        with Live() as live:
            source.view(-1)
            program(source)
        assert live.peak <= made.peak_bytes
    generator = torch.Generator().manual_seed(0)
    parts = {rank: torch.randn(37, 41, 5, generator=generator).bfloat16() for rank in range(4)}
    parts[1] = parts[1].transpose(0, 1).contiguous().transpose(0, 1)
    src, dst = Layout(Mesh(4), [None] * 3, {0: "sum"}), Layout(Mesh(4), [None, (0, Cyclic(3)), None])
    made = plan((37, 41, 5), "bf16", src, dst)
    whole = simulate(made, parts)
    for size in (1, 7, 300):
        monkeypatch.setattr("optim_redist._running.reduction.COMBINED_AT_ONCE", size)
        sliced = simulate(made, parts)
        assert all(torch.equal(sliced[rank].view(torch.int16), whole[rank].view(torch.int16)) for rank in whole)


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 2), ("float32", 4)], ids=["bf16", "fp32"])
def test_a_reduction_fits_where_source_and_target_leave_one_chunk(dtype: str, width: int) -> None:
    for src, dst in ((SUMMED, ROWS), (AVERAGED, COLUMNS)):
        needed = plan((512, 256), dtype, src, dst).bounds.memory * width
        # partial results of all of the target would take as much as the target, or twice that
        made = plan((512, 256), dtype, src, dst, memory_limit=needed + 2**16)
        verify(made)
        assert made.peak_bytes <= needed + 2**16


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((128, 128, 128), "float32"), ((32, 32, 32, 32), "float32"), ((2,) * 18, "bf16")],
    ids=["3-D", "4-D", "18-D"],
)
def test_a_reduction_of_several_dimensions_fits_where_one_chunk_is_left(shape: tuple[int, ...], dtype: str) -> None:
    src, dst = Layout(Mesh(4), [None] * len(shape), {0: "sum"}), Layout(Mesh(4), [None] * len(shape))
    limit = plan(shape, dtype, src, dst).bounds.memory * (4 if dtype == "float32" else 2) + 2**16
    made = plan(shape, dtype, src, dst, memory_limit=limit)
    # more rounds than the longest dimension has indices, none of them empty
    rounds = made.stages[0].rounds
    assert rounds > max(shape)
    assert parts_of_grid(made.problems[0], rounds) == rounds
    assert made.peak_bytes <= limit


def test_reductions_are_cut_along_several_dimensions() -> None:
    src = Layout(Mesh((2, 2)), [None] * 3, {0: "sum", 1: "sum"})
    for dims in ([None, None, None], [(0, 1), None, None], [1, 0, None]):
        dst = Layout(src.mesh, dims)
        fixed = 4 * plan((4, 5, 3), "float32", src, dst).bounds.memory
        for planner in ("direct", "relay"):
            if planner == "relay" and Problem((4, 5, 3), src, dst).dst_replicas == 1:
                continue
            made = plan((4, 5, 3), "float32", src, dst, memory_limit=fixed + 4 * 7, planners=[planner])
            assert made.stages[0].rounds > 5
            assert verify(made).peak * 4 <= made.peak_bytes <= fixed + 4 * 7
            parts = _contributions(src, (4, 5, 3))
            wanted = combined(src, (4, 5, 3), parts)
            got = simulate(made, parts)
            for rank, part in got.items():
                assert torch.equal(part, part_of(wanted, dst, rank))


@pytest.mark.parametrize("dst", [COLUMNS, WHOLE], ids=["move", "gather"])
@pytest.mark.parametrize("spare", [2**20, 3 * 2**18, 2**17])
def test_rounds_are_as_few_as_the_limit_allows(dst: Layout, spare: int) -> None:
    shape = (4096, 2048)
    limit = 2 * bounds(shape, ROWS, dst).memory + spare
    made = plan(shape, "bf16", ROWS, dst, memory_limit=limit, planners=["direct"])
    rounds = made.stages[0].rounds
    problem = Problem(shape, ROWS, dst)
    exchange = DirectExchange(problem, Topology())

    def peak(num_rounds: int) -> int:
        moved = exchange.fullest_round(num_rounds)
        return 2 * max(sum(stored) + moved[rank] for rank, stored in problem.num_stored.items())

    assert made.peak_bytes == peak(rounds) <= limit
    # within a hundredth of the least number, exactly it below 128
    assert all(peak(fewer) > limit for fewer in range(rounds // 2, rounds - rounds // 100))


def test_every_round_takes_the_latency_of_the_border_that_it_crosses() -> None:
    shape, mesh = (4096, 4096), Mesh((2, 4))
    src, dst = Layout(mesh, [(0, 1), None]), Layout(mesh, [None, (0, 1)])
    nodes = Topology.nodes(4, latency=1e-3)
    made = plan(shape, "bf16", src, dst, topology=nodes, memory_limit=2 * bounds(shape, src, dst).memory + 2**18)
    rounds, (node, _) = made.stages[0].rounds, made.bounds.cuts
    assert rounds > 20
    # besides, the host packs and unpacks
    least = rounds * (CommModel.preset("flat").call_seconds + 1e-3) + 2 * node.inbound / nodes.levels[0].bandwidth
    assert least <= made.time < 1.001 * least


def test_the_largest_number_of_rounds_is_tried() -> None:
    shape = (65536, 65536)
    limit = 2 * bounds(shape, ROWS, COLUMNS).memory + 2**16
    made = plan(shape, "bf16", ROWS, COLUMNS, memory_limit=limit, planners=["direct"])
    # twice the least number would be more than plans may have
    assert 2**15 < made.stages[0].rounds < 2**16
    assert made.peak_bytes <= limit


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
def test_a_limit_that_an_error_asks_for_is_enough(donate: bool) -> None:
    huge = Layout(Mesh(4), [None, None], {0: "sum"}), WHOLE
    for shape, (src, dst) in (((512, 512), (ROWS, COLUMNS)), ((2**17, 2**16), (ROWS, COLUMNS)), ((2**16, 2**15), huge)):
        limits = bounds(shape, src, dst)
        limit = 4 * (limits.live if donate else limits.memory)
        with pytest.raises(PlanInfeasibleError) as caught:
            plan(shape, "float32", src, dst, memory_limit=limit + 2, donate=donate, planners=["direct"])
        assert not caught.value.proven
        needed = sum(caught.value.terms.values())
        made = plan(shape, "float32", src, dst, memory_limit=needed, donate=donate, planners=["direct"])
        assert made.peak_bytes <= needed


def test_an_error_asks_for_no_more_than_rounds_need() -> None:
    """The last rank gets all: 14 GiB of contributions, of which the largest number of rounds brings 320 KiB each."""
    mesh = Mesh((8, 8))
    last = [Ragged([0] * 8 + [n]) for n in (5, 2**17)]
    src, dst = Layout(mesh, [0, None, None], {1: "sum"}), Layout(mesh, [None, (0, last[0]), (1, last[1])])
    shape = (1371, 5, 2**17)
    limit = 2 * bounds(shape, src, dst).memory
    with pytest.raises(PlanInfeasibleError) as caught:
        plan(shape, "bf16", src, dst, memory_limit=limit + 2**16)
    assert 2**16 < caught.value.terms["buffers"] < 2**20
    needed = sum(caught.value.terms.values())
    assert plan(shape, "bf16", src, dst, memory_limit=needed).peak_bytes <= needed


def test_a_part_that_stays_whole_counts_once() -> None:
    x = torch.zeros(64, 64)
    uneven = Layout(Mesh(2), [(0, Ragged((0, 60, 64)))])
    for src, dst in (
        (Layout(Mesh(1), [None, None]),) * 2,
        (Layout(Mesh(2), [None, None]), Layout(Mesh(1), [None, None])),
    ):
        for donate in (False, True):
            made = plan(x.shape, x.dtype, src, dst, memory_limit=x.nbytes, donate=donate)
            assert made.peak_bytes == verify(made).peak * 4 == x.nbytes
            program = Program(made, 0, None)
            assert program(x) is x
            assert program(x, async_op=True).wait() is x
            assert program(x, x) is x
            with pytest.raises(UnsupportedError, match=f"{x.nbytes} bytes above memory_limit={x.nbytes}"):
                program(x, torch.empty_like(x))
        with pytest.raises(PlanInfeasibleError, match="no method can stay below it") as caught:
            plan(x.shape, x.dtype, src, dst, memory_limit=x.nbytes - 1)
        assert caught.value.terms == {"larger of source and target": x.nbytes}
    # a part that becomes smaller is held beside what it becomes, one that fills in the identity beside its source
    for src, dst in ((WHOLE, ROWS), (WHOLE, SUMMED), (uneven, Layout(Mesh(2), [None]))):
        shape = (64,) * src.num_dims
        made = plan(shape, "float32", src, dst)
        assert made.peak_bytes >= made.bounds.memory * 4
        verify(made)


@pytest.mark.parametrize(
    ("n", "kind"),
    [
        (12, Cyclic(3)),
        (14, Cyclic(3)),
        (12, Intervals([[(0, 1), (4, 6), (7, 8)], [(1, 4), (6, 7), (8, 12)]])),
        (11, Strided([2])),
        (1, Cyclic(3)),
    ],
    ids=["dealt", "dealt with a tail", "intervals", "strided", "one part empty"],
)
def test_a_part_of_many_pieces_that_stays_whole_is_not_copied(n: int, kind: Kind) -> None:
    src, dst = Layout(Mesh(2), [None, ((0,), kind)]), Layout(Mesh((2, 1)), [1, ((0,), kind)])
    made = plan((4, n), "float32", src, dst, memory_limit=4 * bounds((4, n), src, dst).live)
    for rank in (0, 1):
        x = torch.zeros(src.local_shape((4, n), rank))
        assert made.peak_bytes >= x.nbytes
        program = Program(made, rank, None)
        assert program(x) is x
        assert program(x, x) is x


def test_parts_without_elements_still_get_the_shape_of_the_target() -> None:
    made = plan((0, 4), "float32", PAIR, Layout(Mesh(2), [None, 0]))
    found = Program(made, 0, None)(torch.zeros(0, 4))
    assert found is not None
    assert found.shape == (0, 2)
    # a rank of neither layout may compile what moves nothing
    assert Program(made, 7, None)(None) is None


def test_many_rounds_are_planned_without_listing_them() -> None:
    mesh = Mesh(8)
    src, dst = Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    began = time.process_time()
    made = plan((16384, 16384), "bf16", src, dst, memory_limit=2 * 2 * 2**25 + 2**15, planners=["direct"])
    assert made.stages[0].rounds > 3000
    # 0.1 s here; listing every round's transfers takes 10
    assert time.process_time() - began < 3


def test_rounds_of_as_many_elements_as_a_tensor_may_have_are_counted() -> None:
    mesh = Mesh((4, 4))
    for src, dst in (
        (Layout(mesh, [0, 1]), Layout(mesh, [1, None])),
        (Layout(mesh, [0, None], {1: "sum"}), Layout(mesh, [None, None])),
    ):
        free = plan((2**40, 2**40), "float32", src, dst, planners=["direct"])
        least = free.bounds.memory * 4
        for spare in ((free.peak_bytes - least) // 2, (free.peak_bytes - least) // 1000):
            made = plan((2**40, 2**40), "float32", src, dst, planners=["direct"], memory_limit=least + spare)
            assert made.steps[0].rounds > 1
            verify(made)


@pytest.mark.parametrize("dst", [Layout(Mesh(8), [0, None]), Layout(Mesh(8), [None, 0])], ids=["rows", "columns"])
def test_many_rounds_of_reductions_are_planned_without_listing_them(dst: Layout) -> None:
    src = Layout(dst.mesh, [None, None], {0: "sum"})
    fixed = bounds((16384, 16384), src, dst).memory
    began = time.process_time()
    made = plan((16384, 16384), "bf16", src, dst, memory_limit=2 * fixed + 2**16)
    assert made.stages[0].rounds > 10000
    # 1 s here, 25 to 32 with every round's transfers
    assert time.process_time() - began < 8


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(256, 256), (8, 8192)], ids=["square", "wide"])
def test_thousands_of_rounds_are_proven_without_comparing_all_boxes(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = 0

    def counting(a: Box, b: Box) -> Box | None:
        nonlocal compared
        compared += 1
        return intersect_boxes(a, b)

    monkeypatch.setattr(boxes, "intersect_boxes", counting)
    mesh = Mesh(4)
    made = plan(shape, "bf16", Layout(mesh, [0, None]), Layout(mesh, [None, 0]), memory_limit=2 * (2 * 2**14 + 64))
    assert made.stages[0].rounds > 300
    verify(made)
    moved = sum(len(phase.transfers) for _, phases in made.phases for phase in phases)
    # each box of a rank with each other one would be a thousand
    assert 0 < compared < 20 * moved


def test_boxes_find_what_they_share_with_another() -> None:
    for seed in range(60):
        shape, src, dst = random_case(seed)
        problem = Problem(shape, src, dst)
        parts = [part for _, point in zip(range(4), problem.needers) for _, part in problem.atoms_to(point)]
        parts = [
            piece for part in parts for pieces in cut(part, [0, volume(part) // 3, volume(part)]) for piece in pieces
        ]
        together = DisjointBoxes(parts)
        assert together.num_elements == sum(map(volume, parts))
        for rank in src.mesh.ranks:
            held = problem.held(rank)
            assert held is not None
            if all(held):
                common = [intersect_boxes(held, part) for part in parts]
                assert together.num_common(held) == sum(volume(box) for box in common if box is not None)


def _joined(layout: Layout, locals: dict[int, Any]) -> torch.Tensor:
    full = torch.empty(16, 8)
    for rank, part in locals.items():
        (rows,), (columns,) = layout.indices((16, 8), rank)
        full[rows.start : rows.stop, columns.start : columns.stop] = part
    return full


def test_rounds_together_are_the_phase() -> None:
    dealt = (40,), Layout(Mesh(4), [None], {0: "sum"}), Layout(Mesh(4), [(0, Cyclic(3))])
    scalar = (), Layout(Mesh(3), [], {0: "sum"}), Layout(Mesh(3), [])
    for case in (dealt, scalar, *(random_case(seed, FAMILIES + "P") for seed in range(40))):
        problem = Problem(*case)
        (phase,) = direct_phases(problem)
        for num_rounds in (2, 5, 40):
            parts = in_rounds(problem, phase, num_rounds)
            assert len(parts) == num_rounds
            for rank, most in fullest_round(problem, phase, num_rounds).items():
                assert most == max(part.sent().get(rank, 0) + part.received().get(rank, 0) for part in parts)
            for rank, count in phase.sent().items():
                assert count == sum(part.sent().get(rank, 0) for part in parts)
            for rank, count in phase.received().items():
                assert count == sum(part.received().get(rank, 0) for part in parts)


@pytest.mark.parametrize("num_rounds", [1, 2, 7, 40])
def test_sizes_of_all_rounds_are_added_at_once(num_rounds: int) -> None:
    sizes_of, rng = RoundSizes(num_rounds), random.Random(num_rounds)
    total, wanted = 0, [0] * num_rounds
    for _ in range(300):
        # more elements than 64 bits count
        unit, steps, shift = rng.choice([1, 3, 2**64 + 1]), rng.choice([1, 5, 80, 10**15]), rng.randrange(num_rounds)
        points = points_of(unit, steps, num_rounds, shift)
        total += sizes_of(unit, steps, shift)
        wanted = [count + stop - start for count, (start, stop) in zip(wanted, pairwise(points))]
        assert sizes_of.largest(total) == max(wanted)


def test_every_round_gets_as_much_as_where_its_part_begins_and_ends_says() -> None:
    width = 16  # bytes of the integer for each round
    for num_rounds in range(1, 24):
        sizes_of = RoundSizes(num_rounds)
        for steps, shift in product(range(num_rounds), repeat=2):
            lanes = sizes_of(1, steps, shift).to_bytes(width * num_rounds, "little")
            found = [int.from_bytes(lanes[k : k + width], "little") for k in range(0, len(lanes), width)]
            assert found == [stop - start for start, stop in pairwise(points_of(1, steps, num_rounds, shift))]


@pytest.mark.slow
@pytest.mark.parametrize("topology", [Topology(), Topology.nodes(2)], ids=["flat", "nodes"])
def test_what_an_exchange_moves_needs_no_list_of_transfers(topology: Topology) -> None:
    scalar = (), Layout(Mesh(3), [], {0: "sum"}), Layout(Mesh(3), [])
    compared = relays = 0
    for case in (scalar, *replicated_contributions(), *(random_case(seed, FAMILIES + "PP") for seed in range(150))):
        problem = Problem(*case)
        phases, found = [], []
        if not topology.levels or problem.src_replicas == 1:
            phases, found = direct_phases(problem, topology), [DirectExchange(problem, topology)]
        if problem.num_contributions > 1:
            relays += problem.src_replicas > 1
            phases, found = [*phases, *relay_phases(problem)], [*found, *relayed(problem, topology)]
        for phase, ours in zip(phases, found, strict=True):
            known = Exchange.of(problem, phase, topology)
            assert ours.volumes.name == known.volumes.name
            assert ours.volumes.reduces == known.volumes.reduces or not phase.transfers
            for counts in ("sent", "received", "borders"):
                assert _moved(getattr(ours.volumes, counts)) == _moved(getattr(known.volumes, counts))
            for num_rounds in (1, 2, 3, 5, 40):
                assert _moved(ours.fullest_round(num_rounds)) == _moved(known.fullest_round(num_rounds))
            compared += len(phase.transfers)
    assert compared > 1000
    assert relays > 5


def _moved(counts: dict[Any, int]) -> dict[Any, int]:
    return {key: count for key, count in counts.items() if count}


def test_later_stages_count_the_source_unless_it_is_donated() -> None:
    mesh = Mesh(4)
    src, dst = Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    kept, given = (plan((8, 8), "float32", src, dst, planners=["naive"], donate=donate) for donate in (False, True))
    # the gather holds 16 + 64 and moves 48 in and out; the slice has 64 + 16, and the caller's 16 if it keeps them
    assert [step.peak // 4 for step in kept.steps] == [176, 96]
    assert [step.peak // 4 for step in given.steps] == [176, 80]
    for made in (kept, given):
        verify(made)
    with pytest.raises(PlanInfeasibleError) as caught:
        plan((8, 8), "float32", src, dst, memory_limit=63, donate=True)
    assert caught.value.proven
    assert caught.value.terms == {"larger of source and target": 64}


def _give(rank: int, world_size: int) -> list[str]:
    mesh, wrong = Mesh(2), []
    src, dst = Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    full = torch.arange(64.0).reshape(8, 8)
    mine = full[4 * rank : 4 * rank + 4].clone()
    moved = redistribute_local(mine, (8, 8), src, dst, donate=True)
    if not torch.equal(moved, full[:, 4 * rank : 4 * rank + 4]):
        wrong.append("values")
    if mine.untyped_storage().nbytes():
        wrong.append("the source still has its memory")
    again = redistribute_local(moved, (8, 8), dst, dst, donate=True)
    if again is not moved or not moved.untyped_storage().nbytes():
        wrong.append("what stays is not given up")
    try:
        redistribute_local(full[4 * rank : 4 * rank + 4], (8, 8), src, dst, donate=True)
    except LayoutError:
        return wrong
    return [*wrong, "a view was accepted"]


def test_a_donated_source_is_freed() -> None:
    assert run_ranks(_give, 2) == [[], []]


HYBRID = Layout(Mesh((2, 4)), [1, None]), Layout(Mesh((2, 4)), [None, 1])


def test_a_donated_source_is_packed_first_where_the_limit_leaves_no_room_for_both() -> None:
    src, dst = HYBRID
    shape = (1024, 1024)  # 2^18 elements of source and of target, three quarters of which move
    quarter = 2**16
    free = plan(shape, "float32", src, dst, donate=True)
    assert (free.planner, free.peak_bytes) == ("direct", 4 * 14 * quarter)
    limited = plan(shape, "float32", src, dst, donate=True, memory_limit=4 * 11 * quarter)
    # three quarters packed, one kept, the target and what arrives
    assert (limited.planner, limited.peak_bytes) == ("packed", 4 * (3 + 1 + 4 + 3) * quarter)
    assert verify(limited).peak * 4 == limited.peak_bytes
    assert limited.to_json() == Plan.from_json(limited.to_json()).to_json()
    kept = plan(shape, "float32", src, dst, memory_limit=44 * quarter)
    one_hop = {"planners": ["direct", "packed"]}
    below = plan(shape, "float32", src, dst, donate=True, memory_limit=44 * quarter - 4, **one_hop)
    assert (below.planner, kept.planner) == ("direct", "direct")
    assert min(below.stages[0].rounds, kept.stages[0].rounds) > 1


@pytest.mark.slow
def test_packed_plans_are_right() -> None:
    for seed in range(150):
        shape, src, dst = random_case(seed)
        if not src.partial and not dst.partial:
            made = plan(shape, "float32", src, dst, donate=True, memory_limit=2**40, planners=["direct", "packed"])
            if made.bounds.lb:
                verify(plan(shape, "float32", src, dst, donate=True, memory_limit=2**40, planners=["packed"]))


def test_an_output_that_does_not_fit_beside_the_earlier_steps_is_refused() -> None:
    src, dst = HYBRID
    limited = plan((1024, 1024), "float32", src, dst, donate=True, memory_limit=44 << 16)
    assert limited.planner == "packed"
    with pytest.raises(UnsupportedError, match=f"{4 << 16} bytes above memory_limit={44 << 16}"):
        Program(limited, 0, None)(torch.zeros(1024, 256), torch.zeros(256, 1024))
    # it is held from before the slice, too, which frees the source so that its other half is packed
    mesh = Mesh((2, 2))
    sliced = plan((8, 8), "float32", Layout(mesh, [0, None]), Layout(mesh, [1, 0]), donate=True, memory_limit=192)
    assert [(stage.op, stage.method) for stage in sliced.stages] == [("slice", "direct"), ("packed exchange", "packed")]
    with pytest.raises(UnsupportedError, match="64 bytes above memory_limit=192"):
        Program(sliced, 0, None)(torch.zeros(4, 8), torch.zeros(4, 4))
    steps = {"planners": ["naive"]}
    src, dst = Layout(Mesh(4), [0, None]), Layout(Mesh(4), [None, 0])
    peak = plan((64, 64), "float32", src, dst, **steps).peak_bytes
    for spare in (0, 64 * 16 * 4):
        made = plan((64, 64), "float32", src, dst, memory_limit=peak + spare, **steps)
        assert len(made.stages) == 2
        program = Program(made, 0, cast(Any, NoWire()))
        source, out = torch.zeros(16, 64), torch.zeros(64, 16)
        if not spare:
            with pytest.raises(UnsupportedError, match=f"{out.nbytes} bytes above memory_limit={peak}"):
                program(source, out)
            continue
        program(source)
        with Live() as live:
            source.view(-1)
            program(source, out)
        assert live.peak + out.nbytes <= peak + spare


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
def test_a_pending_conjugation_that_is_not_resolved_under_the_limit_is_refused(donate: bool) -> None:
    src = Layout(Mesh(4), [(0, Ragged((0, 48, 52, 58, 64))), None])
    source = torch.zeros(48, 64, dtype=torch.complex64)
    # a donated one is given up once it is resolved, another one stays
    besides = source.nbytes if donate else plan((64, 64), source.dtype, src, COLUMNS).peak_bytes
    for spare in (-1, 0):
        limit = source.nbytes + besides + spare
        made = plan((64, 64), source.dtype, src, COLUMNS, memory_limit=limit, donate=donate, planners=["direct"])
        program = Program(made, 0, cast(Any, NoWire()))
        program(source.clone())
        if spare:
            with pytest.raises(UnsupportedError, match=f"1 bytes above memory_limit={limit}"):
                program(source.conj())
            continue
        with Live() as live:
            source.view(-1)
            program(source.conj())
        assert live.peak <= limit


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("planner", ["local", "naive"])
def test_a_pending_conjugation_is_resolved_beside_an_output_that_is_held_from_the_start(
    planner: str, donate: bool
) -> None:
    # in the plan of two steps, out is held beside the gathered tensor; in the other nothing moves
    src, dst = (ROWS, COLUMNS) if planner == "naive" else (WHOLE, ROWS)
    source, out = (torch.zeros(layout.local_shape((64, 64), 0), dtype=torch.complex64) for layout in (src, dst))
    free = plan((64, 64), source.dtype, src, dst, donate=donate, planners=[planner])
    with_out = free.bounds.memory * 8 if planner == "local" else free.steps[0].peak + out.nbytes
    # a donated one is given up once it is resolved, before anything else is made
    enough = max(with_out, 2 * source.nbytes + out.nbytes) if donate else with_out + source.nbytes
    for spare in (-1, 0):
        limit = enough + spare
        made = plan((64, 64), source.dtype, src, dst, donate=donate, planners=[planner], memory_limit=limit)
        program = Program(made, 0, cast(Any, NoWire()) if made.communicates else None)
        program(source.clone())
        if spare:
            with pytest.raises(UnsupportedError, match=f"1 bytes above memory_limit={limit}"):
                program(source.conj(), out)
            continue
        with Live() as live:
            source.view(-1)
            out.view(-1)
            program(source.conj(), out)
        assert live.peak <= limit


PAIR, PAIR_WHOLE = Layout(Mesh(2), [0, None]), Layout(Mesh(2), [None, None])
PAIR_SUMMED = Layout(Mesh(2), [None, None], {0: "sum"})


class _Nccl(NoWire):
    """A team of two ranks whose collectives bring nothing."""

    members, is_nccl, takes_lists, is_whole, mixes_exchanges = (0, 1), True, True, True, True

    def _nothing(self, *buffers: Any, **options: Any) -> None:
        pass

    all_gather = reduce_scatter = all_reduce = all_to_all = exchange_lists = _nothing


@pytest.mark.parametrize("spare", [0, 2**16], ids=["its peak", "more"])
@pytest.mark.parametrize(
    "ends",
    [(PAIR, PAIR_WHOLE), (PAIR_SUMMED, PAIR_WHOLE), (PAIR_SUMMED, PAIR)],
    ids=["all-gather", "all-reduce", "reduce-scatter"],
)
def test_collectives_between_tensors_that_are_not_dense_stay_below_the_limit(
    ends: tuple[Layout, Layout], spare: int
) -> None:
    shape = (128, 96)
    limit = plan(shape, "float32", *ends).peak_bytes + spare
    made = plan(shape, "float32", *ends, memory_limit=limit)
    program = Program(made, 0, cast(Any, _Nccl()))
    native = program._calls.native(0)
    # a collective takes copies of parts that are not dense
    assert native is not None or not spare
    source, out = (torch.zeros(layout.local_shape(shape, 0)[::-1]).T for layout in ends)
    if native is not None:
        for _ in program._run_native(native, source, out, False):
            pass
        with Live() as live:
            source.view_as(source)
            for _ in program._run_native(native, source, out, False):
                pass
        assert live.peak <= limit


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
def test_a_source_that_is_kept_takes_room_from_the_copies_of_later_collectives(donate: bool) -> None:
    part = 64 * 32 * 4
    for spare in (-1, 0):
        # the gathered tensor and its slice twice, beside the source
        limit = (6 if donate else 7) * part + spare
        ends = PAIR, Layout(Mesh(2), [None, 0])
        made = plan((64, 64), "float32", *ends, memory_limit=limit, donate=donate, planners=["naive"])
        assert [stage.op for stage in made.stages] == ["all_gather", "slice"]
        assert has_room_for_copies(made, 1) == (spare == 0)


def test_a_source_with_a_pending_conjugation_is_resolved_into_what_an_all_gather_reads() -> None:
    source = torch.zeros(96, 64, dtype=torch.complex64).T
    out = torch.zeros(96, 128, dtype=torch.complex64).T
    # enough for the copy that resolves it, and for a copy of the out tensor
    limit = plan((128, 96), source.dtype, PAIR, PAIR_WHOLE).peak_bytes + source.nbytes
    program = Program(plan((128, 96), source.dtype, PAIR, PAIR_WHOLE, memory_limit=limit), 0, cast(Any, _Nccl()))
    native = program._calls.native(0)
    assert native is not None
    program._refusals.check_resolving(source.conj())
    with Live() as live:
        source.view_as(source), out.view_as(out)
        for _ in program._run_native(native, resolved(source.conj()), out, False):
            pass
    assert live.peak <= limit


@pytest.mark.parametrize("spare", [-1, 0], ids=["below four sources", "four sources"])
def test_a_reduce_scatter_of_a_source_with_a_pending_negation_stays_below_the_limit(spare: int) -> None:
    shape, columns = (128, 96), Layout(Mesh(2), [None, 0])
    source, out = torch._neg_view(torch.zeros(shape)), torch.zeros(48, 128).T
    limit = 4 * source.nbytes + spare
    program = Program(plan(shape, "float32", PAIR_SUMMED, columns, memory_limit=limit), 0, cast(Any, _Nccl()))
    native = program._calls.native(0)
    # beside source and out: the resolved source, its parts in order, and a dense target; an exchange takes less
    assert (native is not None) == (spare == 0)
    program._refusals.check_resolving(source)
    for _ in range(2):  # the first run makes views
        with Live() as live:
            source.view_as(source), out.view_as(out)
            if native is None:
                program(source, out)
            else:
                for _ in program._run_native(native, resolved(source), out, False):
                    pass
    assert live.peak <= limit


class _Keeping(NoWire):
    """A team whose works keep their buffers, as NCCL's do."""

    def exchange(self, *buffers: Any, async_op: bool) -> Any:
        return SimpleNamespace(wait=partial(len, buffers)) if async_op else None


def test_rounds_that_are_waited_for_later_stay_below_the_limit() -> None:
    src, dst = Layout(Mesh(4), [0, None]), Layout(Mesh(4), [None, 0])
    limit = plan((256, 256), "float32", src, dst).bounds.memory * 4 + 2**15
    made = plan((256, 256), "float32", src, dst, memory_limit=limit, planners=["direct"])
    assert made.steps[0].rounds == 4
    program = Program(made, 0, cast(Any, _Keeping()))
    source = torch.zeros(64, 256)
    program(source)
    with Live() as live:
        source.view_as(source)
        program(source, async_op=True).wait()
    assert live.peak <= limit


def _give_packed(rank: int, world_size: int) -> list[str]:
    wrong = []
    full = torch.arange(1024.0 * 1024).reshape(1024, 1024)
    src, dst = HYBRID
    # a target that is given takes memory while the source is packed
    for out, limit in ((None, 44 << 16), (torch.empty(256, 1024).t(), 48 << 16)):
        mine = part_of(full, src, rank)
        moved = redistribute_local(mine, full.shape, src, dst, donate=True, memory_limit=limit, out=out)
        if not torch.equal(moved, part_of(full, dst, rank)) or (out is not None and moved is not out):
            wrong.append("values")
        if mine.untyped_storage().nbytes():
            wrong.append("the source still has its memory")
    # where one byte less leaves room for parts of the target, which are gathered once the source is freed
    mine = part_of(full, src, rank)
    moved = redistribute_local(mine, full.shape, src, dst, donate=True, memory_limit=(44 << 16) - 1)
    if not torch.equal(moved, part_of(full, dst, rank)) or mine.untyped_storage().nbytes():
        wrong.append("a stopover")
    # source and target on different ranks
    here, there = Layout(Mesh((2, 2)), [0, None]), Layout(Mesh((2, 2), ranks=[4, 5, 6, 7]), [None, 1])
    made = plan(full.shape, "float32", here, there, donate=True, memory_limit=2**40, planners=["packed"])
    moved, expected = program_for(made)(part_of(full, here, rank)), part_of(full, there, rank)
    if (moved is None) != (expected is None) or (expected is not None and not torch.equal(moved, expected)):
        wrong.append("other ranks")
    # what is still to be conjugated is read into other memory
    numbers = torch.complex(full, -full).conj()
    pending = part_of(numbers, here, rank)
    if pending is not None:
        pending = pending.conj().resolve_conj().conj()
    made = plan(full.shape, "complex64", here, there, donate=True, memory_limit=2**40, planners=["packed"])
    moved, expected = program_for(made)(pending), part_of(numbers, there, rank)
    if expected is not None and not torch.equal(moved, expected):
        wrong.append("conjugated values")
    if pending is not None and pending.untyped_storage().nbytes():
        wrong.append("the conjugated source still has its memory")
    return wrong


def test_packed_sources_arrive_on_ranks() -> None:
    assert run_ranks(_give_packed, 8) == [[]] * 8
