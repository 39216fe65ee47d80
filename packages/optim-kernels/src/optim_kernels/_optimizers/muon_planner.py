"""Muon's step in grouped launches: a plan for every batch of parameters.

Plans are kept from step to step, and dropped when one of their tensors is replaced; but a plan that a CUDA graph of the
caller's has captured is kept, because replays read its tables. As long as steps resemble each other, the parameters are
not sorted again (`muon_steady`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optim_kernels._graphs import is_capturing_here
from optim_kernels._newton_schulz.config import Tiles, check_tiles
from optim_kernels._optimizers.fitting import refuse, why_not_written
from optim_kernels._optimizers.muon_batches import (
    Batch,
    GroupEntries,
    Key,
    shared_options,
    sorted_entries,
    step_options_of,
)
from optim_kernels._optimizers.muon_entries import step_entries
from optim_kernels._optimizers.muon_options import check_muon_scalars
from optim_kernels._optimizers.muon_steady import Groups, KnownOptions, State, SteadyStep
from optim_kernels.reference.storage import gradient_scale

if TYPE_CHECKING:
    from optim_kernels.functional._muon_batch_plan import MuonBatchPlan
    from optim_kernels.functional._muon_workspace import Workspace

# A capture allows neither tables to be filled nor kernels to be loaded.
NOT_READY = (
    "a step is being captured into a CUDA graph, but these parameters have not been stepped with these options before; "
    "take one step before the capture"
)


class MuonPlanner:
    """Steps Muon groups; holds the plans.

    Args:
        tiles: with ``"shape"`` the bits of a parameter depend on it alone, and not on which others are stepped with it,
            which may cost speed (`MuonPlan`).
        spare: how many multiprocessors stay free for other kernels beside launches that last for a whole iteration:
            NCCL's kernels would otherwise wait for the end of each such launch. No bits depend on it.
        workspace: memory for Newton–Schulz, which planners may share. Parameters are stepped in parts that fit.

    Raises:
        ValueError: for unknown ``tiles``, and for a ``spare`` that is no number of multiprocessors.
    """

    def __init__(self, tiles: Tiles = "auto", *, spare: int = 0, workspace: Workspace | None = None) -> None:
        check_tiles(tiles)
        if isinstance(spare, bool) or not isinstance(spare, int) or spare < 0:
            raise ValueError(f"spare must be a number of multiprocessors, 0 or more, got {spare!r}")
        self._tiles, self._spare, self._workspace = tiles, spare, workspace
        self._plans: dict[Key, MuonBatchPlan] = {}
        self._groups: dict[Key, list[Mapping[str, Any]]] = {}
        # plans that graphs read, of other tensors than those of the latest step with the same key
        self._captured: dict[Key, list[MuonBatchPlan]] = {}
        self._latest: list[MuonBatchPlan] = []
        # why plain torch did parts of the latest `step`
        self.fallbacks: list[str] = []
        # what `again` runs; only if plans did all of the latest step, and read the gradients where they are
        self._done: list[tuple[MuonBatchPlan, Groups]] | None = None
        self._options = KnownOptions([])
        self._steady: SteadyStep | None = None
        if workspace is not None:
            workspace.add_planner(self)

    def step(
        self,
        entries: Sequence[GroupEntries],
        *,
        clip_factor: Tensor | None = None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        state: State | None = None,
    ) -> None:
        """One step of every group with its entries.

        With ``state``, the optimizer's, the step is remembered for `repeat`.
        """
        batches, others, self.fallbacks = sorted_entries(entries, self._tiles)
        if self._workspace is not None:
            batches = self._in_parts(batches, self._workspace)
        self._drop_outdated()
        self._steady = self._done = None
        # these may raise, so they come before anything is updated
        self._latest = [self._plan_for(key, batch) for key, batch in batches.items()]
        hypers = [_hypers_of(batch.groups) for batch in batches.values()]
        for entry in chain.from_iterable(members for _, members in others):
            refuse(why_not_written(entry.param, entry.state), entry.name or f"params[{entry.index}]")
        for group, members in others:
            step_entries(group, members, clip_factor=clip_factor, grad_scale=grad_scale, found_inf=found_inf)
        factor = gradient_scale(clip_factor, grad_scale)
        for plan, hyper in zip(self._latest, hypers):
            plan.run(hyper, factor=factor, found_inf=found_inf)
        # a copy holds what the gradient was in that step
        if not others and not any(plan.num_copied for plan in self._latest):
            self._done = [(plan, batch.groups) for plan, batch in zip(self._latest, batches.values())]
            self._options = KnownOptions([group for group, _ in entries])
        as_given = all(entry.grad is entry.param.grad for batch in batches.values() for entry in batch.entries)
        if state is not None and as_given and not others:
            done = [(self._plans[key], batch.groups, batch.entries) for key, batch in batches.items()]
            self._steady = SteadyStep([group for group, _ in entries], state, done)

    def repeat(
        self,
        groups: Groups,
        state: State | None,
        *,
        clip_factor: Tensor | None = None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> bool:
        """One step like the one before, with the present gradients and hyperparameters; ``False`` if more has changed.

        ``state``: ``None`` if nobody can have changed it since.
        """
        grads = None if self._steady is None else self._steady.gradients(groups, state)
        if self._steady is None or grads is None:
            self.let_go()
            return False
        factor = gradient_scale(clip_factor, grad_scale)
        hypers = [_hypers_of(its_groups) for _, its_groups in self._steady.plans]
        # these may raise, so they come before anything is updated
        for (plan, _), its_grads in zip(self._steady.plans, grads):
            plan.refresh(its_grads, same_layout=True)
        for (plan, _), hyper in zip(self._steady.plans, hypers):
            plan.run(hyper, factor=factor, found_inf=found_inf)
        return True

    def again(
        self,
        *,
        clip_factor: Tensor | None = None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> bool:
        """The latest `step` once more, with the hyperparameters that its groups have now; ``False`` if not possible.

        For callers who know that groups, entries and all their tensors, gradients too, are those they gave to `step`,
        at the same addresses. Only options are compared here.
        """
        if self._done is None or not self._options.are_unchanged():
            return False
        factor = gradient_scale(clip_factor, grad_scale)
        hypers = [_hypers_of(groups) for _, groups in self._done]
        for (plan, _), hyper in zip(self._done, hypers):
            plan.run(hyper, factor=factor, found_inf=found_inf)
        return True

    def let_go(self) -> None:
        """Keep no state alive that others may have dropped, before new ones are made; `repeat` then returns False."""
        self._steady = None

    def forget(self) -> None:
        """Drop all plans but those that graphs read; the next step makes plans anew."""
        for key in self._plans:
            self._put_aside(key)
        self._plans, self._groups, self._latest, self._steady, self._done = {}, {}, [], None, None

    @property
    def plans(self) -> list[MuonBatchPlan]:
        """The plans of the latest step."""
        return self._latest

    def _drop_outdated(self) -> None:
        """Give back the memory of plans whose groups have other options by now."""
        for key, groups in list(self._groups.items()):
            options, *_ = key
            if all(shared_options(group) != options for group in groups):
                self._drop(key)

    def _in_parts(self, batches: Mapping[Key, Batch], workspace: Workspace) -> dict[Key, Batch]:
        """The batches in numbered parts, with workspace reserved; plans of parts that no longer exist are dropped."""
        parts = {(*key, i): part for key, each in batches.items() for i, part in enumerate(each.parts(workspace.limit))}
        for key in [key for key in self._plans if key not in parts and key[:-1] in batches]:
            self._drop(key)
        rooms: dict[torch.device, int] = {}
        for part in parts.values():
            device = part.tensors[0].param.device
            rooms[device] = max(rooms.get(device, 0), part.nbytes_of_x)
        for device, nbytes in rooms.items():
            workspace.reserve(nbytes, device)
        return parts

    def _drop(self, key: Key) -> None:
        """Give back the memory of a plan."""
        self._put_aside(key)
        del self._plans[key], self._groups[key]

    def _plan_for(self, key: Key, batch: Batch) -> MuonBatchPlan:
        from optim_kernels.functional._muon_batch_plan import MuonBatchPlan

        addresses = tuple(t.address_key() for t in batch.tensors)
        plan = self._plans.get(key)
        if plan is not None and plan.address_key != addresses:
            self._put_aside(key)
            plan = None
        if plan is None:
            plan = next((each for each in self._captured.get(key, []) if each.address_key == addresses), None)
        if (plan is None or not plan.has_run) and is_capturing_here():
            raise RuntimeError(NOT_READY)
        if plan is None:
            group = batch.groups[0]
            plan = MuonBatchPlan(
                batch.tensors,
                **step_options_of(group),
                num_groups=len(batch.groups),
                tiles=self._tiles,
                spare=self._spare,
                workspace=self._workspace,
            )
            plan.let_go()
        self._plans[key] = plan
        self._groups[key] = batch.groups
        plan.refresh([t.grad for t in batch.tensors])
        return plan

    def _put_aside(self, key: Key) -> None:
        """Keep the plan of ``key`` aside if captured graphs read it, or one is being captured."""
        plan = self._plans[key]
        # its own graph may not be dropped then
        is_needed = plan.was_captured or is_capturing_here()
        if is_needed and plan not in self._captured.get(key, []):
            self._captured.setdefault(key, []).append(plan)


def _hypers_of(groups: Groups) -> list[tuple[Any, ...]]:
    """The groups' hyperparameters; raises if one is not a number, so call it before anything is updated."""
    return list(map(check_muon_scalars, groups))
