"""The products of `iterations` by the kernels of `product_launches`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from optim_kernels._newton_schulz.coefficients import Triple
from optim_kernels._newton_schulz.config import Tiles
from optim_kernels._newton_schulz.copy_engine import empty_matrices
from optim_kernels._newton_schulz.product_launches import general_product, symmetric_product
from optim_kernels._newton_schulz.tile_choice import tile_of_one
from optim_kernels._newton_schulz.tiles import Tile


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
        return self._scaled_grams(xs, [None] * len(xs), exact=exact)

    def _scaled_grams(self, xs: Sequence[Tensor], scales: Sequence[Tensor | None], *, exact: bool) -> Tensor:
        """``gram`` with a scale for each matrix of an x, or with none."""
        m, counts = xs[0].shape[-2], [len(x) for x in xs]
        out = empty_matrices(sum(counts), m, m, like=xs[0])
        for x, scale, part in zip(xs, scales, out.split(counts), strict=True):
            tile = self._tile(x, x, symmetric=True, exact=exact)
            symmetric_product(x, x, out=part, scale=scale, tile=tile, exact=exact)
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
        q = empty_matrices(*r.shape, like=r)
        return symmetric_product(r, r, c=r, alpha=c, beta=b, shifted=(q, a), tile=tile, exact=exact), q
