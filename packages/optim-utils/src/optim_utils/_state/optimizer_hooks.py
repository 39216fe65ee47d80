"""Checkpoints of optimizers whose state holds objects: what goes out is plain, what comes in goes into the objects.

``torch.optim.Optimizer.load_state_dict`` casts every tensor in a parameter's state, nested ones too, to the parameter's
dtype, unless its key is "step": 8-bit codes become bf16. It rebuilds nested dicts, so objects are lost, and turns a
string into the repr of a generator. So the values are kept out of its hands:

    saving     an object becomes its nested dict; everything else stays
    before     what was saved is checked against the live objects (nothing is written yet); torch gets placeholders
    setstate   live objects, and tensors with the dtype that they were saved in, take the placeholders' place
    after      the objects are filled in place

The hook "before" stays behind all others, and "setstate" comes before any other code, so nobody else sees placeholders.

An optimizer that converts entries of a loaded state to formats of its own names their keys in an attribute
``_converted_state_keys``; these are left to it. What else it may take over as it was saved becomes objects again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from optim_utils._state.load_plan import LoadPlan
from optim_utils._state.load_report import in_words
from optim_utils._state.missing_objects import drop_states, make_missing_objects
from optim_utils._state.walk import SEQUENCES, Stateful, entries_by_key, is_low_bit_form, items_of
from optim_utils.low_bit import LowBitTensor, from_plain
from optim_utils.optimizer_modules import OptimizerModule, stored_form

logger = logging.getLogger(__name__)

State = dict[Any, Any]


def attach_state_dict_hooks(optimizer: Optimizer, *, strict: bool = True) -> StateDictHooks:
    """Make ``optimizer.state_dict()`` and ``load_state_dict`` work with objects in the state; return the handle.

    The state of a parameter, or a dict that the optimizer keeps beside those, may hold `OptimizerModule` objects and
    `LowBitTensor` tensors, also inside dicts and sequences. The checkpoint then consists of tensors and numbers in
    nested dicts, which ``torch.save`` and ``torch.load(weights_only=True)``, ``torch.distributed.checkpoint`` and
    ``get_optimizer_state_dict`` (nested and flat) can hold. Every tensor comes back with the dtype it was saved in, on
    the device where the optimizer has it.

    If the checkpoint holds objects that the optimizer has not made yet, the optimizer makes them as
    ``get_optimizer_state_dict`` does: by a step with zero gradients and learning rate 0, after which parameters and
    gradients are put back.

    Load pre-hooks of the user, registered before or after, see what was saved, and may rearrange it.

    Hooks are not pickled or copied with the optimizer.

    Args:
        optimizer: any optimizer.
        strict: refuse a checkpoint in which entries of an object are missing, unexpected or of another type, with a
            `StateLoadError` before anything is changed; otherwise these entries keep their present values. An
            unexpected tensor is always taken over, as objects may make some of their tensors later.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"attach_state_dict_hooks takes a torch.optim.Optimizer, got a {type(optimizer).__name__}")
    if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        raise TypeError(
            f"this {type(optimizer).__name__} has no place for hooks, as it did not call Optimizer.__init__: "
            "attach them to the optimizer that it wraps"
        )
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        if isinstance(getattr(hook, "__self__", None), StateDictHooks):
            raise ValueError(f"this {type(optimizer).__name__} has state dict hooks already; remove them first")
    return StateDictHooks(optimizer, strict)


class StateDictHooks:
    """The hooks on an optimizer; ``remove()``, or leaving it as a context, takes them off."""

    def __init__(self, optimizer: Optimizer, strict: bool) -> None:
        self._strict = strict
        # while a load goes on: what to write, and what the state of each parameter, or under each other key, becomes
        self._plan: LoadPlan | None = None
        self._states: dict[Any, State] = {}
        # what torch replaces during a load, to be put back if the load fails
        self._to_restore: dict[str, Any] = {}
        # no cycle, which would keep a state in memory
        self._optimizer = weakref.ref(optimizer)
        before_load = optimizer.register_load_state_dict_pre_hook(self._before_load)
        self._handles = [
            optimizer.register_state_dict_post_hook(self._after_state_dict),
            before_load,
            # first, so that other hooks see filled objects
            optimizer.register_load_state_dict_post_hook(self._after_load, prepend=True),
        ]
        vars(optimizer)[_REGISTER] = partial(_register_before, before_load, self._optimizer)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            vars(optimizer).pop(_REGISTER, None)

    def __enter__(self) -> StateDictHooks:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _after_state_dict(self, optimizer: Optimizer, state_dict: State) -> State:
        state = {
            key: {name: _plain(value) for name, value in entry.items()} if isinstance(entry, dict) else entry
            for key, entry in state_dict["state"].items()
        }
        # a parameter without state has an empty entry: `set_optimizer_state_dict` takes none for a damaged checkpoint
        for key, param in _saved_params(optimizer, state_dict):
            if param.requires_grad:
                state.setdefault(key, {})
        return {**state_dict, "state": state}

    def _before_load(self, optimizer: Optimizer, state_dict: State) -> State:
        if _group_sizes(state_dict["param_groups"]) != _group_sizes(optimizer.param_groups):
            # torch refuses this dict after the hook, so no object may be made and no value replaced for it
            return state_dict
        params = dict(_saved_params(optimizer, state_dict))
        saved = {
            key: _without_gaps(entry, optimizer.state.get(params[key], {})) if key in params else entry
            for key, entry in state_dict["state"].items()
        }
        params = {key: param for key, param in params.items() if key in saved}
        # what an optimizer keeps beside its parameters' states has the same key in both
        owners = params | {
            key: key
            for key, entry in saved.items()
            if key not in params and isinstance(entry, dict) and _holds_objects(optimizer.state.get(key))
        }
        newly_stateful = make_missing_objects(optimizer, {param: saved[key] for key, param in params.items()})
        self._plan = LoadPlan(assign=True)
        self._states = {}
        converted = frozenset(getattr(optimizer, "_converted_state_keys", ()))
        try:
            for key, owner in owners.items():
                live = optimizer.state.get(owner, {})
                device = owner.device if isinstance(owner, Tensor) else None
                self._states[owner] = _planned_state(self._plan, live, saved[key], device, (key,), converted)
            report = self._plan.check(strict=self._strict)
        except BaseException:
            drop_states(optimizer, newly_stateful)
            raise
        for issue in report.problems:
            logger.warning(in_words(issue))
        self._to_restore = {"state": optimizer.state, "param_groups": optimizer.param_groups}
        _guard_next_setstate(optimizer, self._states, self._to_restore)
        shown = {key: {name: _or_placeholder(value) for name, value in saved[key].items()} for key in owners}
        return {**state_dict, "state": {**saved, **shown}}

    def _after_load(self, optimizer: Optimizer) -> None:
        plan, states, to_restore = self._plan, self._states, self._to_restore
        self._plan, self._states, self._to_restore = None, {}, {}
        assert plan is not None
        try:
            plan.write()
            plan.perform_last_loads()
            for owner, state in states.items():
                for name, value in state.items():
                    # the optimizer may have put the saved form here, or a tensor of its own
                    if _holds_objects(value) and not isinstance(optimizer.state[owner].get(name), Tensor):
                        optimizer.state[owner][name] = value
        except BaseException as error:
            vars(optimizer).update(to_restore)
            error.add_note(
                "the optimizer has its objects and param_groups from before this load_state_dict; what was filled of "
                "these objects until then stays filled"
            )
            raise


_REGISTER = "register_load_state_dict_pre_hook"


def _register_before(
    last: RemovableHandle, owner: weakref.ref[Optimizer], hook: Any, prepend: bool = False
) -> RemovableHandle:
    """Register ``hook`` before ``last``, so that it sees what was saved and may change it."""
    optimizer = owner()
    assert optimizer is not None
    handle = type(optimizer).register_load_state_dict_pre_hook(optimizer, hook, prepend)
    optimizer._optimizer_load_state_dict_pre_hooks.move_to_end(last.id)
    return handle


def _guard_next_setstate(optimizer: Optimizer, states: dict[Any, State], to_restore: dict[str, Any]) -> None:
    """Let ``states`` take the placeholders' place when torch calls the optimizer's ``__setstate__`` in a load.

    The guard hides the class's method until the optimizer calls it once. If that raises, as Adam's does for a state
    without "step", torch calls no other hook, so the optimizer gets ``to_restore`` back at once.
    """

    def guarded(new: dict[str, Any]) -> None:
        del vars(optimizer)["__setstate__"]
        # an optimizer that goes back to its state, as the load has failed, is no load
        if new["state"] is not to_restore["state"]:
            for owner, state in states.items():
                new["state"][owner] = _completed(state, new["state"][owner])
        try:
            optimizer.__setstate__(new)
        except BaseException:
            vars(optimizer).update(to_restore)
            raise

    vars(optimizer)["__setstate__"] = guarded


def _completed(state: State, by_torch: State) -> State:
    """``state`` with the numbers and 0-dim tensors that torch has placed."""
    return {
        name: value if _needs_placeholder(value) else _with_dtype(by_torch.get(name, value), value, name)
        for name, value in state.items()
    }


class _Placeholder:
    """A value that torch passes on untouched, being neither tensor nor dict nor iterable."""

    __slots__ = ()


def _needs_placeholder(value: object) -> bool:
    """Whether torch's load must not see ``value``. It places numbers and 0-dim tensors, such as step counts."""
    return isinstance(value, (Mapping, str, Stateful, LowBitTensor, *SEQUENCES)) or (
        isinstance(value, Tensor) and value.ndim > 0
    )


def _or_placeholder(value: object) -> object:
    return _Placeholder() if _needs_placeholder(value) else value


def _with_dtype(by_torch: object, saved: object, name: object) -> Any:
    """The number or 0-dim tensor that torch loaded, in its saved dtype; torch itself handles "step" correctly."""
    if isinstance(by_torch, Tensor) and isinstance(saved, Tensor) and name != "step":
        return saved.to(by_torch.device)
    return by_torch


def _group_sizes(groups: list[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _saved_params(optimizer: Optimizer, state_dict: State) -> Iterator[tuple[Any, Tensor]]:
    """(key, parameter) pairs, where the key is what the saved groups call the parameter: a number or a name."""
    for group, saved_group in zip(optimizer.param_groups, state_dict["param_groups"]):
        yield from zip(saved_group["params"], group["params"])


def _without_gaps(saved: State, live: State) -> State:
    """``saved`` without the empty dicts that stand for what was not saved.

    Given a flat state, ``set_optimizer_state_dict`` puts an empty dict there for every name that the live state has.
    """
    if live and all(map(_is_gap, saved.values())):
        return {}
    is_leaf = {name: items_of(value) is None for name, value in live.items()}
    return {name: value for name, value in saved.items() if not (_is_gap(value) and is_leaf.get(name))}


def _is_gap(value: object) -> bool:
    return isinstance(value, dict) and not value


def _planned_state(
    plan: LoadPlan,
    live: State,
    saved: State,
    device: torch.device | None,
    path: tuple[Any, ...],
    converted: Collection[Any],
) -> State:
    """What a parameter's state becomes: the live objects, which the plan will fill, and the saved values.

    Those whose names are in ``converted`` stay as they were saved. ``device`` is that of the parameter, if it is one.
    """
    entries = entries_by_key(saved, live) or {}
    # a parameter on meta has no memory yet: the loaded tensors bring it
    plan.device = None if device is None or device.type == "meta" else device
    state = {}
    for name, value in entries.items():
        old = live.get(name)
        if name in converted:
            state[name] = value
        elif _holds_objects(old):
            # an optimizer without hooks, as a copy of this one is, has saved the objects themselves
            saved_form = _plain(value) if _holds_objects(value) else value
            state[name] = plan.add(old, _with_none(old, saved_form), (*path, name))
        else:
            state[name] = _restored(_with_keys_of(old, value), old.device if isinstance(old, Tensor) else device)
    if saved:
        for name, old in live.items():
            if name not in entries and name not in converted and _holds_objects(old):
                # a checkpoint format dropped the object because it holds nothing, or it is missing
                plan.note_missing(old, (*path, name))
                state[name] = old
    return state


def _with_keys_of(live: object, saved: object) -> Any:
    """``saved`` with the ints that are keys in ``live``: flat states and checkpoints make strings of them."""
    if not isinstance(live, dict) or not isinstance(saved, Mapping):
        return saved
    return {key: _with_keys_of(live.get(key), item) for key, item in (entries_by_key(saved, live) or {}).items()}


def _restored(value: Any, device: torch.device | None) -> Any:
    """A saved value on ``device``, in new containers; a 0-dim tensor is left where it is, as torch places it."""
    if isinstance(value, Tensor):
        return value.to(device) if value.ndim and device is not None else value
    if is_low_bit_form(value):
        # whole: its parts stay together, also 0-dim codes
        tensor = from_plain(dict(value))
        return tensor if device is None else tensor.to(device)
    if isinstance(value, Mapping):
        return {name: _restored(item, device) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_restored(item, device) for item in value)
    return value


def _plain(value: object) -> Any:
    """``value`` for a checkpoint: nested dicts if it holds objects, otherwise the same in dicts of its own."""
    if _holds_objects(value):
        return _without_none(stored_form(value))
    # torch.distributed.checkpoint puts what it loads into the dicts that it is given
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _holds_objects(value: object) -> bool:
    if isinstance(value, (OptimizerModule, LowBitTensor)):
        return True
    return any(_holds_objects(child) for _, child in items_of(value) or ())


def _without_none(value: object) -> Any:
    """Nested dicts without the entries that are None, which torch's flat form of a state refuses to hold."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def _with_none(live: object, saved: object) -> Any:
    """``saved`` with the entries that `_without_none` left out of containers, where ``live`` has None.

    A container of plain values takes over the saved contents and length, so (0.9, None) would become (0.9,).
    """
    if isinstance(live, OptimizerModule):
        # an attribute that is None needs no entry
        if type(live).state_dict is not OptimizerModule.state_dict or not isinstance(saved, Mapping):
            return saved
        attributes = {name: _with_none(old, saved[name]) for name, old in live.state_attributes() if name in saved}
        return {**saved, **attributes}
    if not isinstance(live, (dict, *SEQUENCES)):
        return saved
    items = live if isinstance(live, dict) else dict(enumerate(live))
    entries = entries_by_key(saved, items)
    if entries is None:
        return saved
    for key, old in items.items():
        if key in entries:
            entries[key] = _with_none(old, entries[key])
        elif old is None:
            entries[key] = None
    return entries
