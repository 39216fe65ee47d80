"""Tensors that a program refuses: they are not what its plan says, or its memory limit has no room for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from optim_redist._methods.candidates import exchanges_of
from optim_redist._methods.packed import packed_peak
from optim_redist._running.given import (
    extent,
    is_pending,
    refuse_freed,
    refuse_other_than_values,
    refuse_undonatable,
    refuse_unwritable,
)
from optim_redist.errors import LayoutError, UnsupportedError

if TYPE_CHECKING:
    from optim_redist._running.stage_program import StageProgram
    from optim_redist.plans import Plan


class Refusals:
    """The checks of what one rank gives to a program."""

    def __init__(self, plan: Plan, rank: int, stages: Sequence[StageProgram], *, keeps_all: bool) -> None:
        """``keeps_all``: whether all of the rank's part stays, so that the source itself may be given as target."""
        self._plan, self._rank, self._keeps_all = plan, rank, keeps_all
        self._dtype: torch.dtype = stages[0].dtype
        self._src_shape, self._dst_shape = stages[0].src_shape, stages[-1].dst_shape
        self._with_out = bytes_with_out(plan)

    def check(self, x: Tensor | None, out: Tensor | None) -> None:
        """Raise unless source and given target are what the plan says, and can be read and written."""
        if out is not None:
            self._check_out(x, out)
        self._check_form("source", x, self._src_shape)
        if x is not None and self._plan.donate:
            refuse_undonatable(x, f"rank {self._rank}: a source")

    def check_resolving(self, x: Tensor | None, out: Tensor | None = None) -> None:
        """Raise if the copy that resolves a pending conjugation or negation does not fit under the limit."""
        limit = self._plan.memory_limit
        if limit is None or x is None or not is_pending(x):
            return
        if self._plan.donate:
            # the source is given up before anything else is made
            held = 2 * x.nbytes + (0 if out is None else out.nbytes)
        else:
            held = (self._plan.peak_bytes if out is None else self._with_out) + x.nbytes
        if held > limit:
            raise UnsupportedError(
                f"rank {self._rank}: the source has a pending conjugation or negation, and a copy that resolves it "
                f"would be held too, {held - limit} bytes above memory_limit={limit}; call with a limit that is higher "
                "by so much, or give .resolve_conj().resolve_neg() and let go of what it was made of"
            )

    def _check_out(self, x: Tensor | None, out: Tensor) -> None:
        refuse_other_than_values(out, f"rank {self._rank}: the out tensor")
        limit = self._plan.memory_limit
        if limit is not None and self._with_out > limit and not (out is x and self._keeps_all):
            raise UnsupportedError(
                f"out would be held from the start, {self._with_out - limit} bytes above memory_limit={limit} beside "
                "what the plan counts; call without out, or plan with a limit that is higher by so much"
            )
        if x is not None and x.device != out.device:
            raise LayoutError(f"rank {self._rank}: the source tensor is on {x.device}, out on {out.device}")
        if x is not None and _overlap(x, out) and not (out is x and self._keeps_all):
            raise LayoutError(
                f"rank {self._rank}: out shares memory with the source, which is read while out is written; give an "
                "out of its own memory (the source itself is taken only where all of it stays)"
            )
        refuse_unwritable(out, f"rank {self._rank}: out")
        self._check_form("out", out, self._dst_shape)

    def _check_form(self, what: str, tensor: Tensor | None, expected: tuple[int, ...] | None) -> None:
        refuse_other_than_values(tensor, f"rank {self._rank}: the {what} tensor")
        found = None if tensor is None else tuple(tensor.shape)
        if found != expected:
            raise LayoutError(f"rank {self._rank}: the {what} tensor has shape {found}, its layout says {expected}")
        if tensor is not None and tensor.dtype != self._dtype:
            raise LayoutError(f"rank {self._rank}: the {what} tensor is {tensor.dtype}, the plan is for {self._dtype}")
        refuse_freed(tensor, f"rank {self._rank}: the {what} tensor")


def bytes_with_out(plan: Plan) -> int:
    """Bytes that no rank exceeds if every rank holds its target from the start, as a given ``out``; 0 without limit."""
    if plan.memory_limit is None:
        return 0
    problem, last = plan.problems[-1], plan.stages[-1]
    exchanges = exchanges_of(problem, last.method, plan.topology)
    if not plan.communicates:
        # what stays whole is no target of its own any more
        return plan.bounds.memory * plan.itemsize
    # the steps of the last stage count the target already, but if packed only when the source is gone
    earlier = plan.steps[: -len(exchanges)]
    target = max(needed for _, needed in problem.num_stored.values()) * plan.itemsize
    held = max([step.peak + target for step in earlier], default=0)
    if last.method == "packed":
        held = max(held, packed_peak(problem, exchanges[0].volumes, given=True) * plan.itemsize)
    return max(held, plan.peak_bytes)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the byte ranges of two tensors, from first to last element, overlap."""
    here, there = extent(a), extent(b)
    return here is not None and there is not None and here[0] < there[1] and there[0] < here[1]
