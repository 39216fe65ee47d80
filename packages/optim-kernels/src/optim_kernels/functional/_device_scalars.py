"""Numbers that are tensors on a device: the host could read them only by waiting, so kernels read them."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from optim_kernels._dtensors import whole
from optim_kernels.reference.adamw import Scalar


def on_device(value: object) -> TypeGuard[Tensor]:
    """Whether a hyperparameter is read on the device."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def readable(value: Scalar, device: torch.device) -> Scalar:
    """A hyperparameter that a kernel on ``device`` can read: fp32 there, a DTensor in full; or a number."""
    if not on_device(value):
        return value
    number: Tensor = whole(value)
    return number.detach().to(device=device, dtype=torch.float32)


def brought_to(device: torch.device, value: Scalar) -> Scalar:
    """A hyperparameter as torch computes with it beside tensors on ``device``: a float, or 0-d, of 32 bits at least.

    Tensors of the host go with those of any device; DTensors do not go with other tensors, and come in full.
    """
    if not isinstance(value, Tensor):
        return value
    number: Tensor = whole(value)
    return number.to(device if on_device(number) else number.device, torch.promote_types(number.dtype, torch.float32))


def as_scalar(value: Tensor | None, neutral: Tensor) -> Tensor:
    """``value``, or ``neutral`` in place of ``None``, as one fp32 number on the device of ``neutral``."""
    if value is None:
        return neutral
    is_ready = value.dtype == torch.float32 and value.device == neutral.device
    return value if is_ready else value.to(device=neutral.device, dtype=torch.float32)
