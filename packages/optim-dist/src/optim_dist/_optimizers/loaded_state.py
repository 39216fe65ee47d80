"""A state to load: refused if it does not fit this optimizer, else converted to its formats.

Everything is checked before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from optim_dist._listing import listed
from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.layouts import layout_of, local
from optim_dist._optimizers.live import LiveOptimizer
from optim_dist._optimizers.shards import Shard
from optim_dist._optimizers.states import make_codes_numbers
from optim_dist.plan import Plan, RouteName
from optim_kernels.functional import new_second_moment
from optim_kernels.states import ELEMENTWISE_KEYS, check_loaded, with_dtypes
from optim_utils.param_groups import MatrixView

# state keys that each update needs, if there is a state at all
NEEDED_KEYS: Mapping[RouteName, tuple[str, ...]] = {
    "adamw": ("step", "exp_avg", "exp_avg_sq"),
    "muon": ("momentum_buffer",),
}
# state keys of tensors
SECOND_MOMENT = "second_momentum_buffer"
_NUMBERS = (*ELEMENTWISE_KEYS, SECOND_MOMENT)
_UPDATE_NAMES: Mapping[RouteName, str] = {"adamw": "AdamW", "muon": "Muon"}

# options of a group that stay those of the optimizer that loads: a loaded state is converted to its formats, and all
# groups are clipped together
OWN_OPTIONS = ("views", "momentum_dtype", "state_dtype", "master_weights", "impl", "max_norm")


def check_stamp(state_dict: dict[str, Any], plan: Plan, rank: int) -> None:
    """Refuse a state of another plan or rank before anything is written."""
    stamp = state_dict.get("plan")
    if stamp is None:
        return
    # up to version 0.12.8 stamps had the hash with the names of the wrapped model
    if stamp["hash"] not in (plan.plain_hash, plan.hash) or stamp["rank"] != rank:
        raise ValueError(
            f"this state is of rank {stamp['rank']} of {stamp['world_size']}, plan {stamp['hash'][:12]}; "
            f"this is rank {rank} of {plan.world_size}, plan {plan.plain_hash[:12]} (a plan differs with parameters, "
            "their order, the number of ranks and bucket_mb). optim_dist.checkpoint loads at any number of ranks, and "
            "so does the state_dict() of one rank if all have called consolidate_state_dict() before it"
        )


def check_states(optimizer: LiveOptimizer, state_dict: dict[str, Any]) -> None:
    """Refuse states of another update or other shapes, and DTensors that are not laid out as parameters are.

    State of parameters in buckets is in parts, which fit if their plan does (``check_stamp``).
    """
    saved_ids = [*chain.from_iterable(group["params"] for group in state_dict["param_groups"])]
    for entry in optimizer.entries:
        parameter, place = entry.parameter, entry.number
        # if there are fewer, torch's own error says so
        state = state_dict["state"].get(saved_ids[place], {}) if place < len(saved_ids) else {}
        is_cut = isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1
        is_in_parts = not is_cut and optimizer.communicator.world_size > 1
        if not is_in_parts:
            fault = unusable(state, entry)
        else:
            # parts of this plan are of its views, and may be without their whole shape, as torch.save writes them
            fault = _lacking(state, entry) or ("" if "plan" in state_dict else _misshapen_moment(state, entry))
        if fault:
            raise ValueError(fault)
        if is_in_parts:
            continue
        for key, value in state.items():
            if key not in ELEMENTWISE_KEYS or not isinstance(value, Tensor):
                continue
            if is_cut and not isinstance(value, DTensor):
                raise ValueError(
                    f"{key} of a DTensor of shape {tuple(parameter.shape)} is a plain tensor of shape "
                    f"{tuple(value.shape)}; load_full_state_dict() takes over a one-process state"
                )
            fault = _fault_of(value, parameter)
            if fault:
                raise ValueError(f"the {key} to load of {entry.name} {fault}")


def unusable(state: Mapping[str, Any], entry: Entry) -> str:
    """Why the entry's update cannot use a state that is not in parts; empty if it can."""
    try:
        check_loaded(state, entry.parameter, _NUMBERS, entry.name)
    except ValueError as error:
        return str(error)
    return _lacking(state, entry) or _misshapen_moment(state, entry)


def misfit_of_moment(shape: Sequence[int], entry: Entry) -> str:
    """Why a saved second moment of this shape cannot be that of the entry's matrices; empty if it can.

    Muon's has a value for each row of a matrix r × c with r >= c, and else for each column. Groups that were saved
    without views do not tell how their matrices were read, but what is of columns there must be of columns here.
    """
    view = entry.view or MatrixView.identity(entry.parameter.shape)
    wanted = new_second_moment(torch.empty(view.shape, device="meta"), view).shape
    columns_here = {(r < c) != view.transposed for *_, r, c in view.shapes}  # as the parameter is stored
    means_the_same = len(shape) < 2 or columns_here == {shape[-1] != 1}  # a flat one does not tell
    if tuple(shape) == wanted or (prod(shape) == wanted.numel() and means_the_same):
        return ""
    return (
        f"{SECOND_MOMENT} of {entry.name} has shape {tuple(shape)}, but its matrices {view.describe()} need "
        f"{tuple(wanted)}: it was saved with other views of its matrices"
    )


def _misshapen_moment(state: Mapping[str, Any], entry: Entry) -> str:
    moment = state.get(SECOND_MOMENT)
    if entry.route != "muon" or not isinstance(moment, Tensor):
        return ""
    fault = misfit_of_moment(moment.shape, entry)
    return fault and f"the loaded {fault}; build the optimizer with those, or delete it from the state to start anew"


def check_kept(state: Mapping[str, Any], shard: Shard, route: RouteName) -> None:
    """Refuse, by the shard's name, a state that cannot be completed: somebody may have changed it since it was loaded.

    What its group's options want beside that is made then.
    """
    check_loaded(state, shard.like, _NUMBERS, shard.name)
    for key in ELEMENTWISE_KEYS:
        shapes = [tuple(local(value).shape) for value in (state.get(key), shard.like) if isinstance(value, Tensor)]
        if len(set(shapes)) > 1:
            raise ValueError(f"the loaded {key} of {shard.name} has shape {shapes[0]} here, its parameter {shapes[1]}")
    # one without moments is another update's, of a parameter that has changed groups
    lack = _lack(state, route)
    if lack and ({*NEEDED_KEYS[route]} - {"step"}) & state.keys():
        raise ValueError(f"the state of {shard.name} {lack}; add what is missing, or delete the state to start anew")


def _lacking(state: Mapping[str, Any], entry: Entry) -> str:
    """Why the entry's update cannot use a state, as its keys are another optimizer's; empty if it can."""
    lack = _lack(state, entry.route)
    if not state or not lack:
        return ""
    return f"the state to load of {entry.name} {lack}; load the state of an optimizer of this kind"


def _lack(state: Mapping[str, Any], route: RouteName) -> str:
    """What a state lacks that the update needs, and has instead; empty if it lacks nothing."""
    missing = [key for key in NEEDED_KEYS[route] if key not in state]
    if not missing:
        return ""
    has = ", ".join(sorted(map(str, state)))  # keys that others have put there may be no texts
    return f"has {has}, but {_UPDATE_NAMES[route]} needs {' and '.join(missing)}"


def _fault_of(value: Tensor, parameter: Tensor) -> str:
    """Why ``value`` cannot be the state of ``parameter``; empty if it can."""
    if value.shape != parameter.shape:
        return f"has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}"
    if not isinstance(value, DTensor):
        return ""
    if not isinstance(parameter, DTensor):
        if local(value).shape == value.shape:
            return ""
        return f"is a DTensor of which {tuple(local(value).shape)} is here; load_full_state_dict() loads whole ones"
    if value.placements == parameter.placements and value.device_mesh == parameter.device_mesh:
        return ""
    if layout_of(value).slices(value.shape) == layout_of(parameter).slices(value.shape):
        return ""
    return (
        f"lies as {value.placements} of {value.device_mesh}, its parameter as {parameter.placements} of "
        f"{parameter.device_mesh}; optim_dist.checkpoint, torch.distributed.checkpoint and load_full_state_dict() load "
        "any layout"
    )


def adapted(optimizer: LiveOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``state_dict`` with complete groups, and numbers for 8-bit codes of ``optim_kernels.TritonAdamW``.

    Raises:
        ValueError: for an empty or flat ``state_dict``, and for groups that cannot be taken over.
    """
    if not state_dict:
        raise ValueError(
            "the state is empty: full_state_dict() gives it to the first rank alone; broadcast it, for every rank "
            "passes the same to load_full_state_dict()"
        )
    if missing := [repr(key) for key in ("state", "param_groups") if key not in state_dict]:
        raise ValueError(
            f"the state to load lacks {' and '.join(missing)}, and has {listed([*map(str, state_dict)], 3)}; a "
            "flat one of torch's get_optimizer_state_dict can be had without flatten_optimizer_state_dict=True"
        )
    adapted = {**_with_complete_groups(optimizer, state_dict)}
    make_codes_numbers(adapted)
    return adapted


def _with_complete_groups(optimizer: LiveOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Saved groups with our values for options that they lack, with our storage, and with our views if they fit."""
    saved_groups, mine = state_dict["param_groups"], optimizer.param_groups
    if len(saved_groups) != len(mine):
        return state_dict  # torch's own error says so
    completed = []
    for number, (group, saved) in enumerate(zip(mine, map(with_dtypes, saved_groups))):
        kept = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if fault := optimizer.group_fault(number, saved):
            raise ValueError(f"group {number} {fault}")
        taken = {key: _on_device_of(group.get(key), value) for key, value in saved.items() if key not in OWN_OPTIONS}
        if "decoupled_weight_decay" in taken:
            taken["decoupled_weight_decay"] = True  # as torch's AdamW makes of Adam's groups
        completed.append({**kept, **taken})
    return {**state_dict, "param_groups": completed}


def _on_device_of(mine: object, value: object) -> Any:
    """A saved hyperparameter, on the device of ours if both are tensors: a captured step reads it only there."""
    if isinstance(mine, tuple) and isinstance(value, tuple | list) and len(mine) == len(value):
        return type(value)(map(_on_device_of, mine, value))
    return value.to(mine.device) if isinstance(mine, Tensor) and isinstance(value, Tensor) else value


def has_other_views(saved: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Whether a saved group reads its parameters as other matrices than ``mine`` does."""
    return saved.get("views") is not None and [_view(view) for view in saved["views"]] != mine.get("views")


def _view(saved: Any) -> MatrixView | None:
    return saved if saved is None or isinstance(saved, MatrixView) else MatrixView.from_plain(saved)


@contextmanager
def converted(
    optimizer: LiveOptimizer, convert: Callable[[dict[str, Any]], dict[str, Any]], loaded: Callable[[], None]
) -> Iterator[None]:
    """While torch loads a state, let it take over what ``convert`` makes of it, and call ``loaded`` at the end.

    This undoes torch's cast to the parameters' dtype (pytorch#43706), and lays state out like parameters. Moments
    become 8-bit codes where groups have these.
    """
    taken_over: dict[str, Any] = {}

    # hooks of the user's, which may replace the dict, come before this one
    def before(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        taken_over.update(convert(state_dict))
        return taken_over

    def put_back(_: Optimizer) -> None:
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        saved_ids = chain.from_iterable(group["params"] for group in taken_over["param_groups"])
        for parameter, saved_id in zip(parameters, saved_ids, strict=True):
            if saved_id in taken_over["state"]:
                saved = taken_over["state"][saved_id]
                optimizer.state[parameter] = {key: _laid_out(key, value, parameter) for key, value in saved.items()}
        for shard in optimizer.shards():
            optimizer.encode_state(shard)
        loaded()

    with (
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(put_back, prepend=True),
    ):
        yield


def _laid_out(key: str, value: object, parameter: Tensor) -> Any:
    """A copy on the parameter's device with the strides of new state, which the kernels rely on."""
    if key == "step" and isinstance(value, int | float):
        # before 1.12 torch's step count was a number, not a tensor
        return torch.tensor(float(value), dtype=torch.float32, device=parameter.device)
    if not isinstance(value, Tensor):
        return value
    if not isinstance(parameter, DTensor):
        value = local(value)  # of a DTensor on one rank, which is the whole
    copied = value.detach().to(parameter.device, copy=True)
    if isinstance(parameter, DTensor):
        return copied
    if key not in ELEMENTWISE_KEYS:
        return copied.contiguous()
    if copied.shape != parameter.shape or copied.stride() == torch.empty_like(parameter, device="meta").stride():
        return copied
    return torch.empty_like(parameter, dtype=copied.dtype).copy_(copied)
