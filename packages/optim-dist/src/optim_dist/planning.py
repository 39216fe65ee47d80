"""Planning: every parameter gets a bucket, a place in it, and owners. Pure; ``plan`` says what a plan is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from numbers import Integral, Real
from typing import Any

import torch

from optim_dist._dealing import Matrix, deal
from optim_dist.plan import DTYPES, BucketPlan, ParameterSpec, Plan, Slot
from optim_kernels.adamw_groups import CODE_BLOCK, has_codes

CHUNK_ALIGNMENT = 128  # elements
DEFAULT_BUCKET_MB = 256  # measured best for a step without backward overlap on four H200s


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
        bucket_mb: approximate size of a bucket, in 2^20 bytes; None chooses.
        grad_dtype: of gradients; the parameters' if None.
        reduce_dtype: of gradients on the wire; their own if None.

    Raises:
        ValueError: for an unknown kind or name, a Muon parameter that is no matrix, a name that is listed twice, a
            shape or dtype that no parameter has, and numbers out of range.
    """
    for option, value in {"dtype": dtype, "grad_dtype": grad_dtype, "reduce_dtype": reduce_dtype}.items():
        if value not in DTYPES and (value is not None or option == "dtype"):
            raise ValueError(f"{option} must be one of {DTYPES}, got {value!r}")
    order = {name: position for position, name in enumerate(named_shapes)}
    specs = []
    group_of: dict[str, int] = {}
    for index, group in enumerate(groups):
        for name in group["params"]:
            if name not in order:
                raise ValueError(f"group {index} lists {name!r}, which named_shapes does not have")
            if name in group_of:
                raise ValueError(f"group {index} lists {name!r}, which group {group_of[name]} has already")
            group_of[name] = index
            shape = _checked_shape(name, named_shapes[name])
            kind: Any = group.get("kind")
            block = code_block(group, torch.empty(shape, device="meta")) if kind == "adamw" else 1
            specs.append(ParameterSpec(name, shape, contiguous_stride(shape), dtype, kind, index, block=block))
    specs.sort(key=lambda spec: order[spec.name])
    return plan_parameters(specs, world_size, bucket_mb=bucket_mb, grad_dtype=grad_dtype, reduce_dtype=reduce_dtype)


def _checked_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(shape)
    if not all(isinstance(size, Integral) and size >= 0 for size in sizes):
        raise ValueError(f"{name}: a shape lists whole numbers of at least 0, got {sizes}")
    return tuple(map(int, sizes))


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

    Elementwise buckets come last: their wire time hides under the Newton–Schulz of the matrices. The dtypes of
    gradients do not change where parameters lie, so that states load whatever these dtypes are.
    """
    if not isinstance(world_size, Integral) or world_size < 1:
        raise ValueError(f"world_size must be a whole number of at least 1, got {world_size!r}")
    check_positive("bucket_mb", bucket_mb, finite=True)
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


def check_positive(name: str, value: float | None, *, finite: bool = False) -> None:
    """Refuse values that are no positive number; None is allowed."""
    if value is None:
        return
    if not isinstance(value, Real) or not value > 0 or (finite and value == inf):
        raise ValueError(f"{name} must be positive{' and finite' if finite else ''}, got {value!r}")


def _num_buckets(nbytes: int, bucket_mb: float | None) -> int:
    """How many buckets: by default at least four above 256 MB, so that one is updated while another is on the wire."""
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
        slots, end = _lay_out(specs, parts[part])
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
            layouts.append(_lay_out(specs, sorted(mine, key=lambda index: shapes.index(specs[index].shape))))
        chunk = _round_up(max(end for _, end in layouts), CHUNK_ALIGNMENT)
        slots = [
            Slot(slot.parameter, rank * chunk + slot.offset) for rank, (mine, _) in enumerate(layouts) for slot in mine
        ]
        yield _bucket(specs, slots, chunk, world_size)


def _lay_out(specs: Sequence[ParameterSpec], members: Sequence[int]) -> tuple[list[Slot], int]:
    """A place for each member, one behind another, and where the last one ends."""
    slots, position = [], 0
    for index in members:
        position = _round_up(position, specs[index].alignment)
        slots.append(Slot(index, position))
        position += specs[index].numel
    return slots, position


def _bucket(specs: Sequence[ParameterSpec], slots: Sequence[Slot], chunk: int, world_size: int) -> BucketPlan:
    first = specs[slots[0].parameter]
    alignment = max(CHUNK_ALIGNMENT, *(specs[slot.parameter].block for slot in slots))
    return BucketPlan(
        route=first.route,
        dtype=first.dtype,
        device=first.device,
        chunk=max(alignment, _round_up(chunk, alignment)),
        world_size=world_size,
        slots=tuple(slots),
        sizes=tuple(specs[slot.parameter].numel for slot in slots),
        grad_dtype=first.dtype,  # see ``_with_gradients``
        wire_dtype=first.dtype,
    )


def _with_gradients(bucket: BucketPlan, grad_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> BucketPlan:
    kept = grad_dtype or bucket.dtype
    return replace(bucket, grad_dtype=kept, wire_dtype=reduce_dtype or kept)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a row-major tensor."""
    return torch.empty(tuple(shape), device="meta").stride()
