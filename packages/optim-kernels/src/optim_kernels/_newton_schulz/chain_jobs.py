"""The products of a Newton–Schulz iteration as a list of jobs; `chain_list` has the order in which their tiles run.

A job is one product, for every matrix of a batch. It reads and writes buffers of each matrix: square ones [m, m], and
rectangular ones [m, n]. Of a symmetric result only the tiles on and below the diagonal are stored, and readers find the
others in their mirror images. A tile waits until all tiles of its matrix's earlier jobs are done: with no more buffers
than the iteration needs, every job reads or overwrites something of the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from optim_kernels._newton_schulz.coefficients import Triple
from optim_kernels._newton_schulz.config import NSConfig
from optim_kernels._newton_schulz.iterations import NUM_EXACT

TILE_SIDE = 128
# Numbers of a job in the table.
JOB_FIELDS = 16
# The time of a tile beside its products, as a length of its sums.
TILE_END = 180
# R's factor where two numbers hold its digits: ‖R‖ ≤ 1, and the low numbers must not be subnormal in fp16.
_UNITS = 256.0


class Kind(IntEnum):
    """What a job multiplies.

    X Xᵀ; two square matrices whose product is symmetric; a square matrix and X; a square matrix and the transpose of
    another, with all tiles computed.
    """

    GRAM, SQUARE, RECTANGLE, FULL = range(4)


class Scale(IntEnum):
    """Which scale of each matrix multiplies a job's result: none, σ or σ²."""

    NONE, SCALE, SQUARED = range(3)


class Ending(IntEnum):
    """What follows the last product: nothing, the update of the parameters, or sums of O² over lines."""

    STORE, UPDATE, SQUARES = range(3)


@dataclass(frozen=True)
class Job:
    """``d = s (α a b + β c)``, and ``q = d + ω I``: buffers by number, −1 for none; ``b`` is ``a`` in X Xᵀ.

    With ``low`` q is the rounding error of d, so that d + q has twice the digits. With ``apart`` the diagonal of a
    square d is stored apart, in fp32, and a product with X takes that diagonal as β, a number for each row. ``whole``:
    a is not symmetric, so all of its tiles are stored; a square b is always symmetric. ``exact`` is as in
    `torch_products`; a chain, whose matrices all have 16 bits, ignores it. ``twice``: two products with one b, of
    buffers a and a + 1, with c and d like them.
    """

    kind: Kind
    a: int
    b: int
    d: int
    c: int = -1
    q: int = -1
    alpha: float = 1.0
    beta: float = 0.0
    omega: float = 0.0
    scale: Scale = Scale.NONE
    low: bool = False
    apart: bool = False
    whole: bool = False
    exact: bool = False
    twice: bool = False

    def length(self, m: int, n: int) -> int:
        """The length of its sums."""
        return n if self.kind is Kind.GRAM else m

    def tiles(self, m: int, n: int) -> list[tuple[int, int]]:
        """(row, column) where its tiles begin."""
        rows, columns = range(0, m, TILE_SIDE), range(0, m if self.kind is Kind.FULL else n, TILE_SIDE)
        if self.kind in (Kind.RECTANGLE, Kind.FULL):
            return [(row, column) for column in columns for row in rows]
        return [(row, column) for row in rows for column in rows if column <= row]


@dataclass
class _Writer:
    """Collects jobs. X goes from rectangle 0 to 1 to 2 to 1 and so on; the caller may let 2 be 0."""

    jobs: list[Job] = field(default_factory=list)
    x: int = 0
    # square buffers that are not symmetric now
    whole: set[int] = field(default_factory=set)

    def gram(self, d: int, **others: Any) -> None:
        scale = Scale.NONE if self.jobs else Scale.SQUARED
        self.jobs.append(Job(Kind.GRAM, self.x, self.x, d, scale=scale, **others))
        self.whole -= {d, others.get("q", d)}

    def square(self, a: int, b: int, d: int, **others: Any) -> None:
        self._of_squares(Job(Kind.SQUARE, a, b, d, whole=a in self.whole, **others))
        self.whole -= {d, others.get("q", d)}

    def full(self, a: int, b: int, d: int, **others: Any) -> None:
        self._of_squares(Job(Kind.FULL, a, b, d, whole=a in self.whole, **others))
        self.whole |= {d, others.get("q", d)}

    def _of_squares(self, job: Job) -> None:
        assert job.b not in self.whole
        # all tiles of D need all of C
        assert job.kind is not Kind.FULL or job.c < 0 or job.c in self.whole
        self.jobs.append(job)

    def factor(
        self,
        block: Sequence[Triple],
        start: int,
        r: int,
        z: int,
        q: int,
        other: int,
        *,
        unit: float = 1.0,
        in_pairs: bool = False,
    ) -> int:
        """Form a block's Q from R = ``unit`` times buffer ``start``; return its buffer.

        ``in_pairs``: buffers q and other + 1 follow r and other, so that step 2 may multiply R and Q by Z in one job.
        """
        for step, (a, b, c) in enumerate(block, start=1):
            if step == 1:
                self.square(start, start, z, c=start, q=q, alpha=c * unit * unit, beta=b * unit, omega=a)
            else:
                self.square(r, r, z, c=r, alpha=c, beta=b)
            if in_pairs and 2 == step < len(block):
                self.square(r, z, other, c=r, beta=a, twice=True)
                self.square(z, other, r, c=other, beta=a)
                q, other = other + 1, q
                continue
            if step < len(block):
                self.square(start, z, other, c=start, alpha=unit, beta=a * unit)
                self.square(z, other, r, c=other, beta=a)
                start, unit = r, 1.0
            if step > 1:
                # ``other`` held P, which is no longer needed
                self.square(q, z, other, c=q, beta=a)
                q, other = other, q
        return q

    def rectangle(
        self, s: int, alpha: float = 1.0, beta: float | None = None, *, apart: bool = False, exact: bool = False
    ) -> None:
        d = 2 if self.x == 1 else 1
        c, scale = (-1 if beta is None else self.x), Scale.NONE if self.x else Scale.SCALE
        others: dict[str, Any] = {"scale": scale, "apart": apart, "whole": s in self.whole, "exact": exact}
        self.jobs.append(Job(Kind.RECTANGLE, s, self.x, d, c, alpha=alpha, beta=beta or 0.0, **others))
        self.x = d


def jobs_of(config: NSConfig, m: int, n: int, *, in_factors: bool = False, in_pairs: bool = False) -> list[Job]:
    """The iteration that ``config`` chooses for m×n matrices; the last job's ``d`` is the result.

    ``in_factors``: the Gram iteration restarts in its factors where that is shorter (`_restart_in_factors`);
    ``in_pairs``: two of its products with one operand may be one job, for which it needs a buffer more.
    """
    write = _Writer()
    if config.method_for(m, n) == "standard":
        for step, (a, b, c) in enumerate(config.triples):
            exact = step < NUM_EXACT
            write.gram(0)
            if c == 0.0:
                write.rectangle(0, alpha=b, beta=a, exact=exact)
            else:
                write.square(0, 0, 1, c=0, alpha=c, beta=b, exact=exact)
                write.rectangle(1, beta=a, exact=exact)
    elif in_factors and config.restarts_in_factors(m, n):
        _restart_in_factors(write, *config.blocks)
    else:
        r, q, other, z = (0, 1, 2, 4) if in_pairs else range(4)
        for block in config.blocks:
            write.gram(r, exact=True)
            write.rectangle(write.factor(block, r, r, z, q, other, in_pairs=in_pairs), exact=True)
    return write.jobs


def _restart_in_factors(write: _Writer, first: Sequence[Triple], second: Sequence[Triple]) -> None:
    """The Gram iteration with one restart by m×m products: R₂ = Q₁RQ₁ in place of (Q₁X)(Q₁X)ᵀ, and X ← Q₂Q₁X.

    R₂ is formed with the same rounded Q₁ that multiplies X, so rounding of Q₁ does no harm. Rounding of R and of Q₁R
    would: the iteration enlarges small singular values, and with them errors of the large ones. So R and Q₁R are stored
    as two numbers each, high and low, and as Q₁ and R do not commute to that precision, all of Q₁R is computed:

        T = Q₁ R_low,   P = Q₁ R_high + T,   U = P_low Q₁,   R₂ = P_high Q₁ + U

    Q₂Q₁ enlarges small singular values by all that the iteration does, so most of it is a large diagonal, whose
    rounding would disturb the large ones: the diagonal is stored apart.
    """
    high, low, z, q, other, r = range(6)
    write.gram(high, q=low, low=True, alpha=_UNITS)
    unit = 1.0 / _UNITS
    q1 = write.factor(first, high, r, z, q, other, unit=unit)
    free = q + other - q1
    write.full(q1, low, z)
    write.full(q1, high, free, c=z, beta=1.0, q=r, low=True)
    write.square(r, q1, z)
    write.square(free, q1, high, c=z, alpha=unit, beta=unit)
    q2 = write.factor(second, high, high, z, r, low)
    write.full(q2, q1, free, apart=True)
    write.rectangle(free, beta=1.0, apart=True)


def num_squares(jobs: Sequence[Job]) -> int:
    """How many square buffers a matrix needs."""
    return 1 + max(max(job.d + job.twice, job.q) for job in jobs if job.kind is not Kind.RECTANGLE)


@dataclass(frozen=True)
class MatrixGroup:
    """Matrices of one shape, numbered from ``first`` on.

    Args:
        x_step: places that one matrix takes in a buffer of X.
    """

    jobs: tuple[Job, ...]
    first: int
    count: int
    n: int
    x_step: int = 1

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


def job_table(groups: Sequence[MatrixGroup], m: int) -> Tensor:
    """The numbers of every job: fp32 [jobs, JOB_FIELDS].

    (c, d, q: buffers of the matrix, −1 for none; which scale; α; β; ω; whether it is the last; kind; tiles of the
    matrix to wait for; a, b: buffers; length of its sums; whether q is d's rounding error; whether a diagonal is apart;
    whether a is not symmetric)
    """
    rows = []
    for group in groups:
        needed = accumulate((len(job.tiles(m, group.n)) for job in group.jobs), initial=0)
        for job, tiles in zip(group.jobs, needed):
            is_last = job is group.jobs[-1]
            row = (job.c, job.d, job.q, job.scale, job.alpha, job.beta, job.omega, is_last, job.kind, tiles)
            rows.append([*row, job.a, job.b, job.length(m, group.n), job.low, job.apart, job.whole])
    return torch.tensor(rows, dtype=torch.float32, device="cpu")


def places(groups: Sequence[MatrixGroup], num_matrices: int) -> Tensor:
    """Where each matrix's X and its first square buffer are: int32 [matrices, 2].

    Both are numbered on from each group to the next.
    """
    result = torch.zeros(num_matrices, 2, dtype=torch.int32, device="cpu")
    x, square = 0, 0
    for group in groups:
        squares = num_squares(group.jobs)
        for matrix in group.numbers:
            result[matrix, 0], result[matrix, 1] = x, square
            x, square = x + group.x_step, square + squares
    return result
