"""AdamW with 8-bit moments: the kernels write the bytes that ``optim_utils.low_bit`` would, and train as fp32 does."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from random_tensors import DEVICE, NUMPY_MAY_WARN
from torch import Tensor

from optim_kernels import TritonAdamW
from optim_kernels._kernels import moment_codes, moment_scales
from optim_kernels._kernels.approximations import power_approx
from optim_kernels._kernels.moment_codes import LOWER
from optim_kernels._optimizers.adamw_codes import encoded
from optim_kernels._triton import FUSED, tl, triton
from optim_kernels.adamw_groups import init_state
from optim_kernels.functional import _adamw_launch, _adamw_tuning, adamw_
from optim_kernels.functional._adamw_tensor import CODE_BLOCK
from optim_kernels.functional._adamw_tuning import IN_LISTS, OF_ONE, OneWarp, Tuning, code_chunks, division_of_one
from optim_utils.low_bit import (
    CUBIC8,
    DYNAMIC8,
    OCTAL8,
    OCTAL_MOMENT8,
    QUINTIC8_UNSIGNED,
    LowBitFormat,
    LowBitTensor,
    dequantize,
    quantize,
    to_plain,
)

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def same_bytes(found: Tensor, expected: LowBitTensor) -> None:
    assert isinstance(found, LowBitTensor)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scale, expected.scale)


def same_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(found[key].codes, expected[key].codes)
        assert torch.equal(found[key].scale.view(torch.int32), expected[key].scale.view(torch.int32))


def moments(shape: tuple[int, ...], scale: float, generator: torch.Generator) -> tuple[LowBitTensor, LowBitTensor]:
    """First and second moments of gradients of about that size, spread over some decades, with zeros among them."""
    first = torch.randn(shape, generator=generator) * scale
    second = first.square() * torch.exp(2 * torch.randn(shape, generator=generator))
    zero = torch.rand(shape, generator=generator) < 0.05
    first, second = (torch.where(zero, 0.0, each).to(DEVICE) for each in (first, second))
    return quantize(first, CUBIC8), quantize(second, QUINTIC8_UNSIGNED)


@pytest.mark.slow
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1e-14], ids=str)
def test_the_bytes_are_those_of_the_formats(dtype: torch.dtype, offset: int, amsgrad: bool, scale: float) -> None:
    """A step on codes, against a step on fp32 moments that starts from what they stand for and is then encoded."""
    generator = torch.Generator().manual_seed(int(offset))
    shapes = [(90, 47), (256,), (255,), (0,)]
    params = [torch.randn(torch.Size(s).numel() + offset, generator=generator).to(DEVICE, dtype) for s in shapes]
    params = [p[offset:].view(s) for p, s in zip(params, shapes)]
    grads = [(torch.randn(s, generator=generator) * scale).to(DEVICE) for s in shapes]
    firsts, seconds = map(list, zip(*[moments(s, scale, generator) for s in shapes]))
    largest = [dequantize(v) * 0.9 for v in seconds] if amsgrad else None
    exact: dict[str, Any] = {
        "params": [p.clone() for p in params],
        "exp_avgs": [dequantize(m) for m in firsts],
        "exp_avg_sqs": [dequantize(v) for v in seconds],
        "max_exp_avg_sqs": None if largest is None else [w.clone() for w in largest],
    }
    steps = [torch.tensor(3.0, device=DEVICE) for _ in range(2)]
    adamw_(params, grads, firsts, seconds, max_exp_avg_sqs=largest, steps=steps[0], impl="triton", **OPTIONS)
    adamw_(grads=grads, steps=steps[1], impl="triton", **exact, **OPTIONS)
    for i in range(len(shapes)):
        assert torch.equal(params[i], exact["params"][i])
        same_bytes(firsts[i], quantize(exact["exp_avgs"][i], CUBIC8))
        same_bytes(seconds[i], quantize(exact["exp_avg_sqs"][i], QUINTIC8_UNSIGNED))
        if largest is not None:
            assert torch.equal(largest[i], exact["max_exp_avg_sqs"][i])


@pytest.mark.slow
def test_the_bytes_at_the_edges_of_the_codes() -> None:
    """First moments on the edge between two codes, and one number above and below it: with betas of 0 they are g."""
    edges = ((2 * torch.arange(127) + 1) / 256) ** 3
    zeros, ones = torch.zeros(127), torch.ones(127)
    near = torch.stack([edges.nextafter(zeros), edges, edges.nextafter(ones), -edges, -edges.nextafter(zeros)])
    # the largest code is in every block of 256, so that a scale is 1
    grad = torch.cat([torch.full((5, 1), 127.0**3 / 2**21), near], dim=1).repeat_interleave(2, dim=1).flatten()
    grad = grad.repeat(16)[: 80 * 256].to(DEVICE)
    param, first, second = (torch.zeros_like(grad) for _ in range(3))
    moments = [quantize(first, CUBIC8)], [quantize(second, QUINTIC8_UNSIGNED)]
    steps = torch.zeros((), device=DEVICE)
    adamw_([param], [grad], *moments, steps=steps, impl="triton", **OPTIONS | {"betas": (0.0, 0.0)})
    same_bytes(moments[0][0], quantize(grad, CUBIC8))
    same_bytes(moments[1][0], quantize(grad * grad, QUINTIC8_UNSIGNED))


@NUMPY_MAY_WARN
def test_the_bytes_of_blocks_of_any_magnitude() -> None:
    """From subnormal ones to the largest, with zeros among them and blocks of zeros; with betas of 0 moments are g."""
    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(96, 256, generator=generator)
    exponents = torch.linspace(-149, 127, 96).round()[:, None].double()
    grad = (grad.double() / grad.abs().amax(dim=1, keepdim=True) * 2.0**exponents).float()
    grad[:, ::17] = 0
    grad[::8] = 0
    grad[:, 100] *= 2.0**-20
    grad = grad.flatten().to(DEVICE)
    param, first, second = (torch.zeros_like(grad) for _ in range(3))
    moments = [quantize(first, CUBIC8)], [quantize(second, QUINTIC8_UNSIGNED)]
    steps = torch.zeros((), device=DEVICE)
    adamw_([param], [grad], *moments, steps=steps, impl="triton", **OPTIONS | {"betas": (0.0, 0.0)})
    for found, exact, fmt in zip(moments, (grad, grad * grad), (CUBIC8, QUINTIC8_UNSIGNED)):
        expected = quantize(exact, fmt)
        assert torch.equal(found[0].scale.nan_to_num(-1), expected.scale.nan_to_num(-1))
        finite = expected.scale.isfinite().repeat_interleave(256)
        assert torch.equal(found[0].codes[finite], expected.codes[finite])


@triton.jit
def _roots_kernel(numbers, roots, power: tl.constexpr, SIZE: tl.constexpr):
    lanes = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(roots + lanes, power_approx(tl.load(numbers + lanes) * (1.0 - power * LOWER), 1 / power))


@pytest.mark.gpu
@pytest.mark.parametrize(("power", "first_exponent"), [(3, -24), (5, -45)])
def test_roots_are_between_their_estimates(power: int, first_exponent: int) -> None:
    """Of all fp32 numbers up to 1, from the edge of the first code on: an estimate is too low, a wider one too high."""
    wider: float = moment_codes.WIDER.value
    for exponent in range(first_exponent, 0):
        patterns = torch.arange((127 + exponent) << 23, (128 + exponent) << 23, dtype=torch.int32, device="cuda")
        numbers = patterns.view(torch.float32)
        roots = torch.empty_like(numbers)
        _roots_kernel[(len(numbers) // 1024,)](numbers, roots, power, 1024, **FUSED)
        ratio = roots.double() / numbers.double() ** (1 / power)
        # of a number that is rounded once here, in a block twice after a reciprocal, and otherwise by the format
        other = 5.4e-7 / power
        assert ratio.max() + other < 1 < (ratio.min() - other) * wider, (exponent, ratio.min() - 1, ratio.max() - 1)


def test_a_warp_holds_the_scales_of_a_chunk() -> None:
    """And the chunks of a list go from few blocks at its front, whose programs come last, to as many as that."""
    assert int(moment_scales.MOST_BLOCKS) >= max(kind.most_blocks for kind in (IN_LISTS, *OF_ONE))
    sizes = code_chunks(132)
    assert [each.size for each in sizes] == sorted(each.size for each in sizes)
    assert sizes[-1].size <= int(moment_scales.MOST_BLOCKS) * CODE_BLOCK
    assert sizes[-1].extent is None
    assert all(each.extent is not None and each.extent % each.size == 0 for each in sizes[:-1])


def test_programs_share_a_lone_tensor_equally() -> None:
    tuned = Tuning(0, CODE_BLOCK, CODE_BLOCK, 1)
    numels = 256, 257, 4096, 10**4, 10**5, 1 << 20, 4 << 20, (4 << 20) + 255
    for multiprocessors, numel in itertools.product((1, 7, 132), numels):
        shared = division_of_one(numel, True, tuned, multiprocessors)
        assert division_of_one(numel, False, tuned, multiprocessors) is None
        blocks = numel // CODE_BLOCK
        held = [kind.programs * multiprocessors for kind in OF_ONE]
        fitting = [most for most, kind in zip(held, OF_ONE, strict=True) if blocks <= most * kind.most_blocks]
        if not fitting:
            assert shared is None
            continue
        assert shared is not None
        most = fitting[0]
        programs, least = shared
        programs -= numel % CODE_BLOCK > 0
        assert programs == (-(-blocks // 2) if 1 < blocks / most <= 2 else min(blocks, most))
        assert programs * least <= blocks < programs * (least + 1)
    assert division_of_one(255, True, tuned, 132) is None


def test_programs_without_codes_have_chunks_of_one_size() -> None:
    """Which are full where they may be read 16 bytes at a time; one program counts the steps of no elements."""
    tuned = Tuning(1024, 1024, 1024, 4)
    assert division_of_one(5000, True, tuned, 132) == (5, 4)
    assert division_of_one(5000, False, tuned, 132) == (5, 0)
    assert division_of_one(4096, True, tuned, 132) == (4, 4)
    assert division_of_one(0, True, tuned, 132) == (1, 0)


@pytest.mark.slow
@NUMPY_MAY_WARN
@pytest.mark.parametrize("programs", [1, 3, 28, 48])
@pytest.mark.parametrize("numel", [4096, 4097, 5000, 7168, 8191, 12000])  # the last in more programs than groups
def test_alone_in_equal_parts_or_as_a_list(numel: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes, also beside blocks that are all zero, tiny or not finite."""
    generator = torch.Generator().manual_seed(numel)
    start = torch.randn(numel, generator=generator)
    grads = [torch.randn(numel, generator=generator) * scale for scale in (1.0, 1e-4)]
    for grad, tiny in zip(grads, (1e-19, 1e-38)):
        grad[: CODE_BLOCK // 2] = tiny
        grad[CODE_BLOCK : 2 * CODE_BLOCK] = 0
        grad[-300:-20] = tiny
    grads[1][1000], grads[1][3000] = torch.inf, torch.nan

    def in_parts(numel: int, is_aligned: bool, tuned: Tuning, _: int) -> tuple[int, int] | None:
        return division_of_one(numel, is_aligned, tuned, 1)

    monkeypatch.setattr(_adamw_tuning, "OF_ONE", (OneWarp(80, programs, int(moment_scales.MOST_BLOCKS)),))
    results = []
    for division in (lambda *_: None, in_parts):
        monkeypatch.setattr(_adamw_launch, "division_of_one", division)
        p = torch.nn.Parameter(start.to(DEVICE, copy=True))
        optimizer = TritonAdamW([p], state_dtype="int8", impl="triton")
        for grad in grads:
            p.grad = grad.to(DEVICE)
            optimizer.step()
        results.append((p, optimizer.state[p]))
    (p, listed), (q, alone) = results
    assert torch.equal(p.view(torch.int32), q.view(torch.int32))
    same_states(alone, listed)


@pytest.mark.slow
def test_gradients_that_lose_their_alignment_and_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone tensor is then treated as a list, and alone again; rates, which have other places then, change between."""
    generator = torch.Generator().manual_seed(0)
    start, grads = (torch.randn(size, generator=generator) for size in (5000, (5, 5001)))
    results = []
    for division in (lambda *_: None, division_of_one):
        monkeypatch.setattr(_adamw_launch, "division_of_one", division)
        p = torch.nn.Parameter(start.to(DEVICE, copy=True))
        optimizer = TritonAdamW([p], state_dtype="int8", impl="triton")
        for grad, offset, lr in zip(grads.to(DEVICE), (0, 1, 1, 0, 1), (1e-2, 1e-2, 2e-2, 2e-2, 2e-2)):
            optimizer.param_groups[0]["lr"] = lr
            p.grad = grad.clone()[offset : offset + 5000]
            optimizer.step()
        results.append((p, optimizer.state[p]))
    (p, listed), (q, alone) = results
    assert torch.equal(p, q)
    same_states(alone, listed)


@NUMPY_MAY_WARN
def test_a_gradient_that_is_not_finite_spoils_its_block_alone() -> None:
    p = torch.nn.Parameter(torch.ones(4096, device=DEVICE))
    optimizer = TritonAdamW([p], state_dtype="int8", impl="triton")
    grad = torch.ones_like(p)
    grad[300], grad[700] = torch.nan, torch.inf
    for _ in range(2):
        p.grad = grad
        optimizer.step()
    spoilt = torch.zeros(4096, dtype=torch.bool, device=DEVICE)
    spoilt[256:768] = True
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[p][key].dequantize().isnan(), spoilt)
    assert torch.equal(p.isnan(), spoilt)


@pytest.mark.parametrize("numels", [[768], [300], [768, 300]], ids=["tiles", "tail", "list"])
def test_a_step_that_is_skipped_leaves_codes_and_scales(numels: list[int]) -> None:
    generator = torch.Generator().manual_seed(7)
    firsts, seconds = map(list, zip(*[moments((numel,), 1.0, generator) for numel in numels]))
    params, grads = ([torch.randn(numel, generator=generator).to(DEVICE) for numel in numels] for _ in range(2))
    before = copy.deepcopy((params, firsts, seconds))
    steps, found_inf = torch.ones((), device=DEVICE), torch.ones((), device=DEVICE)
    adamw_(params, grads, firsts, seconds, steps=steps, found_inf=found_inf, impl="triton", **OPTIONS)
    assert all(map(torch.equal, params, before[0]))
    for found, expected in zip((*firsts, *seconds), (*before[1], *before[2])):
        same_bytes(found, expected)


@NUMPY_MAY_WARN
def test_a_code_that_is_not_zero_stands_for_no_zero() -> None:
    """Although the product of its fraction and such a scale is below half of the least number."""
    second = torch.full((256,), 2.0**-149, device=DEVICE)
    second[7] = 1.3 * 2.0**-112
    coded = quantize(second, QUINTIC8_UNSIGNED)
    assert (dequantize(coded) > 0).all()
    param, grad, first = (
        torch.ones(256, device=DEVICE),
        torch.zeros(256, device=DEVICE),
        torch.zeros(256, device=DEVICE),
    )
    steps = torch.ones((), device=DEVICE)
    adamw_([param], [grad], [quantize(first, CUBIC8)], [coded], steps=steps, impl="triton", **OPTIONS)
    assert (coded.codes != 0).all()


@pytest.mark.slow
def test_zero_stays_zero_and_positive_stays_positive() -> None:
    p = torch.nn.Parameter(torch.ones(4096, device=DEVICE))
    optimizer = TritonAdamW([p], state_dtype="int8", impl="triton")
    p.grad = torch.zeros_like(p)
    p.grad[::2] = 10.0 ** torch.linspace(-18, 0, 2048, device=DEVICE)
    for _ in range(6):
        optimizer.step()
    second = optimizer.state[p]["exp_avg_sq"].dequantize()
    assert (second[1::2] == 0).all()
    assert (second[::2] > 0).all()
    assert p.isfinite().all()


def test_paths_launches_and_small_parameters() -> None:
    small, large = (torch.nn.Parameter(torch.randn(n, device=DEVICE)) for n in (100, 5000))
    optimizer = TritonAdamW([("small", small), ("large", large)], state_dtype="int8", impl="triton")
    for p in (small, large):
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert isinstance(optimizer.state[large]["exp_avg"], LowBitTensor)
    assert optimizer.state[small]["exp_avg"].dtype == torch.float32
    table = optimizer.explain()
    assert "torch" not in table
    assert "2 launches a step" in table


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=pytest.mark.gpu)])
def test_a_thousand_steps_end_where_fp32_ends(impl: Any) -> None:
    """Least squares with noisy gradients; the loss of 8-bit moments is within 1 % of that of fp32 moments."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 64, generator=generator).to(DEVICE)
    truth = torch.randn(64, 64, generator=generator).to(DEVICE)
    targets = inputs @ truth + 0.1 * torch.randn(256, 64, generator=generator).to(DEVICE)
    losses = {}
    for state_dtype in (torch.float32, "int8"):
        weight = torch.nn.Parameter(torch.zeros(64, 64, device=DEVICE))
        optimizer = TritonAdamW([weight], lr=0.02, weight_decay=0.0, state_dtype=state_dtype, impl=impl)
        batches = torch.Generator().manual_seed(1)
        for step in range(1000):
            rows = torch.randint(256, (64,), generator=batches).to(DEVICE)
            optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 1000)
            optimizer.zero_grad()
            (inputs[rows] @ weight - targets[rows]).square().mean().backward()
            optimizer.step()
        losses[state_dtype] = (inputs @ weight - targets).square().mean().item()
    assert losses["int8"] == pytest.approx(losses[torch.float32], rel=0.01)


def test_checkpoints_go_both_ways_and_other_codes_are_refused() -> None:
    p = torch.nn.Parameter(torch.randn(70, 70, device=DEVICE))
    optimizer = TritonAdamW([p], state_dtype="int8", impl="triton")
    p.grad = torch.randn_like(p)
    optimizer.step()
    state = optimizer.state[p]
    codes = state["exp_avg"].codes.clone()
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(optimizer.state[p]["exp_avg"].codes, codes)
    p.grad = torch.randn_like(p)
    optimizer.step()
    assert not torch.equal(optimizer.state[p]["exp_avg"].codes, codes)
    with pytest.raises(
        ValueError, match=r"exp_avg has shape \(70, 70\), its parameter wide \(49, 100\); load the state of"
    ):
        TritonAdamW([("wide", torch.nn.Parameter(torch.zeros(49, 100)))]).load_state_dict(optimizer.state_dict())
    moment = quantize(torch.zeros(70, 70, device=DEVICE), DYNAMIC8)
    with pytest.raises(ValueError, match=r"exp_avgs\[0\] has codes.*dynamic"):
        adamw_(
            [p.detach()],
            [p.detach()],
            [moment],
            [state["exp_avg_sq"]],
            steps=torch.zeros((), device=DEVICE),
            impl="triton",
            **OPTIONS,
        )


def test_checkpoints_and_copies_are_made_in_inference_mode_too() -> None:
    p = torch.nn.Parameter(torch.randn(80, 70, device=DEVICE))
    optimizer = TritonAdamW([p], state_dtype="int8")
    p.grad = torch.randn_like(p)
    optimizer.step()
    expected, of_torch = str(optimizer.state_dict()), str(optimizer.to_torch_state_dict())
    with torch.inference_mode():
        assert str(optimizer.state_dict()) == expected
        assert str(optimizer.to_torch_state_dict()) == of_torch
        assert str(copy.deepcopy(optimizer).state_dict()) == expected
    # the moments are still written outside of the mode
    optimizer.step()


def test_states_of_version_0_2_are_converted() -> None:
    """They were saved in the octal formats."""
    p = torch.nn.Parameter(torch.randn(70, 70, device=DEVICE))
    optimizer = TritonAdamW([p], state_dtype="int8", impl="triton")
    p.grad = torch.randn_like(p)
    optimizer.step()
    saved = optimizer.state_dict()
    old = {"exp_avg": OCTAL8, "exp_avg_sq": OCTAL_MOMENT8}
    moments = {key: quantize(optimizer.state[p][key].dequantize(), fmt) for key, fmt in old.items()}
    saved["state"][0].update({key: to_plain(moment) for key, moment in moments.items()})
    optimizer.load_state_dict(saved)
    for key, fmt in (("exp_avg", CUBIC8), ("exp_avg_sq", QUINTIC8_UNSIGNED)):
        same_bytes(optimizer.state[p][key], quantize(dequantize(moments[key]), fmt))
    optimizer.step()


@pytest.mark.parametrize("fmt", [CUBIC8, QUINTIC8_UNSIGNED], ids=lambda fmt: fmt.code)
def test_codes_are_found_again_from_their_numbers(fmt: LowBitFormat) -> None:
    """Scales too, of blocks of all magnitudes of moments; what were no codes is coded as any numbers are."""
    generator = torch.Generator().manual_seed(4)
    numbers = torch.randn(3000, 256, generator=generator)
    numbers *= 10.0 ** (40 * torch.rand(3000, 1, generator=generator) - 32)
    numbers[::50] = 0
    numbers[7, 100], numbers[8, 3] = torch.inf, torch.nan
    numbers = numbers.flatten()[:-77].to(DEVICE)
    coded = quantize(numbers, fmt)
    again = quantize(dequantize(coded), fmt)
    assert (again.scale != coded.scale).sum() > 1000, "to encode anew is not enough"
    found = encoded(dequantize(coded), fmt)
    finite = coded.scale.isfinite()
    assert torch.equal(found.scale[finite], coded.scale[finite])
    assert found.scale[~finite].isnan().all()
    known = finite.repeat_interleave(256)[: len(numbers)]
    assert torch.equal(found.codes[known], coded.codes[known])
    same_bytes(encoded(numbers[numbers.isfinite()], fmt), quantize(numbers[numbers.isfinite()], fmt))


def test_parts_of_a_parameter_have_parts_of_its_codes() -> None:
    """Also parts that are smaller than what has codes alone; where the whole has none, no part has."""
    generator = torch.Generator().manual_seed(5)
    whole = torch.nn.Parameter(torch.zeros(70, 100, device=DEVICE))
    numbers = torch.randn(7000, generator=generator).square().to(DEVICE)
    group = {"state_dtype": "int8", "master_weights": None, "amsgrad": False}
    step = torch.ones((), device=DEVICE)
    for start, stop in ((0, 256), (256, 5120), (5120, 7000)):
        state: dict[str, Any] = {"step": step, "exp_avg": numbers[start:stop], "exp_avg_sq": numbers[start:stop]}
        part = whole.detach().view(-1)[start:stop]
        init_state(part, group, state, whole=whole)
        for key, fmt in (("exp_avg", CUBIC8), ("exp_avg_sq", QUINTIC8_UNSIGNED)):
            same_bytes(state[key], quantize(numbers, fmt)[start:stop])
        fresh: dict[str, Any] = {}
        init_state(part, group, fresh, whole=whole)
        assert isinstance(fresh["exp_avg"], LowBitTensor)
        transposed: dict[str, Any] = {}
        init_state(part, group, transposed, whole=whole.t())
        assert transposed["exp_avg"].dtype == torch.float32


@NUMPY_MAY_WARN
def test_a_step_on_parts_is_that_on_the_whole() -> None:
    generator = torch.Generator().manual_seed(6)
    start, grad = (torch.randn(7000, generator=generator).to(DEVICE) for _ in range(2))
    results = []
    for ends in ([0, 7000], [0, 256, 5120, 7000]):
        parts = list(itertools.pairwise(ends))
        # as in a bucket: one behind another, at no place of their own
        params = [start.clone()[begin:end] for begin, end in parts]
        firsts = [quantize(torch.zeros_like(p), CUBIC8) for p in params]
        seconds = [quantize(torch.zeros_like(p), QUINTIC8_UNSIGNED) for p in params]
        steps = torch.zeros((), device=DEVICE)
        for _ in range(2):
            grads = [grad[begin:end] for begin, end in parts]
            adamw_(params, grads, firsts, seconds, steps=steps, impl="triton", **OPTIONS)
        results.append([torch.cat(params), *(torch.cat([m.dequantize() for m in each]) for each in (firsts, seconds))])
    assert all(map(torch.equal, *results))
