"""``redistribute``: what ``DTensor.redistribute`` does, by this package's plans, also between device meshes.

Forward goes from the tensor's layout to the wanted one. Backward goes from the gradient's layout to the tensor's, with
DTensor's rule for pending reductions: where the tensor held contributions its gradient is replicated, since every
contribution has the gradient of their sum. Gradients of gradients work the same way.

The other rule, "adjoint", is the transpose of the map from all ranks' local tensors to all ranks' local tensors (see
``gradients``). Along a mesh axis on which the target is replicated, a gradient that says it is replicated, too, is read
as contributions, and where the tensor was replicated its gradient is contributions, which its placements say.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.distributed import tensor as dtensor_package
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from optim_redist._compiling.uncompiled import uncompiled
from optim_redist._places import Place, ends_of, specification
from optim_redist._running.given import refuse_other_kinds, waited_for
from optim_redist.dtensor import shard_order_of
from optim_redist.errors import PlanInfeasibleError, UnsupportedError
from optim_redist.execute import default_model, redistribute_local
from optim_redist.gradients import GradientRule, check_rule
from optim_redist.handle import Handle, done
from optim_redist.layout import PartialInit
from optim_redist.placements import ShardOrder, as_shard_order
from optim_redist.planning import plan
from optim_redist.plans import Plan
from optim_redist.problem import check_partial_init
from optim_redist.shares import put_back


class _Options(TypedDict, total=False):
    """The options beside ``async_op``, which decides what is returned."""

    shard_order: ShardOrder | Sequence[tuple[int, Sequence[int]]] | None
    forward_dtype: torch.dtype | None
    backward_dtype: torch.dtype | None
    memory_limit: int | None
    grad: GradientRule
    partial_init: PartialInit


@overload
def redistribute(
    dtensor: DTensor,
    device_mesh: DeviceMesh | None = ...,
    placements: Sequence[Placement] | None = ...,
    *,
    async_op: Literal[False] = ...,
    **options: Unpack[_Options],
) -> DTensor: ...


@overload
def redistribute(
    dtensor: DTensor,
    device_mesh: DeviceMesh | None = ...,
    placements: Sequence[Placement] | None = ...,
    *,
    async_op: Literal[True],
    **options: Unpack[_Options],
) -> Handle[DTensor]: ...


@overload
def redistribute(
    dtensor: DTensor,
    device_mesh: DeviceMesh | None = ...,
    placements: Sequence[Placement] | None = ...,
    *,
    async_op: bool,
    **options: Unpack[_Options],
) -> DTensor | Handle[DTensor]: ...


@uncompiled
def redistribute(
    dtensor: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    async_op: bool = False,
    shard_order: ShardOrder | Sequence[tuple[int, Sequence[int]]] | None = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    memory_limit: int | None = None,
    grad: GradientRule = "replicate",
    partial_init: PartialInit = "owner",
) -> DTensor | Handle[DTensor]:
    """The tensor in other placements, on its own device mesh or another; differentiable.

    Every rank of either mesh has to call; a rank outside a mesh has an empty local tensor there, with as many
    dimensions, so that ``to_local()`` has a gradient; of a scalar it has a zero. If every rank's part stays as it is,
    the result shares memory with ``dtensor``, else it has its own. As with ``DTensor.redistribute``, autograd does not
    see that writing to one of two tensors that share memory changes the other.

    Args:
        dtensor: any placements, masked partials and pending norms excepted.
        device_mesh: the target's mesh; by default the tensor's own.
        placements: one for each axis of the target's mesh.
        async_op: return a ``Handle`` whose ``wait()`` returns the result; only without autograd. ``dtensor`` must not
            be written to before ``wait()`` returns.
        shard_order: for tensor dimensions whose axes do not cut from left to right, the axes in cutting order.
        forward_dtype: dtype of the exchange and of the result.
        backward_dtype: dtype in which the gradient is exchanged; it arrives in the tensor's dtype.
        memory_limit: bytes that no rank may exceed, as for ``plan``. If the exchange is in another dtype, the limit
            counts the converted copy as the source, and not ``dtensor``, which is held as well. Gradients move under
            the same limit; if their way back takes more, backward raises ``PlanInfeasibleError``.
        grad: what the loss is. With "replicate", DTensor's rule, it is one DTensor's value: a gradient is what its
            placements say, and ends up in the placements of ``dtensor``, ``Partial()`` read as ``Replicate()``. With
            "adjoint" it is the sum of all ranks' losses, as where ranks go on with ``to_local()`` on their own data:
            where the target is ``Replicate()``, the ranks' gradients are added (a gather's transpose is a
            reduce-scatter), also if they come as ``Replicate()``; where ``dtensor`` is ``Replicate()``, its gradient
            is ``Partial()``.
        partial_init: how a ``Partial()`` begins that ``dtensor`` has not, as for ``plan``: "owner" gives the value to
            coordinate 0 of its axis and the identity to the others, exactly; "divide" gives each of n ranks value / n,
            as DTensor's own operations do.

    Raises:
        LayoutError: if the local tensor or a placement does not fit the shape.
        PlanInfeasibleError: if some rank would hold more than ``memory_limit``; it carries the certificate.
        UnsupportedError: if an argument is of a wrong type; if autograd records, ``dtensor`` requires a gradient and
            ``async_op`` is given, or ``grad="adjoint"`` while something else than a sum is pending.
    """
    if placements is None:
        raise UnsupportedError("placements is needed: one for each axis of the target's device mesh")
    if isinstance(placements, Placement) or not isinstance(placements, Iterable):
        raise UnsupportedError(f"placements is {placements!r}; give a list of them, one for each axis of the mesh")
    if not isinstance(device_mesh, DeviceMesh | None):
        raise UnsupportedError(f"device_mesh must be a DeviceMesh or None, got {device_mesh!r}")
    wanted = tuple(placements)
    for placement in wanted:
        if not isinstance(placement, Placement):
            raise UnsupportedError(
                f"placements has {placement!r} of {type(placement).__name__}; give Shard(dim), Replicate() or Partial()"
            )
    refuse_other_kinds(forward_dtype=(forward_dtype, torch.dtype), backward_dtype=(backward_dtype, torch.dtype))
    if not isinstance(dtensor, DTensor):
        raise UnsupportedError(
            f"redistribute takes a DTensor, got {type(dtensor).__name__}; make one of this rank's part by "
            "DTensor.from_local, or give the part to redistribute_local"
        )
    check_rule(grad)
    check_partial_init(partial_init)
    mesh = device_mesh if device_mesh is not None else dtensor.device_mesh
    order = tuple((_counted(dim, dtensor.ndim), axes) for dim, axes in (as_shard_order(shard_order) or {}).items())
    if order and not hasattr(dtensor_package._dtensor_spec, "ShardOrderEntry"):
        raise UnsupportedError(f"torch {torch.__version__} has no shard_order; say it with _StridedShard placements")
    normalized = tuple(_normalized(p, dtensor.ndim) for p in wanted)
    place = Place(mesh, normalized, order, forward_dtype, partial_init=partial_init)
    follows = torch.is_grad_enabled() and dtensor.requires_grad
    if async_op:
        if follows:
            raise UnsupportedError("async_op=True has no gradient; call under torch.no_grad() or without async_op")
        return _move(dtensor, place, memory_limit, async_op=True)
    if follows and grad == "adjoint":
        _check_sums(dtensor.placements, "dtensor")
        _check_sums(place.placements, "placements")
    if not follows:
        return _move(dtensor, place, memory_limit)
    return _Redistribute.apply(dtensor, place, _Backward(grad, backward_dtype, memory_limit))


def _check_sums(placements: Sequence[Placement], name: str) -> None:
    for placement in placements:
        if isinstance(placement, Partial) and placement.reduce_op != "sum":
            raise UnsupportedError(
                f'{name} has {placement!r}, and grad="adjoint" is for pending sums; leave grad out, or redistribute to '
                "Replicate() first"
            )


def _normalized(placement: Placement, num_dims: int) -> Placement:
    # in torch 2.9 a strided shard is a Shard, too
    if type(placement) is Shard:
        return Shard(_counted(placement.dim, num_dims))
    return placement


def _counted(tensor_dim: int, num_dims: int) -> int:
    """``tensor_dim``, if negative, counted from the first dimension; numbers out of range stay, for errors to name."""
    return tensor_dim + num_dims if -num_dims <= tensor_dim < 0 else tensor_dim


class _Backward(NamedTuple):
    """What the backward pass has to know beside the places."""

    rule: GradientRule
    dtype: torch.dtype | None
    memory_limit: int | None


class _Redistribute(torch.autograd.Function):
    """Forward and backward are the same move with the roles of the two places exchanged."""

    @staticmethod
    def forward(
        ctx: Any, dtensor: DTensor, place: Place, after: _Backward, read_as: tuple[Placement, ...] | None = None
    ) -> DTensor:
        """``read_as``: of a gradient by the rule "adjoint", the placements that it has in truth."""
        placements = _dual(dtensor.device_mesh, read_as or dtensor.placements, after.rule)
        ctx.back = Place(dtensor.device_mesh, placements, shard_order_of(dtensor), after.dtype, dtensor.dtype)
        ctx.place, ctx.after = place, after
        ctx.set_materialize_grads(False)
        moved = _move(dtensor, place, after.memory_limit, read_as=read_as)
        ctx.shape, ctx.local_shape, ctx.like = moved.shape, moved._local_tensor.shape, moved._local_tensor.new_empty(0)
        return moved

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor | None) -> tuple[Any, None, None, None]:
        gradient, read_as = gradients[0], None
        if gradient is None:
            # this rank's loss does not depend on the result, but other ranks' losses may, and they wait for this one
            place = ctx.place._replace(placements=_dual(ctx.place.mesh, ctx.place.placements, "replicate"))
            zeros = ctx.like.new_zeros(ctx.local_shape)
            gradient = DTensor(zeros, specification(place, ctx.shape, None, zeros.dtype), requires_grad=False)
        if ctx.after.rule == "adjoint":
            read_as = gradient.placements
            if gradient.device_mesh == ctx.place.mesh:
                duals = _dual(ctx.place.mesh, ctx.place.placements, "adjoint")
                both = zip(read_as, duals)
                read_as = tuple(dual if found == Replicate() and dual == Partial() else found for found, dual in both)
        back = _Redistribute.apply(gradient, ctx.back, ctx.after._replace(dtype=None), read_as)
        return back, None, None, None


def _dual(mesh: DeviceMesh, placements: Sequence[Placement], rule: GradientRule) -> tuple[Placement, ...]:
    """The placements of the gradient of a tensor in these."""

    def of(placement: Placement, size: int) -> Placement:
        if isinstance(placement, Partial):
            return Replicate()
        return Partial() if rule == "adjoint" and placement == Replicate() and size > 1 else placement

    return tuple(map(of, placements, mesh.shape))


@overload
def _move(
    dtensor: DTensor, place: Place, memory_limit: int | None, *, read_as: tuple[Placement, ...] | None = ...
) -> DTensor: ...


@overload
def _move(dtensor: DTensor, place: Place, memory_limit: int | None, *, async_op: Literal[True]) -> Handle[DTensor]: ...


def _move(
    dtensor: DTensor,
    place: Place,
    memory_limit: int | None,
    *,
    async_op: bool = False,
    read_as: tuple[Placement, ...] | None = None,
) -> DTensor | Handle[DTensor]:
    ends = ends_of(dtensor, place, read_as)
    shape, local = tuple(dtensor.shape), waited_for(dtensor._local_tensor.detach())
    assert local is not None, "a DTensor has a local tensor on every rank"
    if place.dtype is not None and place.dtype != local.dtype:
        local = local.to(place.dtype)
    part = local if ends.local_shape is not None else None
    if memory_limit is not None:
        # refused on every rank, also where nothing moves
        made = plan(
            shape,
            local.dtype,
            ends.source,
            ends.moved_to,
            cost_model=default_model(None),
            memory_limit=memory_limit,
            partial_init=place.partial_init,
        )
        if not ends.stays:
            _check_clones(made)
    if ends.stays:
        stayed = _wrapped(part, dtensor, place, local, stays=True)
        return Handle(done(stayed)) if async_op else stayed
    moved = redistribute_local(
        part,
        shape,
        ends.source,
        ends.moved_to,
        dtype=local.dtype,
        device=None if part is not None else torch.device(place.mesh.device_type),
        async_op=async_op,
        memory_limit=memory_limit,
        partial_init=place.partial_init,
    )
    if isinstance(moved, Handle):
        return Handle(_when_arrived(moved, dtensor, place, local))
    if moved is not None and ends.moved_to is not ends.target:
        moved = put_back(moved, shape, ends.moved_to, ends.target, dtensor.device_mesh.get_rank())
    return _wrapped(moved, dtensor, place, local)


def _check_clones(made: Plan) -> None:
    """Raise ``PlanInfeasibleError`` if the limit has no room for clones of parts that stay on some ranks only."""
    stored, width, limit = made.problems[0].num_stored, made.itemsize, made.memory_limit
    # plans that communicate count source and target of every rank
    if limit is not None and not made.communicates and made.bounds.memory * width > limit:
        rank = max(stored, key=lambda rank: (sum(stored[rank]), -rank))
        source, target = stored[rank]
        raise PlanInfeasibleError(rank, {"source": source * width, "target": target * width}, limit, proven=True)


def _when_arrived(
    handle: Handle[Tensor | None], dtensor: DTensor, place: Place, local: Tensor
) -> Generator[None, None, DTensor]:
    yield None
    return _wrapped(handle.wait(), dtensor, place, local)


def _wrapped(moved: Tensor | None, dtensor: DTensor, place: Place, local: Tensor, *, stays: bool = False) -> DTensor:
    """The rank's part as a DTensor; its strides, and whether it has memory of its own, are the same on every rank.

    With ``stays``, all ranks' parts stay: the part keeps its memory and strides. If only this rank's part stayed, it is
    cloned: a write to shared memory would change this rank's replica of the source, but not those on other ranks.
    """
    shape = dtensor.shape
    part = moved
    if part is None:
        # a scalar cannot be empty
        part = local.new_empty([0] * len(shape)) if shape else local.new_zeros(())
    elif part is local and not stays:
        part = local.clone(memory_format=torch.contiguous_format)
    if place.arrives_as is not None:
        # before the part becomes a DTensor: torch's operations on DTensors forget orders of axes
        part = part.to(place.arrives_as)
    return DTensor(
        part, specification(place, shape, dtensor.stride() if stays else None, part.dtype), requires_grad=False
    )
