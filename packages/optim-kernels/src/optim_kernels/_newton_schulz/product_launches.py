"""The two products of Newton–Schulz on the GPU: their checks and their launches.

    symmetric_product    s (α a bᵀ + β c)      one triangle computed and mirrored
    general_product      s (α a b + β c)

Matrices are ``[batch, M, K]``, as the copy engine can read them (`as_batch`); sums are fp32 and rounded once, to the
operands' dtype (fp16, bf16 or fp32; fp32 operands as the sums of two tf32 numbers, or in fp64: `_triton.dot`). `tiles`
chooses the kernel of a product; `multiply` computes either product for matrices of any shape and strides. Launches are
kept for matrices of the same shapes and strides.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from optim_kernels._kernels import product, symmetric
from optim_kernels._kernels.normalize import Norm
from optim_kernels._newton_schulz.block_launch import NUM_LAUNCHES, BlockLaunch, alignment_of, layout_of
from optim_kernels._newton_schulz.copy_engine import as_batch, empty_matrices
from optim_kernels._newton_schulz.hopper_launches import (
    LoneProduct,
    lone_launch,
    ping_pong_product,
    run_lone_launch,
    wide_product,
)
from optim_kernels._newton_schulz.tile_choice import choose_tile, may_overlap, portable_tile
from optim_kernels._newton_schulz.tiles import (
    TILE_GROUP,
    Tile,
    cdiv,
    general_tile,
    may_find_norm,
    may_split,
    symmetric_programs,
    symmetric_tile,
    symmetric_tiles,
)
from optim_kernels._triton import triton


def symmetric_product(
    a: Tensor,
    b: Tensor,
    *,
    c: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 0.0,
    out: Tensor | None = None,
    shifted: tuple[Tensor, float] | None = None,
    low: Tensor | None = None,
    scale: Tensor | Norm | None = None,
    tile: Tile | None = None,
    early: bool = False,
    ahead: bool = False,
    late: bool = False,
    exact: bool = False,
) -> Tensor:
    """``alpha a bᵀ + beta c``, symmetric by contract, for ``a, b [batch, M, K]``.

    ``alpha`` and ``beta`` may be fp32 tensors of one element where `portable_tile` chooses the tile. ``shifted = (q,
    omega)`` also writes the result plus ``omega I`` into q, ``low`` takes the result's rounding error instead
    (`may_split`). ``scale [batch]`` (fp32, on the device) multiplies each matrix before it is rounded. ``exact``: fp32
    matrices are summed in fp64 where the device multiplies fp64 fast. In ``out``, q and ``low``, what lies between a
    row's end and the next multiple of 16 bytes is written as well.

    Some kernels overlap with the launch before. ``early``: what is still running of it makes nothing but ``scale``, and
    no other launch still uses ``out``. ``ahead``: it was ``late``, and has not written a, which is not b.

    Lone tiles take a shorter batch b, too, which is repeated, and (`may_find_norm`) as ``scale`` a `Norm`: they find
    1/N² in it, by which they multiply, and leave it there with 1/N.
    """
    batch, m, k = a.shape
    if out is None:
        out = empty_matrices(batch, m, m, like=a)
    if out.numel() == 0:
        return out
    same = a is b
    q, omega = (low, 0.0) if shifted is None else shifted
    factors = _factors(alpha, beta, out)
    given, *norm = (scale.sums, scale.parts, scale.adds_eps) if isinstance(scale, Norm) else (scale, 0, False)
    flags = (same, low is not None)
    key = (*flags, *map(layout_of, (a, b, c, out, q)), *map(alignment_of, (given, *factors)), *norm)
    tile, launch, counts = _symmetric_launch(key, a.dtype, tile, a.device, early, ahead, late, exact)
    if tile.on_hopper:
        _check_numbers(tile, factors)
    if launch is None:
        if tile.ping_pong:
            ping_pong_product(a, b, c, out, q, given, tile, (*factors, omega), is_symmetric=True)
            return out
        if not same or q is not None:
            raise ValueError(f"{tile} is for x xᵀ alone, got two operands or a shift; leave the tile to the shape")
        wide_product(a, None, c, out, given, factors)
        return out
    matrices: tuple[Tensor | None, ...]
    if tile.lone:
        run_lone_launch(launch, (a, b, c, out, q), scale, counts, k, (*factors, omega))
        return out
    if tile.quartered:
        matrices = 2 * (a, None if same else b, c, out, q)
    elif tile.joined:
        matrices = (a, c, out, q)
    elif tile.rows == tile.columns:
        matrices = (a, None if same else b, c, out, None, q, None)
    else:
        matrices = (a, b, c, out, out, q, q)
    launch.launch(matrices, (out if given is None else given, *counts, k, *factors, omega))
    return out


@lru_cache(maxsize=NUM_LAUNCHES)
def _symmetric_launch(
    key: tuple[Any, ...],
    dtype: torch.dtype,
    given: Tile | None,
    device: torch.device,
    early: bool,
    ahead: bool,
    late: bool,
    exact: bool,
) -> tuple[Tile, BlockLaunch | None, tuple[int, ...]]:
    """The tile; its launch, unless the kernel is persistent; the numbers of tiles to pass to the launch."""
    same, low, ((batch, m, k), *_), ((num_b, *_), *_), c, _, q, scale, alpha, _, parts, adds_eps = key
    tile = given or choose_tile(
        dtype, device, lambda sms, hopper: symmetric_tile(m, k, batch, sms, same, hopper, q is not None), exact
    )
    if same and ahead:
        raise ValueError("ahead is for two operands, got x xᵀ")
    if not same and tile.joined:
        raise ValueError(f"{tile} is for x xᵀ alone, got two operands; leave the tile to the shape")
    if not same and tile.lone and tile.quartered and q is not None:
        raise ValueError(f"{tile} takes no shift of a product of two operands; leave the tile to the shape")
    if num_b != batch and (not tile.lone or batch % num_b):
        raise ValueError(f"{tile} multiplies two batches of one size, got {batch} and {num_b} matrices")
    if parts and not may_find_norm(m, tile):
        raise ValueError(f"{tile} finds no norm of matrices with m = {m}; give it a scale")
    if low and not may_split(tile):
        raise ValueError(f"{tile} gives no rounding errors, as lone tiles of two consumers do; leave out low")
    if tile.lone and tile.quartered and cdiv(m, tile.side) % 4:
        raise ValueError(f"{tile} needs a multiple of 4 diagonal tiles, got m = {m}; leave the tile to the shape")
    if tile.lone:
        tiles = symmetric_programs(m, tile)
        lone_flags = LoneProduct(
            symmetric=True,
            same=same,
            has_c=c is not None,
            has_q=q is not None and not low,
            has_scale=scale is not None,
            low=low,
            banded=tile.quartered or tile.joined,
            # the fewest for which there are threads
            parts=max(128, triton.next_power_of_2(parts)) if parts else 0,
            adds_eps=adds_eps,
            ahead=ahead,
            late=late,
            in_eights=m % 8 == 0,
        )
        launch = lone_launch(tile, (tiles, batch), lone_flags, device, early)
        return tile, launch, (cdiv(m, tile.side),)
    if tile.on_hopper:
        return tile, None, ()
    flags = (c is not None, q is not None, scale is not None, alpha is not None)
    sides, depth = cdiv(m, tile.side), tile.depth
    options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile.quartered:
        whole = batch * (sides * (sides - 1) // 2)
        blocks = [block for side in (tile.side, tile.side // 2) for block in (2 * [(side, depth)] + 3 * [(side, side)])]
        constants: tuple[Any, ...] = (*flags, same, tile.side, depth, TILE_GROUP)
        launch = BlockLaunch(symmetric.quartered_kernel, whole + 3 * batch * sides, blocks, constants, **options)
        return tile, launch, (whole, sides)
    rows, columns = tile.rows, tile.columns
    programs = batch * symmetric_programs(m, tile)
    overlap = may_overlap(tile, programs, device)
    if overlap:
        options["launch_pdl"] = True
    if tile.joined:
        blocks = [(rows, depth), *(3 * [(rows, rows)])]
        constants = (*flags, rows, depth, TILE_GROUP, overlap)
        launch = BlockLaunch(symmetric.joined_kernel, programs, blocks, constants, **options)
        return tile, launch, (batch * (sides * (sides - 1) // 2), sides)
    blocks = [(rows, depth), (columns, depth), (rows, columns), *(2 * [(rows, columns), (columns, rows)])]
    constants = (*flags, same, rows, columns, depth, TILE_GROUP, overlap, tile.in_fp64)
    launch = BlockLaunch(symmetric.symmetric_kernel, programs, blocks, constants, **options)
    return tile, launch, (symmetric_tiles(m, tile), sides)


def general_product(
    a: Tensor,
    b: Tensor,
    *,
    c: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 0.0,
    out: Tensor | None = None,
    scale: Tensor | None = None,
    low: Tensor | None = None,
    diagonal: Tensor | None = None,
    betas: Tensor | None = None,
    tile: Tile | None = None,
    exact: bool = False,
) -> Tensor:
    """``alpha a b + beta c`` for ``a [batch, M, K]`` and ``b [batch, K, N]``, times ``scale [batch]`` if given.

    ``out``, ``low`` and ``exact`` as in `symmetric_product`, ``low`` of any lone tile. Lone tiles may also store the
    diagonal of ``a b`` apart, in ``diagonal`` (fp32, batch · M numbers), with zeros in its place; wide tiles may take
    such ``betas`` for the rows of ``c`` instead of β.
    """
    batch, m, k = a.shape
    n = b.shape[-1]
    if out is None:
        out = empty_matrices(batch, m, n, like=b)
    if out.numel() == 0:
        return out
    factors = _factors(alpha, beta, out)
    apart = diagonal is not None
    if apart and (c is not None or scale is not None or alpha != 1.0):
        raise ValueError("the diagonal of a b alone goes apart; leave out c, scale and alpha, or diagonal")
    key = (*map(layout_of, (a, b, c, out, low)), *map(alignment_of, (scale, *factors)), apart)
    tile, launch, counts = _general_launch(key, a.dtype, tile, a.device, exact)
    if tile.on_hopper:
        _check_numbers(tile, factors)
    if betas is not None and not tile.cooperative:
        raise ValueError(f"{tile} takes one beta for all rows, as all but wide tiles do; give beta")
    if launch is None:
        if tile.ping_pong:
            ping_pong_product(a, b, c, out, None, scale, tile, (*factors, 0.0), is_symmetric=False)
            return out
        wide_product(a, b, c, out, scale, factors, betas)
        return out
    if tile.lone:
        run_lone_launch(launch, (a, b, c, out, low), scale, counts, k, (*factors, 0.0), diagonal)
    else:
        launch.launch((a, b, c, out), (out if scale is None else scale, *counts, k, *factors))
    return out


@lru_cache(maxsize=NUM_LAUNCHES)
def _general_launch(
    key: tuple[Any, ...], dtype: torch.dtype, given: Tile | None, device: torch.device, exact: bool
) -> tuple[Tile, BlockLaunch | None, tuple[int, ...]]:
    """The tile; its launch, unless the kernel is persistent; the numbers of tiles to pass to the launch."""
    ((batch, m, k), *_), ((_, _, n), *_), c, _, low, scale, alpha, _, apart = key
    tile = given or choose_tile(dtype, device, lambda sms, hopper: general_tile(m, n, k, batch, sms, hopper), exact)
    if (low is not None or apart) and not tile.lone:
        raise ValueError(f"{tile} gives neither rounding errors nor a diagonal, as lone tiles do; leave them out")
    rows, columns = cdiv(m, tile.rows), cdiv(n, tile.columns)
    if tile.lone:
        flags = LoneProduct(
            has_c=c is not None,
            has_scale=scale is not None,
            low=low is not None,
            apart=apart,
            in_eights=n % 8 == 0,
        )
        return tile, lone_launch(tile, (rows * columns, batch), flags, device), (rows,)
    if tile.on_hopper:
        return tile, None, ()
    square, programs = (tile.rows, tile.columns), batch * rows * columns
    overlap = may_overlap(tile, programs, device)
    options: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    launch = BlockLaunch(
        product.general_kernel,
        programs,
        [(tile.rows, tile.depth), (tile.depth, tile.columns), square, square],
        (c is not None, scale is not None, alpha is not None, *square, tile.depth, TILE_GROUP, overlap, tile.in_fp64),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **options,
    )
    return tile, launch, (rows * columns, rows, columns)


def _factors(alpha: float | Tensor, beta: float | Tensor, like: Tensor) -> tuple[Any, Any]:
    """α and β as the kernels take them: two numbers, or two fp32 tensors of one element."""
    if not isinstance(alpha, Tensor) and not isinstance(beta, Tensor):
        # Triton may compile an int into the kernel, which is kept for other numbers too
        return float(alpha), float(beta)
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": like.device}
    alpha, beta = (x.to(**fp32) if isinstance(x, Tensor) else torch.full((), x, **fp32) for x in (alpha, beta))
    return alpha, beta


def _check_numbers(tile: Tile, factors: tuple[Any, Any]) -> None:
    if isinstance(factors[0], Tensor):
        raise ValueError(f"{tile} takes alpha and beta as numbers; `portable_tile` gives one for tensors")


def multiply(
    a: Tensor, b: Tensor, c: Tensor | None, alpha: float | Tensor, beta: float | Tensor, *, symmetric: bool
) -> Tensor:
    """``alpha a b + beta c`` of matrices ``[..., M, K]`` with any strides; ``symmetric``: ``alpha a bᵀ + beta c``."""
    left = as_batch(a)
    right = left if symmetric and _is_same(a, b) else as_batch(b)
    columns = b.shape[-2] if symmetric else b.shape[-1]
    added = None if c is None else as_batch(c.expand(*a.shape[:-1], columns))
    product = symmetric_product if symmetric else general_product
    tile = None
    if isinstance(alpha, Tensor) or isinstance(beta, Tensor) or (c is not None and c.dtype != a.dtype):
        tile = portable_tile(left, right, symmetric=symmetric)
    # persistent kernels are launched by Triton, on the current device
    with torch.cuda.device_of(left):
        result = product(left, right, c=added, alpha=alpha, beta=beta, tile=tile).contiguous()
    if a.ndim == 2:
        return result[0]
    return result if a.ndim == 3 else result.reshape(*a.shape[:-1], columns)


def _is_same(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    one, other = ((x.data_ptr(), x.shape, x.stride(), x.is_neg()) for x in (a, b))
    return one == other
