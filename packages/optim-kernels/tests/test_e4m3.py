"""The standard iteration of large matrices begins in e4m3: which do, its rounding, its products, its errors."""

import math

import pytest
import torch
from hard_matrices import ERRORS, hard_matrices
from random_tensors import DEVICE, relative_error
from torch import Tensor

from optim_kernels import NSConfig, newton_schulz, reference

pytest.importorskip("triton")
from optim_kernels._kernels.e4m3 import E4M3, UNITS, to_e4m3
from optim_kernels._newton_schulz import e4m3_steps

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
KELLER = NSConfig().triples


@pytest.mark.parametrize(
    ("options", "shape", "begins"),
    [
        ({}, (4096, 4096), True),
        ({}, (4096, 6000), True),
        ({"coefficients": (3.4445, -4.775, 2.0315)}, (4096, 4096), True),
        ({"method": "standard"}, (4096, 16384), True),
        ({}, (4096, 16384), False),  # by Gram
        ({}, (2047, 2047), False),
        ({"dtype": torch.float16}, (4096, 4096), False),
        ({"dtype": torch.bfloat16}, (4096, 4096), False),
        ({"coefficients": "you"}, (4096, 4096), False),
        ({"coefficients": "polar_express", "norm_scale": 1.02}, (4096, 4096), False),
        ({"steps": 4}, (4096, 4096), False),
        ({"steps": 6}, (4096, 4096), False),
        ({"norm_scale": 0.9}, (4096, 4096), False),
    ],
)
def test_who_may_begin_in_e4m3(options: dict, shape: tuple[int, int], begins: bool) -> None:  # type: ignore[type-arg]
    x = torch.empty(1, dtype=torch.float16)
    config = NSConfig(**options).of(x)
    on_cuda = config if config.dtype != torch.float32 else NSConfig(**options, dtype=torch.float16, dtype_is_open=True)
    assert on_cuda.may_start_in_e4m3(*shape) is begins
    assert not config.may_start_in_e4m3(*shape) or config.dtype == torch.float16


def in_e4m3(x: Tensor, units: float) -> Tensor:
    assert (units * x).abs().max() <= torch.finfo(E4M3).max
    return (units * x).float().to(E4M3).double() / units


def in_fp16(x: Tensor) -> Tensor:
    return x.half().double()


@pytest.mark.parametrize("shape", [(256, 256), (256, 1024)], ids=str)
def test_errors_of_the_rounding_stay_within_those_of_fp16(shape: tuple[int, int]) -> None:
    """With exact sums, for all that is rounded in between; those of the kernels are in tests on a GPU."""
    for x, limit in zip(hard_matrices(*shape), ERRORS[torch.float16, "standard"]["keller"], strict=True):
        y = in_fp16(x / x.norm())
        for step, (a, b, c) in enumerate(KELLER):
            if step == 0:
                narrow = in_e4m3(y, UNITS)
                gram = in_e4m3(narrow @ narrow.mT, UNITS)
                factor = in_e4m3(b * gram + c * gram @ gram, e4m3_steps.S_UNITS)
                y = in_fp16(a * y + factor @ narrow)
            else:
                gram = in_fp16(y @ y.mT)
                squared = in_e4m3(gram, UNITS) if step == 1 else gram
                y = in_fp16(a * y + in_fp16(b * gram + c * squared @ squared) @ y)
        assert relative_error(y, reference.newton_schulz(x, KELLER)) <= 1.3 * limit


@pytest.mark.parametrize("shape", [(1, 64, 128), (3, 70, 200), (2, 1, 9), (1, 130, 1)], ids=str)
@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_matrix_in_e4m3_and_its_transpose(shape: tuple[int, ...], is_scaled: bool) -> None:
    x = torch.randn(shape, device=DEVICE) / math.prod(shape[1:]) ** 0.5
    # the interpreter does not round to the nearest, and takes NaN for a number
    is_compiled = DEVICE == "cuda"
    if is_compiled:
        x[0, 0, 0] = math.nan
    else:
        x = (UNITS * x).to(E4M3).float() / UNITS
    x = x.half()
    scale = 2.0 ** torch.arange(shape[0], device=DEVICE) if is_scaled else None
    narrow, transposed = to_e4m3(x, scale, with_transposed=True)
    wide = UNITS * x.float() * (1.0 if scale is None else scale[:, None, None])
    torch.testing.assert_close(narrow.float(), wide.to(E4M3).float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(transposed.mT.contiguous().view(torch.uint8), narrow.contiguous().view(torch.uint8))


def random_e4m3(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(E4M3)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("batch", "m", "n", "k"), [(1, 256, 512, 1024), (3, 200, 336, 144), (2, 48, 1040, 4112)])
def test_a_product(batch: int, m: int, n: int, k: int) -> None:
    from optim_kernels._hopper.e4m3_kernel import e4m3_product

    a, b, c = random_e4m3(batch, m, k), random_e4m3(batch, n, k), torch.randn(batch, m, n, device="cuda").half()
    scale = torch.linspace(0.5, 2.0, batch, device="cuda")
    out = torch.empty_like(c)
    e4m3_product(a, b, out, alpha=0.02, c=c, beta=3.0, scale=scale, programs=132)
    expected = 0.02 * a.double() @ b.double().mT + 3.0 * scale[:, None, None].double() * c.double()
    assert relative_error(out, expected) <= 1e-3


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, E4M3], ids=str)
@pytest.mark.parametrize(("batch", "m", "k"), [(1, 1024, 1024), (3, 208, 336), (1, 2064, 4112)])
def test_a_symmetric_product(batch: int, m: int, k: int, dtype: torch.dtype) -> None:
    from optim_kernels._hopper.e4m3_kernel import e4m3_product

    a, c = random_e4m3(batch, m, k), torch.randn(batch, m, m, device="cuda")
    c = (c + c.mT).to(dtype)
    out = torch.empty_like(c)
    e4m3_product(a, None, out, alpha=0.02, c=c, beta=0.5, programs=132)
    expected = 0.02 * a.double() @ a.double().mT + 0.5 * c.double()
    bits = out.view(torch.int16 if dtype == torch.float16 else torch.uint8)
    assert torch.equal(bits, bits.mT.contiguous())
    assert relative_error(out, expected) <= (1e-3 if dtype == torch.float16 else 3e-2)


@pytest.mark.gpu
@on_hopper
def test_large_matrices_are_as_exact_as_with_fp16() -> None:
    m, n = 3840, 4224
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device="cuda", generator=generator)

    u, v = torch.linalg.qr(normal(m, m))[0], torch.linalg.qr(normal(n, m))[0]
    i = torch.arange(1.0, m + 1, dtype=torch.float64, device="cuda")
    low_rank = normal(m, 8) @ normal(8, n) / 8 + 1e-5 * normal(m, n)
    for x in (normal(m, n), u / i @ v.mT, u / i**2 @ v.mT, low_rank, u * torch.logspace(0, -6, m).to(i) @ v.mT):
        expected = reference.newton_schulz(x, KELLER)
        by_fp16 = relative_error(newton_schulz(x.float(), compute_dtype=torch.float16), expected)
        for given in (x.float(), x.half() if x is low_rank else x.float().mT.contiguous().mT):
            assert relative_error(newton_schulz(given), expected) <= 1.3 * by_fp16


@pytest.mark.gpu
@on_hopper
def test_a_plan_in_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken; its bits come again, in a graph too; a NaN stays in its matrix; a zero matrix stays zero."""
    from optim_kernels._newton_schulz import plan

    steps: list[tuple[int, ...]] = []
    first_step = plan.first_step
    monkeypatch.setattr(plan, "first_step", lambda x, *more: (steps.append(tuple(x.shape)), first_step(x, *more))[1])
    x = torch.randn(3, 3072, 2944, device="cuda", dtype=torch.float16)
    x[1] = 0
    result = newton_schulz(x)
    assert steps == [(3, 2944, 3072)]
    assert not torch.equal(result, newton_schulz(x, compute_dtype=torch.float16))
    assert len(steps) == 1
    assert not result[1].any()
    assert torch.equal(newton_schulz(x), result)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = newton_schulz(x)
    graph.replay()
    assert torch.equal(captured, result)
    x[0, 7, 9] = math.nan
    with_nan = newton_schulz(x)
    assert with_nan[0].isnan().all()
    assert torch.equal(with_nan[1:], result[1:])
