"""TritonMuon: against torch.optim.Muon and published variants, and how tensors are read as matrices."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from random_tensors import DEVICE, give_gradients
from torch import Tensor, nn

from optim_kernels import VARIANTS, NSConfig, TritonMuon, reference
from optim_kernels.functional import apply_muon_update_, muon_, muon_update, new_second_moment
from optim_kernels.reference.muon import MuonRule
from optim_utils.param_groups import MatrixView
from optim_utils.rounding import join_master


def polar(x: Tensor) -> Tensor:
    """The polar factor by SVD: what Newton–Schulz approximates, independently."""
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ vh


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 3) -> None:
    for step in range(steps):
        give_gradients(*params, seed=step)
        optimizer.step()


unclamped = pytest.mark.skipif(torch.__version__ < "2.14", reason="torch's Muon has it since 2.14")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw"},
        pytest.param({"adjust_lr_fn": "spectral_unclamped"}, marks=unclamped),
        {"weight_decay": 0.0, "momentum": 0.8},
    ],
    ids=["default", "plain momentum", "match_rms_adamw", "spectral_unclamped", "no decay"],
)
def test_follows_torch_muon(options: dict[str, Any]) -> None:
    """Within what torch's bf16 products cost: each update element is about 1/√n, 1e-2 of it is lost."""
    ours = parameters((12, 20), (20, 12), (16, 16))
    theirs = copy.deepcopy(ours)
    train(TritonMuon(ours, lr=0.1, **options), ours)
    train(torch.optim.Muon(theirs, lr=0.1, **options), theirs)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=1.5e-2, rtol=0)


def test_state_travels_to_torch_muon_and_back() -> None:
    ours = parameters((6, 9), (9, 4))
    optimizer = TritonMuon(ours, lr=0.1)
    train(optimizer, ours)
    theirs = copy.deepcopy(ours)
    other = torch.optim.Muon(theirs, lr=0.3)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.1
    back = TritonMuon(ours, beta2=0.9)
    back.load_state_dict(torch.optim.Muon(theirs, lr=0.2).state_dict())
    assert back.param_groups[0]["lr"] == 0.2
    assert back.param_groups[0]["beta2"] == 0.9


@pytest.mark.parametrize(("rows", "columns", "scale"), [(4, 16, 0.5), (16, 4, 2.0), (8, 8, 1.0)])
def test_spectral_unclamped_scales_wide_matrices_down(rows: int, columns: int, scale: float) -> None:
    """By √(r/c), where ``"original"`` stops at 1; also in a state that torch.optim.Muon has saved."""
    ours = parameters((rows, columns))
    plain, loaded = copy.deepcopy(ours), copy.deepcopy(ours)
    before = ours[0].detach().clone()
    train(TritonMuon(ours, lr=0.1, weight_decay=0.0, adjust_lr_fn="spectral_unclamped"), ours, steps=1)
    train(TritonMuon(plain, lr=0.1, weight_decay=0.0, adjust_lr_fn="none"), plain, steps=1)
    torch.testing.assert_close(ours[0] - before, scale * (plain[0] - before))
    saved = torch.optim.Muon(ours, lr=0.1, weight_decay=0.0).state_dict()
    saved["param_groups"][0]["adjust_lr_fn"] = "spectral_unclamped"
    other = TritonMuon(loaded)
    other.load_state_dict(saved)
    train(other, loaded, steps=1)
    assert torch.equal(loaded[0], ours[0])


def test_buffers_and_gradients_stay_as_they_are() -> None:
    """torch.optim.Muon normalises its bf16 momentum buffer without nesterov (the update aliases it); ours must not."""
    (p,) = parameters((8, 12), dtype=torch.bfloat16)
    give_gradients(p)
    grad = p.grad.clone()
    optimizer = TritonMuon([p], nesterov=False)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], (0.05 * grad.float()).bfloat16())
    assert torch.equal(p.grad, grad)


@pytest.mark.parametrize("missing_grad", ["skip", "zero", "raise"])
def test_a_frozen_parameter_is_left_alone(missing_grad: str) -> None:
    """Whatever a missing gradient means: neither its momentum nor decay moves it."""
    p, q = parameters((6, 4), (6, 4))
    give_gradients(p, q)
    optimizer = TritonMuon([p, q], weight_decay=0.5, missing_grad=missing_grad)
    optimizer.step()
    q.requires_grad_(False)
    q.grad = None
    kept, buffer = q.detach().clone(), optimizer.state[q]["momentum_buffer"].clone()
    optimizer.step()
    assert torch.equal(q, kept)
    assert torch.equal(optimizer.state[q]["momentum_buffer"], buffer)


@pytest.mark.parametrize("build", [TritonMuon, TritonMuon.keller, TritonMuon.nanochat])
def test_it_is_built_again_from_its_defaults(build: Any) -> None:
    """So do wrappers that put other parameters in the place of those they were given: ``type(o)(params, **defaults)``.

    A group added to it has what those of the first have.
    """
    params, others, late = (parameters((6, 4), (4, 6)) for _ in range(3))
    first = build(params, lr=0.1, split_rows=2, beta2=0.9)
    again = type(first)(others, **first.defaults)
    again.add_param_group({"params": late})
    of_first = {key: value for key, value in first.param_groups[0].items() if key != "params"}
    for group in again.param_groups:
        assert {key: value for key, value in group.items() if key != "params"} == of_first


def test_a_learning_rate_that_requires_a_gradient_is_read_without_a_warning() -> None:
    """As in torch, whose step has no gradient with respect to it either."""
    p, q = parameters((6, 4), (6, 4))
    give_gradients(p, q)
    for param, lr in (p, torch.tensor(0.1, requires_grad=True)), (q, torch.tensor(0.1)):
        with torch.no_grad():
            param.fill_(1.0)
        assert param.grad is not None
        param.grad.copy_(p.grad)
        TritonMuon([param], lr=lr).step()
    assert torch.equal(p, q)


def test_a_variant_leaves_the_constructors_arguments_alone() -> None:
    """An argument that is not the default holds for a group that names a variant, unless the group has its own."""
    p, q = parameters((6, 4), (6, 4))
    given = {"momentum_dtype": torch.bfloat16, "seed": 3, "capturable": True, "maximize": True, "impl": "torch"}
    groups = [
        {"params": [p], "variant": "nanochat-2026-07"},
        {"params": [q], "variant": "keller", "lr": 0.3, "maximize": False},
    ]
    optimizer = TritonMuon(groups, lr=torch.tensor(0.05), **given)
    first, second = optimizer.param_groups
    of_variant = VARIANTS["nanochat-2026-07"] | given
    assert {key: first[key] for key in of_variant if key != "lr"} | {"lr": of_variant["lr"]} == of_variant
    assert first["lr"] == 0.05
    assert (second["lr"], second["maximize"], second["momentum_dtype"]) == (0.3, False, torch.bfloat16)


@pytest.mark.parametrize("is_copied", [False, True], ids=["built", "pickled"])
@pytest.mark.parametrize(("build", "lr"), [(TritonMuon.keller, 0.02), (TritonMuon.nanochat, 0.3)])
def test_a_variant_beside_another_takes_none_of_its_options(build: Any, lr: float, is_copied: bool) -> None:
    """What ``keller`` and ``nanochat`` mean by themselves was not given, now and when a group comes later."""
    params = parameters((6, 4), (6, 4))
    late = parameters((6, 4))
    groups = [{"params": [p], "variant": name} for p, name in zip(params, ("nanochat-2026-07", "torch"))]
    optimizer = build(groups, lr=lr, maximize=True)
    if is_copied:
        optimizer = pickle.loads(pickle.dumps(optimizer))
    optimizer.add_param_group({"params": late, "variant": "nanochat-2025"})
    for group in optimizer.param_groups:
        promised = VARIANTS[group["variant"]] | {"maximize": True}
        if lr != 0.02:
            promised["lr"] = lr
        assert {key: group[key] for key in promised} == promised


@pytest.mark.parametrize("name", list(VARIANTS))
def test_variants_are_the_published_formulas(name: str) -> None:
    """Each variant, written out once more with the exact polar factor in place of Newton–Schulz where they agree."""
    options = VARIANTS[name]
    (p,) = parameters((6, 4))
    q, buffer, v = p.detach().double(), torch.zeros(6, 4).double(), torch.zeros(6, 1).double()
    optimizer = TritonMuon([{"params": [p], "variant": name, "lr": 0.1, "weight_decay": 0.2}])
    config = NSConfig(coefficients=options["ns_coefficients"])
    for step in range(3):
        give_gradients(p, seed=step)
        g = p.grad.double()
        buffer = 0.95 * buffer + 0.05 * g
        u = 0.05 * g + 0.95 * buffer
        if options["row_equilibrate"]:
            u = u / u.norm(dim=1, keepdim=True) * u.norm() / math.sqrt(6)
        add = options["eps_mode"] == "add"
        n = options["norm_scale"] * u.norm() + options["eps"] if add else max(u.norm(), options["eps"])
        x = u / n
        for a, b, c in config.triples:
            gram = x.mT @ x
            x = a * x + x @ (b * gram + c * gram @ gram)
        if options["renormalize"]:
            x = x * 2.0 / x.norm()
        if options["beta2"] is not None:
            v = options["beta2"] * v + (1 - options["beta2"]) * x.square().mean(1, keepdim=True)
            scaled = x / v.sqrt()
            x = scaled * x.norm() / scaled.norm()
        lr = 0.1 * math.sqrt(6 / 4)
        q = q - lr * 0.2 * q * (x * q >= 0) - lr * x if options["cautious"] else q * (1 - 0.1 * 0.2) - lr * x
        optimizer.step()
    torch.testing.assert_close(p.detach().double(), q, atol=2e-5, rtol=0)


def test_the_update_is_close_to_the_polar_factor() -> None:
    grad, buffer = torch.randn(10, 30), torch.zeros(10, 30)
    (update,) = muon_update([grad], [buffer], momentum=0.0, ns=NSConfig(coefficients="you", steps=8))
    torch.testing.assert_close(update.double(), polar(grad), atol=2e-2, rtol=0)


def test_update_then_apply_is_the_step() -> None:
    shapes = [(5, 8), (2, 6, 4)]
    grads = [torch.randn(shape) for shape in shapes]
    results = []
    for whole in (True, False):
        params = [torch.ones(shape) for shape in shapes]
        buffers = [torch.zeros(shape) for shape in shapes]
        moments = [new_second_moment(p) for p in params]
        if whole:
            options = {"second_moments": moments, "beta2": 0.9, "cautious": True}
            muon_(params, grads, buffers, lr=0.1, weight_decay=0.1, **options)
        else:
            updates = muon_update(grads, buffers, second_moments=moments, beta2=0.9)
            apply_muon_update_(params, updates, lr=0.1, weight_decay=0.1, cautious=True)
        results.append([*params, *buffers, *moments])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_functional_agrees_with_the_reference_in_fp64() -> None:
    params = [torch.randn(5, 8).double(), torch.randn(3, 4, 4).double()]
    twins = [p.clone() for p in params]
    grads = [torch.randn_like(p) for p in params]
    buffers, others = ([torch.zeros_like(p) for p in params] for _ in range(2))
    config = NSConfig(coefficients="you")
    muon_(params, grads, buffers, lr=0.1, weight_decay=0.1, momentum=0.9, ns=config)

    def orthogonalize(x: Tensor) -> Tensor:
        return reference.newton_schulz(x, config.triples)

    reference.muon_(
        twins, grads, others, orthogonalize=orthogonalize, lr=0.1, weight_decay=0.1, momentum=0.9, rule=MuonRule()
    )
    for x, y in zip([*params, *buffers], [*twins, *others], strict=True):
        torch.testing.assert_close(x, y, atol=1e-10, rtol=0)


@pytest.mark.parametrize("beta2", [None, 0.9], ids=["muon", "normuon"])
@pytest.mark.parametrize("split", [4, (6, 2, 4)], ids=["heads", "unequal"])
def test_a_split_equals_separate_parameters(split: int | tuple[int, ...], beta2: float | None) -> None:
    (fused,) = parameters((12, 10))
    sizes = [4, 4, 4] if split == 4 else list(split)
    parts = [nn.Parameter(part.clone()) for part in fused.detach().split(sizes)]
    one, many = TritonMuon([fused], split_rows=split, beta2=beta2), TritonMuon(parts, beta2=beta2)
    for step in range(3):
        give_gradients(fused, seed=step)
        for part, grad in zip(parts, fused.grad.split(sizes), strict=True):
            part.grad = grad
        one.step()
        many.step()
    torch.testing.assert_close(fused, torch.cat(parts), atol=1e-5, rtol=0)
    assert one.state[fused]["momentum_buffer"].shape == fused.shape


def test_a_view_of_transposed_storage_equals_the_transposed_parameter() -> None:
    (stored,) = parameters((6, 12))
    meant = nn.Parameter(stored.detach().mT.clone())
    view = MatrixView(shape=(6, 12), split=(4, 4, 4), split_dim=-1, transposed=True)
    first, second = TritonMuon([{"params": [stored], "views": [view]}]), TritonMuon([meant], split_rows=4)
    give_gradients(stored)
    meant.grad = stored.grad.mT
    first.step()
    second.step()
    torch.testing.assert_close(stored.mT, meant, atol=1e-5, rtol=0)


def test_views_are_saved_plainly_and_compared_on_load() -> None:
    view = MatrixView(shape=(6, 4), split=(2, 4))
    (p,) = parameters((6, 4))
    optimizer = TritonMuon([{"params": [p], "views": [view]}])
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["views"] == [view.to_plain()]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["views"] == [view]
    with pytest.raises(ValueError, match="saved with views"):
        TritonMuon([p]).load_state_dict(saved)


@pytest.mark.parametrize("key", ["momentum_buffer", "master"])
@pytest.mark.parametrize("shape", [(3, 3), (4, 32)], ids=str)
def test_a_state_of_another_shape_is_refused_and_leaves_the_optimizer(key: str, shape: tuple[int, int]) -> None:
    """Also one with the parameter's strides, whose end a kernel would not notice."""
    optimizers = []
    for seed in range(2):
        torch.manual_seed(seed)
        p = nn.Parameter(torch.randn(8, 32).bfloat16())
        optimizers.append(TritonMuon([p], lr=0.1 + seed, master_weights="fp32"))
        p.grad = torch.randn_like(p)
        optimizers[-1].step()
    saved = optimizers[0].state_dict()
    saved["state"][0][key] = torch.zeros(shape)
    (group,) = optimizers[1].param_groups
    before = dict(optimizers[1].state[group["params"][0]])
    with pytest.raises(ValueError, match=rf"{key} has shape .*, its parameter param_groups\[0\].* \(8, 32\)"):
        optimizers[1].load_state_dict(saved)
    assert group["lr"] == 1.1
    after = optimizers[1].state[group["params"][0]]
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_convolutions_as_matrices_and_as_batches() -> None:
    (conv,) = parameters((8, 3, 3, 3))
    with pytest.raises(ValueError, match="nd='flatten'"):
        TritonMuon([conv])
    flat = nn.Parameter(conv.detach().reshape(8, 27).clone())
    give_gradients(conv)
    flat.grad = conv.grad.reshape(8, 27)
    TritonMuon([conv], nd="flatten").step()
    TritonMuon([flat]).step()
    torch.testing.assert_close(conv.reshape(8, 27), flat)
    assert "24 × 3×3" in TritonMuon([conv], nd="batch").explain()


def test_keller_scales_convolutions_by_their_kernel() -> None:
    """His lr rule reads the last two dimensions of the gradient, so a square kernel counts as 1."""
    (conv,) = parameters((8, 2, 3, 3))
    before = conv.detach().clone()
    give_gradients(conv)
    TritonMuon.keller([conv], lr=1.0, weight_decay=0.0).step()
    change = (before - conv.detach()).reshape(8, 18)
    assert torch.linalg.svdvals(change).min() > 0.6
    assert torch.linalg.svdvals(change).max() < 1.3


def test_missing_gradients() -> None:
    p, q = parameters((4, 6), (4, 6))
    optimizer = TritonMuon.keller([p])
    give_gradients(p)
    optimizer.step()
    buffer = optimizer.state[p]["momentum_buffer"].clone()
    p.grad = None
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], 0.95 * buffer)
    assert p.grad is None
    before = q.detach().clone()
    TritonMuon([q]).step()
    assert torch.equal(q, before)
    with pytest.raises(RuntimeError, match="no gradient"):
        TritonMuon.nanochat([q]).step()


def test_zero_gradient_only_decays_and_nan_stays_in_its_matrix() -> None:
    params = parameters((4, 6), (4, 6), (6, 3))
    before = [p.detach().clone() for p in params]
    give_gradients(*params)
    params[0].grad.zero_()
    params[1].grad[2, 3] = float("nan")
    TritonMuon(params, lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(params[0], 0.95 * before[0])
    assert params[1].isnan().all()
    assert params[2].isfinite().all()


@pytest.mark.parametrize("name", list(VARIANTS))
def test_gradients_whose_squares_are_beyond_fp32(name: str) -> None:
    """They step as small ones of the same directions do; a row of zeros stays one."""
    p, q = parameters((6, 4), (6, 4))
    q.data.copy_(p.data)
    give_gradients(p)
    p.grad[2] = 0.0
    q.grad = 2.0**100 * p.grad
    TritonMuon([{"params": [p, q], "variant": name, "lr": 0.1, "eps": 0.0}]).step()
    torch.testing.assert_close(p, q, atol=1e-6, rtol=0)


@pytest.mark.parametrize("masters", ["fp32", "split16"])
def test_masters_train_like_fp32(masters: str) -> None:
    (p,) = parameters((6, 8), dtype=torch.bfloat16)
    wide = nn.Parameter(p.detach().float())
    optimizer, plain = TritonMuon([p], lr=1e-3, master_weights=masters), TritonMuon([wide], lr=1e-3)
    for step in range(4):
        give_gradients(p, seed=step)
        wide.grad = p.grad.float()
        optimizer.state[p]["momentum_buffer"] = optimizer.state[p].get("momentum_buffer", torch.zeros(6, 8)).float()
        optimizer.step()
        plain.step()
    assert torch.equal(p, wide.bfloat16()) or (p.float() - wide).abs().max() <= 2**-8 * wide.abs().max()
    assert set(optimizer.state[p]) == {"momentum_buffer", "master" if masters == "fp32" else "master_low"}
    if masters == "fp32":
        torch.testing.assert_close(optimizer.state[p]["master"], wide.detach())


def test_stochastic_rounding_keeps_small_steps_on_average() -> None:
    p = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = TritonMuon([p], lr=1e-4, weight_decay=10.0, stochastic_rounding=True, seed=3)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert p.unique().numel() == 2
    assert float(p.detach().float().mean()) == pytest.approx(1 - 1e-3, abs=3e-4)


def test_groups_of_one_seed_round_by_bits_of_their_own() -> None:
    params = [nn.Parameter(torch.ones(16, 16, dtype=torch.bfloat16)) for _ in range(4)]
    options = {"lr": 1e-4, "weight_decay": 10.0, "stochastic_rounding": True, "seed": 3}

    for p in params:
        p.grad = torch.zeros_like(p)
    TritonMuon([{"params": params[:1]}, {"params": params[1:2]}], **options).step()
    TritonMuon(params[2:], **options).step()
    assert not torch.equal(params[0], params[1])
    # one group or two
    assert torch.equal(params[0], params[2])
    assert torch.equal(params[1], params[3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_hyperparameters_of_16_bits_are_computed_with_in_fp32(impl: Any, dtype: torch.dtype) -> None:
    """As tensors are by default after ``torch.set_default_dtype(torch.bfloat16)``: 1 - 0.001 would be 1."""
    numbers = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9, "beta2": 0.95}
    tensors = {name: torch.tensor(number, device=DEVICE).to(dtype) for name, number in numbers.items()}
    found = []
    for options in (tensors, {name: float(number) for name, number in tensors.items()}):
        p, grad, buffer = (torch.linspace(-1, 1, 24, device=DEVICE).reshape(4, 6) for _ in range(3))
        moment = new_second_moment(p)
        muon_([p], [grad], [buffer], second_moments=[moment], impl=impl, ns=NSConfig(dtype=torch.float32), **options)
        found.append((p, buffer, moment))
    torch.testing.assert_close(*found)


def test_hyperparameters_may_be_arrays_without_dimensions() -> None:
    numbers = {"lr": 0.1, "weight_decay": 0.25, "momentum": 0.5, "beta2": 0.75}
    arrays: dict[str, Any] = {name: np.array(number) for name, number in numbers.items()}
    params = parameters((4, 6)), parameters((4, 6))
    with torch.no_grad():
        params[1][0].copy_(params[0][0])
    for own, options in zip(params, (arrays, numbers)):
        own[0].grad = torch.ones_like(own[0])
        TritonMuon(own, impl="torch", **options).step()
    assert torch.equal(params[0][0], params[1][0])


@pytest.mark.parametrize("switch", [0, 1, np.False_, np.True_], ids=repr)
@pytest.mark.parametrize(
    "option", ["nesterov", "row_equilibrate", "renormalize", "cautious", "stochastic_rounding", "maximize"]
)
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_what_is_equal_to_a_switch_is_one(impl: Any, option: str, switch: Any) -> None:
    """A ``stochastic_rounding`` of NumPy's ended in an error about sequences."""
    found, tables = [], []
    for value in (switch, bool(switch)):
        p = nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16, device=DEVICE))
        p.grad = torch.arange(24, dtype=torch.bfloat16, device=DEVICE).view(4, 6)
        optimizer = TritonMuon([p], impl=impl, **{option: value})
        optimizer.step()
        found.append(p.detach())
        tables.append(optimizer.explain())
    torch.testing.assert_close(*found, rtol=0, atol=0)
    # numbers of launches, which are sums of switches
    assert tables[0] == tables[1]


@pytest.mark.parametrize("option", ["nesterov", "row_equilibrate", "renormalize", "cautious", "maximize"])
def test_a_rule_has_switches_of_pythons(option: str) -> None:
    """Kernels are compiled for their values, of which 1 and NumPy's are others than True."""
    for value in (1, np.True_, 0, np.False_):
        assert type(getattr(MuonRule(**{option: value}), option)) is bool
        assert MuonRule(**{option: value}) == MuonRule(**{option: bool(value)})


@pytest.mark.filterwarnings("ignore:Please use the new API settings:UserWarning")  # torch 2.9, of the getter
def test_no_global_flag_is_touched() -> None:
    """Emerging-Optimizers 229: a run failed on the global matmul precision."""
    before = torch.get_float32_matmul_precision()
    (p,) = parameters((8, 8))
    give_gradients(p)
    TritonMuon([p]).step()
    assert torch.get_float32_matmul_precision() == before


def test_keller_flattens_convolutions_and_leaves_stacks_of_matrices() -> None:
    stack, conv = parameters((6, 4, 3), (8, 3, 3, 3))
    single = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    give_gradients(stack, conv)
    for p, grad in zip(single, stack.grad):
        p.grad = grad.clone()
    optimizer = TritonMuon.keller([stack, conv])
    optimizer.step()
    TritonMuon.keller(single).step()
    torch.testing.assert_close(stack, torch.stack(list(single)))
    assert "6 × 4×3" in optimizer.explain()
    assert "8×27" in optimizer.explain()


def test_a_loaded_state_takes_the_formats_of_the_instance() -> None:
    params = parameters((8, 16), dtype=torch.bfloat16)
    train(theirs := torch.optim.Muon(params), params)
    options: dict[str, Any] = {"momentum_dtype": torch.float32, "master_weights": "fp32", "impl": "torch"}
    ours = TritonMuon(params, **options)
    for saved in (theirs.state_dict(), TritonMuon(params, momentum_dtype=torch.bfloat16).state_dict()):
        ours.load_state_dict(saved)
        train(ours, params, steps=1)
        assert {key: ours.param_groups[0][key] for key in options} == options
        assert {value.dtype for value in ours.state[params[0]].values()} == {torch.float32}
    split = TritonMuon(params, master_weights="split16")
    split.load_state_dict(ours.state_dict())
    split.param_groups[0]["lr"] = 0.0
    train(split, params, steps=1)
    low = split.state[params[0]]["master_low"]
    assert torch.equal(join_master(params[0].detach(), low), ours.state[params[0]]["master"])


def test_a_parameter_that_was_exchanged_is_the_one_that_is_stepped() -> None:
    old, new = parameters((8, 16), (8, 16))
    give_gradients(old, new)
    optimizer = TritonMuon([old])
    optimizer.step()
    before = old.detach().clone(), new.detach().clone()
    optimizer.param_groups[0]["params"][0] = new
    optimizer.step()
    assert torch.equal(old, before[0])
    assert not torch.equal(new, before[1])
