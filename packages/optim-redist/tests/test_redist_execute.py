"""Redistributions on four gloo ranks, bit for bit what one process would slice."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from math import inf, prod
from types import ModuleType
from typing import Any, Literal, cast

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from redist_cases import Case, combined, contributions_of, example_cases, part_of, random_case, random_parts
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from optim_redist import (
    Block,
    Cyclic,
    Intervals,
    Layout,
    LayoutError,
    Mesh,
    Plan,
    PlanMismatchError,
    Ragged,
    RedistError,
    RepeatedExchange,
    UnsupportedError,
    bounds,
    compile,
    execute,
    plan,
    redistribute,
    redistribute_local,
    redistribute_many,
    simulate,
    verify,
)
from optim_redist._running import collectives, rank_program
from optim_redist._running.collectives import Team
from optim_redist._running.native import NativeGather, NativeReduction
from optim_redist._running.one_call import ExchangeCall
from optim_redist._running.stage_program import stage_programs
from optim_redist._running.views import form_of
from optim_redist.execute import program_for
from optim_redist.planning import clear_cache
from optim_redist.problem import Problem
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


def _out_in_the_source(rank: int, world: int) -> list[str]:
    mesh = Mesh(2)
    src, dst = Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    full, texts = _numbered((8, 8)), []
    both = torch.cat([part_of(full, src, rank).flatten(), torch.zeros(32, dtype=torch.int32)])
    mine, other = both[:32].view(4, 8), both[32:].view(8, 4)
    # one storage, but other memory
    assert torch.equal(redistribute_local(mine, (8, 8), src, dst, out=other), part_of(full, dst, rank))
    for out in (mine.view(8, 4), both[8:40].view(8, 4)):
        try:
            redistribute_local(mine, (8, 8), src, dst, out=out)
        except LayoutError as error:
            texts.append(str(error))
    for options in ({}, {"donate": True}, {"async_op": True}):
        stays = part_of(full, src, rank)
        found = redistribute_local(stays, (8, 8), src, src, out=stays, **options)
        assert (found.wait() if options.get("async_op") else found) is stays
        assert torch.equal(stays, part_of(full, src, rank))
    return texts


def test_an_output_in_the_memory_of_the_source_is_refused_unless_all_of_it_stays() -> None:
    for rank, texts in enumerate(run_ranks(_out_in_the_source, 2)):
        assert len(texts) == 2
        assert all(f"rank {rank}: out shares memory with the source" in text for text in texts)


def test_an_output_without_memory_shares_none() -> None:
    program = compile(plan((4,), "float32", Layout(Mesh(1), [None]), Layout(Mesh(1), [None])))
    meta = torch.empty(4, device="meta")
    out = torch.empty(4, device="meta")
    assert program(meta, out) is out


def test_an_output_elsewhere_or_without_a_place_for_each_element_is_refused() -> None:
    program = compile(plan((4,), "float32", Layout(Mesh(1), [None]), Layout(Mesh(1), [None])))
    with pytest.raises(LayoutError, match="the source tensor is on cpu, out on meta"):
        program(torch.ones(4), torch.empty(4, device="meta"))
    with pytest.raises(LayoutError, match="out is expanded"):
        program(torch.ones(4), torch.empty(1).expand(4))


def _out_without_elements(rank: int, world_size: int) -> bool:
    full, src, dst = torch.ones(1, 3), Layout(Mesh(2), [None, None]), Layout(Mesh(2), [0, None])
    out = torch.zeros(1, 3) if rank == 0 else torch.empty(0, 1).expand(0, 3)
    return redistribute_local(full, (1, 3), src, dst, out=out) is out and bool((out == 1).all())


def test_an_output_without_elements_may_have_any_strides() -> None:
    assert all(run_ranks(_out_without_elements, 2))


@pytest.mark.parametrize("module", ["torch.distributed.tensor", "torch.distributed._functional_collectives"])
def test_a_thread_that_imports_classes_of_tensors_disturbs_no_other(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compile(plan((4,), "float32", Layout(Mesh(1), [None]), Layout(Mesh(1), [None])))
    # as it is while the import goes on
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    out = torch.empty(4)
    assert program(torch.ones(4), out) is out
    assert torch.equal(out, torch.ones(4))


def test_a_source_that_torch_cannot_free_is_not_donated() -> None:
    layout = Layout(Mesh(1), [None])
    part = torch.frombuffer(bytearray(16), dtype=torch.float32)
    with pytest.raises(LayoutError, match="this one's memory is not torch's own"):
        redistribute_local(part, (4,), layout, Layout(Mesh(1), [0]), donate=True)
    moved = redistribute_local(part.clone(), (4,), layout, Layout(Mesh(1), [0]), donate=True)
    assert moved.tolist() == [0.0] * 4


@pytest.mark.parametrize("wrap", [lambda tensor: tensor, torch.nn.Parameter], ids=["tensor", "parameter"])
def test_what_has_no_memory_any_more_is_refused(wrap: Any) -> None:
    one, two = Layout(Mesh(1), [None]), Layout(Mesh(2), [None])
    given, here = wrap(torch.ones(4)), torch.ones(4)
    given.untyped_storage().resize_(0)  # as donating does, and FSDP
    for donate in (False, True):
        with (
            torch.no_grad(),
            pytest.raises(LayoutError, match="rank 0: the source tensor has no memory: it was donated"),
        ):
            redistribute_local(given, (4,), one, one, donate=donate)
        with pytest.raises(LayoutError, match="rank 0: 'w' has no memory: it was donated"):
            redistribute_many({"w": (given, (4,), one, one)}, donate=donate)
    with pytest.raises(LayoutError, match="rank 1: the source tensor has no memory: it was donated"):
        simulate(plan((4,), torch.float32, two, two), [here, given])
    with pytest.raises(LayoutError, match="rank 0: the out tensor has no memory: it was donated"):
        redistribute_local(here, (4,), one, one, out=given.detach())
    # what has no elements needs none
    assert redistribute_local(here[:0], (0,), one, one).shape == (0,)


def test_pending_conjugation_and_negation_are_resolved() -> None:
    mesh = Mesh(2)
    z = torch.complex(_numbered((2, 2)).float(), _numbered((2, 2)).float() + 4).conj()
    assert z.imag.is_neg()
    split, whole = Layout(mesh, [0, None]), Layout(mesh, [None, None])
    added = Layout(mesh, [None, None], {0: "sum"})
    for full in (z, z.imag):
        found = simulate(plan((2, 2), full.dtype, split, whole), [full[:1], full[1:]])
        assert torch.equal(found[0], full)
        found = simulate(plan((2, 2), full.dtype, added, whole), [full, full])
        assert torch.equal(found[0], full + full)
    with pytest.raises(LayoutError, match="out is a view with a pending conjugation or negation"):
        redistribute_local(z.real.clone(), (2, 2), whole, whole, out=z.imag)


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
        locals = {r: part.to(torch.int64) for r, part in random_parts(src, shape, seed=seed).items()}
        found = redistribute_local(locals[rank], shape, src, dst)
        simulated = simulate(plan(shape, torch.int64, src, dst), locals)
        assert torch.equal(found, simulated[rank])
        assert torch.equal(combined(src, shape, locals), combined(dst, shape, simulated))
        done += prod(src.mesh.sizes[axis] for axis, _ in src.partial) > 1
    return done


@pytest.mark.slow
def test_pending_reductions() -> None:
    assert min(run_ranks(_reductions, 4, range(100))) > 10


@pytest.mark.parametrize("n", [24, 54, 69])
def test_contributions_to_what_is_dealt_last_are_added_once(n: int) -> None:
    mesh = Mesh((4, 2))
    src, dst = Layout(mesh, [((0,), Cyclic(3))], {1: "sum"}), Layout(Mesh(2), [((0,), Cyclic(5))])
    full = [torch.arange(n), 10 * torch.arange(n)]
    locals = {rank: part_of(full[contributions_of(src, rank)], src, rank) for rank in mesh.ranks}
    made = plan((n,), torch.int64, src, dst)
    verify(made)
    assert min(min(cut.inbound, cut.outbound) for cut in made.bounds.cuts) >= 0
    found = simulate(made, locals)
    for rank in dst.mesh.ranks:
        assert torch.equal(found[rank], part_of(full[0] + full[1], dst, rank))


def test_narrow_floats_are_summed_in_fp32_in_rank_order() -> None:
    mesh = Mesh(4)
    src, dst = Layout(mesh, [None], {0: "sum"}), Layout(mesh, [0])
    locals = [torch.full((4,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)]
    found = simulate(plan((4,), torch.bfloat16, src, dst), locals)
    # one by one in bf16 every 1 would be rounded away; their fp32 sum 259 rounds to 260
    assert [part.item() for part in found.values()] == [260.0] * 4
    averaged = simulate(plan((4,), torch.bfloat16, Layout(mesh, [None], {0: "avg"}), dst), locals)
    assert averaged[0].item() == torch.tensor(259 / 4).bfloat16().item()
    # nine elements are no four boxes: each rank combines a part that is bent, and hands it on
    locals = [torch.full((3, 3), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)]
    square, whole = Layout(mesh, [None, None], {0: "avg"}), Layout(mesh, [None, None])
    for part in simulate(plan((3, 3), torch.bfloat16, square, whole, planners=["relay"]), locals).values():
        assert part.unique().item() == averaged[0].item()


def test_integers_are_combined_as_themselves() -> None:
    mesh = Mesh(3)
    src, dst = Layout(mesh, [None], {0: "product"}), Layout(mesh, [None])
    locals = [torch.full((4,), 301, dtype=torch.int16)] * 3
    # odd and beyond 2^24, so that fp32 has no such number
    for part in simulate(plan((4,), torch.int16, src, dst), locals).values():
        assert torch.equal(part, locals[0] * locals[1] * locals[2])


@pytest.mark.parametrize("op", ["sum", "max", "product", "min"])
def test_truth_values_are_combined_by_or_and_by_and(op: str) -> None:
    mesh = Mesh(3)
    values = torch.tensor([[number >> k & 1 for number in range(8)] for k in range(3)], dtype=torch.bool)
    wanted = values.any(0) if op in ("sum", "max") else values.all(0)
    for dst in (Layout(mesh, [None]), Layout(mesh, [0])):
        found = simulate(plan((8,), torch.bool, Layout(mesh, [None], {0: op}), dst), list(values))
        assert all(torch.equal(part, part_of(wanted, dst, rank)) for rank, part in found.items())
    with pytest.raises(UnsupportedError, match="an average of bool is no bool"):
        simulate(plan((8,), torch.bool, Layout(mesh, [None], {0: "avg"}), Layout(mesh, [None])), list(values))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_an_infinite_part_of_a_sum_leaves_the_other_part_alone(op: str, dtype: torch.dtype) -> None:
    mesh, scale = Mesh(3), 3 if op == "avg" else 1
    made = plan((2,), dtype, Layout(mesh, [None], {0: op}), Layout(mesh, [None]))
    parts = [torch.tensor([complex(k, inf), complex(-inf, k)]).to(dtype) for k in (1, 2, 3)]
    expected = torch.tensor([complex(6 / scale, inf), complex(-inf, 6 / scale)], dtype=torch.complex128)
    for found in simulate(made, parts).values():
        # torch compares no complex numbers of 16-bit floats
        assert torch.equal(found.to(torch.complex128), expected)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_numbers_of_16_bit_floats_are_summed_in_fp32_too() -> None:
    mesh = Mesh(4)
    locals = [torch.full((4,), value, dtype=torch.complex32) for value in (2048.0, 1.0, 1j, 1.0)]
    for op, expected in (("sum", 2050 + 1j), ("avg", 512.5 + 0.25j)):
        found = simulate(plan((4,), torch.complex32, Layout(mesh, [None], {0: op}), Layout(mesh, [0])), locals)
        assert [part.to(torch.complex64).item() for part in found.values()] == [expected] * 4


@pytest.mark.slow
def test_replicas_of_several_contributions_are_combined_completely() -> None:
    # replicas share the sending, so contributions arrive cut at different places
    done = 0
    for shape, sizes in product([(4, 3), (6, 8)], [(2, 2, 2), (4, 2), (2, 4)]):
        mesh, axes = Mesh(sizes), range(len(sizes))
        for sides, target in product(product("RPS", repeat=len(sizes)), product("R01", repeat=len(sizes))):
            partial: dict[int | str, str] = {axis: "sum" for axis in axes if sides[axis] == "P"}
            if "R" not in sides or prod(sizes[int(axis)] for axis in partial) < 3:
                continue
            src = Layout(mesh, [tuple(axis for axis in axes if sides[axis] == "S") or None, None], partial)
            dst = Layout(mesh, [tuple(axis for axis in axes if target[axis] == k) or None for k in "01"])
            parts = {
                rank: torch.full(src.local_shape(shape, rank), 10 ** contributions_of(src, rank)) for rank in mesh.ranks
            }
            whole = combined(src, shape, parts)
            for dtype in (torch.int64, torch.float16):
                found = simulate(plan(shape, dtype, src, dst), {rank: part.to(dtype) for rank, part in parts.items()})
                assert all(torch.equal(found[rank], part_of(whole.to(dtype), dst, rank)) for rank in found), (src, dst)
            done += 1
    assert done > 150


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
    wanted = "rank 2 holds another plan than rank 0: 'plan.shape.1: 8' against 'plan.shape.1: 12'"
    assert all(wanted in text for text in texts), texts


def _begins_otherwise(rank: int, world: int) -> None:
    mesh = Mesh(2)
    init: Literal["owner", "divide"] = "divide" if rank else "owner"
    # plans of "owner" lack the field, and all others are equal
    with pytest.raises(PlanMismatchError, match=r'nothing against .plan\.partial_init: "divide".; every rank has'):
        redistribute_local(torch.zeros(4), (8,), Layout(mesh, [0]), Layout(mesh, [None], {0: "sum"}), partial_init=init)


def test_a_field_that_only_one_plan_has_is_named() -> None:
    run_ranks(_begins_otherwise, 2)


def _forgetful(rank: int, world: int) -> None:
    mesh = Mesh(4)
    src, dst = Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    _assert_moved(Case((8, 8), src, dst), _numbered((8, 8)), rank)
    if rank < 2:
        # what one rank forgets, all the others still know
        clear_cache()
        execute._programs.clear()
    _assert_moved(Case((8, 8), src, dst), _numbered((8, 8)), rank)


def test_ranks_that_forget_programs_do_not_wait_for_those_that_know_them() -> None:
    run_ranks(_forgetful, 4, timeout=60)


@pytest.mark.parametrize(
    "part", [torch.zeros(4, 4), torch.zeros(4, 4, requires_grad=True), None], ids=["a part", "followed", "no part"]
)
@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("dtype", "float32", r"dtype must be a torch\.dtype or None, got 'float32'"),
        ("device", "cpu", r"device must be a torch\.device or None, got 'cpu'"),
        ("src", "S(0)", r"src must be a Layout, got 'S\(0\)'; parse_layout"),
    ],
    ids=["dtype", "device", "src"],
)
def test_options_of_other_types_are_refused_on_every_rank(
    part: torch.Tensor | None, option: str, value: str, words: str
) -> None:
    mesh = Mesh(1) if part is not None else Mesh(1, ranks=[1])
    options: dict[str, Any] = {"src": Layout(mesh, [0, None]), "dst": Layout(mesh, [None, 0]), "dtype": torch.float32}
    options[option] = value
    with pytest.raises(RedistError, match=words):
        redistribute_local(part, (4, 4), **options)


def test_wrong_local_shapes_are_refused() -> None:
    mesh = Mesh(2)
    task = plan((4, 4), torch.float32, Layout(mesh, [0, None]), Layout(mesh, [None, 0]))
    with pytest.raises(LayoutError, match=r"rank 1: the source tensor has shape \(3, 4\), its layout says \(2, 4\)"):
        simulate(task, [torch.zeros(2, 4), torch.zeros(3, 4)])
    with pytest.raises(LayoutError, match="float64"):
        simulate(task, [torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.float64)])
    with pytest.raises(LayoutError, match=r"locals has parts of ranks \['0', '1'\], the plan is for ranks \[0, 1\]"):
        simulate(task, {str(rank): torch.zeros(2, 4) for rank in range(2)})
    assert simulate(task, [torch.zeros(2, 4), torch.zeros(2, 4), None])[0].shape == (4, 2)
    with pytest.raises(LayoutError, match="locals must map ranks to their parts, or list them, got None"):
        simulate(task, None)
    with pytest.raises(
        UnsupportedError, match=r"rank 0: the source tensor is a list, this takes a torch\.Tensor or None"
    ):
        simulate(task, [[[0.0] * 4] * 2, torch.zeros(2, 4)])
    with pytest.raises(LayoutError, match="dtype="):
        redistribute_local(None, (4, 4), Layout(mesh, [0, None]), Layout(mesh, [((0,), Block()), None]))


def _whole_dtensors(rank: int, world: int) -> None:
    mesh, pending = Mesh(2), Layout(Mesh(2), [None], {0: "sum"})
    whole = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Replicate()])
    message = rf"rank {rank}: .* is a DTensor, .*\.to_local"
    with pytest.raises(LayoutError, match=message):
        redistribute_local(whole, (4,), pending, Layout(mesh, [0]))
    with pytest.raises(LayoutError, match=message):
        redistribute_local(whole.to_local(), (4,), pending, Layout(mesh, [None]), out=whole)
    with pytest.raises(LayoutError, match="'w' is a DTensor"):
        redistribute_many({"w": (whole, (4,), pending, Layout(mesh, [0]))})
    replicated = plan((4,), "float32", Layout(mesh, [None]), Layout(mesh, [0]))
    with pytest.raises(LayoutError, match="source 0 is a DTensor"):
        RepeatedExchange([replicated], torch.device("cpu"), sources=[whole])


def test_dtensors_are_no_local_parts() -> None:
    run_ranks(_whole_dtensors, 2)


def _with_a_history(rank: int, world: int) -> None:
    # values move without gradients, also where contributions are combined beside this rank's own
    mesh = Mesh(2)
    mine, wanted = torch.full((4,), rank + 1.0, requires_grad=True), {"sum": 3.0, "avg": 1.5, "max": 2.0}
    for (op, value), dst in product(wanted.items(), (Layout(mesh, [0]), Layout(mesh, [None]))):
        task = (4,), Layout(mesh, [None], {0: op}), dst
        shape = dst.local_shape((4,), rank)
        (moved,) = redistribute_many([(mine, *task)])
        by_program = compile(plan((4,), torch.float32, *task[1:]))(mine)
        with torch.no_grad():
            handle = redistribute_local(mine, *task, async_op=True)
            out = torch.empty(shape, requires_grad=True)
            given = redistribute_local(mine, *task, out=out, async_op=True)
        for found in (moved, by_program, handle.wait()):
            assert not found.requires_grad
            assert torch.equal(found, torch.full(shape, value))
        assert given.wait() is out
        assert out.is_leaf
        assert torch.equal(out, torch.full(shape, value))


def test_values_of_parameters_are_combined_without_their_history() -> None:
    run_ranks(_with_a_history, 2, timeout=60)


def test_gradients_are_not_lost() -> None:
    mine, layout = torch.zeros(4, 4, requires_grad=True), Layout(Mesh(1), [0, None])
    followed = redistribute_local(mine, (4, 4), layout, layout)
    assert followed is not None
    followed.sum().backward()
    assert torch.equal(mine.grad, torch.ones(4, 4))
    with pytest.raises(UnsupportedError, match=r"of shape \(4, 4\) requires a gradient, which donate does not go with"):
        redistribute_local(mine, (4, 4), layout, layout, donate=True)
    with torch.no_grad():
        assert redistribute_local(mine, (4, 4), layout, layout) is mine
    assert torch.equal(redistribute_local(mine.detach(), (4, 4), layout, layout), mine)
    with pytest.raises(UnsupportedError, match=r"out of shape \(4, 4\) requires a gradient"):
        redistribute_local(torch.zeros(4, 4), (4, 4), layout, Layout(Mesh(1), [None, 0]), out=mine)


@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "product"])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_integers_that_torch_does_not_add_are_refused(op: str, dtype: torch.dtype) -> None:
    pending, whole = Layout(Mesh(2), [None], {0: op}), Layout(Mesh(2), [None])
    part = torch.tensor([2, 3]).to(dtype)
    if op == "product":
        found = simulate(plan((2,), dtype, pending, whole), [part, part])
        assert found[1].tolist() == [4, 9]
        return
    with pytest.raises(UnsupportedError, match=f"cannot start a pending {op} of uint"):
        plan((2,), dtype, whole, pending)
    with pytest.raises(UnsupportedError, match=r"torch neither adds nor compares|an average of"):
        simulate(plan((2,), dtype, pending, whole), [part, part])


def _as_beside_nccl(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # a world of cpu:gloo,cuda:nccl with tensors of the CPU, as far as this machine can have one
        patch.setattr(collectives, "_has_nccl", lambda group: True)
        patch.setattr(collectives, "device_of", lambda where: torch.device("cpu"))
        mesh = Mesh(4)
        layouts = [Layout(mesh, dims) for dims in ([0, None], [None, 0], [None, None])]
        for src, dst in product(layouts, layouts):
            _assert_moved(Case((6, 5), src, dst), _numbered((6, 5)), rank)
        assert program_for(plan((6, 5), "int32", *layouts[:2])).team.takes_lists
        for op, dst in product(("sum", "avg"), layouts):
            full = torch.ones(8, 4) * (rank + 1)
            total = redistribute_local(full, (8, 4), Layout(mesh, [None, None], {0: op}), dst)
            assert torch.equal(total, part_of(torch.full((8, 4), 10.0 if op == "sum" else 2.5), dst, rank))


def test_tensors_of_the_cpu_travel_over_gloo_in_a_group_that_has_nccl_too() -> None:
    run_ranks(_as_beside_nccl, 4, timeout=60)


def _on_a_device(rank: int, world: int) -> None:
    src, dst = Layout(Mesh(2), [0]), Layout(Mesh(2, ranks=[2, 3]), [0])
    full = _numbered((6,))
    mesh, other = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    part = part_of(full, src, rank) if rank < 2 else full[:0]
    tensor = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=(1,))
    # compare plans first, which asks for the group's device
    _assert_moved(Case((6,), src, dst), full, rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "device_of", None)
        _assert_moved(Case((6,), src, dst), full, rank, device=torch.device("cpu"))
        moved = redistribute(tensor, other, [Shard(0)])
        assert rank < 2 or torch.equal(moved.to_local(), part_of(full, dst, rank))


def test_ranks_without_a_part_of_the_source_say_their_device() -> None:
    run_ranks(_on_a_device, 4, timeout=60)


class _Nccl:
    """A team on NCCL, as far as the choice of collectives asks."""

    members, is_nccl, is_whole, takes_lists = (0, 1), True, True, True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nccl_reduces_the_types_it_has(dtype: torch.dtype) -> None:
    pending = Layout(Mesh(2), [None], {0: "sum"})
    for dst in (Layout(Mesh(2), [None]), Layout(Mesh(2), [0])):
        native = NativeReduction.of(Problem((4,), pending, dst), cast(Team, _Nccl()), dtype, 0)
        refused = dtype.is_complex or dtype in (torch.bool, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2)
        assert (native is None) == refused


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "product"])
def test_nccl_combines_only_what_it_combines_as_torch_does(op: str, dtype: torch.dtype) -> None:
    if op == "avg" and not dtype.is_floating_point:
        return
    pending = Layout(Mesh(2), [None], {0: op})
    for dst in (Layout(Mesh(2), [None]), Layout(Mesh(2), [0])):
        native = NativeReduction.of(Problem((4,), pending, dst), cast(Team, _Nccl()), dtype, 0)
        # its extrema pass over NaN, and two numbers of fp16 may add up to inf though their average is none
        refused = dtype.is_floating_point and (op in ("min", "max") or (op == "avg" and dtype == torch.float16))
        assert (native is None) == refused


def test_a_backend_that_was_left_to_torch_is_known_by_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "undefined")
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: "cuda:nccl")
    assert Team(cast(Any, object()), (0, 1)).is_nccl


def test_ranks_may_be_a_tensor() -> None:
    assert Mesh((2, 2), ranks=torch.tensor([[3, 1], [0, 2]])) == Mesh((2, 2), ranks=[[3, 1], [0, 2]])


def _overlapping_teams(rank: int, world: int) -> None:
    full = _numbered((8, 6))
    for ranks in ([0, 2], [0, 1], [2, 1], [0, 3], [1, 2, 3], [0, 2]):
        mesh = Mesh(len(ranks), ranks=ranks)
        case = Case((8, 6), Layout(mesh, [0, None]), Layout(mesh, [None, 0]))
        _assert_moved(case, full, rank)
        pending = Layout(mesh, [None, None], {0: "sum"})
        if rank in ranks:
            total = redistribute_local(full * (rank + 1), (8, 6), pending, case.dst)
            assert torch.equal(total, part_of(full * sum(r + 1 for r in ranks), case.dst, rank))
            many = redistribute_many([(part_of(full, case.src, rank), *case), (full, (8, 6), pending, case.dst)])
            assert torch.equal(many[0], part_of(full, case.dst, rank))
            assert torch.equal(many[1], part_of(full * len(ranks), case.dst, rank))


def test_teams_of_ranks_that_overlap() -> None:
    run_ranks(_overlapping_teams, 4, timeout=60)


def _left_alone(rank: int, world: int, call: str) -> list[str]:
    """The notes of the error where rank 2 has gone."""
    mesh = Mesh(4)
    task = (8, 8), Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    mine = torch.zeros(2, 8)
    if not call.startswith("first"):
        redistribute_local(mine, *task)
        redistribute_many([(mine, *task)])
    if rank == 2:
        return []
    with pytest.raises(RuntimeError) as caught:
        if call.endswith("many"):
            redistribute_many([(mine, *task)])
        elif call == "asynchronous":
            redistribute_local(mine, *task, async_op=True).wait()
        else:
            redistribute_local(mine, *task)
    return caught.value.__notes__


@pytest.mark.parametrize("call", ["one", "asynchronous", "many", "first", "first of many"])
def test_errors_of_the_backend_say_in_which_step_of_which_plan(call: str) -> None:
    plan_hash = plan((8, 8), "float32", Layout(Mesh(4), [0, None]), Layout(Mesh(4), [None, 0])).hash[:12]
    wanted = {
        "many": "in exchange 1 of 1 of bucket 1 of 1 on rank {}",
        "first": f"in the comparison of plan {plan_hash} on rank {{}}",
        "first of many": "in the comparison of 1 plans on rank {}",
    }.get(call, f"in step 'exchange' of plan {plan_hash} on rank {{}}")
    notes = run_ranks(_left_alone, 4, call)
    assert [notes[rank] for rank in (0, 1, 3)] == [[wanted.format(rank)] for rank in (0, 1, 3)]


def _still_arriving(rank: int, world: int) -> None:
    full, mesh = _numbered((8, 8)), Mesh(2)
    src, dst = Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    contributed = full if rank == 0 else torch.zeros_like(full)
    # as torch calls it from 2.13 on, or before
    reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
    for donate in (False, True):
        arriving = reduce_scatter(contributed, "sum", 0, torch.distributed.group.WORLD)
        assert isinstance(arriving, funcol.AsyncCollectiveTensor)
        found = redistribute_local(arriving, (8, 8), src, dst, donate=donate)
        assert torch.equal(found, part_of(full, dst, rank))
    device_mesh = init_device_mesh("cpu", (2,))
    arriving = DTensor.from_local(part_of(full, src, rank), device_mesh, [Shard(0)], run_check=False)
    arriving = arriving.redistribute(None, [Replicate()], async_op=True)
    assert isinstance(arriving._local_tensor, funcol.AsyncCollectiveTensor)
    # what stays on this rank alone has memory of its own
    moved = redistribute(arriving, None, [Partial()])
    assert moved.to_local().data_ptr() != arriving.to_local().data_ptr()


def test_results_of_functional_collectives_that_are_still_arriving() -> None:
    run_ranks(_still_arriving, 2)


def _groups_that_are_none(rank: int, world: int) -> None:
    task = _numbered((2, 4)), (4, 4), Layout(Mesh(2), [0, None]), Layout(Mesh(2), [None, 0])
    gone = torch.distributed.new_group([0, 1])
    torch.distributed.barrier(gone)  # only what both have joined may go
    torch.distributed.destroy_process_group(gone)
    group: Any
    for group in (gone, init_device_mesh("cpu", (2,)), "world"):
        with pytest.raises(UnsupportedError, match="group is a process group"):
            redistribute_local(*task, group=group)
    first = torch.distributed.new_group([0])
    for call in (redistribute_local, _many_of_one):
        if rank == 0:
            with pytest.raises(UnsupportedError, match=r"the group lacks ranks \[1\]"):
                call(*task, group=first)
        else:
            with pytest.raises(UnsupportedError, match="rank 1 is not in the group that was given"):
                call(*task, group=first)


def _many_of_one(*task: Any, group: Any) -> None:
    redistribute_many([task], group=group)


def _parts_that_do_not_fit(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    shape, stride = torch.Size([4 * world, 8]), (8, 1)
    for rows in (4, 5, 4, 5):
        # what is known of a move does not hide that another tensor's part does not fit
        given = DTensor.from_local(torch.zeros(rows, 8), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        if rows == 4:
            found = redistribute(given, placements=[Shard(1)])
            assert (found.placements, found.shape, found.stride()) == ((Shard(1),), shape, stride)
            assert found.to_local().shape == (4 * world, 8 // world)
        else:
            with pytest.raises(LayoutError, match=r"the local tensor has shape \(5, 8\)"):
                redistribute(given, placements=[Shard(1)])


def test_a_part_that_does_not_fit_is_found_at_every_call() -> None:
    run_ranks(_parts_that_do_not_fit, 2)


def test_what_is_no_process_group_is_refused_by_name() -> None:
    run_ranks(_groups_that_are_none, 2)


class _Wire:
    """In place of a team: of an exchange, the room for what is received and what is sent, by ranks."""

    def __init__(self, members: Sequence[int], mixes_exchanges: bool) -> None:
        self.members, self.mixes_exchanges = members, mixes_exchanges

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, *splits: list[int], async_op: bool
    ) -> list[dict[int, torch.Tensor]]:
        parts = [buffer.split(sizes) for buffer, sizes in zip((received, sent), splits, strict=True)]
        return [dict(zip(self.members, each, strict=True)) for each in parts]

    def exchange_lists(
        self, incoming: dict[int, torch.Tensor], outgoing: dict[int, torch.Tensor], device: object, *, async_op: bool
    ) -> list[dict[int, torch.Tensor]]:
        both = [*incoming.values(), *outgoing.values()]
        assert all(part.is_contiguous() and part.dtype == both[0].dtype for part in both)
        return [incoming, outgoing]


def _with_buffers_of_their_own(
    made: Plan, sources: dict[int, Any], to_itself: bool = True, at_once: str = "flat"
) -> tuple[dict[int, Any], int]:
    """Every rank's target, with a buffer for every message as over NCCL; and how many exchanges were one call.

    ``at_once``: "flat" or "lists" where an exchange can be one call of this kind, "no" for none.
    """
    ranks = sorted({*made.src.mesh.ranks, *made.dst.mesh.ranks})
    programs = {rank: stage_programs(made, rank, separate=True) for rank in ranks}
    cpu, num_calls, team = torch.device("cpu"), 0, cast(Team, _Wire(ranks, at_once == "flat"))
    for number, (_, phases) in enumerate(made.phases):
        stages = {rank: programs[rank][number] for rank in ranks}
        targets = {rank: stage.allocate(cpu) for rank, stage in stages.items()}
        for k in range(len(phases)):
            wire: dict[tuple[int, int], torch.Tensor] = {}
            room: dict[tuple[int, int], torch.Tensor] = {}
            ends: list[Callable[[], None]] = []
            for rank, stage in stages.items():
                x, target = sources.get(rank), targets[rank]
                one = None
                if at_once != "no" and x is not None and target is not None:
                    one = ExchangeCall.of(stage, k, form_of(x), form_of(target), team, to_itself=to_itself)
                if one is not None:
                    (into, sent), end = cast(Any, one.start(x, target, team, async_op=False))
                    to, from_ = list(sent), list(into)
                    sent, into = sent.values(), into.values()
                    num_calls += 1
                else:
                    run = stage.begin(k, x, target, cpu, to_itself=to_itself)
                    sent, into, to, from_ = run.pack(), run.make_room(), list(run.views.sent), list(run.views.received)
                    end = run.finish
                    run.local()
                ends.append(end)
                for peer, part in zip(to, sent, strict=True):
                    wire[rank, peer] = part.clone().view(-1).view(torch.uint8)
                for peer, part in zip(from_, into, strict=True):
                    room[peer, rank] = part
            for pair, part in room.items():
                arrived = wire.pop(pair, torch.empty(0, dtype=torch.uint8))
                part.copy_(arrived.view(part.dtype).view(part.shape))
            assert all(not part.numel() for part in wire.values())
            for end in ends:
                end()
        sources = targets
    return sources, num_calls


def test_messages_with_buffers_of_their_own() -> None:
    # as over NCCL: what lies in one piece travels from where it is to where it belongs
    calls: Counter[str] = Counter()
    for seed in range(90):
        case = random_case(seed, "COBURIEK")
        dtypes = [torch.uint8, torch.int16, torch.int32, torch.complex128, torch.bfloat16, torch.bool]
        full = _numbered(case.shape, dtypes[seed % len(dtypes)])
        made = plan(case.shape, full.dtype, case.src, case.dst)
        sources = {rank: part_of(full, case.src, rank) for rank in case.src.mesh.ranks}
        for to_itself, at_once in product((True, False), ("flat", "lists", "no")):
            targets, num_calls = _with_buffers_of_their_own(made, sources, to_itself, at_once)
            calls[at_once] += num_calls
            for rank, target in targets.items():
                assert torch.equal(target, part_of(full, case.dst, rank)), (seed, to_itself, at_once)
    assert calls["no"] == 0
    assert calls["flat"] == calls["lists"] > 100


class _Gathered:
    """In place of a team: what it is asked to gather."""

    members = (0, 1)

    def all_gather(self, target: torch.Tensor, part: torch.Tensor, *, async_op: bool) -> Any:
        assert part.is_contiguous()
        assert target.is_contiguous()
        return target, part


@pytest.mark.parametrize("dtype", [torch.int16, torch.complex64, torch.float8_e4m3fn, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [1, 2])
def test_a_part_of_one_element_is_gathered_whatever_its_strides(dtype: torch.dtype, dims: int) -> None:
    # such a part is contiguous
    part = _numbered((4,) * dims, dtype)[(slice(1, None, 3),) * dims]
    target = torch.zeros(2, *(1,) * (dims - 1), dtype=dtype)
    (room, sent), _ = cast(Any, NativeGather().start(part, target, cast(Team, _Gathered()), async_op=False))
    assert sent.dtype == room.dtype
    room.view(-1).copy_(sent.reshape(-1).repeat(2))
    assert target.flatten().tolist() == [part.item()] * 2


def test_large_messages_begin_at_multiples_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_program, "_LEAST_ALIGNED", 1)
    moved = 0
    for seed in range(60):
        case = random_case(seed, "COBUR")
        full = _numbered(case.shape, [torch.uint8, torch.int16, torch.float32, torch.complex128][seed % 4])
        made = plan(case.shape, full.dtype, case.src, case.dst)
        sources = {rank: part_of(full, case.src, rank) for rank in case.src.mesh.ranks}
        for rank, target in _with_buffers_of_their_own(made, sources)[0].items():
            assert torch.equal(target, part_of(full, case.dst, rank)), seed
        if not made.communicates:
            continue
        for rank in case.src.mesh.ranks:
            stage = stage_programs(made, rank, separate=True)[0]
            run = stage.begin(0, sources[rank], stage.allocate(torch.device("cpu")), torch.device("cpu"))
            buffers = [*run.pack(), *run.make_room()]
            assert all(buffer.data_ptr() % 16 == 0 for buffer in buffers if buffer.numel()), seed
            moved += len(buffers)
    assert moved > 200


def test_no_gaps_under_a_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_program, "_LEAST_ALIGNED", 1)
    mesh = Mesh(4)
    task = (57, 57), torch.bfloat16, Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    free = plan(*task)
    limited = plan(*task, memory_limit=free.peak_bytes)
    gaps = []
    for made in (free, limited):
        (stage,) = stage_programs(made, 0, separate=True)
        source, target = (torch.empty(layout.local_shape((57, 57), 0)) for layout in (made.src, made.dst))
        sends = stage.phases[0].views_for(form_of(source), form_of(target)).sends
        gaps.append(sends.num_elements - sum(sends.sizes))
    assert 0 == gaps[1] < gaps[0] < 3 * 8


def test_contributions_with_buffers_of_their_own() -> None:
    several, calls = 0, Counter[str]()
    for seed in range(120):
        shape, src, dst = random_case(seed, "P", [(4,), (2, 2), (3, 2)])
        sources = random_parts(src, shape, seed=seed)
        some = Problem(shape, src, dst)
        relayed = [["relay"]] if some.num_contributions > 1 and some.dst_replicas > 1 else []
        for planners, at_once in product([None, *relayed], ("flat", "lists", "no")):
            made = plan(shape, torch.float32, src, dst, planners=planners)
            found, num_calls = _with_buffers_of_their_own(made, dict(sources), at_once=at_once)
            expected = simulate(made, sources)
            assert all(torch.equal(found[rank], expected[rank]) for rank in found), (seed, planners, at_once)
            calls[at_once] += num_calls
            several += made.communicates and made.phases[0][0].num_contributions > 2
    assert several > 15
    assert calls["no"] == 0
    assert calls["flat"] == calls["lists"] > 100


def test_what_is_handed_on_with_buffers_of_its_own() -> None:
    # what a later exchange sends lies in the target
    handed_on = 0
    for seed in range(80):
        case = random_case(seed, "UBM", [(4,), (2, 2), (3, 2)])
        limits = bounds(case.shape, case.src, case.dst)
        if case.src.partial or case.dst.partial or limits.single_hop <= limits.lb:
            continue
        made = plan(case.shape, torch.int32, case.src, case.dst, planners=["forward"])
        full = _numbered(case.shape, torch.int32)
        sources = {rank: part_of(full, case.src, rank) for rank in case.src.mesh.ranks}
        for at_once in ("flat", "lists"):
            targets, num_calls = _with_buffers_of_their_own(made, dict(sources), at_once=at_once)
            for rank in case.dst.mesh.ranks:
                assert torch.equal(targets[rank], part_of(full, case.dst, rank)), (seed, at_once)
            handed_on += num_calls
    assert handed_on > 20


def test_a_call_that_frees_its_source_is_not_replayed() -> None:
    task = (8,), "float32", Layout(Mesh(1), [None]), Layout(Mesh(1), [0])
    assert compile(plan(*task)).graph_safe
    assert not compile(plan(*task, donate=True)).graph_safe


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
    # programs have no gradients, and what is called without gradients has none
    parameter = torch.nn.Parameter(mine)
    assert not compile(plan((8, 8), "float32", whole, split))(parameter, copy=False).requires_grad
    with torch.no_grad():
        assert not redistribute_local(parameter, (8, 8), whole, split, copy=False).requires_grad


def test_starting_a_reduction_keeps_the_value_at_one_rank() -> None:
    mesh = Mesh(2)
    whole = Layout(mesh, [None])
    value = torch.tensor([3.0, -2.0])
    for op, identity in (("sum", 0.0), ("product", 1.0), ("max", float("-inf")), ("min", float("inf"))):
        found = simulate(plan((2,), torch.float32, whole, Layout(mesh, [None], {0: op})), [value, value])
        assert torch.equal(found[0], value)
        assert torch.equal(found[1], torch.full((2,), identity))


def test_an_average_starts_as_copies_of_the_value() -> None:
    mesh = Mesh((2, 2))
    whole, value = Layout(mesh, [None]), torch.tensor([3.0, -2.0])
    made = plan((2,), torch.float32, whole, Layout(mesh, [None], {0: "sum", 1: "avg"}))
    found = simulate(made, [value] * 4)
    assert [part.tolist() for part in found.values()] == [value.tolist()] * 2 + [[0.0, 0.0]] * 2
    # the value of one rank has to get to the others
    halves = Layout(mesh, [1]), Layout(mesh, [None], {0: "avg"})
    made = plan((2,), torch.float32, *halves)
    verify(made)
    found = simulate(made, [value[:1], value[1:]] * 2)
    assert all(torch.equal(part, value) for part in found.values())


@pytest.mark.parametrize("op", ["sum", "avg", "product", "min", "max"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_started_reduction_comes_back_bit_for_bit_or_is_refused(op: str, dtype: torch.dtype) -> None:
    full = torch.randn(999, generator=torch.Generator().manual_seed(0)) * 30
    # as large as float16 nearly gets; seven copies of it add up to no float16
    full = torch.cat([full, torch.tensor([40000.0 if dtype.itemsize > 1 and dtype != torch.int16 else 40.0])]).to(dtype)
    if dtype.is_floating_point:
        full[:2] = torch.tensor([-0.0, 0.0], dtype=dtype)
    if dtype.is_complex:
        parts = (-0.0, 0.0, float("inf"), 2.0)
        full[:16] = torch.tensor([complex(a, b) for a in parts for b in parts], dtype=dtype)
    if dtype == torch.bool:
        full[::3] = False
    for num_ranks in (2, 3, 7):
        whole = Layout(Mesh(num_ranks), [None])
        pending = Layout(whole.mesh, [None], {0: op})
        refused = dtype.is_complex and op in ("min", "max", "product")
        if refused or (op == "avg" and (not dtype.is_floating_point or dtype == torch.float64)):
            with pytest.raises(UnsupportedError, match=f"cannot start a pending {op} of {str(dtype).split('.')[1]}: "):
                plan((1000,), dtype, whole, pending)
            continue
        started = simulate(plan((1000,), dtype, whole, pending), [full] * num_ranks)
        found = simulate(plan((1000,), dtype, pending, whole), started)
        for part in found.values():
            assert torch.equal(part.view(torch.uint8), full.view(torch.uint8))


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
