"""The exchange of many tensors, repeated between the same tensors, as in every step of a training loop.

    sources --pack--> sent --all-to-all--> received --unpack--> targets;   what stays on a rank: sources --> targets

``ManyProgram.run`` takes any tensors, so it makes views of them and of its buffers in every run, which costs the host
some ten microseconds per tensor. Here the views are made once. Memory that is not needed between two exchanges is
lent: the storage is resized to 0 and back. Tensors refer to their storage, so a tensor and all views of it are valid
again once the storage has memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from optim_redist._running.collectives import Waitable
from optim_redist._running.copies import Together
from optim_redist._running.given import extent, is_pending, refuse_other_than_values, refuse_unwritable
from optim_redist._running.many_program import ManyProgram
from optim_redist.errors import LayoutError, RedistError, UnsupportedError
from optim_redist.plans import Plan, check_plan

_ALIGNMENT = 16  # bytes, so that copies can be as wide as possible

Kind = tuple[tuple[int, ...] | None, torch.dtype]  # shape and dtype of a tensor, None where there is none


class Lent:
    """Tensors side by side in ``memory``, which ``give_back`` frees and ``take`` allocates again."""

    def __init__(self, kinds: Sequence[Kind], device: torch.device) -> None:
        sizes = [0 if shape is None else prod(shape) * dtype.itemsize for shape, dtype in kinds]
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.memory = torch.empty(end, dtype=torch.uint8, device=device)
        self.tensors = [
            None if shape is None else self.memory[start : start + size].view(dtype).view(shape)
            for (shape, dtype), start, size in zip(kinds, starts, sizes, strict=True)
        ]

    def take(self) -> None:
        """Allocate the memory; values are undefined until they are written."""
        self.memory.untyped_storage().resize_(self.memory.numel())

    def give_back(self) -> None:
        """Free the memory; kernels launched before on the current stream may still have to read it."""
        self.memory.untyped_storage().resize_(0)


class RepeatedExchange:
    """One exchange of many tensors, with the same sources and targets every time; without gradients.

    Args:
        plans: one per tensor, the same on every rank, each of one round and without a reduction: as ``plan`` makes them
            with ``planners=("direct",)`` of layouts without partial sums.
        device: where buffers are, and tensors that are not given.
        group: the process group, all of whose ranks take part; by default the ranks of all layouts.
        sources, targets: this rank's parts, None where it has none. Given targets are written by ``wait()``, and not
            before. Until then the sources hold what stays on this rank, so no target may share memory with a source.
            Without ``sources`` or ``targets`` the object makes these tensors itself and lends their memory: sources
            from ``lend_sources`` until the exchange is waited for, targets from ``start`` until ``release``. At other
            times their storages are empty: reading them crashes the process.

    Attributes:
        sources, targets: these tensors.

    Raises:
        LayoutError: if a tensor has not its plan's shape and dtype, or a target cannot be written safely.
        UnsupportedError: for plans that take several exchanges, or reduce; by ``start``, before sources that the object
            made have been lent; by ``lend_sources``, ``start`` and ``release``, while an exchange is under way.
    """

    # tensors that are made in inference mode could not be written to outside of it
    @torch.inference_mode(False)
    def __init__(
        self,
        plans: Sequence[Plan],
        device: torch.device,
        *,
        group: ProcessGroup | None = None,
        sources: Sequence[Tensor | None] | None = None,
        targets: Sequence[Tensor | None] | None = None,
    ) -> None:
        if not isinstance(plans, Sequence):
            raise RedistError(f"plans must be a list with a plan for each tensor, got {plans!r}")
        if not plans:
            raise RedistError("plans is empty; give one for each tensor")
        for made in plans:
            check_plan(made)
        self._program = program = ManyProgram(plans, sys.maxsize, group)
        stages = program.stages
        starting = any(made.problems[0].started or made.problems[0].divisor != 1 for made in plans)
        if len(program.exchanges[0]) > 1 or starting or any(stage.reduces for stage in stages):
            raise UnsupportedError(
                "only plans of one round without reductions repeat; plan layouts without partial sums, with "
                "planners=('direct',) and no memory_limit"
            )
        (self._exchange,) = program.exchanges[0]
        kinds_from: list[Kind] = [(stage.src_shape, stage.dtype) for stage in stages]
        kinds_to: list[Kind] = [(stage.dst_shape, stage.dtype) for stage in stages]
        self._lent_sources = Lent(kinds_from, device) if sources is None else None
        self._lent_targets = Lent(kinds_to, device) if targets is None else None
        self.sources = _tensors("source", sources, self._lent_sources, kinds_from)
        self.targets = _tensors("target", targets, self._lent_targets, kinds_to)
        _check_memory(self.sources, self.targets)
        self._sent = Lent([((self._exchange.num_sent,), torch.uint8)], device)
        self._received = Lent([((self._exchange.num_received,), torch.uint8)], device)
        ends = self.sources, self.targets
        self._packing = Together(self._exchange.packing(self._sent.memory, *ends))
        self._staying = Together(self._exchange.staying(*ends))
        self._unpacking = Together(self._exchange.unpacking(self._received.memory, *ends))
        self._is_under_way = False
        self._has_sources = self._lent_sources is None
        for lent in (self._sent, self._received, self._lent_sources, self._lent_targets):
            if lent is not None:
                lent.give_back()

    def lend_sources(self) -> Sequence[Tensor | None]:
        """The sources, to be written; allocates the memory of sources that the object made."""
        if self._lent_sources is not None:
            self._refuse_under_way("its sources go back with it")
            self._lent_sources.take()
            self._has_sources = True
        return self.sources

    @torch.no_grad()
    def start(self) -> Waitable:
        """Start the exchange, one at a time; ``wait()`` on the result, in the same stream, returns the targets."""
        self._refuse_under_way("its buffers are in use")
        if not self._has_sources:
            raise UnsupportedError(
                "the sources have no memory before lend_sources(): call and write them before start()"
            )
        self._program.compare()
        self._sent.take()
        self._received.take()
        self._packing.run()
        work, team = None, self._program.team
        if team is not None:
            splits = self._exchange.receive_splits, self._exchange.send_splits
            work = team.exchange(self._received.memory, self._sent.memory, *splits, async_op=True)
        if self._lent_targets is not None:
            self._lent_targets.take()
            self._staying.run()
        self._is_under_way = True
        return _UnderWay(self, work)

    def release(self) -> None:
        """Free the memory of targets that the object made."""
        if self._lent_targets is not None:
            self._refuse_under_way("its targets are to be written")
            self._lent_targets.give_back()

    def _refuse_under_way(self, why_not: str) -> None:
        """Raise if an exchange is under way, whose memory must not be freed or reused: that would crash the process."""
        if self._is_under_way:
            raise UnsupportedError(
                f"the last exchange of these tensors has not been waited for, and {why_not}: wait() first, or make "
                "another RepeatedExchange"
            )

    @torch.no_grad()
    def finish(self, work: Waitable | None) -> None:
        """Complete the exchange: the body of ``wait()``, where ``work`` is what the all-to-all returned."""
        self._is_under_way = False
        if work is not None:
            work.wait()
        self._sent.give_back()
        if self._lent_targets is None:
            self._staying.run()
        if self._lent_sources is not None:
            self._lent_sources.give_back()
            self._has_sources = False
        self._unpacking.run()
        self._received.give_back()


class _UnderWay:
    """An exchange that has been started."""

    def __init__(self, repeated: RepeatedExchange, work: Waitable | None) -> None:
        self._repeated, self._work, self._is_over = repeated, work, False

    def wait(self) -> Sequence[Tensor | None]:
        """The targets; waiting twice is harmless."""
        if not self._is_over:
            self._repeated.finish(self._work)
            self._is_over = True
        return self._repeated.targets


def _tensors(
    what: str, given: Sequence[Tensor | None] | None, lent: Lent | None, kinds: Sequence[Kind]
) -> list[Tensor | None]:
    if given is None:
        assert lent is not None, "what is not given is lent"
        return lent.tensors
    if len(given) != len(kinds):
        raise LayoutError(f"there are {len(given)} {what}s for {len(kinds)} plans; give each one, None where none is")
    for number, (tensor, (shape, dtype)) in enumerate(zip(given, kinds)):
        refuse_other_than_values(tensor, f"{what} {number}")
        found = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        if found != (None if shape is None else (shape, dtype)):
            raise LayoutError(f"{what} {number} is {found}, its plan says {None if shape is None else (shape, dtype)}")
        if is_pending(tensor):
            raise LayoutError(f"{what} {number} is a view with a pending conjugation or negation; give what it views")
    return [None if tensor is None else tensor.detach() for tensor in given]


def _check_memory(sources: Sequence[Tensor | None], targets: Sequence[Tensor | None]) -> None:
    """Raise for targets with fewer places than elements, and where byte ranges of a target and a source overlap."""
    reach = [0, 0]  # where the memory of the sources and of the targets seen so far ends
    extents = []
    for is_target, tensors in enumerate((sources, targets)):
        for number, tensor in enumerate(tensors):
            if tensor is not None:
                if is_target:
                    refuse_unwritable(tensor, f"target {number}")
                extents += [(*found, is_target, number)] if (found := extent(tensor)) is not None else []
    for start, stop, is_target, number in sorted(extents):
        if start < reach[1 - is_target]:
            this, other = ("target", "source") if is_target else ("source", "target")
            raise LayoutError(
                f"{this} {number} shares memory with a {other}; what stays is read while targets are written, so give "
                "targets memory of their own"
            )
        reach[is_target] = max(reach[is_target], stop)
