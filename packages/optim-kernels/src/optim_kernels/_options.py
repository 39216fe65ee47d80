"""Checks of options as users give them: one of the wrong kind is refused by name, before any tensor changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor

_NUMBERS = {float, int, bool}
# the numbers of an AdamW group, in the order of `check_adamw_scalars`
_ADAMW_SCALARS = ("lr", "betas[0]", "betas[1]", "eps", "weight_decay")


def are_numbers(scalars: Iterable[Any]) -> bool:
    """Whether all are Python numbers, as in nearly every step; they then need no further check."""
    return _NUMBERS.issuperset(map(type, scalars))


def check_scalars(**scalars: Any) -> None:
    """Raise unless each hyperparameter is a number or a 1-element tensor; no value is read from the device.

    Raises:
        TypeError: for anything that is not a number.
        ValueError: for a tensor of several elements, in torch's words.
    """
    for name, scalar in scalars.items():
        if not hasattr(scalar, "__float__"):
            raise TypeError(f"{name} must be a number or a 1-element tensor, got {scalar!r}")
        if isinstance(scalar, Tensor) and scalar.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(scalar.shape)}")


def check_adamw_scalars(group: Mapping[str, Any]) -> None:
    """Check a group's hyperparameters as `check_scalars` does, that betas are a pair, and maximize as a switch.

    Fast for Python numbers, as every step calls it.
    """
    betas = group["betas"]
    if (type(betas) is not tuple and (isinstance(betas, str) or not isinstance(betas, Sequence))) or len(betas) != 2:
        raise ValueError(f"betas must be a pair, got {betas!r}")
    scalars = (group["lr"], *betas, group["eps"], group["weight_decay"])
    maximize = group.get("maximize", False)
    if not are_numbers((*scalars, maximize)):
        check_scalars(**dict(zip(_ADAMW_SCALARS, scalars)))
        check_switches(maximize=maximize)


def check_adamw_ranges(group: Mapping[str, Any], *, of_tensors: bool = True) -> None:
    """Raise ``ValueError`` for hyperparameters out of torch.optim.AdamW's ranges, in its words.

    Args:
        of_tensors: look at 0-d tensors, too, which for those on a device costs a synchronisation.
    """

    def is_seen(number: Any) -> bool:
        return of_tensors or not isinstance(number, Tensor)

    words = {"lr": "learning rate", "eps": "epsilon value", "weight_decay": "weight_decay value"}
    for option, word in words.items():
        if is_seen(group[option]) and not group[option] >= 0.0:
            raise ValueError(f"Invalid {word}: {group[option]}")
    for index, beta in enumerate(group["betas"]):
        if is_seen(beta) and not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")


def check_switches(**switches: Any) -> None:
    """Raise ``ValueError`` unless each is True or False: any non-empty string would count as True."""
    for name, switch in switches.items():
        if switch not in (True, False):
            raise ValueError(f"{name} must be True or False, got {switch!r}")


def check_seed(seed: Any) -> None:
    """Raise ``ValueError`` unless ``seed`` is an integer, Python's or NumPy's."""
    if not isinstance(seed, Integral):
        raise ValueError(f"seed must be an int, got {seed!r}")
