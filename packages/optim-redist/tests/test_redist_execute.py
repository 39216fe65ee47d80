"""Redistributions on four gloo ranks, bit for bit what one process would slice."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from redist_cases import Case, combined, contributions_of, example_cases, part_of, random_case

from optim_redist import (
    Block,
    Intervals,
    Layout,
    LayoutError,
    Mesh,
    PlanMismatchError,
    Ragged,
    plan,
    redistribute_local,
    simulate,
)
from optim_redist._stage_program import stage_programs
from optim_utils.testing import run_ranks

FOUR_RANKS = [(4,), (2, 2), (3,), (2,), (1, 4)]
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def _numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.arange(1, prod(shape) + 1).reshape(shape).to(dtype)


def _assert_moved(case: Case, full: torch.Tensor, rank: int, **options: Any) -> None:
    shape, src, dst = case
    if rank not in {*src.mesh.ranks, *dst.mesh.ranks}:
        return
    found = redistribute_local(part_of(full, src, rank), shape, src, dst, dtype=full.dtype, **options)
    expected = part_of(full, dst, rank)
    assert (found is None) == (expected is None), case
    if expected is not None:
        assert torch.equal(found, expected), (case, rank)


def _fuzz(rank: int, world: int, seeds: range) -> int:
    done = 0
    for seed in seeds:
        case = random_case(seed, "COBURIEKM", FOUR_RANKS)
        if max((*case.src.mesh.ranks, *case.dst.mesh.ranks)) < world:
            _assert_moved(case, _numbered(case.shape), rank)
            done += 1
    for _, _, case in example_cases():
        if case.src.mesh.num_ranks == world:
            _assert_moved(case, _numbered(case.shape), rank)
            done += 1
    return done


@pytest.mark.slow
def test_random_cases_and_examples_on_four_ranks() -> None:
    assert min(run_ranks(_fuzz, 4, range(120))) > 60


def _every_dtype(rank: int, world: int) -> None:
    mesh = Mesh((2, 2))
    shape = (6, 5)
    src, dst = Layout(mesh, [0, 1]), Layout(mesh, [None, (1, 0)])
    for dtype in DTYPES:
        width = torch.empty(0, dtype=dtype).element_size()
        bits = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, width), dtype=torch.uint8)
        full = bits.view(dtype).reshape(shape) if width > 1 or dtype != torch.uint8 else bits.reshape(shape)
        found = redistribute_local(part_of_bits(full, src, rank), shape, src, dst)
        expected = part_of_bits(full, dst, rank)
        assert found.dtype == dtype
        # NaN payloads included, so bytes are compared
        assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), dtype


def part_of_bits(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """``part_of`` for element types that torch does not index: by bytes."""
    torch.manual_seed(0)
    width = full.element_size()
    bits = full.contiguous().view(torch.uint8).reshape(*full.shape, width)
    wide = Layout(layout.mesh, [*layout.dims, None])
    return part_of(bits, wide, rank).contiguous().view(full.dtype).reshape(layout.local_shape(full.shape, rank))


def _seeded_every_dtype(rank: int, world: int) -> None:
    torch.manual_seed(0)
    _every_dtype(rank, world)


def test_every_dtype_moves_bit_for_bit() -> None:
    run_ranks(_seeded_every_dtype, 4)


def _strided_async_and_out(rank: int, world: int) -> None:
    mesh = Mesh(4)
    shape = (8, 8)
    src, dst = Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    full = _numbered(shape)
    expected = part_of(full, dst, rank)
    strided = part_of(full, src, rank).t().contiguous().t()
    assert not strided.is_contiguous()
    assert torch.equal(redistribute_local(strided, shape, src, dst), expected)
    handle = redistribute_local(strided, shape, src, dst, async_op=True)
    assert torch.equal(handle.wait(), expected)
    assert handle.wait() is handle.wait()
    out = torch.zeros(16, 4, dtype=torch.int32)[::2, :2]
    assert redistribute_local(strided, shape, src, dst, out=out) is out
    assert torch.equal(out, expected)


def test_strided_tensors_async_calls_and_given_outputs() -> None:
    run_ranks(_strided_async_and_out, 4)


def _flat_pieces(rank: int, world: int) -> None:
    # a flat buffer cut anywhere, pieces of one rank apart from each other, and another number of ranks
    full = _numbered((101,))
    src = Layout(Mesh(3), [((0,), Intervals([[(0, 7), (90, 101)], [(7, 8)], [(8, 90)]]))])
    dst = Layout(Mesh(2, ranks=[3, 1]), [((0,), Ragged([0, 33, 101]))])
    _assert_moved(Case((101,), src, dst), full, rank)


def test_flat_tensors_cut_anywhere() -> None:
    run_ranks(_flat_pieces, 4)


def _reductions(rank: int, world: int, seeds: range) -> int:
    done = 0
    for seed in seeds:
        shape, src, dst = random_case(seed, "P", [(4,), (2, 2)])
        contributions = prod(src.mesh.sizes[axis] for axis, _ in src.partial)
        generator = torch.Generator().manual_seed(seed)
        full = [torch.randint(-99, 99, shape, generator=generator) for _ in range(contributions)]
        locals = {r: part_of(full[contributions_of(src, r)], src, r) for r in src.mesh.ranks}
        found = redistribute_local(locals[rank], shape, src, dst)
        simulated = simulate(plan(shape, torch.int64, src, dst), locals)
        assert torch.equal(found, simulated[rank])
        assert torch.equal(combined(src, shape, locals), combined(dst, shape, simulated))
        done += contributions > 1
    return done


@pytest.mark.slow
def test_pending_reductions() -> None:
    assert min(run_ranks(_reductions, 4, range(100))) > 10


def test_narrow_floats_are_summed_in_fp32_in_rank_order() -> None:
    mesh = Mesh(4)
    src, dst = Layout(mesh, [None], {0: "sum"}), Layout(mesh, [0])
    locals = [torch.full((4,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)]
    found = simulate(plan((4,), torch.bfloat16, src, dst), locals)
    # one by one in bf16 every 1 would be rounded away; their fp32 sum 259 rounds to 260
    assert [part.item() for part in found.values()] == [260.0] * 4
    averaged = simulate(plan((4,), torch.bfloat16, Layout(mesh, [None], {0: "avg"}), dst), locals)
    assert averaged[0].item() == torch.tensor(259 / 4).bfloat16().item()


def _mismatch(rank: int, world: int) -> str:
    mesh = Mesh(4)
    shape = (8, 8 if rank != 2 else 12)
    try:
        redistribute_local(torch.zeros(2, shape[1]), shape, Layout(mesh, [0, None]), Layout(mesh, [None, 0]))
    except PlanMismatchError as error:
        return str(error)
    return ""


def test_another_plan_on_one_rank_is_an_error_on_all() -> None:
    texts = run_ranks(_mismatch, 4)
    assert all("rank 2 holds another plan than rank 0" in text for text in texts), texts


def test_wrong_local_shapes_are_refused() -> None:
    mesh = Mesh(2)
    task = plan((4, 4), torch.float32, Layout(mesh, [0, None]), Layout(mesh, [None, 0]))
    with pytest.raises(LayoutError, match=r"rank 1: the source tensor has shape \(3, 4\), its layout says \(2, 4\)"):
        simulate(task, [torch.zeros(2, 4), torch.zeros(3, 4)])
    with pytest.raises(LayoutError, match="float64"):
        simulate(task, [torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.float64)])
    with pytest.raises(LayoutError, match="dtype="):
        redistribute_local(None, (4, 4), Layout(mesh, [0, None]), Layout(mesh, [((0,), Block()), None]))


def test_messages_with_buffers_of_their_own() -> None:
    # as over NCCL: what lies in one piece travels from where it is to where it belongs
    for seed in range(60):
        case = random_case(seed, "COBURIEK")
        full = _numbered(case.shape, [torch.uint8, torch.int16, torch.int32, torch.complex128][seed % 4])
        made = plan(case.shape, full.dtype, case.src, case.dst)
        ranks = case.src.mesh.ranks
        stages = {rank: stage_programs(made, rank)[0] for rank in ranks}
        sources = {rank: part_of(full, case.src, rank) for rank in ranks}
        targets = {rank: stage.allocate(full.device) for rank, stage in stages.items()}
        buffers = {
            rank: stage.begin(0, sources[rank], targets[rank], full.device, separate=True)
            for rank, stage in stages.items()
        }
        wire = {
            (rank, message.peer): sent.clone()
            for rank, stage in stages.items()
            for message, sent in zip(stage.phases[0].sends, buffers[rank][0])
        }
        for rank, stage in stages.items():
            for message, received in zip(stage.phases[0].receives, buffers[rank][1]):
                received.copy_(wire[message.peer, rank])
            stage.local(0, sources[rank], targets[rank], separate=True)
            stage.finish(0, buffers[rank][2], sources[rank], targets[rank], separate=True)
            assert torch.equal(targets[rank], part_of(full, case.dst, rank)), seed


def _dropped_handle(rank: int, world: int) -> None:
    mesh = Mesh(4)
    src, dst = Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    handles = [redistribute_local(torch.zeros(2, 8), (8, 8), src, dst, async_op=True)]
    with pytest.warns(UserWarning, match="dropped without wait"):
        handles.clear()


def test_a_dropped_handle_waits_and_warns() -> None:
    run_ranks(_dropped_handle, 4)


def test_what_stays_is_not_copied() -> None:
    mesh = Mesh(4)
    split, whole = Layout(mesh, [0, None]), Layout(mesh, [None, None])
    mine = torch.arange(64.0).reshape(8, 8)
    assert redistribute_local(mine[:2], (8, 8), split, Layout(Mesh((2, 2)), [(0, 1), None])) is not None
    part = mine[:2]
    assert redistribute_local(part, (8, 8), split, split) is part
    view = redistribute_local(mine, (8, 8), whole, split, copy=False)
    assert view.data_ptr() == mine.data_ptr()
    assert redistribute_local(mine, (8, 8), whole, split).data_ptr() != mine.data_ptr()


def test_starting_a_reduction_keeps_the_value_at_one_rank() -> None:
    mesh = Mesh(2)
    whole = Layout(mesh, [None])
    value = torch.tensor([3.0, -2.0])
    for op, identity in (("sum", 0.0), ("avg", 0.0), ("product", 1.0), ("max", float("-inf")), ("min", float("inf"))):
        found = simulate(plan((2,), torch.float32, whole, Layout(mesh, [None], {0: op})), [value, value])
        assert torch.equal(found[0], value * 2 if op == "avg" else value)
        assert torch.equal(found[1], torch.full((2,), identity))


@pytest.mark.nightly
def test_two_thousand_random_cases_in_one_process() -> None:
    for seed in range(2000):
        shape, src, dst = random_case(seed)
        if src.partial or dst.partial:
            continue
        full = _numbered(shape)
        ranks = sorted({*src.mesh.ranks, *dst.mesh.ranks})
        found = simulate(plan(shape, full.dtype, src, dst), {rank: part_of(full, src, rank) for rank in ranks})
        for rank in ranks:
            expected = part_of(full, dst, rank)
            assert (found[rank] is None) == (expected is None)
            assert expected is None or torch.equal(found[rank], expected), seed


def test_examples_in_one_process() -> None:
    for name, _, (shape, src, dst) in example_cases():
        full = _numbered(shape)
        found = simulate(plan(shape, full.dtype, src, dst), [part_of(full, src, rank) for rank in src.mesh.ranks])
        assert all(torch.equal(found[rank], part_of(full, dst, rank)) for rank in dst.mesh.ranks), name
