"""Run redistributions of plain tensors: on a process group, or all ranks in one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from optim_redist._autograd import Move, followed
from optim_redist._compiling.traced import traced
from optim_redist._mesh import as_shape
from optim_redist._running import collectives
from optim_redist._running.given import refuse_other_kinds, refuse_other_than_values, resolved
from optim_redist._running.message import slots
from optim_redist._running.stage_program import StageProgram
from optim_redist._tools.recent import Recent
from optim_redist.cost import CommModel, Topology
from optim_redist.errors import LayoutError, UnsupportedError, noting
from optim_redist.gradients import GradientRule, check_linear, check_rule
from optim_redist.handle import Handle
from optim_redist.layout import Layout, PartialInit, check_layouts
from optim_redist.planning import plan
from optim_redist.plans import Plan, check_plan
from optim_redist.program import Program, compile

_programs: Recent[tuple[object, Program]] = Recent(1024)


class _Options(TypedDict, total=False):
    """The options beside ``async_op``, which decides what is returned."""

    group: ProcessGroup | None
    out: Tensor | None
    dtype: torch.dtype | None
    device: torch.device | None
    cost_model: CommModel | None
    topology: Topology | None
    memory_limit: int | None
    donate: bool
    copy: bool
    grad: GradientRule
    partial_init: PartialInit


@overload
def redistribute_local(
    tensor: Tensor | None,
    shape: Sequence[int],
    src: Layout,
    dst: Layout,
    *,
    async_op: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Tensor | None: ...


@overload
def redistribute_local(
    tensor: Tensor | None,
    shape: Sequence[int],
    src: Layout,
    dst: Layout,
    *,
    async_op: Literal[True],
    **options: Unpack[_Options],
) -> Handle[Tensor | None]: ...


@overload
def redistribute_local(
    tensor: Tensor | None,
    shape: Sequence[int],
    src: Layout,
    dst: Layout,
    *,
    async_op: bool,
    **options: Unpack[_Options],
) -> Tensor | Handle[Tensor | None] | None: ...


@traced
def redistribute_local(
    tensor: Tensor | None,
    shape: Sequence[int],
    src: Layout,
    dst: Layout,
    *,
    group: ProcessGroup | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    async_op: bool = False,
    cost_model: CommModel | None = None,
    topology: Topology | None = None,
    memory_limit: int | None = None,
    donate: bool = False,
    copy: bool = True,
    grad: GradientRule = "replicate",
    partial_init: PartialInit = "owner",
) -> Tensor | Handle[Tensor | None] | None:
    """This rank's part of the target layout, given its part of the source layout.

    Every rank of either layout must call. Ranks outside the source pass ``None`` and give the ``dtype``; ranks outside
    the target get ``None``. A rank whose part does not change may get its own tensor back, so clone what you write to
    in place; under autograd, torch refuses that on such a rank, and on no other.

    If autograd records and ``tensor`` requires a gradient, the result has one, and so have gradients. It must require
    one on all ranks or on none, and then every rank has to run backward through its result, since gradients are moved,
    too. In that case a rank outside the source passes a tensor of shape (0,) that requires a gradient, and a rank
    outside the target gets one.

    Args:
        tensor: the local part, of any strides.
        shape: the global shape.
        src, dst: the layouts that the tensor has and gets.
        group: whose ranks take part; by default the ranks of both layouts.
        out: where to put the result. It must not share memory with ``tensor``, unless it is ``tensor`` itself and all
            of this rank's part stays; nor require a gradient while autograd records. In a plan of several steps ``out``
            is held from the first step on, and beside a source that would stay whole without it; the call is refused if
            that exceeds ``memory_limit``.
        dtype: needed where ``tensor`` is None, else the tensor's own.
        device: where a rank without ``tensor`` and ``out`` exchanges and gets its part; by default the CUDA device of a
            group that has NCCL, else the CPU.
        async_op: return a ``Handle`` whose ``wait()`` gives the result; do not write to ``tensor`` before that.
        cost_model, topology, memory_limit, partial_init: as for ``plan``, but the model is by default the preset
            "nccl" where the group has NCCL. Gradients move under the same limit; if their way back takes more, backward
            raises ``PlanInfeasibleError``.
        donate: ``tensor`` may be given up: its memory is freed once it has been read, before later steps allocate
            theirs. It must span all of its storage, and torch must be able to free that. Unless ``tensor`` is the
            result, it keeps its shape but its storage is empty afterwards: reading it crashes the process.
        copy: if False, a part of the source that becomes the target may come back as a view; not under autograd.
        grad: what the ranks' losses are. With "replicate", DTensor's rule, all ranks compute the same loss L: ranks
            that hold the same have the same gradient, and contributions x_c to a sum v have ∂L/∂x_c = ∂L/∂v. With
            "adjoint", the transpose of the map from all ranks' parts to all ranks' parts, the loss is Σ_r L_r over all
            ranks: gradients of a target's replicas are added, and those of a source's replicas *add up* to the
            gradient of what these hold, in shares that the layouts decide. Sum them over the replicas, as data
            parallelism does, for the gradient of a parameter that all of them hold. A pending average of n
            contributions has ∂L/∂x_c = ∂L/∂v / n.

    Raises:
        LayoutError: if the tensor's shape is not what the layout says, or ``out`` lies in the tensor's memory or on
            another device.
        PlanMismatchError: if ranks call with different shapes, dtypes, layouts or options, and none of their plans has
            run before. A rank whose plan has run does not compare it again, and a rank in whose plan nothing moves has
            none to compare; then the other ranks wait for it or fail in the backend. So do ranks that call with layouts
            on different sets of ranks, which make different process groups, unless ``group`` is given.
        UnsupportedError: if ``dtype`` or ``device`` is a text; if a tensor is sparse, inside of a transform of
            ``torch.func``, or has a tangent of forward-mode differentiation; if autograd records and ``out`` requires a
            gradient, which would be lost; if ``tensor`` does, and ``out``, ``async_op`` or ``donate`` is given or a
            minimum, maximum or product is pending; or if ``memory_limit`` has no room for ``out`` beside what the plan
            counts, or for the copy that resolves a pending conjugation or negation of ``tensor``.
    """
    if out is not None and not isinstance(out, Tensor):
        refuse_other_than_values(out, f"rank {collectives.my_rank()}: the out tensor")
    if tensor is not None and not isinstance(tensor, Tensor):
        refuse_other_than_values(tensor, f"rank {collectives.my_rank()}: the source tensor")
    if out is not None and out.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"out of shape {tuple(out.shape)} requires a gradient, and redistribute_local would write to it unseen by "
            "autograd; call under torch.no_grad(), or pass out.detach()"
        )
    check_rule(grad)
    # on every rank, also where they are not needed: else some ranks would refuse, and the others wait for them
    refuse_other_kinds(dtype=(dtype, torch.dtype), device=(device, torch.device))
    if tensor is not None:
        if dtype is not None and dtype != tensor.dtype:
            raise LayoutError(f"dtype={dtype} was given for a tensor of {tensor.dtype}")
        dtype = tensor.dtype
    if dtype is None:
        raise LayoutError("a rank without a part of the source says which dtype it will get: pass dtype=")
    if cost_model is None:
        cost_model = default_model(group)
    planned = partial(plan, shape, cost_model=cost_model, topology=topology, memory_limit=memory_limit)
    if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
        refuse_other_than_values(tensor, f"rank {collectives.my_rank()}: the source tensor")
        _refuse_unfollowed(tensor, out=out is not None, async_op=async_op, donate=donate)
        check_layouts(src=src, dst=dst)
        check_linear(src, dst)
        sides = src, dst

        def run(part: Tensor | None, src: Layout, dst: Layout, like: Tensor) -> Tensor | None:
            # what gradients begin is the same however the values began
            made = planned(like.dtype, src, dst, partial_init=partial_init if (src, dst) == sides else "owner")
            return program_for(made, group)(part, device=like.device)

        return followed(tensor, Move(as_shape(shape), src, dst, collectives.my_rank(), grad, run))
    made = planned(dtype, src, dst, donate=donate, partial_init=partial_init)
    return program_for(made, group)(tensor, out, async_op=async_op, copy=copy, device=device)


def default_model(group: ProcessGroup | None) -> CommModel:
    """The cost model of a group that nobody has measured."""
    return CommModel.preset("nccl" if collectives.uses_nccl(group) else "flat")


def _refuse_unfollowed(tensor: Tensor, **given: bool) -> None:
    """Raise ``UnsupportedError`` for what autograd cannot follow."""
    for name, is_given in given.items():
        if is_given:
            raise UnsupportedError(
                f"the local tensor of shape {tuple(tensor.shape)} requires a gradient, which {name} does not go with; "
                f"call without {name}, under torch.no_grad(), or with tensor.detach()"
            )


def program_for(made: Plan, group: ProcessGroup | None = None) -> Program:
    """The plan compiled on this rank; compiled once for every process group, then cached."""
    world = collectives.world()
    key = (id(made), collectives.my_rank(), id(group))
    known = _programs.find(key)
    if known is not None and known[0] is world and known[1].plan is made:
        return known[1]
    program = compile(made, group)
    _programs.put(key, (world, program))
    return program


def simulate(plan: Plan, locals: Mapping[int, Tensor | None] | Sequence[Tensor | None]) -> dict[int, Tensor | None]:
    """Every rank's target: all ranks' programs run in this process, with copies in place of messages.

    Args:
        plan: any plan.
        locals: what every rank holds of the source, keyed by rank, or as a list for ranks 0, 1, ….

    Raises:
        LayoutError: if a local tensor does not have the shape that the layout says.
    """
    check_plan(plan)
    if not isinstance(locals, Iterable):
        raise LayoutError(f"locals must map ranks to their parts, or list them, got {locals!r}")
    given = dict(locals) if isinstance(locals, Mapping) else dict(enumerate(locals))
    ranks = sorted({*plan.src.mesh.ranks, *plan.dst.mesh.ranks})
    tensors = {rank: given.get(rank) for rank in ranks}
    strangers = [rank for rank, part in given.items() if part is not None and rank not in tensors]
    if strangers:
        raise LayoutError(f"locals has parts of ranks {strangers}, the plan is for ranks {ranks}")
    device = next((t.device for t in tensors.values() if isinstance(t, Tensor)), torch.device("cpu"))
    programs = {rank: Program(plan, rank, None) for rank in ranks}
    for rank, program in programs.items():
        program._refusals.check(tensors[rank], None)
        tensors[rank] = resolved(tensors[rank])
    for number, (_, phases) in enumerate(plan.phases):
        stages = {rank: program.stages[number] for rank, program in programs.items()}
        targets = {rank: stage.allocate(device) for rank, stage in stages.items()}
        for k, phase in enumerate(phases):
            with noting("in step {!r} of plan {:.12}".format, phase.name, plan.hash):
                _simulate_phase(stages, k, tensors, targets, device)
        tensors = targets
    return tensors


def _simulate_phase(
    stages: Mapping[int, StageProgram],
    k: int,
    tensors: Mapping[int, Tensor | None],
    targets: Mapping[int, Tensor | None],
    device: torch.device,
) -> None:
    runs = {rank: stage.begin(k, tensors[rank], targets[rank], device) for rank, stage in stages.items()}
    wire = {
        (rank, message.peer): slot.clone()
        for rank, run in runs.items()
        for message, slot in slots(stages[rank].phases[k].sends, run.pack()[0])
    }
    for rank, run in runs.items():
        for message, slot in slots(stages[rank].phases[k].receives, run.make_room()[0]):
            slot.copy_(wire.pop((message.peer, rank)))
        run.local()
    assert not wire, "every message has a receiver"
    for run in runs.values():
        run.finish()
