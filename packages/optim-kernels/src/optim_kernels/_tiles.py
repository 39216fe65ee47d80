"""Which tile a product takes: a function of its shape and the chip, without run-time tuning.

A product of many tiles runs in rounds of as many as the chip holds at once; a last round that is nearly empty costs as
much as a full one. Small tiles waste less of it and run slower otherwise. The choice is the tile with the smallest
predicted time, rounds × time of one tile.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Tile(NamedTuple):
    """A block of the result, the depth of one step along K, and how Triton runs it."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)


def triangle_tiles(m: int, block: int) -> int:
    """Tiles of the lower triangle of an m×m matrix, diagonal included."""
    side = cdiv(m, block)
    return side * (side + 1) // 2


# Interpreted kernels cost about a millisecond a step whatever the tile, and their tests are small.
INTERPRETED = Tile(32, 32, 32, 4, 2)
FULL_PRECISION = Tile(64, 64, 32, 4, 2)


@lru_cache(maxsize=4096)
def symmetric_tile(m: int, k: int, batch: int, num_sms: int) -> Tile:
    """The tile of a symmetric m×m product over k, for 16-bit operands."""
    return Tile(128, 128, 64, 4, 3)


@lru_cache(maxsize=4096)
def general_tile(m: int, n: int, k: int, batch: int, num_sms: int) -> Tile:
    """The tile of a general m×n product over k, for 16-bit operands."""
    return Tile(128, 256, 64, 8, 3)
