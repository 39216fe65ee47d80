"""Many tensors at once, in buckets: the tensors of a bucket share exchanges, whatever their shapes, dtypes and layouts.

Small messages cost time by number, not by size. The tensors of a bucket therefore share one all-to-all per phase: the
messages between two ranks lie one after the other, each at a multiple of 16 bytes, in the order of the tensors' names.
Moving a model from training mesh to inference mesh, or a checkpoint to another world size, is one call.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack, cast, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from optim_redist._compiling.uncompiled import uncompiled
from optim_redist._running import collectives
from optim_redist._running.collectives import Waitable
from optim_redist._running.given import (
    refuse_freed,
    refuse_other_kinds,
    refuse_other_than_values,
    refuse_undonatable,
    waited_for,
)
from optim_redist._running.many_program import ManyProgram
from optim_redist._tools.recent import Recent
from optim_redist.cost import CommModel
from optim_redist.errors import LayoutError, RedistError
from optim_redist.handle import Handle, done
from optim_redist.layout import Layout, PartialInit
from optim_redist.planning import check_choices, plan, whole_bytes
from optim_redist.plans import Plan

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


_many_programs: Recent[tuple[object, ManyProgram]] = Recent(_CACHE_SIZE)


class _Options(TypedDict, total=False):
    """The options beside ``async_op``, which decides what is returned."""

    bucket_bytes: int
    memory_limit: int | None
    donate: bool
    group: ProcessGroup | None
    cost_model: CommModel | None
    partial_init: PartialInit


_Named = Mapping[Name, Item | tuple[Any, ...]]
_Listed = Sequence[Item | tuple[Any, ...]]


@overload
def redistribute_many(
    items: _Named[Name], *, async_op: Literal[False] = ..., **options: Unpack[_Options]
) -> dict[Name, Tensor | None]: ...


@overload
def redistribute_many(
    items: _Listed, *, async_op: Literal[False] = ..., **options: Unpack[_Options]
) -> list[Tensor | None]: ...


@overload
def redistribute_many(
    items: _Named[Name], *, async_op: Literal[True], **options: Unpack[_Options]
) -> Handle[dict[Name, Tensor | None]]: ...


@overload
def redistribute_many(
    items: _Listed, *, async_op: Literal[True], **options: Unpack[_Options]
) -> Handle[list[Tensor | None]]: ...


@overload
def redistribute_many(
    items: _Named[Name], *, async_op: bool, **options: Unpack[_Options]
) -> dict[Name, Tensor | None] | Handle[dict[Name, Tensor | None]]: ...


@overload
def redistribute_many(
    items: _Listed, *, async_op: bool, **options: Unpack[_Options]
) -> list[Tensor | None] | Handle[list[Tensor | None]]: ...


@uncompiled
def redistribute_many(
    items: Mapping[Name, Item | tuple[Any, ...]] | Sequence[Item | tuple[Any, ...]],
    *,
    bucket_bytes: int = 256 * 2**20,
    memory_limit: int | None = None,
    donate: bool = False,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    cost_model: CommModel | None = None,
    partial_init: PartialInit = "owner",
) -> Any:
    """This rank's part of every target: a dict for a dict (in its order), a list for a sequence.

    Every rank of any of the layouts must call with the same names, shapes, dtypes and layouts. The tensors of a dict
    travel in the order of their names, so the dict's own order may differ between ranks. Values move, gradients do not.

    Args:
        items: ``Item`` or ``(tensor, shape, src, dst[, dtype])`` each.
        bucket_bytes: about the most bytes that the busiest rank moves in one exchange.
        memory_limit: bytes that no rank may exceed with all sources, all targets, and the buffers of an exchange.
            Buckets get smaller until they fit, and a tensor that does not fit by itself travels in rounds. Room for
            sources, targets and 64 KiB of buffers is enough, however many tensors there are, unless a rank moves more
            than 4 GiB of one: then a 65,536th of that.
        donate: the tensors may be given up: the memory of each is freed when its bucket is done, before the next one
            allocates its targets, so that a limit has to hold only what is left. Each must span all of its storage,
            torch must be able to free that, and no two may share one. Afterwards their storages are empty: reading the
            tensors crashes the process. If a call fails, those of finished buckets are gone.
        group: whose ranks take part; by default the ranks of all layouts.
        async_op: return a ``Handle``; only the first exchange overlaps with what the caller does next. The caller must
            not write to the tensors before ``wait()``.
        cost_model, partial_init: as for ``plan``.

    Raises:
        LayoutError: if a tensor's shape or dtype is not what its item says, or tensors are on different devices.
        PlanInfeasibleError: if some rank would hold more than ``memory_limit``; it carries the certificate.
        PlanMismatchError: in the first call with these tensors, if ranks differ in tensors, in options, or in names
            (compared if all are strings).
        UnsupportedError: if ``memory_limit`` has no room for the copies that resolve pending conjugations or negations
            of tensors.
        RedistError: for ``bucket_bytes`` or a ``memory_limit`` that is no such number, or ``donate`` that is no choice.
    """
    # not "< 1", which is false for NaN
    if not isinstance(bucket_bytes, Real) or not bucket_bytes >= 1:
        raise RedistError(f"bucket_bytes must be positive, got {bucket_bytes!r}")
    if not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
        raise LayoutError(f"items is a {type(items).__name__}, this takes a dict or a list of Item")
    check_choices(donate=donate)
    limit = whole_bytes(memory_limit)
    names = _in_order(items) if isinstance(items, Mapping) else list(range(len(items)))
    chosen = [_as_item(name, cast(Any, items)[name]) for name in names]
    if not chosen:
        nothing: dict[Name, Tensor | None] | list[Tensor | None] = {} if isinstance(items, Mapping) else []
        return Handle(done(nothing)) if async_op else nothing
    rank = collectives.my_rank()
    for name, item in zip(names, chosen):
        refuse_other_than_values(item.tensor, f"rank {rank}: {name!r}")
        if item.dtype is not None:
            refuse_other_kinds(**{f"the dtype of {name!r}": (item.dtype, torch.dtype)})
    plans = [_plan_of(name, item, cost_model, partial_init) for name, item in zip(names, chosen)]
    # names that are not strings need not have the same text on every rank
    agreed = tuple(names) if all(isinstance(name, str) for name in names) else ()
    key = (tuple(map(id, plans)), bucket_bytes, limit, donate, id(group), rank, agreed)
    world = collectives.world()
    known = _many_programs.find(key)
    if known is None or known[0] is not world or any(a is not b for a, b in zip(known[1].plans, plans)):
        known = (world, ManyProgram(plans, bucket_bytes, group, agreed, memory_limit=limit, donate=donate))
        _many_programs.put(key, known)
    program = known[1]
    tensors = [waited_for(item.tensor) for item in chosen]
    for name, tensor, stage in zip(names, tensors, program.stages):
        found = None if tensor is None else tuple(tensor.shape)
        if found != stage.src_shape:
            raise LayoutError(
                f"rank {program.rank}: {name!r} has local shape {found}, its source layout says {stage.src_shape}"
            )
        refuse_freed(tensor, f"rank {program.rank}: {name!r}")
    _check_devices(program.rank, names, tensors)
    program.check_resolving(tensors)
    if donate:
        _check_donated(program.rank, names, tensors)
    order = list(items) if isinstance(items, Mapping) else None

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


def _as_item(name: Hashable, given: object) -> Item:
    if isinstance(given, tuple | list) and len(given) in (4, 5):
        return Item(*given)
    what = f"{type(given).__name__} of {len(given)}" if isinstance(given, tuple | list) else type(given).__name__
    raise LayoutError(f"{name!r} is a {what}, not an Item or (tensor, shape, src, dst[, dtype])")


def _check_devices(rank: int, names: Sequence[Hashable], tensors: Sequence[Tensor | None]) -> None:
    """Raise unless all tensors of the rank are on one device, where its buffers and its targets will be."""
    devices: dict[torch.device, Hashable] = {}
    for name, tensor in zip(names, tensors):
        if tensor is not None:
            devices.setdefault(tensor.device, name)
    if len(devices) > 1:
        (here, first), (there, second), *_ = devices.items()
        raise LayoutError(
            f"rank {rank}: {first!r} is on {here}, and {second!r} on {there}; the tensors of one call share buffers: "
            "move them to one device, or call once for each device"
        )


def _check_donated(rank: int, names: Sequence[Hashable], tensors: Sequence[Tensor | None]) -> None:
    """Raise if the memory of a tensor cannot be freed, or if another tensor would be freed with it."""
    owners: dict[int, Hashable] = {}
    for name, tensor in zip(names, tensors):
        if tensor is not None:
            refuse_undonatable(tensor, f"rank {rank}: {name!r}, a source")
            owner = owners.setdefault(tensor.data_ptr(), name) if tensor.numel() else name
            if owner != name:
                raise LayoutError(
                    f"rank {rank}: {owner!r} and {name!r} are one tensor, which is freed when the first of them has "
                    "been moved; clone one of them, or leave donate out"
                )


def _plan_of(name: Hashable, item: Item, cost_model: CommModel | None, partial_init: PartialInit) -> Plan:
    if item.tensor is not None and item.dtype is not None and item.dtype != item.tensor.dtype:
        raise LayoutError(f"{name!r} is a tensor of {item.tensor.dtype}, and dtype={item.dtype} was given with it")
    dtype = item.dtype if item.tensor is None else item.tensor.dtype
    if dtype is None:
        raise LayoutError(f"{name!r} has no tensor on this rank, so its dtype has to be given")
    task = item.shape, dtype, item.src, item.dst
    try:
        return plan(*task, cost_model=cost_model, planners=("direct", "relay"), partial_init=partial_init)
    except RedistError as error:
        error.add_note(f"in the plan of {name!r}")
        raise
