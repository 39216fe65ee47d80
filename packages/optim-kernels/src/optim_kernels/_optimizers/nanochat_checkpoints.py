"""nanochat's checkpoints: Muon state of a group stacked on its first parameter, AdamW steps as ints.

    momentum_buffer          (K, r, c)      for the K parameters r×c of a group
    second_momentum_buffer   (K, r, 1) if r ≥ c else (K, 1, c)

Its groups hold parameters of one shape, which is what makes the stack possible. Masters and the step counts of
stochastic rounding, which nanochat does not have, are stacked in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optim_kernels._optimizers.fitting import check_form


def stack_state(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A ``state_dict`` of ours in nanochat's form; groups whose parameters differ in shape are an error."""
    # looking up a state that is missing leaves an empty one
    state = {i: each for i, each in state_dict["state"].items() if each}
    for index, group in enumerate(state_dict["param_groups"]):
        if group["kind"] == "muon":
            _stack_group(state, group["params"], index)
        else:
            for i in group["params"]:
                if "step" in state.get(i, {}):
                    state[i] = {**state[i], "step": int(state[i]["step"])}
    return {**state_dict, "state": state}


def _stack_group(state: dict[Any, Any], ids: list[Any], index: int) -> None:
    """Move the group's entries of ``state`` into one, on its first parameter."""
    entries = [state.pop(i) for i in ids if i in state]
    if not entries:
        return
    formats = {", ".join(_format(key, value) for key, value in sorted(entry.items(), key=str)) for entry in entries}
    are_tensors = all(isinstance(value, Tensor) for value in ({"momentum_buffer": None} | entries[0]).values())
    if len(entries) != len(ids) or len(formats) != 1 or not are_tensors or entries[0]["momentum_buffer"].ndim != 2:
        raise ValueError(
            "layout='nanochat' stacks a group's states, so each of its parameters needs one, of tensors alone, all of "
            f"matrices of one shape and of the same dtypes, but in param_groups[{index}] {len(entries)} of {len(ids)} "
            f"have one: {'; or '.join(sorted(formats))}; use layout='separate'"
        )
    state[ids[0]] = {key: torch.stack([entry[key] for entry in entries]) for key in entries[0]}


def _format(key: str, value: object) -> str:
    return f"{key} {tuple(value.shape)} in {value.dtype}" if isinstance(value, Tensor) else f"{key} {value!r}"


def unstack_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A ``state_dict`` of nanochat's in our form; one that is ours already comes back unchanged.

    Raises ``ValueError`` for what is no state dict, and for an entry that is no stack beside a momentum that is one.
    """
    check_form(state_dict)
    state = dict(state_dict["state"])
    for index, (saved, group) in enumerate(zip(state_dict["param_groups"], optimizer.param_groups)):
        ids, params = saved["params"], group["params"]
        if group["kind"] == "muon":
            first = state.get(ids[0]) if ids else None
            if isinstance(first, Mapping) and len(ids) == len(params) and _is_stacked(first, params):
                _check_stacks(first, len(ids), index)
                for place, i in enumerate(ids):
                    state[i] = {key: value[place].clone() for key, value in first.items()}
        else:
            for i in ids:
                own = state.get(i)
                if isinstance(own, Mapping) and isinstance(own.get("step"), int):
                    state[i] = {**own, "step": torch.tensor(float(own["step"]), dtype=torch.float32)}
    return {**state_dict, "state": state}


def _is_stacked(state: Mapping[str, Any], params: list[Tensor]) -> bool:
    """Whether the first parameter's state is a stack over the whole group."""
    buffer = state.get("momentum_buffer")
    return isinstance(buffer, Tensor) and tuple(buffer.shape) == (len(params), *params[0].shape)


def _check_stacks(state: Mapping[str, Any], count: int, index: int) -> None:
    """Raise ``ValueError`` unless each entry has a tensor for each of the ``count`` parameters of group ``index``."""
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (count,):
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(
                f"the loaded {key} of param_groups[{index}] must be a stack of {count} tensors, as its momentum_buffer "
                f"is, got {found}"
            )
