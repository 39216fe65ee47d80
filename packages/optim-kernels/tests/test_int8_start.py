"""The standard iteration of large matrices starts in int8 on Hopper: which do, its rounding, products and errors."""

import math
from typing import Any

import pytest
import torch
from hard_matrices import ERRORS, hard_matrices, matrices_of_few_rows
from random_tensors import DEVICE, relative_error
from torch import Tensor

from optim_kernels import NSConfig, TritonMuon, newton_schulz, reference

pytest.importorskip("triton")
from optim_kernels._kernels import int8_rows
from optim_kernels._kernels.int8_rows import Int8Rows, to_int8, transposed
from optim_kernels._newton_schulz.config import INT8_SIDE

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


def wide(x: Int8Rows) -> Tensor:
    """The matrix that was rounded to this one."""
    return x.units.double()[..., None] * x.numbers.double()


@pytest.mark.parametrize("numbers", [8192, 128], ids=["whole rows", "parts of rows"])
@pytest.mark.parametrize("shape", [(2, 40, 70), (1, 33, 300), (1, 1, 1), (3, 5, 129)], ids=str)
def test_rounding(shape: tuple[int, ...], numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_rows, "NUMBERS", numbers)
    int8_rows._launch.cache_clear()
    batch, m, n = shape
    x = torch.randn(batch, m, n + 8, generator=torch.Generator().manual_seed(0)).half()[..., :n].to(DEVICE)
    x[:, 1:2] = 0
    rounded, other = to_int8(x, 0), to_int8(x, 1)
    int8_rows._launch.cache_clear()
    torch.testing.assert_close(rounded.units, x.float().abs().amax(-1) / 126)
    torch.testing.assert_close(rounded.squares, x.double().square().sum(-1).float())
    assert rounded.numbers.int().abs().max() in (126, 127)
    assert ((wide(rounded) - x.double()).abs() <= 1.00001 * rounded.units[..., None]).all()
    assert not rounded.numbers[:, 1:2].any()
    assert x.numel() == 1 or not torch.equal(rounded.numbers, other.numbers)
    assert torch.equal(transposed(x), x.mT)
    # a matrix is rounded alike wherever it lies
    assert torch.equal(to_int8(x[-1:].clone(), 0).numbers[0], rounded.numbers[-1])


@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.5], ids=str)
def test_rounding_points_nowhere(fraction: float) -> None:
    """Equal numbers are right on average, in rows, columns and in all; what is off has no large singular value."""
    m, n = 256, 512
    x = torch.full((1, m, n), fraction / 126).half()
    x[..., 0] = 1  # so a unit is 1/126
    exact = 126 * x[0, 0, 1].double()
    deviation = (exact * (1 - exact)) ** 0.5
    by_seed = []
    for seed in range(4):
        errors = (126 * (wide(to_int8(x.to(DEVICE), seed)).cpu() - x.double()))[0, :, 1:]
        assert errors.mean().abs() <= 5 * deviation / (m * n) ** 0.5
        assert errors.mean(0).abs().max() <= 5.5 * deviation / m**0.5
        assert errors.mean(1).abs().max() <= 5.5 * deviation / n**0.5
        # of random numbers: 1 ± .03
        assert torch.linalg.matrix_norm(errors, 2) <= 1.1 * (m**0.5 + n**0.5) * deviation
        by_seed.append(errors.flatten() / deviation)
    correlations = torch.stack(by_seed) @ torch.stack(by_seed).mT / (m * n)
    assert (correlations - torch.eye(4)).abs().max() <= 5.5 / (m * n) ** 0.5 + 0.02


def in_fp16(x: Tensor) -> Tensor:
    return x.half().double()


def squared(x: Tensor, seed: int) -> Tensor:
    """x xᵀ as the first step has it."""
    rounded = to_int8(x.half()[None].to(DEVICE), seed)
    product = (wide(rounded) @ wide(rounded).mT)[0]
    product.diagonal().copy_(rounded.squares[0])
    return product.cpu()


def started_in_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first step in int8, with exact sums, and the result of five; all that is kept is rounded to fp16."""
    y = in_fp16(x / x.norm())
    (a, b, c), *later = KELLER
    gram = in_fp16(squared(y, 0))
    factor = in_fp16(b * gram + c * squared(gram, 1))
    left, right = (to_int8(z.half()[None].to(DEVICE), seed) for z, seed in ((factor, 2), (y.mT.contiguous(), 3)))
    first = y = in_fp16(a * y + (wide(left) @ wide(right).mT)[0].cpu())
    for a, b, c in later:
        gram = in_fp16(y @ y.mT)
        y = in_fp16(a * y + in_fp16(b * gram + c * gram @ gram) @ y)
    return first, y


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

    matrices = matrices_of_few_rows(m, n)
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


@pytest.mark.parametrize("shape", [(256, 256), (256, 1024)], ids=str)
def test_no_matrix_grows(shape: tuple[int, int]) -> None:
    """What is 5 % too large after the first step goes beyond all bounds."""
    for x in matrices_that_round_badly(*shape):
        first, result = started_in_int8(x)
        assert torch.linalg.matrix_norm(first, 2) <= 1.225
        assert relative_error(result, reference.newton_schulz(x, KELLER)) <= FEW_ROWS_LIMIT


@pytest.mark.parametrize("count", [1, 3])
def test_long_rows_do_not_grow_either(count: int) -> None:
    """What rounding adds to the squares of a row grows with it, but is not part of the diagonal."""
    for rest in (0.5, 0.1):
        x = spiky_rows(8, 2**14, count, rest)
        first, result = started_in_int8(x)
        assert torch.linalg.matrix_norm(first, 2) <= 1.225
        assert relative_error(result, reference.newton_schulz(x, KELLER)) <= FEW_ROWS_LIMIT


def random_int8(*shape: int) -> Int8Rows:
    numbers = torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")
    units, squares = torch.rand(2, *shape[:-1], device="cuda") / 127
    return Int8Rows(numbers, units, squares)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("batch", "m", "n", "k"), [(1, 256, 512, 1024), (3, 200, 336, 144), (2, 48, 1040, 4112)])
def test_products(batch: int, m: int, n: int, k: int) -> None:
    from optim_kernels._newton_schulz.int8_start import _symmetric
    from optim_kernels._newton_schulz.product_launches import ping_pong
    from optim_kernels._newton_schulz.tiles import PING_PONG_INT8

    a, b, scale = random_int8(batch, m, k), random_int8(batch, n, k), torch.linspace(0.5, 2.0, batch, device="cuda")
    c = torch.randn(batch, m, n, device="cuda").half()
    out = torch.empty_like(c)
    numbers = (0.02, 3.0, 0.0)
    of_int8 = a.units, b.units, a.squares
    ping_pong(a.numbers, b.numbers, c, out, None, scale, PING_PONG_INT8, numbers, is_symmetric=False, int8=of_int8)
    expected = 0.02 * wide(a) @ wide(b).mT + 3.0 * c.double()
    torch.testing.assert_close(out.double(), scale.double()[:, None, None] * expected, rtol=1e-3, atol=1e-3)
    c = torch.randn(batch, m, m, device="cuda")
    c = (c + c.mT).half()
    out = torch.empty_like(c)
    _symmetric(a, out, alpha=0.5, c=c, beta=2.0, scale=scale)
    product = wide(a) @ wide(a).mT
    product.diagonal(dim1=1, dim2=2).copy_(a.squares)
    expected = scale.double()[:, None, None] * (0.5 * product + 2.0 * c.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(out, out.mT)


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
    from optim_kernels._newton_schulz import plan

    steps: list[tuple[int, ...]] = []
    first_step = plan.first_step
    monkeypatch.setattr(plan, "first_step", lambda x, *more: (steps.append(tuple(x.shape)), first_step(x, *more))[1])
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
