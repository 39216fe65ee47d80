"""The jobs of an iteration (`chain_jobs`) launched one by one, for one batch of matrices or several of one short side.

A product of m×m factors is one launch for all of them, and a product with X one for each batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from optim_kernels._kernels.normalize import Norm, apply_row_factors
from optim_kernels._newton_schulz.buffers import Buffers
from optim_kernels._newton_schulz.chain_jobs import Job, Kind, Scale
from optim_kernels._newton_schulz.config import NSConfig, Tiles
from optim_kernels._newton_schulz.int8_start import first_step
from optim_kernels._newton_schulz.product_launches import general_product, symmetric_product
from optim_kernels._newton_schulz.tile_choice import tile_of_factors, tile_of_one
from optim_kernels._newton_schulz.tiles import Tile, full_tile, splitting_tile


class Part(NamedTuple):
    """The matrices of one shape.

    Args:
        xs: the buffers of X, ``[count, m, n]``.
        squares: these matrices' part of the square buffers.
        scales: σ and σ² of each matrix, which bring X to norm 1; ``None`` where X has it.
        diagonals: theirs that a job keeps apart, m numbers in fp32 for each.
    """

    xs: Sequence[Tensor]
    squares: Sequence[Tensor]
    scales: Tensor | Sequence[Tensor] | None
    diagonals: Tensor | None = None

    def scale(self, job: Job) -> Tensor | None:
        """What multiplies the job's result."""
        return None if self.scales is None or job.scale is Scale.NONE else self.scales[job.scale - 1]


class Places(NamedTuple):
    """Where the jobs find and leave everything.

    Args:
        squares: the square buffers of all matrices.
        diagonals: those that a job keeps apart, of all matrices, one after the other.
    """

    squares: Sequence[Tensor]
    parts: Sequence[Part]
    diagonals: Tensor | None = None


class JobLaunches:
    """The launches of ``jobs``.

    Args:
        in_int8: the first step, three jobs, is taken in int8 (`int8_start`).
        tiles: what chooses the tiles.
    """

    def __init__(self, jobs: Sequence[Job], config: NSConfig, *, in_int8: bool = False, tiles: Tiles = "auto") -> None:
        self._jobs, self._config, self._in_int8, self._tiles = jobs, config, in_int8, tiles
        self._ahead = _reads_ahead(jobs)

    def run(
        self, places: Places, norm: Norm | None = None, *, is_ready: bool = False, leave_last: bool = False
    ) -> None:
        """Launch them.

        Args:
            norm: what the first product finds the scales from, which do not exist yet.
            is_ready: the first X was complete before the launches that find its norm, so the first product may overlap.
            leave_last: do not compute the last one.
        """
        if self._in_int8:
            self._first_step(places)
        for number, job in enumerate(self._jobs):
            if (self._in_int8 and number < 3) or (leave_last and number == len(self._jobs) - 1):
                continue
            if job.kind is Kind.FULL:
                self._full(job, places)
            elif job.kind is Kind.RECTANGLE:
                for part in places.parts:
                    self._rectangle(job, part)
            elif job.kind is Kind.SQUARE:
                self._square(number, places.squares)
            else:
                for part in places.parts:
                    self._gram(number, part, norm if number == 0 else None, early=is_ready and number == 0)

    def _first_step(self, places: Places) -> None:
        gram, _, rectangle = self._jobs[:3]
        for part in places.parts:
            scale = None if part.scales is None else part.scales[0]
            x, room = part.xs[gram.a], places.squares[gram.d][:1]
            first_step(x, self._config.triples[0], room, part.xs[rectangle.d], scale)

    def _gram(self, number: int, part: Part, norm: Norm | None, *, early: bool) -> None:
        job = self._jobs[number]
        x, d = part.xs[job.a], part.squares[job.d]
        symmetric_product(
            x,
            x,
            alpha=job.alpha,
            out=d,
            low=part.squares[job.q] if job.low else None,
            scale=part.scale(job) if norm is None else norm,
            tile=tile_of_factors(x, splitting_tile) if job.low else self._tile(x, x, job),
            early=early,
            late=self._ahead[number + 1],
            exact=job.exact,
        )
        if number == 0 and self._config.row_factors:
            apply_row_factors(x, d)

    def _square(self, number: int, squares: Sequence[Tensor]) -> None:
        job = self._jobs[number]
        a, b, d = squares[job.a], squares[job.b], squares[job.d]
        c, q = (squares[number] if number >= 0 else None for number in (job.c, job.q))
        if job.twice:
            assert c is not None
            a, c, d = map(Buffers.twice, (a, c, d))
        ahead, late = self._ahead[number : number + 2]
        symmetric_product(
            a,
            b,
            c=c,
            alpha=job.alpha,
            beta=job.beta,
            out=d,
            shifted=None if q is None else (q, job.omega),
            tile=self._tile(a, b, job),
            ahead=ahead,
            late=late,
            exact=job.exact,
        )

    def _full(self, job: Job, places: Places) -> None:
        squares = places.squares
        general_product(
            squares[job.a],
            squares[job.b],
            c=squares[job.c] if job.c >= 0 else None,
            alpha=job.alpha,
            beta=job.beta,
            out=squares[job.d],
            low=squares[job.q] if job.low else None,
            diagonal=places.diagonals if job.apart else None,
            tile=tile_of_factors(squares[job.a], full_tile),
        )

    def _rectangle(self, job: Job, part: Part) -> None:
        s, x = part.squares[job.a], part.xs[job.b]
        general_product(
            s,
            x,
            c=part.xs[job.c] if job.c >= 0 else None,
            alpha=job.alpha,
            beta=job.beta,
            out=part.xs[job.d],
            scale=part.scale(job),
            betas=part.diagonals if job.apart else None,
            tile=self._tile(s, x, job),
            exact=job.exact,
        )

    def _tile(self, a: Tensor, b: Tensor, job: Job) -> Tile | None:
        """The tile to take; ``None`` for the one that suits the batch."""
        if self._tiles == "auto":
            return None
        is_symmetric = job.kind is not Kind.RECTANGLE
        return tile_of_one(a, b, symmetric=is_symmetric, shifted=job.q >= 0, exact=job.exact)


def _reads_ahead(jobs: Sequence[Job]) -> list[bool]:
    """Whether the job before has not written a job's first operand, of two square ones; and ``False`` for the end.

    Not for the second job: the first may have begun before what came before it was complete.
    """
    found = [False, False]
    for before, job in pairwise(jobs[1:]):
        written = {before.d, before.d + before.twice, before.q}
        has_two = job.kind is Kind.SQUARE and job.a != job.b
        # a general product lets the next launch start too soon
        is_late = before.kind in (Kind.GRAM, Kind.SQUARE)
        found.append(has_two and is_late and written.isdisjoint({job.a, job.a + job.twice}))
    return [*found[: len(jobs)], False]
