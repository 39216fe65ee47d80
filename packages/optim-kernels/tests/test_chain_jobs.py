"""The jobs of Newton–Schulz in one launch: what they compute in fp64, and that no tile waits for a later one.

The tables are also run tile by tile in fp64, as the kernel does: X in panels, half tiles and quarters, NaN wherever the
kernel finds what nobody has written.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from optim_kernels import NSConfig, reference
from optim_kernels._chain_jobs import (
    BLOCK,
    ENTRY_FIELDS,
    JOB_FIELDS,
    TILE_END,
    Job,
    Kind,
    Members,
    Scale,
    job_table,
    jobs_of,
    num_squares,
    places,
    tile_list,
)

CONFIGS = [
    NSConfig(coefficients=name, steps=steps, method=method, restarts=restarts)
    for name, steps, restarts in (
        ("keller", 5, None),
        ("polar_express", 5, "accurate"),
        ("cubic5", 5, None),
        ("you", 1, None),
        ("keller", 2, (1,)),
        ("keller", 7, (2, 4)),
    )
    for method in ("standard", "gram")
]


def run(jobs: list[Job], x: Tensor, divisor: Tensor) -> Tensor:
    """Every job on its buffers; rectangles 0 and 2 are one, as where X may be overwritten."""
    squares: dict[int, Tensor] = {}
    rectangles = {0: x}
    eye = torch.eye(len(x), dtype=x.dtype)
    for job in jobs:
        left = rectangles[job.a % 2] if job.kind is Kind.GRAM else squares[job.a]
        right = {Kind.GRAM: left.mT, Kind.SQUARE: squares.get(job.b), Kind.RECTANGLE: rectangles.get(job.b % 2)}[
            job.kind
        ]
        results, fold = (rectangles, 2) if job.kind is Kind.RECTANGLE else (squares, 99)
        d = job.alpha * left @ right
        if job.c >= 0:
            d = d + job.beta * results[job.c % fold]
        d = d / {Scale.NONE: 1.0, Scale.SCALE: divisor, Scale.SQUARED: divisor**2}[job.scale]
        results[job.d % fold] = d
        if job.q >= 0:
            squares[job.q] = d + job.omega * eye
    return rectangles[jobs[-1].d % 2]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.coefficients}-{c.steps}-{c.method}-{c.restarts}")
def test_jobs_are_the_reference_polynomial(config: NSConfig) -> None:
    x = torch.randn(6, 20, dtype=torch.float64)
    jobs = jobs_of(config, 6, 20)
    torch.testing.assert_close(run(jobs, x, x.norm()), reference.newton_schulz(x, config.triples), atol=1e-9, rtol=0)
    assert num_squares(jobs) <= 4
    # X is read as it was given by the first jobs alone, which then bring it to norm 1
    assert [job.scale for job in jobs if job.kind is Kind.GRAM] == [Scale.SQUARED] + [Scale.NONE] * (
        sum(job.kind is Kind.GRAM for job in jobs) - 1
    )
    assert all((job.scale is Scale.SCALE) == (job.b == 0) for job in jobs if job.kind is Kind.RECTANGLE)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.coefficients}-{c.steps}-{c.method}-{c.restarts}")
def test_a_job_touches_only_what_the_jobs_before_left_or_no_longer_need(config: NSConfig) -> None:
    """No job writes what it reads, and every job depends on the one before, so waiting for all costs nothing."""
    jobs = jobs_of(config, 6, 20)
    for job in jobs:
        assert not job.reads & job.writes
    for earlier, later in pairwise(jobs):
        assert earlier.writes & (later.reads | later.writes) or earlier.reads & later.writes


def members(config: NSConfig, m: int, *batches: tuple[int, int], first: int = 0) -> list[Members]:
    """Batches (count, n) of short side m, with X in panels."""
    groups = []
    for count, n in batches:
        groups.append(Members(tuple(jobs_of(config, m, n)), first, count, n, -(-n // BLOCK)))
        first += count
    return groups


CHAINS = [
    (NSConfig(), 100, [(1, 130)]),
    (NSConfig(), 300, [(7, 300)]),
    (NSConfig(), 256, [(12, 1000)]),
    (NSConfig(), 130, [(40, 520), (9, 130), (1, 300)]),
    (NSConfig(coefficients="cubic5"), 260, [(3, 260), (5, 1040)]),
    (NSConfig(steps=1), 128, [(2, 128), (2, 256)]),
]


@pytest.mark.parametrize(("config", "m", "batches"), CHAINS, ids=lambda value: str(value)[-30:])
def test_tiles_cover_every_job_in_an_order_that_never_waits(
    config: NSConfig, m: int, batches: list[tuple[int, int]]
) -> None:
    groups = members(config, m, *batches, first=3)
    entries, table = tile_list(groups, m), job_table(groups, m)
    assert entries.dtype == torch.int32
    assert entries.shape[1:] == (ENTRY_FIELDS,)
    assert len({tuple(entry) for entry in entries.tolist()}) == len(entries)
    assert table.shape == (sum(len(group.jobs) for group in groups), JOB_FIELDS)
    jobs = [(group, number) for group in groups for number in range(len(group.jobs))]
    side = -(-m // BLOCK)
    tiles = {
        (group.first, number): side * group.x_step if job.kind is Kind.RECTANGLE else side * (side + 1) // 2
        for group in groups
        for number, job in enumerate(group.jobs)
    }
    assert len(entries) == sum(
        group.count * tiles[group.first, number] for group in groups for number in range(len(group.jobs))
    )
    done = dict.fromkeys((matrix for group in groups for matrix in group.numbers), 0)
    for number, matrix, row, column in entries.tolist():
        group, number_in_group = jobs[number]
        job = group.jobs[number_in_group]
        needed = sum(tiles[group.first, earlier] for earlier in range(number_in_group))
        # all that it waits for, and nothing of a later job, stands before it
        assert needed == table[number, 9]
        assert needed <= done[matrix] < needed + tiles[group.first, number_in_group]
        assert matrix in group.numbers
        done[matrix] += 1
        assert row % BLOCK == column % BLOCK == 0
        assert row < m
        assert column < group.n if job.kind is Kind.RECTANGLE else column <= row
    assert all(
        done[matrix] == sum(tiles[group.first, number] for number in range(len(group.jobs)))
        for group in groups
        for matrix in group.numbers
    )


def test_matrices_advance_alike() -> None:
    """Wherever the list is cut, all matrices have done the same share of their work, but for one job."""
    m = 256
    groups = members(NSConfig(), m, (6, 256), (10, 1024))
    work = dict.fromkeys(range(16), 0)
    jobs = [(group, job) for group in groups for job in group.jobs]
    costs = [job.length(m, group.n) + TILE_END for group, job in jobs]
    entries = tile_list(groups, m).tolist()
    totals = {matrix: sum(costs[job] for job, other, _, _ in entries if other == matrix) for matrix in work}
    largest = max(
        len(job.tiles(m, group.n)) * cost / totals[group.first] for (group, job), cost in zip(jobs, costs, strict=True)
    )
    for job, matrix, _, _ in entries:
        work[matrix] += costs[job]
        shares = [work[each] / totals[each] for each in work]
        assert max(shares) - min(shares) <= 2 * largest


def test_the_table_names_buffers_and_places() -> None:
    groups = members(NSConfig(method="gram"), 200, (2, 200), (3, 700))
    table = job_table(groups, 200)
    jobs = [(group, job) for group in groups for job in group.jobs]
    for (group, job), row in zip(jobs, table.tolist(), strict=True):
        assert row[:4] == [job.c, job.d, job.q, job.scale]
        assert row[4:7] == torch.tensor([job.alpha, job.beta, job.omega]).tolist()
        assert row[7:9] == [job is group.jobs[-1], job.kind]
        assert row[10:13] == [job.a, job.b, group.n if job.kind is Kind.GRAM else 200]
    squares = num_squares(groups[0].jobs)
    assert places(groups, 5).tolist() == [[0, 0], [2, squares]] + [[4 + 6 * i, (2 + i) * squares] for i in range(3)]


def run_tiles(groups: list[Members], m: int, xs: list[Tensor], scales: Tensor) -> None:
    """Run the tables in the order of the list on ``xs [panels, m, BLOCK]``, which are two.

    What a tile does not compute it does not store: the upper right quarter of one on the diagonal, rows beyond m.
    """
    nan = float("nan")
    count = sum(group.count for group in groups)
    entries, table, where = tile_list(groups, m).tolist(), job_table(groups, m).tolist(), places(groups, count).tolist()
    squares = torch.full((sum(group.count * num_squares(group.jobs) for group in groups), m, m), nan).double()

    def block_of_x(buffer: int, x: int, k: int, width: int) -> Tensor:
        return xs[buffer % 2][x + k // BLOCK, :, k % BLOCK : k % BLOCK + width]

    for number, matrix, row, column in entries:
        c, d, q, scale, alpha, beta, omega, _, kind, _, a, b, length = map(float, table[number][:13])
        c, d, q, scale, kind, a, b, length = map(int, (c, d, q, scale, kind, a, b, length))
        x, first = where[matrix]
        rows, columns = slice(row, row + BLOCK), slice(column, column + BLOCK)
        acc = torch.zeros(min(BLOCK, m - row), BLOCK if kind == Kind.RECTANGLE else min(BLOCK, m - column)).double()
        for k in range(0, length, 64):
            if kind == Kind.GRAM:
                left, right = block_of_x(a, x, k, 64)[rows], block_of_x(b, x, k, 64)[columns].mT
            else:
                left = squares[first + a, rows, k : k + 64]
                if kind == Kind.SQUARE:
                    right = squares[first + b, columns, k : k + 64].mT
                else:
                    right = block_of_x(b, x, column, BLOCK)[k : k + 64]
            acc += left @ right
        acc *= alpha
        if kind == Kind.RECTANGLE:
            if c >= 0:
                acc += beta * block_of_x(c, x, column, BLOCK)[rows]
            block_of_x(d, x, column, BLOCK)[rows] = acc * (1.0, scales[matrix], scales[matrix] ** 2)[scale]
            continue
        if c >= 0:
            acc += beta * squares[first + c, rows, columns]
        acc *= (1.0, scales[matrix], scales[matrix] ** 2)[scale]
        if row == column:
            acc[:64, 64:] = nan
            acc = torch.where(torch.ones_like(acc, dtype=torch.bool).tril(), acc, acc.mT)
        squares[first + d, rows, columns], squares[first + d, columns, rows] = acc, acc.mT
        if q >= 0:
            if row == column:
                acc = acc + omega * torch.eye(len(acc)).double()
            squares[first + q, rows, columns], squares[first + q, columns, rows] = acc, acc.mT


@pytest.mark.parametrize(
    ("config", "m", "batches"),
    [
        (NSConfig(), 200, [(2, 200), (2, 700)]),
        (NSConfig(), 256, [(1, 256), (2, 1040)]),
        (NSConfig(coefficients="cubic5"), 136, [(1, 136), (1, 200)]),
    ],
    ids=str,
)
def test_tables_of_panels_are_the_reference(config: NSConfig, m: int, batches: list[tuple[int, int]]) -> None:
    """X is zero to the end of a step of 64 columns; beyond it the panel and everything else starts as NaN."""
    groups = members(config, m, *batches)
    panels = sum(group.count * group.x_step for group in groups)
    xs = [torch.full((panels, m, BLOCK), float("nan")).double() for _ in range(2)]
    of_matrix = [group for group in groups for _ in group.numbers]
    where = places(groups, len(of_matrix))[:, 0].tolist()
    matrices = []
    for x, group in zip(where, of_matrix, strict=True):
        matrix = torch.randn(m, group.n, dtype=torch.float64)
        padded = torch.nn.functional.pad(matrix, (0, -group.n % 64))
        for panel, columns in enumerate(padded.split(BLOCK, 1), start=x):
            xs[0][panel, :, : columns.shape[1]] = columns
        matrices.append(matrix)
    run_tiles(groups, m, xs, 1.0 / torch.stack([matrix.norm() for matrix in matrices]))
    for x, group, matrix in zip(where, of_matrix, matrices, strict=True):
        result = xs[group.jobs[-1].d % 2][x : x + group.x_step]
        found = torch.cat(list(result), 1)[:, : group.n]
        torch.testing.assert_close(found, reference.newton_schulz(matrix, config.triples), atol=1e-4, rtol=0)
