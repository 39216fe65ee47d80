"""Gradients of DTensors by the rule "adjoint": the transpose of what the ranks' local tensors go through."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch
from redist_cases import part_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from optim_redist import Layout, UnsupportedError, redistribute, redistribute_local
from optim_utils.testing import run_ranks

SHAPE = (7, 6)
PLACED = [Replicate(), Shard(0), Shard(1)]


def _numbers(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _local_losses(rank: int, world: int) -> list[str]:
    """Every rank has a loss of its own on ``to_local()``; returns the moves with a wrong sum of gradients."""
    warnings.simplefilter("ignore")
    device_mesh = init_device_mesh("cpu", (2, 2))
    wrong, full = [], _numbers(0)
    for src, dst in product(product(PLACED, repeat=2), repeat=2):
        start = distribute_tensor(full, device_mesh, src, src_data_rank=None).requires_grad_()
        moved = redistribute(start, None, dst, grad="adjoint")
        layout = Layout.from_placements(device_mesh, dst, SHAPE)
        (moved.to_local() ** 2 * part_of(_numbers(rank + 1), layout, rank)).sum().backward()
        weights = torch.zeros_like(full)
        for other in range(world):
            indices = [range(*piece) for held in layout.slices(SHAPE)[other] for piece in held]
            rows, columns = (list(held) for held in indices)
            weights[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] += part_of(_numbers(other + 1), layout, other)
        gradient = start.grad
        assert gradient is not None
        dual = tuple(Partial() if placement == Replicate() else placement for placement in src)
        if not torch.allclose(gradient.full_tensor(), 2 * weights * full, rtol=1e-12):
            wrong.append(f"{src} -> {dst}")
        if Replicate() not in src and src == dst:
            # nothing moves, and torch 2.11 itself replicates some gradients of to_local
            continue
        if gradient.placements != dual:
            wrong.append(f"placements of {src} -> {dst}")
        # the same shares as those of local parts
        mine = part_of(full, Layout.from_dtensor(start), rank).requires_grad_()
        found = redistribute_local(mine, SHAPE, Layout.from_dtensor(start), layout, grad="adjoint")
        assert found is not None
        (found**2 * part_of(_numbers(rank + 1), layout, rank)).sum().backward()
        if not torch.equal(gradient.to_local(), mine.grad):
            wrong.append(f"share of {src} -> {dst}")
    return wrong


def test_ranks_with_losses_of_their_own() -> None:
    assert run_ranks(_local_losses, 4) == [[]] * 4


def _said_by_placements(rank: int, world: int) -> None:
    device_mesh = init_device_mesh("cpu", (world,))
    full = _numbers(0)
    start = distribute_tensor(full, device_mesh, [Shard(0)], src_data_rank=None).requires_grad_()

    # contributions that say so are not read as something else, and contributions to a sum have its gradient
    for rule in ("replicate", "adjoint"):
        whole = redistribute(start, None, [Replicate()], grad=rule)
        (whole.to_local(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
        assert torch.equal(start.grad.full_tensor(), torch.full(SHAPE, 3.0, dtype=torch.float64)), rule
        start.grad = None
    local = full.clone().requires_grad_()
    total = redistribute(DTensor.from_local(local, device_mesh, [Partial()]), None, [Replicate()], grad="adjoint")
    (total.to_local() * (rank + 1)).sum().backward()
    assert torch.equal(local.grad, torch.full(SHAPE, 3.0, dtype=torch.float64))

    # a chain: the replicas' gradients are contributions, which are added once
    whole = redistribute(start, None, [Replicate()], grad="adjoint")
    columns = redistribute(whole * whole, None, [Shard(1)], grad="adjoint")
    (columns.to_local() ** 2).sum().backward()
    assert torch.allclose(start.grad.full_tensor(), 4 * full**3, rtol=1e-12)

    # twice
    start.grad = None
    whole = redistribute(start, None, [Replicate()], grad="adjoint")
    # every rank has this loss, so that L = 2 Σ x³; to_local has no gradients of gradients in torch 2.11
    (gradient,) = torch.autograd.grad((whole * whole * whole).sum(), start, create_graph=True)
    (gradient * gradient).sum().backward()
    # g = 6 x², Σ g² = 36 x⁴
    assert torch.allclose(start.grad.full_tensor(), 144 * full**3, rtol=1e-12)


def test_gradients_that_say_what_they_are() -> None:
    run_ranks(_said_by_placements, 2)


def _other_ranks(rank: int, world: int) -> None:
    """From all ranks to two of them, with gradients in bf16, and back."""
    device_mesh, pair = init_device_mesh("cpu", (world,)), DeviceMesh("cpu", [2, 0])
    start = distribute_tensor(torch.full((6, 4), 3.0), device_mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    onto = redistribute(start, pair, [Replicate()], grad="adjoint", backward_dtype=torch.bfloat16)
    whole = redistribute(onto * onto, device_mesh, [Replicate()], grad="adjoint")
    (whole.to_local().sum() * (rank + 1)).backward()
    # (1 + 2 + 3) · 2x
    assert torch.equal(start.grad.full_tensor(), torch.full((6, 4), 36.0))
    assert start.grad.dtype == torch.float32


def test_adjoint_across_meshes() -> None:
    run_ranks(_other_ranks, 3)


def _local_losses_of_some(rank: int, world: int) -> None:
    """Every rank goes on with ``to_local()``, also the one outside of the target's mesh."""
    full = _numbers(0)
    device_mesh, pair = init_device_mesh("cpu", (world,)), DeviceMesh("cpu", [2, 0])
    for placement in (*PLACED, Partial()):
        start = distribute_tensor(full, device_mesh, [Shard(0)], src_data_rank=None).requires_grad_()
        local = redistribute(start, pair, [placement]).to_local()
        assert (local.numel() == 0) == (rank == 1)
        (local**2 if placement != Partial() else local).sum().backward()
        assert start.grad is not None
        expected = 2 * full if placement != Partial() else torch.ones_like(full)
        assert torch.equal(start.grad.full_tensor(), expected), placement


def test_ranks_outside_of_a_mesh_run_backward_through_to_local() -> None:
    run_ranks(_local_losses_of_some, 3)


def _scalar_of_some(rank: int, world: int) -> None:
    # torch then fills with NaN what is not written
    torch.use_deterministic_algorithms(True)
    device_mesh, one = init_device_mesh("cpu", (world,)), DeviceMesh("cpu", [1])
    start = distribute_tensor(torch.tensor(3.0), device_mesh, [Replicate()], src_data_rank=None).requires_grad_()
    local = redistribute(start, one, [Replicate()]).to_local()
    assert local.tolist() == (3.0 if rank == 1 else 0.0)
    local.backward()
    assert start.grad is not None
    assert start.grad.full_tensor().item() == 1.0


def test_a_scalar_is_zero_on_ranks_outside_of_a_mesh() -> None:
    run_ranks(_scalar_of_some, 2)


class _Unfollowed(torch.autograd.Function):
    """Some ranks' losses do not depend on the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, depends: bool) -> Tensor:
        ctx.depends = depends
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return gradient if ctx.depends else None, None


def _some_losses(rank: int, world: int) -> None:
    full, device_mesh = _numbers(0), init_device_mesh("cpu", (world,))
    for placement in (Replicate(), Shard(1)):
        start = distribute_tensor(full, device_mesh, [Shard(0)], src_data_rank=None).requires_grad_()
        moved = redistribute(start, None, [placement], grad="adjoint")
        _Unfollowed.apply(moved, rank == 0).to_local().sum().backward()
        mine = torch.ones_like(full)
        if placement == Shard(1):
            mine[:, full.shape[1] // 2 :] = 0
        assert start.grad is not None
        assert torch.equal(start.grad.full_tensor(), mine), placement


def test_a_rank_whose_loss_does_not_depend_on_the_result_moves_zeros() -> None:
    run_ranks(_some_losses, 2)


def _refused(rank: int, world: int) -> None:
    device_mesh = init_device_mesh("cpu", (1,))
    for op in ("avg", "max"):
        local = torch.ones(4, requires_grad=True)
        pending = DTensor.from_local(local, device_mesh, [Partial(op)])
        with pytest.raises(UnsupportedError, match=rf'dtensor has Partial\({op}\), and grad="adjoint" is for'):
            redistribute(pending, None, [Replicate()], grad="adjoint")
        whole = DTensor.from_local(local, device_mesh, [Replicate()])
        with pytest.raises(UnsupportedError, match=rf'placements has Partial\({op}\), and grad="adjoint" is for'):
            redistribute(whole, None, [Partial(op)], grad="adjoint")
        with torch.no_grad():
            redistribute(pending, None, [Replicate()], grad="adjoint")
    with pytest.raises(UnsupportedError, match='grad is "replicate" or "adjoint", got \'whole\''):
        redistribute(pending, None, [Replicate()], grad="whole")  # type: ignore[call-overload]


def test_what_is_no_sum_is_refused() -> None:
    run_ranks(_refused, 1)
