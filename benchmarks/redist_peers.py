"""DTensor's two planners, asked without a process group: what their plans move, hold and cost to make.

A plan is counted per most loaded rank: with L elements on a rank and n ranks in a group, a gather counts (n - 1)·L, an
all-to-all (n - 1)/n·L, a slice nothing. The planners are private to torch, and in 2.11 and newer only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    Replicate,
    Shard,
    _dtensor_spec,  # noqa: PLC2701 - what is measured is private
    _redistribute,  # noqa: PLC2701
)

from optim_redist import Block, Chunk, Cyclic, Layout

# the greedy planner's and the minimum-cost planner's constants decide on small tensors; 64 times larger they do not
SCALE = 64
AVAILABLE = hasattr(_dtensor_spec, "ShardOrderEntry") and hasattr(_redistribute, "_gen_transform_infos_non_cached")


@dataclass(frozen=True)
class TheirPlan:
    """What a plan of DTensor moves: elements per rank, across nodes numbered by mesh axis 0, and at most held."""

    recv: float
    into_node: float
    live: int
    seconds: float


def dtensor_plan(case: Any, *, graph: bool, repeats: int = 1) -> TheirPlan | None:
    """DTensor's plan for a case; None where it cannot be asked: other kinds, meshes, or orders for the greedy one.

    Its time is the CPU time of this thread, the least of ``repeats``.
    """
    device_mesh = _device_mesh(case)
    if device_mesh is None:
        return None
    shape = [n * SCALE if graph else n for n in case.shape]
    specs = [_spec(layout, shape, case.shape, device_mesh) for layout in (case.src, case.dst)]
    if None in specs:
        return None
    ordered = any(
        split is not None and list(split.axes) != sorted(split.axes) for side in case[1:] for split in side.dims
    )
    if ordered and not graph:
        return None
    spent = math.inf
    for _ in range(repeats):
        _redistribute.clear_redistribute_planner_cache()
        started = time.thread_time()
        steps = _redistribute._gen_transform_infos_non_cached(specs[0], specs[1], graph)
        spent = min(spent, time.thread_time() - started)
    return _count(steps, list(specs[0].placements), case.shape, case.src.mesh.sizes, spent)


def _device_mesh(case: Any) -> DeviceMesh | None:
    """The mesh of both sides; None where DTensor has no such planners, or the sides have no mesh of ranks in order."""
    mesh = case.src.mesh
    if not AVAILABLE or case.dst.mesh != mesh or mesh.ranks != tuple(range(mesh.num_ranks)):
        return None
    return DeviceMesh("cpu", torch.arange(mesh.num_ranks).reshape(mesh.sizes), _init_backend=False, _rank=0)


def _spec(layout: Layout, shape: Sequence[int], true_shape: Sequence[int], mesh: DeviceMesh) -> Any:
    """The layout as DTensor knows it, for sizes that all its axes divide."""
    if layout.partial:
        return None
    placements: list[Any] = [Replicate()] * mesh.ndim
    order = []
    for tensor_dim, split in enumerate(layout.dims):
        if split is None:
            continue
        sizes = layout.axis_sizes(tensor_dim)
        block = true_shape[tensor_dim] // prod(sizes)
        if true_shape[tensor_dim] % prod(sizes) or split.kind not in (Block(), Chunk(), Cyclic(max(1, block))):
            return None
        for axis in split.axes:
            placements[axis] = Shard(tensor_dim)
        order.append(_dtensor_spec.ShardOrderEntry(tensor_dim, split.axes))
    strides = tuple(prod(shape[k + 1 :]) for k in range(len(shape)))
    meta = _dtensor_spec.TensorMeta(torch.Size(shape), strides, torch.float32)
    return _dtensor_spec.DTensorSpec(mesh, tuple(placements), tensor_meta=meta, shard_order=tuple(order))


def _count(
    steps: Iterable[Any], placements: list[Any], shape: Sequence[int], mesh: Sequence[int], spent: float
) -> TheirPlan:
    def held() -> int:
        sizes = list(shape)
        for axis, placement in enumerate(placements):
            if placement.is_shard():
                sizes[placement.dim] = -(-sizes[placement.dim] // mesh[axis])
        return prod(sizes)

    recv = into_node = 0.0
    live = held()
    per_node = prod(mesh[1:])
    for step in steps:
        before, after = step.src_dst_placements
        n, size = mesh[step.mesh_dim], held()
        moved = 0.0
        if before.is_shard():
            moved = (n - 1) * size if after.is_replicate() else (n - 1) / n * size
        recv += moved
        into_node += moved * per_node if step.mesh_dim == 0 else 0.0
        placements[step.mesh_dim] = after
        live = max(live, held())
    return TheirPlan(recv, into_node, live, spent)


def is_inexpressible(case: Any) -> bool:
    """Whether DTensor cannot say one side of a case: another kind, sizes that do not divide, or two meshes."""
    device_mesh = _device_mesh(case)
    return device_mesh is None or any(_spec(layout, case.shape, case.shape, device_mesh) is None for layout in case[1:])
