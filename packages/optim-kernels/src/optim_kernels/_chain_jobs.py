"""The products of a Newton–Schulz iteration as a list of jobs, and the tiles of all of them in an order to run.

A job is one product, for every matrix of a batch. It reads and writes buffers of each matrix: square ones [m, m], and
rectangular ones [m, n]. A tile waits until all tiles of its matrix's earlier jobs are done: with no more buffers than
the iteration needs, every job reads or overwrites something of the one before it.

Tiles of all jobs and matrices make one list, in which no tile waits for a later one. Matrices follow one another in
groups: enough of them that, while the last tiles of one job are computed, those of the next can start, and few enough
that what they hand on is still in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate, pairwise

from optim_kernels._tiles import cdiv
from optim_kernels.orthogonalization import NSConfig

# Side of a tile.
BLOCK = 128
# Numbers of a tile's entry in the list, and of a job's in the table.
ENTRY_FIELDS, JOB_FIELDS = 8, 8
# Tiles of a symmetric job that a group of matrices has at least, for each multiprocessor.
ROUNDS = 4


class Kind(IntEnum):
    """What a job multiplies: X Xᵀ, two symmetric matrices that commute, or a symmetric one and X."""

    GRAM, SQUARE, RECTANGLE = range(3)


class Scale(IntEnum):
    """Which numbers of each matrix multiply a job's result."""

    NONE, SCALE, SQUARED = range(3)


@dataclass(frozen=True)
class Job:
    """``d = s (α a b + β c)``, and ``q = d + ω I``: buffers by number, −1 for none; ``b`` is ``a`` in X Xᵀ."""

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

    @property
    def reads(self) -> set[tuple[str, int]]:
        left = "rectangle" if self.kind is Kind.GRAM else "square"
        right = "square" if self.kind is Kind.SQUARE else "rectangle"
        return {(left, self.a), (right, self.b)} | ({(self._result, self.c)} if self.c >= 0 else set())

    @property
    def writes(self) -> set[tuple[str, int]]:
        return {(self._result, self.d)} | ({(self._result, self.q)} if self.q >= 0 else set())

    @property
    def _result(self) -> str:
        return "rectangle" if self.kind is Kind.RECTANGLE else "square"

    def tiles(self, m: int, n: int) -> list[tuple[int, int]]:
        """(row, column) where its tiles begin."""
        rows, columns = range(0, m, BLOCK), range(0, n, BLOCK)
        if self.kind is Kind.RECTANGLE:
            return [(row, column) for column in columns for row in rows]
        return [(row, column) for row in rows for column in rows if column <= row]


@dataclass
class _Writer:
    """Collects jobs. X goes from rectangle 0 to 1 to 2 to 1 and so on; the caller may let 2 be 0."""

    jobs: list[Job] = field(default_factory=list)
    x: int = 0

    def gram(self, d: int) -> None:
        scale = Scale.NONE if self.jobs else Scale.SQUARED
        self.jobs.append(Job(Kind.GRAM, self.x, self.x, d, scale=scale))

    def square(self, a: int, b: int, d: int, **others: float) -> None:
        self.jobs.append(Job(Kind.SQUARE, a, b, d, **others))  # type: ignore[arg-type]

    def rectangle(self, s: int, alpha: float = 1.0, beta: float | None = None) -> None:
        d = 2 if self.x == 1 else 1
        c, scale = (-1 if beta is None else self.x), Scale.NONE if self.x else Scale.SCALE
        self.jobs.append(Job(Kind.RECTANGLE, s, self.x, d, c, alpha=alpha, beta=beta or 0.0, scale=scale))
        self.x = d


def jobs_of(config: NSConfig, m: int, n: int) -> list[Job]:
    """The iteration that ``config`` chooses for m×n matrices; the last job's ``d`` is the result."""
    write = _Writer()
    if config.method_for(m, n) == "standard":
        for a, b, c in config.triples:
            write.gram(0)
            if c == 0.0:
                write.rectangle(0, alpha=b, beta=a)
            else:
                write.square(0, 0, 1, c=0, alpha=c, beta=b)
                write.rectangle(1, beta=a)
        return write.jobs
    r, z = 0, 1
    for block in config.blocks:
        write.gram(r)
        q, other = 2, 3
        for step, (a, b, c) in enumerate(block, start=1):
            if step == 1:
                write.square(r, r, z, c=r, q=q, alpha=c, beta=b, omega=a)
            else:
                write.square(r, r, z, c=r, alpha=c, beta=b)
            if step < len(block):
                write.square(r, z, other, c=r, beta=a)
                write.square(z, other, r, c=other, beta=a)
            if step > 1:
                # P was there, and is no longer needed
                write.square(q, z, other, c=q, beta=a)
                q, other = other, q
        write.rectangle(q)
    return write.jobs


def num_squares(jobs: Sequence[Job]) -> int:
    """How many square buffers a matrix needs."""
    return 1 + max(number for job in jobs for shape, number in job.writes if shape == "square")


def tile_list(jobs: Sequence[Job], count: int, m: int, n: int, num_sms: int) -> list[tuple[int, ...]]:
    """An entry of ENTRY_FIELDS numbers for every tile, in order.

    (job, matrix, row, column, kind, tiles of the matrix to wait for, place of a, place of b). A place is that of the
    matrix among the square ones, all matrices' first buffers first, or the number of a rectangular buffer.
    """
    tiles = [job.tiles(m, n) for job in jobs]
    needed = [0, *accumulate(len(its) for its in tiles)]
    blocks = cdiv(m, BLOCK)
    size = cdiv(ROUNDS * num_sms, blocks * (blocks + 1) // 2)
    groups = max(1, count // size)
    starts = [count * group // groups for group in range(groups + 1)]

    def place(job: Job, number: int, matrix: int, is_square: bool) -> int:
        return number * count + matrix if is_square else number

    return [
        (
            number,
            matrix,
            row,
            column,
            job.kind,
            needed[number],
            place(job, job.a, matrix, job.kind is not Kind.GRAM),
            place(job, job.b, matrix, job.kind is Kind.SQUARE),
        )
        for first, end in pairwise(starts)
        for number, job in enumerate(jobs)
        for matrix in range(first, end)
        for row, column in tiles[number]
    ]


def job_table(jobs: Sequence[Job], count: int) -> list[tuple[float, ...]]:
    """(place of c or −1, of d, of q or −1, which scale, α, β, ω, 0) of every job; places are of matrix 0."""

    def place(job: Job, number: int) -> int:
        return number if number < 0 or job.kind is Kind.RECTANGLE else number * count

    return [
        (place(job, job.c), place(job, job.d), place(job, job.q), job.scale, job.alpha, job.beta, job.omega, 0)
        for job in jobs
    ]
