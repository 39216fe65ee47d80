"""The jobs of Newton–Schulz in one launch: what they compute in fp64, and that no tile waits for a later one.

The tables are also run tile by tile in fp64, as the kernel does: X in panels, symmetric matrices in one triangle, NaN
wherever the kernel finds what nobody has written.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from optim_kernels import NSConfig, reference
from optim_kernels._newton_schulz.chain_jobs import (
    JOB_FIELDS,
    TILE_END,
    TILE_SIDE,
    Job,
    Kind,
    MatrixGroup,
    Scale,
    job_table,
    jobs_of,
    num_squares,
    places,
)
from optim_kernels._newton_schulz.chain_list import ENTRY_FIELDS, NO_TILE, tile_list

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


# what `jobs_of` may use, and the most square buffers for it
OPTIONS: list[tuple[dict[str, bool], int]] = [({}, 4), ({"in_factors": True}, 6), ({"in_pairs": True}, 5)]


def one_by_one(jobs: list[Job]) -> list[Job]:
    """The jobs with every two products that are one taken apart."""
    apart = []
    for job in jobs:
        second = replace(job, a=job.a + 1, c=job.c + 1, d=job.d + 1, twice=False)
        apart += [replace(job, twice=False), second] if job.twice else [job]
    return apart


def run(jobs: list[Job], x: Tensor, divisor: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Every job on its buffers, rounded to ``dtype``; rectangles 0 and 2 are one, as where X may be overwritten."""
    jobs = one_by_one(jobs)
    squares: dict[int, Tensor] = {}
    diagonal = torch.zeros(())
    rectangles = {0: x}
    eye = torch.eye(len(x), dtype=x.dtype)
    for job in jobs:
        left = rectangles[job.a % 2] if job.kind is Kind.GRAM else squares[job.a]
        if job.kind is Kind.RECTANGLE:
            right = rectangles[job.b % 2]
        else:
            right = left.mT if job.kind is Kind.GRAM else squares[job.b].mT
        results, fold = (rectangles, 2) if job.kind is Kind.RECTANGLE else (squares, 99)
        wide = job.alpha * left @ right
        if job.c >= 0:
            beta = diagonal if job.apart else job.beta
            wide = wide + beta * results[job.c % fold]
        if job.apart and job.kind is Kind.FULL:
            diagonal = wide.diagonal()[:, None].clone()
            wide.fill_diagonal_(0.0)
        wide = wide / {Scale.NONE: 1.0, Scale.SCALE: divisor, Scale.SQUARED: divisor**2}[job.scale]
        d = wide.to(dtype).to(x.dtype)
        low = (wide - d).to(dtype).to(x.dtype)
        if job.kind in (Kind.GRAM, Kind.SQUARE):
            d, low = (each.tril() + each.tril(-1).mT for each in (d, low))
        results[job.d % fold] = d
        if job.q >= 0:
            squares[job.q] = low if job.low else (d + job.omega * eye).to(dtype).to(x.dtype)
    return rectangles[jobs[-1].d % 2]


@pytest.mark.parametrize(("options", "most"), OPTIONS, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.coefficients}-{c.steps}-{c.method}-{c.restarts}")
def test_jobs_are_the_reference_polynomial(config: NSConfig, options: dict[str, bool], most: int) -> None:
    x = torch.randn(6, 20, dtype=torch.float64)
    jobs = jobs_of(config, 6, 20, **options)
    torch.testing.assert_close(run(jobs, x, x.norm()), reference.newton_schulz(x, config.triples), atol=1e-9, rtol=0)
    is_short = "in_factors" in options and config.method == "gram" and config.restarts_in_factors(6, 20)
    assert num_squares(jobs) <= (most if is_short or "in_pairs" in options else 4)
    # of every block of three steps and more, the second step's
    pairs = sum(len(block) > 2 for block in config.blocks) if config.method == "gram" else 0
    assert sum(job.twice for job in jobs) == ("in_pairs" in options and pairs)
    assert sum(job.kind is Kind.RECTANGLE for job in jobs) == (
        1 if is_short else config.steps if config.method == "standard" else len(config.blocks)
    )
    # X is read as it was given by the first jobs alone, which then bring it to norm 1
    assert [job.scale for job in jobs if job.kind is Kind.GRAM] == [Scale.SQUARED] + [Scale.NONE] * (
        sum(job.kind is Kind.GRAM for job in jobs) - 1
    )
    assert all((job.scale is Scale.SCALE) == (job.b == 0) for job in jobs if job.kind is Kind.RECTANGLE)


@pytest.mark.parametrize("options", [options for options, _ in OPTIONS], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.coefficients}-{c.steps}-{c.method}-{c.restarts}")
def test_a_job_touches_only_what_the_jobs_before_left_or_no_longer_need(
    config: NSConfig, options: dict[str, bool]
) -> None:
    """No job writes what it reads, and every job depends on the one before, so waiting for all costs nothing."""
    jobs = jobs_of(config, 6, 20, **options)
    reads, writes = zip(*map(touched, jobs))
    for own_reads, own_writes in zip(reads, writes):
        assert not own_reads & own_writes
    for (read, later_read), (written, later_written) in zip(pairwise(reads), pairwise(writes)):
        assert written & (later_read | later_written) or read & later_written


def touched(job: Job) -> tuple[set[tuple[bool, int]], set[tuple[bool, int]]]:
    """The buffers that a job reads and those that it writes: whether they are X's, and their numbers."""
    if job.twice:
        first, second = map(touched, one_by_one([job]))
        return first[0] | second[0], first[1] | second[1]
    result = job.kind is Kind.RECTANGLE
    left, right = job.kind is Kind.GRAM, job.kind in (Kind.GRAM, Kind.RECTANGLE)
    reads = {(left, job.a), (right, job.b), *([(result, job.c)] if job.c >= 0 else [])}
    return reads, {(result, job.d), *([(result, job.q)] if job.q >= 0 else [])}


def test_which_restarts_are_in_factors() -> None:
    """In fp16 with one restart, from the lengths on where that takes no more operations."""
    assert NSConfig().restarts_in_factors(256, 1024)
    assert not NSConfig().restarts_in_factors(256, 640)
    assert not NSConfig(dtype=torch.bfloat16).restarts_in_factors(256, 1024)
    assert not NSConfig(restarts="accurate").restarts_in_factors(256, 1024)
    assert not NSConfig(method="standard").restarts_in_factors(256, 1024)
    assert not NSConfig(steps=6).restarts_in_factors(256, 1024)
    # the steeper the polynomial, the fewer rows
    assert NSConfig().restarts_in_factors(5529, 22116)
    assert not NSConfig().restarts_in_factors(5530, 22120)
    assert NSConfig(coefficients="polar_express").restarts_in_factors(1327, 5308)
    assert not NSConfig(coefficients="polar_express").restarts_in_factors(1328, 5312)
    assert NSConfig(steps=6, restarts=(4,), method="gram").restarts_in_factors(256, 1024)
    assert not NSConfig(steps=7, restarts=(4,), method="gram").restarts_in_factors(256, 1024)
    assert not NSConfig(coefficients="aol4", steps=4).restarts_in_factors(256, 1024)
    m, n = 1000, 4000

    def operations(jobs: list[Job]) -> float:
        whole = {Kind.RECTANGLE: 2 * n, Kind.FULL: 2 * m}
        return sum(job.length(m, n) * whole.get(job.kind, m) for job in jobs) / m**2

    assert operations(jobs_of(NSConfig(), m, n)) == 38
    assert operations(jobs_of(NSConfig(), m, n, in_factors=True)) == 34


@pytest.mark.parametrize("name", ["keller", "you", "polar_express", "polar_express_gram", "cans"])
def test_a_restart_in_factors_is_as_accurate_in_half_precision(name: str) -> None:
    """As one that forms XXᵀ: Gaussian, 1/i, 1/i², six decades, rank 8 and little else."""
    m, n = 256, 1024
    config = NSConfig(coefficients=name, norm_scale=1.02 if name == "polar_express" else 1.0)
    u, v = (torch.linalg.qr(torch.randn(size, m, dtype=torch.float64))[0] for size in (m, n))
    i = torch.arange(1, m + 1, dtype=torch.float64)
    spectra = [1 / i, 1 / i**2, torch.logspace(0, -6, m, dtype=torch.float64)]
    few = torch.randn(m, 8, dtype=torch.float64) @ torch.randn(8, n, dtype=torch.float64) / 8
    matrices = [
        torch.randn(m, n, dtype=torch.float64),
        *((u * values) @ v.mT for values in spectra),
        few + 1e-5 * torch.randn(m, n, dtype=torch.float64),
    ]
    for matrix in matrices:
        x = (matrix / (config.norm_scale * matrix.norm())).half().float()
        expected = reference.newton_schulz(matrix, config.triples, norm_scale=config.norm_scale)
        plain, in_factors = (
            run(jobs_of(config, m, n, in_factors=flag), x, torch.ones(()), torch.float16) for flag in (False, True)
        )
        assert (in_factors - expected).norm() <= 1.15 * (plain - expected).norm()


@pytest.mark.parametrize("steps", range(8, 13))
def test_no_factor_leaves_half_precision(steps: int) -> None:
    """One singular value far above the others, in two rows: half of all enlargement stands beside the diagonal."""
    m, n = 256, 1024
    config = NSConfig(steps=steps)
    for noise in (1e-6, 1e-4):
        matrix = noise * torch.randn(m, n, dtype=torch.float64)
        matrix[:2] += torch.randn(n, dtype=torch.float64)
        x = (matrix / matrix.norm()).half().float()
        result = run(jobs_of(config, m, n, in_factors=True), x, torch.ones(()), torch.float16)
        assert result.isfinite().all()


def groups_of(config: NSConfig, m: int, *batches: tuple[int, int], first: int = 0) -> list[MatrixGroup]:
    """Batches (count, n) of short side m, with X in panels."""
    groups = []
    for count, n in batches:
        jobs = tuple(jobs_of(config, m, n, in_factors=True))
        groups.append(MatrixGroup(jobs, first, count, n, -(-n // TILE_SIDE)))
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
    groups = groups_of(config, m, *batches, first=3)
    entries, table = tile_list(groups, m), job_table(groups, m)
    assert entries.dtype == torch.int32
    assert entries.shape[1:] == (ENTRY_FIELDS,)
    assert len(entries) % 2 == 0
    tiles_of_list = [entry for entry in entries.tolist() if entry[1] != NO_TILE]
    assert len(set(map(tuple, tiles_of_list))) == len(tiles_of_list)
    assert table.shape == (sum(len(group.jobs) for group in groups), JOB_FIELDS)
    jobs = [(group, number) for group in groups for number in range(len(group.jobs))]
    side = -(-m // TILE_SIDE)
    all_of = {Kind.FULL: side}
    tiles = {
        (group.first, number): side * all_of.get(job.kind, group.x_step)
        if job.kind in (Kind.RECTANGLE, Kind.FULL)
        else side * (side + 1) // 2
        for group in groups
        for number, job in enumerate(group.jobs)
    }
    assert len(tiles_of_list) == sum(
        group.count * tiles[group.first, number] for group in groups for number in range(len(group.jobs))
    )
    done = dict.fromkeys((matrix for group in groups for matrix in group.numbers), 0)
    for number, matrix, row, column in tiles_of_list:
        group, number_in_group = jobs[number]
        job = group.jobs[number_in_group]
        needed = sum(tiles[group.first, earlier] for earlier in range(number_in_group))
        # all that it waits for, and nothing of a later job, stands before it
        assert needed == table[number, 9]
        assert needed <= done[matrix] < needed + tiles[group.first, number_in_group]
        assert matrix in group.numbers
        done[matrix] += 1
        assert row % TILE_SIDE == column % TILE_SIDE == 0
        assert row < m
        assert column < group.n if job.kind is Kind.RECTANGLE else column < m
        assert job.kind in (Kind.RECTANGLE, Kind.FULL) or column <= row
    assert all(
        done[matrix] == sum(tiles[group.first, number] for number in range(len(group.jobs)))
        for group in groups
        for matrix in group.numbers
    )


@pytest.mark.parametrize(("config", "m", "batches"), CHAINS, ids=lambda value: str(value)[-30:])
def test_two_that_are_drawn_together(config: NSConfig, m: int, batches: list[tuple[int, int]]) -> None:
    """Neither waits for the other; and all that have a neighbour in their row are with one."""
    groups = groups_of(config, m, *batches)
    shared: dict[tuple[int, int], int] = {}
    without = 0
    for first, second in tile_list(groups, m).view(-1, 2, ENTRY_FIELDS).tolist():
        without += (first[1] == NO_TILE) + (second[1] == NO_TILE)
        assert first[1] != NO_TILE
        if first[1] == second[1]:
            assert first[0] == second[0]
            if first[2] == second[2]:
                assert second[3] == first[3] + TILE_SIDE
                shared[first[0], first[1]] = shared.get((first[0], first[1]), 0) + 1
    side = -(-m // TILE_SIDE)
    jobs = [(group, job) for group in groups for job in group.jobs]
    for number, (group, job) in enumerate(jobs):
        width = {Kind.RECTANGLE: -(-group.n // TILE_SIDE), Kind.FULL: side}.get(job.kind)
        wanted = sum((row + 1 if width is None else width) // 2 for row in range(side))
        assert all(shared.get((number, matrix), 0) == wanted for matrix in group.numbers)
    # at most one behind each job of each matrix
    assert without <= sum(len(group.jobs) * group.count for group in groups)


def test_matrices_advance_alike() -> None:
    """Wherever the list is cut, all matrices have done the same share of their work, but for one job."""
    m = 256
    groups = groups_of(NSConfig(), m, (6, 256), (10, 1024))
    work = dict.fromkeys(range(16), 0)
    jobs = [(group, job) for group in groups for job in group.jobs]
    costs = [job.length(m, group.n) + TILE_END for group, job in jobs]
    entries = tile_list(groups, m).tolist()
    totals = {matrix: sum(costs[job] for job, other, _, _ in entries if other == matrix) for matrix in work}
    largest = max(
        len(job.tiles(m, group.n)) * cost / totals[group.first] for (group, job), cost in zip(jobs, costs, strict=True)
    )
    for job, matrix, _, _ in entries:
        if matrix == NO_TILE:
            continue
        work[matrix] += costs[job]
        shares = [work[each] / totals[each] for each in work]
        assert max(shares) - min(shares) <= 2 * largest


def test_the_table_names_buffers_and_places() -> None:
    groups = groups_of(NSConfig(method="gram"), 200, (2, 200), (3, 700))
    table = job_table(groups, 200)
    jobs = [(group, job) for group in groups for job in group.jobs]
    for (group, job), row in zip(jobs, table.tolist(), strict=True):
        assert row[:4] == [job.c, job.d, job.q, job.scale]
        assert row[4:7] == torch.tensor([job.alpha, job.beta, job.omega]).tolist()
        assert row[7:9] == [job is group.jobs[-1], job.kind]
        assert row[10:] == [job.a, job.b, group.n if job.kind is Kind.GRAM else 200, job.low, job.apart, job.whole]
    first, second = (num_squares(group.jobs) for group in groups)
    expected = [[0, 0], [2, first]] + [[4 + 6 * i, 2 * first + i * second] for i in range(3)]
    assert places(groups, 5).tolist() == expected


def run_tiles(groups: list[MatrixGroup], m: int, xs: list[Tensor], scales: Tensor) -> None:
    """Run the tables in the order of the list on ``xs [panels, m, TILE_SIDE]``, which are two.

    What a tile does not compute it does not store: tiles above the diagonal, rows beyond m.
    """
    nan = float("nan")
    count = sum(group.count for group in groups)
    entries, table, where = tile_list(groups, m).tolist(), job_table(groups, m).tolist(), places(groups, count).tolist()
    squares = torch.full((sum(group.count * num_squares(group.jobs) for group in groups), m, m), nan).double()
    diagonals = torch.full((count, m), nan).double()

    def block_of_x(buffer: int, x: int, k: int, width: int) -> Tensor:
        return xs[buffer % 2][x + k // TILE_SIDE, :, k % TILE_SIDE : k % TILE_SIDE + width]

    def block_of_square(buffer: int, row: int, k: int, whole: float) -> Tensor:
        rows, along = slice(row, row + TILE_SIDE), slice(k, k + 64)
        if whole or k < row + TILE_SIDE:
            return squares[buffer, rows, along]
        return squares[buffer, along, rows].mT

    for number, matrix, row, column in entries:
        if matrix == NO_TILE:
            continue
        c, d, q, scale, alpha, beta, omega, _, kind, _, a, b, length, low, apart, whole = map(float, table[number])
        c, d, q, scale, kind, a, b, length = map(int, (c, d, q, scale, kind, a, b, length))
        x, first = where[matrix]
        rows, columns = slice(row, row + TILE_SIDE), slice(column, column + TILE_SIDE)
        width = TILE_SIDE if kind == Kind.RECTANGLE else min(TILE_SIDE, m - column)
        acc = torch.zeros(min(TILE_SIDE, m - row), width).double()
        for k in range(0, length, 64):
            if kind == Kind.GRAM:
                left, right = block_of_x(a, x, k, 64)[rows], block_of_x(b, x, k, 64)[columns].mT
            else:
                left = block_of_square(first + a, row, k, whole)
                if kind in (Kind.SQUARE, Kind.FULL):
                    right = block_of_square(first + b, column, k, 0.0).mT
                else:
                    right = block_of_x(b, x, column, TILE_SIDE)[k : k + 64]
            acc += left @ right
        acc *= alpha
        if kind == Kind.RECTANGLE:
            if c >= 0:
                acc += (diagonals[matrix, rows, None] if apart else beta) * block_of_x(c, x, column, TILE_SIDE)[rows]
            block_of_x(d, x, column, TILE_SIDE)[rows] = acc * (1.0, scales[matrix], scales[matrix] ** 2)[scale]
            continue
        if c >= 0:
            acc += beta * squares[first + c, rows, columns]
        acc *= (1.0, scales[matrix], scales[matrix] ** 2)[scale]
        if apart and row == column:
            diagonals[matrix, rows] = acc.diagonal()
            acc.fill_diagonal_(0.0)
        results = [(d, acc)]
        if low:
            results.append((q, torch.zeros_like(acc)))
        elif q >= 0:
            results.append((q, acc + omega * torch.eye(len(acc)).double() if row == column else acc))
        for to, result in results:
            if kind != Kind.FULL and row == column and a != b:
                result = torch.where(torch.ones_like(result, dtype=torch.bool).tril(), result, result.mT)
            squares[first + to, rows, columns] = result


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
    groups = groups_of(config, m, *batches)
    panels = sum(group.count * group.x_step for group in groups)
    xs = [torch.full((panels, m, TILE_SIDE), float("nan")).double() for _ in range(2)]
    of_matrix = [group for group in groups for _ in group.numbers]
    where = places(groups, len(of_matrix))[:, 0].tolist()
    matrices = []
    for x, group in zip(where, of_matrix, strict=True):
        matrix = torch.randn(m, group.n, dtype=torch.float64)
        padded = torch.nn.functional.pad(matrix, (0, -group.n % 64))
        for panel, columns in enumerate(padded.split(TILE_SIDE, 1), start=x):
            xs[0][panel, :, : columns.shape[1]] = columns
        matrices.append(matrix)
    run_tiles(groups, m, xs, 1.0 / torch.stack([matrix.norm() for matrix in matrices]))
    for x, group, matrix in zip(where, of_matrix, matrices, strict=True):
        result = xs[group.jobs[-1].d % 2][x : x + group.x_step]
        found = torch.cat(list(result), 1)[:, : group.n]
        torch.testing.assert_close(found, reference.newton_schulz(matrix, config.triples), atol=1e-4, rtol=0)
