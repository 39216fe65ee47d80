"""What the three optimizers share: a step in phases, over one rank or many.

    1. agree     which parameters have a gradient on any rank: one small message
    2. reduce    every bucket not yet reduced during backward, in plan order
    3. norm      only when clipping: local sums of powers, one small message, a factor on the device
    4. update    the own chunk of each bucket as its reduction arrives, by ``optim_kernels.functional``
    5. gather    the chunk returns to all ranks, in place, while the next bucket is updated and, where modules can
                 wait for it, while the next forward pass runs

DTensors, and with one rank all parameters, are in no bucket: they are updated where they lie, so that with one rank
results and state equal the single-device optimizer's bit for bit.

What an update is belongs to a ``Route``, where parameters lie to ``_reduction.bucketed`` and ``sharded``; this module
never looks inside.
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
from optim_dist._optimizers import agreement, construction, interchange, states, step_checks
from optim_dist._optimizers.consolidation import IS_WHOLE, Consolidated, consolidate
from optim_dist._optimizers.explain import Explanation, explain
from optim_dist._optimizers.live import LiveOptimizer, live_optimizers
from optim_dist._optimizers.norm import norm_over_ranks
from optim_dist._optimizers.options import Options
from optim_dist._optimizers.shards import Item, Route, Shard, StepContext
from optim_dist._reduction.bucketed import BucketedParameters
from optim_dist._reduction.collectives import Communicator
from optim_dist.plan import Plan, RouteName, plan_parameters
from optim_dist.sharded import ResidentParameters
from optim_redist import Layout
from optim_utils.param_groups import MatrixView

Method = TypeVar("Method", bound=Callable[..., Any])


def _not_compiled(method: Method) -> Method:
    """Out of sight of ``torch.compile``, which would make graphs of the host's work, some for every parameter."""
    hidden: Method = torch.compiler.disable(method)
    return hidden


class DistOptimizer(LiveOptimizer):
    """A ``torch.optim.Optimizer`` whose step runs over the ranks of a process group.

    Subclasses say how a group is routed (``_route_name``) and give a ``Route`` for each name (``_routes``).
    """

    _routes: ClassVar[Mapping[RouteName, Route]]

    grad_norm: Tensor | None
    _was_loaded = False  # states may lack what the options of this optimizer want
    _consolidated: Consolidated | None = None

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
        found = self._find_entries()
        device = found[0].parameter.device if found else torch.device("cpu")
        self._communicator = self._options.communicator(device)
        self._consolidated = None
        self._bucketed = BucketedParameters(self._communicator, self._options)
        self._resident = ResidentParameters(self._communicator, self._options.bucket_mb)
        self._caches: dict[object, dict[Any, Any]] = {}
        self._factor: Tensor | None = None
        self.grad_norm = None
        self.plan = Plan(self._communicator.world_size, (), ())
        self._entries: list[construction.Entry] = []
        self._extend(found)
        self._register()

    def _find_entries(self, first_group: int = 0) -> list[construction.Entry]:
        groups = self.param_groups
        return construction.find_entries(
            groups, [*map(self._route_name, groups)], [*map(self._views, groups)], self._options.model, first_group
        )

    def _extend(self, found: Sequence[construction.Entry]) -> None:
        """Plan ``found`` behind what is planned already, and move it into buckets; if refused, nothing has changed."""
        communicator = self._communicator
        meshes = construction.check_parameters(found, communicator)
        specs = construction.specify(found)
        bucket_mb = self._options.bucket_mb
        plan = self.plan.followed_by(plan_parameters(specs, communicator.world_size, bucket_mb=bucket_mb))
        entries = [*self._entries, *found]
        if communicator.world_size > 1:
            hyperparameters = agreement.describe_groups(self.param_groups, found)
            agreement.check_plan(plan, self._options.described(), hyperparameters, communicator)
            taken = {id(entry.parameter) for entry in found}
            for other in live_optimizers():
                if other is not self and taken & other.trained_ids():
                    other.hand_over()
            self._bucketed.extend(plan, entries)
        self._resident.extend(plan.parameters, entries, meshes)
        self._outdate("add_param_group()")
        self.plan, self._entries = plan, entries
        self._listed = [list(group["params"]) for group in self.param_groups]
        planned, names = self.trained_ids(), construction.names_of(self.param_groups, self._options.model)
        self._left_out = [(names[id(p)], p) for params in self._listed for p in params if id(p) not in planned]
        self._show_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; over several ranks a collective: every rank adds the same group at the same time."""
        self.check_open()
        is_built = hasattr(self, "plan")  # else a group of the constructor
        # ranks agree, for how much is reduced already may differ between them
        if is_built and any(self._communicator.gather_json(self._bucketed.started)) and not self.is_between_steps:
            raise RuntimeError(
                "add_param_group between backward and step(): gradients are already being reduced; "
                "add the group after step(), or call zero_grad() first"
            )
        before = len(self.param_groups)
        try:
            found = self._with_group(param_group, is_built)
            if is_built:
                self._extend(found)
        except BaseException:
            del self.param_groups[before:]
            raise

    def _with_group(self, param_group: dict[str, Any], is_built: bool) -> list[construction.Entry]:
        """Check and append a group; what this rank refuses is an error on the others too, once they could wait."""
        refused: Exception | None = None
        found: list[construction.Entry] = []
        try:
            super().add_param_group(self._completed(construction.without_duplicates([param_group])[0]))
            self._check_group(self.param_groups[-1])
            self._views(self.param_groups[-1])
            if is_built:
                found = self._find_entries(first_group=len(self.param_groups) - 1)
        except Exception as error:
            refused = error
        if is_built:
            problems = self._communicator.gather_json(
                None if refused is None else f"{type(refused).__name__}: {refused}"
            )
            if refused is None and any(problems):
                listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
                raise RuntimeError(f"the group was not added, for it was refused by {listed}")
        if refused is not None:
            raise refused
        return found

    def close(self) -> None:
        """Release hooks and buckets; parameters and gradients become ordinary tensors again."""
        if not self._closed:
            self._bucketed.close(bool(self._failure))
            self._unregister()
            self._closed = True

    def hand_over(self) -> None:
        """Another optimizer takes over parameters: finish what is under way, leave later gradients alone."""
        self._bucketed.detach(bool(self._failure))

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
                self._was_loaded = False
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
        step_checks.check_left_out(self._left_out)
        self._bucketed.check()
        self._resident.check()
        with self.begun_together("the reduction of gradients"):
            if self._bucketed.reduce(len(self.plan.parameters)) or self._resident.were_dropped:
                self._factor = None  # of gradients that were dropped since

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
        return StepContext(_product(self._factor, clip_factor), grad_scale, found_inf)

    def _update(self, context: StepContext) -> None:
        """Phases 4 and 5."""
        counts = self._bucketed.counts
        averaging = {
            divided: replace(context, factor=_product(factor, context.factor), counts=counts)
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

    def _apply(self, route: RouteName, items: Sequence[Item], context: StepContext, key: object) -> None:
        if items:
            self._routes[route].update(items, context, self._caches.setdefault(key, {}))

    def _item(self, shard: Shard) -> Item:
        state = self._state_of(shard)
        if isinstance(shard.parameter, DTensor):
            state = {key: construction.local(value) for key, value in state.items()}
        return Item(shard, self.param_groups[shard.group], state)

    def _state_of(self, shard: Shard) -> dict[str, Any]:
        state = self.state[shard.parameter]
        if not state or self._was_loaded:
            self._complete(shard, state)
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

    def wait(self) -> None:
        """Let the current stream wait for every gather in flight; afterwards parameters may be read."""
        self._bucketed.wait()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; once used, passes outside it reduce while they run.

        The first time a collective: every rank begins with it in the same step.
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

    @property
    def entries(self) -> list[construction.Entry]:
        """Trained parameters in the order of the plan."""
        return self._entries

    @property
    def communicator(self) -> Communicator:
        """The ranks that share the work."""
        return self._communicator

    @property
    def layouts(self) -> dict[int, Layout]:
        """How each DTensor of several ranks lies, by its number in the plan."""
        return self._resident.layouts

    @property
    def is_between_steps(self) -> bool:
        """Whether no gradient has arrived since the last step, or all were dropped again. Collective."""
        self.check_open()
        # ranks agree, for to drop is collective
        found = self._communicator.gather_json([self._bucketed.has_gradients, self._bucketed.is_due])
        if any(has_gradients for has_gradients, _ in found):
            return False
        self._bucketed.drop(is_agreed=any(is_due for _, is_due in found))
        return True

    def gather_parameters(self) -> None:
        """Return every rank's part of the parameters to all ranks; done when the current stream has waited."""
        self._bucketed.gather()

    def new_state(self, shard: Shard) -> dict[str, Any]:
        """A fresh state for a shard, as its first step would find it."""
        state: dict[str, Any] = {}
        self._complete(shard, state)
        return state

    def _complete(self, shard: Shard, state: dict[str, Any]) -> None:
        route = self._routes[self.plan.parameters[shard.index].route]
        route.complete_state(shard, self.param_groups[shard.group], state)

    def state_dict(self) -> dict[str, Any]:
        """torch's form, for ``torch.save`` on every rank and for ``torch.distributed.checkpoint``.

        Over several ranks it lists the state of every parameter, of which each rank holds what it owns: as DTensors,
        or as parts that can be saved, loaded and copied but not computed with. See also ``consolidate_state_dict``.
        """
        self.check_open()
        whole = None if self._consolidated is None else self._consolidated.current()
        self.wait()
        state_dict = super().state_dict()
        if whole is not None:
            state_dict |= {"state": whole, IS_WHOLE: True}
        elif self._communicator.world_size > 1:
            state_dict["state"] = interchange.complete_state(self)
        routes = map(self._route_name, self.param_groups)
        state_dict["param_groups"] = [
            interchange.with_torch_keys(group, route) for group, route in zip(state_dict["param_groups"], routes)
        ]
        states.make_views_plain(state_dict)
        return state_dict if whole is not None else states.stamped(state_dict, self.plan, self._communicator.rank)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the same rank of the same plan, or what ``torch.distributed.checkpoint`` has loaded.

        Or the whole state that ``consolidate_state_dict`` has gathered, the same on every rank, which keeps its part.
        """
        self.check_open()
        if IS_WHOLE in state_dict:
            state_dict = states.cut_full_state_dict(self, state_dict, self.shards())
        states.check_stamp(state_dict, self.plan, self._communicator.rank)
        states.check_sharded(self, state_dict)
        if self._communicator.world_size > 1:
            state_dict = interchange.unwrapped_state(self, state_dict)
        with states.dtypes_kept(self):
            super().load_state_dict(states.with_complete_groups(state_dict, self.param_groups))
        self._was_loaded = True
        self._outdate("load_state_dict()")
        self._show_state()

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

    def _show_state(self) -> None:
        # where a rank owns nothing, torch must not take the optimizer for a new one: it would step it, alone
        if self._communicator.world_size > 1:
            for entry in self._entries:
                self.state.setdefault(entry.parameter, {})

    def full_state_dict(self) -> dict[str, Any]:
        """The state of all ranks in torch's one-process form, on the first rank's CPU; elsewhere ``{}``. Collective."""
        return states.full_state_dict(self, self.shards(), self._communicator)

    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a one-process state; every rank passes the same and keeps its part."""
        self.load_state_dict(states.cut_full_state_dict(self, state_dict, self.shards()))

    def shards(self) -> list[Shard]:
        """What this rank updates, in the order of the plan."""
        self.check_open()
        with torch.no_grad():
            return sorted([*self._bucketed.shards, *self._resident.shards()], key=lambda shard: shard.index)

    def __getstate__(self) -> dict[str, Any]:
        if self._communicator.world_size > 1:
            raise RuntimeError("an optimizer of several ranks cannot be pickled; save its state_dict() or a checkpoint")
        return {**super().__getstate__(), "_options": self._options.without_process()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "plan"):
            self._connect()

    def explain(self) -> Explanation:
        """Where every parameter is, who updates it, and what a step sends; text, with ``.data`` for programs."""
        return explain(self.plan, self._options, self._communicator, self._bucketed.buckets, self._resident.owners)


def _product(*factors: Tensor | None) -> Tensor | None:
    """The product of those that are given, on the device of the first; None if none is."""
    given = [factor for factor in factors if factor is not None]
    return reduce(lambda product, factor: product * factor.to(product), given) if given else None
