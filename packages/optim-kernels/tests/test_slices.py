"""The sum of slices: exact to the one rounding, in order, by the kernel (interpreted on a CPU) as by plain torch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_tensors import DEVICE, NUMPY_MAY_WARN
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from optim_kernels.functional import sum_slices

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def in_order(slices: torch.Tensor, out_dtype: torch.dtype, divisor: float) -> torch.Tensor:
    """By definition, in fp32 numbers that are added one by one."""
    total = slices[0].float()
    for each in slices[1:]:
        total = total + each.float()
    # of two fp32 numbers; the division by a Python number may be a product with its inverse on a GPU
    total = total / torch.full_like(total, divisor)
    return total.to(out_dtype)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_bits_are_those_of_sums_in_order(data: Any) -> None:
    count, numel = data.draw(st.integers(1, 7)), data.draw(st.sampled_from([0, 1, 7, 1023, 1024, 2049, 3000]))
    dtype, out_dtype = data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from(FLOATS))
    divisor = data.draw(st.sampled_from([1, 1.0, 2, 3, 7]))
    gap, offset = data.draw(st.sampled_from([0, 1, 8])), data.draw(st.sampled_from([0, 1, 8]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    room = torch.randn(count * (numel + gap) + offset, generator=generator).mul(8).to(DEVICE, dtype)
    slices = room[offset:].view(count, numel + gap)[:, :numel]
    expected = in_order(slices, out_dtype, divisor)
    for impl in ("auto", "torch", "triton"):
        out = torch.full((numel,), torch.nan, dtype=out_dtype, device=DEVICE)
        assert sum_slices(slices, out, divisor=divisor, impl=impl) is out
        apart = torch.full((numel,), torch.nan, dtype=out_dtype, device=DEVICE)
        assert sum_slices(tuple(slices), apart, divisor=divisor, impl=impl) is apart
        assert torch.equal(out, expected), impl
        assert torch.equal(apart, expected), impl


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_slice_may_hold_the_sum(impl: Any) -> None:
    slices = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = in_order(slices, torch.float32, 4)
    apart = [each.clone() for each in slices]
    sum_slices(slices, slices[2], divisor=4, impl=impl)
    assert torch.equal(slices[2], expected)
    sum_slices(apart, apart[1], divisor=4, impl=impl)
    assert torch.equal(apart[1], expected)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_sum_is_seen_by_autograd(impl: Any) -> None:
    """What a graph still needs is not exchanged for a sum silently."""
    out, weight = torch.zeros(5, device=DEVICE), torch.ones(5, device=DEVICE, requires_grad=True)
    product = (out * weight).sum()
    sum_slices(torch.ones(2, 5, device=DEVICE), out, impl=impl)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_more_tensors_than_the_kernel_has_arguments_for() -> None:
    slices = torch.randn(65, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    out = torch.empty(40, device=DEVICE)
    assert torch.equal(sum_slices(list(slices), out), in_order(slices, torch.float32, 1))
    with pytest.raises(RuntimeError, match=r"a contiguous fp32, fp16 or bf16 out, got 65 slices"):
        sum_slices(list(slices), out, impl="triton")
    assert torch.equal(sum_slices(slices, out, impl="triton"), in_order(slices, torch.float32, 1))


def test_the_kernel_is_not_for_what_memory_does_not_hold() -> None:
    """Numbers stored with the other sign, as imaginary parts of conjugates are, and what stands for other tensors."""
    ones, out = torch.ones(3, 8, device=DEVICE), torch.zeros(8, device=DEVICE)
    others = [
        (torch._neg_view(ones), out, -3, "slices, negated lazily"),
        (ones, torch._neg_view(out), 3, "out, negated lazily"),
        (AsyncCollectiveTensor(ones), out, 3, "slices, an AsyncCollectiveTensor"),
    ]
    for slices, into, expected, what in others:
        assert bool((sum_slices(slices, into, impl="auto") == expected).all()), what
        with pytest.raises(RuntimeError, match=f"impl='triton' adds .*got {what}"):
            sum_slices(slices, into, impl="triton")


@NUMPY_MAY_WARN
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_infinities_and_nan_stay_in_their_places(impl: Any) -> None:
    slices = torch.ones(3, 8, dtype=torch.float16, device=DEVICE)
    slices[0, 1], slices[1, 2], slices[2, 2], slices[1, 3] = torch.inf, torch.inf, -torch.inf, torch.nan
    slices[:, 4] = 65504  # their sum is beyond fp16, the average is not
    out = torch.empty(8, dtype=torch.float16, device=DEVICE)
    sum_slices(slices, out, divisor=3, impl=impl)
    expected = torch.tensor([1, torch.inf, torch.nan, torch.nan, 65504, 1, 1, 1], dtype=torch.float16, device=DEVICE)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_fp64_is_added_in_fp64() -> None:
    slices = torch.tensor([[1.0], [1e-12], [-1.0]], dtype=torch.float64, device=DEVICE)
    out = torch.empty(1, dtype=torch.float64, device=DEVICE)
    assert sum_slices(slices, out).item() == pytest.approx(1e-12, rel=1e-3)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are replaced by what calls tell")
def test_a_launch_is_kept_for_sums_of_one_kind_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kind is what a kernel is compiled for: dtypes, whether addresses and strides are multiples of 16."""
    from optim_kernels._kernels import slices as kernels

    made: list[tuple[Any, ...]] = []

    class Launch:
        def __init__(self, kernel: Any, grid: int, constants: tuple[Any, ...], **_: Any) -> None:
            made.append((kernel, grid, *constants))

        def add(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(kernels, "SumLaunch", Launch)
    kernels._launch.cache_clear()
    room = torch.zeros(8, 4096)
    for _ in range(2):
        for start in (0, 16, 0):
            sum_slices(room[:2, start : start + 2048], room[3, :2048], impl="triton")
            sum_slices([room[0, start : start + 2048], room[1, :2048]], room[3, :2048], impl="triton")
        assert made == [(kernels.sum_kernel, 2, False, 1024), (kernels.sum_apart_kernel, 2, False, 1024)]
    for out, slices in (
        (room[3, 1:2049], room[:2, :2048]),
        (room[3, :2048], room[:2, 1:2049]),
        (room[3, :2047], room[:2, :2047]),
        (room[3, :2048].half(), room[:2, :2048]),
        (room[3, :2048], room[:4:2, :2048]),
    ):
        before = len(made)
        sum_slices(slices, out, impl="triton")
        assert len(made) == before + 1
        sum_slices(slices, out, impl="triton", divisor=2.0)
        assert len(made) == before + 2
    kernels._launch.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_slices_on_another_device_than_the_current_one() -> None:
    slices = torch.randn(3, 3000, device="cuda:1")
    assert torch.cuda.current_device() == 0
    out = torch.empty(3000, device="cuda:1")
    assert torch.equal(sum_slices(slices, out, impl="triton"), in_order(slices, torch.float32, 1))


def test_bad_slices_are_refused() -> None:
    out = torch.empty(3)
    mixed = [1.0, 2, "3", None, b"4", 5.0]
    for bad, kind in (([], "a list of nothing"), (mixed, "a list of float, int, str, NoneType, bytes"), (3, "a int")):
        with pytest.raises(TypeError, match=rf"slices must be one tensor \[S, N\], or tensors \[N\], got {kind}"):
            sum_slices(bad, out)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"make an out \[N\], got \[3\], \[2\] and \[3\]"):
        sum_slices([out, out[:2]], out)
    with pytest.raises(ValueError, match=r"make an out \[N\], got \[1, 3\] and \[3\]"):
        sum_slices([out[None]], out)
    with pytest.raises(ValueError, match=r"slices of one dtype, got torch\.float"):
        sum_slices([out, out.half()], out)
    with pytest.raises(ValueError, match=r"slices \[S, N\] with S > 0 make an out \[N\], got \[2, 4\] and \[3\]"):
        sum_slices(torch.empty(2, 4), out)
    with pytest.raises(ValueError, match=r"got \[0, 3\] and \[3\]"):
        sum_slices(torch.empty(0, 3), out)
    with pytest.raises(ValueError, match=r"slices of one dtype, got torch.int32 on cpu and torch.float32 on cpu"):
        sum_slices(torch.ones(2, 3, dtype=torch.int32), out)
    with pytest.raises(ValueError, match="divisor is 0"):
        sum_slices(torch.ones(2, 3), out, divisor=0)
    with pytest.raises(TypeError, match=r"out must be a tensor \[N\], got a list"):
        sum_slices(torch.ones(2, 3), [out])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="divisor must be a number or a 1-element tensor, got '2'"):
        sum_slices(torch.ones(2, 3), out, divisor="2")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="impl='triton' adds rows of consecutive elements"):
        sum_slices(torch.ones(3, 2).T, out, impl="triton")


@pytest.mark.gpu
def test_beyond_two_to_the_31_elements() -> None:
    numel = 2**30 + 1000
    slices = torch.ones(3, numel, dtype=torch.bfloat16, device="cuda")
    slices[:, -5:] = torch.arange(5.0, device="cuda")
    out = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    sum_slices(slices, out, divisor=3, impl="triton")
    assert out[-5:].tolist() == [0, 1, 2, 3, 4]
    assert bool((out[:-5] == 1).all())
