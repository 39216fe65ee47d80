"""What the three optimizers share: a step in phases, over one rank or many.

    1. agree     which parameters have a gradient on any rank: one small message, always sent
    2. reduce    every bucket not yet reduced during backward, in plan order
    3. norm      only when clipping: local sums of powers, one small message, a factor on the device
    4. update    the own chunk of each bucket as its reduction arrives, by ``optim_kernels.functional``
    5. gather    the chunk returns to all ranks, in place, while the next bucket is updated

With one rank there are no buckets: phases 1, 2 and 5 are empty and the update works on parameters where they lie, so
that results and state equal the single-device optimizer's bit for bit.

What an update is belongs to a ``Route``; this module never looks inside one. No condition that may differ between
ranks (a gradient is missing, nothing is owned, a gradient came early) decides whether or when a collective runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from optim_dist import _construction as construction
from optim_dist import _states as states
from optim_dist._collectives import Communicator
from optim_dist._explain import Explanation, explain
from optim_dist._norm import combine_powers, power_sum
from optim_dist._options import Options
from optim_dist._shards import Item, Route, Shard, StepContext, attach_gradients, bucket_shards, whole_shards
from optim_dist.buckets import Bucket, build_bucket
from optim_dist.overlap import BackwardReduction
from optim_dist.plan import Plan, RouteName, plan_parameters
from optim_dist.reducers import Exact, Reducer, ReduceScatter
from optim_utils.param_groups import MatrixView

# in order of construction, so that every rank goes through them alike
live_optimizers: dict[int, weakref.ref[DistOptimizer]] = {}


class DistOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` whose step runs over the ranks of a process group.

    Subclasses say how a group is routed (``_route_name``) and give a ``Route`` for each name (``_routes``).
    """

    # GradScaler then leaves unscaling to step(), which reads grad_scale and found_inf on the device
    _step_supports_amp_scaling = True

    _routes: ClassVar[Mapping[RouteName, Route]]

    plan: Plan
    grad_norm: Tensor | None
    _closed = False

    def __init__(self, params: Any, defaults: dict[str, Any], options: Options) -> None:
        self._options = options
        construction.check_model(options.model)
        super().__init__(construction.without_duplicates(params), defaults)
        self._connect()

    def _route_name(self, group: dict[str, Any]) -> RouteName:
        raise NotImplementedError

    def _views(self, group: dict[str, Any]) -> Sequence[MatrixView | None]:
        """How each parameter is read as matrices; None where that does not matter."""
        return [None] * len(group["params"])

    def _completed(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group with options that are not the same for all groups."""
        return group

    def _check_group(self, group: dict[str, Any]) -> None:
        """Refuse hyperparameters that make no sense."""

    # construction

    def _connect(self) -> None:
        """Make the plan for the groups as they are and, over several ranks, move parameters into buckets."""
        self._entries = self._find_entries()
        device = self._entries[0].parameter.device if self._entries else torch.device("cpu")
        self._communicator = Communicator(self._options.group, device, self._options.timeout)
        world_size = self._communicator.world_size
        self._average = (
            torch.tensor(1 / world_size, device=device) if self._options.average and world_size > 1 else None
        )
        self._buckets: list[Bucket] = []
        self._shards: dict[Bucket, list[Shard]] = {}
        self._reducer: Reducer | None = None
        self._reduction: BackwardReduction | None = None
        self._caches: dict[object, dict[Any, Any]] = {}
        self._counts: Tensor | None = None
        self._factor: Tensor | None = None
        self._presence: tuple[list[bool], Tensor] | None = None
        self.grad_norm = None
        self.plan = Plan(world_size, (), ())
        self._extend(self._entries)
        live_optimizers[id(self)] = weakref.ref(self)
        weakref.finalize(self, live_optimizers.pop, id(self), None)

    def _find_entries(self, first_group: int = 0) -> list[construction.Entry]:
        groups = self.param_groups
        return construction.find_entries(
            groups, [*map(self._route_name, groups)], [*map(self._views, groups)], self._options.model, first_group
        )

    def _extend(self, found: Sequence[construction.Entry]) -> None:
        """Plan ``found`` behind what is planned already, and move it into buckets."""
        communicator, options, first_new = self._communicator, self._options, len(self.plan.buckets)
        construction.check_parameters(found, communicator)
        planned = self.trained_ids()
        self._left_out = [p for group in self.param_groups for p in group["params"] if id(p) not in planned]
        specs = construction.specify(found)
        self.plan = self.plan.followed_by(plan_parameters(specs, communicator.world_size, bucket_mb=options.bucket_mb))
        if communicator.world_size == 1:
            return
        construction.check_plan(self.plan, communicator)
        parameters = [entry.parameter for entry in self._entries]
        new = [
            build_bucket(bucket, self.plan.parameters, parameters, communicator.rank)
            for bucket in self.plan.buckets[first_new:]
        ]
        construction.synchronise(new, communicator, options.sync_params)
        self._buckets += new
        for bucket in new:
            self._shards[bucket] = bucket_shards(bucket, self.plan.parameters, self._entries)
        if options.reducer == "rs":
            self._reducer = ReduceScatter(communicator, options.reduce_dtype)
        else:
            self._reducer = Exact(communicator, options.reduce_dtype, options.reduced_dtype, self._buckets)
        if self._reduction is not None:
            self._reduction.close()
        self._reduction = BackwardReduction(self._buckets, self._reducer, options.accumulation_steps, options.overlap)
        weakref.finalize(self, self._reduction.close)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; over several ranks a collective: every rank adds the same group at the same time."""
        super().add_param_group(self._completed(construction.without_duplicates([param_group])[0]))
        try:
            self._check_group(self.param_groups[-1])
            self._views(self.param_groups[-1])
        except (ValueError, RuntimeError):
            self.param_groups.pop()
            raise
        if not hasattr(self, "plan"):
            return  # a group of the constructor
        if self._reduction is not None and self._reduction.started:
            raise RuntimeError("add_param_group between backward and step(): gradients are already being reduced")
        found = self._find_entries(first_group=len(self.param_groups) - 1)
        self._entries = [*self._entries, *found]
        self._extend(found)

    def close(self) -> None:
        """Release hooks and buckets; parameters and gradients become ordinary tensors again."""
        if self._reduction is None or self._closed:
            return
        self._finish_reductions()
        self.wait()
        self._reduction.close()
        for bucket in self._buckets:
            bucket.release()
        for shards in self._shards.values():
            shards.clear()
        self._buckets, self._closed = [], True

    # a step

    def step(self, closure: Callable[[], Any] | None = None, *, clip_factor: Tensor | None = None) -> Any:
        """Reduce what is not reduced yet, update, and return the parameters to all ranks.

        Args:
            closure: evaluates the loss again, with gradients enabled; its result is returned.
            clip_factor: a 0-dim tensor that gradients are multiplied by, beside the factor of ``clip_grad_norm_``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._reduce()
            if self._options.max_norm is not None:
                self.clip_grad_norm_(self._options.max_norm)
            elif self._options.skip_nonfinite and self._factor is None:
                self.grad_norm = self.measure_norm()
            context = self._context(clip_factor)
            if self._reduction is not None:
                self._update_buckets(context)
            else:
                self._update_in_place(context)
            self._restart()
            if self._options.debug:
                construction.check_replicas(self._buckets, self._communicator, "after the step, ")
        return loss

    def _reduce(self) -> None:
        """Phases 1 and 2, once a step: agree on which gradients exist, launch every reduction."""
        if self._closed:
            raise RuntimeError("this optimizer was closed; build a new one")
        self._check_left_out()
        if self._reduction is None or self._counts is not None:
            return
        present = [False] * len(self.plan.parameters)
        for bucket in self._buckets:
            bucket.check_pointers()
            for member, has_gradient in zip(bucket.members, bucket.presence()):
                present[member.index] = has_gradient
        if self._presence is None or self._presence[0] != present:
            message = torch.tensor(present, dtype=torch.float32, device=self._communicator.device)
            self._presence = (present, message)
        # How many buckets are launched already differs between ranks when backward reduces, so that the message comes
        # behind all of them. Otherwise none is, and it goes first: the first update need not wait for the last bucket.
        if self._reduction.eager:
            self._reduction.launch_all()
        self._counts = self._communicator.gather_message(self._presence[1]).sum(0)
        self._reduction.launch_all()

    def _context(self, clip_factor: Tensor | None) -> StepContext:
        """The step's scalars, from clipping, averaging, the caller and a ``GradScaler``."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None:
            # what overflowed on one rank is in the sum of all
            found_inf = self._communicator.gather_message(found_inf.reshape(1).float()).amax()
        if self._options.skip_nonfinite and self.grad_norm is not None:
            nonfinite = (~torch.isfinite(self.grad_norm)).float()
            found_inf = nonfinite if found_inf is None else torch.maximum(found_inf, nonfinite)
        factor = self._average
        for other in (self._factor, clip_factor):
            if other is not None:
                factor = other if factor is None else factor * other.to(factor)
        return StepContext(factor, getattr(self, "grad_scale", None), found_inf, self._counts)

    def _update_buckets(self, context: StepContext) -> None:
        """Phases 4 and 5: bucket by bucket, the gather of one under the update of the next."""
        assert self._reducer is not None
        for bucket in self._buckets:
            attach_gradients(bucket, self._shards[bucket], self._reducer.finish(bucket))
            self._update(bucket.plan.route, self._shards[bucket], context, bucket)
            bucket.gathering = self._communicator.all_gather_(bucket.values)
        self.wait()

    def _update_in_place(self, context: StepContext) -> None:
        """Phase 4 of one rank: what has no gradient is left alone."""
        shards = [shard for shard in whole_shards(self._entries) if shard.gradient is not None]
        for route in self._routes:
            self._update(route, [s for s in shards if self.plan.parameters[s.index].route == route], context, route)

    def _update(self, route: RouteName, shards: Sequence[Shard], context: StepContext, key: object) -> None:
        items = [Item(shard, self.param_groups[shard.group], self._state_of(shard)) for shard in shards]
        if items:
            self._routes[route].update(items, context, self._caches.setdefault(key, {}))

    def _state_of(self, shard: Shard) -> dict[str, Any]:
        state = self.state[shard.parameter]
        if not state:
            state.update(self.new_state(shard))
        return state

    def _check_left_out(self) -> None:
        """Refuse gradients of parameters that were frozen when the plan was made."""
        for parameter in self._left_out:
            if parameter.grad is not None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} has a gradient but did not need one when the "
                    "optimizer was built; unfreeze parameters first, then build it"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those already reduced for a step that did not happen included."""
        self._finish_reductions()
        super().zero_grad(set_to_none)
        self._restart()

    def _finish_reductions(self) -> None:
        for bucket in self._buckets:
            if bucket.launched and self._reducer is not None:
                self._reducer.finish(bucket)

    def _restart(self) -> None:
        self._counts = self._factor = None
        if self._reduction is not None:
            self._reduction.restart()

    def wait(self) -> None:
        """Let the current stream wait for every gather in flight; afterwards parameters may be read."""
        for bucket in self._buckets:
            if bucket.gathering is not None:
                bucket.gathering.wait()
                bucket.gathering = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; once used, passes outside it reduce while they run."""
        if self._reduction is None:
            yield
        else:
            with self._reduction.no_sync():
                yield

    # norms

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients; the next ``step()`` scales them to ``max_norm``. See ``optim_dist.clip``."""
        from optim_dist.clip import clip_grad_norm_

        return clip_grad_norm_(self, max_norm, norm_type)

    @torch.no_grad()
    def measure_norm(self, norm_type: float = 2.0) -> Tensor:
        """Phase 3: the norm of the gradients as the update will see them: 0-dim, fp64, the same bits on every rank."""
        self._reduce()
        if self._reducer is not None:
            gradients = [self._reducer.finish(bucket) for bucket in self._buckets]
        else:
            gradients = [s.gradient for s in whole_shards(self._entries) if s.gradient is not None]
        mine = power_sum(gradients, float(norm_type), self._communicator.device)
        norm = combine_powers(self._communicator.gather_message(mine.reshape(1)).flatten(), float(norm_type))
        if self._average is not None:
            norm = norm * self._average
        grad_scale = getattr(self, "grad_scale", None)
        return norm if grad_scale is None else norm / grad_scale

    def clip_with(self, factor: Tensor, norm: Tensor) -> None:
        """Let the next ``step()`` multiply gradients by ``factor``; ``norm`` is what ``grad_norm`` shows."""
        self._factor, self.grad_norm = factor, norm

    def trained_ids(self) -> set[int]:
        """``id`` of every parameter that is updated."""
        return {id(entry.parameter) for entry in self._entries}

    # state

    @property
    def entries(self) -> list[construction.Entry]:
        """Trained parameters in the order of the plan."""
        return self._entries

    @property
    def communicator(self) -> Communicator:
        """The ranks that share the work."""
        return self._communicator

    @property
    def is_between_steps(self) -> bool:
        """Whether no gradient has arrived since the last step."""
        return self._reduction is None or not self._reduction.has_gradients

    def gather_parameters(self) -> None:
        """Return every rank's part of the parameters to all ranks; done when the current stream has waited."""
        for bucket in self._buckets:
            bucket.gathering = self._communicator.all_gather_(bucket.values)
        self.wait()

    def new_state(self, shard: Shard) -> dict[str, Any]:
        """A fresh state for a shard, as its first step would find it."""
        route = self._routes[self.plan.parameters[shard.index].route]
        return route.create_state(shard, self.param_groups[shard.group])

    def state_dict(self) -> dict[str, Any]:
        """torch's form. Over several ranks each rank has the state of what it owns, marked with the plan it fits."""
        self.wait()
        state_dict = super().state_dict()
        states.make_views_plain(state_dict)
        return states.stamped(state_dict, self.plan, self._communicator.rank)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state saved by the same rank of the same plan; for another number of ranks see ``checkpoint``."""
        states.check_stamp(state_dict, self.plan, self._communicator.rank)
        with states.dtypes_kept(self):
            super().load_state_dict(states.with_complete_groups(state_dict, self.param_groups))

    def full_state_dict(self) -> dict[str, Any]:
        """The state of all ranks in torch's one-process form, on the first rank's CPU; elsewhere ``{}``. Collective."""
        return states.full_state_dict(self, self.shards(), self._communicator)

    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a one-process state; every rank passes the same and keeps its part."""
        states.load_full_state_dict(self, state_dict, self.shards())

    def shards(self) -> list[Shard]:
        """What this rank updates, in the order of the plan."""
        if self._reduction is None:
            return whole_shards(self._entries)
        return sorted((s for shards in self._shards.values() for s in shards), key=lambda shard: shard.index)

    def __getstate__(self) -> dict[str, Any]:
        if self._reduction is not None:
            raise RuntimeError("an optimizer of several ranks cannot be pickled; save its state_dict() or a checkpoint")
        return {**super().__getstate__(), "_options": self._options.without_process()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "plan"):
            self._connect()

    def explain(self) -> Explanation:
        """Where every parameter is, who updates it, and what a step sends; text, with ``.data`` for programs."""
        return explain(self.plan, self._options, self._communicator, self._buckets)
