"""What the three optimizers share: a step in phases, over one rank or many.

    1. agree     which parameters have a gradient on any rank: one small message
    2. reduce    every bucket not yet reduced during backward, in plan order
    3. norm      only when clipping: local sums of powers, one small message, a factor on the device
    4. update    this rank's chunk of each bucket once its reduction is complete, by the bucket's ``Route``
    5. gather    all-gather the chunks in place while the next bucket is updated and, where modules can wait for
                 it, while the next forward pass runs

DTensors, and with one rank all parameters (unless ``order="tree"``), are in no bucket: they are updated where they lie,
so that with one rank results and state equal the single-device optimizer's bit for bit.

``planned`` puts parameters into the plan, ``stateful`` keeps their state, a ``Route`` defines the update, and
``bucketed`` and ``sharded`` know where parameters lie; this module never looks inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from optim_dist import clip
from optim_dist._optimizers import step_checks
from optim_dist._optimizers.agreement import AFTER_STEP
from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.explain import Explanation, explain
from optim_dist._optimizers.group_checks import GroupChecks
from optim_dist._optimizers.kept_items import HeldStates, KeptItems
from optim_dist._optimizers.layouts import local
from optim_dist._optimizers.multipliers import ScaledGroups, given_multipliers
from optim_dist._optimizers.norm import check_norm_type, norm_over_ranks
from optim_dist._optimizers.parameter_checks import Meshes
from optim_dist._optimizers.remarks import remarks
from optim_dist._optimizers.shards import Item, Shard, StepContext
from optim_dist._optimizers.stateful import StatefulOptimizer
from optim_dist._optimizers.states import nbytes
from optim_dist.plan import Plan, RouteName
from optim_kernels.clip import clip_factor as factor_of_norm
from optim_kernels.muon_groups import Workspace, workspace_for
from optim_kernels.states import out_of_inference_mode
from optim_utils.compiling import not_compiled


class DistOptimizer(StatefulOptimizer):
    """A ``torch.optim.Optimizer`` whose step runs over the ranks of a process group.

    Beside torch's methods users have ``clip_grad_norm_``, ``no_sync``, ``wait``, ``prefetch``, ``explain``,
    ``rebuild_plan``, ``close``, ``full_state_dict``, ``load_full_state_dict`` and ``consolidate_state_dict``, and the
    attributes ``plan`` and ``grad_norm``: the norm before the latest clipping, None if there was none. Other names
    belong to this package.

    Subclasses give a ``Route`` for each update (``_routes``) and, if there are several, say which of them a group takes
    (``_route_name``).
    """

    grad_norm: Tensor | None
    _factor: Tensor | None  # clip factor for the next step
    _group_checks: GroupChecks
    _scaled_groups: ScaledGroups
    _kept: KeptItems | None  # items of the buckets
    _fit_states: HeldStates | None  # of parameters in no bucket, as they were when they were last checked
    _caches: dict[tuple[RouteName, object], dict[Any, Any]]  # a route's own, one for all that it updates together
    _workspace: Workspace | None  # for Newton–Schulz

    def _connect(self) -> None:
        self._caches = {}
        self._workspace = workspace_for(self._options.ns_workspace_mb)
        self._kept = self._fit_states = None
        self._group_checks = GroupChecks()
        self._scaled_groups = ScaledGroups()
        self._factor = None
        self.grad_norm = None
        super()._connect()

    def _replace(self, plan: Plan, found: list[Entry], meshes: Meshes) -> None:
        self._forget_states()
        for bucket in self._bucketed.buckets:
            self._caches.pop((bucket.plan.route, bucket), None)
        super()._replace(plan, found, meshes)
        self._scaled_groups = ScaledGroups()
        self._restart()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._caches.clear()
            self._kept = self._fit_states = self._workspace = None

    def _note_loaded(self) -> None:
        super()._note_loaded()
        self._forget_states()

    def _forget_states(self) -> None:
        """Drop references to old states now, so that their memory is not held beside new ones until the next step."""
        self._kept = self._fit_states = None
        for (route, _), cache in self._caches.items():
            self._routes[route].forget(cache)

    @not_compiled
    @out_of_inference_mode
    def step(self, closure: Callable[[], Any] | None = None, *, clip_factor: Tensor | None = None) -> Any:
        """Reduce gradients that are not reduced yet, update, and all-gather the parameters.

        Args:
            closure: evaluates the loss again, with gradients enabled; its result is returned.
            clip_factor: a 0-dim tensor that multiplies gradients, in addition to the factor of ``clip_grad_norm_``.
        """
        with self._of_one_step():
            step_checks.check_factor(clip_factor)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with torch.no_grad():
                self._reduce()
                self._check_reduced()
                self._take_norm()
                with self.begun_together("step()"):
                    self._outdate("step()")
                    self._update(self._context(clip_factor))
                    self._restart()
                if self._options.debug:
                    self._bucketed.check_replicas(AFTER_STEP)
        return loss

    @contextmanager
    def _of_one_step(self) -> Iterator[None]:
        """Forget what a ``GradScaler`` has told of this step's gradients if the step fails.

        The scaler takes that back after a step that succeeds. If it finds it at the next step it multiplies the two
        scales, by both of which the gradients would then be divided.
        """
        try:
            yield
        except BaseException:
            for name in ("grad_scale", "found_inf"):
                vars(self).pop(name, None)
            raise

    # 1, 2: agree and reduce

    def _reduce(self) -> None:
        """Phases 1 and 2, once a step: agree on which gradients exist, launch every reduction."""
        self.check_open()
        self.communicator.check_ranks()
        self.check_listed()
        self._places.check()
        self._check_kinds()
        self._planned_views.check(self.param_groups, self._views)
        self._group_checks.check(self.param_groups, self._routes_of_groups)
        self._scaled_groups.follow(self.entries)
        step_checks.check_left_out(self._left_out)
        self._bucketed.check()
        self._unbucketed.check()
        if self._options.debug and self._unbucketed.layouts:
            step_checks.compare_gradients(self.entries, self.communicator)
        if self._unbucketed.supposed_replicas:
            step_checks.compare_replicas(self._unbucketed.supposed_replicas, self.communicator)
            if not self._options.debug:
                self._unbucketed.supposed_replicas.clear()
        with self.begun_together("the reduction of gradients"):
            if self._bucketed.reduce(len(self.plan.parameters)) or self._unbucketed.were_dropped:
                self._factor = None  # its gradients have been dropped since

    def _has_gradient(self, index: int) -> bool:
        """Whether a parameter of the plan has a gradient on this rank, or had one before it was reduced."""
        is_reduced = self._bucketed.counts is not None and bool(self._bucketed.present[index])
        return is_reduced or self.entries[index].parameter.grad is not None

    def _check_reduced(self) -> None:
        """Refuse what makes a step impossible, once it is known which gradients exist and before anything changes."""
        counts = self._bucketed.counts
        step_checks.check_missing(self.param_groups, self.plan.parameters, self.entries, counts, self._has_gradient)
        self._follow_storage()
        step_checks.check_unscaled(self, self._bucketed.collects_under_backward)

    # 3: norm, and the scalars of the step

    def _take_norm(self) -> None:
        """Phase 3, if the options ask for it: clip to ``max_norm``, or take a norm for ``skip_nonfinite``."""
        if self._options.max_norm is not None:
            norm = self._norm(2.0).to(self.plan.scalar_dtype)
            self.clip_with(factor_of_norm(norm, self._options.max_norm), norm)
        elif self._options.skip_nonfinite and self._factor is None:
            self.grad_norm = self._norm(2.0).to(self.plan.scalar_dtype)
        if self._options.debug:
            step_checks.compare_scalars(self.param_groups, self.entries, self._factor, self.communicator)

    @not_compiled
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients; the next ``step()`` scales them to ``max_norm``. See ``optim_dist.clip``."""
        return clip.clip_grad_norm_(self, max_norm, norm_type)

    @out_of_inference_mode
    @torch.no_grad()
    def measure_norm(self, norm_type: float = 2.0) -> Tensor:
        """Phase 3: the norm of the gradients as the update will see them: 0-dim, fp64, the same bits on every rank."""
        check_norm_type(float(norm_type), self._options.is_tree)
        self._reduce()
        return self._norm(norm_type)

    def _norm(self, norm_type: float) -> Tensor:
        """The norm of gradients whose reduction has begun."""
        with self.begun_together("the norm of gradients"):
            # gradients in buckets are sums over ranks, others arrive averaged
            homes = [
                (self._bucketed.reduced_gradients(is_averaged), factor)
                for is_averaged, factor in self._bucketed.factors.items()
            ]
            if self._unbucketed or not homes:
                homes.append((self._unbucketed.gradients(), None))
            norm = norm_over_ranks(homes, float(norm_type), self.communicator, is_exact=self._options.is_tree)
        grad_scale = getattr(self, "grad_scale", None)
        return norm if grad_scale is None else norm / grad_scale

    def clip_with(self, factor: Tensor, norm: Tensor) -> None:
        self.grad_norm = norm
        if not (self._bucketed.buckets or self._unbucketed.has_gradients):
            return  # no gradients exist; this norm says nothing of those to come
        # the smallest of several factors: what clipping the gradients in place several times amounts to
        self._factor = factor if self._factor is None else torch.minimum(self._factor, factor)
        self._unbucketed.note_clipped()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True: ``GradScaler`` leaves unscaling to ``step()``, which reads grad_scale and found_inf on the device.

        The scaler reads this property before it looks for infinities. While it looks it writes every gradient back in
        place. Reductions that backward has launched must therefore be finished before, or begin after it; else the
        scaler would overwrite their sums.
        """
        self._bucketed.finish_launched()
        return True

    def _context(self, clip_factor: Tensor | None) -> StepContext:
        """The step's scalars from clipping, the caller and a ``GradScaler``, without the factor that averages."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        if found_inf is not None:
            # the number 0, not a tensor, if the scaler has seen no gradient of ours on this rank
            found_inf = torch.as_tensor(found_inf, dtype=torch.float32, device=self.communicator.device).reshape(1)
            if self._bucketed.buckets:
                # the scaler saw gradients before they were summed over ranks, or meanwhile: the sums may overflow
                found_inf = torch.maximum(found_inf, self._bucketed.overflow().to(found_inf.device))
            # an overflow on one rank is in the sums of all ranks
            scale = torch.zeros_like(found_inf) if grad_scale is None else grad_scale.to(found_inf).reshape(1)
            found = self.communicator.gather_numbers(torch.cat([found_inf, scale]))
            found_inf = found[:, 0].amax()
            if self._options.debug or found.device.type == "cpu":  # elsewhere the host would wait
                step_checks.check_scales(found[:, 1].tolist(), self.communicator.ranks)
        if self._options.skip_nonfinite and self.grad_norm is not None:
            nonfinite = (~torch.isfinite(self.grad_norm)).float()
            found_inf = nonfinite if found_inf is None else torch.maximum(found_inf, nonfinite)
        factor = _product(self._factor, clip_factor)
        new_planner = partial(self._options.muon_planner, self.communicator.world_size, self._workspace)
        return StepContext(factor, grad_scale, found_inf, new_planner=new_planner)

    # 4, 5: update and gather

    def _update(self, context: StepContext) -> None:
        """Phases 4 and 5."""
        self._scaled_groups.refresh(self.param_groups)
        kept = self._kept_items()
        self._check_unbucketed()
        followed = None if self._unbucketed else kept
        self._masters.follow(self, followed)
        counts = None if self._bucketed.lacks_none else self._bucketed.counts
        averaging = {
            is_averaged: replace(
                context,
                factor=_product(factor, context.factor),
                are_kept=True,
                counts=counts,
                present=self._bucketed.present,
            )
            for is_averaged, factor in self._bucketed.factors.items()
        }
        self._bucketed.update(
            lambda bucket: self._apply(bucket.plan.route, kept.of(bucket), averaging[bucket.is_averaged], bucket)
        )
        self._unbucketed.update(
            context, self.param_groups, self._item, lambda route, items: self._apply(route, items, context, route)
        )
        self._bucketed.finish_step()
        # autograd must refuse to differentiate through the old values, but the update wrote to views that have version
        # counters of their own
        reduced = self._bucketed.present if self._bucketed.counts is not None else repeat(0.0)
        parameters = [entry.parameter for entry in self.entries]
        torch.autograd.graph.increment_version(
            [p for p, was_present in zip(parameters, reduced) if was_present or p.grad is not None]
        )
        self._masters.note(self, followed)

    def _apply(self, route: RouteName, items: Sequence[Item], context: StepContext, key: object) -> None:
        if items:
            self._routes[route].update(items, context, self._caches.setdefault((route, key), {}))

    def _kept_items(self) -> KeptItems:
        """The buckets' items: those of the previous step, unless something that they are made of has changed."""
        groups, multipliers, kept = self.param_groups, self._scaled_groups.multipliers, self._kept
        if kept is None or not kept.are_for(groups, multipliers, self.state, self._complete_ids):
            kept = self._kept = KeptItems(self._bucketed.shards_of, groups, multipliers, self.state, self._checked_item)
        return kept

    def _check_unbucketed(self) -> None:
        """Refuse states of parameters in no bucket that somebody has changed to what cannot be updated."""
        if not self._unbucketed or (self._fit_states is not None and self._fit_states.are_those_of(self.state)):
            return
        for shard in self._unbucketed.shards():
            if self.state.get(shard.parameter):  # others begin in this step
                self._checked_item(shard)
        self._fit_states = HeldStates(self.state)

    def _checked_item(self, shard: Shard) -> Item:
        """The item, of whose state somebody may have changed what it holds."""
        item = self._item(shard)
        self._routes[self.plan.parameters[shard.index].route].check_state(shard, item.group, item.state)
        if item.group.get("master_weights") is None or item.master is not None:
            return item
        # somebody has taken the master out
        self._complete_ids.discard(id(shard.parameter))
        return self._item(shard)

    def _item(self, shard: Shard) -> Item:
        state = self._state_of(shard)
        if isinstance(shard.parameter, DTensor):
            state = {key: local(value) for key, value in state.items()}
        group = self._scaled_groups.of(shard.index, shard.group, self.param_groups[shard.group])
        return Item(shard, group, state)

    # between steps

    @not_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, including those already reduced for a step that was not made."""
        if self._failure:  # other ranks do not take part
            self._bucketed.keep_groups()
        else:
            self._bucketed.drop()
        super().zero_grad(set_to_none)
        self._restart()

    def _restart(self) -> None:
        self._factor = None
        self._bucketed.restart()
        self._unbucketed.restart()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; after its first use, those outside reduce while they run.

        The first use is a collective: every rank makes it in the same step. Refused with ``gradients="streamed"``.
        """
        with self._bucketed.no_sync():
            yield

    def explain(self) -> Explanation:
        """Where every parameter is, who updates it, and what a step sends; text, with ``.data`` for programs."""
        return explain(
            self.plan,
            self._options,
            self.communicator,
            self._bucketed,
            self._unbucketed,
            state_bytes=sum(nbytes(value) for state in self.state.values() for value in state.values()),
            multipliers=given_multipliers(self.entries),
            remarks=remarks(self.param_groups, self.entries, self._options.model),
        )


def _product(*factors: Tensor | None) -> Tensor | None:
    """The product of the factors that are not None, on the device of the first; None if there are none."""
    given = [factor for factor in factors if factor is not None]
    return reduce(lambda product, factor: product * factor.to(product), given) if given else None
