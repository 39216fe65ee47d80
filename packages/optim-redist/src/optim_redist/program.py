"""A plan compiled for one rank: groups, splits, offsets and views decided once, then run as often as needed.

A program walks the stages of its plan. Each stage allocates its target (the last one may be given), runs its phases as
one all-to-all each, and hands the target on as the next stage's source. ``compile`` makes the process groups; a
plan's first run checks that all ranks have the same plan.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from optim_redist._compiling.uncompiled import uncompiled
from optim_redist._running import collectives
from optim_redist._running.collectives import Team, Waitable
from optim_redist._running.given import give_up, is_plain, resolved, resolved_donated, waited_for
from optim_redist._running.native import NativeGather, NativeReduction
from optim_redist._running.one_call import ExchangeCall, OneCalls
from optim_redist._running.refusals import Refusals
from optim_redist._running.stage_program import PhaseRun, StageProgram, stage_programs
from optim_redist._running.views import form_of
from optim_redist.errors import UnsupportedError, noting
from optim_redist.handle import Handle, completed, done
from optim_redist.plans import Plan, check_plan


class Program:
    """One rank's compiled plan; call it with the local source to get the local target, without gradients."""

    def __init__(self, plan: Plan, rank: int, team: Team | None) -> None:
        self.plan = plan
        self.rank = rank
        self.team = team
        self.dtype = getattr(torch, plan.dtype)
        # one buffer per message where the backend takes lists of them, else one for all messages
        self._separate = team is not None and team.takes_lists
        self.stages = stage_programs(plan, rank, separate=self._separate)
        self._calls = OneCalls(plan, self.stages, rank, team)
        # whether one call may do everything
        self._is_one = plan.communicates and len(self.stages) == 1 and not plan.donate
        self._compared = not plan.communicates
        # without communication: the slices of the source that are the target, if it is one piece of it
        alone = None if plan.communicates or len(self.stages) > 1 else self.stages[0]
        self._kept = None if alone is None else alone.only_view()
        # a part that stays may have many pieces, which the source has in the same order; empty parts have shapes
        keeps_shape = alone is not None and alone.src_shape is not None and alone.src_shape == alone.dst_shape
        self._keeps_all = keeps_shape and plan.problems[0].stays_whole(rank)
        self._refusals = Refusals(plan, rank, self.stages, keeps_all=self._keeps_all)

    @property
    def graph_safe(self) -> bool:
        """Whether a CUDA graph may capture a call into a given ``out``, after a first run.

        All work of such a call is on the device: copies and NCCL's collectives. A donated source is excluded, as it
        has no memory left for a replay to read.
        """
        return self._compared and not self.plan.donate and (self.team is None or self.team.is_nccl)

    @overload
    def __call__(
        self,
        x: Tensor | None,
        out: Tensor | None = ...,
        async_op: Literal[False] = ...,
        *,
        copy: bool = ...,
        device: torch.device | None = ...,
    ) -> Tensor | None: ...

    @overload
    def __call__(
        self,
        x: Tensor | None,
        out: Tensor | None = ...,
        *,
        async_op: Literal[True],
        copy: bool = ...,
        device: torch.device | None = ...,
    ) -> Handle[Tensor | None]: ...

    @overload
    def __call__(
        self,
        x: Tensor | None,
        out: Tensor | None = ...,
        async_op: bool = ...,
        *,
        copy: bool = ...,
        device: torch.device | None = ...,
    ) -> Tensor | Handle[Tensor | None] | None: ...

    @uncompiled
    def __call__(
        self,
        x: Tensor | None,
        out: Tensor | None = None,
        async_op: bool = False,
        *,
        copy: bool = True,
        device: torch.device | None = None,
    ) -> Tensor | Handle[Tensor | None] | None:
        """This rank's part of the target; a ``Handle`` to it with ``async_op``.

        Without ``out``, a source that stays unchanged is returned itself, and with ``copy=False`` a target that is part
        of the source may be a view of it. ``out`` must not share memory with the source, unless it is a source that
        stays unchanged. With neither ``x`` nor ``out`` the target is on ``device``, by default the CUDA device of a
        group that has NCCL and else the CPU.
        """
        if out is None and not async_op and x is not None:
            target = self._at_once(x)
            if target is not None:
                return target
        x = waited_for(x)
        self._refusals.check(x, out)
        if x is not None and (out is x or (out is None and self._keeps_all)):
            return Handle(done(x)) if async_op else x
        if self._kept is not None and x is not None and out is None and not (copy or async_op):
            return x.detach()[self._kept]
        self._refusals.check_resolving(x, out)
        given = x if x is not None else out
        device = given.device if given is not None else device or collectives.device_of(self.team)
        self._compare()
        if async_op:
            return Handle(self._run(x, out, device, True), device)
        return completed(self._run(x, out, device, False))

    def _at_once(self, x: Tensor) -> Tensor | None:
        """The target, if one call does the whole plan, and nothing about ``x`` has to be seen to before.

        The same as ``_run`` with fewer steps: what happens before a collective is what its other ranks wait for.
        """
        stage = self.stages[0]
        if not (self._is_one and self._compared and is_plain(x)) or x.is_cpu:
            return None
        if x.shape != stage.src_shape or x.dtype is not self.dtype:
            return None
        one: NativeGather | NativeReduction | ExchangeCall | None = self._calls.native(0)
        if one is None and len(stage.phases) == 1:
            one = self._calls.exchange(0, 0, x, stage.fresh)
        if one is None or stage.fresh is None:
            return None
        assert self.team is not None, "plans that communicate have a team"
        target = torch.empty(stage.fresh[0], dtype=self.dtype, device=x.device)
        try:
            work, finish = one.start(x, target, self.team, async_op=False)
            if work is not None:
                work.wait()
            finish()
        except RuntimeError as error:
            error.add_note(self._where(f"in step {stage.phases[0].name!r}"))
            raise
        return target

    def _run(
        self, x: Tensor | None, out: Tensor | None, device: torch.device, async_op: bool
    ) -> Generator[Waitable | None, None, Tensor | None]:
        """Yields once for every exchange it has started; the caller waits and resumes. Returns the target."""
        x = resolved_donated(x) if self.plan.donate else resolved(x)
        given = x if self.plan.donate else None
        name = ""
        with noting(lambda: self._where(f"in step {name!r}")):
            for number, stage in enumerate(self.stages):
                last = number == len(self.stages) - 1
                room = out.detach() if last and out is not None else None
                name = stage.phases[0].name if stage.phases else ""
                if self.plan.stages[number].method == "packed":
                    x = yield from self._run_packed(stage, x, room, device)
                    continue
                target = stage.allocate(device) if room is None else room
                # library collectives are NCCL's, but a group with NCCL may also be given CPU tensors
                native = self._calls.native(number) if device.type != "cpu" else None
                if native is not None:
                    yield from self._run_native(native, x, target, async_op)
                else:
                    for k, phase in enumerate(stage.phases):
                        name = phase.name
                        yield from self._run_phase(number, k, x, target, device, async_op)
                x = target
                give_up(given)
        return x if out is None else out

    def _run_packed(
        self, stage: StageProgram, x: Tensor | None, out: Tensor | None, device: torch.device
    ) -> Generator[Waitable | None, None, Tensor | None]:
        """Run a packed stage: pack all of the donated source, and free it before the target is allocated."""
        sends, kept = stage.pack_all(x, device)
        give_up(x)
        target = stage.allocate(device) if out is None else out
        run = stage.begin(0, x, target, device)
        work = self._exchange(run, sends, device, async_op=True)
        stage.unpack_kept(kept, target)
        yield work
        run.finish()
        return target

    def _run_native(
        self, native: NativeGather | NativeReduction, x: Tensor | None, target: Tensor | None, async_op: bool
    ) -> Generator[Waitable | None, None, None]:
        assert self.team is not None, "library collectives have a team"
        assert x is not None, "every rank holds a part"
        assert target is not None, "every rank has a part of the result"
        dense = target
        if not target.is_contiguous():
            dense = torch.empty_like(target, memory_format=torch.contiguous_format)
        work, finish = native.start(x, dense, self.team, async_op=async_op)
        yield work
        finish()
        if dense is not target:
            target.copy_(dense)

    def _run_phase(
        self, number: int, k: int, x: Tensor | None, target: Tensor | None, device: torch.device, async_op: bool
    ) -> Generator[Waitable | None, None, None]:
        """Run phase k of a stage; all of its buffers are free when the next one begins."""
        form = None if target is None else form_of(target)
        exchange = self._calls.exchange(number, k, x, form) if device.type != "cpu" else None
        if exchange is not None:
            assert self.team is not None, "exchanges have a team"
            assert x is not None, "such a rank holds a part"
            assert target is not None, "and has a part of the result"
            work, finish = exchange.start(x, target, self.team, async_op=async_op)
            yield work
            finish()
            return
        stage = self.stages[number]
        run = stage.begin(k, x, target, device, to_itself=self._calls.to_itself and device.type != "cpu")
        work = None
        if self.plan.communicates:
            # nothing else has to be done meanwhile: NCCL then runs on the current stream
            work = self._exchange(run, run.pack(), device, async_op=async_op or run.stays)
        run.local()
        yield work
        run.finish()

    def _exchange(self, run: PhaseRun, sends: list[Tensor], device: torch.device, *, async_op: bool) -> Waitable | None:
        """Start the exchange of a phase; ``sends``: what ``run`` has packed."""
        assert self.team is not None, "plans that communicate have a team"
        views, receives = run.views, run.make_room()
        if self._separate:
            incoming, outgoing = dict(zip(views.received, receives)), dict(zip(views.sent, sends))
            return self.team.exchange_lists(incoming, outgoing, device, async_op=async_op)
        itemsize = self.plan.itemsize
        sizes = [{peer: count * itemsize for peer, count in of.items()} for of in (views.received, views.sent)]
        return self.team.exchange(receives[0].view(torch.uint8), sends[0].view(torch.uint8), *sizes, async_op=async_op)

    def _where(self, what: str) -> str:
        return f"{what} of plan {self.plan.hash[:12]} on rank {self.rank}"

    def _compare(self) -> None:
        if not self._compared:
            assert self.team is not None, "plans that communicate have a team"
            with noting(self._where, "in the comparison"):
                self.team.compare(self.plan.canonical_text())
            self._compared = True


@uncompiled
def compile(plan: Plan, group: ProcessGroup | None = None) -> Program:
    """The plan compiled for this rank. Every rank of both layouts has to call, since a group may have to be made.

    Args:
        plan: the same on every rank; the first run checks this.
        group: the process group, all of whose ranks take part; by default the layouts' ranks.
    """
    check_plan(plan)
    rank = collectives.my_rank()
    if not plan.communicates:
        return Program(plan, rank, None)
    team = Team.of({*plan.src.mesh.ranks, *plan.dst.mesh.ranks}, group)
    if rank not in team.members:
        raise UnsupportedError(f"rank {rank} is in neither layout nor group; only ranks {team.members} take part")
    return Program(plan, rank, team)
