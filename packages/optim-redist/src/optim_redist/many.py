"""Many tensors at once, in buckets: the tensors of a bucket share exchanges, whatever their shapes, dtypes and layouts.

Small messages cost time by number, not by size. The tensors of a bucket therefore share one all-to-all per phase: the
messages between two ranks lie one after the other, each at a multiple of 16 bytes, in the order of the tensors' names.
Moving a model from training mesh to inference mesh, or a checkpoint to another world size, is one call.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from optim_redist._recent import Recent
from optim_redist._running import collectives
from optim_redist._running.collectives import Team, Waitable
from optim_redist._running.rank_program import Message
from optim_redist._running.stage_program import StageProgram, stage_programs
from optim_redist._running.uncompiled import uncompiled
from optim_redist._running.views import Copy, copy_together, refuse_dtensor, resolved
from optim_redist.cost import CommModel
from optim_redist.errors import LayoutError, UnsupportedError, noting
from optim_redist.handle import Handle, done
from optim_redist.layout import Layout
from optim_redist.planning import plan
from optim_redist.plans import Plan

_ALIGNMENT = 16  # bytes; the size of the widest element
_CACHE_SIZE = 64

Name = TypeVar("Name", bound=Hashable)


class Item(NamedTuple):
    """One tensor to redistribute.

    Attributes:
        tensor: the local part of the source, None outside the source's ranks.
        shape: the global shape.
        src, dst: the layouts.
        dtype: needed where ``tensor`` is None, else the tensor's own.
    """

    tensor: Tensor | None
    shape: Sequence[int]
    src: Layout
    dst: Layout
    dtype: torch.dtype | None = None


class Segment(NamedTuple):
    """Where one message of one tensor lies in the bucket's buffer."""

    item: int
    message: Message
    offset: int
    num_bytes: int


class _BucketExchange:
    """Phase k of every plan of a bucket, as one exchange."""

    def __init__(
        self, bucket: Sequence[tuple[int, StageProgram]], k: int, members: Sequence[int], width: list[int]
    ) -> None:
        taking_part = [(item, stage.phases[k]) for item, stage in bucket if k < len(stage.phases)]
        self.sends, self.send_splits = _lay_out([(i, phase.sends) for i, phase in taking_part], members, width)
        self.receives, self.receive_splits = _lay_out([(i, phase.receives) for i, phase in taking_part], members, width)


def _lay_out(
    messages: Sequence[tuple[int, Sequence[Message]]], members: Sequence[int], width: list[int]
) -> tuple[list[Segment], dict[int, int]]:
    by_peer: dict[int, list[tuple[int, Message]]] = {member: [] for member in members}
    for item, found in messages:
        for message in found:
            by_peer[message.peer].append((item, message))
    segments: list[Segment] = []
    splits: dict[int, int] = {}
    offset = 0
    for member in members:
        start = offset
        for item, message in by_peer[member]:
            num_bytes = message.num_elements * width[item]
            segments.append(Segment(item, message, offset, num_bytes))
            offset += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        splits[member] = offset - start
    return segments, splits


class ManyProgram:
    """The compiled plans of many tensors on one rank.

    Args:
        names: the tensors' names, on which ranks must agree as on the plans; empty if names are not compared.
    """

    def __init__(
        self, plans: Sequence[Plan], bucket_bytes: int, group: ProcessGroup | None, names: Sequence[str] = ()
    ) -> None:
        self.plans, self._names = list(plans), tuple(names)
        self.rank = collectives.my_rank()
        self.team: Team | None = None
        members: tuple[int, ...] = ()
        if any(made.communicates for made in plans):
            ranks = {rank for made in plans for layout in (made.src, made.dst) for rank in layout.mesh.ranks}
            self.team = Team.of(ranks, group)
            members = self.team.members
            if self.rank not in members:
                raise UnsupportedError(
                    f"rank {self.rank} is in no layout and not in the group; only ranks {members} take part"
                )
        self.stages: list[StageProgram] = []
        for made in plans:
            (stage,) = stage_programs(made, self.rank)
            self.stages.append(stage)
        width = [made.itemsize for made in plans]
        self.buckets = _fill_buckets(plans, bucket_bytes)
        self._bucket_bytes = bucket_bytes
        self.exchanges: list[list[_BucketExchange]] = []
        for numbers in self.buckets:
            bucket = [(number, self.stages[number]) for number in numbers]
            depth = max(len(stage.phases) for _, stage in bucket)
            self.exchanges.append([_BucketExchange(bucket, k, members, width) for k in range(depth)])
        self._compared = self.team is None

    def device_of(self, tensors: Sequence[Tensor | None]) -> torch.device:
        """The device of the tensors, and so of the targets."""
        return next((t.device for t in tensors if t is not None), collectives.device_of(self.team))

    def run(
        self, tensors: list[Tensor | None], async_op: bool
    ) -> Generator[Waitable | None, None, list[Tensor | None]]:
        """Yields once for every exchange it has started; the caller waits and resumes. Returns the targets."""
        device = self.device_of(tensors)
        self.compare()
        tensors = [resolved(tensor) for tensor in tensors]
        targets: list[Tensor | None] = [None] * len(tensors)
        for bucket, (numbers, exchanges) in enumerate(zip(self.buckets, self.exchanges)):
            for number in numbers:
                targets[number] = self.stages[number].allocate(device)
            communicates = any(self.plans[number].communicates for number in numbers)
            for k, exchange in enumerate(exchanges):
                with noting(self._where, f"in exchange {k + 1} of {len(exchanges)} of", bucket):
                    sent = self._packed(exchange, tensors, targets, device)
                    received = torch.empty(sum(exchange.receive_splits.values()), dtype=torch.uint8, device=device)
                    work = None
                    if communicates:
                        assert self.team is not None, "plans that communicate have a team"
                        work = self.team.exchange(
                            received, sent, exchange.receive_splits, exchange.send_splits, async_op=async_op
                        )
                    taking_part = [number for number in numbers if k < len(self.stages[number].phases)]
                    for number in taking_part:
                        self.stages[number].local(k, tensors[number], targets[number])
                    yield work
                    self._unpack(k, exchange, received, taking_part, tensors, targets)
                    # free these buffers before the next exchange makes its own
                    del sent, received, work
            for number in numbers:
                tensors[number] = None
        return targets

    def _packed(
        self,
        exchange: _BucketExchange,
        tensors: Sequence[Tensor | None],
        targets: Sequence[Tensor | None],
        device: torch.device,
    ) -> Tensor:
        """A buffer with everything that an exchange sends."""
        sent = torch.empty(sum(exchange.send_splits.values()), dtype=torch.uint8, device=device)
        packing: list[Copy] = []
        for segment in exchange.sends:
            number = segment.item
            stage = self.stages[number]
            slot = slot_of(sent, segment, stage.bits)
            packing += stage.packing(segment.message, slot, tensors[number], targets[number])
        copy_together(packing)
        return sent

    def _unpack(
        self,
        k: int,
        exchange: _BucketExchange,
        received: Tensor,
        taking_part: Sequence[int],
        tensors: Sequence[Tensor | None],
        targets: Sequence[Tensor | None],
    ) -> None:
        """Unpack what came in exchange k into the targets of the tensors that take part in it."""
        arrived: dict[int, list[tuple[Message, Tensor]]] = {number: [] for number in taking_part}
        for segment in exchange.receives:
            slot = slot_of(received, segment, self.stages[segment.item].bits)
            arrived[segment.item].append((segment.message, slot))
        unpacking: list[Copy] = []
        for number in taking_part:
            unpacking += self.stages[number].finish_messages(k, arrived[number], tensors[number], targets[number])
        copy_together(unpacking)
        for number in taking_part:
            self.stages[number].end(k, targets[number])

    def _where(self, what: str, bucket: int) -> str:
        return f"{what} bucket {bucket + 1} of {len(self.buckets)} on rank {self.rank}"

    def compare(self) -> None:
        """At the first call, make sure that all ranks have the same plans, names and ``bucket_bytes``."""
        if not self._compared:
            assert self.team is not None, "plans that communicate have a team"
            texts = [made.canonical_text() for made in self.plans]
            names = [f"name.{number}: {name}" for number, name in enumerate(self._names)]
            with noting("in the comparison of {} plans on rank {}".format, len(self.plans), self.rank):
                self.team.compare("\n".join([f"bucket_bytes: {self._bucket_bytes}", *names, *texts]))
            self._compared = True


def slot_of(buffer: Tensor, segment: Segment, bits: torch.dtype) -> Tensor:
    """A segment of a buffer of bytes, as integers of the tensor's width."""
    return buffer[segment.offset : segment.offset + segment.num_bytes].view(bits)


def _fill_buckets(plans: Sequence[Plan], bucket_bytes: int) -> list[list[int]]:
    """Consecutive plans, one or more per bucket, whose busiest ranks together move at most ``bucket_bytes``."""
    buckets: list[list[int]] = []
    room = -1
    for number, made in enumerate(plans):
        size = sum(step.bytes for step in made.steps)
        if size > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(number)
        room -= size
    return buckets


_many_programs: Recent[tuple[object, ManyProgram]] = Recent(_CACHE_SIZE)


@overload
def redistribute_many(
    items: Mapping[Name, Item | tuple[Any, ...]],
    *,
    bucket_bytes: int = ...,
    group: ProcessGroup | None = ...,
    async_op: Literal[False] = ...,
    cost_model: CommModel | None = ...,
) -> dict[Name, Tensor | None]: ...


@overload
def redistribute_many(
    items: Sequence[Item | tuple[Any, ...]],
    *,
    bucket_bytes: int = ...,
    group: ProcessGroup | None = ...,
    async_op: Literal[False] = ...,
    cost_model: CommModel | None = ...,
) -> list[Tensor | None]: ...


@overload
def redistribute_many(
    items: Mapping[Name, Item | tuple[Any, ...]],
    *,
    bucket_bytes: int = ...,
    group: ProcessGroup | None = ...,
    async_op: Literal[True],
    cost_model: CommModel | None = ...,
) -> Handle[dict[Name, Tensor | None]]: ...


@overload
def redistribute_many(
    items: Sequence[Item | tuple[Any, ...]],
    *,
    bucket_bytes: int = ...,
    group: ProcessGroup | None = ...,
    async_op: Literal[True],
    cost_model: CommModel | None = ...,
) -> Handle[list[Tensor | None]]: ...


@overload
def redistribute_many(
    items: Mapping[Name, Item | tuple[Any, ...]],
    *,
    bucket_bytes: int = ...,
    group: ProcessGroup | None = ...,
    async_op: bool,
    cost_model: CommModel | None = ...,
) -> dict[Name, Tensor | None] | Handle[dict[Name, Tensor | None]]: ...


@overload
def redistribute_many(
    items: Sequence[Item | tuple[Any, ...]],
    *,
    bucket_bytes: int = ...,
    group: ProcessGroup | None = ...,
    async_op: bool,
    cost_model: CommModel | None = ...,
) -> list[Tensor | None] | Handle[list[Tensor | None]]: ...


@uncompiled
def redistribute_many(
    items: Mapping[Name, Item | tuple[Any, ...]] | Sequence[Item | tuple[Any, ...]],
    *,
    bucket_bytes: int = 256 * 2**20,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    cost_model: CommModel | None = None,
) -> Any:
    """This rank's part of every target: a dict for a dict (in its order), a list for a sequence.

    Every rank of any of the layouts must call with the same names, shapes, dtypes and layouts. The tensors of a dict
    travel in the order of their names, so the dict's own order may differ between ranks. Values move, gradients do not.

    Args:
        items: ``Item`` or ``(tensor, shape, src, dst[, dtype])`` each.
        bucket_bytes: about the most bytes that the busiest rank moves in one exchange.
        group: whose ranks take part; by default the ranks of all layouts.
        async_op: return a ``Handle``; only the first exchange overlaps with what the caller does next. The caller must
            not write to the tensors before ``wait()``.
        cost_model: as for ``plan``.

    Raises:
        LayoutError: if a tensor's shape or dtype is not what its item says.
        PlanMismatchError: in the first call with these tensors, if ranks differ in tensors, in options, or in names
            (compared if all are strings).
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    names = _in_order(items) if isinstance(items, Mapping) else list(range(len(items)))
    chosen = [_as_item(name, cast(Any, items)[name]) for name in names]
    if not chosen:
        nothing: dict[Name, Tensor | None] | list[Tensor | None] = {} if isinstance(items, Mapping) else []
        return Handle(done(nothing)) if async_op else nothing
    plans = [_plan_of(name, item, cost_model) for name, item in zip(names, chosen)]
    # names that are not strings need not have the same text on every rank
    agreed = tuple(names) if all(isinstance(name, str) for name in names) else ()
    key = (tuple(map(id, plans)), bucket_bytes, id(group), collectives.my_rank(), agreed)
    world = collectives.world()
    known = _many_programs.find(key)
    if known is None or known[0] is not world or any(a is not b for a, b in zip(known[1].plans, plans)):
        known = (world, ManyProgram(plans, bucket_bytes, group, agreed))
        _many_programs.put(key, known)
    program = known[1]
    for name, item, stage in zip(names, chosen, program.stages):
        refuse_dtensor(item.tensor, f"rank {program.rank}: {name!r}")
        found = None if item.tensor is None else tuple(item.tensor.shape)
        if found != stage.src_shape:
            raise LayoutError(
                f"rank {program.rank}: {name!r} has local shape {found}, its source layout says {stage.src_shape}"
            )
    order = list(items) if isinstance(items, Mapping) else None

    tensors = [item.tensor for item in chosen]

    def run() -> Generator[Waitable | None, None, Any]:
        targets = yield from program.run([*tensors], async_op)
        if order is None:
            return targets
        by_name = dict(zip(names, targets))
        return {name: by_name[name] for name in order}

    handle = Handle(run(), program.device_of(tensors) if async_op else None)
    return handle if async_op else handle.wait()


def _in_order(items: Mapping[Any, Any]) -> list[Any]:
    try:
        return sorted(items)
    except TypeError:
        listed = ", ".join(map(repr, items))
        raise LayoutError(
            f"tensors of a dict travel in the order of their names, so these are names that have an order, got {listed}"
        ) from None


def _as_item(name: Hashable, given: Any) -> Item:
    if isinstance(given, tuple | list) and len(given) in (4, 5):
        return Item(*given)
    what = f"{type(given).__name__} of {len(given)}" if isinstance(given, tuple | list) else type(given).__name__
    raise LayoutError(f"{name!r} is a {what}, not an Item or (tensor, shape, src, dst[, dtype])")


def _plan_of(name: Hashable, item: Item, cost_model: CommModel | None) -> Plan:
    if item.tensor is not None and item.dtype is not None and item.dtype != item.tensor.dtype:
        raise LayoutError(f"{name!r} is a tensor of {item.tensor.dtype}, and dtype={item.dtype} was given with it")
    dtype = item.dtype if item.tensor is None else item.tensor.dtype
    if dtype is None:
        raise LayoutError(f"{name!r} has no tensor on this rank, so its dtype has to be given")
    return plan(item.shape, dtype, item.src, item.dst, cost_model=cost_model, planners=("direct", "relay"))
