"""The jobs of Newton–Schulz in one launch: what they compute in fp64, and that no tile waits for a later one."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from optim_kernels import NSConfig, reference
from optim_kernels._chain_jobs import (
    BLOCK,
    ENTRY_FIELDS,
    JOB_FIELDS,
    Job,
    Kind,
    Scale,
    job_table,
    jobs_of,
    num_squares,
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


@pytest.mark.parametrize(("count", "m", "n"), [(1, 100, 130), (7, 300, 300), (12, 256, 1000), (40, 130, 520)], ids=str)
def test_tiles_cover_every_job_in_an_order_that_never_waits(count: int, m: int, n: int) -> None:
    config = NSConfig()
    jobs = jobs_of(config, m, n)
    entries = tile_list(jobs, count, m, n, num_sms=8)
    assert {len(entry) for entry in entries} == {ENTRY_FIELDS}
    assert len(set(entries)) == len(entries)
    side, length = -(-m // BLOCK), -(-n // BLOCK)
    per_job = [side * length if job.kind is Kind.RECTANGLE else side * (side + 1) // 2 for job in jobs]
    assert len(entries) == count * sum(per_job)
    done = [0] * count
    for number, matrix, row, column, kind, needed, a, b in entries:
        # all that it waits for, and nothing of its own job, stands before it
        assert done[matrix] >= needed == sum(per_job[:number])
        done[matrix] += 1
        assert row % BLOCK == column % BLOCK == 0
        assert row < m
        assert column < (n if kind == Kind.RECTANGLE else m)
        assert kind == jobs[number].kind
        if kind != Kind.GRAM:
            assert a == jobs[number].a * count + matrix
        if kind == Kind.SQUARE:
            assert b == jobs[number].b * count + matrix
    assert done == [sum(per_job)] * count


def test_the_table_names_places_of_the_first_matrix() -> None:
    jobs = jobs_of(NSConfig(method="gram"), 8, 16)
    table = job_table(jobs, 5)
    assert all(len(row) == JOB_FIELDS for row in table)
    for job, (c, d, q, scale, alpha, beta, omega, _) in zip(jobs, table, strict=True):
        step = 1 if job.kind is Kind.RECTANGLE else 5
        assert (c, d, q) == tuple(number if number < 0 else number * step for number in (job.c, job.d, job.q))
        assert (scale, alpha, beta, omega) == (job.scale, job.alpha, job.beta, job.omega)
