"""Tables that a captured step reads: it uploads nothing that is there, and what it uploads nobody else relies on."""

from __future__ import annotations

import gc
import weakref
from array import array
from collections.abc import Callable

import pytest
import torch
from random_tensors import DEVICE, assert_same_bits
from torch import nn

from optim_kernels import NSConfig, TritonAdamW, TritonMuon, _graphs, functional, multi_tensor, newton_schulz
from optim_kernels._newton_schulz import chain
from optim_kernels._optimizers import muon_planner
from optim_kernels.multi_tensor import DeviceTable

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
NORMUON = {"variant": "nanochat-2026-07", "missing_grad": "skip"}
MAKERS: dict[str, Make] = {
    "AdamW": lambda params: TritonAdamW(params, lr=0.1, capturable=True),
    "AdamW of one": lambda params: TritonAdamW(params[:1], lr=0.1, capturable=True),
    "AdamW, max_norm": lambda params: TritonAdamW(params, lr=0.1, capturable=True, max_norm=1.0),
    "Muon": lambda params: TritonMuon(params, lr=0.1, capturable=True),
    "NorMuon": lambda params: TritonMuon([{"params": params, **NORMUON}], lr=0.1, capturable=True),
}


def words(*values: int) -> bytes:
    return array("q", values).tobytes()


def test_a_table_filled_by_a_graph_is_for_that_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    table = DeviceTable(torch.device(DEVICE))
    assert table.update(words(1, 2))
    assert not table.update(words(1, 2))
    eager = table.words
    with monkeypatch.context() as patched:
        patched.setattr(multi_tensor, "is_capturing", lambda _: True)
        # what is there need not be uploaded
        assert not table.update(words(1, 2))
        assert table.update(words(3, 4))
        table.keep_for_graph()
        first = table.words
        assert table.update(words(3, 4))
        assert table.words is not first
    # the graph has not been replayed
    assert table.update(words(3, 4))
    assert table.words is not first
    assert eager.tolist() == [1, 2]
    assert table.words.tolist() == [3, 4]
    assert not table.update(words(3, 4))


def test_a_table_made_in_inference_mode_is_written_outside_of_it() -> None:
    table = DeviceTable(torch.device(DEVICE))
    with torch.inference_mode():
        table.update(words(1, 2))
        halves = table.part(1, dtype=torch.int32)
    made = table.words
    assert not made.is_inference()
    assert not halves.is_inference()
    assert not table.update(words(3, 4))
    assert table.words is made
    assert made.tolist() == [3, 4]
    assert halves.tolist() == [4, 0]


@pytest.mark.parametrize("sizes", [[300], [300, 500]], ids=["one", "two"])
def test_what_a_graph_reads_is_kept_and_not_written_again(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that repeat each other go on in other tables, once a number changes that is no argument of the kernel."""
    ours, other = ([nn.Parameter(torch.ones(size, device=DEVICE)) for size in sizes] for _ in range(2))
    optimizer, eager = (TritonAdamW(params, lr=0.1, capturable=True, impl="triton") for params in (ours, other))
    for p in (*ours, *other):
        p.grad = torch.ones_like(p)
    optimizer.step()
    eager.step()
    with monkeypatch.context() as patched:
        for name in ("adamw.is_capturing_here", "functional._adamw_launch.is_capturing", "multi_tensor.is_capturing"):
            patched.setattr(f"optim_kernels.{name}", lambda *_: True)
        optimizer.step()
    eager.step()
    assert optimizer._prepared is not None
    assert optimizer._prepared.kernels is not None
    (launch,) = optimizer._prepared.kernels.plan._launches
    read = [tensor.untyped_storage() for tensor in launch._tensors()]
    kept = {tensor.untyped_storage().data_ptr() for tensor in _graphs._OWNED_BY_GRAPHS}
    assert {storage.data_ptr() for storage in read} <= kept
    table = launch._scalars_view
    content = table.clone()
    for eps in (1e-8, 1e-8, 0.5, 0.5, 0.25):
        for each in (optimizer, eager):
            each.param_groups[0]["eps"] = eps
            each.step()
        assert_same_bits(ours, other)
    assert torch.equal(table, content)


def make(dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = []
    for i, shape in enumerate([(512, 300), (64, 64), (256, 1024), (33, 1000)]):
        dtype = dtypes[i % len(dtypes)]
        params.append(nn.Parameter(torch.randn(shape, generator=generator).to("cuda", dtype)))
        params[-1].grad = torch.randn(shape, generator=generator).to("cuda", dtype)
    return params


def captured(optimizer: torch.optim.Optimizer) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph


def set_rates(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Learning rates, which may be arguments of a kernel, and weight decays, which are words of a table."""
    for group in optimizer.param_groups:
        group.update(lr=rate, weight_decay=rate / 2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*capturable=True.*:UserWarning")
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.bfloat16)], ids=["one dtype", "two"])
@pytest.mark.parametrize("name", MAKERS)
def test_captures_that_are_not_replayed_leave_no_trace(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Two graphs with rates of their own, the second one replayed first, and eager steps between them."""
    ours, other = make(dtypes), make(dtypes)
    optimizer, eager = MAKERS[name](ours), MAKERS[name](other)
    optimizer.step()
    eager.step()
    graphs: list[torch.cuda.CUDAGraph] = []
    for rate in (0.2, 0.05):
        set_rates(optimizer, rate)
        graphs.append(captured(optimizer))
        set_rates(eager, rate)
        optimizer.step()
        eager.step()
    for number, rate in ((1, 0.05), (0, 0.2), (1, 0.05)):
        graphs[number].replay()
        set_rates(eager, rate)
        eager.step()
        set_rates(optimizer, 0.1)
        optimizer.step()
        set_rates(eager, 0.1)
        eager.step()
    assert_same_bits(ours, other)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*capturable=True.*:UserWarning")
@pytest.mark.parametrize("name", MAKERS)
def test_new_gradients_that_a_graph_makes(name: str) -> None:
    """As when a whole training step is captured: gradients are the graph's own, and eager steps have others."""
    ours, other = make(), make()
    optimizer, eager = MAKERS[name](ours), MAKERS[name](other)
    optimizer.step()
    eager.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            for p in ours:
                p.grad = p.detach() * 2
            optimizer.step()
    owned = [p.grad for p in ours]
    for _ in range(2):
        for p, q in zip(ours, other, strict=True):
            p.grad = p.detach() * 3
            q.grad = q.detach() * 3
        optimizer.step()
        eager.step()
        graph.replay()
        for _ in range(2):
            for q in other:
                q.grad = q.detach() * 2
            eager.step()
    # what the graph left in its gradients is what an eager step reads there
    for p, grad, q in zip(ours, owned, other, strict=True):
        p.grad = grad
        assert grad is not None
        assert q.grad is not None
        assert torch.equal(grad, q.grad)
    optimizer.step()
    eager.step()
    assert_same_bits(ours, other)


def _overwrite_free_memory() -> None:
    """Whatever has been given back is another's now."""
    torch.cuda.synchronize()
    sizes = [512, 4096, 65536, 1 << 18, 1 << 20, 1 << 21, 1 << 22]
    kept = [torch.full((size,), -1, dtype=torch.int8, device="cuda") for size in sizes for _ in range(24)]
    torch.cuda.synchronize()
    del kept


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*capturable=True.*:UserWarning")
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "AdamW of one"])
def test_a_graph_outlives_the_steps_it_was_captured_among(name: str) -> None:
    """Later steps have gradients of other parameters, and later groups others still; then its own come back."""
    ours, other = make(), make()
    optimizer, eager = MAKERS[name](ours), MAKERS[name](other)
    optimizer.step()
    eager.step()
    graph, grad = captured(optimizer), ours[1].grad
    ours[1].grad, other_grad, other[1].grad = None, other[1].grad, None
    optimizer.step()
    eager.step()
    _overwrite_free_memory()
    graph.replay()
    other[1].grad = other_grad
    eager.step()
    new, of_eager = make()[2], make()[2]
    for each, parameter in ((optimizer, new), (eager, of_eager)):
        each.add_param_group({"params": [parameter], **(NORMUON if name == "NorMuon" else {})})
    ours[1].grad = grad
    optimizer.step()
    eager.step()
    _overwrite_free_memory()
    graph.replay()
    of_eager.grad = None
    eager.step()
    assert_same_bits([*ours, new], [*other, of_eager])


@pytest.mark.gpu
def test_a_graph_outlives_what_newton_schulz_keeps() -> None:
    x = torch.randn(64, 256, 256, device="cuda", dtype=torch.float16)
    expected = newton_schulz(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = newton_schulz(x)
    for count in range(65, 65 + 300):
        newton_schulz(x[:1, :64, :64].expand(count, -1, -1).contiguous())
    chain._chain_of.cache_clear()
    gc.collect()
    _overwrite_free_memory()
    graph.replay()
    assert torch.equal(result, expected)


def test_what_a_plan_of_newton_schulz_keeps_was_there_before_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made in a capture is filled in when the graph is replayed; eager calls before that read what is there."""
    given: list[torch.Tensor] = []

    class Launch:
        def __init__(self, chain: chain.Chain) -> None:
            pass

        def __call__(self, xs: chain.Xs, scales: torch.Tensor, squared: torch.Tensor, *others: object) -> None:
            given.extend((scales, squared))

    monkeypatch.setattr(chain, "ChainLaunch", Launch)
    x, config = torch.randn(3, 20, 24, device=DEVICE), NSConfig(dtype=torch.float16)
    # of matrices that are read as they are, and so need no scales of 1
    chain.ChainPlan(x.half(), x.shape, config)(x.half())
    _, known = chain._chain_of(config, *x.shape, x.device)
    assert known.tolist() == [1.0, 1.0, 1.0]
    del given[:]
    chain.ChainPlan(x, x.shape, config)(x)
    assert all(scales is known for scales in given)
    assert len(given) == 2


@pytest.mark.gpu
def test_a_kind_of_batch_that_is_captured_before_it_has_run() -> None:
    x = torch.randn(64, 256, 256, device="cuda")
    newton_schulz(x.half())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = newton_schulz(x)
    eager = newton_schulz(x)
    graph.replay()
    assert torch.equal(eager, captured)
    assert (eager - newton_schulz(x.half())).norm() <= 1e-2 * eager.norm()


@pytest.mark.parametrize("change", ["nesterov", "fewer"])
def test_what_muon_has_not_stepped_before_is_not_captured(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything is updated, and a plan that is there is not dropped meanwhile."""
    params = [nn.Parameter(torch.ones(8, 12, device=DEVICE)) for _ in range(2)]
    optimizer = TritonMuon([{"params": params, "impl": "triton"}], lr=0.1, capturable=True)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    (plan,) = optimizer.plans()
    if change == "fewer":
        params[1].grad = None
    else:
        optimizer.param_groups[0][change] = False
    monkeypatch.setattr(muon_planner, "is_capturing_here", lambda: True)
    with pytest.raises(RuntimeError, match="have not been stepped with these options before; take one step before"):
        optimizer.step()
    assert_same_bits(params, before)
    gone = weakref.ref(plan)
    del plan
    gc.collect()
    assert gone() is not None
    monkeypatch.undo()
    optimizer.step()
    assert not torch.equal(params[0], before[0])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_muon_refuses_a_capture_of_what_it_has_not_stepped_before() -> None:
    """And the capture of what it has goes on from there."""
    p = nn.Parameter(torch.ones(8, 12, device="cuda"))
    optimizer = TritonMuon([p], lr=0.1, capturable=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[0]["nesterov"] = False
    with (
        pytest.raises(RuntimeError, match="take one step before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    before = p.detach().clone()
    graph.replay()
    assert not torch.equal(p, before)


@pytest.mark.gpu
def test_a_plan_made_while_a_graph_is_captured() -> None:
    """Nothing of it is there before a replay: an eager step makes its own."""
    ours, other = make(), make()
    states = [
        ([torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params], torch.zeros((), device="cuda"))
        for params in (ours, other)
    ]

    def step(params: list[nn.Parameter], number: int, plan: functional.AdamWPlan) -> None:
        m, v, steps = states[number]
        grads = [p.grad for p in params if p.grad is not None]
        with torch.no_grad():
            hyper = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
            functional.adamw_(params, grads, m, v, steps=steps, plan=plan, **hyper)

    step(other, 1, functional.AdamWPlan())
    step(other, 1, functional.AdamWPlan())
    plan = functional.AdamWPlan()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(ours, 0, plan)
    step(ours, 0, plan)
    graph.replay()
    assert_same_bits(ours, other)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*capturable=True.*:UserWarning")
@pytest.mark.parametrize(("name", "nodes"), [("AdamW", 1), ("AdamW, max_norm", 2), ("Muon", None)])
def test_a_replay_is_kernels_alone(name: str, nodes: int | None) -> None:
    """What the warm-up has uploaded is not uploaded again."""
    optimizer = MAKERS[name](make())
    optimizer.step()
    graph = captured(optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        graph.replay()
        torch.cuda.synchronize()
    events = [event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    assert isinstance(optimizer, TritonAdamW | TritonMuon)
    if isinstance(optimizer, TritonMuon):
        nodes = sum(plan.launches for plan in optimizer.plans())
    assert len(events) == nodes, events
