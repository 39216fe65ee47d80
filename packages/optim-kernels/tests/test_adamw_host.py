"""What the host does in a step of TritonAdamW: look, upload what changed, launch; and what it must not miss."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fresh_params import make_params, renew_gradients
from interrupts import assert_taken_or_not
from random_tensors import DEVICE
from torch import Tensor

from optim_kernels import TritonAdamW, adamw, multi_tensor, reference
from optim_utils.testing import run_ranks


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each table that is uploaded."""
    seen: list[int] = []
    upload = multi_tensor.upload

    def count(content: bytes, on_device: Tensor) -> None:
        seen.append(len(content))
        upload(content, on_device)

    monkeypatch.setattr(multi_tensor, "upload", count)
    return seen


def test_only_what_changed_is_uploaded_and_in_one_table(uploads: list[int]) -> None:
    params = make_params()
    optimizer = TritonAdamW(params, impl="triton", max_norm=1.0)
    optimizer.step()
    uploads.clear()
    for _ in range(3):
        optimizer.step()
    assert uploads == []
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert uploads == []
    optimizer.param_groups[0]["eps"] = 1e-6
    optimizer.step()
    assert len(uploads) == 1
    uploads.clear()
    old = renew_gradients(params)
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    assert len(uploads) == 2, "the norm's table and the step's"
    assert len(old) == len(params)


@pytest.mark.parametrize("num_groups", [1, 2, 4, 5])
def test_the_learning_rates_of_few_groups_are_not_uploaded(num_groups: int, uploads: list[int]) -> None:
    """Of up to four; with any number each group takes its own, as in an optimizer of its own."""
    shapes = [[(40, 30), (7,)], [(300,), (11, 5)], [(1,), (64, 3)], [(129,), (2, 2)], [(17,), (31, 9)]][:num_groups]
    params = [make_params(each) for each in shapes]
    others = [[torch.nn.Parameter(p.detach().clone()) for p in group] for group in params]
    ours = TritonAdamW([{"params": group, "weight_decay": 0.1 * i} for i, group in enumerate(params)], impl="triton")
    apart = [TritonAdamW([{"params": group, "weight_decay": 0.1 * i}], impl="triton") for i, group in enumerate(others)]
    for group, other in zip(params, others):
        for p, q in zip(group, other):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
    for step in range(5):
        for i, (group, optimizer) in enumerate(zip(ours.param_groups, apart)):
            # the last one's stays, the first one's becomes zero
            group["lr"] = optimizer.param_groups[0]["lr"] = 0.1 if i == 3 else 0.1 * (step % 4) / (1 + i)
        uploads.clear()
        ours.step()
        assert step == 0 or len(uploads) == (num_groups > 4)
        for optimizer in apart:
            optimizer.step()
        assert all(torch.equal(p, q) for group, other in zip(params, others) for p, q in zip(group, other))


def test_the_learning_rate_of_a_tensor_alone_in_its_launch_is_not_uploaded(uploads: list[int]) -> None:
    """It goes to the kernel as an argument; each launch takes that of its tensor's group."""
    params = [torch.nn.Parameter(torch.randn(300, device=DEVICE)) for _ in range(2)]
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ours, theirs = (
        TritonAdamW([{"params": [p], "amsgrad": p is each[1]} for p in each], impl=impl)
        for each, impl in ((params, "triton"), (others, "torch"))
    )
    for p, q in zip(params, others):
        p.grad = q.grad = torch.randn(300, device=DEVICE)
    ours.step()
    theirs.step()
    changes = [{}, {"lr": 0.1}, {"eps": 0.1}, {"betas": (0.5, 0.7), "lr": 0.3}, {"weight_decay": 0.3}, {"lr": 0.2}]
    for change in [*changes, {"maximize": True}, {"lr": 0.1}, {}]:
        uploads.clear()
        for optimizer in (ours, theirs):
            optimizer.param_groups[1].update(change)
            optimizer.step()
        for p, q in zip(params, others):
            torch.testing.assert_close(p, q)
        assert bool(uploads) == bool(change.keys() - {"lr"}), change


def test_a_gradient_of_another_layout_at_the_same_address_is_seen() -> None:
    memory = torch.randn(24, device=DEVICE)
    p = torch.nn.Parameter(torch.randn(4, 6, device=DEVICE))
    q = p.detach().clone()
    optimizer = TritonAdamW([p], lr=0.1, impl="triton")
    m, v, steps = torch.zeros_like(q), torch.zeros_like(q), torch.zeros((), device=DEVICE)
    for grad in (memory.view(4, 6), memory.view(6, 4).t(), memory.view(4, 6)):
        p.grad = grad
        optimizer.step()
        options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
        reference.adamw_([q], [grad], [m], [v], steps=steps, **options)
    torch.testing.assert_close(p.detach(), q, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("shapes", [[(40, 30)], [(40, 30), (7,)]], ids=["one", "two"])
@pytest.mark.parametrize("back", [True, False], ids=["back", "on"])
def test_a_step_that_failed_is_not_taken_for_done(
    shapes: Any, max_norm: float | None, back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever upload or table it is that fails, the next step knows what is on the device, with any gradients."""
    countdown = [0]

    def failing_once(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            countdown[0] -= 1
            if countdown[0] == 0:
                raise MemoryError("no memory")
            return function(*args, **options)

        return call

    monkeypatch.setattr(multi_tensor, "upload", failing_once(multi_tensor.upload))
    monkeypatch.setattr(torch, "zeros", failing_once(torch.zeros))
    num_failures = 0
    for failing in range(1, 12):
        countdown[0] = 0
        params = make_params(shapes)
        others = [torch.nn.Parameter(p.detach().clone()) for p in params]
        ours, expected = (TritonAdamW(each, impl="triton", max_norm=max_norm) for each in (params, others))
        first = [torch.randn_like(p) for p in params]
        # not aligned to 16 bytes, so that everything is cut anew
        second = [torch.randn(p.numel() + 1, device=DEVICE)[1:].view(p.shape) for p in params]

        def give(grads: list[Tensor], params: Any = params, others: Any = others) -> None:
            for p, q, grad in zip(params, others, grads):
                p.grad, q.grad = grad, grad.clone()

        give(first)
        ours.step()
        give(second)
        countdown[0] = failing
        try:
            ours.step()
        except MemoryError:
            num_failures += 1
            give(first)
            expected.step()
            give(first if back else second)
            ours.step()
            expected.step()
            assert all(map(torch.equal, params, others)), failing
    # three tables that start at zero, and a list's map and records; of a list with a norm two tables more
    assert num_failures >= 3 + (0 if len(shapes) == 1 else 2) + (0 if max_norm is None else 2)


@pytest.mark.slow
@pytest.mark.parametrize("num_before", [0, 1, 2], ids=["first", "second", "steady"])
@pytest.mark.parametrize("shapes", [[(40, 30)], [(40, 30), (7,)]], ids=["one", "two"])
def test_a_step_that_is_interrupted_is_taken_or_not(shapes: Any, num_before: int) -> None:
    """And the next steps read what they should, also the gradients and hyperparameters of before."""
    within = [
        *("SteadyStep._get_ready", "SteadyStep._note", "DeviceTable.update"),
        *(f"AdamWLaunch.{name}" for name in ("_set_scalars", "_upload", "get_ready", "refresh")),
        *(f"AdamWPlan.{name}" for name in ("get_ready", "prepare", "refresh", "renumber")),
    ]
    values = make_params(shapes)
    grads = [[torch.randn_like(p) for p in values] for _ in range(2)]

    def start() -> Any:
        params = [torch.nn.Parameter(p.detach().clone()) for p in values]
        optimizer = TritonAdamW(params, impl="triton")

        def step(which: int) -> None:
            optimizer.param_groups[0].update(lr=[0.1, 0.2][which], eps=[1e-8, 1e-2][which])
            for p, grad in zip(params, grads[which]):
                p.grad = grad
            optimizer.step()

        return params, step

    assert_taken_or_not(start, num_before, within)


def test_a_refused_gradient_does_not_hide_that_others_are_copied() -> None:
    """Those of a foreign layout are copied again after a step that failed."""
    p, q = (torch.nn.Parameter(torch.ones(4, 6, device=DEVICE)) for _ in range(2))
    grad = torch.randn(6, 4, device=DEVICE)
    p.grad, q.grad = grad.t(), grad.t().contiguous()
    ours, expected = TritonAdamW([p], impl="triton"), TritonAdamW([q], impl="triton")
    ours.step()
    p.grad = torch.zeros(4, 6, device=DEVICE)
    p.grad.resize_(3)
    with pytest.raises(ValueError, match=r"grad of .*'params'\]\[0\] must be like"):
        ours.step()
    p.grad = grad.t()
    for optimizer in (ours, expected, expected):
        optimizer.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["one launch", "two launches"])
def test_each_of_several_steady_steps_reads_what_is_there(dtype: torch.dtype, max_norm: float | None) -> None:
    """Gradients that are written in place, and that move."""
    params = [torch.nn.Parameter(torch.randn(100, device=DEVICE).to(each)) for each in (torch.float32, dtype)]
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ours, expected = (TritonAdamW(each, lr=0.1, max_norm=max_norm, impl="triton") for each in (params, others))
    kept = [[torch.randn_like(p) for p in params] for _ in range(2)]
    for turn in (0, 0, 0, 1, 1, 0, 0, 0):
        for p, q, grad in zip(params, others, kept[turn]):
            grad.mul_(1.5)
            p.grad, q.grad = grad, grad.clone()
        # so that nothing is taken for known
        expected._forget()
        ours.step()
        expected.step()
    assert ours._prepared is not None
    assert ours._prepared.kernels is not None
    assert ours._prepared.kernels.plan.num_launches == len({torch.float32, dtype})
    assert all(map(torch.equal, params, others))


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"master_weights": "fp32"}], ids=str)
def test_only_a_step_unlike_the_one_before_takes_the_long_way(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    long_ways: list[int] = []
    prepared_for = TritonAdamW._prepared_for

    def count(*args: Any) -> Any:
        long_ways.append(1)
        return prepared_for(*args)

    monkeypatch.setattr(TritonAdamW, "_prepared_for", count)
    params = [torch.nn.Parameter(p.detach().bfloat16()) for p in make_params()]
    renew_gradients(params)
    optimizer = TritonAdamW(params, impl="triton", **options)
    group = optimizer.param_groups[0]
    for edit in (
        lambda: None,
        lambda: renew_gradients(params),
        lambda: group.update(lr=0.01),
        lambda: group.update(betas=[0.8, 0.9]),
        lambda: group["betas"].reverse(),
        lambda: group.update(lr=torch.tensor(0.02)),
        lambda: group["lr"].mul_(2),
        lambda: optimizer.state[params[0]],
    ):
        edit()
        versions = [p._version for p in params]
        optimizer.step()
        assert all(p._version > version for p, version in zip(params, versions)), "autograd knows of each step"
    assert long_ways == [1]
    params[0].grad = None
    optimizer.step()
    optimizer.step()
    assert long_ways == [1, 1]
    # what a loss scaler says of the gradients
    optimizer.found_inf = torch.zeros((), device=DEVICE)
    optimizer.step()
    assert long_ways == [1, 1, 1]


def _step_with_closure(optimizer: TritonAdamW, params: list[torch.nn.Parameter]) -> None:
    assert optimizer.step(lambda: (renew_gradients(params), 3.0)[1]) == 3.0


def _step_with_clip_factor(optimizer: TritonAdamW, params: list[torch.nn.Parameter]) -> None:
    optimizer.step(clip_factor=torch.tensor(0.5, device=DEVICE))


def _step_with_scaled_gradients(optimizer: TritonAdamW, params: list[torch.nn.Parameter]) -> None:
    optimizer.grad_scale = torch.tensor(2.0, device=DEVICE)
    optimizer.step()
    del optimizer.grad_scale


def _step_in_another_layout(optimizer: TritonAdamW, params: list[torch.nn.Parameter]) -> None:
    """One that brings other moments, and is none that others repeat."""
    before = params[0].data
    params[0].data = before.t().contiguous().t()
    _step_with_scaled_gradients(optimizer, params)
    params[0].data = before


def _step_in_plain_torch(optimizer: TritonAdamW, params: list[torch.nn.Parameter]) -> None:
    optimizer.param_groups[1]["impl"] = "torch"
    optimizer.step()


def _load(optimizer: TritonAdamW, params: list[torch.nn.Parameter]) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _step_in_a_capture(optimizer: TritonAdamW, params: list[torch.nn.Parameter]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw, "is_capturing_here", lambda: True)
        optimizer.step()
    assert optimizer._steady is None


@pytest.mark.parametrize(
    "event",
    [
        _step_with_closure,
        _step_with_clip_factor,
        _step_with_scaled_gradients,
        _step_in_another_layout,
        _step_in_plain_torch,
        _load,
        _step_in_a_capture,
    ],
)
def test_steps_after_one_of_another_kind_repeat_nothing_else(event: Any) -> None:
    """Compared with an optimizer that takes nothing for known."""
    found = []
    for forgets in (False, True):
        torch.manual_seed(0)
        params = make_params([(4, 6), (4, 6)])
        optimizer = TritonAdamW([{"params": [p]} for p in params], lr=0.1, impl="triton")
        for step in (None, None, event, None, None):
            if forgets:
                optimizer._forget()
            optimizer.step() if step is None else step(optimizer, params)
        found.append([*params, *(state["exp_avg"] for state in optimizer.state.values())])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_the_norm_is_known_of_a_step_that_its_learning_rate_ends() -> None:
    params = make_params()
    optimizer = TritonAdamW(params, impl="triton", max_norm=1.0)
    optimizer.step()
    renew_gradients(params)
    optimizer.param_groups[0]["lr"] = "high"
    with pytest.raises(TypeError, match="lr must be a number"):
        optimizer.step()
    norms = torch.stack([p.grad.norm() for p in params if p.grad is not None])
    torch.testing.assert_close(optimizer.grad_norm, norms.norm())


def test_steps_read_gradients_of_a_foreign_layout_as_they_are_then() -> None:
    p, q = (torch.nn.Parameter(torch.ones(4, 6, device=DEVICE)) for _ in range(2))
    p.grad = torch.randn(6, 4, device=DEVICE).t()
    ours, expected = TritonAdamW([p], impl="triton"), TritonAdamW([q], impl="triton")
    for _ in range(4):
        p.grad.normal_()
        q.grad = p.grad.contiguous()
        ours.step()
        expected.step()
        assert torch.equal(p, q)


def test_kernels_that_were_made_ready_for_another_step_are_made_ready_again() -> None:
    """As by a step that fails before it launches."""
    params = make_params()
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ours, expected = TritonAdamW(params, lr=0.1, impl="triton"), TritonAdamW(others, lr=0.1, impl="triton")
    for turn in range(4):
        for p, q in zip(params, others):
            q.grad = p.grad
        if turn > 1:
            assert ours._prepared is not None
            kernels, (group,) = ours._prepared.kernels, ours.param_groups
            assert kernels is not None
            none = {"grad_scale": None, "found_inf": None, "clip_factor": None}
            kernels.get_ready(
                [{**group, "lr": 0.5}], kernels.look_at([p.grad for p in params if p.grad is not None]), **none
            )
        ours.step()
        expected.step()
        assert all(map(torch.equal, params, others)), turn


@pytest.mark.parametrize("event", ["failed", "captured"])
def test_numbers_that_change_are_what_the_launch_reads(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its upload fails at the end, so that the step is never taken, or makes another table for a graph."""
    upload = multi_tensor.upload

    def fail(content: bytes, on_device: Tensor) -> None:
        upload(content, on_device)
        raise MemoryError

    params = make_params()
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    for p, q in zip(params, others):
        q.grad = p.grad
    ours, expected = TritonAdamW(params, lr=0.1, impl="triton"), TritonAdamW(others, lr=0.1, impl="triton")
    (group,) = ours.param_groups
    # the learning rate is an argument, eps is uploaded
    numbers = [(0.1, 1e-8), (0.1, 1e-8), (0.2, 1e-2), (0.2, 1e-2), (0.1, 1e-8)]
    for turn, (group["lr"], group["eps"]) in enumerate(numbers):
        if turn == 3 and event == "failed":
            group["lr"], group["eps"] = 0.5, 0.1
            with monkeypatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr(multi_tensor, "upload", fail)
                ours.step()
            group["lr"], group["eps"] = numbers[3]
        if turn == 1 and event == "captured":
            assert ours._prepared is not None
            assert ours._prepared.kernels is not None
            for launch in ours._prepared.kernels.plan._launches:
                launch._changing.keep_for_graph()
        expected.param_groups[0].update(lr=group["lr"], eps=group["eps"])
        # so that nothing is taken for known
        expected._forget()
        ours.step()
        expected.step()
        assert all(map(torch.equal, params, others)), turn


@pytest.mark.parametrize("hooks", [0, 1])
def test_a_step_of_dtensors_is_planned_once(hooks: int) -> None:
    """Also when somebody has read the state, so that each step looks whether that is still the same."""
    run_ranks(_steps_of_dtensors, 1, hooks, backend="gloo")


def _steps_of_dtensors(rank: int, world_size: int, hooks: int) -> None:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh(DEVICE, (world_size,))
    param = torch.nn.Parameter(DTensor.from_local(torch.ones(6, 4, device=DEVICE), mesh, [Shard(0)]))
    param.grad = DTensor.from_local(torch.ones(6, 4, device=DEVICE), mesh, [Shard(0)])
    optimizer = TritonAdamW([param], impl="triton")
    for _ in range(hooks):
        optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.step()
    assert optimizer.state[param]
    optimizer.step()
    prepared = optimizer._prepared
    optimizer.step()
    assert optimizer._prepared is prepared


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_betas_may_be_tensors_that_change(impl: Any) -> None:
    ours, theirs = make_params(), []
    for p in ours:
        assert p.grad is not None
        theirs.append(torch.nn.Parameter(p.detach().clone()))
        theirs[-1].grad = p.grad.clone()
    betas = torch.tensor(0.9), torch.tensor(0.99)
    optimizer = TritonAdamW(ours, betas=betas, foreach=False, impl=impl)
    expected = torch.optim.AdamW(theirs, betas=(betas[0].item(), betas[1].item()), foreach=False)
    for _ in range(3):
        optimizer.step()
        expected.step()
        betas[0].mul_(0.9)
        expected.param_groups[0]["betas"] = (betas[0].item(), betas[1].item())
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning", "ignore:.*capturable=True.*:UserWarning")
def test_betas_on_the_device_are_read_there() -> None:
    ours, theirs = make_params(), []
    for p in ours:
        assert p.grad is not None
        theirs.append(torch.nn.Parameter(p.detach().clone()))
        theirs[-1].grad = p.grad.clone()
    betas = torch.tensor(0.9, device="cuda"), torch.tensor(0.99, device="cuda", dtype=torch.float64)
    optimizer = TritonAdamW(ours, betas=betas, capturable=True)
    expected = TritonAdamW(theirs, betas=(betas[0].item(), betas[1].item()))
    optimizer.step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    expected.step()
    expected.step()
    for _ in range(2):
        betas[0].mul_(0.9)
        expected.param_groups[0]["betas"] = (betas[0].item(), betas[1].item())
        graph.replay()
        expected.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.timing
def test_a_step_takes_little_of_the_host() -> None:
    shapes = [(64,)] * 148
    ours, torchs = TritonAdamW(make_params(shapes)), torch.optim.AdamW(make_params(shapes), fused=True)
    ours.step()
    torchs.step()
    # in turn, as a host is twice as slow from one minute to the next
    times = [(_host_seconds(ours), _host_seconds(torchs)) for _ in range(20)]
    our_least, torchs_least = map(min, zip(*times))
    # the hosts that NOTES.md speaks of take .21 to .25 of it
    assert our_least < 0.3 * torchs_least


@pytest.mark.gpu
@pytest.mark.timing
@pytest.mark.parametrize("size", [72, multi_tensor.STAGED, 8 * multi_tensor.STAGED])
def test_an_upload_waits_for_nothing_that_the_device_has_to_do(size: int) -> None:
    content, on_device = (
        torch.randint(256, (size,), dtype=torch.uint8),
        torch.zeros(size // 8, dtype=torch.int64, device="cuda"),
    )
    given = content.numpy().tobytes()
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)
        start = time.perf_counter()
        multi_tensor.upload(given, on_device)
        seconds = time.perf_counter() - start
        busy = not torch.cuda.current_stream().query()
    assert busy
    assert seconds < 0.02
    assert torch.equal(on_device.cpu().view(torch.uint8), content)


def _host_seconds(optimizer: torch.optim.Optimizer) -> float:
    """What the host takes for one of 20 steps."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        optimizer.step()
    return (time.perf_counter() - start) / 20


def test_the_norm_of_groups_with_and_without_kernels() -> None:
    params = make_params(((6, 5),))
    double = torch.nn.Parameter(torch.ones(3, device=DEVICE, dtype=torch.float64))
    double.grad = torch.ones_like(double)
    groups = [{"params": params}, {"params": [double], "impl": "torch"}]
    optimizer = TritonAdamW(groups, max_norm=1.0, impl="triton")
    optimizer.step()
    expected = torch.nn.utils.get_total_norm([p.grad for p in (*params, double) if p.grad is not None])
    assert optimizer.grad_norm is not None
    torch.testing.assert_close(optimizer.grad_norm, expected)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_default_device_is_not_where_tables_are_made(impl: Any) -> None:
    """The host's work is done on the host whatever ``torch.set_default_device`` says."""
    params, others = make_params(), make_params()
    for p, q in zip(params, others):
        q.data = p.data.clone()
        assert p.grad is not None
        q.grad = p.grad.clone()
    ours, expected = (TritonAdamW(each, impl=impl, max_norm=1.0) for each in (params, others))
    expected.step()
    expected.load_state_dict(expected.state_dict())
    expected.step()
    with torch.device("meta"):
        ours.step()
        ours.load_state_dict(ours.state_dict())
        ours.step()
    assert all(map(torch.equal, params, others))
