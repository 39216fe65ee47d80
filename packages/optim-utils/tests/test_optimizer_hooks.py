"""Optimizers whose state holds objects, through every way in which a checkpoint is saved and loaded."""

import copy
import gc
import io
import itertools
import tempfile
import weakref
from collections import deque

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from optim_utils import OptimizerModule, StateLoadError, attach_state_dict_hooks, extract_state_dict_content
from optim_utils.low_bit import INT8, MOMENT8, LowBitTensor, from_plain, quantize, to_plain
from optim_utils.testing import run_ranks

# without a process group, torch.distributed.checkpoint says that it saves in one process: that is what is meant
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Preconditioner(OptimizerModule):
    """Nested, lists, int keys, scalars, another dtype than the parameter's, and things that hold nothing."""

    def __init__(self, param: torch.Tensor) -> None:
        self.shape = tuple(param.shape)
        self.factors = [torch.zeros(size) for size in param.shape]
        self.by_number = {0: torch.zeros(2), 7: [1, 2.5]}
        self.codes = torch.zeros(3, dtype=torch.uint8)
        self.step_count = 0
        self.nothing = None
        self.empty: list[int] = []

    def update(self) -> None:
        self.step_count += 1
        self.factors[0].add_(1 / 3)  # not representable in bf16
        self.by_number[0] -= 1
        self.by_number[7][0] += 1
        self.codes += 5


class Sgd(torch.optim.Optimizer):
    """SGD with every kind of state; it makes a parameter's state at its first gradient."""

    def __init__(self, params: object, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for param in itertools.chain.from_iterable(group["params"] for group in self.param_groups):
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["scale"] = torch.tensor(0.0)
                state["average"] = torch.zeros_like(param, dtype=torch.float32)
                state["low"] = quantize(torch.zeros(param.shape), MOMENT8)
                state["preconditioner"] = Preconditioner(param)
                state["blocks"] = [Preconditioner(param), Preconditioner(param)]
                state["by_side"] = {"left": Preconditioner(param), "count": 0}
            state["step"] += 1
            state["scale"] += 1 / 3
            state["average"] += param.grad.float() / 3
            state["low"].copy_(quantize(state["average"] ** 2, MOMENT8))
            state["preconditioner"].update()
            state["blocks"][1].update()
            state["by_side"]["left"].update()
            state["by_side"]["count"] += 1
            for group in self.param_groups:
                param.sub_(param.grad * group["lr"] + 0.01)  # moves even at learning rate 0


def trained(steps: int) -> tuple[nn.Module, Sgd]:
    """A bf16 model whose second layer never gets a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).bfloat16()
    optimizer = Sgd(model.parameters())
    attach_state_dict_hooks(optimizer)
    for step in range(steps):
        torch.manual_seed(step)
        model[0](torch.randn(2, 4).bfloat16()).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(optimizer: Sgd) -> list[dict[str, object]]:
    return [dict(optimizer.state.get(param, {})) for group in optimizer.param_groups for param in group["params"]]


def assert_same(a: object, b: object) -> None:
    assert type(a) is type(b), (a, b)
    if isinstance(a, LowBitTensor):
        assert_same((a.codes, a.scale), (b.codes, b.scale))
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), (a, b)
    elif isinstance(a, OptimizerModule):
        assert_same(a.__dict__, b.__dict__)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        assert_same(list(a.values()), list(b.values()))
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    else:
        assert a == b


def through_a_file(state: object) -> object:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


STEPS = pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])


def flattens_nested_states() -> bool:
    """Whether this torch makes flat states of nested ones (2.9 does not)."""
    parameter = nn.Parameter(torch.zeros(1))
    module = nn.ParameterList([parameter])
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter]["nested"] = {"tensor": torch.zeros(1)}
    try:
        get_optimizer_state_dict(module, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    except NotImplementedError:
        return False
    return True


FLAT = pytest.mark.parametrize(
    "flat",
    [
        pytest.param(False, id="nested"),
        pytest.param(
            True,
            id="flat",
            marks=pytest.mark.skipif(not flattens_nested_states(), reason="this torch flattens no nested states"),
        ),
    ],
)


def test_without_hooks_torch_breaks_it():
    # the reason for the hooks; if torch mends this one day, they can become simpler
    param = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([param])
    state = {"codes": torch.zeros(2, dtype=torch.uint8), "name": "adam"}
    optimizer.load_state_dict({"state": {0: {"q": state}}, "param_groups": optimizer.state_dict()["param_groups"]})
    loaded = optimizer.state[param]["q"]
    assert loaded["codes"].dtype == torch.bfloat16
    assert loaded["name"] != "adam"


@pytest.mark.skipif(not flattens_nested_states(), reason="this torch flattens no nested states")
def test_what_a_flat_state_lacks_is_not_taken_for_something_empty():
    """torch puts an empty dict in the place of each entry that the live state has and the saved one has not."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = trained(2)
    live_model, live = trained(1)
    for state in [*optimizer.state.values(), *live.state.values()]:
        state["table"] = {}
    for state in optimizer.state.values():
        del state["average"]
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(live_model, live, saved, options=options)
    assert_same(state_of(live), state_of(optimizer))


@STEPS
def test_torch_save_and_weights_only_load(steps):
    model, optimizer = trained(3)
    saved = through_a_file(optimizer.state_dict())
    fresh_model, fresh = trained(steps)
    weights = copy.deepcopy(fresh_model.state_dict())
    objects = [state.get("preconditioner") for state in state_of(fresh)]
    fresh.load_state_dict(saved)
    assert_same(state_of(fresh), state_of(optimizer))
    assert_same(fresh_model.state_dict(), weights)
    assert all(param.grad is None for param in fresh_model.parameters())
    if steps:
        assert [state.get("preconditioner") for state in state_of(fresh)] == objects
    # both go on alike
    fresh_model.load_state_dict(model.state_dict())
    for module, its in ((model, optimizer), (fresh_model, fresh)):
        module(torch.ones(2, 4).bfloat16()).float().sum().backward()
        its.step()
    assert_same(state_of(fresh), state_of(optimizer))
    assert_same(fresh_model.state_dict(), model.state_dict())


@STEPS
@FLAT
def test_get_and_set_optimizer_state_dict(steps, flat):
    model, optimizer = trained(3)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    assert ("state.0.weight.preconditioner.factors.0" in saved) == flat
    fresh_model, fresh = trained(steps)
    set_optimizer_state_dict(fresh_model, fresh, saved, options=options)
    assert_same(state_of(fresh), state_of(optimizer))


@FLAT
def test_dicts_of_tensors_keep_their_int_keys(flat, tmp_path):
    def with_dict(number):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attach_state_dict_hooks(optimizer)
        for param in model.parameters():
            optimizer.state[param]["by_block"] = {0: torch.full((1,), number), "in": {7: number, 8: torch.ones(1)}}
        return model, optimizer

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = with_dict(3.0)
    dcp.save(get_optimizer_state_dict(model, optimizer, options=options), checkpoint_id=tmp_path)
    fresh_model, fresh = with_dict(4.0)
    saved = get_optimizer_state_dict(fresh_model, fresh, options=options)
    dcp.load(saved, checkpoint_id=tmp_path)
    set_optimizer_state_dict(fresh_model, fresh, saved, options=options)
    assert_same(state_of(fresh), state_of(optimizer))


class GrowingDicts(OptimizerModule):
    """Dicts that get an entry for each new block, and each step, by its number."""

    def __init__(self, count: int) -> None:
        self.blocks = {k: torch.full((1,), float(k)) for k in range(-1, count)}
        self.steps = {k: k + 0.5 for k in range(count)}
        self.named = {"0": 1.0, **{f"{k}": k for k in range(1, count)}}


@FLAT
def test_dicts_that_have_grown_keep_their_int_keys(flat):
    def with_object(count):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attach_state_dict_hooks(optimizer)
        for param in model.parameters():
            optimizer.state[param]["object"] = GrowingDicts(count)
            optimizer.state[param]["plain"] = vars(GrowingDicts(count))
        return model, optimizer

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = with_object(12)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    fresh_model, fresh = with_object(1)
    set_optimizer_state_dict(fresh_model, fresh, saved, options=options)
    assert_same(state_of(fresh), state_of(optimizer))


class WithNone(OptimizerModule):
    """None, which a flat state cannot hold, at every kind of place."""

    def __init__(self, rate: float) -> None:
        self.betas = (rate, None)
        self.limits = {"low": None, "high": rate, 3: [None, rate]}
        self.history = deque([None, rate, None], maxlen=3)
        self.nested = [torch.full((1,), rate), (None,), {"inner": [None, rate, None]}]


class WithNoneAndOwnLoad(WithNone):
    def load_state_dict(self, state_dict, *args, **options):
        return super().load_state_dict(state_dict, *args, **options)


@FLAT
@pytest.mark.parametrize("kind", [WithNone, WithNoneAndOwnLoad])
def test_none_in_containers_stays(kind, flat):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach_state_dict_hooks(optimizer)
    for param in model.parameters():
        optimizer.state[param]["object"] = kind(0.5)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    for param in model.parameters():
        optimizer.state[param]["object"] = kind(0.25)
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    for param in model.parameters():
        assert vars(optimizer.state[param]["object"]) == vars(WithNone(0.5))


def test_a_deep_copy_of_the_state_loads_too():
    _, optimizer = trained(2)
    _, fresh = trained(0)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(state_of(fresh), state_of(optimizer))


def test_a_copy_without_hooks_loads_back():
    """As one that is kept of the best step: its state holds the objects themselves."""
    _, optimizer = trained(2)
    kept, expected = copy.deepcopy(optimizer), copy.deepcopy(state_of(optimizer))
    objects = state_of(optimizer)[0]
    for param in optimizer.param_groups[0]["params"][:2]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.load_state_dict(kept.state_dict())
    assert_same(state_of(optimizer), expected)
    assert state_of(optimizer)[0]["preconditioner"] is objects["preconditioner"]
    assert state_of(optimizer)[0]["low"] is objects["low"]


def test_the_caller_keeps_its_state_dict():
    _, optimizer = trained(2)
    saved = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(saved)
    _, fresh = trained(0)
    fresh.load_state_dict(saved)
    assert_same(saved, before)


def test_a_broken_checkpoint_changes_nothing():
    _, optimizer = trained(2)
    _, other = trained(3)
    before = copy.deepcopy(state_of(optimizer))
    broken = copy.deepcopy(other.state_dict())
    broken["state"][1]["blocks"][1]["factors"][0] = torch.zeros(99)
    with pytest.raises(StateLoadError) as error:
        optimizer.load_state_dict(broken)
    assert [issue.path for issue in error.value.report.problems] == ['[1, "blocks", 1, "factors", 0]']
    assert_same(state_of(optimizer), before)
    broken = copy.deepcopy(other.state_dict())
    del broken["state"][0]["preconditioner"]
    with pytest.raises(StateLoadError, match="missing"):
        optimizer.load_state_dict(broken)
    assert_same(state_of(optimizer), before)
    broken = copy.deepcopy(other.state_dict())
    broken["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(broken)
    assert_same(state_of(optimizer), before)
    optimizer.load_state_dict(other.state_dict())
    assert_same(state_of(optimizer), state_of(other))


class Factor(OptimizerModule):
    def __init__(self) -> None:
        self.v = torch.zeros(2)


class OwnFactor(Factor):
    def load_state_dict(self, *args, **options):
        return super().load_state_dict(*args, **options)


class FickleFactor(Factor):
    """Loads once, and then no more."""

    calls = 0

    def load_state_dict(self, *args, **options):
        type(self).calls += 1
        if type(self).calls == 2:
            raise RuntimeError("no more")
        return super().load_state_dict(*args, **options)


def with_factors(*factors: Factor) -> tuple[torch.optim.Optimizer, dict[str, object], dict[str, object]]:
    """An optimizer, a checkpoint that changes everything in it, and what it holds."""
    param = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.state[param].update({str(i): factor for i, factor in enumerate(factors)})
    attach_state_dict_hooks(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    for factor in saved["state"][0].values():
        factor["v"] += 1
    saved["param_groups"][0]["lr"] = 0.7
    return optimizer, saved, dict(optimizer.state[param])


def assert_not_replaced(optimizer: torch.optim.Optimizer, objects: dict[str, object]) -> None:
    (state,) = optimizer.state.values()
    assert state.keys() == objects.keys()
    assert all(state[name] is factor for name, factor in objects.items())
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_an_object_that_loads_itself_is_checked_with_the_others():
    optimizer, saved, objects = with_factors(Factor(), OwnFactor())
    saved["state"][0]["1"]["v"] = torch.zeros(5)
    with pytest.raises(StateLoadError) as error:
        optimizer.load_state_dict(saved)
    assert [issue.path for issue in error.value.report.problems] == ['[0, "1", "v"]']
    assert_not_replaced(optimizer, objects)
    assert torch.equal(objects["0"].v, torch.zeros(2))
    saved["state"][0]["1"]["v"] = torch.ones(2)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.7
    assert torch.equal(objects["1"].v, torch.ones(2))


def test_a_load_that_fails_while_it_writes_leaves_the_live_objects():
    FickleFactor.calls = 0
    optimizer, saved, objects = with_factors(Factor(), FickleFactor())
    with pytest.raises(RuntimeError, match="no more") as error:
        optimizer.load_state_dict(saved)
    assert "from before this load_state_dict" in error.value.__notes__[-1]
    assert_not_replaced(optimizer, objects)
    optimizer.load_state_dict(saved)
    assert torch.equal(objects["1"].v, torch.ones(2))


def test_a_load_that_fails_inside_of_torch_leaves_the_live_objects():
    # Adam's __setstate__ looks for a "step"; no hook is called after it
    param = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.Adam([param], lr=0.1)
    param.grad = torch.ones(4)
    optimizer.step()
    attach_state_dict_hooks(optimizer)
    objects = dict(optimizer.state[param])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.7
    step = saved["state"][0].pop("step")
    with pytest.raises(KeyError, match="step"):
        optimizer.load_state_dict(saved)
    assert_not_replaced(optimizer, objects)
    saved["state"][0]["step"] = step
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.7
    assert copy.deepcopy(optimizer).state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_a_refused_load_leaves_no_objects_that_it_made():
    _, optimizer = trained(2)
    _, fresh = trained(0)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["preconditioner"]["codes"] = torch.zeros(99, dtype=torch.uint8)
    with pytest.raises(StateLoadError):
        fresh.load_state_dict(saved)
    assert not any(state_of(fresh))


class CountingSgd(Sgd):
    """Counts its steps in its groups, and may fail in one after it has made some state."""

    fails = False

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        if self.fails:
            raise ArithmeticError("no step without a gradient")


def test_a_refused_load_leaves_the_groups_as_they_were():
    _, optimizer = trained(2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["preconditioner"]["codes"] = torch.zeros(99, dtype=torch.uint8)
    fresh = CountingSgd(trained(0)[0].parameters())
    attach_state_dict_hooks(fresh)
    before = copy.deepcopy(fresh.state_dict()["param_groups"])
    with pytest.raises(StateLoadError):
        fresh.load_state_dict(saved)
    assert fresh.state_dict()["param_groups"] == before


def test_a_step_that_fails_while_it_makes_objects_leaves_none():
    saved = trained(2)[1].state_dict()
    fresh = CountingSgd(trained(0)[0].parameters())
    attach_state_dict_hooks(fresh)
    fresh.fails = True
    with pytest.raises(ArithmeticError):
        fresh.load_state_dict(saved)
    assert not any(state_of(fresh))


@pytest.mark.parametrize("wrong", ["groups", "sizes"])
def test_a_load_that_torch_refuses_leaves_no_objects_that_it_made(wrong):
    saved = trained(2)[1].state_dict()
    group = saved["param_groups"][0]
    saved["param_groups"] = [group, group] if wrong == "groups" else [{**group, "params": group["params"][:1]}]
    _, fresh = trained(0)
    before = vars(fresh).keys() | set()
    with pytest.raises(ValueError, match="parameter group"):
        fresh.load_state_dict(saved)
    assert not fresh.state
    assert vars(fresh).keys() == before


def test_other_hooks_see_the_loaded_state():
    optimizer, saved, objects = with_factors(Factor())
    attached_before = torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.1)
    attached_before.state.update(optimizer.state)
    seen = []
    attached_before.register_load_state_dict_post_hook(lambda self: seen.extend(self.state.values()))
    attach_state_dict_hooks(attached_before)
    attached_before.load_state_dict(saved)
    assert seen[0]["0"] is objects["0"]


def test_a_hook_that_comes_first_sees_no_placeholders():
    optimizer, saved, objects = with_factors(Factor())
    saved["state"][0] |= {"name": "adam", "average": torch.ones(4)}
    seen = []
    optimizer.register_load_state_dict_post_hook(lambda self: seen.extend(self.state.values()), prepend=True)
    optimizer.load_state_dict(saved)
    assert seen[0]["0"] is objects["0"]
    assert seen[0]["name"] == "adam"
    assert torch.equal(seen[0]["average"], torch.ones(4))


def by_name(optimizer: torch.optim.Optimizer, saved: dict[str, object]) -> dict[str, object]:
    """As in torch's documentation of `register_load_state_dict_pre_hook`."""
    keys = {name: key for group in saved["param_groups"] for name, key in zip(group["param_names"], group["params"])}
    mine = [name for group in optimizer.param_groups for name in group["param_names"]]
    for state in saved["state"].values():
        assert isinstance(state["momentum_buffer"], torch.Tensor)
        assert isinstance(state["factor"]["v"], torch.Tensor)
    return {**saved, "state": {i: saved["state"][keys[name]] for i, name in enumerate(mine)}}


def named_momentum(order: str, *, scale: float) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """SGD over parameters a and b in the given order, where all that a's state holds is ``scale``, and b's twice."""
    params = {"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2))}
    optimizer = torch.optim.SGD([(name, params[name]) for name in order], lr=0.1, momentum=0.9)
    for name, number in (("a", scale), ("b", 2 * scale)):
        params[name].grad = torch.full((2,), number)
        factor = optimizer.state[params[name]]["factor"] = Factor()
        factor.v.fill_(number)
    optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("prepend", [False, True])
@pytest.mark.parametrize("first", ["hook", "attach"])
def test_hooks_of_the_user_may_rearrange_what_is_loaded(first, prepend):
    _, optimizer = named_momentum("ab", scale=1.0)
    attach_state_dict_hooks(optimizer)
    params, live = named_momentum("ba", scale=5.0)
    if first == "attach":
        attach_state_dict_hooks(live)
    live.register_load_state_dict_pre_hook(by_name, prepend=prepend)
    if first == "hook":
        attach_state_dict_hooks(live)
    live.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name, number in (("a", 1.0), ("b", 2.0)):
        state = live.state[params[name]]
        assert state["momentum_buffer"].tolist() == state["factor"].v.tolist() == [number, number]


def test_hooks_are_registered_as_before_once_these_are_removed():
    optimizer, saved, _ = with_factors(Factor())
    (hook,) = optimizer._optimizer_load_state_dict_post_hooks.values()
    seen = []
    handle = optimizer.register_load_state_dict_pre_hook(lambda _, content: seen.append(content))
    optimizer.load_state_dict(saved)
    handle.remove()
    hook.__self__.remove()
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert "register_load_state_dict_pre_hook" not in vars(optimizer)
    optimizer.register_load_state_dict_pre_hook(lambda _, content: seen.append(content)).remove()
    assert len(seen) == 1


def test_hooks_keep_no_optimizer_in_memory():
    optimizer, saved, _ = with_factors(Factor())
    optimizer.load_state_dict(saved)
    alive = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert alive() is None
    finally:
        gc.enable()


class Converting(torch.optim.SGD):
    """Keeps codes in its state, as which it loads numbers too; what else it loads it takes as it was saved."""

    _converted_state_keys = ("codes",)

    def __setstate__(self, state):
        super().__setstate__(state)
        held = [value for state in self.state.values() for value in state.values()]
        assert all(isinstance(value, (torch.Tensor, dict, OptimizerModule, str)) for value in held)

    def load_state_dict(self, state_dict):
        saved = {}

        def put_back(_):
            for param, state in zip(self.param_groups[0]["params"], saved["state"].values()):
                codes = quantize(state["codes"], INT8) if isinstance(state["codes"], torch.Tensor) else state["codes"]
                self.state[param] = {**state, "codes": from_plain(codes) if isinstance(codes, dict) else codes}

        with (
            self.register_load_state_dict_pre_hook(lambda _, content: saved.update(content)),
            self.register_load_state_dict_post_hook(put_back, prepend=True),
        ):
            super().load_state_dict(state_dict)


@pytest.mark.parametrize("form", ["numbers", "codes"])
def test_what_an_optimizer_converts_is_left_to_it(form):
    param = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    optimizer = Converting([param], lr=0.1)
    state = optimizer.state[param]
    state |= {"codes": quantize(torch.zeros(8), INT8), "factor": Factor(), "low": quantize(torch.zeros(8), INT8)}
    factor = state["factor"]
    attach_state_dict_hooks(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    numbers = torch.arange(8.0)
    new = quantize(numbers, INT8)
    saved["state"][0]["codes"] = numbers if form == "numbers" else to_plain(new)
    saved["state"][0]["low"] = to_plain(new)
    saved["state"][0]["factor"]["v"] += 1
    saved["state"][0]["name"] = "adam"
    optimizer.load_state_dict(saved)
    state = optimizer.state[param]
    assert_same(state, {"codes": new, "factor": factor, "low": new, "name": "adam"})
    assert factor.v.tolist() == [1.0, 1.0]


def test_strict_can_be_turned_off(caplog):
    model = nn.Linear(2, 2)
    optimizer = Sgd(model.parameters())
    attach_state_dict_hooks(optimizer, strict=False)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]["preconditioner"]["step_count"]
    saved["state"][0]["preconditioner"]["codes"].fill_(77)
    del saved["state"][1]["preconditioner"]
    of_bias = optimizer.state[model.bias]["preconditioner"]
    optimizer.load_state_dict(saved)
    assert [record.msg for record in caplog.records] == [
        'missing [0, "preconditioner", "step_count"]: expected int, found nothing',
        'missing [1, "preconditioner"]: expected Preconditioner, found nothing',
    ]
    assert optimizer.state[model.bias]["preconditioner"] is of_bias
    preconditioner = optimizer.state[model.weight]["preconditioner"]
    assert preconditioner.step_count == 1
    assert preconditioner.codes[0] == 77


def test_plain_optimizers_keep_their_dtypes_and_strings(monkeypatch):
    param = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([param], lr=0.1)
    # nothing has to be made by a step: codes say themselves what they are
    monkeypatch.setattr(optimizer, "step", None)
    attach_state_dict_hooks(optimizer)
    state = {
        "name": "adam",
        "count": 3,
        "moments": [torch.ones(2), {"codes": torch.ones(2, dtype=torch.uint8)}, (torch.ones(3), 4)],
        "scalar": torch.tensor(1 / 3),
        "low": extract_state_dict_content(WithLowBit())["low"],
    }
    saved = {"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]}
    optimizer.load_state_dict(saved)
    loaded = optimizer.state[param]
    assert (loaded["name"], loaded["count"]) == ("adam", 3)
    assert_same(loaded["moments"], state["moments"])
    assert_same(loaded["scalar"], state["scalar"])
    assert isinstance(loaded["low"], LowBitTensor)


class Grown(OptimizerModule):
    """What it has beside ``fixed`` it makes later, the more the longer it is used."""

    def __init__(self) -> None:
        self.fixed = torch.zeros(2)
        self.history: list[torch.Tensor] = []
        self.late = None


class Growing(torch.optim.Optimizer):
    """Every parameter has an object that remembers the gradients."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {})

    def step(self, closure: object = None) -> None:
        for param in self.param_groups[0]["params"]:
            grown = self.state[param].setdefault("grown", Grown())
            if param.grad.any():
                grown.history.append(param.grad.clone())
                grown.late = quantize(param.grad, INT8)


def test_an_object_that_grew_before_it_was_saved_grows_by_a_load():
    optimizers = []
    for _ in range(2):
        param = nn.Parameter(torch.zeros(3))
        optimizers.append(Growing([param]))
        attach_state_dict_hooks(optimizers[-1])
        param.grad = torch.ones(3)
    for _ in range(2):
        optimizers[0].step()
    optimizers[1].load_state_dict(through_a_file(optimizers[0].state_dict()))
    assert_same(state_of(optimizers[0])[0], state_of(optimizers[1])[0])
    # a longer one keeps its tensors and takes over the rest
    first = state_of(optimizers[1])[0]["grown"].history[0]
    optimizers[0].step()
    optimizers[1].load_state_dict(through_a_file(optimizers[0].state_dict()))
    history = state_of(optimizers[1])[0]["grown"].history
    assert len(history) == 3
    assert history[0] is first


def test_what_is_taken_over_goes_where_the_parameter_is(monkeypatch):
    with FakeTensorMode():
        param = nn.Parameter(torch.zeros(3, device="cuda"))
        optimizer = Growing([param])
        attach_state_dict_hooks(optimizer)
        grown = optimizer.state[param]["grown"] = Grown()
        grown.fixed = 0
        scalar = to_plain(quantize(torch.tensor(1.0), INT8))
        # what a torch that has no such device can do
        monkeypatch.setattr(torch.Tensor, "to", lambda x, device: torch.empty(x.shape, dtype=x.dtype, device=device))
        history = {0: torch.ones(3), 1: torch.tensor(1.0), 2: scalar}
        state = {"fixed": 0, "history": history, "late": torch.ones(2)}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"grown": state}}})
    tensors = [*grown.history, grown.late]
    assert [tensor.device.type for tensor in tensors] == ["cuda", "cpu", "cuda", "cuda"]


def test_the_parts_of_a_low_bit_scalar_go_where_the_parameter_is():
    saved, loaded = (torch.optim.SGD([nn.Parameter(torch.zeros((), device=device))]) for device in ("cpu", "meta"))
    for optimizer in (saved, loaded):
        attach_state_dict_hooks(optimizer)
    saved.state[saved.param_groups[0]["params"][0]]["moment"] = quantize(torch.tensor(2.0), INT8)
    loaded.load_state_dict(saved.state_dict())
    (moment,) = state_of(loaded)[0].values()
    assert (moment.device.type, moment.codes.device.type, moment.scale.device.type) == ("meta", "meta", "meta")


def test_what_is_taken_over_for_a_parameter_on_meta_keeps_its_memory():
    param = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = Growing([param])
    attach_state_dict_hooks(optimizer)
    grown = optimizer.state[param]["grown"] = Grown()
    state = {"fixed": torch.zeros(2), "late": torch.ones(3)}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"grown": state}}})
    assert torch.equal(grown.late, torch.ones(3))


class WithLowBit(OptimizerModule):
    def __init__(self) -> None:
        self.low = quantize(torch.randn(8), INT8)


@pytest.mark.parametrize(
    "options", [{}, {"fused": True}, {"amsgrad": True}, {"capturable": False, "foreach": True}], ids=str
)
def test_adamw_goes_on_bitwise(options):
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Linear(3, 3))
        optimizers.append(torch.optim.AdamW(models[-1].parameters(), **options))
        attach_state_dict_hooks(optimizers[-1])
    x = torch.randn(4, 3)

    def step(number: int) -> None:
        optimizers[number].zero_grad()
        models[number](x).square().sum().backward()
        optimizers[number].step()

    step(0)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    models[1].load_state_dict(models[0].state_dict())
    for number in (0, 1):
        step(number)
    assert_same(models[0].state_dict(), models[1].state_dict())


def test_objects_beside_the_states_of_parameters_are_filled():
    optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(2))]) for _ in range(2)]
    for optimizer in optimizers:
        attach_state_dict_hooks(optimizer)
        optimizer.state["of all"] = {"low": WithLowBit(), "count": 1, "sums": torch.zeros(2)}
    optimizers[0].state["of all"].update(count=2, sums=torch.ones(2))
    saved = through_a_file(optimizers[0].state_dict())
    live = optimizers[1].state["of all"]["low"]
    optimizers[1].load_state_dict(saved)
    state = optimizers[1].state["of all"]
    assert state["low"] is live
    assert_same(to_plain(live.low), to_plain(optimizers[0].state["of all"]["low"].low))
    assert (state["count"], state["sums"].tolist()) == (2, [1, 1])
    del saved["state"]["of all"]["low"]["low"]["codes"]
    with pytest.raises(StateLoadError, match=r'\["of all", "low", "low"\]'):
        optimizers[1].load_state_dict(saved)
    assert optimizers[1].state["of all"]["low"] is live
    optimizers[1].load_state_dict({**saved, "state": {"of all": 3}})
    assert optimizers[1].state["of all"] == 3


def test_only_optimizers_have_hooks():
    with pytest.raises(TypeError, match=r"attach_state_dict_hooks takes a torch\.optim\.Optimizer, got a Linear"):
        attach_state_dict_hooks(nn.Linear(2, 2))

    class Wrapper(torch.optim.Optimizer):
        """Passes for an optimizer without being made as one, as Accelerate's wrapper does."""

        def __init__(self, optimizer):
            self.optimizer = optimizer

    with pytest.raises(TypeError, match=r"this Wrapper has no place for hooks, .*: attach them to the optimizer"):
        attach_state_dict_hooks(Wrapper(Sgd([nn.Parameter(torch.zeros(2))])))


def test_hooks_are_attached_once_and_can_be_removed():
    optimizer = Sgd([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2), requires_grad=False)])
    optimizer.register_state_dict_post_hook(lambda *_: None)
    with attach_state_dict_hooks(optimizer) as hooks:
        with pytest.raises(ValueError, match="already"):
            attach_state_dict_hooks(optimizer)
        assert optimizer.state_dict()["state"] == {0: {}}
    assert optimizer.state_dict()["state"] == {}
    hooks.remove()
    attach_state_dict_hooks(optimizer).remove()


def test_dcp_fills_the_live_tensors_of_a_module():
    saved, live = (Preconditioner(torch.zeros(3, 2)) for _ in range(2))
    for _ in range(2):
        saved.update()
    factor = live.factors[1]
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"module": saved.state_dict()}, checkpoint_id=folder, no_dist=True)
        state = {"module": live.state_dict()}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(live.factors[0], saved.factors[0])
    assert live.factors[1] is factor
    assert live.load_state_dict(state["module"], strict=True).ok
    assert_same(live, saved)


@STEPS
@FLAT
def test_dcp_of_an_optimizer_on_one_process(steps, flat, tmp_path):
    model, optimizer = trained(3)
    save(model, optimizer, flat, str(tmp_path), no_dist=True)
    fresh_model, fresh = trained(steps)
    load(fresh_model, fresh, flat, str(tmp_path), no_dist=True)
    assert_same(state_of(fresh), state_of(optimizer))


def save(model: nn.Module, optimizer: Sgd, flat: bool, folder: str, **options: object) -> None:
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    dcp.save({"optimizer": state}, checkpoint_id=folder, **options)


def load(model: nn.Module, optimizer: Sgd, flat: bool, folder: str, **options: object) -> None:
    """A fresh optimizer asks for the state of every parameter; the one that has none is asked for in vain."""
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=how)}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    if not flat:
        state["optimizer"]["state"] = {k: v for k, v in state["optimizer"]["state"].items() if k.startswith("0.")}
    else:
        state["optimizer"] = {k: v for k, v in state["optimizer"].items() if not k.startswith("state.1.")}
    dcp.load(state, checkpoint_id=folder, planner=planner, **options)
    if not flat:
        state["optimizer"]["state"].update({"1.weight": {}, "1.bias": {}})
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=how)


def save_on_ranks(rank: int, world_size: int, flat: bool, folder: str) -> None:
    model, optimizer = trained(3)
    save(model, optimizer, flat, folder)


def load_on_ranks(rank: int, world_size: int, flat: bool, folder: str) -> None:
    _, optimizer = trained(3)
    fresh_model, fresh = trained(0)
    load(fresh_model, fresh, flat, folder)
    assert_same(state_of(fresh), state_of(optimizer))


@FLAT
@pytest.mark.parametrize(("savers", "loaders"), [(2, 1), (1, 2)], ids=["2 to 1", "1 to 2"])
def test_dcp_across_world_sizes(savers, loaders, flat, tmp_path):
    run_ranks(save_on_ranks, savers, flat, str(tmp_path))
    run_ranks(load_on_ranks, loaders, flat, str(tmp_path))
