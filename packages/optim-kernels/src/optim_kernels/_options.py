"""Options as users give them: what is of another kind is refused by name, before anything moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor

_NUMBERS = {float, int, bool}
# of an AdamW group, in the order in which they are looked at
_ADAMW_SCALARS = ("lr", "betas[0]", "betas[1]", "eps", "weight_decay")


def are_numbers(scalars: Iterable[Any]) -> bool:
    """Whether all are Python's numbers: those of nearly every step, which cost no more than this look."""
    return _NUMBERS.issuperset(map(type, scalars))


def check_scalars(**scalars: Any) -> None:
    """Raise unless each hyperparameter is a number, of Python's or a tensor's; the device is not asked for it.

    Raises:
        TypeError: for what is no number.
        ValueError: for a tensor of several, in torch's words.
    """
    for name, scalar in scalars.items():
        if not hasattr(scalar, "__float__"):
            raise TypeError(f"{name} must be a number or a 1-element tensor, got {scalar!r}")
        if isinstance(scalar, Tensor) and scalar.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(scalar.shape)}")


def check_adamw_scalars(group: Mapping[str, Any]) -> None:
    """`check_scalars` of a group's hyperparameters, of which betas are a pair; quick where they are Python's."""
    betas = group["betas"]
    if (type(betas) is not tuple and (isinstance(betas, str) or not isinstance(betas, Sequence))) or len(betas) != 2:
        raise ValueError(f"betas must be a pair, got {betas!r}")
    scalars = (group["lr"], *betas, group["eps"], group["weight_decay"])
    if not are_numbers(scalars):
        check_scalars(**dict(zip(_ADAMW_SCALARS, scalars)))


def check_switches(**switches: Any) -> None:
    """Raise ``ValueError`` unless each is on or off: a text would be on, whatever it says."""
    for name, switch in switches.items():
        if switch not in (True, False):
            raise ValueError(f"{name} must be True or False, got {switch!r}")


def check_seed(seed: Any) -> None:
    """Raise ``ValueError`` unless ``seed`` is a whole number, of Python's or NumPy's."""
    if not isinstance(seed, Integral):
        raise ValueError(f"seed must be an int, got {seed!r}")
