"""The same programs over NCCL: random cases, every dtype, every planner, reductions, async calls, many, CUDA graphs."""

from __future__ import annotations

from collections import Counter
from math import prod
from random import Random
from typing import Any

import pytest
import torch
from redist_cases import combined, part_of, random_case, random_parts
from test_redist_compiled import gradients_of_compiled, in_graphs, in_one_graph, move_compiled

from optim_redist import (
    Item,
    Layout,
    Mesh,
    Plan,
    RedistError,
    Topology,
    compile,
    plan,
    redistribute_local,
    redistribute_many,
    simulate,
)
from optim_utils.testing import run_ranks

WORLD = min(4, torch.cuda.device_count())
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(WORLD < 2, reason="needs two CUDA devices"),
]
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.complex64, torch.complex128]
PLANNERS = ["direct", "spread", "forward", "relay", "scatter", "hierarchical", "packed", "collectives", "notebook"]
PLANNERS += ["naive"]


def _fuzz(rank: int, world: int, num_cases: int) -> int:
    done = 0
    for seed in range(num_cases):
        shape, src, dst = random_case(seed, "COBURIEKM", [(2,), (1, 2)] if world < 4 else [(4,), (2, 2), (3,), (2,)])
        ranks = {*src.mesh.ranks, *dst.mesh.ranks}
        if max(ranks) >= world or rank not in ranks:
            continue
        full = torch.arange(prod(shape)).reshape(shape).to(DTYPES[seed % len(DTYPES)])
        here = part_of(full, src, rank)
        found = redistribute_local(
            None if here is None else here.cuda(), shape, src, dst, dtype=full.dtype, async_op=seed % 2 == 1
        )
        found = found.wait() if seed % 2 else found
        expected = part_of(full, dst, rank)
        assert (found is None) == (expected is None)
        assert expected is None or torch.equal(found.cpu(), expected), seed
        done += 1
    return done


def test_random_cases() -> None:
    assert min(run_ranks(_fuzz, WORLD, 120, backend="nccl")) > 20


def _reductions(rank: int, world: int) -> None:
    meshes = [(2,)] if world < 4 else [(4,), (2, 2)]
    for seed in range(60):
        shape, src, dst = random_case(seed, "P", meshes)
        if src.mesh.num_ranks != world:
            continue
        locals = random_parts(src, shape, seed=seed)
        found = redistribute_local(locals[rank].cuda(), shape, src, dst)
        simulated = simulate(plan(shape, torch.float32, src, dst), locals)
        assert torch.equal(found.cpu(), simulated[rank])
        assert torch.equal(combined(src, shape, locals), combined(dst, shape, simulated))


def test_reductions() -> None:
    run_ranks(_reductions, WORLD, backend="nccl")


def _plans_of_every_kind(rank: int, world: int, device: str, num_cases: int) -> Counter[str]:
    """Each planner's own plan, in rounds where memory is limited, with and without giving up the source."""
    done: Counter[str] = Counter()
    for seed in range(num_cases):
        shape, src, dst = random_case(seed, "CBURIKMPPPP", [(2,), (1, 2)] if world < 4 else [(4,), (2, 2)])
        ranks = {*src.mesh.ranks, *dst.mesh.ranks}
        if max(ranks) >= world or rank not in ranks:
            continue
        draw = Random(seed)
        locals = random_parts(src, shape, seed=seed)
        for planner in PLANNERS:
            options: dict[str, Any] = {"planners": [planner], "topology": Topology.nodes(draw.choice([1, 2]))}
            try:
                made = free = plan(shape, torch.float32, src, dst, **options)
                if draw.random() < 0.5:
                    fixed = 4 * max(_elements(shape, src, r) + _elements(shape, dst, r) for r in ranks)
                    options["memory_limit"] = fixed + (free.peak_bytes - fixed) // 2
                    made = plan(shape, torch.float32, src, dst, donate=draw.random() < 0.5, **options)
            except RedistError:  # not for this case: the same on all ranks
                continue
            simulated = simulate(made, locals)
            here = locals.get(rank)
            found = compile(made)(None if here is None else here.to(device, copy=True))
            assert (found is None) == (simulated.get(rank) is None)
            assert found is None or torch.equal(found.cpu(), simulated[rank]), (seed, planner)
            assert torch.equal(combined(src, shape, locals), combined(dst, shape, simulated)), (seed, planner)
            done[planner] += made.communicates
            done["rounds"] += _num_phases(made) > _num_phases(free)
            done["donated"] += made.donate
    return done


def _elements(shape: tuple[int, ...], layout: Layout, rank: int) -> int:
    return prod(layout.local_shape(shape, rank)) if rank in layout.mesh.coordinates else 0


def _num_phases(made: Plan) -> int:
    return sum(len(phases) for _, phases in made.phases)


def test_plans_of_every_kind() -> None:
    done = min(run_ranks(_plans_of_every_kind, WORLD, "cuda", 150, backend="nccl"), key=Counter.total)
    wanted = {"direct", "rounds", "donated", *(["forward", "relay"] if WORLD > 3 else [])}
    assert wanted <= {kind for kind, times in done.items() if times > 2}


def _between_streams(rank: int, world: int) -> None:
    mesh = Mesh(world)
    shape = (512 * world, 512 * world)
    src, dst = Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    full = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    here, there = part_of(full, src, rank).cuda(), part_of(full, dst, rank)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for several in (False, True):
        with torch.cuda.stream(side):
            if several:
                handle = redistribute_many([Item(here, shape, src, dst)], async_op=True)
            else:
                handle = redistribute_local(here, shape, src, dst, async_op=True)
        # what waits is busy for long, and what was begun on takes memory again meanwhile
        torch.cuda._sleep(200_000_000)
        found = handle.wait()
        with torch.cuda.stream(side):
            taken = [torch.full((n,), float("nan"), device="cuda") for n in (here.numel(), here.numel() // 2) * 4]
        found = found[0] if several else found
        torch.cuda.synchronize()
        assert torch.equal(found.cpu(), there)
        del taken


def test_a_handle_may_be_waited_for_on_another_stream() -> None:
    run_ranks(_between_streams, WORLD, backend="nccl")


def _extrema_and_averages(rank: int, world: int) -> None:
    mesh, whole = Mesh(world), [Layout(Mesh(world), [None]), Layout(Mesh(world), [0])]
    for dst in whole:
        for op in ("min", "max"):
            mine = torch.full((world,), float("nan") if rank == 1 else 1.0, device="cuda")
            assert redistribute_local(mine, (world,), Layout(mesh, [None], {0: op}), dst).isnan().all()
        mine = torch.full((world,), 60000.0, device="cuda", dtype=torch.float16)
        found = redistribute_local(mine, (world,), Layout(mesh, [None], {0: "avg"}), dst)
        assert torch.equal(found, torch.full_like(found, 60000.0))


def test_nan_and_large_numbers_are_combined_as_torch_does() -> None:
    run_ranks(_extrema_and_averages, WORLD, backend="nccl")


def _many_and_graph(rank: int, world: int) -> None:
    mesh = Mesh(world)
    shape = (64 * world, 32 * world)
    src, dst = Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    full = torch.randn(shape, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    here, there = part_of(full, src, rank).cuda(), part_of(full, dst, rank)
    items = {f"w{k}": Item((here + k).bfloat16(), shape, src, dst) for k in range(20)}
    for name, found in redistribute_many(items).items():
        assert torch.equal(found.cpu(), (there + int(name[1:])).bfloat16())

    program = compile(plan(shape, torch.bfloat16, src, dst))
    out = torch.empty(there.shape, dtype=torch.bfloat16, device="cuda")
    assert not program.graph_safe
    program(here, out)
    assert program.graph_safe
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        program(here, out)
    for k in range(3):
        here.copy_(part_of(full + k, src, rank))
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), part_of(full + k, dst, rank))
    del graph


def test_many_tensors_and_graph_replay() -> None:
    run_ranks(_many_and_graph, WORLD, backend="nccl")


def _many_under_a_limit(rank: int, world: int, donate: bool) -> None:
    mesh = Mesh(world)
    shape = (512 * world, 256 * world)
    src, dst = Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    full = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    here, there = part_of(full, src, rank), part_of(full, dst, rank)
    # the first call makes the group's communicator
    redistribute_many([(here.cuda(), shape, src, dst)])
    count, spare = 6, 2**18
    limit = (count + 1 if donate else 2 * count) * here.nbytes + spare
    before = torch.cuda.memory_allocated()
    items = {f"w{k}": Item(here.cuda() + k, shape, src, dst) for k in range(count)}
    torch.cuda.reset_peak_memory_stats()
    found = redistribute_many(items, memory_limit=limit, donate=donate)
    # torch's allocator gives out multiples of 512 bytes
    assert torch.cuda.max_memory_allocated() - before <= limit + 512 * (2 * count + 2)
    for name, part in found.items():
        assert torch.equal(part.cpu(), there + int(name[1:]))


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
def test_many_tensors_stay_below_a_limit(donate: bool) -> None:
    run_ranks(_many_under_a_limit, WORLD, donate, backend="nccl")


def _divided_sums(rank: int, world: int) -> None:
    mesh = Mesh(world)
    average, begun, whole = Layout(mesh, [None], {0: "avg"}), Layout(mesh, [None], {0: "sum"}), Layout(mesh, [None])
    values = torch.arange(8.0 * world).view(world, 8)
    for dtype in (torch.float32, torch.bfloat16):
        # one library collective adds and divides twice; without one, copies
        found = redistribute_local(values[rank].to("cuda", dtype), (8,), average, begun, partial_init="divide")
        assert torch.allclose(found.cpu(), (values.mean(0) / world).to(dtype))
        found = redistribute_local(values[0].to("cuda", dtype), (8,), whole, begun, partial_init="divide")
        assert torch.equal(found.cpu(), values[0].to(dtype) / world)


def test_sums_begin_as_equal_parts() -> None:
    run_ranks(_divided_sums, WORLD, backend="nccl")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_functions(backend: str) -> None:
    run_ranks(move_compiled, 2, "cuda", backend, backend="nccl")


@in_graphs
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_local_parts_in_one_graph(backend: str) -> None:
    run_ranks(in_one_graph, 2, "cuda", backend, backend="nccl")


def test_gradients_of_a_compiled_function() -> None:
    run_ranks(gradients_of_compiled, 2, "cuda", backend="nccl")
