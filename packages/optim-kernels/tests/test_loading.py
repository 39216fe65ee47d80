"""What is loaded is looked at first, and hooks of the user's come first on the way in and last on the way out."""

from __future__ import annotations

import copy
import sys
import threading
from itertools import count
from typing import Any

import pytest
import torch
from interrupts import is_interrupted
from random_tensors import give_gradients, random_parameters
from torch import Tensor

from optim_kernels import TritonAdamW, TritonMuon, TritonMuonAdamW
from optim_kernels._optimizers.base import StatefulOptimizer
from optim_utils.param_groups import MatrixView


def steps(optimizer: torch.optim.Optimizer, p: Tensor, count: int) -> None:
    for seed in range(count):
        give_gradients(p, seed=seed)
        optimizer.step()


def test_hooks_of_the_users_have_the_last_word_on_a_state_dict() -> None:
    params = random_parameters((80, 70), (9,), dtype=torch.bfloat16)
    optimizer = TritonAdamW(params, impl="triton", state_dtype="int8")
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    expected, expected_of_torch = optimizer.state_dict(), optimizer.to_torch_state_dict()
    optimizer.register_state_dict_post_hook(lambda _, content: {"optimizer": content})
    optimizer.register_load_state_dict_pre_hook(lambda _, content: content["optimizer"])
    saved = optimizer.state_dict()
    assert saved.keys() == {"optimizer"}
    assert str(saved["optimizer"]) == str(expected)
    assert str(optimizer.to_torch_state_dict()["optimizer"]) == str(expected_of_torch)
    optimizer.load_state_dict(saved)


KINDS: dict[str, Any] = {
    "TritonAdamW": lambda p: TritonAdamW([p]),
    "TritonMuon": lambda p: TritonMuon([p]),
    "adamw": lambda p: TritonMuonAdamW([{"kind": "adamw", "params": [p]}]),
    "muon": lambda p: TritonMuonAdamW([{"kind": "muon", "params": [p]}]),
}


@pytest.mark.parametrize("is_read_there", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_loaded_in_inference_mode_is_stepped_outside(kind: str, is_read_there: bool) -> None:
    """Also tensors that were made there, as `torch.load` does."""
    (p,), (q,) = (random_parameters((8, 6)) for _ in range(2))
    optimizer, other = KINDS[kind](p), KINDS[kind](q)
    steps(optimizer, p, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    with torch.no_grad():
        q.copy_(p)
    with torch.inference_mode():
        other.load_state_dict(copy.deepcopy(saved) if is_read_there else saved)
    for each, param in ((optimizer, p), (other, q)):
        steps(each, param, 2)
    assert torch.equal(p, q)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_states_that_a_step_in_inference_mode_makes_are_stepped_outside(kind: str, impl: str) -> None:
    (p,), (q,) = (random_parameters((8, 6)) for _ in range(2))
    optimizer, other = KINDS[kind](p), KINDS[kind](q)
    for group in (*optimizer.param_groups, *other.param_groups):
        group["impl"] = impl
    for mode in (torch.inference_mode, torch.no_grad):
        for each, param, around in ((optimizer, p, torch.no_grad), (other, q, mode)):
            give_gradients(param, seed=0)
            with around():
                each.step(clip_factor=torch.tensor(0.5))
    assert not any(value.is_inference() for value in other.state[q].values())
    assert torch.equal(p, q)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_lacks_something_is_refused_and_leaves_the_optimizer(kind: str) -> None:
    """It would begin anew in silence, or fail in the step."""
    (p,) = random_parameters((8, 6))
    optimizer = KINDS[kind](p)
    steps(optimizer, p, 2)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    needed = {"momentum_buffer"} if "muon" in kind.lower() else {"step", "exp_avg", "exp_avg_sq"}
    for key in needed:
        saved = copy.deepcopy(optimizer.state_dict())
        del saved["state"][0][key]
        saved["state"][0] |= {"foreign": 1.0, 7: "no text"}
        with pytest.raises(ValueError, match=rf"the loaded state of param_groups\[0\].* needs {key} "):
            optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0, atol=0)
    # a state that is not there begins anew
    optimizer.load_state_dict({**saved, "state": {}})
    steps(optimizer, p, 1)


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (lambda p: TritonMuon([p], ns_dtype=torch.float32), {}),
        (lambda p: TritonMuonAdamW([{"kind": "muon", "params": [p]}]), {}),
        (lambda p: TritonMuonAdamW([{"kind": "muon", "params": [p]}]), {"layout": "nanochat"}),
    ],
    ids=["TritonMuon", "TritonMuonAdamW", "nanochat"],
)
def test_hooks_of_the_users_have_the_last_word_on_a_state_dict_of_muon(build: Any, options: dict[str, str]) -> None:
    (p,) = random_parameters((8, 6))
    p.grad = torch.ones_like(p)
    optimizer = build(p)
    optimizer.step()
    expected = copy.deepcopy(optimizer.state_dict(**options))
    separate = copy.deepcopy(optimizer.state_dict())
    optimizer.register_state_dict_post_hook(lambda _, content: {"optimizer": content})
    optimizer.register_load_state_dict_pre_hook(lambda _, content: content["optimizer"])
    saved = copy.deepcopy(optimizer.state_dict(**options))
    assert saved.keys() == {"optimizer"}
    assert str(saved["optimizer"]) == str(expected)
    optimizer.step()
    optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()["optimizer"]) == str(separate)


def test_a_hook_may_load_groups_that_muon_has_written() -> None:
    """As torch's documentation does it to load by name: what comes is put into a state dict of the optimizer's own."""
    view = MatrixView(shape=(8, 6), split=(4, 4))
    names = {"params": [("weight", p) for p in random_parameters((8, 6))], "views": [view]}
    optimizer = TritonMuon([names], lr=0.5, ns_dtype=torch.float32)

    def by_name(optimizer: Any, content: dict[str, Any]) -> dict[str, Any]:
        adapted: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
        adapted["param_groups"][0]["lr"] = content["lr"]
        return adapted

    optimizer.register_load_state_dict_pre_hook(by_name)
    optimizer.load_state_dict({"lr": 0.25})
    (group,) = optimizer.param_groups
    assert (group["lr"], group["ns_dtype"], group["views"]) == (0.25, torch.float32, [view])


@pytest.mark.parametrize("kind", KINDS)
def test_other_groups_are_refused_in_torchs_words(kind: str) -> None:
    p, q = random_parameters((8, 6), (8, 6))
    optimizer = KINDS[kind](p)
    other = torch.optim.AdamW([{"params": [p]}, {"params": [q]}])
    steps(other, p, 1)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(other.state_dict())
    other = torch.optim.AdamW([p, q])
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_threads_may_save_at_once(kind: str) -> None:
    """As with torch's; here a state dict is made by hooks, of which each call needs its own."""
    (p,) = random_parameters((8, 6))
    optimizer = KINDS[kind](p)
    steps(optimizer, p, 1)
    (expected,), found = optimizer.state_dict()["state"].values(), []

    def save() -> None:
        for _ in range(50):
            found.append(optimizer.state_dict())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=save) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == 100
    for saved in found:
        torch.testing.assert_close(saved["state"][0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_that_saves_waits_for_another(kind: str) -> None:
    """Which goes through hooks meanwhile, of the user's, too."""
    (p,) = random_parameters((8, 6))
    optimizer = KINDS[kind](p)
    steps(optimizer, p, 1)
    threads, found = [], []

    def save_in_a_thread(*_: Any) -> None:
        if not threads:
            threads.append(threading.Thread(target=lambda: found.append(optimizer.state_dict())))
            threads[0].start()
            threads[0].join(0.1)

    for hook in (save_in_a_thread, lambda *_: None):
        optimizer.register_state_dict_post_hook(hook)
    saved = optimizer.state_dict()
    threads[0].join()
    torch.testing.assert_close(found[0]["state"], saved["state"], rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_named_once_for_all_groups(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a state is loaded or copied; of two thousand groups it took seconds to name all parameters for each."""
    calls, found, parameter_names = [], [], StatefulOptimizer._parameter_names

    def count(self: Any) -> Any:
        calls.append(self)
        return parameter_names(self)

    monkeypatch.setattr(StatefulOptimizer, "_parameter_names", count)
    for num_groups in (1, 8):
        first, *others = random_parameters(*[(8, 6)] * num_groups)
        optimizer = KINDS[kind](first)
        own = {key: value for key, value in optimizer.param_groups[0].items() if key == "kind"}
        for p in others:
            optimizer.add_param_group({"params": [p], **own})
        calls.clear()
        optimizer.load_state_dict(copy.deepcopy(optimizer).state_dict())
        found.append(len(calls))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_user_has_put_into_a_group_stays_that_object(kind: str) -> None:
    """Where a state lacks it; torch copies what it loads, which not everything allows."""
    (p,) = random_parameters((8, 6))
    optimizer = KINDS[kind](p)
    steps(optimizer, p, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    (group,) = optimizer.param_groups
    lock = group["lock"] = threading.Lock()
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0] is not group
    assert optimizer.param_groups[0]["lock"] is lock
    steps(optimizer, p, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_schedule_ends_with_is_saved_loaded_and_copied(kind: str) -> None:
    """`LinearLR` misses 0 by a rounding error; Muon refused its own checkpoint then, and could not be copied."""
    (p,) = random_parameters((8, 6))
    optimizer = KINDS[kind](p)
    steps(optimizer, p, 1)
    # where LinearLR(optimizer, start_factor=0.3, end_factor=0.0, total_iters=3) ends from 0.02
    lr = -4.440892098500625e-19
    optimizer.param_groups[0].update(lr=lr, weight_decay=lr)
    steps(optimizer, p, 1)
    optimizer.load_state_dict(copy.deepcopy(optimizer).state_dict())
    assert optimizer.param_groups[0]["lr"] == lr
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = float("nan")
    with pytest.raises(ValueError, match=r"(?i)learning rate.*nan"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == lr


class Codes(Tensor):
    """Stands for a tensor of another library that holds numbers by codes."""

    def dequantize(self) -> Tensor:
        return self.as_subclass(Tensor)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda value: None, "must be a tensor, got a NoneType"),
        (Tensor.tolist, "must be a tensor, got a list"),
        (lambda value: value.numpy(), "must be a tensor, got a ndarray"),
        (
            lambda value: value + 0j,
            r"must be dense numbers like the parameter's, got torch\.complex64 in torch\.strided",
        ),
        (Tensor.to_sparse, r"must be dense numbers like the parameter's, got torch\.float32 in .*coo"),
        (lambda value: value.to("meta"), "has no values: it is on meta; load the checkpoint on another device"),
        (lambda value: value.as_subclass(Codes), r"must be plain numbers, got a Codes; load its dequantize\(\)"),
        (Tensor.int, "must be dense numbers like the parameter's, got torch.int32 in torch.strided"),
        (lambda value: {"a": 1}, r"(must be a tensor, got a dict|cannot be read: .* found \['a'\], without)"),
    ],
    ids=["none", "list", "array", "complex", "sparse", "meta", "codes", "whole numbers", "dict"],
)
def test_what_is_no_moment_is_refused_by_name(kind: str, change: Any, words: str) -> None:
    """As in a state that was damaged, or taken from elsewhere by hand."""
    p = torch.nn.Parameter(torch.randn(8, 6))
    optimizer = KINDS[kind](p)
    steps(optimizer, p, 2)
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    key = "momentum_buffer" if "momentum_buffer" in saved["state"][0] else "exp_avg_sq"
    saved["state"][0][key] = change(saved["state"][0][key])
    with pytest.raises(ValueError, match=rf"the loaded {key} of param_groups\[0\]\['params'\]\[0\] {words}"):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == str(before)


@pytest.mark.parametrize("make", [TritonAdamW, TritonMuon])
@pytest.mark.parametrize("key", ["master", "master_low"])
def test_masters_in_complex_numbers_are_refused_by_name(make: Any, key: str) -> None:
    """Their imaginary part would be left out."""
    (p,) = random_parameters((8, 6), dtype=torch.bfloat16)
    optimizer = make([p], master_weights="fp32" if key == "master" else "split16")
    steps(optimizer, p, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0][key] = saved["state"][0][key].to(torch.complex64)
    with pytest.raises(ValueError, match=rf"the loaded {key} of .* must be dense numbers .*, got torch\.complex64"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", ["text", torch.ones(2), None], ids=str)
def test_what_is_no_state_is_refused_by_name(kind: str, state: Any) -> None:
    (p,) = random_parameters((8, 6))
    optimizer = KINDS[kind](p)
    steps(optimizer, p, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    before, saved["state"][0] = str(saved), state
    with pytest.raises(ValueError, match=r"the loaded state of param_groups\[0\]\['params'\]\[0\] must be a dict"):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == before


@pytest.mark.parametrize("kind", ["TritonAdamW", "adamw"])
@pytest.mark.parametrize(
    "step", [None, "3", torch.ones(2), -1, torch.tensor(float("nan")), torch.ones((), device="meta")], ids=str
)
def test_what_counts_no_steps_is_refused_by_name(kind: str, step: Any) -> None:
    (p,) = random_parameters((8, 6))
    optimizer = KINDS[kind](p)
    steps(optimizer, p, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = step
    with pytest.raises(ValueError, match=r"the loaded step of param_groups\[0\]\['params'\]\[0\] must be a"):
        optimizer.load_state_dict(saved)
    assert float(optimizer.state[p]["step"]) == 2


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"lr": "1"}, "lr must be a number or a 1-element tensor, got '1'"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
        ({"betas": (0.9, 2.0)}, r"Invalid beta parameter at index 1: 2\.0"),
        ({"betas": [0.9]}, r"betas must be a pair, got \[0\.9\]"),
        ({"eps": -1.0}, r"Invalid epsilon value: -1\.0"),
        ({"maximize": "no"}, "maximize must be True or False, got 'no'"),
        ({"capturable": "no"}, "capturable must be True or False, got 'no'"),
        ({"seed": 1.5}, r"seed must be an int, got 1\.5"),
        ({"max_norm": -1.0}, r"max_norm must be positive or None, got -1\.0"),
        ({"norm_type": float("nan")}, "norm_type must be the order of a norm, got nan"),
        ({"max_norm": 2.0}, r"max_norm is 2\.0 in the first group, but None in another"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_adamw_loads_no_options_that_a_step_would_refuse(option: dict[str, Any], words: str) -> None:
    """Or would find when other parameters have moved, as a beta above 1; Muon refused its own already."""
    p, q = random_parameters((8, 6), (5,))
    optimizer = TritonAdamW([{"params": [p]}, {"params": [q]}])
    steps(optimizer, p, 1)
    saved = optimizer.state_dict()
    before = str(saved)
    saved["param_groups"][0].update(option)
    with pytest.raises((TypeError, ValueError), match=words):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == before


@pytest.mark.parametrize("kind", [TritonAdamW, TritonMuon])
def test_a_load_that_is_interrupted_leaves_the_optimizer(kind: Any) -> None:
    """torch casts states to the parameter's dtype, before ours are put back."""
    wide = {"momentum_dtype": torch.float32} if kind is TritonMuon else {"state_dtype": torch.float32}
    p = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer, other = kind([p], **wide), kind([p], **wide)
    for each, grad in ((optimizer, 0.1), (other, 0.3)):
        p.grad = torch.full_like(p, grad)
        each.step()
    before, loaded = (copy.deepcopy(each.state_dict()["state"][0]) for each in (optimizer, other))
    within = [f"{name}._put_back" for name in ("StatefulOptimizer", "PrivateState")]
    for at in count(1):
        interrupted = is_interrupted(lambda: optimizer.load_state_dict(other.state_dict()), at, within)
        expected = before if interrupted else loaded
        for key, value in optimizer.state_dict()["state"][0].items():
            assert value.dtype == expected[key].dtype, (at, key)
            assert torch.equal(value, expected[key]), (at, key)
        if not interrupted:
            break
    assert at > 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda saved: {"optimizer": saved, "model": {}}, r"got one of \['optimizer', 'model'\]; give that part"),
        (lambda saved: [saved], "a dict of state and param_groups, got a list; give that part of the checkpoint"),
        (lambda saved: {"state": saved["state"]}, r"a dict of state and param_groups, got one of \['state'\]"),
        (lambda saved: {**saved, "state": [1]}, r"the loaded state must be a dict of parameters' states, got \[1\]"),
        (lambda saved: {**saved, "param_groups": 1}, "the loaded param_groups must be a list of dicts, got 1"),
        (lambda saved: {**saved, "param_groups": [0.5]}, r"param_groups\[0\] must be a dict with a list .*, got 0\.5"),
        (lambda saved: {**saved, "param_groups": [{}]}, r"param_groups\[0\] must be a dict with a list .* None\}"),
    ],
    ids=["a whole checkpoint", "a list", "no groups", "state", "groups", "a number", "no params"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_state_dict_is_refused_in_words(kind: str, change: Any, words: str) -> None:
    (p,) = random_parameters((8, 6))
    optimizer = KINDS[kind](p)
    steps(optimizer, p, 1)
    before = str(optimizer.state_dict())
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(change(optimizer.state_dict()))
    assert str(optimizer.state_dict()) == before


@pytest.mark.parametrize(
    ("views", "words"), [(3, "must be a list, got 3"), ([3], "cannot be read: not the plain form of a MatrixView: 3")]
)
def test_views_that_cannot_be_read_are_refused_by_place(views: Any, words: str) -> None:
    optimizer = TritonMuon(random_parameters((8, 6)))
    saved = optimizer.state_dict()
    saved["param_groups"][0]["views"] = views
    with pytest.raises(ValueError, match=rf"the loaded views of param_groups\[0\] {words}"):
        optimizer.load_state_dict(saved)
