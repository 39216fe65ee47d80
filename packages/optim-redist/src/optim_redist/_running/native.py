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

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal

import torch
from torch import Tensor

from optim_redist._methods.library import Collective, library_collective
from optim_redist._running.buffers import Part, buffers_of
from optim_redist._running.collectives import Team, Waitable
from optim_redist._running.copies import Copies
from optim_redist._running.rank_program import LOCAL, Message
from optim_redist._running.views import FLAT
from optim_redist.index_sets import aligned_runs
from optim_redist.problem import Problem

# dtypes that NCCL adds and compares: it has no 16-bit integers, and torch gives it no 8-bit floats to reduce
_REDUCED = {
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}


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
    """

    kind: Literal["all_reduce", "reduce_scatter"]
    op: str
    scale: int
    parts: Message

    @classmethod
    def of(cls, problem: Problem, team: Team, dtype: torch.dtype, rank: int) -> NativeReduction | None:
        """The collective that does the whole redistribution on this team, if there is one."""
        kind = _collective_on(problem, team)
        if kind not in ("all_reduce", "reduce_scatter") or dtype not in _REDUCED:
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

    def start(self, x: Tensor, target: Tensor, team: Team) -> tuple[Waitable | None, Tensor]:
        """Start the collective into a contiguous target; returns its work, and the buffer to keep until it is done."""
        if self.kind == "all_reduce":
            target.copy_(x)
            return team.all_reduce(target, self.op), target
        packed = self._packed(x)
        return team.reduce_scatter(target, packed, self.op), packed

    def finish(self, target: Tensor) -> None:
        """Divide the result, if it is to be."""
        if self.scale != 1:
            target.div_(self.scale)

    def _packed(self, x: Tensor) -> Tensor:
        parts: list[Part] = [("src", view) for view in self.parts.views(x.stride())]
        buffers = buffers_of([parts], separate=False, in_place=True)
        packed = torch.empty(buffers.num_elements, dtype=x.dtype, device=x.device)
        rows = tuple(x.shape), x.stride()
        Copies(buffers.packing(), x.element_size(), [FLAT, rows]).run({"src": x}, packed)
        return buffers.flat(packed, {"src": x}, x.dtype)


class NativeGather:
    """An all-gather in place of a stage."""

    @classmethod
    def of(cls, problem: Problem, team: Team) -> NativeGather | None:
        """The all-gather that does the whole redistribution on this team, if it does."""
        # the parts are gathered in the order of the members
        in_order = team.members == tuple(sorted(team.members))
        return cls() if in_order and _collective_on(problem, team) == "all_gather" else None

    def start(self, x: Tensor, target: Tensor, team: Team) -> tuple[Waitable | None, Tensor]:
        """Start the collective into a contiguous target; returns its work, and the buffer to keep until it is done."""
        part = x.contiguous()
        # the library has no 16-bit integers
        return team.all_gather(target.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8)), part

    def finish(self, target: Tensor) -> None:
        """Nothing is left to be done."""
