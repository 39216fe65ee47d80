"""The two products of Newton–Schulz on the GPU: their checks and their launches.

    symmetric_product    s (α a bᵀ + β c)      one triangle computed and mirrored
    general_product      s (α a b + β c)

Matrices are ``[batch, M, K]``, as the copy engine can read them (`as_batch`); sums are fp32 and rounded once, to the
operands' dtype (fp16, bf16 or fp32; fp32 operands as the sums of two tf32 numbers, or in fp64: `_triton.dot`). `tiles`
chooses the kernel of a product; `multiply` computes either product for matrices of any shape and strides. Launches are
kept for matrices of the same shapes and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optim_kernels._kernels import product, symmetric
from optim_kernels._kernels.normalize import Norm
from optim_kernels._newton_schulz.block_launch import BlockLaunch
from optim_kernels._newton_schulz.coefficients import Triple
from optim_kernels._newton_schulz.config import Tiles
from optim_kernels._newton_schulz.copy_engine import ALIGNMENT, as_batch, empty_matrices
from optim_kernels._newton_schulz.tile_choice import (
    choose_tile,
    num_multiprocessors,
    portable_tile,
    tile_of_one,
)
from optim_kernels._newton_schulz.tiles import (
    WIDE,
    WIDE_LENGTH,
    Tile,
    cdiv,
    general_tile,
    may_find_norm,
    symmetric_programs,
    symmetric_tile,
    symmetric_tiles,
)
from optim_kernels._triton import can_overlap, triton

# Rows of tiles that share a column's operand while it is in the L2 cache.
PANEL = 8
# Kept launches of each product.
NUM_LAUNCHES = 1024


class LoneProduct(NamedTuple):
    """Which product a launch of `_hopper.lone_kernel` computes: the kernel's first compile-time arguments.

    ``parts``: of a matrix, whose squares give its scale; a power of two, 0 where the scale is given.
    """

    symmetric: bool = False
    same: bool = False
    has_c: bool = False
    has_q: bool = False
    has_scale: bool = False
    banded: bool = False
    parts: int = 0
    adds_eps: bool = False


def symmetric_product(
    a: Tensor,
    b: Tensor,
    *,
    c: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 0.0,
    out: Tensor | None = None,
    shifted: tuple[Tensor, float] | None = None,
    scale: Tensor | Norm | None = None,
    tile: Tile | None = None,
    early: bool = False,
    exact: bool = False,
) -> Tensor:
    """``alpha a bᵀ + beta c``, symmetric by contract, for ``a, b [batch, M, K]``.

    ``alpha`` and ``beta`` may be fp32 tensors of one element where `portable_tile` chooses the tile. ``shifted = (q,
    omega)`` also writes the result plus ``omega I`` into q. ``scale [batch]`` (fp32, on the device) multiplies each
    matrix before it is rounded. ``early``: whatever of the launch before is still running makes nothing but ``scale``,
    and no other launch still uses ``out``; so some kernels start beside it. ``exact``: fp32 matrices are summed in fp64
    where the device multiplies fp64 fast.

    Lone tiles take a shorter batch b, too, which is repeated, and (`may_find_norm`) as ``scale`` a `Norm`: they find
    1/N² in it, by which they multiply, and leave it there with 1/N.
    """
    batch, m, k = a.shape
    if out is None:
        out = empty_matrices(batch, m, m, like=a)
    if out.numel() == 0:
        return out
    same = a is b
    q, omega = (None, 0.0) if shifted is None else shifted
    factors = _factors(alpha, beta, out)
    given, inverses, norm = _taken_apart(scale)
    key = (same, *map(layout_of, (a, b, c, out, q)), *map(alignment_of, (given, *factors)), norm[0], norm[-1])
    tile, launch, counts = _symmetric_launch(key, a.dtype, tile, a.device, early, exact)
    if tile.on_hopper:
        _check_numbers(tile, factors)
    if launch is None:
        if tile.ping_pong:
            _ping_pong(a, b, c, out, q, given, tile, (*factors, omega), is_symmetric=True)
            return out
        if not same or q is not None:
            raise ValueError(f"{tile} is for x xᵀ alone, got two operands or a shift; leave the tile to the shape")
        _wide_product(a, None, c, out, given, factors)
        return out
    matrices: tuple[Tensor | None, ...]
    if tile.lone:
        _launch_lone(launch, (a, b, c, out, q), given, inverses, counts, k, (*factors, omega), norm)
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
    key: tuple[Any, ...], dtype: torch.dtype, given: Tile | None, device: torch.device, early: bool, exact: bool
) -> tuple[Tile, BlockLaunch | None, tuple[int, ...]]:
    """The tile; its launch, unless the kernel is persistent; the numbers of tiles to pass to the launch."""
    same, ((batch, m, k), *_), ((num_b, *_), *_), c, _, q, scale, alpha, _, parts, adds_eps = key
    tile = given or choose_tile(
        dtype, device, lambda sms, hopper: symmetric_tile(m, k, batch, sms, same, hopper, q is not None), exact
    )
    if not same and (tile.joined or (tile.lone and tile.quartered)):
        raise ValueError(f"{tile} is for x xᵀ alone, got two operands; leave the tile to the shape")
    if num_b != batch and (not tile.lone or batch % num_b):
        raise ValueError(f"{tile} multiplies two batches of one size, got {batch} and {num_b} matrices")
    if parts and not may_find_norm(m, tile):
        raise ValueError(f"{tile} finds no norm of matrices with m = {m}; give it a scale")
    if tile.lone and tile.quartered and cdiv(m, tile.side) % 4:
        raise ValueError(f"{tile} needs a multiple of 4 diagonal tiles, got m = {m}; leave the tile to the shape")
    if tile.lone:
        tiles = symmetric_programs(m, tile)
        lone_flags = LoneProduct(
            symmetric=True,
            same=same,
            has_c=c is not None,
            has_q=q is not None,
            has_scale=scale is not None,
            banded=tile.quartered or tile.joined,
            # the fewest for which there are threads
            parts=max(128, triton.next_power_of_2(parts)) if parts else 0,
            adds_eps=adds_eps,
        )
        launch = _lone_launch(tile, batch * tiles, lone_flags, device, early)
        return tile, launch, (tiles, cdiv(m, tile.side), 0)
    if tile.on_hopper:
        return tile, None, ()
    flags = (c is not None, q is not None, scale is not None, alpha is not None)
    sides, depth = cdiv(m, tile.side), tile.depth
    options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile.quartered:
        whole = batch * (sides * (sides - 1) // 2)
        blocks = [block for side in (tile.side, tile.side // 2) for block in (2 * [(side, depth)] + 3 * [(side, side)])]
        constants: tuple[Any, ...] = (*flags, same, tile.side, depth, PANEL)
        launch = BlockLaunch(symmetric.quartered_kernel, whole + 3 * batch * sides, blocks, constants, **options)
        return tile, launch, (whole, sides)
    rows, columns = tile.rows, tile.columns
    programs = batch * symmetric_programs(m, tile)
    overlap = may_overlap(tile, programs, device)
    if overlap:
        options["launch_pdl"] = True
    if tile.joined:
        blocks = [(rows, depth), *(3 * [(rows, rows)])]
        constants = (*flags, rows, depth, PANEL, overlap)
        launch = BlockLaunch(symmetric.joined_kernel, programs, blocks, constants, **options)
        return tile, launch, (batch * (sides * (sides - 1) // 2), sides)
    blocks = [(rows, depth), (columns, depth), (rows, columns), *(2 * [(rows, columns), (columns, rows)])]
    constants = (*flags, same, rows, columns, depth, PANEL, overlap, tile.in_fp64)
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
    tile: Tile | None = None,
    exact: bool = False,
) -> Tensor:
    """``alpha a b + beta c`` for ``a [batch, M, K]`` and ``b [batch, K, N]``, times ``scale [batch]`` if given.

    ``exact`` as in `symmetric_product`.
    """
    batch, m, k = a.shape
    n = b.shape[-1]
    if out is None:
        out = empty_matrices(batch, m, n, like=b)
    if out.numel() == 0:
        return out
    factors = _factors(alpha, beta, out)
    key = (*map(layout_of, (a, b, c, out)), *map(alignment_of, (scale, *factors)))
    tile, launch, counts = _general_launch(key, a.dtype, tile, a.device, exact)
    if tile.on_hopper:
        _check_numbers(tile, factors)
    if launch is None:
        if tile.ping_pong:
            _ping_pong(a, b, c, out, None, scale, tile, (*factors, 0.0), is_symmetric=False)
            return out
        _wide_product(a, b, c, out, scale, factors)
        return out
    if tile.lone:
        _launch_lone(launch, (a, b, c, out, None), scale, None, counts, k, (*factors, 0.0), NO_NORM)
    else:
        launch.launch((a, b, c, out), (out if scale is None else scale, *counts, k, *factors))
    return out


@lru_cache(maxsize=NUM_LAUNCHES)
def _general_launch(
    key: tuple[Any, ...], dtype: torch.dtype, given: Tile | None, device: torch.device, exact: bool
) -> tuple[Tile, BlockLaunch | None, tuple[int, ...]]:
    """The tile; its launch, unless the kernel is persistent; the numbers of tiles to pass to the launch."""
    ((batch, m, k), *_), ((_, _, n), *_), c, _, scale, alpha, _ = key
    tile = given or choose_tile(dtype, device, lambda sms, hopper: general_tile(m, n, k, batch, sms, hopper), exact)
    rows, columns = cdiv(m, tile.rows), cdiv(n, tile.columns)
    if tile.lone:
        flags = LoneProduct(has_c=c is not None, has_scale=scale is not None)
        return tile, _lone_launch(tile, batch * rows * columns, flags, device), (rows * columns, rows, columns)
    if tile.on_hopper:
        return tile, None, ()
    square, programs = (tile.rows, tile.columns), batch * rows * columns
    overlap = may_overlap(tile, programs, device)
    options: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    launch = BlockLaunch(
        product.general_kernel,
        programs,
        [(tile.rows, tile.depth), (tile.depth, tile.columns), square, square],
        (c is not None, scale is not None, alpha is not None, *square, tile.depth, PANEL, overlap, tile.in_fp64),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **options,
    )
    return tile, launch, (rows * columns, rows, columns)


def _lone_launch(
    tile: Tile, programs: int, flags: LoneProduct, device: torch.device, early: bool = False
) -> BlockLaunch:
    """A launch of programs that have a multiprocessor each."""
    from optim_kernels._hopper.lone_kernel import lone_launch

    overlap = may_overlap(tile, programs, device)
    return lone_launch(tile, programs, flags, panel=PANEL, overlap=overlap, early=early)


# What a launch gets of a norm that it does not find: parts, norm_scale, eps, and whether that is added.
NO_NORM = (0, 0.0, 0.0, False)


def _taken_apart(scale: Tensor | Norm | None) -> tuple[Tensor | None, Tensor | None, tuple[int, float, float, bool]]:
    """The scale, or the squares in its place; room for 1/N and 1/N²; and the numbers of the norm."""
    if isinstance(scale, Norm):
        return scale.sums, scale.inverses, scale[2:]
    return scale, None, NO_NORM


def _launch_lone(
    launch: BlockLaunch,
    matrices: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None],
    scale: Tensor | None,
    inverses: Tensor | None,
    counts: tuple[int, ...],
    k: int,
    factors: tuple[Any, ...],
    norm: tuple[int, float, float, bool],
) -> None:
    """Launch `_hopper.lone_kernel` on a, b, c, d and q; ``factors``: α, β and ω."""
    a, b, c, d, q = matrices
    pointers = (d if x is None else x for x in (scale, inverses))
    launch.launch((a, b, *(d if x is None else x for x in (c, d, q))), (*pointers, *counts, k, *factors, *norm[:-1]))


def may_overlap(tile: Tile, programs: int, device: torch.device) -> bool:
    """Whether the next launch may come to the device before this one's programs end.

    The next launch's first programs come two at a time to free multiprocessors, which would be busy twice as long. So
    no two may fit on one, or a third of all multiprocessors has to be free.
    """
    if not can_overlap(device):
        return False
    num_sms = num_multiprocessors(device.index)
    return programs <= num_sms and (tile.fills_multiprocessor or 3 * programs <= 2 * num_sms)


def layout_of(x: Tensor | None) -> tuple[Any, ...] | None:
    """What a descriptor says of a matrix beside its address."""
    return None if x is None else (x.shape, x.stride(), x.dtype)


def alignment_of(x: Tensor | float | None) -> int | None:
    """What the compiler may know of the address of a scalar that is passed by its address."""
    return x.data_ptr() % ALIGNMENT if isinstance(x, Tensor) else None


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


def _wide_product(
    a: Tensor, b: Tensor | None, c: Tensor | None, d: Tensor, scale: Tensor | None, numbers: tuple[float, float]
) -> None:
    """Either product in tiles that both consumers share (`_hopper.wide_kernel`); b ``None`` is ``aᵀ``.

    ``numbers``: α and β.
    """
    if a.shape[-1] < WIDE_LENGTH:
        raise ValueError(
            f"{WIDE} is for sums of {WIDE_LENGTH} and more, got {a.shape[-1]}; leave the tile to the shape"
        )
    launch, counts = _wide_launch((*map(layout_of, (a, b, c, d)), alignment_of(scale)), a.device)
    matrices = (a, a if b is None else b, d if c is None else c, d, d)
    launch.launch(matrices, (d if scale is None else scale, *counts, *numbers))


@lru_cache(maxsize=NUM_LAUNCHES)
def _wide_launch(key: tuple[Any, ...], device: torch.device) -> tuple[BlockLaunch, tuple[int, int, int, int, int]]:
    """The launch, and the numbers of tiles and the length of the sums to pass to it."""
    # Gluon
    from optim_kernels._hopper.ring import descriptor
    from optim_kernels._hopper.wide_kernel import wide_product_kernel

    ((batch, m, k), *_), b, c, ((_, _, n), *_), scale = key
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
        (b is None, c is not None, scale is not None, PANEL, depth, WIDE.num_stages),
        describe=descriptor,
        num_warps=4,
    )
    return launch, (batch * tiles, tiles, *grid, k)


def _ping_pong(
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
        (*flags, PANEL, depth, tile.num_stages),
        describe=descriptor,
        num_warps=4,
    )
    return launch, (total, tiles, rows, columns, k)


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


class TritonProducts:
    """The three products of `iterations`, on ``[batch, M, K]``.

    Args:
        tiles: what chooses their tiles.
    """

    def __init__(self, tiles: Tiles = "auto") -> None:
        self._tiles = tiles

    def _tile(
        self, a: Tensor, b: Tensor, *, symmetric: bool, shifted: bool = False, exact: bool = False
    ) -> Tile | None:
        """The tile to take; None for the one that suits the batch."""
        if self._tiles == "auto":
            return None
        return tile_of_one(a, b, symmetric=symmetric, shifted=shifted, exact=exact)

    def first_step(self, xs: Sequence[Tensor], triple: Triple, /) -> list[Tensor] | None:
        return None

    def gram(self, xs: Sequence[Tensor], /, *, exact: bool = False) -> Tensor:
        m = xs[0].shape[-2]
        out = empty_matrices(sum(len(x) for x in xs), m, m, like=xs[0])
        for x, part in zip(xs, out.split([len(x) for x in xs]), strict=True):
            tile = self._tile(x, x, symmetric=True, exact=exact)
            symmetric_product(x, x, out=part, tile=tile, exact=exact)
        return out

    def symmetric_matmul(
        self, a: Tensor, b: Tensor, /, *, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
    ) -> Tensor:
        return symmetric_product(a, b, c=c, alpha=alpha, beta=beta, tile=self._tile(a, b, symmetric=True))

    def matmul_add(
        self,
        a: Tensor,
        b: Tensor,
        /,
        *,
        c: Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        exact: bool = False,
    ) -> Tensor:
        tile = self._tile(a, b, symmetric=False, exact=exact)
        return general_product(a, b, c=c, alpha=alpha, beta=beta, tile=tile, exact=exact)

    def quadratic(
        self, r: Tensor, b: float, c: float, a: float | None = None, /, *, exact: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        tile = self._tile(r, r, symmetric=True, shifted=a is not None, exact=exact)
        if a is None:
            return symmetric_product(r, r, c=r, alpha=c, beta=b, tile=tile, exact=exact), None
        q = empty_matrices(r.shape[0], r.shape[1], r.shape[2], like=r)
        return symmetric_product(r, r, c=r, alpha=c, beta=b, shifted=(q, a), tile=tile, exact=exact), q
