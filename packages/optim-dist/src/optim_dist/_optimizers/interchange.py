"""``state_dict()`` over several ranks, so that torch's own checkpoint functions work with it at any number of ranks.

Every rank lists the state of every parameter. State of parameters in buckets is wrapped as ``StatePart``s, empty ones
where the rank owns nothing; the state of DTensors is DTensors already. Groups have all keys of torch's optimizer of the
same kind, so that ``torch.optim.AdamW`` and ours load each other's checkpoints.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Muon

from optim_dist._optimizers.live import LiveOptimizer
from optim_dist._optimizers.shards import Shard, make_shard
from optim_dist._optimizers.state_part import StatePart
from optim_dist._optimizers.states import as_numbers, check_tensors
from optim_dist.plan import ParameterSpec, RouteName


def complete_state(optimizer: LiveOptimizer) -> dict[int, dict[str, Any]]:
    """This rank's view of the state of every parameter, keyed by number in torch's form; missing state is made."""
    mine = {shard.index: shard for shard in optimizer.shards()}
    found = {}
    for index, (spec, entry) in enumerate(zip(optimizer.plan.parameters, optimizer.entries)):
        shard = mine.get(index)
        if shard is not None:
            state = optimizer.completed_state(shard)
            check_tensors(state, spec.name)
        else:
            nothing = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
            state = optimizer.new_state(make_shard(entry, index, 0, spec.numel, nothing))
        if not spec.sharding:
            device = optimizer.communicator.device
            state = {key: _wrapped(as_numbers(value), spec, shard, device) for key, value in state.items()}
        found[entry.number] = dict(state)
    return found


def unwrapped_state(optimizer: LiveOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """``state_dict`` with plain tensors for this rank's shards in place of parts, and without other ranks' state.

    Raises:
        ValueError: for parts of another plan or rank, and for a state that was never cut.
    """
    saved_numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    mine = {shard.index: shard for shard in optimizer.shards()}
    state = dict(state_dict["state"])
    for index, (spec, entry) in enumerate(zip(optimizer.plan.parameters, optimizer.entries)):
        place = entry.number
        if place < len(saved_numbers) and index in mine and state.get(saved_numbers[place]) == {}:
            raise ValueError(
                f"the state to load of {entry.name} is empty: of a flattened state torch's set_optimizer_state_dict "
                "takes only the keys that the optimizer has; call get_optimizer_state_dict on it before"
            )
        if spec.sharding or place >= len(saved_numbers):
            continue  # torch's own error says that groups differ
        if "plan" not in state_dict and saved_numbers[place] not in state and not entry.parameter.requires_grad:
            raise ValueError(
                f"the state to load has nothing of {entry.name}, which is frozen: torch's set_optimizer_state_dict "
                "leaves such parameters out; call it while they need gradients, and freeze them afterwards"
            )
        if "plan" not in state_dict and not _is_in_parts(state.get(saved_numbers[place])):
            raise ValueError(
                f"the state of {entry.name} is of one process; "
                "load_full_state_dict() takes it over at any number of ranks"
            )
        if saved_numbers[place] not in state:
            continue
        saved, shard = state.pop(saved_numbers[place]), mine.get(index)
        if shard is not None:
            state[saved_numbers[place]] = {key: _unwrapped(key, value, shard) for key, value in saved.items()}
    return {**state_dict, "state": state}


def _is_in_parts(state: dict[str, Any] | None) -> bool:
    """Whether a parameter's state is listed in parts; torch leaves an empty one where this rank owns nothing."""
    return state is not None and all(isinstance(value, StatePart) for value in state.values())


def with_torch_keys(group: dict[str, Any], route: RouteName) -> dict[str, Any]:
    """A group's options, and at their defaults those of torch's optimizer of this kind that the group lacks."""
    return {**_torch_defaults(route), **group}


@cache
def _torch_defaults(route: RouteName) -> dict[str, Any]:
    # not torch.optim.AdamW: a program may put an optimizer of ours in its place
    if route == "adamw":
        return dict(AdamW([torch.zeros(1)]).defaults)
    return dict(Muon([torch.zeros(1, 1)]).defaults)


def _wrapped(value: Tensor, spec: ParameterSpec, shard: Shard | None, device: torch.device) -> StatePart:
    is_cut = spec.route == "adamw" and value.ndim > 0
    shape, stride = (spec.shape, spec.stride) if is_cut else (value.shape, value.stride())
    if shard is None:
        value = torch.empty(0, dtype=value.dtype, device=device)
    return StatePart(value, shape, stride, shard.start if shard is not None and is_cut else 0)


def _unwrapped(key: str, value: object, shard: Shard) -> Any:
    if not isinstance(value, StatePart):
        return value
    begin, end = value.start, value.start + value.local.numel()
    is_cut = value.ndim > 0 and value.shape == shard.parameter.shape
    expected = (shard.start, shard.stop) if is_cut else (0, value.numel())
    if (begin, end) != expected:
        raise ValueError(
            f"{key} of {shard.name} holds elements {begin}-{end}, this rank owns {expected[0]}-{expected[1]}; "
            "load it through torch.distributed.checkpoint, which cuts it anew"
        )
    return value.local
