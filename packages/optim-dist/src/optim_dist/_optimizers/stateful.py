"""The state that the three optimizers keep of every parameter: made when first needed, saved, loaded, moved.

A state is on the rank that updates the parameter, or a part of it. Its ``Route`` and its group's options, which may
change, decide what it holds. ``states`` and the modules it names know the forms in which state is saved and loaded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from optim_dist._optimizers import interchange, loaded_state, parameter_checks, states, whole_state
from optim_dist._optimizers.consolidation import IS_WHOLE, Consolidated, consolidate
from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.followed_masters import FollowedMasters
from optim_dist._optimizers.moved_state import take_state
from optim_dist._optimizers.parameter_checks import Meshes
from optim_dist._optimizers.planned import PlannedOptimizer
from optim_dist._optimizers.shards import Shard
from optim_dist.plan import Plan
from optim_kernels.states import ELEMENTWISE_KEYS, MASTER_KEYS, make_groups_plain, out_of_inference_mode

# options of a group that say what its states hold, and in which dtypes; whether beta2 is None matters, too
STORAGE_OPTIONS = ("amsgrad", "state_dtype", "momentum_dtype", "master_weights", "stochastic_rounding")
# entries of a state that belong to the update that made them
_KEYS_OF_UPDATES = {"step", loaded_state.SECOND_MOMENT, *ELEMENTWISE_KEYS} - MASTER_KEYS


class StatefulOptimizer(PlannedOptimizer):
    """A planned ``torch.optim.Optimizer`` with states; it has no step yet."""

    # entries of a state that loading converts; the hooks of optim_utils leave them to it
    _converted_state_keys = ("step", *ELEMENTWISE_KEYS)

    _masters: FollowedMasters
    _storage: list[list[Any]]  # for each group the options that its states were made for
    _complete_ids: set[int]  # of parameters whose states have all keys that their options require
    _shown_keys: dict[int, set[str]]  # keyed by id: keys made for torch to see only, perhaps on this rank only
    _consolidated: Consolidated | None = None

    def _connect(self) -> None:
        self._masters = FollowedMasters()
        self._storage = []
        self._complete_ids = set()
        self._shown_keys = {}
        self._consolidated = None
        super()._connect()
        self._masters.note(self)

    def _extend(self, found: Sequence[Entry]) -> None:
        super()._extend(found)
        self._storage += map(_storage_options, self.param_groups[len(self._storage) :])
        self._outdate("add_param_group()")

    def _move(self, plan: Plan, entries: list[Entry], found: Sequence[Entry], meshes: Meshes) -> None:
        super()._move(plan, entries, found, meshes)
        self._show_state()

    def _replace(self, plan: Plan, found: list[Entry], meshes: Meshes) -> None:
        """Move the states of parameters that stay to the new plan; drop all others."""
        self._masters.follow(self)
        self._drop_states_of_other_updates(found)
        moved = take_state(self, plan, found)
        for entry in self.entries:
            if entry.parameter not in self.state:
                self._complete_ids.discard(id(entry.parameter))
                self._shown_keys.pop(id(entry.parameter), None)
        super()._replace(plan, found, meshes)
        moved.put(self)
        self._masters = FollowedMasters()
        self._masters.note(self)
        self._outdate("rebuild_plan()")

    def _drop_states_of_other_updates(self, found: Sequence[Entry]) -> None:
        """Let parameters whose groups are of another kind by now start anew; masters are any update's."""
        routes = {id(entry.parameter): entry.route for entry in found}
        for entry in self.entries:
            parameter, state = entry.parameter, self.state.get(entry.parameter, {})
            if routes.get(id(parameter), entry.route) != entry.route:
                for key in _KEYS_OF_UPDATES | self._shown_keys.pop(id(parameter), set()):
                    state.pop(key, None)
                self._complete_ids.discard(id(parameter))

    # what states hold

    def _follow_storage(self) -> None:
        """If groups' storage options have changed, check them and let states be completed anew."""
        storage = [*map(_storage_options, self.param_groups)]
        if storage != self._storage:
            for group in self.param_groups:
                self._check_group(group, stepped=True)
            self._check_blocks()
            self._check_rounding()
            self._complete_ids.clear()
            self._storage = storage

    def _check_blocks(self) -> None:
        """Refuse 8-bit states for parameters that were planned without them, and so may be cut anywhere."""
        for spec, entry in zip(self.plan.parameters, self.entries):
            if self._block(entry) > spec.block:
                raise ValueError(
                    f"state_dtype='int8' of {entry.name} came after the optimizer was built, which cuts the parameters "
                    "of such groups between blocks of 256 elements; build a new optimizer with it, or call "
                    "rebuild_plan()"
                )

    def _check_rounding(self) -> None:
        """Refuse stochastic rounding where its bits would depend on how a parameter is cut."""
        for shard in self.shards():
            if not shard.is_consecutive and self.param_groups[shard.group].get("stochastic_rounding"):
                raise ValueError(parameter_checks.ROUNDING.format(shard.name))

    def _state_of(self, shard: Shard) -> dict[str, Any]:
        """The state that an update works on, with all keys that its options require."""
        state = self.state[shard.parameter]
        if not state or id(shard.parameter) not in self._complete_ids:
            # make masters anew that were only shown: the parameter may have been loaded since
            for key in self._shown_keys.pop(id(shard.parameter), set()) & MASTER_KEYS:
                del state[key]
            if state:
                loaded_state.check_kept(state, shard, self.plan.parameters[shard.index].route)
            self._complete(shard, state)
            self._complete_ids.add(id(shard.parameter))
        return state

    def new_state(self, shard: Shard) -> dict[str, Any]:
        state: dict[str, Any] = {}
        self._complete(shard, state)
        return state

    @out_of_inference_mode
    def completed_state(self, shard: Shard) -> dict[str, Any]:
        """A shard's state with all keys that its options require; missing ones are made."""
        kept = self.state[shard.parameter]
        state = dict(kept)
        if not kept or id(shard.parameter) not in self._complete_ids:
            self._complete(shard, state)
            made = {key: value for key, value in state.items() if key not in kept}
            # when torch loads a flattened state it takes only the keys that it finds in ours
            kept.update(made)
            self._shown_keys.setdefault(id(shard.parameter), set()).update(made)
        return self._masters.followed(shard, state)

    def kept_state(self, shard: Shard) -> dict[str, Any]:
        return self._masters.followed(shard, self._checked_state(shard))

    def _checked_state(self, shard: Shard) -> dict[str, Any]:
        """The ``kept_state`` before masters have followed; refused if somebody has changed it to what nobody loads."""
        shown, spec = self._shown_keys.get(id(shard.parameter), set()), self.plan.parameters[shard.index]
        kept = {key: value for key, value in self.state.get(shard.parameter, {}).items() if key not in shown}
        if kept:
            loaded_state.check_kept(kept, shard, spec.route)
            states.check_tensors(kept, shard.name)
            if self.communicator.world_size > 1 and spec.route == "adamw" and not spec.sharding:
                states.check_keys(kept, shard.name)
        return kept

    def _check_states(self) -> None:
        if self.communicator.world_size > 1:
            for shard in self.shards():
                self._checked_state(shard)

    def put_state(self, shard: Shard, state: dict[str, Any]) -> None:
        """Replace a shard's state, which may have been made only to be shown, by one that steps made elsewhere."""
        self.state[shard.parameter] = state
        self._complete_ids.discard(id(shard.parameter))
        self._shown_keys.pop(id(shard.parameter), None)
        self.encode_state(shard)

    def note_masters(self) -> None:
        self._masters.note(self)

    def encode_state(self, shard: Shard) -> None:
        """Turn a loaded state into 8-bit codes if the group has them: now, to save memory, not at the next step."""
        spec, group = self.plan.parameters[shard.index], self.param_groups[shard.group]
        if self.state.get(shard.parameter) and spec.block > 1:
            self._routes[spec.route].encode_state(shard, group, self.state[shard.parameter])

    def _complete(self, shard: Shard, state: dict[str, Any]) -> None:
        route = self._routes[self.plan.parameters[shard.index].route]
        route.complete_state(shard, self.param_groups[shard.group], state)

    def _show_state(self) -> None:
        # without state torch takes the optimizer for a new one and steps it: on a rank that owns nothing, alone
        if self.communicator.world_size > 1:
            for entry in self.entries:
                self.state.setdefault(entry.parameter, {})
        elif self._gradient_dtypes.differ:
            # torch would step with gradients in the parameter's dtype
            for shard in self.shards():
                self.completed_state(shard)

    # this rank's part, in torch's form

    def state_dict(self) -> dict[str, Any]:
        """The state in torch's form, for ``torch.save`` on every rank and for ``torch.distributed.checkpoint``.

        Over several ranks each rank lists the state of every parameter but holds only what it owns: as DTensors, or as
        parts that can be saved, loaded and copied but not computed with. See also ``consolidate_state_dict``. 8-bit
        codes are copied as the fp32 numbers they stand for, which become the same codes again when they are loaded.
        """
        self.check_open()
        self.check_listed()
        whole = None if self._consolidated is None else self._consolidated.current()
        self.wait()

        def complete(_: Optimizer, content: dict[str, Any]) -> None:
            if whole is not None:
                content |= {"state": whole, IS_WHOLE: True}
            elif self.communicator.world_size > 1:
                content["state"] = interchange.complete_state(self)
            else:
                kept = content["state"]
                for shard in self.shards():
                    if shard.number in kept:
                        kept[shard.number] = self._masters.followed(shard, kept[shard.number])
                states.make_codes_numbers(content)
            routes = map(self._route_name, self.param_groups)
            content["param_groups"] = [
                interchange.with_torch_keys(group, route) for group, route in zip(content["param_groups"], routes)
            ]
            make_groups_plain(content)
            if whole is None:
                states.stamped(content, self.plan, self.communicator.rank)

        # hooks of the user's come later, and have the last word
        with self.register_state_dict_post_hook(complete, prepend=True):
            return super().state_dict()

    @out_of_inference_mode
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the same rank and plan, or what ``torch.distributed.checkpoint`` has loaded.

        Or the whole state that ``consolidate_state_dict`` has gathered: every rank passes the same and keeps its part.
        """
        self.check_open()
        self.check_listed()
        with loaded_state.converted(self, self._fitting, self._note_loaded):
            super().load_state_dict(state_dict)

    def _fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state to load, in the form in which torch takes it over; refuses one that does not fit."""
        state_dict = loaded_state.adapted(self, state_dict)
        if IS_WHOLE in state_dict:
            state_dict = whole_state.cut_full_state_dict(self, state_dict)
        loaded_state.check_stamp(state_dict, self.plan, self.communicator.rank)
        loaded_state.check_states(self, state_dict)
        if self.communicator.world_size > 1:
            state_dict = interchange.unwrapped_state(self, state_dict)
        return state_dict

    def _note_loaded(self) -> None:
        self._complete_ids.clear()
        self._shown_keys.clear()
        self._outdate("load_state_dict()")
        self._show_state()
        self._masters.note(self)

    def group_fault(self, number: int, saved: dict[str, Any]) -> str:
        group, kept = self.param_groups[number], {"params", "param_names", *loaded_state.OWN_OPTIONS}
        taken = {**group, **{key: value for key, value in saved.items() if key not in kept}}
        if self._route_name(taken) != self._route_name(group):
            return (
                f"was saved with kind={self._route_name(taken)!r}, this optimizer has kind="
                f"{self._route_name(group)!r}; list groups in the order in which they were saved"
            )
        if loaded_state.has_other_views(saved, group) or not self._reads_as_planned(number, taken):
            return (
                "was saved with other views of its matrices than this optimizer has; build it with the views of the "
                "saved one"
            )
        if saved.get("max_norm") not in (None, math.inf) and self._options.max_norm is None:
            return (
                f"was clipped inside step() by max_norm={saved['max_norm']}, and would not be here; build this "
                "optimizer with max_norm= (inf if nothing is to be clipped, or you call clip_grad_norm_)"
            )
        try:
            self._check_group(taken, stepped=True)
        except (TypeError, ValueError) as error:
            return f"cannot be taken over: {error}"
        return ""

    # the state of all ranks, in torch's one-process form

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Let ``state_dict()`` on rank ``to`` return the whole state until it changes. Collective.

        As torch's method of this name. The whole state is in torch's one-process form, on the CPU; ``state_dict()`` on
        the other ranks still returns their parts. After the next ``step()`` ``state_dict()`` is an error on every rank:
        call this again, or with None to get every rank's own part again.

        Args:
            to: a rank of the optimizer's process group.
        """
        self._consolidated = consolidate(self, to)

    def _outdate(self, how: str) -> None:
        if self._consolidated is not None:
            self._consolidated.outdate(how)

    def full_state_dict(self) -> dict[str, Any]:
        """The state of all ranks in torch's one-process form, on the first rank's CPU; elsewhere ``{}``. Collective."""
        self.check_open()
        if self.communicator.world_size > 1:  # else the state is all here
            self.communicator.check_ranks()
        return whole_state.full_state_dict(self, "full_state_dict()")

    def __getstate__(self) -> dict[str, Any]:
        content, state = super().__getstate__(), copy.copy(self.state)
        for shard in () if self._closed else self.shards():
            if shard.parameter in state:
                state[shard.parameter] = self._masters.followed(shard, state[shard.parameter])
        return {**content, "state": state}

    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a one-process state; every rank passes the same and keeps its part.

        It has numbers for its parameters, or names as the full states of torch's ``get_optimizer_state_dict``.
        """
        self.check_open()
        own = self.own_part(state_dict)
        with states.without_hooks(self):
            self.load_state_dict(own)

    def own_part(self, full: dict[str, Any]) -> dict[str, Any]:
        """What ``load_full_state_dict`` takes over on this rank; a ValueError if the state does not fit."""
        self.check_listed()
        return whole_state.cut_full_state_dict(self, loaded_state.adapted(self, full))


def _storage_options(group: dict[str, Any]) -> list[Any]:
    return [*map(group.get, STORAGE_OPTIONS), group.get("beta2") is None]
