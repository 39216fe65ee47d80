"""What a step keeps for the next one is forgotten when it must be: results are those of a step that keeps nothing.

Kernels are interpreted here, for plain torch keeps nothing. Each change is made to an optimizer whose steps repeat each
other by then, and to a twin that is made to forget everything before every step.
"""

import copy
import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from dist_cases import device_of, normal
from torch import nn

from optim_dist import TritonDistAdamW, TritonDistMuon
from optim_kernels.functional import AdamWPlan
from optim_utils.low_bit import LowBitTensor
from optim_utils.testing import run_ranks

# Alike, so that some rank has two whose states may be exchanged; beside them there is one that is cut for AdamW.
# Sides are multiples of 16, which Triton 3.5 wants of what it interprets.
SHAPES = ((16, 16),) * 4
NUM_BEFORE, NUM_AFTER = 3, 2

CHANGES = {}
OPTIONS = {"adamw": {}, "muon": {}}  # by kind those of the optimizer that a change is made to
PARTS = {}  # what of a step a change is of


def change(*kinds, of, **options):
    """A change, for optimizers of these kinds and options."""

    def register(function):
        CHANGES[function.__name__], PARTS[function.__name__] = function, of
        for kind in kinds:
            OPTIONS[kind][function.__name__] = options
        return function

    return register


MOMENT = {"adamw": "exp_avg", "muon": "momentum_buffer"}


def moment_of(optimizer, parameter):
    """The first moment, if this rank has it."""
    state = optimizer.state[parameter]
    return next((state[key] for key in MOMENT.values() if key in state), None)


@change("adamw", "muon", of="groups")
def learning_rates(optimizer, params):
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.param_groups[1] |= {"lr": 0.25, "weight_decay": 0.125}


@change("adamw", of="groups")
def betas_and_eps(optimizer, params):
    optimizer.param_groups[1] |= {"betas": (0.5, 0.75), "eps": 1e-2}


@change("muon", of="groups")
def momentum(optimizer, params):
    optimizer.param_groups[1]["momentum"] = 0.5


@change("adamw", "muon", of="groups", lr=torch.tensor(0.25))
def a_tensor_lr(optimizer, params):
    for group in optimizer.param_groups:
        group["lr"].fill_(0.5)


@change("adamw", "muon", of="groups")
def maximize(optimizer, params):
    optimizer.param_groups[1]["maximize"] = True


@change("muon", of="groups")
def nesterov(optimizer, params):
    optimizer.param_groups[1]["nesterov"] = False


@change("muon", of="groups")
def second_moments(optimizer, params):
    optimizer.param_groups[1]["beta2"] = 0.5


@change("adamw", of="groups")
def amsgrad(optimizer, params):
    optimizer.param_groups[1]["amsgrad"] = True


@change("adamw", of="groups", dtype=torch.bfloat16, stochastic_rounding=True)
def the_seed(optimizer, params):
    for group in optimizer.param_groups:
        group["seed"] = 5


@change("adamw", of="groups", dtype=torch.bfloat16)
def masters(optimizer, params):
    optimizer.param_groups[1]["master_weights"] = "fp32"


@change("adamw", "muon", of="groups")
def another_group_object(optimizer, params):
    optimizer.param_groups[1] = {**optimizer.param_groups[1], "lr": 0.5}


@change("adamw", "muon", of="groups")
def multipliers(optimizer, params):
    params[0].lr_mul, params[3].wd_mul = 0.5, 2.0


@change("adamw", "muon", of="groups", multiplied=True)
def no_multipliers(optimizer, params):
    del params[0].lr_mul
    params[1].lr_mul = 0.25


@change("adamw", "muon", of="states")
def another_moment(optimizer, params):
    for p in params:
        for key in {*MOMENT.values()} & {*optimizer.state[p]}:
            optimizer.state[p][key] = torch.full_like(optimizer.state[p][key], 0.5)


@change("adamw", "muon", of="states")
def a_moment_elsewhere(optimizer, params):
    for p in params:
        if (moment := moment_of(optimizer, p)) is not None:
            moment.data = moment.clone().fill_(0.5)


@change("adamw", of="states")
def another_count(optimizer, params):
    for p in params:
        if "step" in optimizer.state[p]:
            optimizer.state[p]["step"] = torch.tensor(50.0, device=p.device)


@change("adamw", "muon", of="states")
def another_state(optimizer, params):
    for p in params:
        optimizer.state[p] = {key: torch.full_like(value, 0.5) for key, value in optimizer.state[p].items()}


@change("adamw", "muon", of="states")
def an_empty_state(optimizer, params):
    for p in params[::2]:
        optimizer.state[p].clear()


@change("adamw", "muon", of="states")
def no_state(optimizer, params):
    for p in params[::2]:
        del optimizer.state[p]


def two_here(optimizer, params):
    """Two parameters of which this rank has the whole states, which are alike, if there are such."""
    moments = {p: moment_of(optimizer, p) for p in params[:4]}
    found = [p for p, moment in moments.items() if moment is not None and moment.numel() == p.numel()]
    return found[:2] if len(found) > 1 else []


@change("adamw", "muon", of="states")
def exchanged_states(optimizer, params):
    if two := two_here(optimizer, params):
        one, other = two
        optimizer.state[one], optimizer.state[other] = optimizer.state[other], optimizer.state[one]


@change("adamw", "muon", of="states")
def exchanged_keys(optimizer, params):
    owners = {}
    if two := two_here(optimizer, params):
        owners = dict(zip(two, reversed(two)))
    exchanged = [(owners.get(p, p), state) for p, state in optimizer.state.items()]
    optimizer.state.clear()
    optimizer.state.update(exchanged)


@change("adamw", "muon", of="states")
def all_states(optimizer, params):
    optimizer.state.clear()


@change("adamw", "muon", of="states")
def a_loaded_state(optimizer, params):
    saved = copy.deepcopy(optimizer.state_dict())
    yield
    optimizer.load_state_dict(saved)


@change("adamw", "muon", of="gradients")
def none_on_one_rank(optimizer, params):
    if torch.distributed.get_rank() == 0:
        for p in params:
            p.grad = None


@change("adamw", "muon", of="gradients")
def none_on_any_rank(optimizer, params):
    params[1].grad = params[3].grad = None


@change("adamw", "muon", of="gradients")
def a_frozen_parameter(optimizer, params):
    params[1].requires_grad_(False)
    params[1].grad = None


@change("adamw", "muon", of="gradients")
def gradients_elsewhere(optimizer, params):
    for p in params:
        p.grad = p.grad * 2


@change("adamw", "muon", of="gradients", dtype=torch.bfloat16, reduced_dtype=torch.float32)
def sums_elsewhere(optimizer, params):
    # held, for the next not to be at their address
    optimizer.former_sums = [bucket.sums for bucket in optimizer._bucketed.buckets]
    for bucket in optimizer._bucketed.buckets:
        assert bucket.sums is not None
        bucket.sums = None


@change("adamw", "muon", of="plan")
def another_group(optimizer, params):
    params.append(nn.Parameter(normal((16, 16), 3, 99).to(params[0].device)))
    optimizer.zero_grad()
    optimizer.add_param_group({"params": params[-1:], "lr": 0.5})
    give_gradients(params, 50)


@change("adamw", "muon", of="plan")
def another_plan(optimizer, params):
    optimizer.zero_grad()
    params[1].requires_grad_(False)
    optimizer.rebuild_plan(list(reversed([params[0], *params[2:]])))
    # former buckets are not held
    assert optimizer._kept is None
    give_gradients(params, 50)


@change("adamw", "muon", of="plan")
def a_closed_optimizer(optimizer, params):
    optimizer.close()
    assert optimizer._kept is None
    assert not optimizer._caches
    yield


@change("adamw", "muon", of="scalars")
def a_clip_factor(optimizer, params):
    # of one step alone, as the others
    optimizer.clip_grad_norm_(0.125)


@change("adamw", "muon", of="scalars")
def a_gradient_scale(optimizer, params):
    optimizer.grad_scale = torch.full((1,), 4.0, device=params[0].device)
    optimizer.register_step_post_hook(lambda it, *_: vars(it).pop("grad_scale", None))


@change("adamw", "muon", of="scalars")
def an_overflow(optimizer, params):
    optimizer.found_inf = torch.ones(1, device=params[0].device)
    optimizer.register_step_post_hook(lambda it, *_: vars(it).pop("found_inf", None))


HALF = torch.bfloat16
FORMATS = {
    # of the last parameter, which is then large enough
    "codes": {"state_dtype": "int8", "amsgrad": True, "columns": 768},
    "split_masters": {"dtype": HALF, "master_weights": "split16", "multiplied": True, "lr": torch.tensor(0.25)},
    "fp32_masters": {"dtype": HALF, "master_weights": "fp32", "state_dtype": (None, torch.float32)},
    "random_bits": {"dtype": HALF, "stochastic_rounding": True, "seed": 7, "reduced_dtype": torch.float32},
}
for name, options in FORMATS.items():
    CHANGES[name], PARTS[name], OPTIONS["adamw"][name] = learning_rates, "formats", options


def give_gradients(params, step):
    for number, p in enumerate(params):
        if p.requires_grad:
            gradient = normal(tuple(p.shape), 5, number, step).to(p.device, p.dtype)
            if p.grad is None:
                p.grad = gradient
            else:
                p.grad.copy_(gradient)


def build(kind, rank, *, dtype=torch.float32, lr=0.125, multiplied=False, columns=96, **options):
    device, shapes = device_of(rank), (*SHAPES, (16, columns))
    params = [nn.Parameter(normal(shape, 3, number).to(device, dtype)) for number, shape in enumerate(shapes)]
    if multiplied:
        params[0].lr_mul = 2.0
    lr = lr.clone() if isinstance(lr, torch.Tensor) else lr
    impl = {"impl": "triton", "ns_steps": 1} if kind == "muon" else {}
    groups = [{"params": params[:2], "lr": lr, **impl}, {"params": params[2:], "lr": lr, **impl}]
    optimizer = {"adamw": TritonDistAdamW, "muon": TritonDistMuon}[kind](groups, reducer="exact", **options)
    return optimizer, params


def train(kind, rank, name, options, is_forgetful):
    """Parameters and states of steps with the change among them."""
    optimizer, params = build(kind, rank, **options)
    pending = None
    for step in range(NUM_BEFORE + NUM_AFTER):
        give_gradients(params, step)
        if step == NUM_BEFORE - 2 and name == "a_loaded_state":
            pending = CHANGES[name](optimizer, params)
            next(pending)
        if step == NUM_BEFORE:
            if not is_forgetful:
                assert_repeats(kind, optimizer)
            if pending is not None:
                next(pending, None)
            elif (steps := CHANGES[name](optimizer, params)) is not None:
                next(steps)
                return [], {}
        if is_forgetful:
            optimizer._kept = None
            optimizer._caches.clear()
        optimizer.step()
    optimizer.wait()
    states = {number: dict(optimizer.state[p]) for number, p in enumerate(params)}
    return [p.detach().clone() for p in params], states


def assert_repeats(kind, optimizer):
    """That there is something to forget."""
    for bucket, items in optimizer._kept._items.items():
        if items:
            cache = optimizer._caches[bucket.plan.route, bucket]
            kept = cache["repeated"]._items if kind == "adamw" else cache["latest"]
            assert kept is items


@contextmanager
def interpreted_kernels():
    """Kernels whatever the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optim_kernels.functional.adamw._plan_for", lambda _params, plan, _impl: plan or AdamWPlan())
        yield


def compare(rank, world_size, kind, part):
    with interpreted_kernels():
        for name, options in OPTIONS[kind].items():
            if PARTS[name] == part:
                found, expected = (train(kind, rank, name, options, forgets) for forgets in (False, True))
                assert_alike(found, expected, name)


def assert_alike(found, expected, name):
    (params, states), (twins, twin_states) = found, expected
    for number, (p, twin) in enumerate(zip(params, twins)):
        assert torch.equal(p, twin), f"{name}: parameter {number}"
        assert states[number].keys() == twin_states[number].keys(), f"{name}: state of {number}"
        for key, value in states[number].items():
            for part, twin_part in zip(stored(value), stored(twin_states[number][key])):
                assert torch.equal(part, twin_part), f"{name}: {key} of {number}"


def stored(value):
    return [value.codes, value.scale] if isinstance(value, LowBitTensor) else [value]


@pytest.mark.parametrize(
    ("kind", "part"), sorted({(kind, PARTS[name]) for kind, changes in OPTIONS.items() for name in changes})
)
def test_what_changes_between_steps_counts_at_once(kind, part):
    run_ranks(compare, 2, kind, part)


def let_go(rank, world_size, kind):
    optimizer, params = build(kind, rank)

    def steps(count, absent=()):
        for step in range(count):
            give_gradients(params, step)
            for number in absent:
                params[number].grad = None
            optimizer.step()
            gradients = [weakref.ref(p.grad) for p in params if p.grad is not None]
            optimizer.zero_grad()
        return gradients

    def moments():
        return [weakref.ref(moment) for p in params for moment in [moment_of(optimizer, p)] if moment is not None]

    with interpreted_kernels(), without_gc():
        gradients = steps(3)
        if world_size == 1:  # else they are views of buckets, which stay
            assert not any(gradient() is not None for gradient in gradients)
        former = moments()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert not any(moment() is not None for moment in former), "loaded"
        steps(3)
        former = moments()
        another_moment(optimizer, params)
        steps(1, absent=[0])
        assert not any(moment() is not None for moment in former), "exchanged"
    optimizer.close()


@contextmanager
def without_gc():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", OPTIONS)
def test_former_gradients_and_states_are_let_go(kind, world_size):
    run_ranks(let_go, world_size, kind)
