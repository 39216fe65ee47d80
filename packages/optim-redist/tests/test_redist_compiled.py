"""Redistributions inside of functions that ``torch.compile`` compiles: the same values, in one graph or two."""

from __future__ import annotations

from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from redist_cases import part_of
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import optim_redist as redist
from optim_redist import Layout, LayoutError, Mesh, UnsupportedError, execute
from optim_redist.gradients import GradientRule
from optim_utils.testing import run_ranks

MESH = Mesh(2)
SHAPE = (4, 4)
ROWS, COLUMNS = Layout(MESH, [0, None]), Layout(MESH, [None, 0])


def _local(x: Tensor) -> Tensor:
    moved = redist.redistribute_local(x * 2, SHAPE, ROWS, COLUMNS)
    assert moved is not None
    return moved + 1


def _later(x: Tensor) -> Tensor:
    moved = redist.redistribute_local(x * 2, SHAPE, ROWS, COLUMNS, async_op=True).wait()
    assert moved is not None
    return moved + 1


def _many(x: Tensor) -> Tensor:
    (moved,) = redist.redistribute_many([(x * 2, SHAPE, ROWS, COLUMNS)])
    assert moved is not None
    return moved + 1


def _program(x: Tensor) -> Tensor:
    moved = redist.compile(redist.plan(SHAPE, torch.float32, ROWS, COLUMNS))(x * 2)
    assert moved is not None
    return moved + 1


FUNCTIONS = [_local, _later, _many, _program]


def move_compiled(rank: int, world_size: int, device: str, backend: str) -> None:
    full = torch.arange(16.0, device=device).reshape(SHAPE)
    for function in FUNCTIONS:
        compiled = torch.compile(function, backend=backend)
        for given in (full, full + 1):
            moved = compiled(given.chunk(world_size)[rank])
            assert torch.equal(moved, 2 * given.chunk(world_size, 1)[rank] + 1), function.__name__
        # the next one has to make its program, too
        execute._programs.clear()


def gradients_of_compiled(rank: int, world_size: int, device: str) -> None:
    device_mesh = init_device_mesh(device, (world_size,))
    full = torch.arange(16.0, device=device).reshape(SHAPE)
    tensor = distribute_tensor(full, device_mesh, [Shard(0)], src_data_rank=None).requires_grad_()

    @torch.compile(backend="eager")
    def function(x: DTensor) -> DTensor:
        return redist.redistribute(x * x, None, [Shard(1)])

    moved = function(tensor)
    assert torch.equal(moved.to_local(), (full * full).chunk(world_size, 1)[rank])
    redist.redistribute(moved, None, [Replicate()]).sum().backward()
    assert torch.equal(tensor.grad.to_local(), 2 * full.chunk(world_size)[rank])


def test_a_compiled_function_moves_what_the_function_moves() -> None:
    run_ranks(move_compiled, 2, "cpu", "eager")


def test_a_compiled_function_has_the_gradients_of_the_function() -> None:
    run_ranks(gradients_of_compiled, 2, "cpu")


UNEVEN = (5, 4)
SLOW_BACKENDS = ["aot_eager", "inductor"]
in_graphs = pytest.mark.skipif(not hasattr(torch.library, "EffectType"), reason="this torch has no ordered effects")
WHOLE, PENDING = Layout(MESH, [None, None]), Layout(MESH, [None, None], {0: "sum"})
PAIRS = [(ROWS, COLUMNS), (ROWS, WHOLE), (WHOLE, ROWS), (PENDING, COLUMNS), (PENDING, WHOLE)]
PAIRS.append((WHOLE, Layout(MESH, [None, None])))
RULES: tuple[GradientRule, ...] = ("replicate", "adjoint")


def _twice(x: Tensor, src: Layout, dst: Layout, grad: GradientRule) -> Tensor:
    first = redist.redistribute_local(x * 2, UNEVEN, src, dst, grad=grad)
    second = redist.redistribute_local(x * 3, UNEVEN, src, dst, grad=grad)
    assert first is not None
    assert second is not None
    return first.sin() * second


def in_one_graph(rank: int, world_size: int, device: str, backend: str) -> None:
    """Values and gradients of the function; and another graph for other layouts, but not for equal ones."""
    full = torch.arange(1.0, 21.0, dtype=torch.float64, device=device).reshape(UNEVEN)
    for grad in RULES:
        torch._dynamo.reset()
        compiled = torch.compile(_twice, backend=backend, fullgraph=True)
        for src, dst in PAIRS:
            counters.clear()
            found = []
            # the second time with another layout that is equal
            again = Layout(Mesh(2), src.dims, src.partial)
            for function, start in ((compiled, src), (compiled, again), (_twice, src)):
                x = part_of(full, src, rank).requires_grad_()
                moved = function(x, start, dst, grad)
                (moved * (1 + rank * (grad == "adjoint"))).sum().backward()
                found.append((moved.detach(), x.grad))
            assert counters["stats"]["unique_graphs"] == 1, (src, dst)
            for values, gradients in found[:2]:
                assert torch.allclose(values, found[2][0], rtol=1e-12), (src, dst)
                assert torch.allclose(gradients, found[2][1], rtol=1e-12), (src, dst)


def _all_pairs(inputs: list[tuple[Tensor, Tensor]], square: Tensor, grad: GradientRule) -> list[Tensor]:
    """As ``_twice`` for each pair, of products alone: what inductor makes of others is compiled in C++, for seconds."""
    results = []
    for (x, y), (src, dst) in zip(inputs, PAIRS, strict=True):
        first = redist.redistribute_local(x.mm(square), UNEVEN, src, dst, grad=grad)
        second = redist.redistribute_local(y, UNEVEN, src, dst, grad=grad)
        assert first is not None
        assert second is not None
        results.append(first.mm(second.mT))
    return results


def _pairs_in_one_graph(rank: int, world_size: int, backend: str) -> None:
    """Values and gradients of all pairs in a graph, whose second call compiles nothing."""
    full = torch.arange(1.0, 21.0, dtype=torch.float64).reshape(UNEVEN)
    square = full[1:].mT.mm(full[1:])
    for grad in RULES:
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(_all_pairs, backend=backend, fullgraph=True)
        found = []
        for function in (compiled, compiled, _all_pairs):
            inputs = [(part_of(full, src, rank).requires_grad_(), part_of(full, src, rank)) for src, _ in PAIRS]
            results = function([(x, y.requires_grad_()) for x, y in inputs], square, grad)
            torch.stack([(z * (1 + rank * (grad == "adjoint"))).sum() for z in results]).sum().backward()
            found.append([(z.detach(), x.grad, y.grad) for z, (x, y) in zip(results, inputs, strict=True)])
        assert counters["stats"]["unique_graphs"] == 1
        for called in found[:2]:
            for pair, tensors, expected in zip(PAIRS, called, found[2], strict=True):
                assert all(map(partial(torch.allclose, rtol=1e-12), tensors, expected)), pair


def _options(rank: int, world_size: int) -> None:
    full = torch.arange(20.0).reshape(UNEVEN)
    part, out = part_of(full, ROWS, rank), torch.empty(COLUMNS.local_shape(UNEVEN, rank))
    layouts = {"src": ROWS, "dst": COLUMNS}
    taken: list[Any] = [
        lambda x: redist.redistribute_local(x, UNEVEN, ROWS, ROWS),
        lambda x: redist.redistribute_local(tensor=x, shape=(5, x.shape[1]), **layouts, dtype=x.dtype),
        lambda x: redist.redistribute_local(x, torch.Size(UNEVEN), ROWS, COLUMNS, memory_limit=2**17),
        lambda x: redist.redistribute_local(x, UNEVEN, ROWS, PENDING, partial_init="divide"),
        lambda x: redist.redistribute_local(x, UNEVEN, ROWS, COLUMNS, memory_limit=2.5**17),
        lambda x: redist.redistribute_local(x, UNEVEN, ROWS, COLUMNS, memory_limit=inf),
    ]
    broken: list[Any] = [
        lambda x: redist.redistribute_local(x, UNEVEN, ROWS, COLUMNS, out=out),
        lambda x: redist.redistribute_local(x, UNEVEN, ROWS, COLUMNS, async_op=True).wait(),
        lambda x: redist.redistribute_local(x, UNEVEN, ROWS, COLUMNS, topology=redist.Topology.flat(2)),
        lambda x: redist.redistribute_local(x, UNEVEN, Layout(MESH, [0, None]), COLUMNS),
        # rank 1 is outside
        lambda x: redist.redistribute_local(x, UNEVEN, ROWS, Layout(Mesh(1), [None, None])),
    ]
    has_effects = hasattr(torch.library, "EffectType")
    for function in taken + broken:
        torch._dynamo.reset()
        found = torch.compile(function, backend="eager", fullgraph=has_effects and function in taken)(part)
        expected = function(part)
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found, expected)
    with pytest.raises((RuntimeError, LayoutError), match=r"the source tensor has shape \(1, 1\), its layout says"):
        torch.compile(taken[0], backend="eager")(torch.ones(1, 1))
    torch._dynamo.reset()
    unknown: Any = {"memory_limits": 2**17}
    with pytest.raises(TypeError, match="memory_limits"):
        torch.compile(lambda x: redist.redistribute_local(x, UNEVEN, ROWS, COLUMNS, **unknown), backend="eager")(part)
    if has_effects:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="a graph takes redistribute_local without out,"):
            torch.compile(broken[0], backend="eager", fullgraph=True)(part)


def _needed_on_one_rank(x: Tensor, scales: list[Tensor], rank: int) -> Tensor:
    """Products alone, so that nothing is compiled in C++."""
    first, second, third = (redist.redistribute_local(x.mm(scale), UNEVEN, ROWS, WHOLE) for scale in scales)
    assert first is not None
    assert second is not None
    assert third is not None
    return second.mm(scales[0]) if rank else third.mm(second.mT).mm(first)


def _same_calls(rank: int, world_size: int, backend: str) -> None:
    full = torch.arange(20.0).reshape(UNEVEN)
    scales = [k * torch.eye(4) for k in (1, 2, 3)]
    function = partial(_needed_on_one_rank, rank=rank)
    for _ in range(2):
        found = torch.compile(function, backend=backend, fullgraph=True)(part_of(full, ROWS, rank), scales)
        assert torch.equal(found, 2 * full if rank else 6 * full.mm(full.mT).mm(full))


def _in_order(rank: int, world_size: int) -> None:
    """Each rank needs the result of another of the calls; products alone, so that nothing is compiled in C++."""
    fulls = [torch.arange(20.0).reshape(UNEVEN) + k for k in range(3)]

    def function(*parts: Tensor) -> Tensor:
        moved = [redist.redistribute_local(part, UNEVEN, ROWS, WHOLE) for part in parts]
        return moved[rank].mT @ moved[rank]

    # not a graph that an earlier version has compiled
    with torch._inductor.config.patch(force_disable_caches=True):
        found = torch.compile(function, backend="inductor", fullgraph=True)(*[part_of(x, ROWS, rank) for x in fulls])
    assert torch.allclose(found, fulls[rank].mT @ fulls[rank])


def _as_another_rank(rank: int, world_size: int, path: str) -> None:
    """The ranks exchange their numbers, and compiled functions have the old ones in their graphs."""
    full = torch.arange(20.0).reshape(UNEVEN)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: Tensor) -> Tensor:
        moved = redist.redistribute_local(x, UNEVEN, WHOLE, ROWS, grad="adjoint")
        assert moved is not None
        return moved * moved

    function(full.requires_grad_()).sum().backward()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=1 - rank, world_size=world_size)
    with pytest.raises(UnsupportedError, match=rf"was traced on rank {rank}, and this process is rank {1 - rank} now"):
        function(full)
    torch.compiler.reset()
    full.grad = None
    function(full).sum().backward()
    rows = torch.arange(5)[:, None]
    # of five rows rank 0 has three
    assert torch.equal(full.grad, 2 * full.detach() * ((rows < 3) if rank else (rows >= 3)))


def _saved() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.optim_redist.move.default])


def _checkpointed(rank: int, world_size: int, backend: str) -> None:
    def block(x: Tensor) -> Tensor:
        # products alone, so that nothing is compiled in C++
        moved = redist.redistribute_local(x.mm(x.mT).mm(x), UNEVEN, ROWS, WHOLE, grad="adjoint")
        assert moved is not None
        return moved.mm(moved.mT)

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False, context_fn=_saved)

    full = torch.arange(20.0, dtype=torch.float64).reshape(UNEVEN)
    found = []
    for called in (function, block):
        x = part_of(full, ROWS, rank).requires_grad_()
        called(x).sum().backward()
        found.append(x.grad)
    assert torch.allclose(*found, rtol=1e-12)


@in_graphs
def test_a_graph_of_another_rank_is_refused(tmp_path: Path) -> None:
    run_ranks(_as_another_rank, 2, str(tmp_path / "store"))


@in_graphs
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_moves_in_checkpointed_blocks_are_saved(backend: str) -> None:
    run_ranks(_checkpointed, 2, backend)


@in_graphs
def test_local_parts_move_in_one_graph() -> None:
    run_ranks(in_one_graph, 2, "cpu", "eager")


@in_graphs
@pytest.mark.slow
@pytest.mark.parametrize("backend", SLOW_BACKENDS)
def test_local_parts_of_every_pair_move_in_one_graph(backend: str) -> None:
    run_ranks(_pairs_in_one_graph, 2, backend)


def test_options_that_a_graph_takes_and_that_break_it() -> None:
    run_ranks(_options, 2)


@in_graphs
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_no_rank_leaves_out_a_call_whose_result_it_does_not_need(backend: str) -> None:
    run_ranks(_same_calls, 2, backend, timeout=60)


@in_graphs
@pytest.mark.slow
def test_inductor_keeps_the_order_of_calls() -> None:
    run_ranks(_in_order, 2)
