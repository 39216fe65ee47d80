"""Stages that one library collective does, with all ranks of the team.

Every rank contributes to every element:

    all-reduce       the target is replicated;
    reduce-scatter   the target is divided evenly; the input holds the members' parts one after the other, and is the
                     source itself if the parts lie in it in that order.

The library chooses the order of summation and rounds in the tensor's own type, so ``deterministic`` plans do not come
here; nor do operations whose results would differ from torch's by more than rounding.

Nothing is reduced:

    all-gather       the target is replicated, and the members' parts are equal and lie in it one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from typing import Literal

import torch
from torch import Tensor

from optim_redist._methods.library import Collective, library_collective
from optim_redist._running.buffers import Part, buffers_of
from optim_redist._running.collectives import Team, Waitable
from optim_redist._running.copies import Copies
from optim_redist._running.message import LOCAL, Message
from optim_redist._running.one_buffer import CARRIED, Outgoing
from optim_redist._running.reduction import as_reals
from optim_redist._running.views import FLAT, Form, flat_bytes
from optim_redist.index_sets import aligned_runs
from optim_redist.problem import Problem

# keeps the buffers of a collective, and is called when it is done
Finish = Callable[[], None]


def _is_faithful(ops: set[str], dtype: torch.dtype) -> bool:
    """Whether the library combines floats as torch does, up to rounding.

    NCCL's minimum and maximum are those of CUDA's fminf and fmaxf, which ignore NaN; torch's propagate it. In fp16,
    with its narrow range, the sum on the way to an average may overflow where the average does not.
    """
    return not (ops & {"min", "max"} or ("avg" in ops and dtype == torch.float16))


def _collective_on(problem: Problem, team: Team) -> Collective | None:
    """The collective that does the whole redistribution, if its ranks are the whole team and the team has it."""
    if not team.is_nccl or not team.is_whole or set(problem.src.mesh.ranks) != set(team.members):
        return None
    return library_collective(problem)


@dataclass(frozen=True)
class NativeReduction:
    """One collective in place of a stage.

    Attributes:
        kind: which collective.
        op: the operation that combines; sum for averages.
        scale: divisor of the result, for averages and for sums that start by division.
        parts: the members' parts of the source, for reduce-scatter.
        known: by form of the source, the buffer for reduce-scatter.
    """

    kind: Literal["all_reduce", "reduce_scatter"]
    op: str
    scale: int
    parts: Message
    known: dict[Form, Outgoing] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem, team: Team, dtype: torch.dtype, rank: int) -> NativeReduction | None:
        """The collective that does the whole redistribution on this team, if there is one."""
        kind = _collective_on(problem, team)
        if kind not in ("all_reduce", "reduce_scatter") or dtype not in CARRIED:
            return None
        ops = {op for op, _ in problem.reduced}
        if dtype.is_floating_point and not _is_faithful(ops, dtype):
            return None
        op = next(iter(ops - {"avg"}), "sum")
        scale = prod(count for name, count in problem.reduced if name == "avg") * problem.divisor
        parts = Message(LOCAL)
        if kind == "all_reduce":
            return cls(kind, op, scale, parts)
        for member in team.members:
            held, needed = problem.held(rank), problem.needed(member)
            assert held is not None, "every member contributes"
            assert needed is not None, "every member needs a part"
            runs = [aligned_runs(part, whole) for part, whole in zip(needed, held)]
            if any(len(pieces) != 1 for pieces in runs):
                return None
            for choice in product(*runs):
                parts.add(tuple(piece[0] for piece in choice), "src", problem.contribution[rank])
        return cls(kind, op, scale, parts)

    def start(self, x: Tensor, target: Tensor, team: Team, *, async_op: bool) -> tuple[Waitable | None, Finish]:
        """Start the collective into a contiguous target; returns its work, and what finishes it."""
        if self.kind == "all_reduce":
            target.copy_(x)
            return team.all_reduce(target, self.op, async_op=async_op), partial(self._divide, target, target)
        sent = self._outgoing(x).of({"src": x})
        return team.reduce_scatter(target, sent, self.op, async_op=async_op), partial(self._divide, target, sent)

    def _divide(self, target: Tensor, buffer: Tensor) -> None:
        """``buffer``: what the collective uses until then."""
        if self.scale != 1:
            as_reals(target).div_(self.scale)

    def _outgoing(self, x: Tensor) -> Outgoing:
        form = tuple(x.shape), x.stride()
        if form not in self.known:
            parts: list[Part] = [("src", view) for view in self.parts.views(x.stride())]
            buffers = buffers_of([parts], separate=False, in_place=True)
            packs = Copies(buffers.packing, x.element_size(), [FLAT, form])
            self.known[form] = Outgoing(buffers, packs, {"src": form}, x.dtype, [self.parts.num_elements])
        return self.known[form]


class NativeGather:
    """An all-gather in place of a stage."""

    @classmethod
    def of(cls, problem: Problem, team: Team) -> NativeGather | None:
        """The all-gather that does the whole redistribution on this team, if it does."""
        # the parts are gathered in the order of the members
        in_order = team.members == tuple(sorted(team.members))
        return cls() if in_order and _collective_on(problem, team) == "all_gather" else None

    def start(self, x: Tensor, target: Tensor, team: Team, *, async_op: bool) -> tuple[Waitable | None, Finish]:
        """Start the collective into a contiguous target; returns its work, and what finishes it."""
        part, room = x.contiguous(), target
        if x.dtype not in CARRIED:
            part, room = flat_bytes(part), flat_bytes(target)
        elif part.dim() != 1 and len(team.members) * part.shape[0] != target.shape[0]:
            part, room = part.view(-1), target.view(-1)
        return team.all_gather(room, part, async_op=async_op), partial(_keep, part)


def _keep(buffer: Tensor) -> None:
    """Nothing is left to be done."""
