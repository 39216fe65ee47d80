"""Newton–Schulz's products inside a Muon step: the first ones bring X to norm 1, the last one is left to the update.

X arrives as υU (`_kernels.muon_momentum`), and U/N = σ·υU. With S formed from A = σ²·(υU)(υU)ᵀ the first rectangular
product becomes σ(aX + SX), in the Gram iteration σQX: the same iteration of U/N, without a pass to divide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optim_kernels._newton_schulz.chain_jobs import Kind, jobs_of, num_squares
from optim_kernels._newton_schulz.config import NSConfig, Tiles
from optim_kernels._newton_schulz.copy_engine import empty_matrices
from optim_kernels._newton_schulz.int8_start import STEP_LAUNCHES, starts_in_int8
from optim_kernels._newton_schulz.job_launches import JobLaunches, Part, Places
from optim_kernels._newton_schulz.tile_choice import takes_pairs
from optim_kernels.functional._muon_families import Batch, Family
from optim_kernels.functional._muon_tables import MuonTables

# Launches of `_kernels.normalize.apply_row_factors`.
ROW_FACTORS_LAUNCHES = 3


@dataclass(frozen=True)
class LastProduct:
    """``scale (alpha s x + beta c)``, which is O of a batch; ``betas``: a number for each row of c instead of beta."""

    batch: Batch
    s: Tensor
    x: Tensor
    c: Tensor | None
    out: Tensor
    alpha: float
    beta: float
    scale: Tensor | None
    betas: Tensor | None


class FamilyProducts:
    """The products of one family's iteration, the same for every step.

    Args:
        tables: holds σ and σ².
        tiles: what their tiles are chosen by.

    Attributes:
        count: how many launches they are.
    """

    def __init__(self, family: Family, ns: NSConfig, tables: MuonTables, tiles: Tiles) -> None:
        self._family, self._tables = family, tables
        x, (_, m, n) = family[0].x, family[0].shape
        self._num_matrices = sum(batch.shape[0] for batch in family)
        in_pairs = tiles == "auto" and takes_pairs(self._num_matrices, m, x.dtype, x.device)
        self._jobs = jobs_of(ns, m, n, in_factors=family[0].in_factors, in_pairs=in_pairs)
        in_int8 = starts_in_int8(m, n, ns, x.device)
        self._launches = JobLaunches(self._jobs, ns, in_int8=in_int8, tiles=tiles)
        counts = [1 if job.kind in (Kind.SQUARE, Kind.FULL) else len(family) for job in self._jobs]
        self.count = sum(counts) + ns.row_factors * ROW_FACTORS_LAUNCHES * len(family)
        if in_int8:
            self.count += STEP_LAUNCHES * self._num_matrices - sum(counts[:3])

    def run(self) -> None:
        """Launch them all."""
        self._launches.run(self._places())

    def run_but_last(self) -> list[LastProduct]:
        """Launch all but the last one, which each batch is left with."""
        places, job = self._places(), self._jobs[-1]
        self._launches.run(places, leave_last=True)
        return [
            LastProduct(
                batch,
                part.squares[job.a],
                part.xs[job.b],
                part.xs[job.c] if job.c >= 0 else None,
                part.xs[job.d],
                job.alpha,
                job.beta,
                part.scale(job),
                part.diagonals if job.apart else None,
            )
            for batch, part in zip(self._family, places.parts, strict=True)
        ]

    def _places(self) -> Places:
        """The buffers of X that the batches have, and new square ones."""
        x, m = self._family[0].x, self._family[0].shape[1]
        room = empty_matrices(num_squares(self._jobs) * self._num_matrices, m, m, like=x)
        squares, parts, diagonals = room.split(self._num_matrices), [], None
        if any(job.apart for job in self._jobs):
            diagonals = x.new_empty(self._num_matrices * m, dtype=torch.float32)
        for batch in self._family:
            first = batch.first - self._family[0].first
            numbers = slice(first, first + batch.shape[0])
            scales = self._tables.scales[batch.numbers], self._tables.squared_scales[batch.numbers]
            xs = batch.x, batch.other, batch.x
            of_batch = None if diagonals is None else diagonals[first * m :]
            parts.append(Part(xs, [square[numbers] for square in squares], scales, of_batch))
        return Places(squares, parts, diagonals)
