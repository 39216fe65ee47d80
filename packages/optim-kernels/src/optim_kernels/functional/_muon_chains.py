"""Newton–Schulz inside a Muon step in one launch: what `_newton_schulz.chain` does, on the buffers of a plan."""

from __future__ import annotations

from array import array
from typing import Any

from torch import Tensor

from optim_kernels._newton_schulz.chain import Chain, ChainLaunch
from optim_kernels._newton_schulz.chain_jobs import Ending, MatrixGroup, jobs_of
from optim_kernels._newton_schulz.config import NSConfig
from optim_kernels._newton_schulz.tiles import cdiv
from optim_kernels.functional._muon_families import PANEL, ChainedBatches
from optim_kernels.functional._muon_inputs import StepInputs
from optim_kernels.functional._muon_tables import MuonTables
from optim_kernels.multi_tensor import DeviceTable


class StepChain:
    """The launch of all matrices of one short side, the same for every step.

    Args:
        number: the chain's number in the plan, which chooses its counter.
        ending: what follows the last product; an update takes the compile-time arguments ``of_update``.
        spare_multiprocessors: how many the launch leaves free.
    """

    def __init__(
        self,
        batches: ChainedBatches,
        number: int,
        ns: NSConfig,
        tables: MuonTables,
        *,
        ending: Ending,
        of_update: dict[str, Any],
        spare_multiprocessors: int,
    ) -> None:
        self._xs = (batches.x, batches.other, batches.x)
        self._tables, self._counter = tables, len(tables.matrices) + number
        self._addresses = DeviceTable(batches.x.device)
        m = batches.x.shape[1]
        groups = [
            MatrixGroup(tuple(jobs_of(ns, m, n, in_factors=True)), batch.first, count, n, cdiv(n, PANEL))
            for batch in batches.batches
            for count, _, n in (batch.shape,)
        ]
        chain = Chain.of(groups, m, batches.x.device, in_panels=True)
        options = of_update if ending is Ending.UPDATE else {}
        self._launch = ChainLaunch(chain, ending=ending, spare_multiprocessors=spare_multiprocessors, **options)

    def take(self, inputs: StepInputs) -> None:
        """Read these inputs from now on."""
        tables = self._tables
        of_last = (tables.matrices, inputs.hyper, inputs.control, tables.lr_scales, tables.parts)
        self._addresses.update(array("q", map(Tensor.data_ptr, of_last)).tobytes())

    def keep_for_graph(self) -> None:
        """Take note that the launch is being captured."""
        self._addresses.keep_for_graph()

    def run(self) -> None:
        """Launch it; the counts of finished tiles must be zero."""
        tables = self._tables
        scales = (tables.scales, tables.squared_scales)
        self._launch(self._xs, *scales, tables.progress, self._counter, self._addresses.words)
