"""Calls of libraries that do a stage, or a phase of one, with all that depends on the forms of tensors decided once.

A call is a library's collective that does all of a stage (``native``), or the exchange of a phase. With one buffer on
either side an exchange costs the host half of what lists of buffers cost.

``start`` returns the work, if it has to be waited for, and what finishes it, which keeps all buffers until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from optim_redist._methods.library import library_collective, scattered_in_order
from optim_redist._running.collectives import Team, Waitable
from optim_redist._running.message import slots
from optim_redist._running.native import Finish, NativeGather, NativeReduction
from optim_redist._running.one_buffer import Incoming, Outgoing
from optim_redist._running.rank_program import PhaseViews
from optim_redist._running.stage_program import StageProgram
from optim_redist._running.views import Form, form_of

if TYPE_CHECKING:
    from optim_redist.plans import Plan


class ExchangeCall:
    """A phase's all-to-all whose buffers lie in one memory on either side: of that memory, or of a list of its parts.

    What stays on the rank is copied while the exchange runs, unless it is a message of the rank to itself, or is
    combined with what arrives.
    """

    def __init__(self, stage: StageProgram, k: int, views: PhaseViews, src: Form, dst: Form, team: Team) -> None:
        self._stage, self._k, self._combines = stage, k, stage.phases[k].combines
        sends, receives = views.sends, views.receives
        self._is_flat = sends.is_flat and receives.is_flat and team.mixes_exchanges
        if self._is_flat:
            sent, received = ([sizes.get(rank, 0) for rank in team.members] for sizes in (views.sent, views.received))
        else:
            sent, received = sends.sizes, receives.sizes
        self._outgoing = Outgoing(sends, views.packs, {"src": src, "dst": dst}, stage.dtype, sent)
        self._incoming = Incoming(receives, views.unpacks, dst, stage.dtype, received)
        self._stays = views.stays if views.stays.pairs else None
        self._to = list(zip(views.sent, sends.numbers))
        self._from = list(zip(views.received, receives.numbers))

    @classmethod
    def of(
        cls, stage: StageProgram, k: int, src: Form, dst: Form, team: Team, *, to_itself: bool
    ) -> ExchangeCall | None:
        """The exchange of phase k over NCCL, if it is one; ``to_itself`` as for ``StageProgram.begin``."""
        views = stage.phases[k].views_for(src, dst, to_itself=to_itself)
        return cls(stage, k, views, src, dst, team) if views.sends.is_one and views.receives.is_one else None

    def start(self, x: Tensor, target: Tensor, team: Team, *, async_op: bool) -> tuple[Waitable | None, Finish]:
        """Start the exchange; returns its work, which is there if it is asynchronous, and what finishes it."""
        sent, room = self._outgoing.of({"src": x, "dst": target}), self._incoming.room_for(target)
        # asynchronous, it leaves the current stream free for what stays
        work = self._call(sent, room, team, async_op=async_op or self._stays is not None)
        if self._stays is not None:
            self._stays.run({"src": x}, target)
        return work, partial(self._finish, x, target, sent, room)

    def _call(self, sent: Tensor, room: Tensor, team: Team, *, async_op: bool) -> Waitable | None:
        if self._is_flat:
            return team.all_to_all(room, sent, self._incoming.splits, self._outgoing.splits, async_op=async_op)
        parts, places = sent.split_with_sizes(self._outgoing.splits), room.split_with_sizes(self._incoming.splits)
        outgoing, incoming = {to: parts[k] for to, k in self._to}, {from_: places[k] for from_, k in self._from}
        return team.exchange_lists(incoming, outgoing, sent.device, async_op=async_op)

    def _finish(self, x: Tensor, target: Tensor, sent: Tensor, room: Tensor) -> None:
        """``sent``: what the exchange reads until then."""
        if self._combines:
            arrived = slots(self._stage.phases[self._k].receives, self._incoming.values(room))
            self._stage.combine(self._k, arrived, x, target)
        else:
            self._incoming.unpack(room, target)
        self._stage.end(self._k, target)


class OneCalls:
    """The stages and phases of a plan that are one call for a rank, by the forms of what they are called with."""

    def __init__(self, plan: Plan, stages: Sequence[StageProgram], rank: int, team: Team | None) -> None:
        self._stages, self._team = stages, team
        # NCCL also copies within a rank
        self.to_itself = team is not None and team.is_nccl and team.is_whole
        self._native: list[NativeReduction | NativeGather | None] = [None] * len(stages)
        self._exchanges: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], ExchangeCall | None] = {}
        self._has_exchanges = team is not None and team.is_nccl
        if team is not None and plan.communicates:
            for number, (problem, stage) in enumerate(zip(plan.problems, plan.stages, strict=True)):
                if stage.rounds > 1 or not has_room_for_copies(plan, number):
                    continue
                if problem.num_contributions > 1 and not plan.deterministic:
                    self._native[number] = NativeReduction.of(problem, team, stages[number].dtype, rank)
                elif problem.num_contributions == 1 and stage.method == "direct":
                    self._native[number] = NativeGather.of(problem, team)

    def native(self, number: int) -> NativeReduction | NativeGather | None:
        """The library's collective that does all of a stage, if there is one."""
        return self._native[number]

    def exchange(self, number: int, k: int, x: Tensor | None, dst: Form | None) -> ExchangeCall | None:
        """The exchange of a stage's phase from x, which is on no CPU, to a target of this form, if it is one call."""
        if x is None or dst is None or not self._has_exchanges:
            return None
        key = number, k, x.stride(), dst[1]
        if key not in self._exchanges:
            assert self._team is not None, "exchanges have a team"
            src, stage = form_of(x), self._stages[number]
            self._exchanges[key] = ExchangeCall.of(stage, k, src, dst, self._team, to_itself=self.to_itself)
        return self._exchanges[key]


def has_room_for_copies(plan: Plan, number: int) -> bool:
    """Whether the limit also holds a copy of a stage's source and target, where a rank gives such as are not dense.

    Collectives read and write dense memory, and all ranks call the same one, whatever they give. A source in which a
    conjugation or negation is pending, for which there may be room, is resolved before a reduce-scatter packs it.
    """
    if plan.memory_limit is None:
        return True
    problem = plan.problems[number]
    source = 0 if plan.donate else plan.bounds.live_src * plan.itemsize
    held = 2 * max(map(sum, problem.num_stored.values())) * plan.itemsize
    packs = library_collective(problem) == "reduce_scatter" and not scattered_in_order(problem)
    if number or (packs and plan.peak_bytes + source <= plan.memory_limit):
        held += source
    return held <= plan.memory_limit
