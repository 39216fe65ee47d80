"""Stages that are one call. What the forms of source and target decide is decided when they are first met.

A call is a library's collective that does all of the stage (``native``), or the exchange of its only phase. With one
buffer on either side an exchange costs the host half of what lists of buffers cost.

``start`` returns the work, and what finishes it, which keeps all buffers until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from optim_redist._running.collectives import Team, Waitable
from optim_redist._running.native import Finish, NativeGather, NativeReduction
from optim_redist._running.one_buffer import Incoming, Outgoing
from optim_redist._running.rank_program import PhaseViews
from optim_redist._running.stage_program import StageProgram
from optim_redist._running.views import Rows, rows_of

if TYPE_CHECKING:
    from optim_redist.plans import Plan


class Exchange:
    """An all-to-all whose buffers lie in one memory on either side: of that memory, or of a list of its parts."""

    def __init__(self, views: PhaseViews, src: Rows, dst: Rows, dtype: torch.dtype, team: Team) -> None:
        sends, receives = views.sends, views.receives
        self._is_flat = sends.is_flat and receives.is_flat and team.mixes_exchanges
        if self._is_flat:
            sent, received = ([sizes.get(rank, 0) for rank in team.members] for sizes in (views.sent, views.received))
        else:
            sent, received = sends.sizes, receives.sizes
        self._outgoing = Outgoing(sends, views.packs, src, dtype, sent)
        self._incoming = Incoming(receives, views.unpacks, dst, dtype, received)
        self._to = list(zip(views.to, sends.numbers))
        self._from = list(zip(views.from_, receives.numbers))

    @classmethod
    def of(cls, stage: StageProgram, src: Rows, dst: Rows, team: Team, *, to_itself: bool) -> Exchange | None:
        """The exchange over NCCL that does all of a stage, if one does; ``to_itself`` as for ``StageProgram.begin``."""
        if len(stage.phases) != 1 or stage.combines_in(0) or stage.starts:
            return None
        views = stage.views(0, src, dst, to_itself=to_itself)
        if views.stays.pairs or not (views.sends.is_one and views.receives.is_one):
            return None
        return cls(views, src, dst, stage.dtype, team)

    def start(self, x: Tensor, target: Tensor, team: Team, *, async_op: bool) -> tuple[Waitable | None, Finish]:
        """Start the exchange; returns its work, and what finishes it."""
        sent, room = self._outgoing.of(x), self._incoming.room_for(target)
        finish = partial(self._finish, room, target, sent)
        if self._is_flat:
            splits = self._incoming.splits, self._outgoing.splits
            return team.all_to_all(room, sent, *splits, async_op=async_op), finish
        parts, places = sent.split_with_sizes(self._outgoing.splits), room.split_with_sizes(self._incoming.splits)
        outgoing, incoming = {to: parts[k] for to, k in self._to}, {from_: places[k] for from_, k in self._from}
        return team.exchange_lists(incoming, outgoing, x.device, async_op=async_op), finish

    def _finish(self, room: Tensor, target: Tensor, sent: Tensor) -> None:
        """``sent``: what the exchange reads until then."""
        self._incoming.unpack(room, target)


OneCall = NativeReduction | NativeGather | Exchange


class OneCalls:
    """The stages of a plan that are one call for a rank, by the forms of what they are called with."""

    def __init__(self, plan: Plan, stages: Sequence[StageProgram], rank: int, team: Team | None) -> None:
        self._stages, self._team = stages, team
        # NCCL also copies within a rank
        self.to_itself = team is not None and team.is_nccl and team.is_whole
        self._native: list[NativeReduction | NativeGather | None] = [None] * len(stages)
        self._exchanges: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Exchange | None] = {}
        self._has_exchanges = team is not None and team.is_nccl
        if team is not None and plan.communicates:
            for number, (problem, stage) in enumerate(zip(plan.problems, plan.stages, strict=True)):
                if stage.rounds > 1:
                    continue
                if problem.num_contributions > 1 and not plan.deterministic:
                    self._native[number] = NativeReduction.of(problem, team, stages[number].dtype, rank)
                elif problem.num_contributions == 1 and stage.method == "direct":
                    self._native[number] = NativeGather.of(problem, team)

    def find(self, number: int, x: Tensor | None, dst: Rows | None) -> OneCall | None:
        """The call that does a stage from x, which is on no CPU, to a target of this form, if there is one."""
        native = self._native[number]
        if native is not None or x is None or dst is None or not self._has_exchanges:
            return native
        key = number, x.stride(), dst[1]
        if key not in self._exchanges:
            assert self._team is not None, "exchanges have a team"
            found = Exchange.of(self._stages[number], rows_of(x), dst, self._team, to_itself=self.to_itself)
            self._exchanges[key] = found
        return self._exchanges[key]
