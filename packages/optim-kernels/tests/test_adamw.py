"""TritonAdamW keeps torch's contract and agrees with torch.optim.AdamW and the reference, whatever the options."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from random_tensors import DEVICE, NUMPY_MAY_WARN, assert_same_bits, random_parameters
from torch import Tensor
from torch.optim import adam

from optim_kernels import TritonAdamW, TritonMuonAdamW
from optim_kernels.functional import adamw_
from optim_utils.rounding import join_master
from optim_utils.testing.contract import OptimizerCase, contract, run_check


def kernels(params: Any, lr: float | Tensor = 1e-3, **options: Any) -> TritonAdamW:
    """TritonAdamW that has to use its kernels, interpreted on a CPU."""
    return TritonAdamW(params, lr, impl="triton", **options)


CASES = [
    OptimizerCase("TritonAdamW", TritonAdamW, {"lr": 0.01}),
    OptimizerCase("TritonAdamW, kernels", kernels, {"lr": 0.01}, device=DEVICE),
    OptimizerCase("TritonAdamW, amsgrad", TritonAdamW, {"lr": 0.01, "amsgrad": True}),
    OptimizerCase("TritonAdamW, fp32 moments", TritonAdamW, {"lr": 0.01, "state_dtype": torch.float32}),
]


@pytest.mark.slow
@pytest.mark.installed
@pytest.mark.parametrize(("case", "check"), contract(CASES), ids=str)
def test_contract(case: OptimizerCase, check: str) -> None:
    run_check(case, check)


def train(
    optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], num_steps: int, *, max_norm: float | None = None
) -> None:
    """Steps on the gradient of Σ (p − target)², with targets that change from step to step."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        for p in params:
            target = torch.randn(p.shape, generator=generator).to(p)
            p.grad = (2 * (p - target)).detach()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()


def make_params(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.nn.Parameter]:
    return random_parameters((7, 5), (11,), (), (2, 3, 4), (300, 17), dtype=dtype, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["auto", "torch", "triton"])
@pytest.mark.parametrize(
    "options",
    [{}, {"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.0}, {"betas": (0.0, 0.99)}, {"eps": 1e-3}],
    ids=str,
)
def test_trajectory_is_torchs(impl: Any, options: dict[str, Any]) -> None:
    ours, theirs = make_params(), make_params()
    lr = 1e-4 if options.get("maximize") else 1e-2
    train(TritonAdamW(ours, lr=lr, impl=impl, **options), ours, 10)
    train(torch.optim.AdamW(theirs, lr=lr, foreach=False, **options), theirs, 10)
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"foreach": False}, {"foreach": True}], ids=str)
def test_plain_torch_takes_the_loop_that_torch_would(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is foreach, a few launches, unless the user says otherwise."""
    # what torch chooses on a GPU, if asked
    monkeypatch.setattr(adam, "_default_to_fused_or_foreach", lambda *_, **__: (False, True))
    taken: list[str] = []

    def listen(name: str) -> None:
        loop = getattr(adam, name)
        monkeypatch.setattr(adam, name, lambda *args, **kwargs: (taken.append(name), loop(*args, **kwargs)))

    listen("_single_tensor_adam")
    listen("_multi_tensor_adam")
    ours, theirs = make_params(), make_params()
    for params in (ours, theirs):
        for p in params:
            p.data = p.data.to(DEVICE)
    train(TritonAdamW(ours, lr=1e-2, impl="torch", **options), ours, 3)
    train(torch.optim.AdamW(theirs, lr=1e-2, **options), theirs, 3)
    assert taken[:3] == taken[3:]
    assert ("_multi_tensor_adam" in taken) == options.get("foreach", "fused" not in options)
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_max_norm_is_clipping_before_the_step(impl: Any) -> None:
    ours, theirs = make_params(), make_params()
    optimizer = TritonAdamW(ours, lr=1e-2, max_norm=1.5, impl=impl)
    train(optimizer, ours, 5)
    train(torch.optim.AdamW(theirs, lr=1e-2), theirs, 5, max_norm=1.5)
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)
    expected = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in ours if p.grad is not None]))
    assert optimizer.grad_norm is not None
    torch.testing.assert_close(optimizer.grad_norm, expected)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_clip_factor_scales_gradients_and_leaves_them(impl: Any) -> None:
    ours, theirs = make_params(), make_params()
    optimizer, reference = TritonAdamW(ours, impl=impl), TritonAdamW(theirs, impl=impl)
    for p, q in zip(ours, theirs):
        p.grad = torch.randn_like(p)
        q.grad = p.grad * 0.25
    before = [p.grad.clone() for p in ours if p.grad is not None]
    optimizer.step(clip_factor=torch.tensor(0.25, device=DEVICE))
    reference.step()
    for p, q, grad in zip(ours, theirs, before):
        assert torch.equal(p, q)
        assert torch.equal(p.grad, grad)


@pytest.mark.parametrize("master", ["fp32", "split16"])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_masters_train_as_in_fp32_to_the_bit(master: Any, impl: Any) -> None:
    half = make_params(torch.bfloat16)
    full = [torch.nn.Parameter(p.detach().float()) for p in half]
    ours = TritonAdamW(half, lr=1e-2, state_dtype=torch.float32, master_weights=master, impl=impl)
    first, second = ([torch.zeros_like(p) for p in full] for _ in range(2))
    # where the optimizer has its counts too: torch divides by a tensor otherwise than by a number
    steps = torch.zeros((), device=DEVICE if impl == "triton" else "cpu")
    for step in range(4):
        for p in half:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(p)
        ours.step()
        grads = [p.grad.float() for p in half if p.grad is not None]
        options = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "impl": impl}
        adamw_(full, grads, first, second, steps=steps, **options)
    for p, q in zip(half, full):
        state = ours.state[p]
        kept = state["master"] if master == "fp32" else join_master(p.detach(), state["master_low"])
        assert torch.equal(kept, q)


def test_stochastic_rounding_takes_small_steps_on_average() -> None:
    size = 4096 * 4
    p = torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16, device=DEVICE))
    optimizer = TritonAdamW([p], lr=1e-4, weight_decay=0.0, stochastic_rounding=True, seed=3)
    for _ in range(20):
        p.grad = torch.ones_like(p)
        optimizer.step()
    # every step is 1e-4, an ulp below 1 is 2**-8: to nearest, p would still be 1
    drift = 1 - p.detach().double().mean().item()
    deviation = (2**-8 * 20 * 1e-4 / size) ** 0.5
    assert abs(drift - 20e-4) < 5 * deviation


def test_both_paths_round_at_random_alike() -> None:
    ours, theirs = make_params(torch.bfloat16), make_params(torch.bfloat16)
    train(TritonAdamW(ours, lr=1e-2, stochastic_rounding=True, seed=5, impl="triton"), ours, 3)
    train(TritonAdamW(theirs, lr=1e-2, stochastic_rounding=True, seed=5, impl="torch"), theirs, 3)
    different = sum(int((p != q).sum()) for p, q in zip(ours, theirs))
    assert different <= 0.001 * sum(p.numel() for p in ours)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("shape", [(), (50,)], ids=str)
def test_scaled_gradients_of_16_bits_are_rounded_once(shape: Any, impl: Any) -> None:
    p = torch.nn.Parameter(torch.ones(shape, device=DEVICE, dtype=torch.bfloat16))
    p.grad = torch.full_like(p, 3.0)
    # between two numbers of 16 bits
    factor = torch.tensor(0.1234, device=DEVICE)
    optimizer = TritonAdamW([p], betas=(0.0, 0.9), impl=impl)
    optimizer.step(clip_factor=factor)
    expected = torch.full_like(p, 3.0 * float(factor))
    assert torch.equal(optimizer.state[p]["exp_avg"], expected)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("options", [{}, {"stochastic_rounding": True}], ids=str)
def test_a_factor_of_one_element_scales_a_parameter_without_dimensions(options: dict[str, Any], impl: Any) -> None:
    params = [torch.nn.Parameter(torch.ones((), device=DEVICE)) for _ in range(2)]
    for p, factor in zip(params, (torch.tensor([0.5], device=DEVICE), torch.tensor(0.5, device=DEVICE))):
        p.grad = torch.full_like(p, 3.0)
        optimizer = TritonAdamW([p], eps=1.0, impl=impl, **options)
        optimizer.step(clip_factor=factor)
        assert optimizer.state[p]["exp_avg"].shape == ()
    assert torch.equal(params[0], params[1])
    assert params[0] < 1


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_found_inf_writes_nothing_and_counts_nothing(impl: Any) -> None:
    params = make_params()
    optimizer = TritonAdamW(params, impl=impl)
    train(optimizer, params, 1)
    before = [p.detach().clone() for p in params]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.grad_scale = torch.tensor(4.0, device=DEVICE)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(1.0, device=DEVICE)  # type: ignore[attr-defined]
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(params, before))
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
    optimizer.found_inf = torch.tensor(0.0, device=DEVICE)  # type: ignore[attr-defined]
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 2


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["TritonAdamW", "adamw", "muon"])
def test_gradients_are_clipped_without_the_scale_of_their_loss(kind: str, impl: Any) -> None:
    options: dict[str, Any] = {"max_norm": 0.1, "impl": impl}
    params = [torch.nn.Parameter(torch.full((6, 8), 0.5, device=DEVICE)) for _ in range(2)]
    optimizers = [
        TritonAdamW([p], **options)
        if kind == "TritonAdamW"
        else TritonMuonAdamW([{"params": [p], "kind": kind}], **options)
        for p in params
    ]
    for p, optimizer, scale in zip(params, optimizers, (1.0, 8.0)):
        p.grad = torch.linspace(-scale, scale, 48, device=DEVICE).view(6, 8)
        optimizer.grad_scale = torch.tensor(scale, device=DEVICE)
        optimizer.found_inf = torch.tensor(0.0, device=DEVICE)
        optimizer.step()
    assert torch.equal(*params)
    assert optimizers[0].grad_norm == optimizers[1].grad_norm > 1


def test_late_gradient_has_its_own_step_count() -> None:
    params = make_params()
    optimizer = TritonAdamW(params, impl="triton")
    for p in params[:-1]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    params[-1].grad = torch.ones_like(params[-1])
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [2, 2, 2, 2, 1]


def test_gradient_of_another_layout_is_copied_and_reported() -> None:
    p = torch.nn.Parameter(torch.randn(6, 4, device=DEVICE))
    q = torch.nn.Parameter(p.detach().clone())
    p.grad = torch.randn(4, 6, device=DEVICE).t()
    q.grad = p.grad.contiguous()
    ours, other = TritonAdamW([p], impl="triton"), TritonAdamW([q], impl="triton")
    ours.step()
    other.step()
    assert torch.equal(p, q)
    assert "1 gradients are copied" in ours.explain()
    assert "copied" not in other.explain()


def test_channels_last_and_replaced_state_are_followed() -> None:
    weight = torch.randn(4, 3, 5, 5, device=DEVICE).to(memory_format=torch.channels_last)
    p, q = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight.clone())
    ours, theirs = TritonAdamW([p], impl="triton"), torch.optim.AdamW([q])
    for _ in range(2):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
        ours.state[p]["exp_avg"] = ours.state[p]["exp_avg"].clone()
        p.data = p.data.clone()
    torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)


def test_fallback_is_visible(caplog: pytest.LogCaptureFixture) -> None:
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = TritonAdamW([p], max_norm=1.0)
    p.grad = torch.ones_like(p)
    with caplog.at_level(logging.INFO, logger="optim_kernels"):
        optimizer.step()
        optimizer.step()
    assert len(caplog.records) == 1
    assert "torch" in optimizer.explain()
    assert "cpu" in optimizer.explain()
    assert "0 launches a step" in optimizer.explain()


def test_differentiable_goes_through_the_step() -> None:
    p = torch.rand(3, dtype=torch.float64, requires_grad=True)
    leaf = p.clone()
    optimizer = TritonAdamW([torch.nn.Parameter(torch.zeros(1))], differentiable=True)
    optimizer.param_groups[0]["params"] = [leaf]
    optimizer._forget()
    leaf.grad = torch.ones_like(leaf)
    optimizer.step()
    leaf.sum().backward()
    assert p.grad is not None
    torch.testing.assert_close(p.grad, torch.full_like(p, 1 - 1e-3 * 1e-2))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6], ids=["clipped", "not clipped"])
def test_differentiable_goes_through_the_clip_factor(max_norm: float, norm_type: float) -> None:
    """The factor was taken for a constant."""

    def stepped(value: Tensor, grad: Tensor) -> Tensor:
        leaf = value.clone()
        optimizer = TritonAdamW(
            [torch.nn.Parameter(torch.zeros(1))], lr=0.1, differentiable=True, max_norm=max_norm, norm_type=norm_type
        )
        optimizer.param_groups[0]["params"] = [leaf]
        moments = {key: torch.full_like(value, 0.2) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[leaf] = {"step": torch.tensor(10.0), **{key: m.detach() for key, m in moments.items()}}
        leaf.grad = grad
        optimizer.step()
        assert optimizer.grad_norm is not None
        assert not optimizer.grad_norm.requires_grad
        torch.testing.assert_close(optimizer.grad_norm, torch.linalg.vector_norm(grad.detach(), norm_type))
        return leaf

    value, grad = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in ([1.0, 2.0], [0.5, -0.7]))
    assert torch.autograd.gradcheck(stepped, (value, grad))
    zero = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    (derivative,) = torch.autograd.grad(stepped(value, zero).sum(), zero)
    assert derivative.isfinite().all()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"lr": -1.0}, ValueError, "learning rate"),
        ({"betas": (1.0, 0.9)}, ValueError, "beta"),
        ({"eps": -1.0}, ValueError, "epsilon"),
        ({"fused": True, "foreach": True}, RuntimeError, "foreach"),
        ({"fused": True, "differentiable": True}, RuntimeError, "differentiable"),
        ({"impl": "cuda"}, ValueError, "impl"),
        ({"state_dtype": "int4"}, ValueError, "state_dtype"),
        ({"state_dtype": [torch.float32, torch.bfloat16]}, ValueError, "state_dtype must be .* got .torch.float32, "),
        ({"state_dtype": (torch.float32, [])}, ValueError, "state_dtype"),
        ({"master_weights": "fp32"}, ValueError, "master_weights"),
        ({"master_weights": "bf16"}, ValueError, "master_weights"),
        ({"max_norm": 0.0}, ValueError, "max_norm"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        TritonAdamW([torch.nn.Parameter(torch.zeros(3))], **options)


@pytest.mark.parametrize(("option", "instead"), [({"fused": True}, "fused=None"), ({"impl": "triton"}, "impl='auto'")])
def test_who_asks_for_kernels_in_vain_is_told_what_to_change(option: dict[str, Any], instead: str) -> None:
    param = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64, device=DEVICE))
    with pytest.raises(RuntimeError, match=f"give it to a group with {instead}$"):
        TritonAdamW([param], **option)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch 2.11, once a process
def test_wrong_inputs_are_refused_by_name() -> None:
    p, q = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3, dtype=torch.float64, device=DEVICE))
    with pytest.raises(RuntimeError, match=r"layer\.weight.*float64"):
        TritonAdamW([("layer.weight", q)], impl="triton")
    with pytest.raises(ValueError, match="max_norm"):
        TritonAdamW([{"params": [p], "max_norm": 1.0}, {"params": [q], "max_norm": 2.0}])
    sparse = torch.nn.Parameter(torch.zeros(3, 2))
    sparse.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (3, 2), check_invariants=True)
    with pytest.raises(RuntimeError, match=r"table.*sparse"):
        TritonAdamW([("table", sparse)]).step()
    optimizer = TritonAdamW([p], max_norm=1.0)
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="clip_factor"):
        optimizer.step(clip_factor=torch.tensor(1.0))
    with pytest.raises(ValueError, match="max_norm"):
        optimizer.add_param_group({"params": [q], "max_norm": 3.0})
    with pytest.raises(ValueError, match=r"param_groups\[1\] has .*=False, as those of torch\.optim\.Adam"):
        TritonAdamW([{"params": [q]}, *torch.optim.Adam([p]).param_groups])
    optimizer.defaults = {"lr": 0.1}  # a program has replaced them
    with pytest.raises(KeyError, match="max_norm"):
        optimizer.add_param_group({"params": [q]})
    assert len(optimizer.param_groups) == 1


@NUMPY_MAY_WARN
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_extreme_gradients_end_as_in_torch(impl: Any) -> None:
    values = torch.tensor([0.0, 1e-30, 1e-20, 1e10, 1e20, 1e25, float("inf"), float("nan"), -1e20])
    # torch's loop on a CPU: on CUDA its second moment of 1e20 is infinite already, where (1 - beta2) g^2 still is not
    reference_device = "cpu" if impl == "triton" else DEVICE
    p, q = torch.nn.Parameter(torch.ones(9, device=DEVICE)), torch.nn.Parameter(torch.ones(9, device=reference_device))
    ours, theirs = TritonAdamW([p], impl=impl), torch.optim.AdamW([q])
    for _ in range(2):
        p.grad, q.grad = values.to(p.device), values.to(q.device)
        ours.step()
        theirs.step()
    torch.testing.assert_close(p.cpu(), q.cpu(), rtol=1e-6, atol=1e-7, equal_nan=True)
