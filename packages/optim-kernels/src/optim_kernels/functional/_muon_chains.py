"""Newton–Schulz inside a Muon step in one launch: what `_hopper_chain` does, on the buffers of a plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optim_kernels._hopper_chain import chain_of, run_chain, takes_chain
from optim_kernels.functional._muon_products import LastProduct
from optim_kernels.functional._muon_tables import Batch, MuonTables
from optim_kernels.orthogonalization import NSConfig


class BatchChain:
    """The chain of a batch, for one step after another.

    Args:
        tables: holds σ and σ².
        state: int32 [1 + count], which is zero whenever `run` starts.
        leave_last: do not compute the last product; `run` returns it.
    """

    def __init__(self, batch: Batch, ns: NSConfig, tables: MuonTables, state: Tensor, *, leave_last: bool) -> None:
        count, m, n = batch.x.shape
        self._batch, self._state, self._leave_last = batch, state, leave_last
        self._scales = tables.scales[batch.numbers], tables.squared_scales[batch.numbers]
        self._chain = chain_of(ns, count, m, n, batch.x.device, leave_last=leave_last)

    def run(self) -> LastProduct | None:
        """Run it; the last product if that is left to the caller."""
        xs = (self._batch.x, self._batch.other, self._batch.x)
        squares = run_chain(self._chain, xs, *self._scales, self._state)
        if not self._leave_last:
            return None
        last = self._chain.jobs[-1]
        return LastProduct(
            batch=self._batch,
            s=squares[last.a],
            x=xs[last.b],
            c=xs[last.c] if last.c >= 0 else None,
            out=xs[last.d],
            alpha=last.alpha,
            beta=last.beta,
            scale=self._scales[0] if last.b == 0 else None,
        )


def is_chained(batch: Batch, ns: NSConfig) -> bool:
    """Whether the matrices of a batch are orthogonalised in one launch."""
    count, m, n = batch.x.shape
    return takes_chain(count, m, n, ns, batch.x.dtype, batch.x.device)


def chains_of(
    batches: Sequence[Batch], ns: NSConfig, tables: MuonTables, *, leave_last: bool
) -> tuple[list[BatchChain], Tensor]:
    """A chain for each of the batches, and the state of all of them."""
    state = torch.zeros(sum(1 + len(batch.x) for batch in batches), dtype=torch.int32, device=tables.matrices.device)
    parts = state.split([1 + len(batch.x) for batch in batches])
    pairs = zip(batches, parts, strict=True)
    return [BatchChain(batch, ns, tables, part, leave_last=leave_last) for batch, part in pairs], state
