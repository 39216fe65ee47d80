"""How the three optimizers are constructed: groups become a plan, and its parameters move into buckets.

Groups may be added later, everything may be planned anew, and ``close`` undoes it all. Every rank does the same; what
one rank refuses is an error on all.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence, Set
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from optim_dist._optimizers import agreement, construction, parameter_checks, step_checks
from optim_dist._optimizers.before_building import compare_before_building
from optim_dist._optimizers.bucketed import BucketedParameters
from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.gradient_dtype import GradientDtypes
from optim_dist._optimizers.group_checks import lost
from optim_dist._optimizers.live import LiveOptimizer, live_optimizers
from optim_dist._optimizers.options import Options, groups_of
from optim_dist._optimizers.parameter_checks import Meshes
from optim_dist._optimizers.places import Places
from optim_dist._optimizers.planned_views import PlannedViews
from optim_dist._optimizers.shards import Route, Shard
from optim_dist.plan import Plan, RouteName
from optim_dist.planning import plan_parameters
from optim_dist.sharded import UnbucketedParameters
from optim_kernels.states import out_of_inference_mode
from optim_redist import Layout
from optim_utils.param_groups import MatrixView


class PlannedOptimizer(LiveOptimizer):
    """A ``torch.optim.Optimizer`` whose groups are planned over the ranks of a process group; it has no step yet."""

    _routes: ClassVar[Mapping[RouteName, Route]]
    _group_options: ClassVar[Set[str]] = frozenset()  # that only groups have, and the constructor does not

    @out_of_inference_mode
    def __init__(self, params: Any, defaults: dict[str, Any], options: Mapping[str, Any]) -> None:
        given: list[Any] = []
        try:
            given = construction.without_duplicates(params)
            self._options = Options.of(self, options, self._group_options)
            parameter_checks.check_model(self._options.model)
            super().__init__(given, self._completed_defaults(defaults))
        except Exception as error:
            # the other ranks wait for this one to connect
            device = construction.device_of([given, options.get("model")])
            groups = groups_of(options.get("mesh"), options.get("process_group"))
            compare_before_building(groups, device, {}, error)
        self._connect()

    def _route_name(self, group: dict[str, Any]) -> RouteName:
        """Which update a group takes: the only one, if there is one."""
        (only,) = self._routes
        return only

    def _check_states(self) -> None:
        """Refuse states that cannot be moved to another plan."""

    def _views(self, group: dict[str, Any]) -> Sequence[MatrixView | None]:
        return self._route(group).views(group)

    def _block(self, entry: Entry) -> int:
        return self._routes[entry.route].block(entry.parameter, self.param_groups[entry.group])

    def _completed_defaults(self, defaults: dict[str, Any]) -> dict[str, Any]:
        """The constructor's ``defaults``, with the options of a variant that they name."""
        return defaults

    def _completed(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group, with defaults that depend on its kind or variant."""
        return group

    def _check_group(self, group: dict[str, Any], *, stepped: bool) -> None:
        self._route(group).check_group(group, stepped=stepped)

    def _route(self, group: dict[str, Any]) -> Route:
        name = self._route_name(group)
        if name not in self._routes:
            raise ValueError(f"kind must be {' or '.join(map(repr, self._routes))}, got {name!r}")
        return self._routes[name]

    def _check_kinds(self) -> None:
        """Refuse groups that ask for another update than the one that they were planned for."""
        for number, route in self._routes_of_groups.items():
            name = self._route_name(self.param_groups[number])
            if name != route:
                raise RuntimeError(
                    f"kind of param_groups[{number}] is {name!r} by now, but its parameters were planned for "
                    f"{route!r}; call rebuild_plan() on all ranks, after zero_grad(), or put it back"
                )

    def _connect(self) -> None:
        """Make the plan for the groups as they are and, over several ranks, move parameters into buckets."""
        found = self._find_entries()
        # the device of a frozen parameter if all are frozen
        listed = (parameter for group in self.param_groups for parameter in group["params"])
        candidates = chain((entry.parameter for entry in found), listed)
        device = next((parameter.device for parameter in candidates), None)
        device = compare_before_building(self._options.groups, device, self._options.described())
        self.communicator = self._options.communicator(device)
        self._options.check_ranks(self.communicator.world_size)
        self._bucketed = BucketedParameters(self.communicator, self._options)
        self._unbucketed = UnbucketedParameters(self.communicator, self._options)
        self.plan = Plan(self.communicator.world_size, (), ())
        self.entries = []
        self._routes_of_groups: dict[int, RouteName] = {}  # of groups with entries
        self._places = Places(self._options.model)
        self._gradient_dtypes = GradientDtypes(self._options.grad_dtype)
        weakref.finalize(self, self._gradient_dtypes.put_back).atexit = False
        self._planned_views = PlannedViews()
        self._extend(found)
        self._register()

    def _find_entries(self, first_group: int = 0) -> list[Entry]:
        groups = self.param_groups
        return construction.find_entries(
            groups, [*map(self._route_name, groups)], [*map(self._views, groups)], self._options.model, first_group
        )

    def _extend(self, found: Sequence[Entry]) -> None:
        """Plan ``found`` after what is planned already, and move it into buckets; a refusal changes nothing."""
        more, meshes = self._plan_for(found)
        plan = self.plan.followed_by(more)
        self._agree(plan, found)
        with self.begun_together("add_param_group()"):
            self._move(plan, [*self.entries, *found], found, meshes)

    def _plan_for(self, found: Sequence[Entry]) -> tuple[Plan, Meshes]:
        """A plan for ``found`` alone, and the ranks of their meshes; refuses what cannot be distributed."""
        options = self._options
        rounded = {number for number, group in enumerate(self.param_groups) if group.get("stochastic_rounding")}
        meshes = parameter_checks.check_parameters(found, self.communicator, options, rounded)
        plan = plan_parameters(
            construction.specify(found, [*map(self._block, found)]),
            self.communicator.world_size,
            bucket_mb=options.planned_bucket_mb,
            grad_dtype=options.grad_dtype,
            reduce_dtype=options.reduce_dtype,
        )
        return plan, meshes

    def _agree(self, plan: Plan, found: Sequence[Entry]) -> None:
        """Refuse a plan or hyperparameters of ``found`` that other ranks do not have."""
        if self.communicator.world_size > 1:
            hyperparameters = agreement.describe_groups(self.param_groups, found)
            agreement.check_plan(plan, hyperparameters, self.communicator)

    def _move(self, plan: Plan, entries: list[Entry], found: Sequence[Entry], meshes: Meshes) -> None:
        """Move the parameters of ``found``, the last of ``entries``, to their places in ``plan``."""
        taken, world_size = {id(entry.parameter) for entry in found}, self.communicator.world_size
        for other in live_optimizers():
            # handing over is collective if the other optimizer has several ranks
            is_alike = world_size > 1 or other.communicator.world_size == 1
            if other is not self and is_alike and taken & other.trained_ids():
                other.hand_over()
        self._gradient_dtypes.set(entry.parameter for entry in found)
        if world_size > 1 or self._options.is_tree:
            self._bucketed.extend(plan, entries)
        self._unbucketed.extend(plan.parameters, entries, meshes)
        self.plan, self.entries = plan, entries
        self._routes_of_groups = {entry.group: entry.route for entry in entries}
        self._listed = [list(group["params"]) for group in self.param_groups]
        self._places.add(found)
        self._planned_views.note(self.param_groups, self._views)
        planned, names = self.trained_ids(), construction.names_of(self.param_groups, self._options.model)
        self._left_out = [(names[id(p)], p) for params in self._listed for p in params if id(p) not in planned]

    @out_of_inference_mode
    @torch.no_grad()
    def rebuild_plan(self, order: Sequence[str | Tensor] | None = None) -> None:
        """Plan anew for the parameters that need a gradient now: after unfreezing some, or freezing some for good.

        Collective, between ``zero_grad()`` and the next backward pass. Parameters that stay keep their state bit for
        bit, whichever rank owns them now. New ones start without state, from the first rank's values, as at
        construction (``sync_params``). Parameters that are frozen by now lose their state and their place in a bucket,
        those of a group whose ``kind`` has changed all of their state but masters.

        Args:
            order: names or parameters in the order in which forward passes use them, by which buckets are reduced and
                gathered. It lists every parameter that is trained, and may list others. None: as at construction.

        Raises:
            RuntimeError: on every rank, before anything has changed: if there are gradients, or another rank refuses.
        """
        plan, found, meshes = self._plan_anew(order)
        with self.begun_together("rebuild_plan()"):
            self.wait()
            self._replace(plan, found, meshes)

    def _plan_anew(self, order: Sequence[str | Tensor] | None) -> tuple[Plan, list[Entry], Meshes]:
        """The arguments of ``_replace``, for parameters that need a gradient now; a refusal changes nothing."""
        self.check_open()
        self.communicator.check_ranks()
        with agreement.refused_together("the plan was not rebuilt", self.communicator):
            self.check_places()
            self._planned_views.check(self.param_groups, self._views)
            for number, group in enumerate(self.param_groups):
                try:
                    self._check_group(group, stepped=True)
                except KeyError as error:
                    raise lost(number, error) from None
            self._check_states()
            step_checks.check_no_gradients(
                construction.names_of(self.param_groups, self._options.model), self.param_groups
            )
            found = construction.in_forward_order(self._find_entries(), order)
        # also makes all ranks give up a batch that one has given up
        if not self.agree_between_steps():
            # streamed gradients, which leave no .grad for the check above
            raise RuntimeError(
                "rebuild_plan between backward and step(): gradients are already being reduced; call it after step(), "
                "or call zero_grad() first"
            )
        plan, meshes = self._plan_for(found)
        self._agree(plan, found)
        if self._options.sync_params == "check":
            # making the buckets compares them, too, but by then the old ones are gone
            self.wait()
            plain = [(e.name, e.parameter) for e, spec in zip(found, plan.parameters) if not spec.sharding]
            agreement.check_equal(plain, self.communicator, agreement.SYNC_CHECK)
        return plan, found, meshes

    def _replace(self, plan: Plan, found: list[Entry], meshes: Meshes) -> None:
        """Move parameters from the present plan to a new one."""
        former = self._bucketed.clear()
        self._gradient_dtypes.put_back()
        self._unbucketed = UnbucketedParameters(self.communicator, self._options)
        self._places = Places(self._options.model)
        self._move(plan, found, found, meshes)
        for bucket in former:
            bucket.release()

    @out_of_inference_mode
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; over several ranks a collective: every rank adds the same group at the same time."""
        self.check_open()
        if not hasattr(self, "plan"):  # the constructor adds groups one by one, and plans them together
            self._append_group(param_group)
            return
        self.communicator.check_ranks()
        # ranks agree first, as they may differ in what is reduced already
        if any(self.communicator.gather_json(self._bucketed.reduction.has_launched)) and not self.agree_between_steps():
            raise RuntimeError(
                "add_param_group between backward and step(): gradients are already being reduced; "
                "add the group after step(), or call zero_grad() first"
            )
        before = len(self.param_groups)
        try:
            with agreement.refused_together("the group was not added", self.communicator):
                self.check_listed()  # which would be taken for what was planned
                self._append_group(param_group)
                found = self._find_entries(first_group=before)
            self._extend(found)
        except BaseException:
            del self.param_groups[before:]
            raise

    def _append_group(self, group: dict[str, Any]) -> None:
        """Check and append a group, which is in no plan yet."""
        if not isinstance(group, dict):
            raise TypeError(f"a group must be a dict with 'params', got a {type(group).__name__}")
        try:
            super().add_param_group(self._completed(construction.without_duplicates([group])[0]))
            construction.check_not_clipped(self.param_groups[-1])
            self._check_group(self.param_groups[-1], stepped=False)
            self._views(self.param_groups[-1])
        except KeyError as error:
            raise KeyError(
                f"the group has no {error}, nor have the optimizer's defaults, which somebody has replaced; give the "
                "group all its options, or add to the defaults instead of replacing them"
            ) from error

    @out_of_inference_mode
    def close(self) -> None:
        """Release hooks and buckets; parameters and gradients become ordinary tensors again.

        This does not wait for ranks that may not come, as after an error on this rank. If gradients have begun to be
        reduced for a step that was not made, they are given up and None afterwards.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._bucketed.close(bool(self._failure))
        finally:
            self._gradient_dtypes.put_back()
            self._unregister()

    def hand_over(self) -> None:
        self._bucketed.detach(bool(self._failure))
        self._gradient_dtypes.put_back()

    def wait(self) -> None:
        """Let the current stream wait for every gather in flight; afterwards parameters may be read."""
        self._bucketed.wait()

    def prefetch(self, module: nn.Module) -> None:
        """Let the current stream wait for the gathers of this module's parameters alone, which may be read afterwards.

        ``step()`` has launched all gathers in the order of the forward pass: what is used first arrives first.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"prefetch takes a module, got {type(module).__name__}; wait() is for all parameters")
        self._bucketed.prefetch(module)

    def _reads_as_planned(self, number: int, group: dict[str, Any]) -> bool:
        """Whether ``group`` reads its parameters as the same matrices as group ``number`` when it was planned."""
        return list(self._views(group)) == self._planned_views.of(number)

    @property
    def layouts(self) -> dict[int, Layout]:
        return self._unbucketed.layouts

    def check_places(self) -> None:
        """Refuse what is not where it was planned: parameters in groups, in buckets and, with ``model=``, in it."""
        self.check_listed()
        self._places.check()
        self._bucketed.check_pointers()

    def check_listed(self) -> None:
        step_checks.check_listed(self.param_groups, self._listed)

    def agree_between_steps(self) -> bool:
        """Whether no gradient has arrived since the last step, or all were dropped again. Collective."""
        self.check_open()
        return self._bucketed.agree_between_steps()

    def gather_parameters(self) -> None:
        self._bucketed.gather()

    def shards(self) -> list[Shard]:
        self.check_open()
        with torch.no_grad():
            return sorted([*self._bucketed.shards, *self._unbucketed.shards()], key=lambda shard: shard.index)

    def __getstate__(self) -> dict[str, Any]:
        if self.communicator.world_size > 1:
            raise RuntimeError("an optimizer of several ranks cannot be pickled; save its state_dict() or a checkpoint")
        return {**super().__getstate__(), "_options": self._options.without_process()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "plan"):
            self._connect()
