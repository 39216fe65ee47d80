"""Tensors that wander between random layouts, what every rank has to hold of them, and what plans promise.

The reference is one process' view: a tensor of bits and who owns which, or numbers and what contributions add up to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from redist_cases import combined, part_of
from torch import Tensor
from torch.distributed import tensor as dtensor_package
from torch.distributed.tensor import Partial, Replicate, Shard, placement_types

from optim_redist import (
    Block,
    Chunk,
    Cyclic,
    Intervals,
    Layout,
    Mesh,
    Plan,
    Ragged,
    Strided,
    parse_layout,
    same_ownership,
    verify,
)
from optim_redist._dtypes import check_started
from optim_redist._running.collectives import Team
from optim_redist.errors import UnsupportedError

StridedShard = placement_types._StridedShard
# torch 2.9 has no orders of axes, copies no float4, and its DTensor moves nothing to placements with pending reductions
IS_NEW = hasattr(dtensor_package._dtensor_spec, "ShardOrderEntry")
SIZES = [(1,), (2,), (3,), (4,), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1)]
# moved bit by bit
BITS = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, *([torch.float4_e2m1fn_x2] if IS_NEW else [])),
]
# added, too
NUMBERS = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]
COMBINE = {"sum": torch.add, "avg": torch.add, "min": torch.minimum, "max": torch.maximum, "product": torch.mul}


# -- random layouts


def random_shape(draw: Random) -> tuple[int, ...]:
    return tuple(draw.choice([0, 1, 1, 2, 3, 4, 5, 7, 8, 9]) for _ in range(draw.choice([0, 1, 1, 2, 2, 2, 3])))


def random_mesh(draw: Random, world_size: int) -> Mesh:
    """A grid over some ranks of the world, in any order."""
    sizes = draw.choice([sizes for sizes in SIZES if prod(sizes) <= world_size])
    ranks = draw.sample(range(world_size), prod(sizes))
    if draw.random() < 0.6:
        ranks.sort()
    return Mesh(sizes, ranks=ranks, names=draw.choice([None, "abc"[: len(sizes)]]))


def random_layout(draw: Random, mesh: Mesh, shape: Sequence[int], ops: Sequence[str] = ()) -> Layout:
    """Any kind on any dimension, and pending reductions of some of ``ops``."""
    axes: list[list[int]] = [[] for _ in shape]
    free = []
    for axis in range(mesh.num_axes):
        if shape and draw.random() < 0.7:
            axes[draw.randrange(len(shape))].append(axis)
        else:
            free.append(axis)
    dims: list[Any] = []
    for n, used in zip(shape, axes):
        draw.shuffle(used)
        dims.append((tuple(used), _kind(draw, n, [mesh.sizes[axis] for axis in used])) if used else None)
    op = draw.choice(ops) if ops else "sum"
    mixed = [op] if op not in ("sum", "avg") else [o for o in ("sum", "avg") if o in ops]
    return Layout(mesh, dims, {axis: draw.choice(mixed) for axis in free if ops and draw.random() < 0.6})


def _kind(draw: Random, n: int, sizes: Sequence[int]) -> Any:
    parts = prod(sizes)
    owner = [draw.randrange(parts) for _ in range(n)]
    return draw.choice(
        [
            Block(),
            Chunk(),
            Cyclic(draw.choice([1, 2, 3])),
            Strided(tuple(draw.choice([1, 2, 3]) for _ in sizes), draw.random() < 0.3),
            Ragged([0, *sorted(draw.randint(0, n) for _ in range(parts - 1)), n]),
            Intervals([[(k, k + 1) for k in range(n) if owner[k] == c] for c in range(parts)]),
        ]
    )


def random_placements(draw: Random, num_axes: int, num_dims: int, op: str | None) -> list[Any]:
    """One for each mesh axis, strided shards among them; pending reductions are all ``op``."""
    dims = range(num_dims)
    choices = [Replicate(), *map(Shard, dims), *map(Shard, dims), *([Partial(op)] if op else [])]
    choices += [StridedShard(dim, split_factor=draw.choice([2, 3])) for dim in dims if draw.random() < 0.2]
    return [draw.choice(choices) for _ in range(num_axes)]


def random_order(draw: Random, placements: Sequence[Any]) -> dict[int, tuple[int, ...]] | None:
    """An order of axes for some dimensions that several plain shards split; None before torch has them."""
    if not IS_NEW or draw.random() < 0.7:
        return None
    if any(isinstance(placement, StridedShard) for placement in placements):
        return None
    axes_of: dict[int, list[int]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            axes_of.setdefault(placement.dim, []).append(axis)
    return {dim: tuple(draw.sample(axes, len(axes))) for dim, axes in axes_of.items()}


# -- tensors


@dataclass
class Tracked:
    """A tensor on its way, as every rank knows it.

    Attributes:
        full: all of it as bytes, (*shape, itemsize), or as numbers of double precision.
        layout: where it is.
        mine: this rank's part, None outside the layout's mesh.
    """

    dtype: torch.dtype
    full: Tensor
    layout: Layout
    mine: Tensor | None
    is_number: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.full.shape if self.is_number else self.full.shape[:-1])

    @property
    def ops(self) -> list[str]:
        """The reductions that can start here."""
        return startable(self.dtype) if self.is_number else []

    def part(self, layout: Layout, rank: int) -> Tensor | None:
        """What a rank holds in a layout without contributions."""
        if self.is_number:
            part = part_of(self.full, layout, rank)
            return None if part is None else part.to(self.dtype)
        bits = part_of(self.full, Layout(layout.mesh, [*layout.dims, None]), rank)
        return None if bits is None else bits.view(self.dtype).reshape(bits.shape[:-1])

    def moved(self, layout: Layout, mine: Tensor | None) -> Tracked:
        return replace(self, layout=layout, mine=mine)


def startable(dtype: torch.dtype) -> list[str]:
    name = str(dtype).removeprefix("torch.")
    found = []
    for op in COMBINE:
        try:
            check_started([op], name)
        except UnsupportedError:
            continue
        found.append(op)
    return found


def wide(tensor: Tensor) -> Tensor:
    """The numbers of a part, with room for sums of them."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().unsqueeze(-1).contiguous().view(torch.uint8)


def fresh(
    draw: Random, rank: int, layout: Layout, shape: Sequence[int], dtype: torch.dtype, *, is_number: bool = False
) -> Tracked:
    """New values in a layout; contributions are small whole numbers that no order of adding rounds."""
    seed = draw.randrange(2**31)
    generator = torch.Generator().manual_seed(seed)
    if not (layout.partial or is_number) and (dtype not in NUMBERS or draw.random() < 0.5):
        top = 2 if dtype == torch.bool else 256
        full = torch.randint(top, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
        made = Tracked(dtype, full, layout, None, False)
        made.mine = made.part(layout, rank)
        return made
    counts = [(op, layout.mesh.sizes[axis]) for axis, op in layout.partial]
    divisor = prod(count for op, count in counts if op == "avg")
    signed = dtype.is_floating_point or dtype.is_complex or dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    several = [
        torch.randint(-2 if signed else 0, 3, tuple(shape), generator=generator).double() * divisor
        for _ in range(prod(count for _, count in counts))
    ]
    if dtype.is_complex:
        several = [torch.complex(part, part.flip(list(range(part.ndim)))) for part in several]
    op = counts[0][0] if counts else "sum"
    # no negative zeros: a sum turns them into zeros
    made = Tracked(dtype, reduce(COMBINE[op], several) / divisor + 0.0, layout, None, True)
    if rank in layout.mesh.coordinates:
        number = layout.linear(layout.mesh.coordinates[rank], [axis for axis, _ in layout.partial])
        made.mine = part_of(several[number], layout, rank).to(dtype)
    return made


def disguised(draw: Random, tensor: Tensor | None, *, is_written: bool = False) -> Tensor | None:
    """The same values in other memory: with gaps, other strides, somewhere in a storage, or still to be conjugated."""
    if tensor is None or not tensor.ndim:
        return tensor
    how = draw.choice(["as is", "as is", "turned", "gaps", "inside", "conjugated"])
    if how == "turned":
        dims = list(range(tensor.ndim))
        draw.shuffle(dims)
        return _copy(tensor.permute(dims)).permute([dims.index(k) for k in range(tensor.ndim)])
    if how == "gaps":
        room = torch.empty([2 * n + 1 for n in tensor.shape], dtype=tensor.dtype)
        return _filled(room[tuple(slice(1, 2 * n + 1, 2) for n in tensor.shape)], tensor)
    if how == "inside":
        room = torch.empty(tensor.numel() + 3, dtype=tensor.dtype)
        return _filled(room[draw.randrange(4) :][: tensor.numel()].view(tensor.shape), tensor)
    if how == "conjugated" and not is_written and tensor.dtype in (torch.complex64, torch.complex128):
        return tensor.conj().resolve_conj().conj()
    return tensor


def _copy(tensor: Tensor) -> Tensor:
    return _filled(torch.empty(tensor.shape, dtype=tensor.dtype), tensor)


def _filled(room: Tensor, tensor: Tensor) -> Tensor:
    _bits(room).copy_(_bits(tensor.resolve_conj()))
    return room


def _bits(tensor: Tensor) -> Tensor:
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(widths[tensor.element_size()]) if tensor.element_size() in widths else tensor


def everyones(tensor: Tracked) -> list[Tensor | None]:
    """Every rank's part."""
    parts: list[Any] = [None] * dist.get_world_size()
    # as bytes: torch does not pickle all types
    dist.all_gather_object(parts, None if tensor.mine is None else _bytes(tensor.mine))
    return [None if part is None else part.view(tensor.dtype).reshape(part.shape[:-1]) for part in parts]


# -- what has to hold


def check_moved(before: Tracked, dst: Layout, found: Tensor | None, rank: int) -> Tracked:
    """The tensor in its new layout, with the very bits that it has there; every rank of the world calls."""
    assert (found is not None) == (rank in dst.mesh.coordinates), "a part for the ranks of the target"
    if found is not None:
        assert found.dtype == before.dtype
        assert tuple(found.shape) == dst.local_shape(before.shape, rank)
    if not dst.partial:
        wanted = before.part(dst, rank)
        if found is not None:
            # the sign of a zero depends on what it was made of
            same = torch.equal(wide(found), wide(wanted)) if before.is_number else same_bits(found, wanted)
            assert same, f"{found} for {wanted}"
    else:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, None if found is None else wide(found))
        whole = combined(dst, before.shape, {r: parts[r] for r in dst.mesh.ranks})
        assert torch.equal(whole, before.full), f"{whole} for {before.full}"
    return before.moved(dst, found)


def check_layout(layout: Layout, shape: Sequence[int]) -> None:
    """It can be written, read and made simpler without a change."""
    assert parse_layout(str(layout), layout.mesh, num_dims=len(shape)) == layout
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    simple = layout.canonical(shape)
    assert same_ownership(simple, layout, shape)
    assert simple.canonical(shape) == simple
    if not layout.partial:
        cut = Layout.from_slices(layout.mesh, shape, layout.slices(shape))
        for rank in layout.mesh.ranks:
            assert cut.slices(shape)[rank] == layout.slices(shape)[rank]


def check_plan(made: Plan) -> None:
    """What a plan says of itself is true and survives being written and read."""
    done = verify(made)
    most = max([*done.received.values(), *done.sent.values()], default=0)
    assert made.bounds.lb <= most <= made.bounds.lb * made.volume_ratio + 1e-9 * most
    assert made.communicates == bool(most)
    assert done.peak * made.itemsize <= made.peak_bytes
    assert made.memory_limit is None or made.peak_bytes <= made.memory_limit
    again = Plan.from_json(json.loads(json.dumps(made.to_json())))
    assert (again, again.hash) == (made, made.hash)
    assert str(made.explain()).startswith(str(made)[:40])


class Wire:
    """What this rank sends and receives of tensors, in bytes."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        self._compares = False

    @contextmanager
    def tapped(self) -> Iterator[None]:
        whole, lists, compare = Team.exchange, Team.exchange_lists, Team.compare
        wire = self

        def exchange(team: Team, received: Tensor, sent: Tensor, came: Any, went: Any, **options: Any) -> Any:
            if team.is_whole and not wire._compares:
                assert not came.get(dist.get_rank())
                assert not went.get(dist.get_rank())
                wire.sent, wire.received = wire.sent + sum(went.values()), wire.received + sum(came.values())
                assert (sent.nbytes, received.nbytes) == (sum(went.values()), sum(came.values()))
            return whole(team, received, sent, came, went, **options)

        def exchange_lists(team: Team, incoming: Any, outgoing: Any, *others: Any, **options: Any) -> Any:
            if not wire._compares:
                wire.sent += sum(buffer.nbytes for buffer in outgoing.values())
                wire.received += sum(buffer.nbytes for buffer in incoming.values())
            return lists(team, incoming, outgoing, *others, **options)

        def quietly(team: Team, text: str) -> None:
            wire._compares = True
            try:
                compare(team, text)
            finally:
                wire._compares = False

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Team, "exchange", exchange)
            patch.setattr(Team, "exchange_lists", exchange_lists)
            patch.setattr(Team, "compare", quietly)
            yield

    @contextmanager
    def expecting(self, made: Sequence[Plan], *, aligned_to: int = 1) -> Iterator[None]:
        """This rank moves within the block what the plans say, to the byte; messages may be padded."""
        before, rank = (self.received, self.sent), dist.get_rank()
        yield
        found = [verify(one) for one in made]
        for moved, said in (
            (self.received - before[0], [done.received.get(rank, 0) * one.itemsize for done, one in zip(found, made)]),
            (self.sent - before[1], [done.sent.get(rank, 0) * one.itemsize for done, one in zip(found, made)]),
        ):
            messages = sum(map(bool, said)) * 3 * max((len(one.steps) for one in made), default=0)
            assert 0 <= moved - sum(said) <= messages * (aligned_to - 1), "bytes of the wire"
