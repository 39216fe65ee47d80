"""The grouped Muon step against plain torch: norms, masters, random bits, what one matrix may not do to another."""

from __future__ import annotations

import copy
import math
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from interrupts import assert_taken_or_not
from random_tensors import DEVICE, assert_same_bits, give_gradients, random_parameters
from torch import Tensor, nn

from optim_kernels import COEFFICIENTS, TritonMuon
from optim_kernels._impl import is_interpreted
from optim_kernels._optimizers.muon_planner import MuonPlanner
from optim_utils.param_groups import MatrixView

pytest.importorskip("triton")

# Exact products, so that what is left to compare is the step around them.
EXACT: dict[str, Any] = {"ns_dtype": torch.float32, "impl": "triton"}


parameters = partial(random_parameters, scale=0.1)


def steps(optimizer: TritonMuon, params: list[nn.Parameter], seeds: range, scale: float = 1.0) -> None:
    for seed in seeds:
        give_gradients(*params, seed=seed, scale=scale)
        optimizer.step()


VARIANTS = {
    "torch": {},
    "climbing": {"nesterov": False, "maximize": True, "adjust_lr_fn": "match_rms_adamw"},
    "nanochat": {"beta2": 0.9, "cautious": True, "row_equilibrate": True, "renormalize": True, "eps_mode": "add"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "master"), [("torch", "fp32"), ("climbing", None), ("nanochat", None)], ids=list(VARIANTS)
)
def test_grouped_step_equals_plain_torch(name: str, master: str | None) -> None:
    """Two steps with changing lr, gradients and clip factor; wide, tall, square, split and transposed matrices."""
    dtype = torch.float32 if master is None else torch.bfloat16
    shapes = [(20, 70), (72, 16), (33, 33), (2, 8, 24), (48, 24)]
    views = [None, None, None, None, MatrixView(shape=(48, 24), split=(32, 16))]
    runs = []
    for impl in ("triton", "torch"):
        torch.manual_seed(0)
        params = [nn.Parameter((0.1 * torch.randn(shape)).to(DEVICE, dtype)) for shape in shapes]
        params[2] = nn.Parameter(params[2].detach().mT)
        options = {"ns_dtype": torch.float32, "impl": impl, "master_weights": master, **VARIANTS[name]}
        optimizer = TritonMuon([{"params": params, "views": views}], **options)
        for step in range(2):
            for p in params:
                p.grad = torch.randn(p.shape).to(DEVICE, dtype)
            optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
            optimizer.step(clip_factor=torch.tensor(0.5, device=DEVICE))
        runs.append((params, optimizer))
    (ours, optimizer), (plain, other) = runs
    for p, q in zip(ours, plain, strict=True):
        p_state, q_state = optimizer.state[p], other.state[q]
        values = [(p_state[key], q_state[key]) for key in q_state if key != "second_momentum_buffer"]
        for x, y in [(p, q), *values]:
            torch.testing.assert_close(x, y, atol=5e-4 if dtype == torch.float32 else 4e-3, rtol=0)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_tiny_rows_are_raised_as_far_as_nanochat_raises_them(impl: str) -> None:
    """Rows of U below 1e-6 are not brought to the norm of the others, nor variances below 1e-10 divided out."""
    p = torch.nn.Parameter(torch.zeros(6, 4, device=DEVICE))
    size = torch.tensor([1.0, 2.0, 1e-7, 1e-15, 0.0, 0.5], device=DEVICE)
    torch.manual_seed(0)
    p.grad = size[:, None] * torch.randn(6, 4).to(DEVICE)
    options: dict[str, Any] = {"momentum": 0.0, "nesterov": False, "ns_dtype": torch.float32, "impl": impl}
    TritonMuon([{"params": [p], "variant": "nanochat-2026-07"}], lr=1.0, adjust_lr_fn="none", **options).step()
    u = p.grad.double()
    u = u * (u.norm() / math.sqrt(6)) / u.norm(dim=1, keepdim=True).clamp(min=1e-6)
    x = u / (1.01 * u.norm() + 1e-6)
    for a, b, c in COEFFICIENTS["polar_express"]:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x * 2.0 / x.norm()
    scaled = x / (0.1 * x.square().mean(1, keepdim=True)).clamp(min=1e-10).sqrt()
    expected = scaled * x.norm() / scaled.norm()
    # single elements may cancel
    torch.testing.assert_close(p.detach().double().norm(dim=1), expected.norm(dim=1), atol=0, rtol=1e-3)


def test_a_step_with_found_inf_changes_nothing() -> None:
    p = nn.Parameter(torch.randn(16, 24, device=DEVICE))
    p.grad = torch.randn_like(p)
    optimizer = TritonMuon([p], impl="triton", beta2=0.9)
    optimizer.step()
    before = [p.detach().clone(), *(value.clone() for value in optimizer.state[p].values())]
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0, device=DEVICE), torch.tensor(1.0, device=DEVICE)
    optimizer.step()
    for value, expected in zip([p, *optimizer.state[p].values()], before, strict=True):
        torch.testing.assert_close(value, expected, atol=0, rtol=0)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e12], ids=str)
def test_the_folded_norm_is_the_norm(scale: float) -> None:
    """The power of two that X is first written with must not show, whatever the gradients' size."""
    ours, plain = parameters((16, 40), (40, 24)), parameters((16, 40), (40, 24))
    steps(TritonMuon(ours, lr=0.1, eps=0.0, **EXACT), ours, range(1), scale)
    steps(TritonMuon(plain, lr=0.1, eps=0.0, ns_dtype=torch.float32, impl="torch"), plain, range(1), scale)
    for p, q in zip(ours, plain, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)


@pytest.mark.parametrize("ns_dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_a_sample_that_misses_everything_is_made_up_for(ns_dtype: torch.dtype) -> None:
    """Of 130 lines the sample takes lines 0, 8, 16, …: here only line 1 and a large entry in line 3 are there."""
    ours, plain = parameters((130, 8)), parameters((130, 8))
    # torch on a CPU rounds 16-bit products once, as the kernels do; on CUDA it rounds them before C is added as well
    plain = [nn.Parameter(p.detach().cpu()) for p in plain]
    for (p,), impl in ((ours, "triton"), (plain, "torch")):
        p.grad = torch.zeros_like(p)
        p.grad[1] = 1e-3 * torch.arange(1, 9, device=p.device)
        p.grad[3, 5] = 1e4
        TritonMuon([p], lr=0.1, ns_dtype=ns_dtype, impl=impl).step()
    torch.testing.assert_close(ours[0].cpu(), plain[0], atol=1e-6 if ns_dtype == torch.float32 else 5e-4, rtol=0)


SIGNALLING_NAN = {torch.float16: 0x7C01, torch.float32: 0x7F800001}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"beta2": 0.95}, {"row_equilibrate": True}], ids=str)
def test_memory_that_nobody_wrote_is_not_computed_with(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of X that are no multiple of 16 bytes have an end that no product writes, and tiles are read with it."""

    def poisoned(function: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Tensor:
            made: Tensor = function(*args, **kwargs)
            if made.dtype in SIGNALLING_NAN and made.is_contiguous():
                made.view(torch.int16 if made.itemsize == 2 else torch.int32).fill_(SIGNALLING_NAN[made.dtype])
            return made

        return make

    ours = parameters((8, 130), (33, 100))
    with monkeypatch.context() as patched:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            patched.setattr(owner, name, poisoned(getattr(owner, name)))
        steps(TritonMuon(ours, lr=0.1, ns_dtype=torch.float16, impl="triton", **options), ours, range(2))
    assert all(p.isfinite().all() for p in ours)


@pytest.mark.slow
@pytest.mark.parametrize("masters", [None, "fp32", "split16"], ids=str)
@pytest.mark.parametrize("cautious", [False, True], ids=["plain", "cautious"])
def test_the_update_in_the_last_product(masters: str | None, cautious: bool) -> None:
    """Sizes in multiples of 8, wide and tall: the parameter is read, updated and stored by the product itself."""
    dtype = torch.float32 if masters is None else torch.bfloat16
    runs = []
    for impl in ("triton", "torch"):
        params = parameters((16, 40), (40, 8), (24, 24), dtype=dtype)
        options = {"ns_dtype": torch.float32, "impl": impl, "master_weights": masters, "cautious": cautious}
        optimizer = TritonMuon(params, lr=0.05, weight_decay=0.5, momentum_dtype=torch.float32, **options)
        steps(optimizer, params, range(2))
        runs.append([(p, optimizer.state[p]) for p in params])
    for (p, p_state), (q, q_state) in zip(*runs, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6 if masters is None else 2e-3, rtol=0)
        if masters == "fp32":
            torch.testing.assert_close(p_state["master"], q_state["master"], atol=1e-6, rtol=0)
        if masters == "split16":
            values = [
                (state["master_low"].int() + (x.view(torch.int16).int() << 16)).view(torch.float32)
                for x, state in ((p.detach(), p_state), (q.detach(), q_state))
            ]
            torch.testing.assert_close(*values, atol=1e-6, rtol=0)


def test_who_updates_the_parameters() -> None:
    """The last product where it can; a kernel behind it where all of O is needed first, or an address is odd."""
    assert launched({}, (16, 24)) == ["last_product_kernel"]
    assert launched({}, (16, 20)) == ["update_kernel"]
    assert launched({"beta2": 0.9}, (16, 24)) == ["last_product_kernel", "update_kernel"]


def launched(options: dict[str, Any], shape: tuple[int, int]) -> list[str]:
    """Which of the kernels that update parameters a step launches."""
    from optim_kernels._kernels import muon_update as kernels

    names: list[str] = []
    params = parameters(shape)
    give_gradients(*params, seed=9)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("update_kernel", "last_product_kernel"):
            patch.setattr(kernels, name, _Recorder(name, getattr(kernels, name), names))
        TritonMuon(params, **EXACT, **options).step()
    return names


class _Recorder:
    def __init__(self, name: str, kernel: Any, names: list[str]) -> None:
        self._name, self._kernel, self._names = name, kernel, names

    def __getitem__(self, grid: Any) -> Any:
        self._names.append(self._name)
        return self._kernel[grid]


@pytest.mark.parametrize("shape", [(16, 24), (9, 13)], ids=["aligned", "unaligned"])
def test_stochastic_rounding_takes_the_same_bits_as_torch(shape: tuple[int, int]) -> None:
    """Without a gradient the parameter only decays, which both compute exactly alike: every bit must agree."""
    runs = []
    for impl in ("triton", "torch"):
        params = parameters((8, 8), shape, dtype=torch.bfloat16)
        params[1] = nn.Parameter(params[1].detach().mT)  # stored by columns: bits follow the memory
        optimizer = TritonMuon(params, lr=1e-3, weight_decay=0.7, stochastic_rounding=True, seed=5, impl=impl)
        for _ in range(2):
            for p in params:
                p.grad = torch.zeros_like(p)
            optimizer.step()
        assert [float(optimizer.state[p]["step"]) for p in params] == [2.0, 2.0]
        runs.append(params)
    assert_same_bits(*runs)
    assert not torch.equal(runs[0][1], parameters((8, 8), shape, dtype=torch.bfloat16)[1].mT)


def test_found_inf_stops_the_count_too() -> None:
    params = parameters((8, 16), dtype=torch.bfloat16)
    optimizer = TritonMuon(params, stochastic_rounding=True, impl="triton")
    steps(optimizer, params, range(1))
    before = params[0].detach().clone()
    optimizer.found_inf = torch.ones((), device=DEVICE)
    steps(optimizer, params, range(1, 2))
    assert torch.equal(params[0], before)
    assert float(optimizer.state[params[0]]["step"]) == 1.0


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, in the interpreter
def test_nan_and_zero_stay_in_their_matrix() -> None:
    """Matrices of one batch: each equals, to the last bit, what it is without the others."""
    params = parameters(*[(16, 24)] * 4)
    give_gradients(*params, seed=0)
    params[0].grad.zero_()
    params[1].grad[3, 4] = float("nan")
    params[2].grad[0, 0] = float("inf")
    before = params[0].detach().clone()
    (alone,) = parameters((16, 24))
    alone.data, alone.grad = params[3].detach().clone(), params[3].grad.clone()
    for group in (params, [alone]):
        TritonMuon(group, lr=0.1, weight_decay=0.5, **EXACT).step()
    torch.testing.assert_close(params[0].detach(), 0.95 * before)
    assert params[1].isnan().all()
    assert params[2].isnan().all()
    assert torch.equal(params[3], alone)


@pytest.mark.parametrize("row_equilibrate", [False, True])
@pytest.mark.parametrize("eps", [1e-22, 1e-30, 1e-40, 0.0], ids=str)
def test_a_matrix_without_a_gradient_only_decays_whatever_eps(eps: float, row_equilibrate: bool) -> None:
    """1/N = 1/eps is larger than fp32 may be, or its square is, and zero times that would be NaN."""
    params = parameters((16, 24), (8, 8))
    give_gradients(*params, seed=0)
    params[0].grad.zero_()
    before = params[0].detach().clone()
    TritonMuon(params, lr=0.1, weight_decay=0.5, eps=eps, row_equilibrate=row_equilibrate, **EXACT).step()
    torch.testing.assert_close(params[0].detach(), 0.95 * before)
    assert params[1].isfinite().all()


def test_a_resumed_run_is_the_same_run() -> None:
    """Also where the gradients' size jumps by 2^40 in between: nothing is guessed from an earlier step."""
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.5, "ns_dtype": torch.float16, "impl": "triton"}
    params = parameters((16, 40), (24, 8))
    optimizer = TritonMuon(params, **options)
    steps(optimizer, params, range(1))
    resumed = [nn.Parameter(p.detach().clone()) for p in params]
    other = TritonMuon(resumed, **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, own in ((optimizer, params), (other, resumed)):
        steps(each, own, range(1, 2), scale=2.0**-40)
    assert_same_bits(params, resumed)


def test_views_of_one_parameter_are_not_neighbours() -> None:
    """Blocks of several shapes go to several batches; second moments and learning rates stay with their block."""
    runs = []
    for impl in ("triton", "torch"):
        params = parameters((24, 16), (8, 40))
        views = [MatrixView(shape=(24, 16), split=(8, 16)), None]
        optimizer = TritonMuon(
            [{"params": params, "views": views}], lr=0.1, beta2=0.9, ns_dtype=torch.float32, impl=impl
        )
        steps(optimizer, params, range(2))
        runs.append([*params, *(optimizer.state[p]["second_momentum_buffer"].flatten() for p in params)])
    for x, y in zip(*runs, strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=0)


def test_a_repeated_step_notices_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changes between steps, the optimizer does as one that looks at everything anew."""
    repeated: list[bool] = []
    repeat = MuonPlanner.repeat

    def remembering(self: MuonPlanner, *arguments: Any, **options: Any) -> bool:
        repeated.append(repeat(self, *arguments, **options))
        return repeated[-1]

    monkeypatch.setattr(MuonPlanner, "repeat", remembering)
    ours, twins = parameters((8, 16), (16, 8)), parameters((8, 16), (16, 8))
    optimizer, other = (TritonMuon(params, lr=0.1, ns_steps=1, **EXACT) for params in (ours, twins))

    def same_step(seed: int, *, without: int | None = None) -> bool:
        for params in (ours, twins):
            give_gradients(*params, seed=seed)
            if without is not None:
                params[without].grad = None
        optimizer.step()
        other._planner = MuonPlanner()
        other.step()
        assert_same_bits(ours, twins)
        return repeated[-2]

    assert not same_step(0)
    assert same_step(1)
    for each in (optimizer, other):
        each.param_groups[0].update(lr=0.01, weight_decay=0.5, momentum=0.5)
    assert same_step(2)
    assert not same_step(3, without=0)
    assert same_step(4, without=0)
    assert not same_step(5)
    for each in (optimizer, other):
        each.param_groups[0]["nesterov"] = False
    assert not same_step(6)
    for each, params in ((optimizer, ours), (other, twins)):
        each.state[params[0]]["momentum_buffer"] = torch.ones_like(params[0])
    assert not same_step(7)
    for each in (optimizer, other):
        each.load_state_dict(copy.deepcopy(each.state_dict()))
    assert not same_step(8)
    for params in (ours, twins):
        params[1].data = params[1].detach().clone()
    assert not same_step(9)
    for each, params in ((optimizer, ours), (other, twins)):
        params += parameters((24, 8), seed=3)
        each.add_param_group({"params": params[2:]})
    assert not same_step(10)
    assert same_step(11)
    for each, params in ((optimizer, ours), (other, twins)):
        params[:1] = each.param_groups[0]["params"][:1] = parameters((8, 16), seed=4)
    assert not same_step(12)
    assert same_step(13)
    for each, params in ((optimizer, ours), (other, twins)):
        # by another dict, which leaves the one before as it was
        each.state[params[1]] = {key: torch.ones_like(value) for key, value in each.state[params[1]].items()}
    assert not same_step(14)
    for each in (optimizer, other):
        each.param_groups[0] = {**each.param_groups[0], "lr": 0.05}
    assert not same_step(15)


@pytest.mark.slow
@pytest.mark.parametrize("num_before", [0, 1, 2], ids=["first", "second", "repeated"])
def test_a_step_that_is_interrupted_is_taken_or_not(num_before: int) -> None:
    """And the next steps read what they should, also the gradients and hyperparameters of before."""
    within = ["DeviceTable.update", "StepInputs.update", "StepInputs.set_addresses"]
    # a recording of CUDA's that is interrupted warns of an empty graph
    within += ["MuonBatchPlan.refresh", *["MuonBatchPlan.run"] * is_interpreted()]
    # not aligned to 16 bytes, which needs other launches
    grads = [torch.randn(12, device=DEVICE).view(3, 4), torch.randn(13, device=DEVICE)[1:].view(3, 4)]

    def start() -> Any:
        params = parameters((3, 4))
        optimizer = TritonMuon(params, ns_steps=1, **EXACT)

        def step(which: int) -> None:
            optimizer.param_groups[0].update(lr=[0.1, 0.2][which], weight_decay=[0.1, 0.5][which])
            params[0].grad = grads[which]
            optimizer.step()

        return params, step

    assert_taken_or_not(start, num_before, within)


def test_gradients_are_not_kept() -> None:
    """``zero_grad()`` gives their memory back, and the next ones get the same addresses."""
    params = parameters((8, 16), (16, 8))
    optimizer = TritonMuon(params, ns_steps=1, **EXACT)
    for seed in range(2):
        steps(optimizer, params, range(seed, seed + 1))
        kept = [weakref.ref(p.grad) for p in params if p.grad is not None]
        optimizer.zero_grad()
        assert [each() for each in kept] == [None, None]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "options", "limit"),
    [
        (torch.float32, {}, 1e-3),
        (torch.float32, {"cautious": True}, 1e-3),
        (torch.bfloat16, {}, 4e-3),  # parameters rounded to 8 bits, twice
        (torch.bfloat16, {"master_weights": "fp32", "momentum_dtype": torch.float32}, 1e-3),
    ],
    ids=["fp32", "cautious", "bf16", "masters"],
)
def test_a_large_step_against_fp64(dtype: torch.dtype, options: dict[str, Any], limit: float) -> None:
    """Enough tiles for the ping-pong schedule, wide, tall and square, and sizes that no tile divides."""
    shapes = [(512, 512)] * 40 + [(512, 2048)] * 10 + [(2048, 512)] * 10 + [(520, 1000)] * 12
    ours = [nn.Parameter(0.2 * p.detach()) for p in parameters(*shapes, dtype=dtype)]
    exact = [nn.Parameter(p.detach().double()) for p in ours]
    optimizer = TritonMuon(ours, lr=0.1, **options)
    cautious = options.get("cautious", False)
    other = TritonMuon(exact, lr=0.1, impl="torch", ns_dtype=torch.float64, cautious=cautious)
    for seed in range(2):
        give_gradients(*ours, seed=seed)
        for p, q in zip(ours, exact, strict=True):
            q.grad = p.grad.double()
        optimizer.step()
        other.step()
    for p, q in zip(ours, exact, strict=True):
        value = optimizer.state[p].get("master", p).double()
        assert (value - q).norm() <= limit * q.norm()


@pytest.mark.skipif(not is_interpreted(), reason="of the interpreter")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ns_method": "gram"},
        {"ns_coefficients": "aol4", "ns_steps": 4},
        {"beta2": 0.9, "row_equilibrate": True},
        {"stochastic_rounding": True},
    ],
    ids=str,
)
def test_interpreted_launches_are_as_many_as_the_plan_says(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import GridExecutor

    launch, launched = GridExecutor.__call__, []

    def listen(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(self.fn.__name__)
        return launch(self, *args, **kwargs)

    params = parameters((16, 40), (24, 24), (24, 30), dtype=torch.bfloat16)
    optimizer = TritonMuon(params, **EXACT, **options)
    monkeypatch.setattr(GridExecutor, "__call__", listen)
    steps(optimizer, params, range(1))
    (plan,) = optimizer.plans()
    assert len(launched) == plan.launches, launched


@pytest.mark.gpu
def test_launches_are_as_many_as_the_plan_says() -> None:
    for options in ({}, {"beta2": 0.9, "row_equilibrate": True}, {"stochastic_rounding": True}):
        params = parameters((256, 256), (256, 1024), (1024, 256), dtype=torch.bfloat16)
        optimizer = TritonMuon(params, **options)
        steps(optimizer, params, range(3))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            optimizer.step()
            torch.cuda.synchronize()
        kernels = [event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
        ours = [name for name in kernels if name.endswith("_kernel")]
        (plan,) = optimizer.plans()
        assert len(ours) == plan.launches, ours


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "num_xs", "num_squares"), [((768, 768), 2, 2), ((768, 3072), 1, 6), ((768, 1536), 2, 4)]
)
def test_a_step_needs_little_memory(shape: tuple[int, int], num_xs: int, num_squares: int) -> None:
    """Beside the state: X, once more where it moves, and the m×m factors; first launched, then replayed."""
    params = parameters(*[shape] * 24, dtype=torch.bfloat16)
    give_gradients(*params, seed=0)
    optimizer = TritonMuon(params)
    state = 2 * sum(p.numel() for p in params)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        optimizer.step()
    peak = torch.cuda.max_memory_allocated() - before - state
    expected = 2 * 24 * (num_xs * shape[0] * shape[1] + num_squares * shape[0] ** 2)
    assert expected <= peak < 1.01 * expected + 2**22


def test_explain_says_tiles_and_launches() -> None:
    """Of a step that was taken; a parameter without one has none."""
    params = parameters((16, 40), (24, 24), (8, 8))
    optimizer = TritonMuon(params, **EXACT)
    assert "launches" not in optimizer.explain()
    give_gradients(*params[:2], seed=0)
    optimizer.step()
    *rows, last = optimizer.explain().splitlines()
    (plan,) = optimizer.plans()
    assert last == f"{plan.launches} launches a step"
    tile = "32×32 / 32×32 / 32×32" if DEVICE == "cpu" else "64×64 / 64×64 / 64×64"
    assert [tile in row for row in rows[2:]] == [True, True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (300, 1), (3, 1, 5), (200, 1, 2000), (200, 2, 64)], ids=str)
def test_matrices_of_one_row_on_a_gpu(shape: tuple[int, ...]) -> None:
    grads = [torch.randn(shape, device="cuda") for _ in range(3)]
    found = []
    for impl in ("auto", "torch"):
        p = torch.nn.Parameter(torch.ones(shape, device="cuda"))
        optimizer = TritonMuon([p], lr=0.1, nd="batch", impl=impl)
        for grad in grads:
            p.grad = grad
            optimizer.step()
        found.append(p.detach())
    torch.testing.assert_close(*found, atol=3e-3, rtol=0)


@pytest.mark.gpu
def test_replay_takes_new_hyperparameters_and_gradients() -> None:
    """The recorded step equals one that is launched, bit by bit, under changing lr, gradients and clip factors."""
    shapes = [(256, 1024), (1024, 256), (512, 512)] * 2
    results = []
    for recorded in (True, False):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, device="cuda").bfloat16()) for shape in shapes]
        optimizer = TritonMuon(params, lr=torch.tensor(0.02, device="cuda"))
        for step in range(6):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.param_groups[0]["lr"].fill_(0.02 / (step + 1))
            if not recorded:
                optimizer._planner = MuonPlanner()
            optimizer.step(clip_factor=torch.tensor(1.0 / (step + 1), device="cuda"))
        results.append([p.detach().clone() for p in params])
    assert_same_bits(*results)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_matrices_on_several_devices_all_move() -> None:
    """Recorded on the first one first, and in both replayed."""
    value, grads = torch.randn(256, 512), torch.randn(5, 256, 512)
    params = [nn.Parameter(value.to(f"cuda:{i}", copy=True)) for i in range(2)]
    optimizer = TritonMuon(params, lr=0.1)
    for grad in grads:
        before = [p.detach().clone() for p in params]
        for p in params:
            p.grad = grad.to(p.device)
        optimizer.step()
        assert not any(torch.equal(p, old) for p, old in zip(params, before, strict=True))
        assert torch.equal(params[0].cpu(), params[1].cpu())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_step_does_not_synchronise_and_can_be_captured() -> None:
    p = nn.Parameter(torch.randn(256, 512, device="cuda"))
    p.grad = torch.randn_like(p)
    optimizer = TritonMuon([p], lr=torch.tensor(0.1, device="cuda"), capturable=True)
    for _ in range(3):
        optimizer.step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    twin = nn.Parameter(p.detach().clone())
    twin.grad = p.grad.clone()
    other = TritonMuon([twin], lr=0.05)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # a loaded tensor is kept, not copied
    other.param_groups[0]["lr"] = 0.05
    optimizer.param_groups[0]["lr"].fill_(0.05)
    graph.replay()
    other.step()
    torch.testing.assert_close(p, twin, atol=1e-6, rtol=0)
