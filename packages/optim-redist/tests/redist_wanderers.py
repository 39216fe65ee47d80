"""Tensors in random layouts, random targets and options for them: what a sequence of redistributions draws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from redist_sequences import (
    BITS,
    NUMBERS,
    Tracked,
    Wire,
    check_layout,
    check_plan,
    fresh,
    random_layout,
    random_mesh,
    random_shape,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from optim_redist import Layout, Plan, PlanInfeasibleError, Topology, plan


def replicated(layout: Layout) -> Layout:
    """The layout without its contributions."""
    return Layout(layout.mesh, layout.dims)


class Wanderers:
    """A few tensors, and what every rank draws alike for them."""

    def __init__(self, seed: int, rank: int, world_size: int, folder: Path, log: list[str], wire: Wire) -> None:
        self.draw, self.rank, self.world_size = Random(seed), rank, world_size
        # what ranks do differently
        self.own = Random(f"{seed} on {rank}")
        self.seed, self.folder, self.log, self.wire = seed, folder, log, wire
        self.count = 0
        self.tensors: list[Tracked] = []
        self.programs: list[tuple[Any, Plan]] = []
        self.meshes: dict[Any, DeviceMesh] = {}
        self.groups: dict[Any, Any] = {}

    def say(self, *words: Any) -> None:
        self.log.append(" ".join(map(str, words)))

    def inside(self, *layouts: Layout) -> bool:
        return any(self.rank in layout.mesh.coordinates for layout in layouts)

    def group_with(self, *layouts: Layout) -> tuple[Any, list[int]]:
        """A process group of the layouts' ranks and perhaps more, and its ranks."""
        needed = {rank for layout in layouts for rank in layout.mesh.ranks}
        ranks = tuple(sorted(needed | {r for r in range(self.world_size) if self.draw.random() < 0.4}))
        if ranks not in self.groups:
            self.groups[ranks] = dist.new_group(list(ranks))
        return self.groups[ranks], list(ranks)

    # what there is to move

    def new_tensor(self) -> Tracked:
        shape, mesh = random_shape(self.draw), random_mesh(self.draw, self.world_size)
        dtype = self.draw.choice(BITS)
        ops: list[str] = []
        if dtype in NUMBERS:
            ops = ["sum", "product"]
            ops += ["avg"] if dtype.is_floating_point or dtype.is_complex else []
            ops += [] if dtype.is_complex else ["min", "max"]
        layout = random_layout(self.draw, mesh, shape, ops)
        check_layout(layout, shape)
        made = fresh(self.draw, self.rank, layout, shape, dtype)
        self.say("new", dtype, shape, layout, mesh.sizes, mesh.ranks)
        return made

    def pick(self) -> tuple[int, Tracked]:
        number = self.draw.randrange(len(self.tensors))
        return number, self.tensors[number]

    def target(self, tensor: Tracked) -> Layout:
        """A layout for it, on its own mesh or another."""
        draw = self.draw
        mesh = tensor.layout.mesh if draw.random() < 0.5 else random_mesh(draw, self.world_size)
        layout = random_layout(draw, mesh, tensor.shape, tensor.ops if draw.random() < 0.4 else ())
        if draw.random() < 0.08:
            layout = tensor.layout
        check_layout(layout, tensor.shape)
        self.say(tensor.dtype, tensor.shape, tensor.layout, tensor.layout.mesh.sizes, tensor.layout.mesh.ranks)
        self.say("to", layout, layout.mesh.sizes, layout.mesh.ranks)
        return layout

    def topology(self, *layouts: Layout) -> Topology | None:
        draw = self.draw
        mesh = draw.choice(layouts).mesh
        found = draw.choice(
            [None, None, Topology.flat(), Topology.nodes(1), Topology.nodes(2), Topology.nodes(3), mesh]
        )
        if found is not mesh:
            return found
        if len({rank for layout in layouts for rank in layout.mesh.ranks}) > mesh.num_ranks:
            return None
        return Topology.from_mesh_axis(mesh, draw.randrange(mesh.num_axes))

    def options(self, tensor: Tracked, dst: Layout) -> tuple[Plan, dict[str, Any]] | None:
        """Options of a plan that exists, and the plan."""
        draw = self.draw
        task = (tensor.shape, tensor.dtype, tensor.layout, dst)
        options: dict[str, Any] = {"topology": self.topology(tensor.layout, dst), "donate": draw.random() < 0.25}
        free = plan(*task, **options)
        check_plan(free)
        if draw.random() < 0.5:
            least = free.bounds.memory * free.itemsize
            options["memory_limit"] = draw.choice([least, free.peak_bytes, free.peak_bytes - 1, least + 16, least // 2])
        try:
            made = plan(*task, **options)
        except PlanInfeasibleError as error:
            # one chunk more always does
            if error.limit < least + 2**16:
                return None
            raise
        check_plan(made)
        self.say(made.planner, options)
        return made, options

    # DTensors

    def device_mesh(self, sizes: tuple[int, ...], ranks: tuple[int, ...]) -> DeviceMesh:
        if (sizes, ranks) not in self.meshes:
            self.meshes[sizes, ranks] = DeviceMesh("cpu", torch.tensor(ranks).reshape(sizes))
        return self.meshes[sizes, ranks]

    def random_device_mesh(self) -> DeviceMesh:
        mesh = random_mesh(self.draw, self.world_size)
        return self.device_mesh(mesh.sizes, mesh.ranks)

    def dtensor(
        self, part: Tensor | None, dtype: torch.dtype, mesh: DeviceMesh, placements: Any, shape: Any, order: Any = None
    ) -> DTensor:
        # from_local takes the form of a tensor without dimensions from an empty one outside the mesh
        local = torch.empty(0 if shape else (), dtype=dtype) if part is None else part
        stride = torch.empty(shape, device="meta").stride()
        made = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
        if order:
            entry = torch.distributed.tensor._dtensor_spec.ShardOrderEntry
            entries = tuple(entry(dim, axes) for dim, axes in sorted(order.items()))
            made._spec = replace(made._spec, shard_order=entries)
        return made

    def gradient(self, values: Tracked, of: DTensor, layout: Layout) -> DTensor:
        """Values as the gradient of a DTensor: replicated where that has contributions."""
        placements = [Replicate() if isinstance(p, Partial) else p for p in of.placements]
        part = values.part(replicated(layout), self.rank)
        made = self.dtensor(part, values.dtype, of.device_mesh, placements, values.shape)
        made._spec = replace(of._spec, placements=tuple(placements)) if hasattr(of._spec, "shard_order") else made._spec
        return made
