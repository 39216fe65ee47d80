"""Products of Newton–Schulz on the GPU: what they compute, their checks and their launches.

    gram                alpha x xᵀ             one triangle computed and mirrored
    symmetric_matmul    alpha a b + beta c     likewise, for symmetric operands that commute
    matmul_add          alpha a b + beta c     b rectangular

Matrices are ``[..., M, K]``; sums are fp32 and rounded once, to the operands' dtype (fp16, bf16 or fp32; fp32 operands
are multiplied exactly, without tensor cores). The kernels stand in `_product_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from optim_kernels import _product_kernels as kernels
from optim_kernels._impl import is_interpreted
from optim_kernels._normalize_kernels import normalize_into
from optim_kernels._tiles import FULL_PRECISION, INTERPRETED, Tile, cdiv, general_tile, symmetric_tile, symmetric_tiles
from optim_kernels.orthogonalization import NSConfig

# Rows of tiles that share a column's operand while it is in the L2 cache.
PANEL = 8
# The bulk copy engine wants addresses and row strides in multiples of 16 bytes.
ALIGNMENT = 16


def symmetric_product(
    a: Tensor,
    b: Tensor,
    *,
    c: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 0.0,
    out: Tensor | None = None,
    shifted: tuple[Tensor, float] | None = None,
    scale: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """``alpha a bᵀ + beta c``, symmetric by contract, for ``a, b [batch, M, K]``.

    ``alpha`` and ``beta`` may be fp32 tensors of one element where `portable_tile` chooses the tile.
    ``shifted = (q, omega)`` also writes that plus ``omega I``, into q. ``scale [batch]`` (fp32, on the device)
    multiplies each matrix before it is rounded.
    """
    batch, m, k = a.shape
    if out is None:
        out = empty_matrices(batch, m, m, like=a)
    if out.numel() == 0:
        return out
    same = a is b
    tile = tile or _tile_for(a, lambda sms, hopper: symmetric_tile(m, k, batch, sms, same and shifted is None, hopper))
    q, omega = (out, 0.0) if shifted is None else shifted
    added = out if c is None else c
    numbers: Any = (*_factors(alpha, beta, tile, out), omega)
    blocks = cdiv(m, tile.side)
    flags = {"HAS_C": c is not None, "HAS_Q": shifted is not None, "HAS_SCALE": scale is not None, "SAME": same}
    if tile.cooperative:
        if not same or shifted is not None:
            raise ValueError(f"{tile} is for x xᵀ alone, got two operands or a shift; leave the tile to the shape")
        return _wide_product(a, None, c=c, alpha=alpha, beta=beta, out=out, scale=scale)
    if tile.ping_pong:
        grid = (symmetric_tiles(m, tile), blocks, 0)
        _ping_pong(a, b, added, out, q, scale, tile, grid, numbers, {**flags, "SYMMETRIC": True})
        return out
    options = {
        "BY_ADDRESS": isinstance(numbers[0], Tensor),
        "BLOCK_K": tile.depth,
        "GROUP": PANEL,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    if tile.quartered:
        whole = batch * (blocks * (blocks - 1) // 2)
        kernels.quartered_kernel[(whole + 3 * batch * blocks,)](
            *_blocks(a, b, added, out, q, side=tile.side, depth=tile.depth),
            *_blocks(a, b, added, out, q, side=tile.side // 2, depth=tile.depth),
            out if scale is None else scale,
            whole,
            blocks,
            k,
            *numbers,
            BLOCK=tile.side,
            **flags,
            **options,
        )
        return out
    tiles = symmetric_tiles(m, tile)
    kernels.symmetric_kernel[(batch * tiles,)](
        _descriptor(a, tile.rows, tile.depth),
        _descriptor(b, tile.columns, tile.depth),
        _descriptor(added, tile.rows, tile.columns),
        _descriptor(out, tile.rows, tile.columns),
        _descriptor(out, tile.columns, tile.rows),
        _descriptor(q, tile.rows, tile.columns),
        _descriptor(q, tile.columns, tile.rows),
        out if scale is None else scale,
        tiles,
        blocks,
        k,
        *numbers,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        **flags,
        **options,
    )
    return out


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
) -> Tensor:
    """``alpha a b + beta c`` for ``a [batch, M, K]`` and ``b [batch, K, N]``, times ``scale [batch]`` if given."""
    batch, m, k = a.shape
    n = b.shape[-1]
    if out is None:
        out = empty_matrices(batch, m, n, like=b)
    if out.numel() == 0:
        return out
    tile = tile or _tile_for(a, lambda sms, hopper: general_tile(m, n, k, batch, sms, hopper))
    if tile.cooperative:
        return _wide_product(a, b, c=c, alpha=alpha, beta=beta, out=out, scale=scale)
    rows, columns = cdiv(m, tile.rows), cdiv(n, tile.columns)
    factors: Any = _factors(alpha, beta, tile, out)
    if tile.ping_pong:
        flags = {"HAS_C": c is not None, "HAS_Q": False, "HAS_SCALE": scale is not None, "SAME": False}
        grid = (rows * columns, rows, columns)
        _ping_pong(
            a,
            b,
            out if c is None else c,
            out,
            out,
            scale,
            tile,
            grid,
            (*factors, 0.0),
            {**flags, "SYMMETRIC": False},
        )
        return out
    kernels.general_kernel[(batch * rows * columns,)](
        _descriptor(a, tile.rows, tile.depth),
        _descriptor(b, tile.depth, tile.columns),
        _descriptor(out if c is None else c, tile.rows, tile.columns),
        _descriptor(out, tile.rows, tile.columns),
        out if scale is None else scale,
        rows * columns,
        rows,
        columns,
        k,
        *factors,
        HAS_C=c is not None,
        HAS_SCALE=scale is not None,
        BY_ADDRESS=isinstance(factors[0], Tensor),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        GROUP=PANEL,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _factors(alpha: float | Tensor, beta: float | Tensor, tile: Tile, like: Tensor) -> tuple[Any, Any]:
    """α and β as the kernels take them: two numbers, or two fp32 tensors of one element."""
    if not isinstance(alpha, Tensor) and not isinstance(beta, Tensor):
        return alpha, beta
    if tile.on_hopper:
        raise ValueError(f"{tile} takes alpha and beta as numbers; `portable_tile` gives one for tensors")
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": like.device}
    alpha, beta = (x.to(**fp32) if isinstance(x, Tensor) else torch.full((), x, **fp32) for x in (alpha, beta))
    return alpha, beta


def _wide_product(a: Tensor, b: Tensor | None, **options: Any) -> Tensor:
    """Either product in tiles of both consumers."""
    from optim_kernels._hopper_wide_kernel import wide_product

    return wide_product(a, b, **options, panel=PANEL, programs=num_multiprocessors(a.device.index))


def _ping_pong(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    q: Tensor,
    scale: Tensor | None,
    tile: Tile,
    grid: tuple[int, int, int],
    numbers: tuple[float, float, float],
    flags: dict[str, bool],
) -> None:
    """Either product on the ping-pong schedule; ``grid``: tiles of a matrix, their rows and columns."""
    hopper = _hopper_kernels()
    total, side, depth = len(a) * grid[0], tile.rows, tile.depth
    hopper.product_kernel[(min(total, num_multiprocessors(a.device.index)),)](
        hopper.descriptor(a, side, depth),
        hopper.descriptor(b, *((side, depth) if flags["SYMMETRIC"] else (depth, side))),
        *(hopper.descriptor(x, side, side) for x in (c, d, q)),
        d if scale is None else scale,
        total,
        *grid,
        a.shape[-1],
        *numbers,
        **flags,
        GROUP=PANEL,
        DEPTH=depth,
        STAGES=tile.num_stages,
        num_warps=4,
    )


def empty_matrices(batch: int, rows: int, columns: int, *, like: Tensor) -> Tensor:
    """Uninitialised ``[batch, rows, columns]`` whose rows start at multiples of 16 bytes."""
    step = ALIGNMENT // like.element_size()
    return like.new_empty(batch, rows, cdiv(columns, step) * step)[..., :columns]


def as_batch(x: Tensor) -> Tensor:
    """``x [..., M, N]`` as ``[batch, M, N]`` that the copy engine can read: a view where strides allow, else a copy."""
    flat = x.reshape(prod(x.shape[:-2]), *x.shape[-2:])
    step = ALIGNMENT // x.element_size()
    aligned = flat.stride(-1) == 1 and flat.data_ptr() % ALIGNMENT == 0
    # a dimension of one element has a stride that says nothing, yet the copy engine checks it
    if aligned and all(flat.stride(dim) % step == 0 and flat.stride(dim) > 0 for dim in (0, 1)):
        return flat
    return empty_matrices(flat.shape[0], flat.shape[1], flat.shape[2], like=x).copy_(flat)


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """``x [batch, M, N]`` in blocks of rows × columns of one matrix, for the copy engine."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, columns])


def _blocks(a: Tensor, b: Tensor, *results: Tensor, side: int, depth: int) -> list[TensorDescriptor]:
    """Operands in blocks of side × depth, results in square ones."""
    return [_descriptor(x, side, depth) for x in (a, b)] + [_descriptor(x, side, side) for x in results]


def _tile_for(x: Tensor, choose: Callable[[int, bool], Tile]) -> Tile:
    if is_interpreted():
        return INTERPRETED
    device = x.device.index
    return FULL_PRECISION if x.dtype == torch.float32 else choose(num_multiprocessors(device), has_gluon(device))


def portable_tile(a: Tensor, b: Tensor, *, symmetric: bool) -> Tile:
    """A tile of `_product_kernels` for ``a bᵀ``, symmetric, or ``a b``: only there α and β may be tensors."""
    batch, m, k = a.shape

    def choose(num_sms: int, _: bool) -> Tile:
        if symmetric:
            return symmetric_tile(m, k, batch, num_sms, a is b)
        return general_tile(m, b.shape[-1], k, batch, num_sms)

    return _tile_for(a, choose)


@cache
def has_gluon(device: int | None) -> bool:
    """Whether the ping-pong kernel runs: on Hopper alone, with Gluon as it is since Triton 3.6."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version >= (3, 6) and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def _hopper_kernels() -> Any:
    from optim_kernels import _hopper_kernels

    return _hopper_kernels


@cache
def num_multiprocessors(device: int | None) -> int:
    """Of the device with this number."""
    return torch.cuda.get_device_properties(device or 0).multi_processor_count


class TritonProducts:
    """The three products of `orthogonalization`'s iterations, on ``[batch, M, K]``."""

    def orthogonalize(self, x: Tensor, config: NSConfig, /) -> Tensor | None:
        from optim_kernels import _hopper_chain as chain

        *batch, m, n = x.shape
        if not chain.takes_chain(prod(batch), m, n, config, config.compute_dtype(x), x.device):
            return None
        return chain.orthogonalize_batch(x, config)

    def normalize(self, x: Tensor, config: NSConfig, /) -> Tensor:
        g = x.reshape(prod(x.shape[:-2]), *x.shape[-2:])
        out = empty_matrices(*g.shape, like=x.new_empty(0, dtype=config.compute_dtype(x)))
        normalize_into(
            out,
            g,
            norm_scale=config.norm_scale,
            eps=config.eps,
            add_eps=config.eps_mode == "add",
        )
        return out

    def gram(self, xs: Sequence[Tensor], /) -> Tensor:
        m = xs[0].shape[-2]
        out = empty_matrices(sum(len(x) for x in xs), m, m, like=xs[0])
        for x, part in zip(xs, out.split([len(x) for x in xs]), strict=True):
            symmetric_product(x, x, out=part)
        return out

    def symmetric_matmul(
        self, a: Tensor, b: Tensor, /, *, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
    ) -> Tensor:
        return symmetric_product(a, b, c=c, alpha=alpha, beta=beta)

    def matmul_add(
        self, a: Tensor, b: Tensor, /, *, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
    ) -> Tensor:
        return general_product(a, b, c=c, alpha=alpha, beta=beta)

    def quadratic(self, r: Tensor, b: float, c: float, a: float | None = None, /) -> tuple[Tensor, Tensor | None]:
        if a is None:
            return symmetric_product(r, r, c=r, alpha=c, beta=b), None
        q = empty_matrices(r.shape[0], r.shape[1], r.shape[2], like=r)
        return symmetric_product(r, r, c=r, alpha=c, beta=b, shifted=(q, a)), q


class PingPongProducts(TritonProducts):
    """Products whose rectangular results alternate between two given buffers of each tensor of a family."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._other = {one.data_ptr(): other for pair in pairs for one, other in (pair, pair[::-1])}

    def matmul_add(
        self, a: Tensor, b: Tensor, /, *, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
    ) -> Tensor:
        return general_product(a, b, c=c, alpha=alpha, beta=beta, out=self._other[b.data_ptr()])


def __getattr__(name: str) -> Any:
    """The products with gradients, which are built on this module."""
    if name in ("gram", "symmetric_matmul", "matmul_add"):
        from optim_kernels import _product_ops

        return getattr(_product_ops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def zeropower_via_newtonschulz5(G: Tensor, steps: int = 5) -> Tensor:
    """Keller Jordan's function: Newton–Schulz with his coefficients, in bf16."""
    from optim_kernels.orthogonalization import newton_schulz

    result: Tensor = newton_schulz(G.bfloat16(), steps, eps_mode="add")
    return result


# flash-muon's name for it
fast_newtonschulz = zeropower_via_newtonschulz5


def matmul_transpose(x: Tensor) -> Tensor:
    """``x xᵀ``, as flash-muon calls it."""
    result: Tensor = __getattr__("gram")(x)
    return result


def matmul_transpose_assign(x: Tensor, out: Tensor) -> None:
    """``out = x xᵀ``, as flash-muon calls it."""
    __getattr__("gram")(x, out=out)
