"""Norms and clipping mean what torch's mean, in fp32 whatever the gradients are, with kernels and without."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_tensors import DEVICE, NUMPY_MAY_WARN
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from optim_kernels import (
    TritonAdamW,
    TritonMuon,
    TritonMuonAdamW,
    clip_factor,
    clip_grad_norm_,
    clip_grads_with_norm_,
    compute_global_grad_norm,
    get_total_norm,
    reference,
    sum_of_squares,
)
from optim_kernels._gradient_norm import MOST_KINDS, MOST_LISTS, GradientNorms
from optim_kernels._norm_launches import MOST_CAPTURED, NormLaunches
from optim_kernels._triton import Launch

ONE = torch.tensor(1.0)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    "build",
    [
        lambda p: TritonAdamW([p], impl="torch"),
        lambda p: TritonMuon([p], impl="torch"),
        lambda p: TritonMuonAdamW([{"kind": "adamw", "params": [p], "impl": "torch"}]),
    ],
    ids=["TritonAdamW", "TritonMuon", "TritonMuonAdamW"],
)
def test_a_step_takes_one_factor_on_the_device(build: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4, 3, device=DEVICE))
    p.grad = torch.ones_like(p)
    optimizer = build(p)
    with pytest.raises(TypeError, match=r"^clip_factor must be a 0-d tensor, got 0\.5; give torch\.tensor\(0\.5\)"):
        optimizer.step(clip_factor=0.5)
    # plain torch would multiply each column by a factor of its own
    with pytest.raises(ValueError, match=r"^clip_factor must be a 0-d tensor, .* got shape \(3,\)$"):
        optimizer.step(clip_factor=torch.ones(3, device=DEVICE))
    assert torch.equal(p, torch.ones_like(p))
    assert not optimizer.state
    optimizer.step(clip_factor=torch.tensor(0.5, device=DEVICE))
    assert not torch.equal(p, torch.ones_like(p))


def gradients(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Tensors of shapes that break things; the last starts at an odd address."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(100, 70), (3,), (), (0,), (4096,), (63, 65)]
    tensors = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    return [*tensors, torch.randn(1001, generator=generator).to(DEVICE, dtype)[1:]]


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.nn.Parameter]:
    made = []
    for gradient in gradients(dtype, seed):
        parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        made.append(parameter)
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_kernel_norm_is_exact(dtype: torch.dtype, norm_type: float) -> None:
    tensors = gradients(dtype)
    norm, factor = GradientNorms("triton").norm_and_factor(tensors, norm_type, 3.0)
    everything = torch.cat([t.flatten().double() for t in tensors])
    torch.testing.assert_close(norm.double(), torch.linalg.vector_norm(everything, norm_type), rtol=1e-6, atol=0)
    assert torch.equal(factor, reference.clip_factor(norm, 3.0))
    again, _ = GradientNorms("triton").norm_and_factor(tensors, norm_type, 3.0)
    assert torch.equal(norm, again)


@pytest.mark.parametrize("scale", [1e-18, 1e-9, 1e9, 1e18])
def test_kernel_norm_neither_overflows_nor_vanishes(scale: float) -> None:
    tensor = torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(DEVICE) * scale
    norm, _ = GradientNorms("triton").norm_and_factor([tensor], 2.0, 1.0)
    torch.testing.assert_close(norm.double(), tensor.double().norm(), rtol=1e-6, atol=0)


@NUMPY_MAY_WARN
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_non_finite_gradients_end_as_in_torch(value: float, norm_type: float) -> None:
    ours, theirs = parameters(), parameters()
    for params in (ours, theirs):
        assert params[4].grad is not None
        params[4].grad[7] = value
    norms = GradientNorms("triton")
    grads = [p.grad for p in ours if p.grad is not None]
    norm, factor = norms.norm_and_factor(grads, norm_type, 1.0)
    assert norms.scale_(grads, factor)
    grads_of_torch = [p for p in theirs if p.numel()]  # torch has no largest element of nothing
    expected = torch.nn.utils.clip_grad_norm_(grads_of_torch, 1.0, norm_type)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaling_rounds_once_and_only_below_one(impl: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optim_kernels.clip._NORMS", GradientNorms(impl))
    params = parameters(dtype)
    before = [p.grad.clone() for p in params if p.grad is not None]
    clip_grads_with_norm_(params, 1.0, torch.tensor(0.5, device=DEVICE))
    assert all(torch.equal(p.grad, old) for p, old in zip(params, before))
    clip_grads_with_norm_(params, 1.0, torch.tensor(3.0, device=DEVICE))
    factor = clip_factor(torch.tensor(3.0, device=DEVICE), 1.0)
    assert all(torch.equal(p.grad, (old.float() * factor).to(dtype)) for p, old in zip(params, before))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_gradient_that_is_there_several_times(impl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As lists of two models with tied parameters have it: torch's loop counts and scales it for each place in turn."""
    monkeypatch.setattr("optim_kernels.clip._NORMS", GradientNorms(impl))
    ours, theirs = (torch.nn.Parameter(torch.zeros(4096, device=DEVICE)) for _ in range(2))
    empty = [torch.nn.Parameter(torch.zeros(0, device=DEVICE)) for _ in range(2)]
    for p in (ours, theirs, *empty):
        p.grad = torch.ones_like(p)
    for count in (1, 4, 4, 1):
        norm = clip_grad_norm_([*empty, *[ours] * count], 0.9)
        # in a loop: on a GPU torch's one launch for several tensors would scale them by chance
        expected = torch.nn.utils.clip_grad_norm_([*empty, *[theirs] * count], 0.9, foreach=False)
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(ours.grad, theirs.grad)
        for p in (ours, theirs):
            p.grad = torch.ones_like(p)


@pytest.mark.parametrize("num_calls", [0, 2])
def test_gradients_that_are_made_of_others(num_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a functional collective gives them, among calls with plain ones: torch's kernels take them."""
    monkeypatch.setattr("optim_kernels.clip._NORMS", GradientNorms("triton"))
    ours, theirs = ([torch.nn.Parameter(torch.zeros(n, device=DEVICE)) for n in (120, 7)] for _ in range(2))
    for number in range(num_calls + 2):
        for p, q in zip(ours, theirs, strict=True):
            grad = torch.randn_like(p)
            q.grad = grad.clone()
            p.grad = AsyncCollectiveTensor(grad) if number == num_calls else grad
        norms = clip_grad_norm_(ours, 0.1), torch.nn.utils.clip_grad_norm_(theirs, 0.1)
        torch.testing.assert_close(*norms)
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(torch.empty_like(q).copy_(p.grad), q.grad)


@pytest.mark.parametrize("num_tiles", [0, 1, 3, 4, 5, 9, 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_element_is_scaled_once(num_tiles: int, dtype: torch.dtype) -> None:
    """However many turns a program has (in the interpreter there are four), with what is left over at the ends."""
    sizes = [0, 5, 4096 * num_tiles + 3, 0, 4096, 8]
    grads = [torch.arange(1, size + 1, dtype=torch.float32, device=DEVICE).to(dtype) for size in sizes]
    expected = [(grad.float() * 0.5).to(dtype) for grad in grads]
    assert GradientNorms("triton").scale_(grads, torch.tensor(0.5, device=DEVICE))
    for grad, scaled in zip(grads, expected, strict=True):
        assert torch.equal(grad, scaled)


def test_a_captured_list_does_not_disturb_one_that_starts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = GradientNorms("triton", any_stream=True)
    first, second, other = (torch.randn(5000, device=DEVICE) for _ in range(3))

    def norm(*grads: Tensor) -> Tensor:
        return norms.norm(grads, 2.0)

    def exact(*grads: Tensor) -> Tensor:
        return torch.cat(grads).norm()

    torch.testing.assert_close(norm(first, second), exact(first, second))
    with monkeypatch.context() as patched:
        for module in ("_gradient_norm", "_norm_launches"):
            patched.setattr(f"optim_kernels.{module}.is_capturing", lambda device: True)
        used = []
        for grads in ((first, other), (first, second), (first, second)):
            torch.testing.assert_close(norm(*grads), exact(*grads))
            used.append(norms._refreshed(norms.look_at(grads), 2.0))
        # launches in a graph may run beside others, so each has scratch of its own
        captured = {id(part) for parts in used for part in parts or ()}
        assert len(captured) == 3
    assert captured.isdisjoint(map(id, norms._refreshed(norms.look_at((first, second)), 2.0) or ()))
    torch.testing.assert_close(norm(first, second), exact(first, second))


def test_a_captured_norm_leaves_the_factor_of_the_one_before_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    norms, grads = GradientNorms("triton", any_stream=True), [torch.randn(5000, device=DEVICE)]
    for _ in range(3):
        norm, factor = norms.norm_and_factor(grads, 2.0, 7.0)
    for module in ("_gradient_norm", "_norm_launches"):
        monkeypatch.setattr(f"optim_kernels.{module}.is_capturing", lambda device: True)
    for limit in (5.0, 7.0):
        captured_norm, captured_factor = norms.norm_and_factor(grads, 2.0, limit)
        assert torch.equal(captured_norm, norm)
        assert torch.equal(captured_factor, reference.clip_factor(norm, limit))
        assert captured_factor.data_ptr() != factor.data_ptr()
    assert torch.equal(factor, reference.clip_factor(norm, 7.0))


def test_each_stream_has_scratch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls in two streams may run at once, also on a list that has come again and again in one of them."""
    norms, grads, used = GradientNorms("triton", any_stream=True), [torch.randn(5000, device=DEVICE)], []
    for stream in (1, 1, 2, 2, 1):
        monkeypatch.setattr("optim_kernels._gradient_norm._stream", lambda device, stream=stream: stream)
        norm, factor = norms.norm_and_factor(grads, 2.0, 1.0)
        torch.testing.assert_close(norm, grads[0].norm())
        used.append(factor.data_ptr())
    assert used[0] == used[1] == used[4] != used[2] == used[3]


def test_what_a_call_returned_is_left_alone_by_the_next() -> None:
    norms, grads = GradientNorms("triton", any_stream=True), [torch.randn(5000, device=DEVICE)]
    exact, results = grads[0].double().norm(), []
    for _ in range(3):
        (total,) = norms.totals(grads, 2.0)
        results.append((total, norms.norm(grads, 2.0), norms.clip_(grads, 2.0, math.inf)))
        grads[0].mul_(2.0)
    for number, (total, norm, clipped) in enumerate(results):
        for found in (total.sqrt(), norm.double(), clipped.double()):
            torch.testing.assert_close(found, exact * 2.0**number, rtol=1e-6, atol=0)


@pytest.mark.parametrize("any_stream", [False, True])
def test_lists_that_come_again_are_only_looked_at(any_stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    split_of, splits = GradientNorms._split_of, []

    def count(self: GradientNorms, grads: Any) -> Any:
        splits.append(1)
        return split_of(self, grads)

    monkeypatch.setattr(GradientNorms, "_split_of", count)
    norms = GradientNorms("triton", any_stream=any_stream)
    lists = [[torch.randn(5000, device=DEVICE), torch.randn(30, device=DEVICE)] for _ in range(2)]
    for turn in range(3):
        for grads in lists:
            grads[1].normal_()
            exact = torch.cat(grads).norm()
            torch.testing.assert_close(norms.clip_(grads, 2.0, 1.0), exact)
            torch.testing.assert_close(norms.norm(grads, 2.0), torch.ones_like(exact))
        # without streams there is one set of tables
        assert len(splits) == (2 if any_stream else 2 * turn + 2)


@NUMPY_MAY_WARN
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_each_call_clips_to_its_own_limit(norm_type: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optim_kernels.clip._NORMS", GradientNorms("triton", any_stream=True))
    param, limit = torch.nn.Parameter(torch.zeros(5000, device=DEVICE)), torch.tensor(2.0)
    for max_norm in (1.0, 1, 3.0, limit, limit, 0.0, math.nan, math.nan, 1.0, -1.0, True, math.inf):
        grad = torch.randn(5000, device=DEVICE)
        if param.grad is None:
            param.grad = grad.clone()
        else:
            param.grad.copy_(grad)
        limit += 1.0
        norm = clip_grad_norm_([param], max_norm, norm_type)
        torch.testing.assert_close(norm.double(), torch.linalg.vector_norm(grad.double(), norm_type), rtol=1e-6, atol=0)
        expected = grad * reference.clip_factor(norm, float(max_norm))
        torch.testing.assert_close(param.grad, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("any_stream", [False, True])
def test_of_many_lists_some_are_remembered(any_stream: bool) -> None:
    norms, tensors = GradientNorms("triton", any_stream=any_stream), torch.randn(40, 8, device=DEVICE)
    for tensor in tensors:
        torch.testing.assert_close(norms.norm([tensor], 2.0), tensor.norm())
    assert len(norms._wholes) <= MOST_LISTS


@pytest.mark.parametrize("any_stream", [False, True])
def test_of_lists_of_many_lengths_some_are_remembered(any_stream: bool) -> None:
    """As many as there are experts, say, of which each step chooses some."""
    norms, tensors = GradientNorms("triton", any_stream=any_stream), list(torch.randn(MOST_KINDS + 8, 3, device=DEVICE))
    for count in (*range(1, len(tensors) + 1), 1):
        torch.testing.assert_close(norms.norm(tensors[:count], 2.0), torch.cat(tensors[:count]).norm())
    assert len(norms._parts) == MOST_KINDS


def test_captured_calls_have_counters_of_their_own() -> None:
    launches, grad = NormLaunches(torch.device(DEVICE), torch.float32), torch.ones(10, device=DEVICE)
    launches.refresh([grad.data_ptr()], [10])
    copies = [launches.for_graph() for _ in range(MOST_CAPTURED + 2)]
    assert len({each._counter.data_ptr() for each in (launches, *copies)}) == len(copies) + 1


@pytest.mark.parametrize("when", [1, 2], ids=["norm", "scaling"])
def test_a_call_of_another_thread_during_a_launch_is_told_apart(when: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch lets other threads run, which may bring another list to the same tables."""
    norms, num_launches = GradientNorms("triton", any_stream=True), 0
    first, second, other = (torch.randn(size, device=DEVICE) for size in (5000, 5000, 700))
    launch = Launch.__call__

    def clip() -> None:
        exact = torch.cat([first.normal_(), other.normal_()]).norm()
        torch.testing.assert_close(norms.clip_([first, other], 2.0, 3.0), exact)
        torch.testing.assert_close(torch.cat([first, other]).norm(), torch.full_like(exact, 3.0))

    def interrupted(*args: Any) -> None:
        nonlocal num_launches
        launch(*args)
        num_launches += 1
        if num_launches == when:
            clip()

    monkeypatch.setattr(Launch, "__call__", interrupted)
    norms.clip_([first, second], 2.0, 3.0)
    for _ in range(2):
        clip()


def test_lists_that_start_alike_are_told_apart() -> None:
    norms = GradientNorms("triton")
    first, second, other, short = (torch.randn(size, device=DEVICE) for size in (5000, 5000, 5000, 700))
    for grads in [(first, second), (first, other), (first, short), (first, second), (first,), (first, second)]:
        torch.testing.assert_close(norms.norm(grads, 2.0), torch.cat(grads).norm())
        torch.testing.assert_close(norms.norm(grads, 1.0), torch.cat(grads).abs().sum())
        largest = torch.cat(grads).abs().amax()
        assert torch.equal(norms.clip_(grads, math.inf, 1.0), largest)
        torch.testing.assert_close(norms.clip_(grads, math.inf, 1.0), torch.ones_like(largest))
        for grad in grads:
            grad.mul_(3.0)


def test_memory_that_becomes_a_gradient_of_another_dtype_is_read_as_such() -> None:
    norms, memory = GradientNorms("triton"), torch.randn(10_000, device=DEVICE).bfloat16()
    for grad in (memory[:5000], memory.view(torch.float32), memory[:5000]):
        for _ in range(2):
            torch.testing.assert_close(norms.norm([grad], 2.0), grad.float().norm())


def test_a_gradient_that_lies_where_the_copy_of_another_was_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not dense is read from a copy, whose memory is then free for the gradients of the next step."""
    norms, first, memory = GradientNorms("triton"), torch.ones(5000, device=DEVICE), torch.empty(64, 64, device=DEVICE)
    numbers = torch.arange(64.0, device=DEVICE)
    exact = torch.cat([first, numbers.repeat(64)]).norm()
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "contiguous", lambda grad: memory.copy_(grad))
        torch.testing.assert_close(norms.norm([first, numbers[:, None].expand(64, 64)], 2.0), exact)
    memory[0] = numbers
    torch.testing.assert_close(norms.norm([first, memory[0, :, None].expand(64, 64)], 2.0), exact)


@pytest.mark.parametrize("step", [1, 2], ids=["dense", "strided"])
def test_gradients_without_memory_are_refused(step: int) -> None:
    """By their place, before anything reads them: those that are not dense would be copied first."""
    tensors = [torch.ones(3, device=DEVICE), torch.ones(0, device=DEVICE), torch.ones(8, device=DEVICE)[::step]]
    norms = GradientNorms("triton")
    assert float(norms.norm(tensors, 1.0)) == 3.0 + 8.0 / step
    tensors[2].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="gradient 2 has elements but no memory: its storage was freed"):
        norms.norm(tensors, 1.0)


def test_a_gradient_that_is_listed_twice_is_not_scaled_twice_at_once() -> None:
    norms, grad = GradientNorms("triton"), torch.ones(5000, device=DEVICE)
    for _ in range(2):
        norms.norm([grad, grad], 2.0)
        assert not norms.scale_([grad, grad], torch.tensor(0.5, device=DEVICE))
    assert torch.equal(grad, torch.ones_like(grad))


def test_norm_of_bf16_has_all_its_digits() -> None:
    norm = get_total_norm(gradients(torch.bfloat16))
    assert norm.dtype == torch.float32
    exact = torch.cat([t.flatten().double() for t in gradients(torch.bfloat16)]).norm()
    torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
    assert get_total_norm([torch.ones(2, dtype=torch.float64)]).dtype == torch.float64


@pytest.mark.parametrize("norm_type", [0.0, 1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize(("impl", "foreach"), [("torch", None), ("triton", None), ("auto", False), ("auto", True)])
def test_clipping_is_torchs(norm_type: float, impl: Any, foreach: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optim_kernels.clip._NORMS", GradientNorms(impl))
    ours, theirs = ([p for p in parameters() if p.numel()] for _ in range(2))
    norm = clip_grad_norm_(ours, 2.0, norm_type, foreach=foreach)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 2.0, norm_type))
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_clipping_is_traced_in_one_graph(impl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optim_kernels.clip._NORMS", GradientNorms(impl))
    ours, theirs = ([p for p in parameters() if p.numel()] for _ in range(2))

    @torch.compile(fullgraph=True, backend="eager")
    def clipped(params: list[torch.nn.Parameter]) -> tuple[Tensor, Tensor]:
        norm = compute_global_grad_norm(params)
        clip_grads_with_norm_(params, 2.0, norm)
        return norm, clip_grad_norm_(params, 1.0)

    norm, norm_then = clipped(ours)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 2.0))
    torch.testing.assert_close(norm_then, torch.nn.utils.clip_grad_norm_(theirs, 1.0))
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p.grad, q.grad)


def test_inputs_as_torch_takes_them() -> None:
    params = parameters()
    expected = compute_global_grad_norm(params)
    assert torch.equal(compute_global_grad_norm(p for p in params), expected)
    params.append(torch.nn.Parameter(torch.ones(3)))  # without a gradient
    assert torch.equal(compute_global_grad_norm(params), expected)
    one = params[0]
    assert one.grad is not None
    torch.testing.assert_close(clip_grad_norm_(one, 1e9), one.grad.norm())
    assert torch.equal(clip_grad_norm_([], 1.0), torch.tensor(0.0))
    with pytest.warns(UserWarning, match="empty"):
        clip_grad_norm_((p for p in ()), 1.0)
    # that no parameter has a gradient is no mistake
    assert torch.equal(get_total_norm(g for g in ()), torch.tensor(0.0))
    assert one.grad is not None
    one.grad[0, 0] = math.nan
    with pytest.raises(RuntimeError, match="error_if_nonfinite"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


def test_they_may_take_the_place_of_torchs_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may replace the names; ``foreach=True`` is then torch's functions still."""
    for function in (clip_grad_norm_, clip_grads_with_norm_, get_total_norm):
        monkeypatch.setattr(torch.nn.utils, function.__name__, function)
    p = torch.nn.Parameter(torch.zeros(4))
    p.grad = torch.ones(4)
    assert torch.nn.utils.clip_grad_norm_(p, 1.0, foreach=True) == 2.0
    torch.testing.assert_close(p.grad, torch.full((4,), 0.5))


def test_sum_of_squares_is_fp64_and_fills_out() -> None:
    tensors = [*gradients(torch.float32), *gradients(torch.bfloat16)]
    exact = sum(t.double().square().sum() for t in tensors)
    out = torch.zeros((), dtype=torch.float64, device=DEVICE)
    assert sum_of_squares(tensors, out=out) is out
    torch.testing.assert_close(out, exact, rtol=1e-6, atol=0)
    assert sum_of_squares([]) == 0


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), max_norm=st.floats(1e-3, 1e3))
def test_clipping_never_enlarges_and_is_idempotent(seed: int, max_norm: float) -> None:
    params = parameters(seed=seed)
    before = compute_global_grad_norm(params)
    clip_grad_norm_(params, max_norm)
    after = compute_global_grad_norm(params)
    assert after <= before
    assert after <= max_norm * (1 + 1e-5)
    kept = [p.grad.clone() for p in params if p.grad is not None]
    clip_grad_norm_(params, max_norm * (1 + 1e-4) + 2e-6)  # 1e-6 is in the formula
    assert all(torch.equal(p.grad, old) for p, old in zip(params, kept))


def test_gradients_that_are_not_dense_are_copied_for_as_long_as_they_are_read() -> None:
    row, strided = torch.randn(3, device=DEVICE), torch.randn(300, 200, device=DEVICE)
    spread = [row.expand(4000, 3), strided[::2, ::2], strided[1]]
    norms = GradientNorms("triton")
    expected = reference.total_norm(spread)
    for _ in range(3):
        torch.testing.assert_close(norms.norm(spread, 2.0), expected, rtol=1e-6, atol=0)
        (total,) = norms.totals(spread, 2.0)
        torch.testing.assert_close(total, expected.double().square(), rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("any_stream", [False, True])
def test_lists_of_other_kinds_in_turn(any_stream: bool, norm_type: float) -> None:
    whole = torch.randn(60, 40, device=DEVICE)
    half, spread = whole.bfloat16(), whole[::2, ::2]
    lists = [[whole], [half], [spread], [whole, half], [half, whole], [whole, whole.t()], [spread, whole], [whole[:30]]]
    norms = GradientNorms("triton", any_stream=any_stream)
    for one, other in permutations(lists, 2):
        for tensors in (one, other):
            expected = torch.cat([tensor.flatten().double() for tensor in tensors]).norm(norm_type)
            torch.testing.assert_close(norms.norm(tensors, norm_type).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_gradients_that_are_not_dense_are_scaled_where_they_are(impl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optim_kernels.clip._NORMS", GradientNorms(impl))
    memory = torch.ones(300, 200, device=DEVICE)
    params = [torch.nn.Parameter(torch.zeros(shape, device=DEVICE)) for shape in ((150, 100), (200,))]
    for p, grad in zip(params, (memory[::2, ::2], memory[1])):
        p.grad = grad
    expected = memory.clone()
    for part in (expected[::2, ::2], expected[1]):
        part.mul_(0.5 / 15200**0.5)
    torch.testing.assert_close(clip_grad_norm_(params, 0.5), torch.tensor(15200**0.5, device=DEVICE))
    torch.testing.assert_close(memory, expected)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float32, torch.bfloat16]], ids=["one", "mixed"])
def test_clipping_is_seen_by_autograd(impl: Any, dtypes: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that a graph still needs is not exchanged for another silently."""
    monkeypatch.setattr("optim_kernels.clip._NORMS", GradientNorms(impl))
    for clip in (
        lambda params: clip_grad_norm_(params, 0.1),
        lambda params: clip_grads_with_norm_(params, 0.1, torch.tensor(5.0, device=DEVICE)),
    ):
        params = [parameters(dtype)[0] for dtype in dtypes]
        x = torch.nn.Parameter(torch.ones_like(params[0]))
        penalty = (x * params[0].grad).sum()
        clip(params)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            penalty.backward()


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("norm_type", [0.0, 0.5, 2.0, 3.0, math.inf, -1.0, -math.inf])
def test_any_norm_of_empty_and_sparse_gradients(norm_type: float, impl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one adds nothing, not even to the smallest element; zeros of a sparse one count."""
    monkeypatch.setattr("optim_kernels.clip._NORMS", GradientNorms(impl))
    full = torch.tensor([3.0, -4.0], device=DEVICE)
    assert get_total_norm([torch.empty(0, device=DEVICE)], norm_type) == 0.0
    torch.testing.assert_close(get_total_norm([full.new_empty(0), full], norm_type), get_total_norm([full], norm_type))
    mixed = torch.tensor([3.0, 0.0, -4.0], device=DEVICE)
    torch.testing.assert_close(get_total_norm([mixed.to_sparse()], norm_type), get_total_norm([mixed], norm_type))


def test_a_norm_that_is_no_tensor_is_refused() -> None:
    p = torch.nn.Parameter(torch.ones(2, device=DEVICE))
    p.grad = torch.ones_like(p)
    with pytest.raises(TypeError, match=r"total_norm must be a 0-d tensor, got 3\.0; give torch\.tensor\(3\.0\)"):
        clip_factor(3.0, max_norm=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="total_norm must be a 0-d tensor"):
        clip_grads_with_norm_([p], 1.0, 3.0)  # type: ignore[arg-type]
    assert torch.equal(p.grad, torch.ones_like(p))


def test_a_norm_with_a_dimension_scales_gradients_without() -> None:
    """This failed when other gradients had been scaled."""
    params = [torch.nn.Parameter(torch.ones(shape, device=DEVICE)) for shape in ((2,), ())]
    for p in params:
        p.grad = torch.full_like(p, 8.0)
    clip_grads_with_norm_(params, 1.0, torch.full((1,), 4.0, device=DEVICE))
    assert [p.grad.sum().item() for p in params if p.grad is not None] == pytest.approx([4.0, 2.0])
    assert clip_factor(torch.full((1,), 4.0), 1.0).shape == ()


@pytest.mark.parametrize("clip", [clip_grad_norm_, lambda params, limit: clip_grads_with_norm_(params, limit, ONE)])
@pytest.mark.parametrize("last", ["expanded", torch.float8_e5m2, torch.int32], ids=str)
def test_no_gradient_is_scaled_where_one_cannot_be(clip: Any, last: Any) -> None:
    first, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    first.grad = torch.full((3,), 5.0)
    if last == "expanded":
        other.grad = torch.ones(1).expand(3)
    else:
        other = torch.nn.Parameter(torch.ones(3).to(last), requires_grad=False)
        other.grad = torch.ones(3).to(last)
    with pytest.raises(ValueError, match=r"gradient 1, torch\..* cannot be scaled in place: give a contiguous one"):
        clip([first, other], 0.1)
    assert torch.equal(first.grad, torch.full((3,), 5.0))


def test_what_are_no_parameters_is_said() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match="max_norm must be a number, got None"):
        clip_grad_norm_(model.parameters(), None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"norm_type must be a number, got \[2\]"):
        compute_global_grad_norm(model.parameters(), [2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="total_norm must be a 0-d tensor, got None; get_total_norm returns it"):
        clip_factor(None, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"parameters must be tensors, got tuple among them; give model"):
        clip_grad_norm_(model.named_parameters(), 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a tensor or an iterable of tensors, got a Linear"):
        compute_global_grad_norm(model)  # type: ignore[arg-type]
    # gradients, of which one is missing
    for function in (get_total_norm, sum_of_squares):
        for others in ([None], [torch.ones(2), None]):
            with pytest.raises(TypeError, match="tensors must be tensors, got NoneType among them; leave out what has"):
                function(others)  # type: ignore[operator]


@pytest.mark.parametrize("out", [torch.zeros(3), torch.zeros((), dtype=torch.int64)], ids=["several", "integer"])
def test_a_sum_of_squares_is_one_number(out: Tensor) -> None:
    """It was repeated, or cut."""
    with pytest.raises(ValueError, match=r"out must be one floating-point number, got torch\.\w+ of shape"):
        sum_of_squares([torch.full((2,), 0.7)], out=out)
    assert not out.any()
