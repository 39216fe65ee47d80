"""Redistributions inside of functions that ``torch.compile`` compiles: a break of the graph, and the same values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.device_mesh import init_device_mesh

import optim_redist as redist
from optim_redist import Layout, Mesh, execute
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
