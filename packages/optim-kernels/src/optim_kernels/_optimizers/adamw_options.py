"""AdamW parameter groups: their options and the checks of these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from optim_kernels._dtensors import is_dtensor
from optim_kernels._optimizers.storage import MOMENT_DTYPES, MasterWeights, check_master, check_master_weights
from optim_kernels._options import (
    are_numbers,
    check_betas,
    check_python_numbers,
    check_scalars,
    check_seed,
    check_switches,
    check_values,
    is_one_of,
    is_switch,
)

StateDtype = torch.dtype | tuple[torch.dtype | None, torch.dtype | None] | Literal["int8"] | None

# the numbers of an AdamW group, in the order of `check_adamw_scalars`
_ADAMW_SCALARS = ("lr", "betas[0]", "betas[1]", "eps", "weight_decay")
_SWITCHES = ("amsgrad", "capturable", "differentiable", "maximize", "stochastic_rounding")
# these may also be left open
_OPEN_SWITCHES = ("foreach", "fused")


def check_group(group: Mapping[str, Any], names: Sequence[str], *, loaded: bool = False) -> None:
    """Refuse options that torch.optim.AdamW refuses, and storage that parameters cannot have; waits for no device.

    Args:
        group: options that it leaves out are at their defaults, but for torch's numbers.
        names: of the group's parameters, for errors.
        loaded: as in `check_adamw_ranges`.

    Raises:
        TypeError: something else in place of a number.
        ValueError: a number out of its range, another value than the option has, or a parameter that it is not for.
    """
    check_adamw_scalars(group, in_step=False)
    check_adamw_ranges(group, of_tensors=False, loaded=loaded)
    check_update(group)
    state_dtype, master_weights = group.get("state_dtype"), group.get("master_weights")
    check_formats(state_dtype, master_weights)
    for param, name in zip(group["params"], names, strict=True):
        check_storage(param, name, state_dtype, master_weights)


def check_update(group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for options of the update that are neither True nor False, and for a seed that is none."""
    check_switches(**{option: group[option] for option in _SWITCHES if option in group})
    for option in _OPEN_SWITCHES:
        if group.get(option) is not None and not is_switch(group[option]):
            raise ValueError(f"{option} must be None, True or False, got {group[option]!r}")
    check_seed(group.get("seed", 0))


def check_decay(group: Mapping[str, Any], place: str) -> None:
    """Raise ``ValueError`` for a group of torch.optim.Adam, whose decay is part of the gradient.

    torch tells AdamW's groups from Adam's by this option.
    """
    if not group.get("decoupled_weight_decay", True):
        raise ValueError(
            f"{place} has decoupled_weight_decay=False, as those of torch.optim.Adam, and its parameters would be "
            "decayed as AdamW's; leave the option out, or give the group to torch.optim.Adam"
        )


def check_formats(state_dtype: object, master_weights: object) -> None:
    """Raise ``ValueError`` unless these name formats."""
    pair = state_dtype if isinstance(state_dtype, tuple) else (state_dtype, state_dtype)
    are_dtypes = len(pair) == 2 and all(is_one_of(dtype, (None, *MOMENT_DTYPES)) for dtype in pair)
    if not are_dtypes and not is_one_of(state_dtype, ("int8",)):
        raise ValueError(
            f"state_dtype must be None, one of {MOMENT_DTYPES}, a tuple of two such or 'int8', got {state_dtype!r}"
        )
    check_master_weights(master_weights)


def check_storage(param: Tensor, name: str, state_dtype: StateDtype, master_weights: MasterWeights) -> None:
    """Raise ``ValueError`` unless ``param`` and its state can be stored that way."""
    if state_dtype == "int8" and is_dtensor(param):
        raise ValueError(
            f"state_dtype='int8' has a scale for 256 elements, which shards may cut, and {name} is a DTensor; choose a "
            "floating dtype"
        )
    check_master(param, name, master_weights)


def check_adamw_scalars(group: Mapping[str, Any], *, in_step: bool = True) -> None:
    """Check a group's hyperparameters as `check_scalars` does, that betas are a pair, and maximize as a switch.

    Fast for Python numbers, as every step calls it.

    Args:
        in_step: whether values are needed, which tensors on meta lack; else they may yet be given one.
    """
    betas = group["betas"]
    if (type(betas) is not tuple and (isinstance(betas, str) or not isinstance(betas, Sequence))) or len(betas) != 2:
        raise ValueError(f"betas must be a pair, got {betas!r}")
    scalars = (group["lr"], *betas, group["eps"], group["weight_decay"])
    maximize = group.get("maximize", False)
    if not are_numbers((*scalars, maximize)):
        numbers = dict(zip(_ADAMW_SCALARS, scalars))
        check_scalars(**numbers)
        check_switches(maximize=maximize)
        if in_step:
            check_values(group["params"], **numbers)
    else:
        check_python_numbers(_ADAMW_SCALARS, scalars)


def check_adamw_step(group: Mapping[str, Any]) -> None:
    """Raise for hyperparameters with which plain torch cannot take a step, or would make NaN; waits for no device."""
    check_adamw_scalars(group)
    check_betas(group["betas"])


def check_adamw_ranges(group: Mapping[str, Any], *, of_tensors: bool = True, loaded: bool = False) -> None:
    """Raise ``ValueError`` for hyperparameters out of torch.optim.AdamW's ranges, in its words.

    Args:
        of_tensors: look at 0-d tensors, too, which for those on a device costs a synchronisation.
        loaded: whether schedules may have changed lr and weight_decay; as in a step, these may then be negative, as the
            lr is that ``LinearLR`` ends with in place of 0 (-4e-19, say).
    """

    def is_seen(number: object) -> bool:
        return not isinstance(number, Tensor) or (of_tensors and not number.is_meta)

    of_schedules = -math.inf if loaded else 0.0
    for option, word, least in (
        ("lr", "learning rate", of_schedules),
        ("eps", "epsilon value", 0.0),
        ("weight_decay", "weight_decay value", of_schedules),
    ):
        if is_seen(group[option]) and not group[option] >= least:
            raise ValueError(f"Invalid {word}: {group[option]}")
    for index, beta in enumerate(group["betas"]):
        if is_seen(beta) and not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
