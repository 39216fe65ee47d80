"""One stage of a plan on one rank: what its phases pack, send, keep, receive and unpack.

The caller allocates a stage's target. ``PhaseRun`` is one phase under way. In a packed stage, which has one phase,
everything that it sends or keeps is copied out of the source before the target is allocated, so that the source can be
freed in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from optim_redist._methods.own import own_phases
from optim_redist._running.buffers import Buffers
from optim_redist._running.copies import Copy, Together
from optim_redist._running.message import Message, slots
from optim_redist._running.rank_program import Buffering, PhaseViews, rank_phases
from optim_redist._running.reduction import Reduction, fill_identity
from optim_redist._running.views import bits_type, dense_strides, form_of
from optim_redist.moves import FINISHED, Phase, Which
from optim_redist.problem import Problem

if TYPE_CHECKING:
    from optim_redist.layout import Layout
    from optim_redist.plans import Plan


class PhaseRun:
    """One phase under way on one rank, which keeps all buffers of its exchange.

    ``pack`` gives the buffers to send, ``make_room`` those to receive into; ``local`` copies what stays, and ``finish``
    brings what has arrived to its place.

    Attributes:
        views: of the phase, for its tensors.
        stays: whether ``local`` has something to copy.
    """

    def __init__(
        self,
        stage: StageProgram,
        k: int,
        views: PhaseViews,
        src: Tensor | None,
        dst: Tensor | None,
        device: torch.device,
    ) -> None:
        self._stage, self._k, self.views, self._device = stage, k, views, device
        self._tensors: dict[Which, Tensor | None] = {"src": src, "dst": dst}
        self._packed: Tensor | None = None
        self._arrived: Tensor | None = None
        self.stays = bool(views.stays.pairs)

    def pack(self) -> list[Tensor]:
        """Copy what is sent, where it does not lie in one piece; the buffers to send."""
        if self.views.packs_at_once:
            self._packed = self.views.packs.packed(self._tensors).view(-1)
        else:
            self._packed = self._own(self.views.sends)
            self.views.packs.run(self._tensors, self._packed)
        return self.views.sends.cut(self._packed, self._tensors, self._stage.sent_as)

    def make_room(self) -> list[Tensor]:
        """The buffers to receive into."""
        self._arrived = self._own(self.views.receives)
        return self.views.receives.cut(self._arrived, self._tensors, self._stage.sent_as)

    def _own(self, buffers: Buffers) -> Tensor | None:
        if not buffers.needs_own:
            return None
        return torch.empty(buffers.num_elements, dtype=self._stage.bits, device=self._device)

    def local(self) -> None:
        """Copy what stays on the rank; a phase that reduces does this in ``finish``."""
        if self.stays:
            self.views.stays.run(self._tensors, self._tensors["dst"])

    def finish(self) -> None:
        """Unpack or combine what has arrived."""
        stage, k, dst = self._stage, self._k, self._tensors["dst"]
        if not stage.phases[k].combines:
            # the buffer takes the place of the source
            self.views.unpacks.run({"src": self._arrived}, dst)
        elif dst is not None:
            arrived = [] if self._arrived is None else slots(stage.phases[k].receives, self._arrived)
            stage.combine(k, arrived, self._tensors["src"], dst)
        stage.end(k, dst)


class StageProgram:
    """One stage on one rank: local shapes, messages of every phase, and the reduction if there is one.

    Attributes:
        fresh: the form of a target that the stage allocates.
    """

    def __init__(
        self,
        problem: Problem,
        phases: Sequence[Phase],
        rank: int,
        dtype: torch.dtype,
        *,
        reducing: Sequence[bool],
        src: Layout,
        dst: Layout,
        buffering: Buffering,
    ) -> None:
        """``src`` and ``dst`` are the problem's layouts as the caller wrote them, in which empty parts may have other
        shapes; ``reducing`` and ``buffering`` as for ``rank_phases``."""
        self.dtype = dtype
        self.bits = bits_type(dtype)
        # a message that is a tensor of its own is sent as bytes, since the backend has to know its type
        self.sent_as = torch.uint8 if buffering.separate else self.bits
        self.phases = rank_phases(problem, phases, rank, reducing=reducing, buffering=buffering)
        self.src_shape = _local_shape(src, problem.shape, rank)
        self.dst_shape = _local_shape(dst, problem.shape, rank)
        self.fresh = None if self.dst_shape is None else (self.dst_shape, dense_strides(self.dst_shape))
        self.reduction = Reduction.of(problem.reduced, dtype) if problem.num_contributions > 1 else None
        self.identity_op = None
        if problem.started and self.dst_shape is not None and rank not in problem.dst_points:
            self.identity_op = problem.started[0][1]
        self.divisor = problem.divisor

    @property
    def starts(self) -> bool:
        """Whether this rank's part of a pending reduction that starts here is not the value itself."""
        return self.identity_op is not None or self.divisor != 1

    def only_view(self) -> tuple[slice, ...] | None:
        """The slices of the source that are the target, if one piece of the source is all of it."""
        pieces = [piece for phase in self.phases for piece in phase.stays_from.pieces]
        if self.reduction is not None or self.starts or len(pieces) != 1:
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
        self, k: int, src: Tensor | None, dst: Tensor | None, device: torch.device, *, to_itself: bool = False
    ) -> PhaseRun:
        """Phase k between these tensors; with ``to_itself``, what stays may be a message of the rank to itself."""
        views = self.phases[k].views_for(form_of(src), form_of(dst), to_itself=to_itself)
        return PhaseRun(self, k, views, src, dst, device)

    def pack_all(self, src: Tensor | None, device: torch.device) -> tuple[list[Tensor], Tensor]:
        """Copies of what the only phase sends, and of what it keeps; nothing reads the source after that."""
        phase = self.phases[0]
        views = phase.views_for(form_of(src), self.fresh or form_of(None))
        packed = PhaseRun(self, 0, views, src, None, device).pack()
        # what would be sent from where it lies in the source, too
        sends = [buffer if span.which is None else buffer.clone() for span, buffer in zip(views.sends.spans, packed)]
        stays = phase.stays_from
        kept = torch.empty(stays.num_elements, dtype=self.bits, device=device)
        Together(stays.packing(kept, src, None)).run()
        return sends, kept

    def unpack_kept(self, kept: Tensor, dst: Tensor | None) -> None:
        """Put what the only phase keeps in its place in the target."""
        if kept.numel():
            Together(self.phases[0].stays_to.unpacking(kept, cast(Tensor, dst))).run()

    @property
    def reduces(self) -> bool:
        """Whether some phase combines contributions."""
        return any(phase.combines for phase in self.phases)

    def staying(self, k: int, src: Tensor | None, dst: Tensor | None) -> list[Copy]:
        """The copies that phase k makes within the rank; what is combined is not among them."""
        phase = self.phases[k]
        # then no views have to be made
        if phase.combines or not phase.stays_from.pieces:
            return []
        return phase.views_for(form_of(src), form_of(dst)).stays.between({"src": src}, dst)

    def combine(self, k: int, arrived: Sequence[tuple[Message, Tensor]], src: Tensor | None, dst: Tensor) -> None:
        """Reduce what arrived in phase k and this rank's own contributions into the target."""
        assert self.reduction is not None, "only reductions combine"
        self.reduction.combine(self.phases[k], arrived, src, dst)

    def end(self, k: int, dst: Tensor | None) -> None:
        """After the last phase, turn the target into this rank's part of a pending reduction that starts here."""
        if k == len(self.phases) - 1 and dst is not None and self.starts:
            if self.identity_op is not None:
                fill_identity(dst, self.identity_op)
            else:
                dst.div_(self.divisor)


def stage_programs(plan: Plan, rank: int, *, separate: bool = False) -> list[StageProgram]:
    """A rank's part of every stage of a plan."""
    dtype, last = getattr(torch, plan.dtype), len(plan.stages) - 1
    # gaps between messages are not counted
    buffering = Buffering(dtype.itemsize, separate, aligned=plan.memory_limit is None)
    found = []
    for number, (problem, stage) in enumerate(zip(plan.problems, plan.stages, strict=True)):
        phases: Sequence[Phase]
        own = own_phases(problem, stage, plan.topology, rank)
        if own is not None:
            phases, reducing = own
        else:
            phases = plan.phases[number][1]
            reducing = [any(t.contribution != FINISHED for t in phase.transfers) for phase in phases]
        found.append(
            StageProgram(
                problem,
                phases,
                rank,
                dtype,
                reducing=reducing,
                src=problem.src if number else plan.src,
                dst=plan.dst if number == last else problem.dst,
                buffering=buffering,
            )
        )
    return found


def _local_shape(layout: Layout, shape: Sequence[int], rank: int) -> tuple[int, ...] | None:
    return layout.local_shape(shape, rank) if rank in layout.mesh.coordinates else None
