"""The contract's checks about training: groups, gradients, learning rates, closures, hooks, loss scaling."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from optim_utils.testing._contract_case import OptimizerCase, TinyModel, assert_same, snapshot, train

__all__ = ["TRAINING_CHECKS"]

_STEPS = 3


def closure(case: OptimizerCase) -> None:
    """``step(closure)`` runs it once with gradients enabled, returns its loss, and updates as ``step()`` does."""
    model, optimizer = case.pair()
    calls = []

    def evaluate() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss: torch.Tensor = model(0)
        loss.backward()
        return loss

    with torch.no_grad():
        # torch's annotation says float, but `step` returns what the closure returned
        loss: object = optimizer.step(cast(Callable[[], float], evaluate))
    assert calls == [True], f"the closure ran {len(calls)} times, with gradients enabled: {calls}"
    assert isinstance(loss, torch.Tensor), f"step(closure) returned {loss!r} instead of the closure's loss"
    assert_same(loss, case.model()(0), "the loss")
    plain, plain_optimizer = case.pair()
    plain(0).backward()
    assert plain_optimizer.step() is None, "step() without a closure has to return None"
    assert_same(snapshot(model, optimizer), snapshot(plain, plain_optimizer), "the result of a step with a closure")


def none_gradients(case: OptimizerCase) -> None:
    """A parameter without a gradient stays as it is, trains when it gets one, and disturbs no other."""
    model, optimizer = case.pair()
    first, *others = [name for name, _ in model.named_parameters()]
    before = model.get_parameter(first).detach().clone()
    optimizer.step()
    assert_same(model.get_parameter(first).detach(), before, f"{first}, after a step without any gradient,")
    train(model, optimizer, range(2), used=others)
    assert_same(model.get_parameter(first).detach(), before, f"{first}, which never had a gradient,")
    whole, _ = case.trained(range(2))
    for name in others:
        assert_same(model.get_parameter(name).detach(), whole.get_parameter(name).detach(), name)
    train(model, optimizer, [2])
    assert not torch.equal(model.get_parameter(first), before), f"{first} got a gradient and did not change"


def named_parameters(case: OptimizerCase) -> None:
    """(name, parameter) pairs are taken, kept in groups and state_dict, and change nothing else."""
    model = case.model()
    optimizer = case.build(model.named_parameters())
    names = [name for name, _ in model.named_parameters()]
    saved_groups = optimizer.state_dict()["param_groups"]
    for source, groups in (("param_groups", optimizer.param_groups), ("state_dict", saved_groups)):
        found = [name for group in groups for name in group.get("param_names", [])]
        assert sorted(found) == names, f"{source} has param_names {found}, expected {names}"
    train(model, optimizer, range(2))
    plain, plain_optimizer = case.trained(range(2))
    assert_same(snapshot(model, optimizer), snapshot(plain, plain_optimizer), "training with names")


def param_groups(case: OptimizerCase) -> None:
    """Each group is updated with its own options, and options left out have the defaults."""
    model = case.model()
    frozen, *others = model.parameters()
    optimizer = case.build([case.group([frozen], lr=0.0), case.group(others)])
    assert len(optimizer.param_groups) >= 2, f"two groups became {len(optimizer.param_groups)}"
    before = frozen.detach().clone()
    train(model, optimizer, range(2))
    assert_same(frozen.detach(), before, "a parameter of a group with lr=0")
    plain, _ = case.trained(range(2))
    for param, expected in zip(others, list(plain.parameters())[1:], strict=True):
        assert_same(param.detach(), expected.detach(), "a parameter of a group without options")


def add_param_group(case: OptimizerCase) -> None:
    """A group added after some steps starts from fresh state, leaves others alone, and cannot repeat a parameter."""
    model = case.model()
    late, *early = model.parameters()
    optimizer = case.build(early)
    train(model, optimizer, range(2))
    optimizer.add_param_group(case.group([late]))
    train(model, optimizer, [2])
    fresh, _ = case.trained([2])
    assert_same(late.detach(), next(iter(fresh.parameters())).detach(), "the first update of an added parameter")
    whole, _ = case.trained(range(3))
    for param, expected in zip(early, list(whole.parameters())[1:], strict=True):
        assert_same(param.detach(), expected.detach(), "a parameter that was there before the group was added")
    try:
        optimizer.add_param_group(case.group([late]))
    except ValueError:
        pass
    else:
        raise AssertionError("a parameter that is in a group already could be added again")


def tensor_lr(case: OptimizerCase) -> None:
    """``lr`` may be a tensor: it updates as the number does, and filling it changes the next step."""
    lr = torch.tensor(0.0625, device=case.device)
    model, optimizer = case.trained(range(2), lr=lr)
    plain, _ = case.trained(range(2), lr=0.0625)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param, plain.get_parameter(name), msg=(name + ": {}").format)
    for group in optimizer.param_groups:
        assert isinstance(group["lr"], torch.Tensor), "the group's lr is no longer a tensor"
        group["lr"].fill_(0.0)
    before = [param.detach().clone() for param in model.parameters()]
    train(model, optimizer, [2])
    assert_same([param.detach() for param in model.parameters()], before, "parameters after lr.fill_(0)")


def maximize(case: OptimizerCase) -> None:
    """``maximize=True`` on gradients g is the default on -g, bit for bit."""
    up, _ = case.trained(range(_STEPS), maximize=True)
    down, down_optimizer = case.pair()
    train(down, down_optimizer, range(_STEPS), sign=-1.0)
    for name, param in up.named_parameters():
        assert_same(param.detach(), down.get_parameter(name).detach(), name)


def gradients_unchanged(case: OptimizerCase) -> None:
    """``step`` reads the gradients and leaves them as they were."""
    model, optimizer = case.pair()
    model(0).backward()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    values = {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}
    optimizer.step()
    for name, param in model.named_parameters():
        assert param.grad is gradients[name], f"step replaced the gradient of {name}"
        assert_same(param.grad, values[name], f"the gradient of {name}")


def zero_grad(case: OptimizerCase) -> None:
    """``zero_grad()`` removes gradients, ``zero_grad(set_to_none=False)`` fills them with zeros."""
    model, optimizer = case.pair()
    model(0).backward()
    optimizer.zero_grad(set_to_none=False)
    for name, param in model.named_parameters():
        assert param.grad is not None, f"zero_grad(set_to_none=False) removed the gradient of {name}"
        assert not param.grad.any(), f"zero_grad(set_to_none=False) left a gradient of {name} that is not zero"
    optimizer.zero_grad()
    for name, param in model.named_parameters():
        assert param.grad is None, f"zero_grad() left a gradient of {name}"


def step_hooks(case: OptimizerCase) -> None:
    """Pre and post hooks, of the instance and of all optimizers, run once per step; removed ones do not run."""
    model, optimizer = case.pair()
    _hook_bases(type(optimizer))
    calls: list[str] = []

    def hook(name: str) -> Callable[[Optimizer, Any, Any], None]:
        def record(caller: Optimizer, args: object, kwargs: object) -> None:
            assert caller is optimizer, f"the {name} hook got {caller!r} instead of the optimizer"
            calls.append(name)

        return record

    handles = [
        register_optimizer_step_pre_hook(hook("global pre")),
        register_optimizer_step_post_hook(hook("global post")),
        optimizer.register_step_pre_hook(hook("pre")),
        optimizer.register_step_post_hook(hook("post")),
    ]
    try:
        train(model, optimizer, [0])
    finally:
        for handle in handles:
            handle.remove()
    train(model, optimizer, [1])
    assert sorted(calls) == ["global post", "global pre", "post", "pre"], f"one step ran the hooks {calls}"
    assert calls.index("post") > calls.index("pre"), f"the hooks ran in the order {calls}"


def _hook_bases(cls: type[Optimizer]) -> None:
    """Do to every base's ``step`` what torch does when the first instance of the base is made: wrap it with hooks.

    A ``step`` that calls its base's ``step`` then runs hooks twice. Wrapping all bases here makes the check independent
    of which optimizers were made before.
    """
    base: Any
    for base in cls.__mro__[1:]:
        is_own_step = issubclass(base, Optimizer) and base is not Optimizer and "step" in vars(base)
        if is_own_step and not getattr(base.step, "hooked", False):
            base.step = Optimizer.profile_hook_step(base.step)
            base.step.hooked = True


def schedulers(case: OptimizerCase) -> None:
    """Under every torch scheduler the step obeys what the scheduler wrote into the groups, and nothing warns."""
    model, optimizer = case.pair(lr=0.125)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0))
    train(model, optimizer, [0])
    scheduler.step()
    before = [param.detach().clone() for param in model.parameters()]
    train(model, optimizer, [1])
    assert_same([param.detach() for param in model.parameters()], before, "parameters, after LambdaLR set lr to 0,")
    for name, make in all_schedulers(case).items():
        _assert_obeys(case, name, make, 0.125)


def schedulers_of_tensor_lr(case: OptimizerCase) -> None:
    """Schedulers write into an ``lr`` that is a tensor, and the step obeys them."""
    for name in ("StepLR", "CosineAnnealingLR", "OneCycleLR"):
        _assert_obeys(case, name, all_schedulers(case)[name], torch.tensor(0.125, device=case.device))


def _assert_obeys(case: OptimizerCase, name: str, make: Callable[[Optimizer], Any], lr: float | torch.Tensor) -> None:
    """Training under a scheduler equals training with the same values written by hand."""
    model, optimizer = case.pair(lr=copy.copy(lr))
    written: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # the category of torch's schedulers
        scheduler = make(optimizer)
        for step in range(_STEPS):
            group = optimizer.param_groups[0]
            assert isinstance(group["lr"], type(lr)), f"{name} made of lr a {type(group['lr']).__name__}"
            written.append({key: copy.deepcopy(group[key]) for key in group.keys() & {"lr", "momentum", "betas"}})
            train(model, optimizer, [step])
            metric = (torch.tensor(1.0),) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()
            scheduler.step(*metric)
    assert len(set(map(str, written))) > 1, f"{name} changed nothing: {written}"
    by_hand, hand_optimizer = case.pair(lr=copy.copy(lr))
    for step, values in enumerate(written):
        for group in hand_optimizer.param_groups:
            group.update(values)
        train(by_hand, hand_optimizer, [step])
    assert_same(snapshot(model, optimizer), snapshot(by_hand, hand_optimizer), f"training under {name}")


def all_schedulers(case: OptimizerCase) -> dict[str, Callable[[Optimizer], Any]]:
    """torch's schedulers by name, so set up that they change something within three steps."""
    s = lr_scheduler
    _, probe = case.pair()
    cycles = any(key in probe.defaults for key in ("momentum", "betas"))
    return {
        "LambdaLR": lambda o: s.LambdaLR(o, lambda step: 1 / (1 + step)),
        "MultiplicativeLR": lambda o: s.MultiplicativeLR(o, lambda step: 0.5),
        "StepLR": lambda o: s.StepLR(o, 1),
        "MultiStepLR": lambda o: s.MultiStepLR(o, [1, 2]),
        "ConstantLR": lambda o: s.ConstantLR(o, total_iters=1),
        "LinearLR": lambda o: s.LinearLR(o, total_iters=2),
        "ExponentialLR": lambda o: s.ExponentialLR(o, 0.5),
        "CosineAnnealingLR": lambda o: s.CosineAnnealingLR(o, 3),
        "PolynomialLR": lambda o: s.PolynomialLR(o, 3),
        "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 2),
        "SequentialLR": lambda o: s.SequentialLR(o, [s.StepLR(o, 1), s.ExponentialLR(o, 0.5)], [1]),
        "ChainedScheduler": lambda o: s.ChainedScheduler([s.StepLR(o, 1), s.ExponentialLR(o, 0.5)]),
        "ReduceLROnPlateau": lambda o: s.ReduceLROnPlateau(o, patience=0),
        "CyclicLR": lambda o: s.CyclicLR(o, 0.01, 0.125, 2, cycle_momentum=cycles),
        "OneCycleLR": lambda o: s.OneCycleLR(o, 0.125, total_steps=_STEPS + 1, cycle_momentum=cycles),
        "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, anneal_epochs=2),
    }


def grad_scaler(case: OptimizerCase) -> None:
    """Scaled losses train as unscaled ones; a step with an infinite gradient changes neither parameters nor state."""
    plain, _ = case.trained(range(2))
    for early in (False, True):
        model, optimizer = case.pair()
        scaler = torch.amp.GradScaler(case.device, init_scale=1024.0)
        initial = [param.detach().clone() for param in model.parameters()]
        _scaled_step(model, optimizer, scaler, 0, early=early, poisoned=True)
        assert scaler.get_scale() == 512.0, f"an infinite gradient left the scale at {scaler.get_scale()}"
        found = [param.detach() for param in model.parameters()]
        assert_same(found, initial, "parameters after a first step with an infinite gradient")
        _scaled_step(model, optimizer, scaler, 0, early=early)
        before = snapshot(model, optimizer)
        _scaled_step(model, optimizer, scaler, 1, early=early, poisoned=True)
        assert_same(snapshot(model, optimizer), before, "training after a step with an infinite gradient")
        _scaled_step(model, optimizer, scaler, 1, early=early)
        for name, param in plain.named_parameters():
            assert_same(model.get_parameter(name).detach(), param.detach(), f"{name}, trained with a scaled loss,")


def _scaled_step(
    model: TinyModel,
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    step: int,
    *,
    early: bool,
    poisoned: bool = False,
) -> None:
    """A step as users of the scaler write it; ``early`` unscales before the step, as they do for clipping."""
    optimizer.zero_grad()
    scaler.scale(model(step)).backward()
    if poisoned:
        gradient = next(iter(model.parameters())).grad
        assert gradient is not None
        gradient.view(-1)[0] = float("inf")
    if early:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


TRAINING_CHECKS: dict[str, Callable[[OptimizerCase], None]] = {
    check.__name__: check
    for check in (
        closure,
        none_gradients,
        named_parameters,
        param_groups,
        add_param_group,
        tensor_lr,
        schedulers,
        schedulers_of_tensor_lr,
        maximize,
        gradients_unchanged,
        zero_grad,
        step_hooks,
        grad_scaler,
    )
}
