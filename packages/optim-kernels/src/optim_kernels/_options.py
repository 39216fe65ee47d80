"""Checks of options as users give them: one of the wrong kind is refused by name, before any tensor changes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

_NUMBERS = {float, int, bool}


def are_numbers(scalars: Iterable[Any]) -> bool:
    """Whether all are Python numbers, as in nearly every step; they then need no further check."""
    return _NUMBERS.issuperset(map(type, scalars))


def check_scalars(**scalars: object) -> None:
    """Raise unless each hyperparameter is a number or a 1-element tensor; no value is read from the device.

    Raises:
        TypeError: for anything that is not a number.
        ValueError: for a tensor of several elements, in torch's words, for an array with dimensions, and for a tensor
            that is complex, of 8-bit floats, or not dense.
        OverflowError: for a number beyond fp64.
    """
    for name, scalar in scalars.items():
        if not hasattr(scalar, "__float__"):
            raise TypeError(f"{name} must be a number or a 1-element tensor, got {scalar!r}")
        if isinstance(scalar, Tensor):
            _check_tensor(name, scalar)
            continue
        # NumPy's arrays have a __float__, which from 2.4 on raises for those with dimensions
        shape: tuple[int, ...] = getattr(scalar, "shape", ())
        if shape:
            raise ValueError(f"{name} must be a number, got an array of shape {shape}; give one number's item()")
        check_python_numbers((name,), (scalar,))


def _check_tensor(name: str, tensor: Tensor) -> None:
    check_layout(name, tensor)
    if tensor.numel() != 1:
        raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(tensor.shape)}")
    if tensor.is_complex():
        raise ValueError(f"{name} must be a real number, got {tensor.dtype}")
    if tensor.is_quantized or (tensor.is_floating_point() and tensor.dtype.itemsize < 2):
        raise ValueError(f"{name} must be a number that torch computes with, got {tensor.dtype}; give its float()")


def check_layout(name: str, tensor: Tensor) -> None:
    """Raise ``ValueError`` for a tensor that is sparse, nested or in another library's layout."""
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"one in {tensor.layout}"
        raise ValueError(f"{name} must be a dense tensor, got {kind}")


def check_python_numbers(names: Sequence[str], numbers: Sequence[Any]) -> None:
    """Raise ``OverflowError`` for a number beyond fp64, such as 10**400; fast, as steps call it."""
    floats: list[float] = []
    try:
        floats.extend(map(float, numbers))
    except OverflowError as error:
        raise OverflowError(f"{names[len(floats)]} is too large for a float, which has 64 bits") from error


def check_betas(betas: Iterable[Any]) -> None:
    """Raise ``ValueError`` for decay rates of AdamW's moments with which no step can be taken, if the host has them."""
    for index, beta in enumerate(betas):
        is_here = not isinstance(beta, Tensor) or (type(beta) is Tensor and beta.device.type == "cpu")
        if is_here and not 0.0 <= beta < 1.0:
            raise ValueError(f"betas[{index}] must be from 0 to below 1, got {beta}")


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
        check_layout(name, number)
        if number.numel() != 1:
            raise ValueError(
                f"{name} must be a 0-d tensor, one number for all gradients, got shape {tuple(number.shape)}"
            )
        if number.is_complex():
            raise ValueError(f"{name} must be a real number, got {number.dtype}")


def check_switches(**switches: object) -> None:
    """Raise ``ValueError`` unless each is True or False: any non-empty string would count as True."""
    for name, switch in switches.items():
        if not is_switch(switch):
            raise ValueError(f"{name} must be True or False, got {switch!r}")


def is_switch(value: Any) -> bool:
    """Whether this is True or False, or a number that is equal to one of them."""
    if type(value) is bool:
        return True
    # tensors and arrays of several numbers, or of none that can be read here, are neither
    has_value = not getattr(value, "shape", ())
    if isinstance(value, Tensor):
        has_value = has_value and not value.is_meta and value.layout == torch.strided
    return has_value and value in (True, False)


def is_one_of(value: object, choices: Sequence[Any]) -> bool:
    """Whether this is one of the ``choices``; lists and arrays are not, which cannot all be compared with them."""
    return isinstance(value, Hashable) and value in choices


def check_seed(seed: object) -> None:
    """Raise ``ValueError`` unless ``seed`` is an integer, Python's or NumPy's."""
    if not isinstance(seed, Integral):
        raise ValueError(f"seed must be an int, got {seed!r}")
