"""The plan: which bucket, which place and which owner every parameter has. Pure, the same on every rank.

Letters: W = ranks, C = elements of a chunk. A **bucket** is one flat storage of W equal chunks; rank r owns chunk r.

    elementwise parameters   |p0 . p1 ....|.. p1 . p2 ..|. p2 ......|     chunk borders cut anywhere, between blocks of
                                                                          256 elements where 8-bit states have a scale
    matrices                 |A0 A2 B0    |A1 A3 B1     |A4 A5 pad  |     whole inside their owner's chunk

Both layouts are reduced by the same reduce-scatter and returned by the same all-gather, each of which sends
(W-1)/W of the bucket: nothing can be cheaper on the wire.

A parameter's elements are numbered in **memory order**: a transposed or channels_last tensor keeps its strides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch

from optim_dist._dealing import Matrix, deal, newton_schulz_flops
from optim_kernels.adamw_groups import CODE_BLOCK, has_codes

RouteName = Literal["adamw", "muon"]

CHUNK_ALIGNMENT = 128  # elements
MATRIX_ALIGNMENT = 256  # bytes: products on the weights want it
VECTOR_ALIGNMENT = 16  # bytes
DEFAULT_BUCKET_MB = 256  # measured best for a step without backward overlap on four H200s
FORMAT = "optim-dist.plan/1"


@dataclass(frozen=True)
class ParameterSpec:
    """What the plan must know of a parameter, in this order of backward: the last listed comes first."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    route: RouteName
    group: int = 0
    device: str = "cpu"
    matrix_shapes: tuple[tuple[int, ...], ...] = ()  # the views that are orthogonalized one by one, if not the whole
    sharding: str = ""  # how a DTensor lies over ranks; it stays there, outside buckets
    block: int = 1  # elements, counted from its start, of which each has one rank: those that share a scale

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def alignment(self) -> int:
        """Elements; of powers of two the largest."""
        in_bytes = MATRIX_ALIGNMENT if len(self.shape) >= 2 else VECTOR_ALIGNMENT
        return max(self.block, in_bytes // self.dtype.itemsize)

    @property
    def cost(self) -> int:
        """Floating-point operations of its Newton-Schulz iteration; 0 for an elementwise parameter."""
        if self.route != "muon":
            return 0
        return sum(newton_schulz_flops(shape) for shape in self.matrix_shapes or (self.shape,))

    def describe(self) -> list[Any]:
        return [
            *(self.name, list(self.shape), list(self.stride), str(self.dtype), self.route, self.group),
            *(self.device, [list(shape) for shape in self.matrix_shapes], self.sharding),
            # others are described as they were before there were blocks, so that their saved states still fit
            *([self.block] if self.block > 1 else []),
        ]


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies: ``offset`` is in elements of the bucket's flat storage."""

    parameter: int
    offset: int


@dataclass(frozen=True)
class Piece:
    """The elements ``[start, stop)`` of a parameter, lying at ``offset`` of its bucket, owned by ``rank``."""

    parameter: int
    start: int
    stop: int
    offset: int
    rank: int


@dataclass(frozen=True)
class BucketPlan:
    """One flat storage of ``world_size`` chunks of ``chunk`` elements."""

    route: RouteName
    dtype: torch.dtype
    device: str
    chunk: int
    world_size: int
    slots: tuple[Slot, ...]
    sizes: tuple[int, ...]  # elements of each slot's parameter
    grad_dtype: torch.dtype  # of gradients
    wire_dtype: torch.dtype  # of gradients when they are reduced

    @property
    def numel(self) -> int:
        return self.chunk * self.world_size

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def gradient_nbytes(self) -> int:
        return self.numel * self.grad_dtype.itemsize

    @property
    def reduce_bytes(self) -> int:
        """What each rank sends when gradients are reduced."""
        return self.chunk * (self.world_size - 1) * self.wire_dtype.itemsize

    @property
    def gather_bytes(self) -> int:
        """What each rank sends when parameters are gathered."""
        return self.chunk * (self.world_size - 1) * self.dtype.itemsize

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - sum(self.sizes)

    def pieces(self, rank: int | None = None) -> Iterator[Piece]:
        """What ``rank`` owns (or every rank), in the order of the storage."""
        for slot, size in zip(self.slots, self.sizes):
            if size == 0:
                # an empty tensor has no place; the first rank keeps its step count
                if rank in (None, 0):
                    yield Piece(slot.parameter, 0, 0, slot.offset, 0)
                continue
            first, last = slot.offset // self.chunk, (slot.offset + size - 1) // self.chunk
            for owner in range(first, last + 1) if rank is None else {rank} & set(range(first, last + 1)):
                begin = max(slot.offset, owner * self.chunk)
                end = min(slot.offset + size, (owner + 1) * self.chunk)
                yield Piece(slot.parameter, begin - slot.offset, end - slot.offset, begin, owner)


@dataclass(frozen=True)
class Plan:
    """Buckets in the order in which they are reduced; frozen at construction, then only executed."""

    world_size: int
    parameters: tuple[ParameterSpec, ...]
    buckets: tuple[BucketPlan, ...]

    @cached_property
    def hash(self) -> str:
        """Of the structure alone: names, shapes, routes, places; not of learning rates."""
        return hashlib.sha256(json.dumps(self.describe(), separators=(",", ":")).encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "world_size": self.world_size,
            "parameters": [spec.describe() for spec in self.parameters],
            "buckets": [[b.route, b.chunk, [[s.parameter, s.offset] for s in b.slots]] for b in self.buckets],
        }

    def followed_by(self, other: Plan) -> Plan:
        """Both plans as one; the buckets of ``other`` come last."""
        shift = len(self.parameters)
        moved = [
            replace(bucket, slots=tuple(Slot(slot.parameter + shift, slot.offset) for slot in bucket.slots))
            for bucket in other.buckets
        ]
        return Plan(self.world_size, (*self.parameters, *other.parameters), (*self.buckets, *moved))

    def ranges(self, parameter: int) -> list[Piece]:
        """Every rank's part of a parameter, in element order."""
        return sorted(self._ranges[parameter], key=lambda piece: piece.start)

    @cached_property
    def _ranges(self) -> dict[int, list[Piece]]:
        ranges: dict[int, list[Piece]] = {index: [] for index in range(len(self.parameters))}
        for bucket in self.buckets:
            for piece in bucket.pieces():
                ranges[piece.parameter].append(piece)
        return ranges

    def loads(self) -> list[int]:
        """Newton-Schulz flops of every rank."""
        loads = [0] * self.world_size
        for bucket in self.buckets:
            for piece in bucket.pieces():
                loads[piece.rank] += self.parameters[piece.parameter].cost
        return loads

    @property
    def imbalance(self) -> float:
        """The most loaded rank's Newton-Schulz work over the mean; 1.0 is even."""
        loads = self.loads()
        return max(loads) * self.world_size / sum(loads) if any(loads) else 1.0

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def gradient_nbytes(self) -> int:
        return sum(bucket.gradient_nbytes for bucket in self.buckets)

    @property
    def padding(self) -> float:
        """Padding as a share of the bytes that belong to parameters."""
        wasted = sum(bucket.padding * bucket.dtype.itemsize for bucket in self.buckets)
        return wasted / max(1, self.nbytes - wasted)

    @property
    def wire_bytes(self) -> int:
        """What each rank sends in one step: every bucket reduced once and gathered once."""
        return sum(bucket.reduce_bytes + bucket.gather_bytes for bucket in self.buckets)


def make_plan(
    named_shapes: Mapping[str, Sequence[int]],
    groups: Sequence[Mapping[str, Any]],
    world_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    bucket_mb: float | None = None,
    grad_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Plan:
    """The plan of a model that need not exist: shapes by name, in the order of ``named_parameters()``.

    Args:
        named_shapes: the (global) shape of each parameter.
        groups: dicts with ``kind`` (``"adamw"`` or ``"muon"``) and ``params``, a list of names; parameters that no
            group lists are left out, as frozen ones are. ``state_dtype="int8"`` of an AdamW group matters too.
        world_size: the number of ranks.
        dtype: of all parameters.
        bucket_mb: 2^20 bytes of a bucket, roughly; None chooses.
        grad_dtype: of gradients; the parameters' if None.
        reduce_dtype: of gradients on the wire; their own if None.

    Raises:
        ValueError: for a kind, a name or a matrix that is none.
    """
    order = {name: position for position, name in enumerate(named_shapes)}
    specs = []
    for index, group in enumerate(groups):
        for name in group["params"]:
            if name not in order:
                raise ValueError(f"group {index} lists {name!r}, which named_shapes does not have")
            shape = tuple(int(size) for size in named_shapes[name])
            block = code_block(group, torch.empty(shape, device="meta")) if group["kind"] == "adamw" else 1
            description = (name, shape, contiguous_stride(shape), dtype, group["kind"], index)
            specs.append(ParameterSpec(*description, block=block))
    specs.sort(key=lambda spec: order[spec.name])
    return plan_parameters(specs, world_size, bucket_mb=bucket_mb, grad_dtype=grad_dtype, reduce_dtype=reduce_dtype)


def code_block(group: Mapping[str, Any], parameter: torch.Tensor) -> int:
    """The ``block`` of a parameter in a group of AdamW."""
    return CODE_BLOCK if group.get("state_dtype") == "int8" and has_codes(parameter) else 1


def plan_parameters(
    specs: Sequence[ParameterSpec],
    world_size: int,
    *,
    bucket_mb: float | None = None,
    grad_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Plan:
    """Buckets for ``specs``, which are listed in forward order; matrices first, each kind in backward order.

    Elementwise buckets come last: their wire time hides under the Newton-Schulz of the matrices. The dtypes of
    gradients change no place, so that states load whatever they are.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    families: dict[tuple[str, str, torch.dtype], list[int]] = {}
    for index in reversed(range(len(specs))):
        spec = specs[index]
        if spec.route not in ("adamw", "muon"):
            raise ValueError(f"{spec.name}: kind must be 'adamw' or 'muon', got {spec.route!r}")
        if spec.route == "muon" and len(spec.shape) < 2:
            raise ValueError(f"Muon takes matrices, got {spec.name} of shape {spec.shape}; give it to AdamW")
        if not spec.sharding:
            families.setdefault((spec.route, spec.device, spec.dtype), []).append(index)
    buckets: list[BucketPlan] = []
    for route in ("muon", "adamw"):
        for (family_route, _, _), members in families.items():
            if family_route == route:
                arrange = _matrix_buckets if route == "muon" else _elementwise_buckets
                buckets += arrange(specs, members, world_size, bucket_mb)
    found = (_with_gradients(bucket, grad_dtype, reduce_dtype) for bucket in buckets)
    return Plan(world_size, tuple(specs), tuple(found))


def _num_buckets(nbytes: int, bucket_mb: float | None) -> int:
    """At least four above 256 MB in total, so that update and wire overlap from bucket to bucket."""
    target = (bucket_mb or DEFAULT_BUCKET_MB) * 2**20
    wanted = -(-nbytes // int(max(1, target)))
    if bucket_mb is None and nbytes > DEFAULT_BUCKET_MB * 2**20:
        wanted = max(4, wanted)
    return max(1, wanted)


def _elementwise_buckets(
    specs: Sequence[ParameterSpec], members: list[int], world_size: int, bucket_mb: float | None
) -> Iterator[BucketPlan]:
    """One parameter behind another; the k-th bucket takes those whose middle lies in the k-th part of all bytes."""
    total = sum(specs[index].numel for index in members)
    count = _num_buckets(total * specs[members[0]].dtype.itemsize, bucket_mb)
    parts: dict[int, list[int]] = {}
    position = 0
    for index in members:
        middle = position + specs[index].numel / 2
        parts.setdefault(min(count - 1, int(middle * count / max(1, total))), []).append(index)
        position += specs[index].numel
    for part in sorted(parts):
        slots, end = _lay_out(specs, parts[part], 0)
        yield _bucket(specs, slots, -(-end // world_size), world_size)


def _matrix_buckets(
    specs: Sequence[ParameterSpec], members: list[int], world_size: int, bucket_mb: float | None
) -> Iterator[BucketPlan]:
    """Deal the matrices to owners over the whole model, then cut every owner's list into the same number of parts."""
    itemsize = specs[members[0]].dtype.itemsize
    matrices = [
        Matrix(index, specs[index].shape, specs[index].cost, specs[index].numel * itemsize) for index in members
    ]
    wanted = _num_buckets(sum(matrix.nbytes for matrix in matrices), bucket_mb)
    for owned in deal(matrices, world_size, wanted):
        layouts = []
        for mine in owned:
            # equal shapes lie side by side, so that a batch of them is one strided view
            shapes = list(dict.fromkeys(specs[index].shape for index in mine))
            layouts.append(_lay_out(specs, sorted(mine, key=lambda index: shapes.index(specs[index].shape)), 0))
        chunk = _round_up(max(end for _, end in layouts), CHUNK_ALIGNMENT)
        slots = [
            Slot(slot.parameter, rank * chunk + slot.offset) for rank, (mine, _) in enumerate(layouts) for slot in mine
        ]
        yield _bucket(specs, slots, chunk, world_size)


def _lay_out(specs: Sequence[ParameterSpec], members: Sequence[int], start: int) -> tuple[list[Slot], int]:
    slots, position = [], start
    for index in members:
        position = _round_up(position, specs[index].alignment)
        slots.append(Slot(index, position))
        position += specs[index].numel
    return slots, position


def _bucket(specs: Sequence[ParameterSpec], slots: Sequence[Slot], chunk: int, world_size: int) -> BucketPlan:
    first = specs[slots[0].parameter]
    alignment = max(CHUNK_ALIGNMENT, *(specs[slot.parameter].block for slot in slots))
    return BucketPlan(
        first.route,
        first.dtype,
        first.device,
        max(alignment, _round_up(chunk, alignment)),
        world_size,
        tuple(slots),
        tuple(specs[slot.parameter].numel for slot in slots),
        first.dtype,
        first.dtype,
    )


def _with_gradients(bucket: BucketPlan, grad_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> BucketPlan:
    kept = grad_dtype or bucket.dtype
    return replace(bucket, grad_dtype=kept, wire_dtype=reduce_dtype or kept)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a row-major tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
