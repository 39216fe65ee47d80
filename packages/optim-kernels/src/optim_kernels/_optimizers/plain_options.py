"""Options of a group as a state dict holds them: in the types that torch's checkpoint functions take.

``get_optimizer_state_dict`` with ``full_state_dict`` or ``cpu_offload`` accepts only numbers, strings, tensors and
lists of these, so a dtype is stored as its name, ``"torch.float32"``, and a `MatrixView` as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# options that hold a dtype, or a pair of them
_DTYPES = ("state_dtype", "momentum_dtype", "ns_dtype")


def with_dtype_names(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group as a state dict has it: dtypes become their names."""
    return {**group, **{option: _named(group[option]) for option in _DTYPES if option in group}}


def make_groups_plain(state_dict: dict[str, Any]) -> None:
    """Replace dtypes and `MatrixView`s in the groups of a state dict, by new groups."""
    state_dict["param_groups"] = [with_dtype_names(group) for group in state_dict["param_groups"]]
    for group in state_dict["param_groups"]:
        if group.get("views") is not None:
            group["views"] = [None if view is None else view.to_plain() for view in group["views"]]


def with_dtypes(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A group of a state dict as an optimizer has it: names of dtypes become dtypes again."""
    return {**saved, **{option: _found(saved[option]) for option in _DTYPES if option in saved}}


def _named(value: object) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_named, value))
    return str(value) if isinstance(value, torch.dtype) else value


def _found(value: object) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_found, value))
    # "int8" is a format, not a dtype
    if not (isinstance(value, str) and value.startswith("torch.")):
        return value
    found = getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"a group of a loaded state names the dtype {value!r}, which torch {torch.__version__} lacks")
    return found
