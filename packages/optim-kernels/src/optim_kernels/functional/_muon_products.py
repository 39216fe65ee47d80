"""Newton–Schulz's products inside a Muon step: the first ones bring X to norm 1, the last one is left to the update.

X arrives as υU (`_kernels.muon_momentum`), and U/N = σ·υU. With S formed from A = σ²·(υU)(υU)ᵀ the first rectangular
product becomes σ(aX + SX), in the Gram iteration σQX: the same iteration of U/N, without a pass to divide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from optim_kernels._newton_schulz.coefficients import Triple
from optim_kernels._newton_schulz.config import NSConfig, Tiles
from optim_kernels._newton_schulz.copy_engine import empty_matrices
from optim_kernels._newton_schulz.int8_start import first_step, starts_in_int8
from optim_kernels._newton_schulz.product_launches import general_product
from optim_kernels._newton_schulz.triton_products import TritonProducts
from optim_kernels.functional._muon_families import Batch, Family, num_rectangular
from optim_kernels.functional._muon_tables import MuonTables


@dataclass(frozen=True)
class LastProduct:
    """``scale (alpha s x + beta c)``, which is O of a batch."""

    batch: Batch
    s: Tensor
    x: Tensor
    c: Tensor | None
    out: Tensor
    alpha: float
    beta: float
    scale: Tensor | None


class StepProducts(TritonProducts):
    """The products of one family's iteration, for one step.

    Args:
        tables: holds σ and σ².
        leave_last: do not compute the last rectangular products; they are in ``last`` afterwards.
    """

    def __init__(self, family: Family, ns: NSConfig, tables: MuonTables, *, leave_last: bool, tiles: Tiles) -> None:
        super().__init__(tiles)
        self._family, self._ns, self._tables = family, ns, tables
        self._leave_last = leave_last
        self._grams = 0
        self._rectangular = {batch.first: 0 for batch in self._family}
        self.last: list[LastProduct] = []

    def first_step(self, xs: Sequence[Tensor], triple: Triple, /) -> list[Tensor] | None:
        # a family has one m and one method, so its matrices all do or all do not, but for rows of 2^17 numbers
        m, device = xs[0].shape[-2], xs[0].device
        if not all(starts_in_int8(m, x.shape[-1], self._ns, device) for x in xs):
            return None
        self._grams += 1
        room = empty_matrices(1, m, m, like=xs[0])
        for x, batch in zip(xs, self._family, strict=True):
            self._rectangular[batch.first] += 1
            first_step(x, triple, room, batch.other, self._tables.scales[batch.numbers])
        return [batch.other for batch in self._family]

    def gram(self, xs: Sequence[Tensor], /, *, exact: bool = False) -> Tensor:
        self._grams += 1
        if self._grams > 1:
            return super().gram(xs, exact=exact)
        scales = [self._tables.squared_scales[batch.numbers] for batch in self._family]
        return self._scaled_grams(xs, scales, exact=exact)

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
        batch = next(each for each in self._family if b.data_ptr() in (each.x.data_ptr(), each.other.data_ptr()))
        out = batch.other if b.data_ptr() == batch.x.data_ptr() else batch.x
        done = self._rectangular[batch.first]
        self._rectangular[batch.first] = done + 1
        scale = self._tables.scales[batch.numbers] if done == 0 else None
        if self._leave_last and done + 1 == num_rectangular(b.shape, self._ns):
            self.last.append(LastProduct(batch, a, b, c, out, alpha, beta, scale))
            return out
        tile = self._tile(a, b, symmetric=False, exact=exact)
        return general_product(a, b, c=c, alpha=alpha, beta=beta, out=out, scale=scale, tile=tile, exact=exact)
