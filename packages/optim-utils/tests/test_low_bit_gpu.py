"""Low-bit formats and stochastic rounding on a GPU: the bits of the CPU, one compiled kernel, and captured graphs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optim_utils import (
    DYNAMIC8,
    INT4,
    INT8,
    MOMENT8,
    NF4,
    DequantizeQuantizedTensorListContext,
    LowBitFormat,
    QuantizedTensorList,
    dequantize,
    low_bit,
    quantize,
    stochastic_round,
)

pytestmark = pytest.mark.gpu

PRESETS = {name: getattr(low_bit, name) for name in low_bit.__all__ if isinstance(getattr(low_bit, name), LowBitFormat)}
every_preset = pytest.mark.parametrize("fmt", PRESETS.values(), ids=PRESETS)


def numbers(fmt: LowBitFormat, *shape: int) -> Tensor:
    """Numbers over many decades, zeros among them, and the first block all zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    x.view(-1)[::11] = 0
    x.view(-1)[: fmt.block_size] = 0
    return x.abs() if fmt.unsigned else x


def parts(t: low_bit.LowBitTensor) -> list[Tensor]:
    return [part.cpu() for part in t.parts if part is not None]


@every_preset
@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("seed", [None, 5], ids=["nearest", "seeded"])
def test_codes_scales_and_numbers_are_those_of_the_cpu(fmt: LowBitFormat, layout: str, seed: int | None) -> None:
    fmt = fmt.with_(layout=layout)
    x = numbers(fmt, 37, 1001)
    here = quantize(x, fmt, stochastic=seed is not None, seed=seed)
    there = quantize(x.cuda(), fmt, stochastic=seed is not None, seed=seed)
    assert all(map(torch.equal, parts(here), parts(there)))
    assert torch.equal(dequantize(here.to("cuda")).cpu(), dequantize(here))
    assert torch.equal(dequantize(there).cpu(), dequantize(here))


@pytest.mark.parametrize("fmt", [INT8, MOMENT8, NF4], ids=["INT8", "MOMENT8", "NF4"])
def test_compiled_codes_differ_by_the_last_bit_of_a_division_at_most(fmt: LowBitFormat) -> None:
    x = numbers(fmt, 1 << 20).cuda()
    here = quantize(x, fmt)
    encode = torch.compile(lambda x: quantize(x, fmt), fullgraph=True)
    decode = torch.compile(lambda q: dequantize(q), fullgraph=True)
    # one division of 2 ulp a block: numbers within as little of the middle of two codes
    assert (encode(x).codes != here.codes).double().mean().item() <= 2e-5
    torch.testing.assert_close(encode(x).scale, here.scale, rtol=1e-6, atol=0)
    torch.testing.assert_close(decode(here), dequantize(here), rtol=1e-6, atol=0)


def replayed(call: Callable[[], Tensor], times: int) -> list[Tensor]:
    """Results of a captured call, one for each replay."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    results = []
    for _ in range(times):
        graph.replay()
        results.append(result.clone())
    return results


@pytest.mark.parametrize("fmt", [INT8, DYNAMIC8, MOMENT8, INT4], ids=["INT8", "DYNAMIC8", "MOMENT8", "INT4"])
def test_stochastic_codes_can_be_captured_and_average_to_the_numbers(fmt: LowBitFormat) -> None:
    x = torch.rand(256, device="cuda") + 0.01
    decoded = replayed(lambda: dequantize(quantize(x, fmt, stochastic=True)), 400)
    assert not torch.equal(decoded[0], decoded[1])
    every = torch.stack(decoded).double()
    # where roots are stored, it is the root that is unbiased
    every, x = (every.sqrt(), x.sqrt()) if fmt.companding == "sqrt" else (every, x)
    error, variance = every.mean(0) - x, every.var(0) / len(every)
    assert abs(error.sum().item()) <= 6 * variance.sum().sqrt().item()


@pytest.mark.parametrize("seed", [None, 3], ids=["default", "seeded"])
def test_rounding_can_be_captured(seed: int | None) -> None:
    x = torch.full((1 << 16,), 1 + 2.0**-10, device="cuda")
    first, second = replayed(lambda: stochastic_round(x, torch.bfloat16, seed=seed), 2)
    assert torch.equal(first, second) is (seed is not None)
    for rounded in (first, second):
        assert abs(rounded.double().mean().item() - (1 + 2.0**-10)) <= 5 * 2.0**-8 / 256


def test_seeded_rounding_compiled_is_that_of_the_cpu() -> None:
    x = torch.randn(100_003)
    compiled = torch.compile(lambda x, seed: stochastic_round(x, torch.bfloat16, seed=seed), fullgraph=True)
    assert torch.equal(
        compiled(x.cuda(), torch.tensor(9, device="cuda")).cpu(), stochastic_round(x, torch.bfloat16, seed=9)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, DYNAMIC8, INT4], ids=["bf16", "DYNAMIC8", "INT4"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_step_inside_the_context_can_be_captured(dtype: torch.dtype | LowBitFormat, rounding: str) -> None:
    values = [torch.ones(64, 64, device="cuda") * i for i in range(1, 6)]
    stored = QuantizedTensorList([(value, None, None) for value in values], dtype, rounding=rounding)

    def step() -> Tensor:
        with DequantizeQuantizedTensorListContext(stored) as tensors:
            torch._foreach_mul_(list(tensors), 2)
        return stored.dequantize()[0]

    last = replayed(step, 3)[-1]
    # one call before the capture, three replays; the capture itself runs nothing
    torch.testing.assert_close(last, values[0] * 16, rtol=1e-6, atol=0)
