"""Launches after the first go past Triton's own ``kernel[grid]`` with what that would have passed, hooks excepted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.compiler import CompiledKernel
from triton.knobs import HookChain

from optim_kernels import TritonAdamW, TritonMuon, _triton, newton_schulz
from optim_kernels.functional import MuonMomenta, MuonUpdates

GRID = (5, 2, 1)
STREAM = 77
CONSTANTS = ("fp32", 1024)


class Loaded(CompiledKernel):
    """Without a module on a device, which Triton 3.8 would unload."""

    def __del__(self) -> None: ...


def compiled_kernel(run: Callable[..., None]) -> CompiledKernel:
    """A compiled kernel as Triton keeps it, which calls ``run`` where it would launch."""
    kernel: Any = object.__new__(Loaded)
    fields = {"module": object(), "function": 1234, "packed_metadata": (4, 1, 0), "name": "kernel", "src": None}
    kernel.__dict__.update(fields, _run=run, _module_pid=None)
    return kernel


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What arrives at Triton's launcher, on device 1 whose current stream is ``STREAM``."""

    class Driver:
        @staticmethod
        def get_current_stream(device: int) -> int:
            assert device == 1
            return STREAM

        @staticmethod
        def get_current_device() -> int:
            return 1

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return []


@pytest.fixture
def hooks() -> Iterator[Any]:
    """Triton's hooks, as they were afterwards."""
    with triton.knobs.runtime.scope():
        yield triton.knobs.runtime


def kept_launch(calls: list[tuple[Any, ...]]) -> tuple[_triton.Launch, CompiledKernel]:
    kernel = compiled_kernel(lambda *args: calls.append(args))
    launch = _triton.Launch(None, GRID, CONSTANTS)
    launch._keep(kernel, 1)
    return launch, kernel


def test_a_launch_passes_what_triton_would_pass(calls: list[tuple[Any, ...]]) -> None:
    """Held against the ``kernel[grid]`` of the installed version, all but the hooks and what they are told."""
    launch, kernel = kept_launch(calls)
    x = torch.zeros(3)
    launch((x,), (2, 0.5))
    kernel[GRID](x.data_ptr(), 2, 0.5, *CONSTANTS)
    ours, theirs = calls
    assert ours[:6] == theirs[:6] == (*GRID, STREAM, 1234, (4, 1, 0))
    assert ours[6:9] == (None, None, None)
    assert ours[9:] == theirs[9:] == (x.data_ptr(), 2, 0.5, *CONSTANTS)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("as_chain", [True, False], ids=["chain", "function"])
def test_hooks_are_passed_on_as_soon_as_there_are_some(
    calls: list[tuple[Any, ...]], hooks: Any, name: str, as_chain: bool
) -> None:
    launch, _ = kept_launch(calls)
    launch.again((8,))
    hook: Any = lambda metadata: None  # noqa: E731
    if as_chain:
        chain: HookChain[Any] = HookChain()
        chain.add(hook)
        hook = chain
    setattr(hooks, name, hook)
    launch.again((8,))
    delattr(hooks, name)
    launch.again((8,))
    place = {"launch_enter_hook": 7, "launch_exit_hook": 8}[name]
    assert [call[place] is hook for call in calls] == [False, True, False]
    assert [call[6] is None for call in calls] == [True, False, True], "hooks are told of which launch"


def test_a_hook_that_joins_the_chain_is_seen(calls: list[tuple[Any, ...]]) -> None:
    """As Triton's profiler does it."""
    launch, _ = kept_launch(calls)

    def hook(metadata: Any) -> None: ...

    chain = triton.knobs.runtime.launch_enter_hook
    assert not _triton.has_launch_hooks()
    chain.add(hook)
    try:
        launch.again((8,))
    finally:
        chain.remove(hook)
    launch.again((8,))
    assert [call[7] is chain for call in calls] == [True, False]


def test_an_unknown_version_is_launched_its_own_way(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton, "has_short_launch", lambda version: False)
    launch, kernel = kept_launch(calls)
    launch.again((8, 0.5))
    kernel[GRID](8, 0.5, *CONSTANTS)
    ours, theirs = calls
    assert ours[:6] + ours[7:] == theirs[:6] + theirs[7:]
    assert ours[7] is triton.knobs.runtime.launch_enter_hook


def test_clusters(calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first launch on as many programs to a cluster, and their own memory behind that of the kernel."""
    compiled = compiled_kernel(lambda *args: calls.append(args))
    compiled.__dict__.update(metadata=SimpleNamespace(shared=1000), packed_metadata=(12, 1, 1000))
    seen: list[Any] = []

    class Kernel:
        def warmup(self, *arguments: Any, **options: Any) -> CompiledKernel:
            seen.append((arguments, options))
            return compiled

    monkeypatch.setattr(torch.cuda, "device", lambda number: nullcontext())
    monkeypatch.setattr(_triton, "INTERPRETED", SimpleNamespace(value=False))
    launch = _triton.Launch(Kernel(), GRID, CONSTANTS, cluster=_triton.Cluster(2, 64), num_warps=4)
    device = torch.device("cuda", 1)
    launch._first(device, (8, 0.5))
    assert seen == [((8, 0.5, *CONSTANTS), {"grid": GRID, **_triton.FUSED, "num_warps": 4})]
    launch.again((9, 0.5))
    # another launch of the same kernel
    _triton.Launch(Kernel(), GRID, CONSTANTS, cluster=_triton.Cluster(2, 64))._first(device, (10, 0.5))
    assert [call[5] for call in calls] == 3 * [(12, 2, 1008 + 64)]
    assert [call[9] for call in calls] == [8, 9, 10]


def test_which_versions_are_known() -> None:
    known = {"3.4.0": False, "3.5.0": True, "3.6.0+git1a2b3c": True, "3.9.1": True, "3.10.0": False, "4.0.0": False}
    assert {version: _triton.has_short_launch(version) for version in known} == known
    assert _triton.has_short_launch(triton.__version__)


def test_a_launch_goes_to_its_kernels_device(calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    class Device:
        def __init__(self, device: int) -> None:
            self.device = device

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.device

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    launch, _ = kept_launch(calls)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    launch.again((8,))
    assert current == [0]
    assert [call[3] for call in calls] == [STREAM]


@pytest.mark.gpu
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs compiled kernels")
def test_hooks_hear_of_launches_on_a_gpu(hooks: Any) -> None:
    """Results are the same with hooks and without, and a hook is told each launch's kernel."""
    from optim_kernels import clip_grad_norm_, compute_global_grad_norm

    p = torch.nn.Parameter(torch.zeros(1000, device="cuda"))
    p.grad = torch.full_like(p, 2.0)
    names: list[str] = []
    norms = [compute_global_grad_norm([p]), compute_global_grad_norm([p])]
    hooks.launch_enter_hook = lambda metadata: names.append(metadata.get()["name"])
    norms.append(clip_grad_norm_([p], 1.0))
    del hooks.launch_enter_hook
    norms.append(compute_global_grad_norm([p]))
    assert names == ["norm_kernel", "scale_kernel"]
    assert torch.equal(norms[1], norms[2])
    torch.testing.assert_close(norms[3], torch.ones_like(norms[3]))


@pytest.mark.skipif(not _triton.INTERPRETED.value, reason="kernels are interpreted without a GPU alone")
def test_every_launch_says_how_sums_of_products_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's default depends on its version and on the environment."""
    from triton.runtime.interpreter import GridExecutor

    launched: dict[str, Any] = {}
    launch = GridExecutor.__call__

    def listen(self: Any, *args: Any, **options: Any) -> Any:
        launched[self.fn.__name__] = options.get("enable_fp_fusion")
        return launch(self, *args, **options)

    monkeypatch.setattr(GridExecutor, "__call__", listen)
    params = [torch.nn.Parameter(torch.randn(*shape).bfloat16()) for shape in ((40, 24), (24, 40))]
    for p in params:
        p.grad = torch.randn(p.shape).bfloat16()
    for options in ({}, {"variant": "nanochat-2026-07"}, {"stochastic_rounding": True}):
        TritonMuon([{"params": params, **options}], impl="triton").step()
    for kept in (params, params[:1]):
        TritonAdamW(kept, impl="triton", max_norm=1.0).step()
    newton_schulz(torch.randn(2, 24, 40), coefficients="aol4", steps=4, impl="triton")
    flat = [torch.randn(5) for _ in range(3)]
    MuonMomenta().step(*([each] for each in flat), momentum=0.9)
    MuonUpdates().step(*([each] for each in flat[:2]), lr=0.1)
    as_plain_torch = {name for name, is_fused in launched.items() if is_fused is False}
    assert as_plain_torch == {"momenta_kernel", "updates_kernel"}
    assert len(launched) > 14
    assert set(launched.values()) == {True, False}, launched
