"""TritonMuonAdamW: kinds of groups, equality with its parts, clipping, nanochat's checkpoints."""

import copy
import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from random_tensors import DEVICE, assert_same_bits
from torch import nn

from optim_kernels import TritonAdamW, TritonMuon, TritonMuonAdamW
from optim_kernels._impl import is_interpreted
from optim_kernels._triton import Launch
from optim_utils.param_groups import route_parameters


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.lm_head = nn.Linear(8, 7, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        return self.lm_head(x + self.down(self.up(x).relu()))


def matrices_and_rest() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(6, 8)) for _ in range(3)], [nn.Parameter(torch.randn(5)) for _ in range(2)]


def give_gradients(params: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for p in params:
        p.grad = torch.randn_like(p)


def mixed(matrices: list[nn.Parameter], rest: list[nn.Parameter], **options: Any) -> TritonMuonAdamW:
    groups = [{"params": matrices, "kind": "muon"}, {"params": rest, "kind": "adamw", "initial_lr": 0.5}]
    return TritonMuonAdamW(groups, **options)


def test_it_is_muon_and_adamw() -> None:
    matrices, rest = matrices_and_rest()
    m, r = copy.deepcopy(matrices), copy.deepcopy(rest)
    both = mixed(matrices, rest)
    muon = TritonMuon([{"params": m, "variant": "nanochat-2026-07"}])
    adamw = torch.optim.AdamW(r, lr=3e-4, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    for step in range(4):
        give_gradients(matrices + rest, step)
        for p, q in zip(m + r, matrices + rest, strict=True):
            p.grad = q.grad.clone()
        for optimizer in (both, muon, adamw):
            optimizer.step()
    for p, q in zip(matrices + rest, m + r, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)
    assert both.param_groups[1]["initial_lr"] == 0.5


@pytest.mark.parametrize("is_mixed", [False, True], ids=["TritonMuon", "TritonMuonAdamW"])
def test_a_log_line_says_once_what_plain_torch_updates(is_mixed: bool, caplog: pytest.LogCaptureFixture) -> None:
    matrices, rest = matrices_and_rest()
    optimizer = mixed(matrices, rest) if is_mixed else TritonMuon(matrices)
    with caplog.at_level(logging.INFO, logger="optim_kernels"):
        for step in range(2):
            give_gradients(matrices + rest, step)
            optimizer.step()
            optimizer.zero_grad()
    assert [record.getMessage() for record in caplog.records] == [
        f"{type(optimizer).__name__} uses plain torch where it is on cpu; see explain()"
    ]


def test_adamw_groups_are_one_planned_launch() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    first, second = (
        [nn.Parameter(torch.randn(shape, device=device)) for shape in ((5, 3), (300,), ())] for _ in range(2)
    )
    copies = copy.deepcopy(first), copy.deepcopy(second)
    options: list[dict[str, Any]] = [
        {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0},
        {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1},
    ]
    groups = [{"kind": "adamw", "impl": "triton", "params": p, **o} for p, o in zip((first, second), options)]
    ours = TritonMuonAdamW(groups)
    theirs = torch.optim.AdamW([{"params": p, **o} for p, o in zip(copies, options)])
    prepared = []
    for step in range(3):
        give_gradients(first + second, step)
        for p, q in zip(copies[0] + copies[1], first + second, strict=True):
            p.grad = None if q.grad is None else q.grad.clone()
        ours.step()
        theirs.step()
        prepared.append(ours._prepared)
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 1e-2 / (step + 2)
    assert prepared[0] is prepared[2]
    assert prepared[0] is not None
    assert prepared[0].kernels is not None
    assert prepared[0].kernels.plan.num_launches == 1
    for p, q in zip(copies[0] + copies[1], first + second, strict=True):
        torch.testing.assert_close(q, p, rtol=2e-5, atol=2e-6)
    assert ours.explain().count("triton") == 6


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A one for every launch of AdamW's step and of a norm; those of Muon are made otherwise."""
    seen: list[int] = []

    class Counted(Launch):
        def __call__(self, *args: Any) -> None:
            seen.append(1)
            super().__call__(*args)

        def bound(self, *args: Any) -> Any:
            return partial(self, *args)

        def bound_but_result(self, *args: Any) -> Any:
            return lambda result: self(*args, (result,))

    monkeypatch.setattr("optim_kernels._triton.Launch", Counted)
    return seen


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float32, torch.bfloat16]], ids=["one", "two"])
@pytest.mark.parametrize("clipping", [{}, {"max_norm": 1.0}], ids=["", "clipped"])
def test_explain_counts_all_launches(dtypes: list[Any], clipping: dict[str, float], launched: list[int]) -> None:
    matrix = nn.Parameter(torch.randn(6, 8, device=DEVICE))
    rest = [nn.Parameter(torch.randn(5, device=DEVICE, dtype=dtype)) for dtype in dtypes]
    give_gradients([matrix, *rest], 0)
    optimizers = [
        TritonAdamW(rest, impl="triton", **clipping),
        TritonMuonAdamW([{"kind": "adamw", "params": rest}], impl="triton", **clipping),
        TritonMuonAdamW(
            [{"kind": "muon", "params": [matrix]}, {"kind": "adamw", "params": rest}], impl="triton", **clipping
        ),
    ]
    for optimizer in optimizers:
        assert "launches a step" not in optimizer.explain()
        optimizer.step()
        launched.clear()
        optimizer.step()
        of_muon = sum(plan.launches for plan in optimizer.plans()) if isinstance(optimizer, TritonMuonAdamW) else 0
        count = len(launched) + of_muon
        assert f"\n{count} launch{'es' * (count > 1)} a step" in optimizer.explain()


def test_a_routed_model_learns() -> None:
    torch.manual_seed(0)
    model = Tiny()
    table = route_parameters(model)
    optimizer = TritonMuonAdamW(table.param_groups(muon={"lr": 0.02}, adamw={"lr": 1e-2}), max_norm=1.0)
    tokens = torch.arange(7)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 7)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert "muon" in optimizer.explain()


def test_clipping_inside_the_step_is_clipping_before_it() -> None:
    matrices, rest = matrices_and_rest()
    m, r = copy.deepcopy(matrices), copy.deepcopy(rest)
    inside, outside = mixed(matrices, rest, max_norm=0.5), mixed(m, r)
    give_gradients(matrices + rest, 0)
    for p, q in zip(m + r, matrices + rest, strict=True):
        p.grad = q.grad.clone()
    norm = nn.utils.clip_grad_norm_(m + r, 0.5)
    inside.step()
    outside.step()
    assert inside.grad_norm is not None
    torch.testing.assert_close(inside.grad_norm, norm)
    for p, q in zip(matrices + rest, m + r, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)


def test_nanochat_checkpoints_continue_alike() -> None:
    matrices, rest = matrices_and_rest()
    first = mixed(matrices, rest)
    for step in range(2):
        give_gradients(matrices + rest, step)
        first.step()
    saved = copy.deepcopy(first.state_dict(layout="nanochat"))
    assert saved["state"][0]["momentum_buffer"].shape == (3, 6, 8)
    assert saved["state"][0]["second_momentum_buffer"].shape == (3, 1, 8)
    assert saved["state"][3]["step"] == 2
    assert isinstance(saved["state"][3]["step"], int)
    m, r = copy.deepcopy(matrices), copy.deepcopy(rest)
    second = mixed(m, r)
    second.load_state_dict(saved)
    for optimizer, params in ((first, matrices + rest), (second, m + r)):
        give_gradients(params, 9)
        optimizer.step()
    assert_same_bits(matrices + rest, m + r)


def test_nanochats_layout_leaves_out_empty_states() -> None:
    matrices, rest = matrices_and_rest()
    optimizer = mixed(matrices, rest)
    # that makes them
    assert not any(optimizer.state[p] for p in matrices + rest)
    assert optimizer.state_dict(layout="nanochat")["state"] == {}
    give_gradients(rest[:1], 0)
    optimizer.step()
    assert optimizer.state_dict(layout="nanochat")["state"].keys() == {3}


@pytest.mark.parametrize("moment", [None, (), torch.zeros(1, 6, 1)], ids=str)
def test_stacks_of_other_sizes_are_refused(moment: Any) -> None:
    matrices = [nn.Parameter(torch.randn(6, 4)) for _ in range(2)]
    optimizer = TritonMuonAdamW([{"kind": "muon", "params": matrices}])
    for p in matrices:
        p.grad = torch.randn_like(p)
    optimizer.step()
    before, saved = str(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict(layout="nanochat"))
    saved["state"][0]["second_momentum_buffer"] = moment
    with pytest.raises(ValueError, match=r"second_momentum_buffer of param_groups\[0\] must be a stack of 2 tensors"):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == before


def test_nanochat_layout_needs_equal_shapes() -> None:
    params = [nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6, 4))]
    optimizer = TritonMuonAdamW([{"params": params, "kind": "muon"}])
    give_gradients(params, 0)
    optimizer.step()
    with pytest.raises(ValueError, match="all of matrices of one shape"):
        optimizer.state_dict(layout="nanochat")
    with pytest.raises(ValueError, match="layout"):
        optimizer.state_dict(layout="keller")


def test_gradients_are_not_gathered_for_a_norm_that_nobody_asks_for() -> None:
    """It would cost the host some time, in every step."""
    passes: list[int] = []

    class Listed(list[nn.Parameter]):
        def __iter__(self) -> Iterator[nn.Parameter]:
            passes.append(1)
            return super().__iter__()

    optimizer = mixed(*matrices_and_rest())
    for group in optimizer.param_groups:
        group["params"] = Listed(group["params"])
    assert optimizer._clip(None) is None
    assert not passes


@pytest.mark.parametrize("is_stepped", [False, True])
def test_entries_of_the_users_are_no_stacks(is_stepped: bool) -> None:
    matrices, rest = matrices_and_rest()
    optimizer = mixed(matrices, rest)
    if is_stepped:
        give_gradients(matrices + rest, 0)
        optimizer.step()
    optimizer.state[rest[0]]["note"] = "kept"
    saved = optimizer.state_dict(layout="nanochat")["state"]
    assert [state["note"] for state in saved.values() if "note" in state] == ["kept"]
    optimizer.state[matrices[0]]["note"] = "refused"
    with pytest.raises(ValueError, match=r"of tensors alone, .* note 'refused'.*; use layout='separate'"):
        optimizer.state_dict(layout="nanochat")


def test_keller_groups() -> None:
    matrices, rest = matrices_and_rest()
    optimizer = TritonMuonAdamW([{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}])
    group = optimizer.param_groups[0]
    assert (group["kind"], group["adjust_lr_fn"], group["missing_grad"]) == ("muon", "keller", "zero")
    assert group["beta2"] is None
    give_gradients(rest, 0)
    optimizer.step()
    assert all(p.grad is None for p in matrices)


def test_defaults_may_be_replaced() -> None:
    """Keller Jordan's and nanochat's optimizers have none, so programs give them some, for their schedules."""
    (matrix, *_), (vector, late, *_) = matrices_and_rest()
    groups: list[dict[str, Any]] = [{"params": [matrix], "use_muon": True}, {"params": [vector], "use_muon": False}]
    optimizer = TritonMuonAdamW(groups, max_norm=0.5, seed=3, impl="torch")
    optimizer.defaults = {"lr": 0.1}
    give_gradients([matrix, vector], 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == str(saved)
    assert copy.deepcopy(optimizer).defaults["lr"] == 0.1
    optimizer.add_param_group({"params": [late], "use_muon": False})
    assert [group["max_norm"] for group in optimizer.param_groups] == [0.5, 0.5, 0.5]
    assert (optimizer.param_groups[2]["seed"], optimizer.param_groups[2]["impl"]) == (3, "torch")
    give_gradients([matrix, vector, late], 1)
    optimizer.step()


def test_where_groups_of_others_are_not_followed() -> None:
    """As the README says: AdamW's missing gradients are no zeros, and without ``beta2`` there is no NorMuon."""
    (matrix, *_), (vector, *_) = matrices_and_rest()
    group = {"params": [matrix], "kind": "muon", "beta2": None, "ns_steps": 6}
    optimizer = TritonMuonAdamW([group, {"params": [vector], "use_muon": False, "weight_decay": 0.1}])
    before = vector.detach().clone()
    give_gradients([matrix], 0)
    optimizer.step()
    assert torch.equal(vector, before)
    assert optimizer.state[matrix].keys() == {"momentum_buffer"}


@pytest.mark.parametrize(
    ("group", "missing_grad"),
    [
        ({"kind": "muon"}, "skip"),
        ({"kind": "muon", "variant": "nanochat-2025"}, "skip"),
        ({"kind": "muon", "variant": "keller"}, "zero"),
        ({"use_muon": True}, "zero"),
        ({"use_muon": True, "variant": "torch"}, "skip"),
        ({"use_muon": True, "missing_grad": "raise"}, "raise"),
    ],
    ids=str,
)
def test_what_a_missing_gradient_means_the_variant_says(group: dict[str, Any], missing_grad: str) -> None:
    matrices, _ = matrices_and_rest()
    assert TritonMuonAdamW([{"params": matrices, **group}]).param_groups[0]["missing_grad"] == missing_grad


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({}, r"kind.*route_parameters\(model\)\.param_groups\(\)"),
        ({"kind": "sgd"}, "kind"),
        ({"kind": "adamw", "eps": -1.0}, "epsilon"),
        ({"kind": "adamw", "lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"kind": "adamw", "betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        ({"kind": "adamw", "weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
        ({"kind": "muon"}, "AdamW"),
        ({"kind": "adamw", "use_muon": True}, "kind='adamw', but use_muon=True; leave one of them out"),
        ({"use_muon": [1]}, "each group needs kind='muon' or 'adamw'"),
    ],
    ids=["none", "unknown", "bad eps", "bad lr", "bad beta", "bad decay", "vector to muon", "both", "no switch"],
)
def test_bad_groups(group: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TritonMuonAdamW([{"params": [nn.Parameter(torch.ones(4))], **group}])


def test_a_list_is_no_group() -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = TritonMuonAdamW([{"kind": "adamw", "params": [p]}])
    with pytest.raises(TypeError, match="param_group must be a dict, but got <class 'list'>"):
        optimizer.add_param_group([nn.Parameter(torch.ones(4))])  # type: ignore[arg-type]
    assert [group["params"] for group in optimizer.param_groups] == [[p]]


@pytest.mark.parametrize(
    "option",
    [
        {"amsgrad": True},
        {"master_weights": "fp32"},
        {"state_dtype": torch.float32},
        {"stochastic_rounding": True},
        {"differentiable": True},
    ],
    ids=str,
)
def test_options_of_adamw_that_it_lacks_are_refused(option: dict[str, Any]) -> None:
    _, rest = matrices_and_rest()
    with pytest.raises(ValueError, match=f"{next(iter(option))}=.*TritonAdamW"):
        TritonMuonAdamW([{"params": rest, "kind": "adamw", **option}])
    TritonMuonAdamW([{"params": rest, "kind": "adamw", **dict.fromkeys(option)}])


def test_adamw_groups_check_what_they_are_given() -> None:
    _, rest = matrices_and_rest()
    with pytest.raises(ValueError, match="bogus"):
        TritonMuonAdamW([{"params": rest, "kind": "adamw", "impl": "bogus"}])
    with pytest.raises(ValueError, match="complex64; give it to TritonAdamW"):
        TritonMuonAdamW([{"params": [torch.zeros(3, dtype=torch.complex64)], "kind": "adamw"}])
    for betas in ((0.9,), 0.9):
        with pytest.raises(ValueError, match="betas must be a pair, got"):
            TritonMuonAdamW([{"params": rest, "kind": "adamw", "betas": betas}])
    for option, value in (("lr", None), ("eps", "1e-8"), ("weight_decay", [0.1])):
        with pytest.raises(TypeError, match=f"{option} must be a number or a 1-element tensor, got"):
            TritonMuonAdamW([{"params": rest, "kind": "adamw", option: value}])


def test_adams_groups_are_no_adamws() -> None:
    """They say so by an option, whose decay is part of the gradient; torch's AdamW puts it right in a load."""
    matrices, rest = matrices_and_rest()
    adam = torch.optim.Adam(rest, weight_decay=0.1)
    groups = [{"params": matrices, "kind": "muon"}, {**adam.param_groups[0], "kind": "adamw"}]
    with pytest.raises(ValueError, match=r"param_groups\[1\] has .*=False, as those of torch\.optim\.Adam"):
        TritonMuonAdamW(groups)
    optimizer = TritonMuonAdamW([{"params": rest, "kind": "adamw"}])
    with pytest.raises(ValueError, match=r"param_groups\[1\] has decoupled_weight_decay=False"):
        optimizer.add_param_group({"params": matrices, "kind": "adamw", "decoupled_weight_decay": False})
    assert len(optimizer.param_groups) == 1
    optimizer.load_state_dict(adam.state_dict())
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True


def test_lazy_parameters_of_adamw_are_explained_before_they_are_there() -> None:
    model = nn.LazyLinear(3)
    optimizer = TritonMuonAdamW([{"params": model.named_parameters(), "kind": "adamw"}])
    assert optimizer.explain().count("its lazy module has seen no input") == 2
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    assert "(3, 5)" in optimizer.explain()


def test_an_exchanged_parameter_of_adamw_is_stepped() -> None:
    _, (old, new) = matrices_and_rest()
    optimizer = TritonMuonAdamW([{"params": [old], "kind": "adamw", "lr": 0.1}])
    give_gradients([old, new], 0)
    optimizer.step()
    before = old.detach().clone(), new.detach().clone()
    optimizer.param_groups[0]["params"][0] = new
    optimizer.step()
    assert torch.equal(old, before[0])
    assert not torch.equal(new, before[1])


@pytest.mark.parametrize("impl", ["torch", "triton"] if is_interpreted() else ["torch"])
def test_what_adamw_refuses_it_refuses_before_muon_has_moved(impl: Any) -> None:
    matrices, rest = matrices_and_rest()
    optimizer = mixed(matrices, rest, impl=impl)
    for seed in range(2):
        give_gradients(matrices + rest, seed)
        optimizer.step()
    before = [p.detach().clone() for p in matrices]
    rest[0].grad = None
    rest[0].grad = torch.ones(5).to_sparse()
    with pytest.raises(RuntimeError, match="AdamW takes dense gradients"):
        optimizer.step()
    if impl == "triton":
        rest[0].grad = torch.ones(5)
        rest[0].grad.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"grad of .*\[1\].*\[0\].* its storage was freed"):
            optimizer.step()
    assert_same_bits(matrices, before)


@pytest.mark.parametrize("is_loaded", [False, True], ids=["moved", "loaded"])
def test_the_order_in_memory_of_an_adamw_parameter_may_change(is_loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``model.to(memory_format=torch.channels_last)``, say, or from a checkpoint of before."""
    params = [nn.Parameter(torch.randn(4, 3, 5, 5, device=DEVICE))]
    reference = copy.deepcopy(params)

    def make(of: list[nn.Parameter]) -> TritonMuonAdamW:
        return TritonMuonAdamW([{"params": of, "kind": "adamw"}], impl="triton")

    optimizer, other = make(params), make(reference)
    for step in range(3):
        if step == 1:
            params[0].data = params[0].data.to(memory_format=torch.channels_last)
            if is_loaded:
                saved = optimizer.state_dict()
                optimizer = make(params)
                optimizer.load_state_dict(saved)
        give_gradients(reference, step)
        params[0].grad = reference[0].grad
        if step == 1:
            with monkeypatch.context() as capture, pytest.raises(RuntimeError, match=r"exp_avg and exp_avg_sq.* order"):
                capture.setattr("optim_kernels._optimizers.adamw_base.is_capturing", lambda device: True)
                optimizer.step()
        optimizer.step()
        other.step()
    assert torch.equal(params[0], reference[0])


def test_clipping_is_what_the_groups_say() -> None:
    matrices, rest = matrices_and_rest()
    optimizer = mixed(matrices, rest)
    with pytest.raises(ValueError, match="max_norm is None in the first group, but 0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "kind": "adamw", "max_norm": 0.5})
    assert len(optimizer.param_groups) == 2
    saved = mixed(matrices, rest, max_norm=0.5).state_dict()
    optimizer.load_state_dict(saved)
    give_gradients(matrices + rest, 0)
    norm = nn.utils.get_total_norm([p.grad for p in matrices + rest if p.grad is not None])
    optimizer.step()
    assert optimizer.grad_norm is not None
    torch.testing.assert_close(optimizer.grad_norm, norm)
    for group in optimizer.param_groups:
        group["max_norm"] = None
    give_gradients(matrices + rest, 1)
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, norm)
    with pytest.raises(ValueError, match="max_norm must be positive or None, got -1"):
        mixed(matrices, rest, max_norm=-1.0)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_without_groups_nothing_happens_until_there_are_some(max_norm: float | None) -> None:
    matrices, rest = matrices_and_rest()
    optimizer = mixed(matrices, rest, max_norm=max_norm)
    groups, optimizer.param_groups = optimizer.param_groups, []
    give_gradients(matrices + rest, 0)
    before = [p.detach().clone() for p in matrices + rest]
    optimizer.step()
    assert all(map(torch.equal, matrices + rest, before))
    optimizer.param_groups = groups
    optimizer.step()
    assert not any(map(torch.equal, matrices + rest, before))


@pytest.mark.parametrize("masters", ["fp32", "split16"])
def test_nanochats_layout_keeps_masters_and_counts(masters: str) -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(6, 8).bfloat16()) for _ in range(2)]
    twins = copy.deepcopy(params)
    options = {"kind": "muon", "master_weights": masters, "stochastic_rounding": True}
    first, second = (TritonMuonAdamW([{"params": own, **options}]) for own in (params, twins))
    for seed in range(2):
        give_gradients(params, seed)
        first.step()
    for p, q in zip(twins, params, strict=True):
        p.data.copy_(q)
    second.load_state_dict(copy.deepcopy(first.state_dict(layout="nanochat")))
    for p, q in zip(params, twins, strict=True):
        assert first.state[p].keys() == second.state[q].keys()
        assert all(torch.equal(value, second.state[q][key]) for key, value in first.state[p].items())


def test_a_checkpoint_with_options_of_adamw_that_it_lacks_is_refused() -> None:
    _, rest = matrices_and_rest()
    theirs = torch.optim.AdamW(rest, amsgrad=True, lr=0.5)
    optimizer = TritonMuonAdamW([{"params": rest, "kind": "adamw"}])
    with pytest.raises(ValueError, match="amsgrad=True"):
        optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.param_groups[0]["lr"] == 3e-4
    optimizer.load_state_dict(torch.optim.AdamW(rest, lr=0.5).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("seed", ["7", 1.5, None, torch.tensor(3)], ids=repr)
@pytest.mark.parametrize("make", [TritonMuon, TritonAdamW])
def test_seeds_that_are_no_whole_numbers_are_refused(make: Any, seed: Any) -> None:
    p, q = (nn.Parameter(torch.ones(16, 24, device=DEVICE)) for _ in range(2))
    with pytest.raises(ValueError, match=re.escape(f"seed must be an int, got {seed!r}")):
        make([p], lr=0.01, seed=seed)
    optimizer = make([p], lr=0.01)
    with pytest.raises(ValueError, match="seed must be an int"):
        optimizer.add_param_group({"params": [q], "seed": seed})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("seed", [-1, 2**40 + 3, 2**64 - 1])
@pytest.mark.parametrize("make", [TritonMuon, TritonAdamW])
def test_random_bits_of_any_seed(make: Any, seed: int) -> None:
    """Seeds of torch's own generators have up to 64 bits; the kernels take the bits that plain torch takes."""
    params = [nn.Parameter(torch.ones(16, 24, device=DEVICE).bfloat16()) for _ in range(3)]
    for p, impl, own in zip(params, ("torch", "triton", "torch"), (seed, seed, seed + 1)):
        # it decays alone, which all compute exactly alike
        p.grad = torch.zeros_like(p)
        make([p], lr=0.01, weight_decay=0.1, stochastic_rounding=True, seed=own, impl=impl).step()
    assert torch.equal(params[0], params[1])
    assert not torch.equal(params[0], params[2])


@pytest.mark.parametrize(
    "make", [TritonAdamW, TritonMuon, lambda ps: TritonMuonAdamW([{"params": ps, "kind": "muon"}])]
)
def test_capture_without_capturable_is_refused_before_the_closure_runs(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in torch: what the closure launches would be left in a graph of half a step."""
    optimizer = make([nn.Parameter(torch.ones(4, 4))])
    # that one group is capturable does not help the other
    capturable = {"params": [nn.Parameter(torch.ones(4, 4))], "capturable": True}
    optimizer.param_groups.append({**optimizer.param_groups[0], **capturable})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    calls: list[None] = []
    with pytest.raises(RuntimeError, match="capturable is False"):
        optimizer.step(lambda: calls.append(None))  # type: ignore[arg-type]
    assert not calls


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("betas", (0.9, 1.0), r"betas\[1\] must be from 0 to below 1, got 1"),
        ("betas", (1, 0.9), r"betas\[0\] must be from 0 to below 1, got 1"),
        ("lr", 10**400, "lr is too large"),
        ("eps", torch.ones(1).to_sparse(), "eps must be a dense tensor"),
    ],
)
def test_adamws_numbers_that_no_step_can_take_are_refused_before_muon_moves(
    option: str, value: Any, words: str
) -> None:
    matrix, vector = (nn.Parameter(torch.ones(shape)) for shape in ((4, 6), (3,)))
    optimizer = TritonMuonAdamW([{"kind": "muon", "params": [matrix]}, {"kind": "adamw", "params": [vector]}])
    for p in (matrix, vector):
        p.grad = torch.ones_like(p)
    optimizer.param_groups[1][option] = value
    with pytest.raises((ValueError, OverflowError), match=f"^{words}"):
        optimizer.step()
    assert torch.equal(matrix, torch.ones(4, 6))
    assert not optimizer.state[matrix]
