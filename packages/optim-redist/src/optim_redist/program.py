"""A plan compiled for one rank: groups, splits, offsets and views decided once, then run as often as needed.

A program walks the stages of its plan. Each stage allocates its target (the last one may be given), runs its phases as
one all-to-all each, and hands the target on as the next stage's source. Groups are made at compile, and the first run
compares the plans of all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from optim_redist import _collectives
from optim_redist._collectives import Team, Waitable
from optim_redist._native import NativeReduction
from optim_redist._rank_program import Bound, Message, RankPhase, Which, as_bits, bits_type, rank_phases, view_of
from optim_redist._reduction import Reduction, fill_identity
from optim_redist.errors import LayoutError, UnsupportedError
from optim_redist.problem import Problem

if TYPE_CHECKING:
    from optim_redist.layout import Layout
    from optim_redist.moves import Phase
    from optim_redist.planning import Plan


class StageProgram:
    """One stage on one rank: local shapes, messages of every phase, and the reduction if there is one."""

    def __init__(
        self,
        problem: Problem,
        phases: Sequence[Phase],
        rank: int,
        dtype: torch.dtype,
        *,
        src: Layout | None = None,
        dst: Layout | None = None,
    ) -> None:
        """``src`` and ``dst`` are the problem's layouts as the caller writes them: shapes of empty parts may differ."""
        self.rank = rank
        self.dtype = dtype
        self.bits = bits_type(dtype)
        self.phases = rank_phases(problem, phases, rank)
        # the phases that bring contributions; on ranks that take no part in one, too
        self._reducing = [any(t.contribution >= 0 for t in phase.transfers) for phase in phases]
        self.src_shape = _local_shape(src or problem.src, problem.shape, rank)
        self.dst_shape = _local_shape(dst or problem.dst, problem.shape, rank)
        self.reduction = Reduction.of(problem.reduced, dtype) if problem.num_contributions > 1 else None
        self.identity_op = None
        self.start_scale = 1
        if problem.started and self.dst_shape is not None:
            self.start_scale = prod(problem.dst.mesh.sizes[axis] for axis, op in problem.started if op == "avg")
            if rank not in problem.dst_points:
                self.identity_op = problem.started[0][1]

    @property
    def keeps_all(self) -> bool:
        """Whether the rank's tensor stays exactly what it is."""
        return self.src_shape == self.dst_shape

    def only_view(self) -> tuple[slice, ...] | None:
        """The slices of the source that are the target, if one piece of it is all of the target."""
        pieces = [piece for phase in self.phases for piece in phase.stays_from.pieces]
        if self.reduction is not None or self.identity_op is not None or self.start_scale != 1 or len(pieces) != 1:
            return None
        if any(run.repeats > 1 and run.length > 1 for run in pieces[0]):
            return None
        return tuple(
            slice(run.start, run.stop) if run.repeats == 1 else slice(run.start, run.stop, run.stride)
            for run in pieces[0]
        )

    def allocate(self, device: torch.device) -> Tensor | None:
        """An uninitialised target."""
        return None if self.dst_shape is None else torch.empty(self.dst_shape, dtype=self.dtype, device=device)

    def begin(
        self, k: int, src: Tensor | None, dst: Tensor | None, device: torch.device, *, separate: bool = False
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Pack phase k: the buffers to send, those to receive into, and the phase's own buffer behind the latter."""
        bound = self._bind(k, src, dst, separate)
        tensors: dict[Which, Tensor | None] = {"src": _bits(src), "dst": _bits(dst)}
        packed = torch.empty(bound.num_packed, dtype=self.bits, device=device)
        bound.packs.run(tensors, packed)
        unpacked = torch.empty(bound.num_unpacked, dtype=self.bits, device=device)
        sends = [view_of(packed if which is None else cast(Tensor, tensors[which]), v) for which, v in bound.sends]
        receives = [
            view_of(unpacked if which is None else cast(Tensor, tensors[which]), v) for which, v in bound.receives
        ]
        return sends, receives, unpacked

    def local(self, k: int, src: Tensor | None, dst: Tensor | None, *, separate: bool = False) -> None:
        """What phase k copies within the rank; reductions do this when they finish."""
        if self.phases[k].stays_from.pieces and not self._reduces(k):
            here: dict[Which, Tensor | None] = {"src": _bits(src)}
            self._bind(k, src, dst, separate).stays.run(here, _bits(dst))

    def finish(
        self, k: int, unpacked: Tensor, src: Tensor | None, dst: Tensor | None, *, separate: bool = False
    ) -> None:
        """Unpack what phase k brought into the buffer of ``begin``."""
        if self._reduces(k):
            if dst is not None:
                self.combine(k, slots(self.phases[k].receives, unpacked), src, dst)
        else:
            # the buffer takes the place of the source
            self._bind(k, src, dst, separate).unpacks.run({"src": unpacked}, _bits(dst))
        self.end(k, dst)

    def combine(self, k: int, arrived: Sequence[tuple[Message, Tensor]], src: Tensor | None, dst: Tensor) -> None:
        """Reduce what came in phase k and this rank's own contributions into the target."""
        assert self.reduction is not None, "only reductions combine"
        self.reduction.combine(self.phases[k], arrived, src, dst)

    def end(self, k: int, dst: Tensor | None) -> None:
        """After the last phase, start the pending reduction that the target asks for."""
        if k == len(self.phases) - 1 and dst is not None:
            if self.identity_op is not None:
                fill_identity(dst, self.identity_op)
            elif self.start_scale != 1:
                dst.mul_(self.start_scale)

    # -- the same for buffers that several tensors share

    def pack_message(self, message: Message, slot: Tensor, src: Tensor | None, dst: Tensor | None) -> None:
        """Copy one message into its part of a buffer."""
        tensors = {"src": _bits(src), "dst": _bits(dst)}
        place = 0
        for k, read in enumerate(message.read):
            tensor = cast(Tensor, tensors[read])
            view = message.views(tensor.stride())[k]
            size = prod(view[0])
            slot[place : place + size].view(view[0]).copy_(view_of(tensor, view))
            place += size

    def finish_messages(
        self, k: int, arrived: Sequence[tuple[Message, Tensor]], src: Tensor | None, dst: Tensor | None
    ) -> None:
        """Unpack messages that came in any buffers: every message with its flat bits."""
        if self._reduces(k):
            if dst is not None:
                self.combine(k, arrived, src, dst)
        elif arrived:
            target = as_bits(cast(Tensor, dst))
            for message, slot in arrived:
                place = 0
                for view in message.views(target.stride()):
                    size = prod(view[0])
                    view_of(target, view).copy_(slot[place : place + size].view(view[0]))
                    place += size
        self.end(k, dst)

    def _bind(self, k: int, src: Tensor | None, dst: Tensor | None, separate: bool) -> Bound:
        return self.phases[k].bind(
            _rows(src), _rows(dst), self.dtype.itemsize, separate=separate, in_place=not self._reduces(k)
        )

    def _reduces(self, k: int) -> bool:
        return self._reducing[k]


def stage_programs(plan: Plan, rank: int) -> list[StageProgram]:
    """A rank's part of every stage of a plan."""
    dtype, last = getattr(torch, plan.dtype), len(plan.stages) - 1
    return [
        StageProgram(
            problem,
            phases,
            rank,
            dtype,
            src=None if number else plan.src,
            dst=plan.dst if number == last else None,
        )
        for number, (problem, phases) in enumerate(plan.phases)
    ]


def slots(messages: Sequence[Message], buffer: Tensor) -> list[tuple[Message, Tensor]]:
    """Every message with its part of a flat buffer."""
    found, place = [], 0
    for message in messages:
        found.append((message, buffer[place : place + message.num_elements]))
        place += message.num_elements
    return found


def _rows(tensor: Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return ((), ()) if tensor is None else (tuple(tensor.shape), tensor.stride())


def _bits(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else as_bits(tensor)


def _local_shape(layout: Layout, shape: Sequence[int], rank: int) -> tuple[int, ...] | None:
    return layout.local_shape(shape, rank) if rank in layout.mesh.coordinates else None


class Handle:
    """A redistribution under way: it owns the buffers, the source and the work until ``wait`` returns the result.

    Waiting twice is harmless. A handle that is dropped without waiting waits then, and warns.
    """

    def __init__(self, steps: Generator[Waitable | None, None, Any]) -> None:
        self._result: Any = None
        self._work = next(steps, None)
        # the generator owns the source, the buffers and the target
        self._steps: Generator[Waitable | None, None, Any] | None = steps

    def wait(self) -> Any:
        """Finish, and return this rank's target (None where it has none), or the targets of many tensors."""
        steps, self._steps = self._steps, None
        if steps is not None:
            work = self._work
            while True:
                if work is not None:
                    work.wait()
                try:
                    work = next(steps)
                except StopIteration as stop:
                    self._result = stop.value
                    break
            self._work = None
        return self._result

    def __del__(self) -> None:
        if getattr(self, "_steps", None) is not None:
            warnings.warn("a redistribution was dropped without wait(); it is waited for now", stacklevel=2)
            with suppress(RuntimeError):
                self.wait()


class Program:
    """One rank's compiled plan; call it with the local source to get the local target."""

    def __init__(self, plan: Plan, rank: int, team: Team | None) -> None:
        self.plan = plan
        self.rank = rank
        self.team = team
        self.dtype = getattr(torch, plan.dtype)
        self.stages = stage_programs(plan, rank)
        # one buffer a message where the backend can, one for all messages where it cannot
        self._separate = team is not None and team.takes_lists
        self._native = [
            self._native_reduction(problem) if stage.rounds == 1 else None
            for stage, (problem, _) in zip(plan.stages, plan.phases)
        ]
        self._compared = not plan.communicates
        # a plan without communication that keeps all of a rank's tensor, or one piece of it
        self._kept = None if plan.communicates or len(self.stages) > 1 else self.stages[0].only_view()

    def _native_reduction(self, problem: Problem) -> NativeReduction | None:
        if self.team is None or self.plan.deterministic or problem.num_contributions == 1:
            return None
        return NativeReduction.of(problem, self.team, self.dtype, self.rank)

    @property
    def graph_safe(self) -> bool:
        """Whether a CUDA graph may capture a call that has run before, into a given ``out``.

        Everything a call does is then device work: copies, and collectives of NCCL.
        """
        return self._compared and (self.team is None or self.team.is_nccl)

    def __call__(
        self, x: Tensor | None, out: Tensor | None = None, async_op: bool = False, *, copy: bool = True
    ) -> Any:
        """This rank's part of the target; a ``Handle`` to it with ``async_op``.

        Without ``out``, a tensor that stays what it is comes back itself, and with ``copy=False`` a part of it may
        come back as a view.
        """
        self._check(x, out)
        if self._kept is not None and x is not None and out is None and not async_op:
            if self.stages[0].keeps_all:
                return x
            if not copy:
                return x[self._kept]
        device = x.device if x is not None else out.device if out is not None else _collectives.device_of(self.team)
        self._compare()
        if async_op:
            return Handle(self._run(x, out, device))
        return Handle(self._run(x, out, device)).wait()

    def _run(
        self, x: Tensor | None, out: Tensor | None, device: torch.device
    ) -> Generator[Waitable | None, None, Tensor | None]:
        """Yields once for every exchange it has started; the caller waits and resumes. Returns the target."""
        given = x if self.plan.donate else None
        for number, stage in enumerate(self.stages):
            last = number == len(self.stages) - 1
            target = out if last and out is not None else stage.allocate(device)
            native = self._native[number]
            if native is not None:
                yield from self._run_native(native, x, target)
                x = target
                _give_up(given)
                continue
            for k, phase in enumerate(stage.phases):
                sends, receives, unpacked = stage.begin(k, x, target, device, separate=self._separate)
                work = self._exchange(phase, sends, receives) if self.plan.communicates else None
                stage.local(k, x, target, separate=self._separate)
                yield work
                stage.finish(k, unpacked, x, target, separate=self._separate)
            x = target
            _give_up(given)
        return x

    def _run_native(
        self, native: NativeReduction, x: Tensor | None, target: Tensor | None
    ) -> Generator[Waitable | None, None, None]:
        assert self.team is not None, "native reductions have a team"
        assert x is not None, "every rank contributes"
        assert target is not None, "every rank has a part of the result"
        dense = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        work, buffer = native.start(x, dense, self.team)
        yield work
        native.finish(dense)
        if dense is not target:
            target.copy_(dense)
        # only now may the buffer go
        del buffer

    def _exchange(self, phase: RankPhase, sends: list[Tensor], receives: list[Tensor]) -> Waitable | None:
        assert self.team is not None, "plans that communicate have a team"
        try:
            if self._separate:
                outgoing = {message.peer: buffer for message, buffer in zip(phase.sends, sends)}
                incoming = {message.peer: buffer for message, buffer in zip(phase.receives, receives)}
                return self.team.exchange_lists(incoming, outgoing, async_op=True)
            sizes = [
                {message.peer: message.num_elements * self.plan.itemsize for message in messages}
                for messages in (phase.receives, phase.sends)
            ]
            return self.team.exchange(receives[0].view(torch.uint8), sends[0].view(torch.uint8), *sizes, async_op=True)
        except RuntimeError as error:
            error.add_note(f"in step {phase.name!r} of plan {self.plan.hash[:12]} on rank {self.rank}")
            raise

    def _compare(self) -> None:
        if not self._compared:
            assert self.team is not None, "plans that communicate have a team"
            self.team.compare(self.plan.canonical_text())
            self._compared = True

    def _check(self, x: Tensor | None, out: Tensor | None) -> None:
        first, last = self.stages[0], self.stages[-1]
        for what, tensor, expected in (("source", x, first.src_shape), ("out", out, last.dst_shape)):
            if what == "out" and tensor is None:
                continue
            found = None if tensor is None else tuple(tensor.shape)
            if found != expected:
                raise LayoutError(f"rank {self.rank}: the {what} tensor has shape {found}, its layout says {expected}")
            if what == "source" and tensor is not None and self.plan.donate and not _owns_storage(tensor):
                raise LayoutError(
                    f"rank {self.rank}: a source that is donated has to be all of its storage, this one is a view; "
                    "clone it, or leave donate out"
                )
            if tensor is not None and tensor.dtype != self.dtype:
                raise LayoutError(
                    f"rank {self.rank}: the {what} tensor is {tensor.dtype}, the plan is for {self.dtype}"
                )


def _owns_storage(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _give_up(tensor: Tensor | None) -> None:
    """Free the memory of a tensor that is not needed any more, whoever still refers to it."""
    if tensor is not None:
        tensor.untyped_storage().resize_(0)


def compile(plan: Plan, group: ProcessGroup | None = None) -> Program:
    """The plan as this rank runs it. Every rank of both layouts has to call, since a group may have to be made.

    Args:
        plan: the same on every rank; the first run makes sure.
        group: who takes part; by default the world, or a group of exactly the layouts' ranks if that is smaller.
    """
    rank = _collectives.my_rank()
    if not plan.communicates:
        return Program(plan, rank, None)
    team = Team.of({*plan.src.mesh.ranks, *plan.dst.mesh.ranks}, group)
    if rank not in team.members:
        raise UnsupportedError(f"rank {rank} is in neither layout nor group; only ranks {team.members} take part")
    return Program(plan, rank, team)
