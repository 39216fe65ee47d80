"""A parameter, gradient or state that no longer fits the others is refused by name, before a step moves anything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from random_tensors import DEVICE, give_gradients
from torch import Tensor, nn

from optim_kernels import TritonAdamW, TritonMuon, TritonMuonAdamW
from optim_kernels._optimizers import adamw_parts
from optim_kernels.functional import adamw_
from optim_utils.low_bit import INT8, quantize

pytest.importorskip("triton")

State = dict[str, Any]


def adamw(params: list[nn.Parameter], impl: Any) -> TritonAdamW:
    return TritonAdamW(list(zip(("first", "last"), params)), impl=impl)


def adamw_at_random(params: list[nn.Parameter], impl: Any) -> TritonAdamW:
    """By the reference, where there are no kernels."""
    named = list(zip(("first", "last"), params))
    return TritonAdamW(named, impl=impl, state_dtype=torch.bfloat16, stochastic_rounding=True)


def muon_at_random(params: list[nn.Parameter], impl: Any) -> TritonMuon:
    return TritonMuon(list(zip(("first", "last"), params)), impl=impl, ns_steps=1, stochastic_rounding=True)


def normuon(params: list[nn.Parameter], impl: Any) -> TritonMuon:
    return TritonMuon(list(zip(("first", "last"), params)), impl=impl, ns_steps=1, beta2=0.9)


def muon_and_adamw(params: list[nn.Parameter], impl: Any) -> TritonMuonAdamW:
    first, last = params
    groups: list[dict[str, Any]] = [{"kind": "muon", "params": [("first", first)], "ns_steps": 1}]
    return TritonMuonAdamW([*groups, {"kind": "adamw", "params": [("last", last)]}], impl=impl)


MAKERS = pytest.mark.parametrize("make", [adamw, adamw_at_random, muon_at_random, muon_and_adamw])
IMPLS = pytest.mark.parametrize("impl", ["torch", "triton"])


def stepped(make: Callable[..., Any], impl: str) -> tuple[list[nn.Parameter], Any]:
    params = [nn.Parameter(torch.randn(4, 6, device=DEVICE)) for _ in range(2)]
    optimizer = make(params, impl)
    for _ in range(2):
        give_gradients(*params)
        optimizer.step()
    return params, optimizer


def assert_refused(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], words: str) -> None:
    before = copy.deepcopy([(p.data, optimizer.state[p]) for p in params])
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    found = [(p.data, optimizer.state[p]) for p in params]
    for (value, state), (old_value, old_state) in zip(found, before, strict=True):
        assert torch.equal(value, old_value)
        for key, old in old_state.items():
            assert torch.equal(state[key], old) if has_numbers(old) else type(state[key]) is type(old)


def has_numbers(value: Any) -> bool:
    return type(value) is Tensor and value.layout == torch.strided and not value.is_meta


def of_other_shape(moment: Tensor) -> Tensor:
    return moment[:1].clone()


def expanded(moment: Tensor) -> Tensor:
    return moment[:1].expand(moment.shape)


@MAKERS
@IMPLS
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (of_other_shape, r"is of shape \(1, 6\) on \w+.*, but it is of shape \(4, 6\) on"),
        (expanded, r".* has several elements at one place; give its contiguous\(\)"),
        (Tensor.int, r"must be of a floating dtype, got torch\.int32; convert it"),
        (Tensor.to_sparse, r"must be dense, got torch\.sparse_coo; give its to_dense\(\)"),
        (Tensor.tolist, r"must be a tensor, got \[\[.*; delete its state"),
    ],
    ids=["shape", "expanded", "integers", "sparse", "list"],
)
def test_a_moment_that_does_not_fit(make: Any, impl: Any, change: Callable[[Tensor], Any], words: str) -> None:
    params, optimizer = stepped(make, impl)
    give_gradients(*params)
    state = optimizer.state[params[1]]
    key = "momentum_buffer" if "momentum_buffer" in state else "exp_avg_sq"
    state[key] = change(state[key])
    assert_refused(optimizer, params, f"last cannot be updated: its {key}.* {words}")


@MAKERS
@IMPLS
def test_a_moment_whose_data_has_become_another(make: Any, impl: Any) -> None:
    """The same object, in the same state: seen without a look at every tensor in every step."""
    params, optimizer = stepped(make, impl)
    for _ in range(3):
        give_gradients(*params)
        optimizer.step()
    state = optimizer.state[params[1]]
    key = "momentum_buffer" if "momentum_buffer" in state else "exp_avg"
    state[key].data = state[key].data[:, :3].clone()
    assert_refused(optimizer, params, rf"last cannot be updated: its {key} is of shape \(4, 3\)")


@MAKERS
@IMPLS
@pytest.mark.parametrize("shape", [(8, 6), (1, 6), (3, 8)])
def test_a_parameter_that_has_become_another_shape(make: Any, impl: Any, shape: tuple[int, int]) -> None:
    """Broadcast, or noticed by torch when the other had moved; the wanted thing is a new state."""
    params, optimizer = stepped(make, impl)
    params[1].data = torch.randn(shape, device=DEVICE)
    give_gradients(params[0])
    assert_refused(
        optimizer, params, r"last cannot be updated: its gradient is of shape \(4, 6\) .* call zero_grad\(\)"
    )
    params[1].grad = None
    give_gradients(*params)
    assert_refused(
        optimizer, params, rf"last cannot .* is of shape \(4, 6\) on \w+.* of shape \({shape[0]}, {shape[1]}\) on"
    )
    del optimizer.state[params[1]]
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert not any(map(torch.equal, params, before))


@MAKERS
def test_a_parameter_that_has_become_an_expanded_one(make: Any) -> None:
    params, optimizer = stepped(make, "torch")
    give_gradients(*params)
    params[1].data = torch.randn(1, 6, device=DEVICE).expand(4, 6)
    assert_refused(optimizer, params, r"last cannot be updated: .* it has several elements at one place in memory")


@MAKERS
@IMPLS
@pytest.mark.parametrize(
    "count",
    [
        None,
        "3",
        torch.ones(2),
        torch.ones(()).to_sparse(),
        torch.ones((), device="meta"),
        quantize(torch.ones(1), INT8),
        torch.ones((), dtype=torch.complex64),
    ],
    ids=["none", "text", "two", "sparse", "meta", "codes", "complex"],
)
def test_a_step_count_that_is_none(make: Any, impl: Any, count: Any) -> None:
    params, optimizer = stepped(make, impl)
    give_gradients(*params)
    optimizer.state[params[1]]["step"] = count
    assert_refused(optimizer, params, "last cannot be updated: its step must be a 0-d tensor that counts steps, got")


@pytest.mark.parametrize("make", [adamw, adamw_at_random, muon_and_adamw])
@IMPLS
def test_a_step_count_may_be_a_number(make: Any, impl: Any) -> None:
    params, optimizer = stepped(make, impl)
    give_gradients(*params)
    optimizer.state[params[1]]["step"] = 0
    optimizer.step()
    assert float(optimizer.state[params[1]]["step"]) == 1


@pytest.mark.parametrize("make", [adamw, adamw_at_random, muon_and_adamw])
@IMPLS
@pytest.mark.parametrize("count", [3, 3.0, np.float32(3)], ids=["int", "float", "numpy"])
def test_a_step_count_that_is_a_number_is_saved(make: Any, impl: Any, count: Any) -> None:
    params, optimizer = stepped(make, impl)
    give_gradients(*params)
    optimizer.state[params[1]]["step"] = count
    copied = [nn.Parameter(p.detach().clone()) for p in params]
    loaded = make(copied, impl)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if make is not muon_and_adamw:
        assert optimizer.to_torch_state_dict()["state"][1]["step"].tolist() == 3.0
    for q, p in zip(copied, params, strict=True):
        q.grad = p.grad
    optimizer.step()
    loaded.step()
    for p, q in zip(params, copied, strict=True):
        assert torch.equal(p, q)
    assert float(loaded.state[copied[1]]["step"]) == 4


@pytest.mark.parametrize("make", [adamw, adamw_at_random, muon_and_adamw])
@IMPLS
@pytest.mark.parametrize("missing", ["step", "exp_avg", "exp_avg_sq"])
def test_a_state_of_which_something_is_missing(make: Any, impl: Any, missing: str) -> None:
    params, optimizer = stepped(make, impl)
    give_gradients(*params)
    del optimizer.state[params[1]][missing]
    optimizer.state[params[1]][7] = "a key that is no text"
    assert_refused(
        optimizer,
        params,
        rf"last cannot be updated: its state has \['.*\], but needs {missing} too; add what is missing",
    )


@pytest.mark.parametrize("make", [adamw, adamw_at_random, muon_and_adamw])
@IMPLS
def test_a_state_of_which_something_is_called_otherwise(make: Any, impl: Any) -> None:
    """The same tensors in the same order."""
    params, optimizer = stepped(make, impl)
    give_gradients(*params)
    state = optimizer.state[params[1]]
    assert [*state][-1] == "exp_avg_sq"
    state["square"] = state.pop("exp_avg_sq")
    assert_refused(optimizer, params, r"last cannot be updated: its state has .* but needs exp_avg_sq too")


@MAKERS
@IMPLS
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize(
    "kept",
    [
        Tensor.to_sparse,
        Tensor.to_sparse_csr,
        lambda mask: quantize(mask, INT8),
        lambda mask: torch.nested.nested_tensor([mask[0], mask[1, :2]], layout=torch.jagged),
        str,
    ],
    ids=["coo", "csr", "codes", "nested", "words"],
)
def test_a_state_may_have_other_entries(make: Any, impl: Any, kept: Callable[[Tensor], Any]) -> None:
    """As with torch's optimizers; they have no part in a step."""
    entry = kept(torch.eye(3, device=DEVICE))
    params, optimizer = stepped(make, impl)
    for _ in range(3):
        for p in params:
            optimizer.state[p]["other"] = entry
        before = [p.detach().clone() for p in params]
        give_gradients(*params)
        optimizer.step()
        assert not any(map(torch.equal, params, before))
        assert all(optimizer.state[p]["other"] is entry for p in params)


@MAKERS
def test_a_parameter_of_a_class_that_has_become_another_shape(make: Any) -> None:
    """Such classes may wrap others, so that their own shapes say nothing."""
    kinds = nn.Parameter, type("Own", (nn.Parameter,), {})
    params = [kind(torch.randn(4, 6, device=DEVICE)) for kind in kinds]
    optimizer = make(params, "torch")
    for _ in range(3):
        give_gradients(*params)
        optimizer.step()
    params[1].data = torch.randn(8, 6, device=DEVICE)
    assert_refused(optimizer, params, r"last cannot be updated: its gradient is of shape \(4, 6\)")


@IMPLS
def test_codes_of_another_shape(impl: Any) -> None:
    """Codes and scales are alike, so the shape alone tells."""
    params = [nn.Parameter(torch.randn(64, 64, device=DEVICE)) for _ in range(2)]
    optimizer = TritonAdamW(list(zip(("first", "last"), params)), impl=impl, state_dtype="int8")
    for _ in range(3):
        give_gradients(*params)
        optimizer.step()
    state = optimizer.state[params[1]]
    state["exp_avg"] = quantize(torch.randn(32, 128, device=DEVICE), state["exp_avg"].fmt)
    assert_refused(optimizer, params, r"last cannot be updated: its exp_avg is of shape \(32, 128\)")


def test_plain_torch_asks_only_where_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step reads anew may lie elsewhere."""
    params, optimizer = stepped(adamw, "torch")
    state, asked = optimizer.state[params[1]], []
    monkeypatch.setattr(adamw_parts, "why_unfit_state", lambda param, *_: asked.append(param))

    def num_asked() -> int:
        asked.clear()
        give_gradients(*params)
        optimizer.step()
        return len(asked)

    assert num_asked() == 0
    state["exp_avg"] = state["exp_avg"].clone()
    assert num_asked() == 0
    state["exp_avg"] = state["exp_avg"].double()
    assert num_asked() > 0
    assert num_asked() == 0


@MAKERS
def test_a_parameter_that_has_become_one_of_8_bits(make: Any) -> None:
    params, optimizer = stepped(make, "torch")
    give_gradients(*params)
    params[1].data = params[1].data.to(torch.float8_e4m3fn)
    assert_refused(optimizer, params, r"last.* is torch\.float8_e4m3fn; freeze it")


@MAKERS
@IMPLS
@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64], ids=["integers", "complex"])
def test_a_gradient_in_numbers_of_another_kind(make: Any, impl: Any, dtype: torch.dtype) -> None:
    """As of a parameter that had them, too, until its data became real floats."""
    params, optimizer = stepped(make, impl)
    give_gradients(*params)
    value = params[1].data
    params[1].requires_grad_(False).data = value.to(dtype)
    params[1].grad = torch.ones_like(params[1])
    params[1].data = value
    words = f"last cannot be updated: its gradient is {dtype}, but it is torch.float32; convert the gradient"
    assert_refused(optimizer, params, words if impl == "torch" or make is not adamw else str(dtype))


def muon_in_two_groups(params: list[nn.Parameter], impl: Any) -> TritonMuon:
    named = zip(("first", "last"), params)
    return TritonMuon([{"params": [pair]} for pair in named], impl=impl, ns_steps=1, stochastic_rounding=True)


@pytest.mark.parametrize("make", [adamw, adamw_at_random, muon_and_adamw, muon_in_two_groups])
@pytest.mark.parametrize("what", ["it", "its step", "its moment"])
def test_what_torch_cannot_write_since_it_was_made_in_inference_mode(make: Any, what: str) -> None:
    params, optimizer = stepped(make, "torch")
    give_gradients(*params)
    with torch.inference_mode():
        if what == "it":
            params[1] = torch.randn(4, 6, device=DEVICE)
        else:
            state = optimizer.state[params[1]]
            what = what.replace("moment", "momentum_buffer" if "momentum_buffer" in state else "exp_avg")
            key = what.removeprefix("its ")
            state[key] = state[key].clone()
    if what == "it":
        params[1].grad = torch.ones_like(params[1])
        optimizer.param_groups[-1]["params"][-1] = params[1]
    assert_refused(optimizer, params, f"last cannot be updated: {what} was made in inference mode, .*; give its clone")


def test_functions_call_parameters_as_their_callers_do() -> None:
    params = [torch.zeros(4, 6, device=DEVICE) for _ in range(2)]
    moments = [torch.zeros(4, 6, device=DEVICE), torch.zeros(2, device=DEVICE)]
    options: Any = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "impl": "triton"}
    steps = torch.zeros((), device=DEVICE)
    with pytest.raises(ValueError, match=r"^exp_avg of last must be like last, torch\.float32 of shape \(4, 6\)"):
        adamw_(params, params, moments, params, steps=steps, names=["first", "last"], **options)
    with pytest.raises(ValueError, match=r"^names must have one entry for each of the 2 params, got 1"):
        adamw_(params, params, params, params, steps=steps, names=["first"], **options)


@IMPLS
def test_amsgrad_that_is_turned_on_without_a_maximum(impl: Any) -> None:
    params, optimizer = stepped(adamw, impl)
    give_gradients(*params)
    optimizer.param_groups[0]["amsgrad"] = True
    assert_refused(optimizer, params, r"first cannot be updated: its state has \[.*\], but needs max_exp_avg_sq too")


@IMPLS
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Tensor.tolist, r"must be a tensor, got \["),
        (Tensor.int, r"must be of a floating dtype, got torch\.int32"),
        (lambda moment: moment[..., :1].expand(moment.shape), r"has several elements at one place"),
        (lambda moment: quantize(moment, INT8), r"must be plain numbers, got codes of int; give its dequantize\(\)"),
        (lambda moment: moment.to("meta"), r"has 6 elements on meta, but its matrices .* need 6 on "),
        (lambda moment: moment[..., :1], r"has 1 elements on .*, but its matrices .* need 6 on "),
    ],
    ids=["list", "integers", "expanded", "codes", "meta", "size"],
)
def test_a_second_moment_of_muon_that_does_not_fit(impl: Any, change: Callable[[Tensor], Any], words: str) -> None:
    params, optimizer = stepped(normuon, impl)
    give_gradients(*params)
    state = optimizer.state[params[1]]
    state["second_momentum_buffer"] = change(state["second_momentum_buffer"])
    assert_refused(optimizer, params, rf"(its|the) second_momentum_buffer.* {words}")


def test_the_kernels_name_the_parameter_whose_state_they_do_not_take() -> None:
    """By its name, not by its place among those that have gradients."""
    params, optimizer = stepped(adamw, "triton")
    give_gradients(params[1])
    params[0].grad = None
    state = optimizer.state[params[1]]
    for key in ("exp_avg", "exp_avg_sq"):
        kept, state[key] = state[key], state[key].double()
        assert_refused(optimizer, params, f"{key} of last is torch.float64; the kernels take float32")
        state[key] = kept
    params, optimizer = stepped(normuon, "triton")
    give_gradients(params[1])
    params[0].grad = None
    state = optimizer.state[params[1]]
    state["second_momentum_buffer"] = state["second_momentum_buffer"].double()
    assert_refused(optimizer, params, "second_moment of last must be contiguous fp32 of 6 elements")


@pytest.mark.parametrize("masters", ["fp32", "split16"])
def test_a_momentum_wider_than_its_master(masters: Any) -> None:
    param = nn.Parameter(torch.randn(4, 6).bfloat16())
    optimizer = TritonMuon([param], master_weights=masters, impl="torch")
    give_gradients(param)
    optimizer.step()
    other = copy.deepcopy((param, optimizer))
    state = optimizer.state[param]
    state["momentum_buffer"] = state["momentum_buffer"].double()
    for p, each in ((param, optimizer), other):
        give_gradients(p)
        each.step()
    torch.testing.assert_close(param, other[0])


@IMPLS
def test_a_master_that_was_cast(impl: Any) -> None:
    """The reference took what was left of it."""
    param = nn.Parameter(torch.randn(4, 6, device=DEVICE).bfloat16())
    optimizer = TritonAdamW([("weight", param)], state_dtype=torch.float32, master_weights="fp32", impl=impl)
    give_gradients(param)
    optimizer.step()
    state = optimizer.state[param]
    state.update({key: value.bfloat16() for key, value in state.items()})
    assert_refused(
        optimizer,
        [param],
        r"weight cannot be updated: its master must be torch\.float32, got torch\.bfloat16; delete it",
    )
    del state["master"]
    optimizer.step()
    assert state["master"].dtype == torch.float32


@IMPLS
@pytest.mark.parametrize("masters", ["fp32", "split16"])
def test_a_master_that_is_gone_is_made_anew(impl: Any, masters: Any) -> None:
    """Plain torch went on without."""
    param = nn.Parameter(torch.randn(4, 6, device=DEVICE).bfloat16())
    optimizer = TritonAdamW([param], state_dtype=torch.float32, master_weights=masters, impl=impl)
    for _ in range(2):
        give_gradients(param)
        optimizer.step()
    state = optimizer.state[param]
    key = "master" if masters == "fp32" else "master_low"
    del state[key]
    optimizer.step()
    assert state[key].count_nonzero() > 0


@IMPLS
def test_a_master_that_was_exchanged_follows_its_parameter(impl: Any) -> None:
    """Plain torch brought the old one up to date."""
    param = nn.Parameter(torch.randn(4, 6, device=DEVICE).bfloat16())
    optimizer = TritonAdamW([param], lr=1e-3, state_dtype=torch.float32, master_weights="fp32", impl=impl)
    for _ in range(2):
        give_gradients(param)
        optimizer.step()
    state = optimizer.state[param]
    state["master"] = state["master"].clone()
    with torch.no_grad():
        param.fill_(3.0)
    optimizer.step()
    torch.testing.assert_close(state["master"], torch.full_like(state["master"], 3.0), rtol=0, atol=5e-3)


@pytest.mark.parametrize("entries", [{"note": 1}, {"exp_avg": torch.zeros(3)}], ids=["foreign", "one moment"])
def test_a_state_that_no_step_takes_is_explained(entries: State) -> None:
    """A table is what one looks at when something is wrong."""
    param = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    optimizer = TritonAdamW([("weight", param)], impl="torch")
    optimizer.state[param].update(entries)
    assert "weight" in optimizer.explain()
    optimizer.param_groups[0]["betas"] = (0.9, 1.0)
    assert "stays zero where |g| < inf" in optimizer.explain()
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"weight cannot be updated: its state has .* but needs step and .* too"):
        optimizer.step()
