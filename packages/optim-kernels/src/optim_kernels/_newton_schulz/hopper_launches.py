"""Launches of the products' kernels for Hopper.

    lone         a tile for each multiprocessor: symmetric and general products
    wide         tiles of 128×256, which two consumers share: A Aᵀ and general products
    ping-pong    tiles of 128×128, between which consumers take turns: symmetric and general products

The kernels are in `_hopper`, whose Gluon is imported when one is needed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optim_kernels._kernels.normalize import Norm
from optim_kernels._newton_schulz.block_launch import NUM_LAUNCHES, BlockLaunch, alignment_of, layout_of
from optim_kernels._newton_schulz.tile_choice import may_copy_ahead, may_overlap, num_multiprocessors
from optim_kernels._newton_schulz.tiles import TILE_GROUP, WIDE, WIDE_LENGTH, Tile, cdiv, symmetric_tiles


class LoneProduct(NamedTuple):
    """Which product a launch of `_hopper.lone_kernel` computes: the kernel's first compile-time arguments.

    ``low``: q is the rounding error of d; ``apart``: q is the diagonal of d, which has zeros there. ``parts``: of a
    matrix, whose squares give its scale; a power of two, 0 where the scale is given. ``ahead``: a is copied before the
    launch before is complete; ``late``: the next launch does that. ``in_eights``: results have a multiple of 8 columns.
    """

    symmetric: bool = False
    same: bool = False
    has_c: bool = False
    has_q: bool = False
    has_scale: bool = False
    low: bool = False
    apart: bool = False
    banded: bool = False
    parts: int = 0
    adds_eps: bool = False
    ahead: bool = False
    late: bool = False
    in_eights: bool = False


def lone_launch(
    tile: Tile, grid: tuple[int, int], flags: LoneProduct, device: torch.device, early: bool = False
) -> BlockLaunch:
    """A launch of programs that have a multiprocessor each, for matrices of 16 bits.

    ``grid``: programs of a matrix, matrices; ``early``: what still runs when it starts makes nothing but the scale.
    """
    # Gluon
    from optim_kernels._hopper.lone_kernel import REGISTERS, lone_kernel
    from optim_kernels._hopper.lone_tiles import SIDE
    from optim_kernels._hopper.ring import descriptor

    programs = grid[0] * grid[1]
    overlap = may_overlap(tile, programs, device)
    if flags.ahead and not (overlap and may_copy_ahead(programs, device) and not flags.banded):
        flags = flags._replace(ahead=False)
    side: int = SIDE.value
    options: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    if tile.rows == side:
        options["maxnreg"] = REGISTERS.value
    constants = (*flags, tile.num_stages, tile.rows // side, tile.columns // side, overlap, overlap and early)
    return BlockLaunch(
        lone_kernel, (*grid, 1), 5 * [(side, side)], constants, describe=descriptor, num_warps=4, **options
    )


def run_lone_launch(
    launch: BlockLaunch,
    matrices: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None],
    scale: Tensor | Norm | None,
    counts: tuple[int, ...],
    k: int,
    factors: tuple[Any, ...],
    diagonal: Tensor | None = None,
) -> None:
    """Launch on a, b, c, d and q; ``factors``: α, β and ω; ``diagonal``: where that of d goes by itself."""
    a, b, c, d, q = matrices
    given, inverses, *norm = scale[:-1] if isinstance(scale, Norm) else (scale, None, 0, 0.0, 0.0)
    pointers = (d if x is None else x for x in (q if diagonal is None else diagonal, given, inverses))
    results = d, d if q is None else q
    launch.launch((a, b, d if c is None else c, *results), (d, *pointers, *counts, k, *factors, *norm))


def wide_product(
    a: Tensor,
    b: Tensor | None,
    c: Tensor | None,
    d: Tensor,
    scale: Tensor | None,
    numbers: tuple[float, float],
    betas: Tensor | None = None,
) -> None:
    """Either product in tiles that both consumers share (`_hopper.wide_kernel`); b ``None`` is ``aᵀ``.

    ``numbers``: α and β; ``betas``: instead of β one for each row, fp32 ``[batch, M]``.
    """
    if a.shape[-1] < WIDE_LENGTH:
        raise ValueError(
            f"{WIDE} is for sums of {WIDE_LENGTH} and more, got {a.shape[-1]}; leave the tile to the shape"
        )
    launch, counts = _wide_launch((*map(layout_of, (a, b, c, d)), *map(alignment_of, (scale, betas))), a.device)
    matrices = (a, a if b is None else b, d if c is None else c, d, d)
    pointers = (d if x is None else x for x in (scale, betas))
    launch.launch(matrices, (*pointers, *counts, *numbers))


@lru_cache(maxsize=NUM_LAUNCHES)
def _wide_launch(key: tuple[Any, ...], device: torch.device) -> tuple[BlockLaunch, tuple[int, int, int, int, int]]:
    """The launch, and the numbers of tiles and the length of the sums to pass to it."""
    # Gluon
    from optim_kernels._hopper.ring import descriptor
    from optim_kernels._hopper.wide_kernel import wide_product_kernel

    ((batch, m, k), *_), b, c, ((_, _, n), *_), scale, betas = key
    rows, columns, depth = WIDE.rows, WIDE.columns, WIDE.depth
    if b is None:
        tiles, grid = symmetric_tiles(m, WIDE), (cdiv(m, columns), 0)
    else:
        grid = cdiv(m, rows), cdiv(n, columns)
        tiles = grid[0] * grid[1]
    second = (columns, depth) if b is None else (depth, columns)
    launch = BlockLaunch(
        wide_product_kernel,
        min(batch * tiles, num_multiprocessors(device.index)),
        [(rows, depth), second, *(2 * [(rows // 2, columns)]), (columns, rows // 2)],
        (b is None, c is not None, scale is not None, betas is not None, TILE_GROUP, depth, WIDE.num_stages),
        describe=descriptor,
        num_warps=4,
    )
    return launch, (batch * tiles, tiles, *grid, k)


def ping_pong_product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    d: Tensor,
    q: Tensor | None,
    scale: Tensor | None,
    tile: Tile,
    numbers: tuple[float, float, float],
    *,
    is_symmetric: bool,
) -> None:
    """Either product on the ping-pong schedule; ``numbers``: α, β and ω."""
    key = (a is b, is_symmetric, *map(layout_of, (a, b, c, d, q)), alignment_of(scale))
    launch, counts = _ping_pong_launch(key, tile, a.device)
    matrices = (a, b, *(d if x is None else x for x in (c, d, q)))
    launch.launch(matrices, (d if scale is None else scale, *counts, *numbers))


@lru_cache(maxsize=NUM_LAUNCHES)
def _ping_pong_launch(key: tuple[Any, ...], tile: Tile, device: torch.device) -> tuple[BlockLaunch, tuple[int, ...]]:
    """The launch, and the numbers of tiles and the length of the sums to pass to it."""
    # Gluon
    from optim_kernels._hopper.ping_pong_kernels import product_kernel
    from optim_kernels._hopper.ring import descriptor

    same, is_symmetric, ((_, _, k), *_), _, c, ((batch, m, n), *_), q, scale = key
    side, depth = tile.rows, tile.depth
    rows, columns = cdiv(m, side), cdiv(n, side)
    tiles = symmetric_tiles(m, tile) if is_symmetric else rows * columns
    total = batch * tiles
    flags = (is_symmetric, same, c is not None, q is not None, scale is not None)
    blocks = [(side, depth), (side, depth) if is_symmetric else (depth, side), *(3 * [(side, side)])]
    launch = BlockLaunch(
        product_kernel,
        min(total, num_multiprocessors(device.index)),
        blocks,
        (*flags, TILE_GROUP, depth, tile.num_stages),
        describe=descriptor,
        num_warps=4,
    )
    return launch, (total, tiles, rows, columns, k)
