"""Which tile a product takes on a device: by its multiprocessors, and by whether it runs the kernels of `_hopper`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import triton
from torch import Tensor

from optim_kernels._impl import is_interpreted
from optim_kernels._newton_schulz.tiles import FULL_PRECISION, INTERPRETED, Tile, general_tile, symmetric_tile


def choose_tile(dtype: torch.dtype, device: torch.device, choose: Callable[[int, bool], Tile]) -> Tile:
    """The tile that ``choose`` takes, by the device's multiprocessors and whether it runs the kernels of `_hopper`."""
    if is_interpreted():
        return INTERPRETED
    if dtype == torch.float32:
        return FULL_PRECISION
    return choose(num_multiprocessors(device.index), has_gluon(device.index))


def portable_tile(a: Tensor, b: Tensor, *, symmetric: bool) -> Tile:
    """A tile of `_kernels.product` for ``a bᵀ``, symmetric, or ``a b``: only there α and β may be tensors."""
    batch, m, k = a.shape

    def choose(num_sms: int, _: bool) -> Tile:
        if symmetric:
            return symmetric_tile(m, k, batch, num_sms, a is b)
        return general_tile(m, b.shape[-1], k, batch, num_sms)

    return choose_tile(a.dtype, a.device, choose)


@cache
def has_gluon(device: int | None) -> bool:
    """Whether the ping-pong kernel runs: on Hopper alone, with Gluon as it is since Triton 3.6."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version >= (3, 6) and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def num_multiprocessors(device: int | None) -> int:
    """Of the device with this number."""
    return torch.cuda.get_device_properties(device or 0).multi_processor_count
