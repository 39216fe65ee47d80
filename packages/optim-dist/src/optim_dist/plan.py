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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch

from optim_dist._dealing import newton_schulz_flops
from optim_dist._plain_names import plain_names

RouteName = Literal["adamw", "muon"]  # the update that a parameter takes: what its group calls ``kind``

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of parameters, gradients and their sums
MATRIX_ALIGNMENT = 256  # bytes, for matrix products on the weights
VECTOR_ALIGNMENT = 16  # bytes
FORMAT = "optim-dist.plan/1"


@dataclass(frozen=True)
class ParameterSpec:
    """What the plan must know of a parameter. Specs are listed in forward order; backward begins with the last."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    route: RouteName
    group: int = 0
    device: str = "cpu"
    matrix_shapes: tuple[tuple[int, ...], ...] = ()  # of views that are orthogonalized one by one, if not the whole
    sharding: str = ""  # how a DTensor is cut over ranks; it stays there, outside buckets
    block: int = 1  # elements, counted from the start, that share a scale and so have one owner

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def alignment(self) -> int:
        """In elements: the larger of the block and the alignment of its kind, which are powers of two."""
        in_bytes = MATRIX_ALIGNMENT if len(self.shape) >= 2 else VECTOR_ALIGNMENT
        return max(self.block, in_bytes // self.dtype.itemsize)

    @property
    def cost(self) -> int:
        """Floating-point operations of its Newton–Schulz iteration; 0 for an elementwise parameter."""
        if self.route != "muon":
            return 0
        return sum(newton_schulz_flops(shape) for shape in self.matrix_shapes or (self.shape,))

    def describe(self) -> list[Any]:
        return [
            *(self.name, list(self.shape), list(self.stride), str(self.dtype), self.route, self.group),
            *(self.device, [list(shape) for shape in self.matrix_shapes], self.sharding),
            # without blocks the description is that of versions before there were any, so that their states still fit
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
        """What ``rank`` owns (every rank if None), in the order of the storage."""
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
        """SHA-256 of the structure alone: names, shapes, routes, places; hyperparameters do not enter."""
        return hashlib.sha256(json.dumps(self.describe(), separators=(",", ":")).encode()).hexdigest()

    @cached_property
    def plain_hash(self) -> str:
        """The hash that the plan has where names are those of the model without wrappers."""
        names = plain_names(spec.name for spec in self.parameters)
        return replace(self, parameters=tuple(replace(spec, name=names[spec.name]) for spec in self.parameters)).hash

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

    @cached_property
    def scalar_dtype(self) -> torch.dtype:
        """Of norms of gradients and of what multiplies gradients: fp64 if a parameter is, else fp32."""
        is_wide = any(spec.dtype == torch.float64 for spec in self.parameters)
        return torch.float64 if is_wide else torch.float32

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
        """Newton–Schulz flops of every rank."""
        loads = [0] * self.world_size
        for bucket in self.buckets:
            for piece in bucket.pieces():
                loads[piece.rank] += self.parameters[piece.parameter].cost
        return loads

    @property
    def imbalance(self) -> float:
        """The most loaded rank's Newton–Schulz work over the mean; 1.0 is even."""
        loads = self.loads()
        return max(loads) * self.world_size / sum(loads) if any(loads) else 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets of parameters, padding included: what each rank holds."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of all buckets of gradients, padding included."""
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


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in files and tables, such as ``float32``."""
    return str(dtype).removeprefix("torch.")
