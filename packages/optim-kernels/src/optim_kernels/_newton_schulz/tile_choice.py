"""Which tile a product takes on a device: by its multiprocessors, and by whether it runs the kernels of `_hopper`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from optim_kernels._impl import is_interpreted, multiplies_fp64_fast
from optim_kernels._newton_schulz.tiles import (
    FULL_PRECISION,
    IN_FP64,
    INTERPRETED,
    LONE_FACTORS_ASPECT,
    MOST_LONE_MATRICES,
    Tile,
    fitted,
    full_tile,
    general_tile,
    may_find_norm,
    may_split,
    splitting_tile,
    symmetric_tile,
)
from optim_kernels._triton import can_overlap


def choose_tile(
    dtype: torch.dtype, device: torch.device, choose: Callable[[int, bool], Tile], exact: bool = False
) -> Tile:
    """The tile that ``choose`` takes, by the device's multiprocessors and whether it runs the kernels of `_hopper`.

    fp32 matrices have tiles of their own, in fp64 where the product is ``exact`` and the device is fast at it.
    """
    in_fp64 = exact and dtype == torch.float32 and multiplies_fp64_fast(device)
    if is_interpreted():
        return INTERPRETED._replace(in_fp64=in_fp64)
    if dtype == torch.float32:
        return IN_FP64 if in_fp64 else FULL_PRECISION
    tile = choose(num_multiprocessors(device.index), has_gluon(device.index))
    return tile if tile.on_hopper else fitted(tile, shared_bytes(device.index))


def portable_tile(a: Tensor, b: Tensor, *, symmetric: bool) -> Tile:
    """A tile of the Triton kernels for ``a bᵀ``, symmetric, or ``a b``: only they take α and β as tensors."""
    batch, m, k = a.shape

    def choose(num_sms: int, _: bool) -> Tile:
        if symmetric:
            return symmetric_tile(m, k, batch, num_sms, a is b)
        return general_tile(m, b.shape[-1], k, batch, num_sms)

    return choose_tile(a.dtype, a.device, choose)


def takes_pairs(count: int, m: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``count`` symmetric products of m×m matrices, and as many with the same second operands, are one launch.

    Where they fit into one round, it costs little more than one of the two.
    """
    return choose_tile(dtype, device, lambda sms, hopper: symmetric_tile(m, m, 2 * count, sms, False, hopper)).lone


def finds_norm(count: int, m: int, n: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the products X Xᵀ of ``count`` m×n matrices find the norms by which they divide."""
    tile = choose_tile(dtype, device, lambda sms, hopper: symmetric_tile(m, n, count, sms, True, hopper))
    return may_find_norm(m, tile)


def takes_factors(count: int, m: int, n: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``count`` m×n matrices, product by product, restart the Gram iteration in factors, as a chain does.

    Where X's products take several rounds and those of its factors one: there it is faster, and there are the kernels.
    """

    def tile(choose: Callable[[int, bool], Tile]) -> Tile:
        return choose_tile(dtype, device, choose)

    if dtype.itemsize != 2 or n < LONE_FACTORS_ASPECT * m:
        return False
    gram = tile(lambda sms, hopper: symmetric_tile(m, n, count, sms, True, hopper))
    square = tile(lambda sms, hopper: general_tile(m, m, m, count, sms, hopper))
    rectangle = tile(lambda sms, hopper: general_tile(m, n, m, count, sms, hopper))
    return may_split(gram) and square.lone and rectangle.cooperative


def may_launch_factors(count: int, m: int, device: torch.device) -> bool:
    """Whether the products that a restart in factors needs beside others exist for ``count`` matrices of m rows.

    They are those of one round: as many as a chain does not take.
    """
    sms = num_multiprocessors(device.index)
    return splitting_tile(m, count, sms) is not None and full_tile(m, count, sms) is not None


def tile_of_factors(a: Tensor, choose: Callable[[int, int, int], Tile | None]) -> Tile:
    """The tile of such a product with ``a [batch, M, K]``: `splitting_tile` or `full_tile`."""

    def tile(num_sms: int, _: bool) -> Tile:
        found = choose(a.shape[-2], a.shape[0], num_sms)
        assert found is not None
        return found

    return choose_tile(a.dtype, a.device, tile)


def may_overlap(tile: Tile, programs: int, device: torch.device) -> bool:
    """Whether the next launch may come to the device before this one's programs end.

    The next launch's first programs come two at a time to free multiprocessors, which would be busy twice as long. So
    no two may fit on one, or a third of all multiprocessors has to be free.
    """
    if not can_overlap(device):
        return False
    num_sms = num_multiprocessors(device.index)
    return programs <= num_sms and (tile.fills_multiprocessor or 3 * programs <= 2 * num_sms)


def may_copy_ahead(programs: int, device: torch.device) -> bool:
    """Whether enough programs find a free multiprocessor while the launch before, of about as many, still runs.

    They copy what they can before it is complete, which makes it slower: measured, 110 programs on 132 multiprocessors
    lose what 78 gain.
    """
    return 3 * programs <= 2 * num_multiprocessors(device.index)


def tile_of_one(a: Tensor, b: Tensor, *, symmetric: bool, shifted: bool = False, exact: bool = False) -> Tile:
    """The tile of ``a bᵀ``, symmetric, or ``a b`` for one matrix, whatever the size of the batch.

    Only batches that lone tiles cannot take have another one, which gives the same bits.
    """
    batch, m, k = a.shape

    def choose(num_sms: int, hopper: bool) -> Tile:
        hopper &= batch <= MOST_LONE_MATRICES
        if symmetric:
            return symmetric_tile(m, k, 1, num_sms, a is b, hopper, shifted)
        return general_tile(m, b.shape[-1], k, 1, num_sms, hopper)

    return choose_tile(a.dtype, a.device, choose, exact)


def tiles_agree(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether all tiles of a product, and a chain's, give the same bits: those of 16-bit operands on Hopper.

    Its tensor cores add the products of 16 places along K at a time, in order, whatever the tile; and all kernels round
    what becomes of a sum in the same way (`_kernels.product.with_c`).
    """
    return device.type == "cuda" and dtype.itemsize == 2 and has_gluon(device.index)


@cache
def has_gluon(device: int | None) -> bool:
    """Whether the kernels of `_hopper` run: on Hopper alone, with Gluon as it is since Triton 3.6."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version >= (3, 6) and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def num_multiprocessors(device: int | None) -> int:
    """Multiprocessors of the device with this number."""
    return torch.cuda.get_device_properties(device or 0).multi_processor_count


@cache
def shared_bytes(device: int | None) -> int:
    """The most shared memory that a program may have on the device with this number."""
    # torch's types do not know it
    properties: Any = torch.cuda.get_device_properties(device or 0)
    size: int = properties.shared_memory_per_block_optin
    return size
