"""The standard iteration of large matrices starts in int8 on Hopper: which do, its rounding, products and errors."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hard_matrices import ERRORS, hard_matrices, matrices_of_few_rows
from random_tensors import DEVICE, relative_error
from torch import Tensor

from optim_kernels import NSConfig, TritonMuon, newton_schulz, reference

pytest.importorskip("triton")
from optim_kernels._impl import is_interpreted
from optim_kernels._kernels import int8_rounding
from optim_kernels._kernels.int8_rounding import (
    A_SEED,
    MOST_BOUNDED,
    S_SEED,
    Int8Matrix,
    add_diagonal,
    nbytes_of_int8,
    to_int8,
)
from optim_kernels._newton_schulz import int8_start
from optim_kernels._newton_schulz.config import INT8_SIDE
from optim_kernels._newton_schulz.copy_engine import empty_matrices

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
KELLER = NSConfig().triples
# What results may be off by where few numbers decide about a large singular value, of 256 rows and of thousands. What
# is off is spread over directions that the matrix lacks, and grows with their number; any matrix of rank one is off by
# .15 in fp16, and by 1.1 in bf16.
FEW_ROWS_LIMIT, FEW_OF_MANY_LIMIT = 0.12, 0.25


@pytest.mark.parametrize(
    ("options", "shape", "starts"),
    [
        ({}, (4096, 4096), True),
        ({}, (INT8_SIDE, 4000), True),
        ({}, (INT8_SIDE - 1, 4000), False),
        ({"steps": 3}, (4096, 4096), True),
        ({"steps": 1}, (4096, 4096), False),  # its only step is the last, which a Muon step joins with the update
        ({"steps": 0}, (4096, 4096), False),
        ({"coefficients": (3.4445, -4.775, 2.0315)}, (4096, 4096), True),
        ({"coefficients": [(3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)]}, (4096, 4096), False),
        ({"coefficients": "you"}, (4096, 4096), False),
        ({"method": "standard"}, (4096, 16384), True),
        ({"method": "standard"}, (4096, 2**17 + 1), False),  # sums might leave int32
        ({}, (4096, 16384), False),  # by Gram
        ({"dtype": torch.float16}, (4096, 4096), False),
        ({"dtype": torch.bfloat16}, (4096, 4096), False),
        ({"norm_scale": 1.02}, (4096, 4096), True),
        ({"norm_scale": 0.9}, (4096, 4096), False),
    ],
    ids=str,
)
def test_what_starts_in_int8(options: dict[str, Any], shape: tuple[int, int], starts: bool) -> None:
    assert NSConfig(**options).may_start_in_int8(*shape) is starts
    # elsewhere products have another dtype
    assert not NSConfig(**options).of(torch.empty(1)).may_start_in_int8(*shape)


def wide(x: Int8Matrix, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The matrices that x was rounded to by rows and by columns, on the CPU, in fp64."""
    by_rows = x.by_rows[0].double() * x.row_units.double()[:, None]
    by_columns = scale * (x.by_columns[0].double() * x.column_units.double()[:, None]).mT
    return by_rows.cpu(), by_columns.cpu()


@pytest.mark.slow
@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize("shape", [(40, 70), (33, 300), (1, 1), (5, 129), (130, 2200)], ids=str)
def test_rounding(shape: tuple[int, int], scale: float | None) -> None:
    m, n = shape
    x = torch.randn(1, m, n + 8, generator=torch.Generator().manual_seed(0)).half()[..., :n]
    x[:, 1:2] = 0
    rounded = to_int8(x.to(DEVICE), None if scale is None else torch.tensor([scale], device=DEVICE))
    factor = 1.0 if scale is None else scale
    exact = factor * x[0].double()
    torch.testing.assert_close(rounded.row_units.cpu().double(), exact.abs().amax(1) / 126, rtol=1e-6, atol=0)
    torch.testing.assert_close(rounded.column_units.cpu().double(), exact.abs().amax(0) / 126 / factor)
    torch.testing.assert_close(rounded.a_diagonal.cpu().double(), exact.square().sum(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(rounded.a_roots, rounded.a_diagonal.sqrt())
    assert rounded.a_largest.item() == rounded.a_diagonal.max().item()
    by_rows, by_columns = wide(rounded, factor)
    row_units, column_units = rounded.row_units.cpu()[:, None], factor * rounded.column_units.cpu()
    # what has no digits behind the point, as a row's largest number, is exact
    assert ((by_rows - exact).abs() < 1.0001 * row_units)[exact != 0].all()
    assert ((by_columns - exact).abs() < 1.0001 * column_units)[exact != 0].all()
    assert not rounded.by_rows[0, 1:2].any()
    assert not rounded.by_columns[0, :, 1:2].any()
    assert rounded.by_rows.int().abs().max() == 126
    assert rounded.by_columns.int().abs().max() == 126
    again = to_int8(x.to(DEVICE), None if scale is None else torch.tensor([scale], device=DEVICE))
    assert torch.equal(again.by_rows, rounded.by_rows)
    assert torch.equal(again.by_columns, rounded.by_columns)


@pytest.mark.parametrize(("m", "n"), [(64, 256), (33, 1000)])
def test_all_that_a_matrix_in_int8_takes_is_counted(m: int, n: int) -> None:
    x = to_int8(torch.randn(1, m, n).half().to(DEVICE))
    rooms = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in x}
    assert 0.9 * nbytes_of_int8(m, n) <= sum(rooms.values()) <= nbytes_of_int8(m, n)


@pytest.mark.skipif(not is_interpreted(), reason="of the interpreter")
def test_all_launches_of_a_first_step_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import GridExecutor

    launch, launched = GridExecutor.__call__, []

    def listen(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(self.fn.__name__)
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", listen)
    monkeypatch.setattr(int8_start, "_product", lambda kind, *_: launched.append(str(kind)))
    x, gram = torch.randn(3, 32, 40), torch.empty(1, 32, 32)
    int8_start.first_step(x, KELLER[0], gram, torch.empty_like(x))
    assert len(launched) == 3 * int8_start.STEP_LAUNCHES
    assert len(set(launched)) == int8_start.STEP_LAUNCHES


def bits(m: int, n: int, seed: int) -> Tensor:
    """`random_bits` of a matrix."""
    rows, columns = torch.arange(m) * 0x9E3779B1, torch.arange(n) * 0x85EBCA77 + seed * 0x27D4EB2F
    mixed = (rows[:, None] ^ columns) & 0xFFFFFFFF
    return ((mixed ^ mixed >> 15) * 0x2C1B3C6D) & 0xFFFFFFFF


def rounded_by(x: Tensor, units: Tensor, seed: int) -> Tensor:
    """x rounded by units of its rows, as the products round A and S."""
    inverse = torch.where(units > 0, 1 / torch.where(units > 0, units, 1.0), 0.0)
    fixed = (256 * x * inverse[:, None]).round() + (bits(len(x), x.shape[1], seed) >> 24)
    numbers = (fixed / 256).floor()
    assert numbers.abs().max() <= 127
    return numbers * units[:, None]


def units_of(x: Int8Matrix) -> tuple[Tensor, Tensor]:
    """Those of the rows of A and of S."""
    both = ((x.a_roots, x.a_largest), (x.s_roots, x.s_largest))
    units = [roots.cpu().double() * largest.cpu().double().sqrt() / MOST_BOUNDED.value for roots, largest in both]
    return units[0], units[1]


def test_bits_are_those_of_the_kernels() -> None:
    x = torch.rand(1, 70, 200, generator=torch.Generator().manual_seed(0)).half()
    x[..., 0] = 1
    x[:, 0] = 1
    rounded = to_int8(x.to(DEVICE))
    fixed = (256 * 126 * x[0].double()).round()
    for result, byte in ((rounded.by_rows[0], 3), (rounded.by_columns[0].mT, 2)):
        expected = (fixed + (bits(70, 200, 0) >> 8 * byte & 255)).div(256).floor()
        assert (result.cpu() != expected).double().mean() <= 1e-3  # a product rounded otherwise


@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.5], ids=str)
def test_rounding_points_nowhere(fraction: float) -> None:
    """Equal numbers are right on average, in rows, columns and in all; what is off has no large singular value."""
    m, n = 256, 512
    x = torch.full((1, m, n), fraction / 126).half()
    x[..., 0] = 1  # so a unit is 1/126
    x[:, 0] = 1
    # to 1/256 of a unit
    exact = (256 * 126 * x[0, 1, 1].double()).round() / 256
    deviation = (exact * (1 - exact)) ** 0.5
    ways = []
    kinds = [*wide(to_int8(x.to(DEVICE))), *(rounded_by(x[0].double(), torch.ones(m) / 126, s) for s in (1, 2))]
    for rounded in kinds:
        errors = (126 * rounded - exact)[1:, 1:]
        assert errors.mean().abs() <= 5 * deviation / (m * n) ** 0.5
        assert errors.mean(0).abs().max() <= 5.5 * deviation / m**0.5
        assert errors.mean(1).abs().max() <= 5.5 * deviation / n**0.5
        # of random numbers: 1 ± .03
        assert torch.linalg.matrix_norm(errors, 2) <= 1.1 * (m**0.5 + n**0.5) * deviation
        ways.append(errors.flatten() / deviation)
    correlations = torch.stack(ways) @ torch.stack(ways).mT / (m * n)
    assert (correlations - torch.eye(4)).abs().max() <= 5.5 / (m * n) ** 0.5 + 0.02


@contextmanager
def few_programs() -> Iterator[None]:
    """Tiles as large as matrices that are simulated, for the interpreter, which takes as long for a small one."""
    with pytest.MonkeyPatch.context() as patch:
        if is_interpreted():
            for name in ("ROWS", "COLUMNS", "SIDE", "ADDED"):
                patch.setattr(int8_rounding, name, 256)
        forget_launches()
        yield
    forget_launches()


def forget_launches() -> None:
    int8_rounding._launches.cache_clear()
    int8_rounding._diagonal_launch.cache_clear()


def test_rounding_does_not_depend_on_tiles() -> None:
    x = torch.randn(1, 100, 300, generator=torch.Generator().manual_seed(0)).half().to(DEVICE)
    expected = to_int8(x)
    with few_programs():
        found = to_int8(x)
    assert torch.equal(found.by_rows, expected.by_rows)
    assert torch.equal(found.by_columns, expected.by_columns)
    torch.testing.assert_close(found.a_diagonal, expected.a_diagonal)


def in_fp16(x: Tensor) -> Tensor:
    return x.half().double()


def started_in_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first step in int8, with exact sums, and the result of five; all that is kept is rounded to fp16."""
    y = in_fp16(x / x.norm())
    (a, b, c), *later = KELLER
    with few_programs():
        start = to_int8(y.half()[None].to(DEVICE))
    by_rows, by_columns = wide(start)
    gram = by_rows @ by_rows.mT
    gram.diagonal().copy_(start.a_diagonal.cpu())
    gram = in_fp16(gram)
    parts = torch.stack([part.square().sum(1) for part in gram.split(128, 1)])
    start.partials[: parts.numel()] = parts.flatten().float().to(DEVICE)
    add_diagonal(start, b, c)
    diagonal = start.s_diagonal.cpu().double()
    torch.testing.assert_close(diagonal, b * start.a_diagonal.cpu().double() + c * gram.square().sum(1))
    units, s_units = units_of(start)
    rounded = rounded_by(gram, units, A_SEED.value)
    factor = b * gram + c * rounded @ rounded.mT
    factor.diagonal().copy_(diagonal)
    rounded = rounded_by(in_fp16(factor), s_units, S_SEED.value)
    first = y = in_fp16(a * y + rounded @ by_columns)
    for a, b, c in later:
        gram = in_fp16(y @ y.mT)
        y = in_fp16(a * y + in_fp16(b * gram + c * gram @ gram) @ y)
    return first, y


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(256, 256), (256, 1024)], ids=str)
def test_errors_stay_within_those_of_fp16(shape: tuple[int, int]) -> None:
    for x, limit in zip(hard_matrices(*shape), ERRORS[torch.float16, "standard"]["keller"], strict=True):
        assert relative_error(started_in_int8(x)[1], reference.newton_schulz(x, KELLER)) <= 1.3 * limit


def parallel_rows(m: int, n: int, count: int, share: float, peak: float) -> Tensor:
    """``count`` flat rows with a peak each, and smaller ones in their directions that have 1 - ``share`` of it all."""
    generator = torch.Generator().manual_seed(m)
    flat = torch.linalg.qr(torch.randn(n, count, generator=generator).sign().double())[0].mT
    x = flat[torch.arange(m) % count] * ((1 - share) / share * count / (m - count)) ** 0.5
    x[:count] = flat
    x[torch.arange(count), torch.arange(count)] *= peak
    return x


def spiky_rows(m: int, n: int, count: int, rest: float) -> Tensor:
    """Rows of ±``rest`` units with a 1 each; others are zero."""
    generator = torch.Generator().manual_seed(n)
    x = torch.zeros(m, n).double()
    x[:count] = rest / 126 * torch.randn(count, n, generator=generator).sign()
    x[torch.arange(count), torch.arange(count)] = 1
    return x


def matrices_that_round_badly(m: int, n: int) -> list[Tensor]:
    """Where few rows or equal numbers decide about a large singular value, or a row's largest number hides others."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).double()

    matrices = [*matrices_of_few_rows(m, n)]
    for count in (1, 2, 3, 4):
        # equal rows, and such rows beside one as large as all of them
        same = normal(count, n)[torch.randint(count, (m,), generator=generator)]
        beside = same / m**0.5
        beside[0] = normal(n)
        matrices += [same, beside, *(spiky_rows(m, n, count, rest) for rest in (0.5, 0.1))]
        shares = ((0.5, 1), (0.5, 16), (0.75, 4), (0.75, 16), (0.9, 4), (0.5, 40))
        matrices += [parallel_rows(m, n, count, *each) for each in shares]
    matrices.append(0.51 / 126 + torch.eye(m, n).double())
    # a Cauchy distribution, but for its largest numbers
    return [*matrices, normal(m, n) / normal(m, n).abs().clamp_min(1e-5)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(256, 256), (256, 1024)], ids=str)
def test_no_matrix_grows(shape: tuple[int, int]) -> None:
    """What is 5 % too large after the first step goes beyond all bounds."""
    for x in matrices_that_round_badly(*shape):
        first, result = started_in_int8(x)
        assert torch.linalg.matrix_norm(first, 2) <= 1.225
        assert relative_error(result, reference.newton_schulz(x, KELLER)) <= FEW_ROWS_LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_long_rows_do_not_grow_either(count: int) -> None:
    """What rounding adds to the squares of a row grows with it, but is not part of the diagonal."""
    for rest in (0.5, 0.1):
        x = spiky_rows(8, 2**14, count, rest)
        first, result = started_in_int8(x)
        assert torch.linalg.matrix_norm(first, 2) <= 1.225
        assert relative_error(result, reference.newton_schulz(x, KELLER)) <= FEW_ROWS_LIMIT


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("scale", [None, 0.0625])
@pytest.mark.parametrize(("m", "n"), [(256, 1024), (200, 336), (1000, 1112), (144, 4112)])
def test_products(m: int, n: int, scale: float | None) -> None:
    """Each from what the one before has written."""
    from optim_kernels._newton_schulz.int8_start import _gram, _polynomial, _step

    factor = scale or 1.0
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(1, m, n, generator=generator) * torch.rand(m, 1, generator=generator)
    x = (x / x.norm() / factor).half().cuda()
    sigma = None if scale is None else torch.tensor([scale]).cuda()
    (a, b, c), *_ = KELLER
    start = to_int8(x, sigma)
    by_rows, by_columns = wide(start, factor)
    diagonal = start.a_diagonal.cpu().double()

    room = empty_matrices(1, m, m, like=x).fill_(math.nan)
    numbers = _gram(start, room)[0].cpu().double()
    gram, written = by_rows @ by_rows.mT, room[0].cpu().double()
    gram.diagonal().copy_(diagonal)
    for i in range(0, m, 128):
        torch.testing.assert_close(written[i:, i : i + 128], gram[i:, i : i + 128], rtol=1e-3, atol=1e-7)
        gram[i:, i : i + 128] = written[i:, i : i + 128]
        gram[i : i + 128, i + 128 :] = written[i + 128 :, i : i + 128].mT
    units, _ = units_of(start)
    rounded = numbers * units[:, None]
    # a product rounded otherwise
    assert (rounded - rounded_by(gram, units, A_SEED.value)).ne(0).double().mean() <= 2e-2
    assert (rounded - gram).abs().le(1.01 * units[:, None]).all()

    add_diagonal(start, b, c)
    s_diagonal, (_, units) = start.s_diagonal.cpu().double(), units_of(start)
    torch.testing.assert_close(s_diagonal, b * diagonal + c * gram.square().sum(1), rtol=1e-5, atol=1e-9)
    most = s_diagonal.abs().max()
    torch.testing.assert_close(units, (s_diagonal.abs() * most).sqrt() / MOST_BOUNDED.value, rtol=1e-5, atol=0)
    numbers8 = _polynomial(start, room, _gram(start, room), b, c)
    polynomial = b * gram + c * rounded @ rounded.mT
    polynomial.diagonal().copy_(s_diagonal)
    rounded = numbers8[0].cpu().double() * units[:, None]
    # rounded to 16 bits before
    assert (rounded - polynomial).abs().le(1.01 * units[:, None] + 1e-3 * polynomial.abs() + 1e-7).all()
    assert (rounded - rounded_by(in_fp16(polynomial), units, S_SEED.value)).ne(0).double().mean() <= 2e-2

    out = torch.empty_like(x)
    _step(start, numbers8, x, a, out, sigma)
    expected = a * factor * x[0].cpu().double() + rounded @ by_columns
    torch.testing.assert_close(out[0].cpu().double(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.gpu
@on_hopper
def test_large_matrices_are_as_exact_as_in_fp16() -> None:
    m, n = INT8_SIDE, 3840
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device="cuda", generator=generator)

    u, v = torch.linalg.qr(normal(m, m))[0], torch.linalg.qr(normal(n, m))[0]
    i = torch.arange(1.0, m + 1, dtype=torch.float64, device="cuda")
    low_rank = normal(m, 8) @ normal(8, n) / 8 + 1e-5 * normal(m, n)
    for x in (normal(m, n), u / i @ v.mT, u / i**2 @ v.mT, low_rank, u * torch.logspace(0, -6, m).to(i) @ v.mT):
        expected = reference.newton_schulz(x, KELLER)
        in_fp16 = relative_error(newton_schulz(x.float(), compute_dtype=torch.float16), expected)
        for given in (x.float(), x.half() if x is low_rank else x.float().mT.contiguous().mT):
            assert relative_error(newton_schulz(given), expected) <= 1.3 * in_fp16


@pytest.mark.gpu
@on_hopper
def test_no_large_matrix_grows() -> None:
    for x in matrices_that_round_badly(INT8_SIDE, 3840):
        on_gpu = x.cuda()
        expected = reference.newton_schulz(on_gpu, KELLER)
        assert relative_error(newton_schulz(on_gpu.float()), expected) <= FEW_OF_MANY_LIMIT


@pytest.mark.gpu
@on_hopper
def test_a_plan_that_starts_in_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bits come again, alone and in a graph; a NaN stays in its matrix, zero stays zero; a dtype opts out."""
    from optim_kernels._newton_schulz import job_launches

    steps: list[tuple[int, ...]] = []
    first_step = job_launches.first_step

    def counted(x: Tensor, *more: Any) -> None:
        steps.append(tuple(x.shape))
        first_step(x, *more)

    monkeypatch.setattr(job_launches, "first_step", counted)
    x = torch.randn(3, 3840, 3584, device="cuda", dtype=torch.float16)
    x[1] = 0
    given = x.clone()
    result = newton_schulz(x)
    assert steps == [(3, 3584, 3840)]
    assert torch.equal(x, given)
    assert not torch.equal(result, newton_schulz(x, compute_dtype=torch.float16))
    assert len(steps) == 1
    assert not result[1].any()
    assert torch.equal(newton_schulz(x), result)
    assert torch.equal(newton_schulz(x[2]), result[2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = newton_schulz(x)
    graph.replay()
    assert torch.equal(captured, result)
    for bad in (math.nan, math.inf):
        x[0, 7, 9] = bad
        with_bad = newton_schulz(x)
        assert with_bad[0].isnan().all()
        assert torch.equal(with_bad[1:], result[1:])


@pytest.mark.gpu
@on_hopper
def test_a_muon_step_starts_in_int8() -> None:
    """Of each matrix alike, whatever others there are; the first momentum's orthogonal factor is `newton_schulz`'s."""
    shapes = [(3584, 3584), (3584, 4096), (4096, 3584), (256, 512)]
    generator = torch.Generator("cuda").manual_seed(0)
    grads = [torch.randn(shape, device="cuda", generator=generator) for shape in shapes]

    def stepped(which: list[int], **others: Any) -> tuple[TritonMuon, list[Tensor]]:
        params = [torch.nn.Parameter(torch.zeros(shapes[i], device="cuda")) for i in which]
        for param, i in zip(params, which, strict=True):
            param.grad = grads[i].clone()
        optimizer = TritonMuon(params, lr=1.0, weight_decay=0.0, adjust_lr_fn="original", **others)
        optimizer.step()
        return optimizer, [param.detach() for param in params]

    optimizer, results = stepped([0, 1, 2, 3])
    assert optimizer.explain().count("first step in int8") == 3
    for i, result in enumerate(results[:3]):
        assert torch.equal(stepped([i])[1][0], result)
        lr = max(1.0, shapes[i][0] / shapes[i][1]) ** 0.5
        assert relative_error(-result / lr, newton_schulz(grads[i]).double()) <= 2e-3
    in_fp16, _ = stepped([0, 1, 2, 3], ns_dtype=torch.float16)
    assert "int8" not in in_fp16.explain()
