"""Hyperparameters that are tensors on a device: the host could read them only by waiting, so kernels do."""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor


def on_device(value: object) -> TypeGuard[Tensor]:
    """Whether a hyperparameter is read on the device."""
    return isinstance(value, Tensor) and value.device.type != "cpu"
