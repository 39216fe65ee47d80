"""Checks of options as users give them: one of the wrong kind is refused by name, before any tensor changes."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from torch import Tensor

_NUMBERS = {float, int, bool}


def are_numbers(scalars: Iterable[Any]) -> bool:
    """Whether all are Python numbers, as in nearly every step; they then need no further check."""
    return _NUMBERS.issuperset(map(type, scalars))


def check_scalars(**scalars: object) -> None:
    """Raise unless each hyperparameter is a number or a 1-element tensor; no value is read from the device.

    Raises:
        TypeError: for anything that is not a number.
        ValueError: for a tensor of several elements, in torch's words, for an array with dimensions, and for a complex
            tensor.
    """
    for name, scalar in scalars.items():
        if not hasattr(scalar, "__float__"):
            raise TypeError(f"{name} must be a number or a 1-element tensor, got {scalar!r}")
        if isinstance(scalar, Tensor) and scalar.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(scalar.shape)}")
        # NumPy's arrays have a __float__, which from 2.4 on raises for those with dimensions
        shape: tuple[int, ...] = () if isinstance(scalar, Tensor) else getattr(scalar, "shape", ())
        if shape:
            raise ValueError(f"{name} must be a number, got an array of shape {shape}; give one number's item()")
        if isinstance(scalar, Tensor) and scalar.is_complex():
            raise ValueError(f"{name} must be a real number, got {scalar.dtype}")


def check_values(params: Iterable[Tensor], **numbers: object) -> None:
    """Raise ``ValueError`` for a number on meta, which has no value, unless all the parameters are there, too."""
    for name, number in numbers.items():
        if not isinstance(number, Tensor) or not number.is_meta:
            continue
        for param in params:
            if not param.is_meta:
                raise ValueError(
                    f"{name} is on meta, and so has no value; give one on {param.device}, where the parameters are"
                )


def without_dims(number: Any) -> Any:
    """A hyperparameter as torch's operators take it: a float, or a 0-d tensor.

    They take no NumPy arrays; and a tensor of shape (1,) would broadcast a parameter without dimensions to it.
    """
    if isinstance(number, Tensor):
        return number.reshape(()) if number.ndim else number
    return float(number)


def check_scalar_tensors(**numbers: object) -> None:
    """Raise unless each number that is given is a tensor of one element.

    Raises:
        TypeError: for a Python number.
        ValueError: for a tensor of several numbers, which plain torch would broadcast along the last dimension, or a
            complex one.
    """
    for name, number in numbers.items():
        if number is None:
            continue
        if not isinstance(number, Tensor):
            raise TypeError(
                f"{name} must be a 0-d tensor, got {number!r}; give torch.tensor({number!r}), on the parameters' device"
            )
        if number.numel() != 1:
            raise ValueError(
                f"{name} must be a 0-d tensor, one number for all gradients, got shape {tuple(number.shape)}"
            )
        if number.is_complex():
            raise ValueError(f"{name} must be a real number, got {number.dtype}")


def check_switches(**switches: object) -> None:
    """Raise ``ValueError`` unless each is True or False: any non-empty string would count as True."""
    for name, switch in switches.items():
        if switch not in (True, False):
            raise ValueError(f"{name} must be True or False, got {switch!r}")


def check_seed(seed: object) -> None:
    """Raise ``ValueError`` unless ``seed`` is an integer, Python's or NumPy's."""
    if not isinstance(seed, Integral):
        raise ValueError(f"seed must be an int, got {seed!r}")
