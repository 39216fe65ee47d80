"""A captured step replays with what changes between replays: learning rate, factor, step count, gradients."""

from __future__ import annotations

import pytest
import torch
from random_tensors import assert_same_bits
from torch import Tensor

from optim_kernels import TritonAdamW, clip_grad_norm_

pytestmark = pytest.mark.gpu


def make(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(512, 300), (77,), (4096,), (1000, 33)]
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).cuda()) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).cuda()
    return params


def capture(optimizer: TritonAdamW, factor: Tensor | None = None) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step(clip_factor=factor)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step(clip_factor=factor)
    return graph


@pytest.mark.filterwarnings("ignore:.*capturable=True.*:UserWarning")
def test_replays_follow_lr_factor_and_gradients() -> None:
    ours, eager = make(), make()
    lr = torch.tensor(1e-3, device="cuda")
    factor = torch.tensor(1.0, device="cuda")
    captured = TritonAdamW(ours, lr=lr, capturable=True)
    reference = TritonAdamW(eager, lr=1e-3)
    graph = capture(captured, factor)
    reference.step()
    for i in range(5):
        lr.fill_(1e-3 / (i + 1))
        factor.fill_(0.5 + 0.1 * i)
        reference.param_groups[0]["lr"] = 1e-3 / (i + 1)
        for p, q in zip(ours, eager):
            assert p.grad is not None
            p.grad.normal_()
            q.grad = p.grad.clone()
        graph.replay()
        reference.step(clip_factor=factor)
    assert [int(captured.state[p]["step"]) for p in ours] == [6] * 4
    for p, q in zip(ours, eager):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


@pytest.mark.filterwarnings("ignore:.*capturable=True.*:UserWarning")
def test_eager_steps_leave_a_captured_table_alone() -> None:
    ours, other = make(), make()
    captured, reference = TritonAdamW(ours, capturable=True), TritonAdamW(other)
    graph = capture(captured)
    reference.step()
    static = [p.grad for p in ours]
    # an eager step on other gradients, at other addresses
    for p, q in zip(ours, other):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    captured.step()
    reference.step()
    # the replay reads the gradients that it was captured with
    graph.replay()
    for q, grad in zip(other, static):
        q.grad = grad
    reference.step()
    assert_same_bits(ours, other)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_capture_without_capturable_is_refused() -> None:
    params = make()
    optimizer = TritonAdamW(params)
    optimizer.step()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="capturable"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*capturable=True.*:UserWarning")
def test_max_norm_is_captured() -> None:
    ours, eager = make(), make()
    captured = TritonAdamW(ours, capturable=True, max_norm=1.0)
    reference = TritonAdamW(eager, max_norm=1.0)
    graph = capture(captured)
    reference.step()
    graph.replay()
    reference.step()
    assert_same_bits(ours, eager)


def test_a_list_clipped_again_and_again_in_a_graph() -> None:
    """Each call finds the tables of the warm-up, so that replays upload nothing, and may run beside eager calls."""
    ours, eager = make(), make()
    clip_grad_norm_(ours, 1e9)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norms = [clip_grad_norm_(ours, 10.0 / (i + 1)) for i in range(3)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        graph.replay()
        torch.cuda.synchronize()
    expected = [clip_grad_norm_(eager, 10.0 / (i + 1)) for i in range(3)]
    assert torch.equal(torch.stack(norms), torch.stack(expected))
    for p, q in zip(ours, eager):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)
    on_device = [event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    assert len(on_device) == 6, on_device


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_synchronises() -> None:
    params = make()
    optimizer = TritonAdamW(params, max_norm=1.0)
    optimizer.step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("max_norm", "launches"), [(None, 1), (1.0, 2)])
def test_launches(max_norm: float | None, launches: int) -> None:
    params = make()
    optimizer = TritonAdamW(params, max_norm=max_norm)
    optimizer.step()
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=cuda, acc_events=True) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    assert len([name for name in kernels if "Mem" not in name]) == launches, kernels


def test_no_compilation_after_the_first_step() -> None:
    import triton

    params = make()
    optimizer = TritonAdamW(params, max_norm=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    optimizer.step()
    compiled: list[object] = []

    def count(*_: object, **__: object) -> None:
        compiled.append(1)

    triton.knobs.runtime.jit_post_compile_hook = count
    try:
        for _ in range(50):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.param_groups[0]["weight_decay"] *= 0.9
            optimizer.step()
            scheduler.step()
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert not compiled


def test_trajectory_of_a_hundred_steps_is_as_exact_as_torchs() -> None:
    for dtype, slack in ((torch.float32, 1.0), (torch.bfloat16, 1.05), (torch.float16, 1.05)):
        generator = torch.Generator(device="cuda").manual_seed(0)
        start = torch.randn(1 << 18, device="cuda", generator=generator) * 0.02
        exact = torch.nn.Parameter(start.to(dtype).double())
        ours, theirs = (torch.nn.Parameter(start.to(dtype)) for _ in range(2))
        optimizers = [
            torch.optim.AdamW([exact], lr=1e-3),
            TritonAdamW([ours], lr=1e-3),
            torch.optim.AdamW([theirs], lr=1e-3, fused=True),
        ]
        for _ in range(100):
            grad = (torch.randn(1 << 18, device="cuda", generator=generator) * 1e-2).to(dtype)
            for p, optimizer in zip((exact, ours, theirs), optimizers):
                p.grad = grad.to(p.dtype)
                optimizer.step()
        own, others = ((p.double() - exact).detach().norm() for p in (ours, theirs))
        assert own <= slack * others * 1.001, (dtype, own, others)
