"""What the three optimizers share: a step in phases, over one rank or many.

    1. agree     which parameters have a gradient on any rank: one small message
    2. reduce    every bucket not yet reduced during backward, in plan order
    3. norm      only when clipping: local sums of powers, one small message, a factor on the device
    4. update    the own chunk of each bucket as its reduction arrives, by ``optim_kernels.functional``
    5. gather    the chunk returns to all ranks, in place, while the next bucket is updated and, where modules can
                 wait for it, while the next forward pass runs

DTensors, and with one rank all parameters, are in no bucket: they are updated where they lie, so that with one rank
results and state equal the single-device optimizer's bit for bit.

How parameters come into the plan is said in ``planned``. What an update is belongs to a ``Route``, where parameters lie
to ``_reduction.bucketed`` and ``sharded``; this module never looks inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from optim_dist import clip
from optim_dist._optimizers import interchange, states, step_checks
from optim_dist._optimizers.consolidation import IS_WHOLE, Consolidated, consolidate
from optim_dist._optimizers.construction import Entry, local
from optim_dist._optimizers.explain import Explanation, explain
from optim_dist._optimizers.moved_state import take_state
from optim_dist._optimizers.multipliers import ScaledGroups, given_multipliers
from optim_dist._optimizers.norm import norm_over_ranks
from optim_dist._optimizers.planned import PlannedOptimizer
from optim_dist._optimizers.shards import MASTER_KEYS, Item, Route, Shard, StepContext
from optim_dist.plan import RouteName
from optim_kernels.adamw_groups import FollowedWrites, can_be_followed

# the options of a group that say what its states hold, and in which dtypes; beside that beta2 is not None
STORAGE_OPTIONS = ("amsgrad", "state_dtype", "momentum_dtype", "master_weights", "stochastic_rounding")

Method = TypeVar("Method", bound=Callable[..., Any])


def _not_compiled(method: Method) -> Method:
    """Out of sight of ``torch.compile``, which would make graphs of the host's work, some for every parameter."""
    hidden: Method = torch.compiler.disable(method)
    return hidden


class DistOptimizer(PlannedOptimizer):
    """A ``torch.optim.Optimizer`` whose step runs over the ranks of a process group.

    Subclasses say which route a group takes (``_route_name``) and give a ``Route`` for each name (``_routes``).
    """

    _routes: ClassVar[Mapping[RouteName, Route]]

    grad_norm: Tensor | None
    _with_all_keys: set[int]  # by id the parameters whose states have all that their options want
    _made_to_show: dict[int, set[str]]  # by id the keys that states have for torch alone, on this rank perhaps alone
    _consolidated: Consolidated | None = None

    def _connect(self) -> None:
        self._caches: dict[object, dict[Any, Any]] = {}
        self._with_all_keys = set()
        self._made_to_show = {}
        self._storage: list[list[Any]] = []
        self._scaled_groups = ScaledGroups()
        self._factor: Tensor | None = None
        self._consolidated = None
        self.grad_norm = None
        super()._connect()
        self._writes = FollowedWrites()
        self._note_writes()

    def _extend(self, found: Sequence[Entry]) -> None:
        super()._extend(found)
        self._storage += map(_storage_options, self.param_groups[len(self._storage) :])
        self._outdate("add_param_group()")

    @torch.no_grad()
    def rebuild_plan(self, order: Sequence[str | Tensor] | None = None) -> None:
        """Plan anew for the parameters that need a gradient now: after unfreezing some, or freezing some for good.

        Collective, between ``zero_grad()`` and the next backward pass. Parameters that stay keep their state, bit for
        bit, whoever owns them now; new ones begin afresh, and are those of the first rank, as at construction
        (``sync_params``); the state of those that are frozen by now is dropped, and so are their buckets.

        Args:
            order: names or parameters in the order in which forward passes use them, for buckets to be reduced and
                gathered by; every one that is trained, and others if you like. None: the order of construction.

        Raises:
            RuntimeError: on every rank, before anything has changed: with gradients around, or if another rank refuses.
        """
        plan, found, meshes = self._newly_planned(order)
        with self.begun_together("rebuild_plan()"):
            self.wait()
            self._follow_writes()
            for bucket in self._bucketed.buckets:
                self._caches.pop(bucket, None)
            moved = take_state(self, plan, found)
            for entry in self._entries:
                if entry.parameter not in self.state:
                    self._with_all_keys.discard(id(entry.parameter))
                    self._made_to_show.pop(id(entry.parameter), None)
            self._replace(plan, found, meshes)
            moved.put(self)
            self._scaled_groups, self._writes = ScaledGroups(), FollowedWrites()
            self._note_writes()
            self._outdate("rebuild_plan()")
            self._restart()

    # a step

    @_not_compiled
    def step(self, closure: Callable[[], Any] | None = None, *, clip_factor: Tensor | None = None) -> Any:
        """Reduce what is not reduced yet, update, and return the parameters to all ranks.

        Args:
            closure: evaluates the loss again, with gradients enabled; its result is returned.
            clip_factor: a 0-dim tensor that gradients are multiplied by, beside the factor of ``clip_grad_norm_``.
        """
        step_checks.check_factor(clip_factor)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._reduce()
            self._check_missing()
            self._follow_storage()
            step_checks.check_scaler(self, self._bucketed.is_eager)
            if self._options.max_norm is not None:
                self.clip_grad_norm_(self._options.max_norm)
            elif self._options.skip_nonfinite and self._factor is None:
                self.grad_norm = self.measure_norm()
            if self._options.debug:
                step_checks.compare_scalars(self.param_groups, self._entries, self._factor, self._communicator)
            with self.begun_together("step()"):
                self._outdate("step()")
                self._update(self._context(clip_factor))
                self._restart()
            if self._options.debug:
                self._bucketed.check_replicas("after the step, ")
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True: ``GradScaler`` leaves unscaling to ``step()``, which reads grad_scale and found_inf on the device.

        It asks before it looks for infinities, and writes every gradient back where it was while it looks: over the
        sums of reductions that backward has launched, unless they are done by then.
        """
        self._bucketed.finish_launched()
        return True

    def _reduce(self) -> None:
        """Phases 1 and 2, once a step: agree on which gradients exist, launch every reduction."""
        self.check_open()
        self._communicator.check_ranks()
        step_checks.check_listed(self.param_groups, self._listed)
        self._check_views()
        self._scaled_groups.follow(self._entries)
        step_checks.check_left_out(self._left_out)
        self._bucketed.check()
        self._resident.check()
        if self._options.debug and self._resident.layouts:
            step_checks.compare_gradients(self._entries, self._communicator)
        with self.begun_together("the reduction of gradients"):
            if self._bucketed.reduce(len(self.plan.parameters)) or self._resident.were_dropped:
                self._factor = None  # of gradients that were dropped since

    def _check_missing(self) -> None:
        """Refuse what groups with ``missing_grad="raise"`` lack: on all ranks, and before anything has moved.

        Reads a counter on the host, which waits for the device, but only if this rank itself has no gradient.
        """
        if all(group.get("missing_grad") != "raise" for group in self.param_groups):
            return
        for index, (spec, entry) in enumerate(zip(self.plan.parameters, self._entries)):
            # others have none of a DTensor either
            counts = None if spec.sharding else self._bucketed.counts
            p, group = entry.parameter, self.param_groups[entry.group]
            # an option of Muon's, which groups of AdamW may keep like any other that they do not know
            is_needed = spec.route == "muon" and p.requires_grad and group.get("missing_grad") == "raise"
            if is_needed and not self._has_gradient(index) and (counts is None or not counts[index].item()):
                raise RuntimeError(f"{entry.name} has no gradient on any rank; pass missing_grad='skip' or 'zero'")

    def _follow_storage(self) -> None:
        """Complete states anew once groups were told to store them otherwise; refuse what they cannot store."""
        storage = [*map(_storage_options, self.param_groups)]
        if storage != self._storage:
            for group in self.param_groups:
                self._check_group(group)
            self._check_blocks()
            self._with_all_keys.clear()
            self._storage = storage

    def _block(self, entry: Entry) -> int:
        return self._routes[entry.route].block(entry.parameter, self.param_groups[entry.group])

    def _context(self, clip_factor: Tensor | None) -> StepContext:
        """The step's scalars, from clipping, averaging, the caller and a ``GradScaler``."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        if found_inf is not None:
            # a scaler that has seen no gradient of ours on this rank gives the number 0
            found_inf = torch.as_tensor(found_inf, dtype=torch.float32, device=self._communicator.device).reshape(1)
            if self._bucketed.buckets:
                # the scaler saw gradients before they were added, or while they were
                found_inf = torch.maximum(found_inf, self._bucketed.overflow().to(found_inf.device))
            # what overflowed on one rank is in the sum of all
            found_inf = self._communicator.gather_message(found_inf).amax()
        if self._options.skip_nonfinite and self.grad_norm is not None:
            nonfinite = (~torch.isfinite(self.grad_norm)).float()
            found_inf = nonfinite if found_inf is None else torch.maximum(found_inf, nonfinite)
        factor = _product(self._factor, clip_factor)
        return StepContext(factor, grad_scale, found_inf, tiles=self._options.tiles)

    def _update(self, context: StepContext) -> None:
        """Phases 4 and 5."""
        self._follow_writes()
        self._scaled_groups.refresh(self.param_groups)
        counts = self._bucketed.counts
        averaging = {
            divided: replace(
                context, factor=_product(factor, context.factor), counts=counts, present=self._bucketed.present
            )
            for divided, factor in self._bucketed.factors.items()
        }
        self._bucketed.update(
            lambda bucket, shards: self._apply(
                bucket.plan.route, [*map(self._item, shards)], averaging[bucket.divided], bucket
            )
        )
        self._resident.update(
            context, self.param_groups, self._item, lambda route, items: self._apply(route, items, context, route)
        )
        self._bucketed.finish_step()
        # for autograd, which then refuses to differentiate through values that are gone: what was written to are views
        # with versions of their own
        torch.autograd.graph.increment_version(
            [entry.parameter for index, entry in enumerate(self._entries) if self._has_gradient(index)]
        )
        self._note_writes()

    def _has_gradient(self, index: int) -> bool:
        """Whether a parameter of the plan has a gradient on this rank, or had one before it was reduced."""
        is_reduced = self._bucketed.counts is not None and bool(self._bucketed.present[index])
        return is_reduced or self._entries[index].parameter.grad is not None

    def _follow_writes(self) -> None:
        """Let fp32 masters follow what others wrote to their parameters since the last step."""
        shards = self._with_masters()
        if shards:
            masters = [self.state[shard.parameter]["master"] for shard in shards]
            self._writes.follow([shard.parameter for shard in shards], [shard.value for shard in shards], masters)

    def _note_writes(self) -> None:
        """Masters fit their parameters: what is written to these from now on is followed."""
        self._writes.note([shard.parameter for shard in self._with_masters()])

    def _with_masters(self) -> list[Shard]:
        """What this rank updates by way of an fp32 master."""
        if all(group.get("master_weights") != "fp32" for group in self.param_groups):
            return []
        found = (shard for shard in self.shards() if "master" in self.state.get(shard.parameter, {}))
        return [shard for shard in found if can_be_followed(shard.parameter)]

    def _apply(self, route: RouteName, items: Sequence[Item], context: StepContext, key: object) -> None:
        if items:
            self._routes[route].update(items, context, self._caches.setdefault(key, {}))

    def _item(self, shard: Shard) -> Item:
        state = self._state_of(shard)
        if isinstance(shard.parameter, DTensor):
            state = {key: local(value) for key, value in state.items()}
        group = self._scaled_groups.of(shard.index, shard.group, self.param_groups[shard.group])
        return Item(shard, group, state)

    def _state_of(self, shard: Shard) -> dict[str, Any]:
        state = self.state[shard.parameter]
        if not state or id(shard.parameter) not in self._with_all_keys:
            # its parameter may have been loaded since
            for key in self._made_to_show.pop(id(shard.parameter), set()) & MASTER_KEYS:
                del state[key]
            self._complete(shard, state)
            self._with_all_keys.add(id(shard.parameter))
        return state

    @_not_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those already reduced for a step that did not happen included."""
        if not self._failure:  # else nobody else takes part
            self._bucketed.drop()
        super().zero_grad(set_to_none)
        self._restart()

    def _restart(self) -> None:
        self._factor = None
        self._bucketed.restart()
        self._resident.restart()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; once used, passes outside it reduce while they run.

        The first time a collective: every rank begins with it in the same step. Refused with ``gradients="streamed"``.
        """
        with self._bucketed.no_sync():
            yield

    # norms

    @_not_compiled
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients; the next ``step()`` scales them to ``max_norm``. See ``optim_dist.clip``."""
        return clip.clip_grad_norm_(self, max_norm, norm_type)

    @torch.no_grad()
    def measure_norm(self, norm_type: float = 2.0) -> Tensor:
        """Phase 3: the norm of the gradients as the update will see them: 0-dim, fp64, the same bits on every rank."""
        self._reduce()
        with self.begun_together("the norm of gradients"):
            # gradients in buckets are sums over ranks, others arrive averaged
            homes = [
                (self._bucketed.reduced_gradients(divided), factor)
                for divided, factor in self._bucketed.factors.items()
            ]
            if self._resident or not homes:
                homes.append((self._resident.gradients(), None))
            norm = norm_over_ranks(homes, float(norm_type), self._communicator)
        grad_scale = getattr(self, "grad_scale", None)
        return norm if grad_scale is None else norm / grad_scale

    def clip_with(self, factor: Tensor, norm: Tensor) -> None:
        """Let the next ``step()`` multiply gradients by ``factor``; ``norm`` is what ``grad_norm`` shows."""
        self.grad_norm = norm
        if not (self._bucketed.buckets or self._resident.has_gradients):
            return  # those to come are not what was looked at
        # of several the smallest, as gradients that are clipped again and again have it
        self._factor = factor if self._factor is None else torch.minimum(self._factor, factor)
        self._resident.note_clipped()

    # state

    def new_state(self, shard: Shard) -> dict[str, Any]:
        """A fresh state for a shard, as its first step would find it."""
        state: dict[str, Any] = {}
        self._complete(shard, state)
        return state

    def completed_state(self, shard: Shard) -> dict[str, Any]:
        """A shard's state with all that its options want, made where it is missing."""
        kept = self.state[shard.parameter]
        state = dict(kept)
        if not kept or id(shard.parameter) not in self._with_all_keys:
            self._complete(shard, state)
            made = {key: value for key, value in state.items() if key not in kept}
            # torch takes from a flattened state only the keys that it finds in ours
            kept.update(made)
            self._made_to_show.setdefault(id(shard.parameter), set()).update(made)
        return state

    def kept_state(self, shard: Shard) -> dict[str, Any]:
        """A shard's state as steps and loads have made it: on all ranks alike, whichever have called state_dict()."""
        shown = self._made_to_show.get(id(shard.parameter), set())
        return {key: value for key, value in self.state.get(shard.parameter, {}).items() if key not in shown}

    def _complete(self, shard: Shard, state: dict[str, Any]) -> None:
        route = self._routes[self.plan.parameters[shard.index].route]
        route.complete_state(shard, self.param_groups[shard.group], state)

    def encode_state(self, shard: Shard) -> None:
        """Bring a loaded state into 8-bit codes if the group has them: not only at the next step, to save memory."""
        spec, group = self.plan.parameters[shard.index], self.param_groups[shard.group]
        if self.state.get(shard.parameter) and spec.block > 1:
            self._routes[spec.route].encode_state(shard, group, self.state[shard.parameter])

    def state_dict(self) -> dict[str, Any]:
        """torch's form, for ``torch.save`` on every rank and for ``torch.distributed.checkpoint``.

        Over several ranks it lists the state of every parameter, of which each rank holds what it owns: as DTensors,
        or as parts that can be saved, loaded and copied but not computed with. See also ``consolidate_state_dict``.
        8-bit codes are copied as the fp32 numbers they stand for, which become the same codes again when they are
        loaded.
        """
        self.check_open()
        step_checks.check_listed(self.param_groups, self._listed)
        whole = None if self._consolidated is None else self._consolidated.current()
        self.wait()
        state_dict = super().state_dict()
        if whole is not None:
            state_dict |= {"state": whole, IS_WHOLE: True}
        elif self._communicator.world_size > 1:
            state_dict["state"] = interchange.complete_state(self)
        else:
            states.make_codes_numbers(state_dict)
        routes = map(self._route_name, self.param_groups)
        state_dict["param_groups"] = [
            interchange.with_torch_keys(group, route) for group, route in zip(state_dict["param_groups"], routes)
        ]
        states.make_groups_plain(state_dict)
        return state_dict if whole is not None else states.stamped(state_dict, self.plan, self._communicator.rank)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the same rank of the same plan, or what ``torch.distributed.checkpoint`` has loaded.

        Or the whole state that ``consolidate_state_dict`` has gathered, the same on every rank, which keeps its part.
        """
        self.check_open()
        step_checks.check_listed(self.param_groups, self._listed)
        state_dict = states.adapted(self, state_dict)
        if IS_WHOLE in state_dict:
            state_dict = states.cut_full_state_dict(self, state_dict, self.shards())
        states.check_stamp(state_dict, self.plan, self._communicator.rank)
        states.check_states(self, state_dict)
        if self._communicator.world_size > 1:
            state_dict = interchange.unwrapped_state(self, state_dict)
        with states.dtypes_kept(self):
            super().load_state_dict(state_dict)
        self._with_all_keys.clear()
        self._made_to_show.clear()
        self._outdate("load_state_dict()")
        self._show_state()
        self._note_writes()

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Let ``state_dict()`` on rank ``to`` be the whole state, until it changes; as torch's of the name. Collective.

        It is in torch's one-process form, on the CPU. ``state_dict()`` on the other ranks still has their parts. After
        the next ``step()`` it is an error on every rank: call this again, or with None to have everyone's part again.

        Args:
            to: a rank of the optimizer's process group.
        """
        self._consolidated = consolidate(self, self.shards(), self._communicator, to)

    def _outdate(self, how: str) -> None:
        if self._consolidated is not None:
            self._consolidated.outdate(how)

    def full_state_dict(self) -> dict[str, Any]:
        """The state of all ranks in torch's one-process form, on the first rank's CPU; elsewhere ``{}``. Collective."""
        return states.full_state_dict(self, self.shards(), self._communicator)

    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a one-process state; every rank passes the same and keeps its part."""
        state_dict = states.adapted(self, state_dict)
        self.load_state_dict(states.cut_full_state_dict(self, state_dict, self.shards()))

    def explain(self) -> Explanation:
        """Where every parameter is, who updates it, and what a step sends; text, with ``.data`` for programs."""
        multipliers = given_multipliers(self._entries)
        buckets, owners = self._bucketed.buckets, self._resident.owners
        held = sum(states.nbytes(value) for state in self.state.values() for value in state.values())
        gradient_bytes = self._bucketed.gradient_bytes
        return explain(self.plan, self._options, self._communicator, buckets, owners, held, gradient_bytes, multipliers)


def _storage_options(group: dict[str, Any]) -> list[Any]:
    return [*map(group.get, STORAGE_OPTIONS), group.get("beta2") is None]


def _product(*factors: Tensor | None) -> Tensor | None:
    """The product of those that are given, on the device of the first; None if none is."""
    given = [factor for factor in factors if factor is not None]
    return reduce(lambda product, factor: product * factor.to(product), given) if given else None
