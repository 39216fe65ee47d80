"""The contract on torch's own optimizers, and on broken ones, which it has to catch."""

import subprocess
import sys

import pytest
import torch

from optim_utils import INT8, OptimizerModule, attach_state_dict_hooks, quantize
from optim_utils.testing._contract_case import assert_same
from optim_utils.testing._contract_training import all_schedulers
from optim_utils.testing.contract import CHECKS, ContractFailure, OptimizerCase, contract, run_check

ADAMW = OptimizerCase("AdamW", torch.optim.AdamW, {"lr": 0.01})
CASES = [
    ADAMW,
    OptimizerCase("AdamW-fused", torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    OptimizerCase("SGD", torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    OptimizerCase(
        "Muon",
        torch.optim.Muon,
        {"lr": 0.01},
        shapes=((8, 6), (6, 4)),
        skip={"maximize": "torch's Muon has no such option"},
    ),
]


@pytest.mark.slow
@pytest.mark.installed
@pytest.mark.parametrize(("case", "check"), contract(CASES), ids=str)
def test_contract(case, check):
    run_check(case, check)


def test_no_check_passes_because_python_leaves_asserts_out():
    code = (
        "import torch\n"
        "from optim_utils.testing import OptimizerCase, run_check\n"
        "run_check(OptimizerCase('SGD', torch.optim.SGD), 'state_dict_hooks')\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], stderr=subprocess.PIPE, text=True, timeout=120)
    assert "RuntimeError: the contract's checks are assert statements" in done.stderr


CUDA_CASES = [
    OptimizerCase("AdamW", torch.optim.AdamW, {"lr": 0.01}, device="cuda"),
    OptimizerCase("AdamW-fused", torch.optim.AdamW, {"lr": 0.01, "fused": True}, device="cuda"),
    OptimizerCase(
        "AdamW-capturable",
        torch.optim.AdamW,
        {"lr": 0.01, "capturable": True},
        device="cuda",
        skip={"copies_and_pickles": "torch's copy forgets that it has warned about steps outside of a graph"},
    ),
    OptimizerCase("SGD", torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}, device="cuda"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "check"), contract(CUDA_CASES), ids=str)
def test_contract_on_cuda(case, check):
    run_check(case, check)


class Momentum(torch.optim.SGD):
    """SGD with momentum: what the broken optimizers below are derived from."""

    def __init__(self, params, lr=0.01, **options):
        super().__init__(params, lr=lr, momentum=0.9, **options)

    def parameters(self):
        return [param for group in self.param_groups for param in group["params"]]


class ForgetsTheLoss(Momentum):
    def step(self, closure=None):
        super().step(closure)


class DecaysWithoutGradient(Momentum):
    def step(self, closure=None):
        for param in self.parameters():
            if param.grad is None:
                param.data.mul_(0.5)
        return super().step(closure)


class ForgetsNames(Momentum):
    def __init__(self, params, **options):
        super().__init__([param[1] if isinstance(param, tuple) else param for param in params], **options)


class ReadsOneGroup(Momentum):
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = self.param_groups[-1]["lr"]
        return super().step(closure)


class LateParametersInheritMomentum(Momentum):
    def step(self, closure=None):
        known = [self.state[param]["momentum_buffer"] for param in self.parameters() if self.state[param]]
        for param in self.parameters():
            if known and not self.state[param] and param.grad is not None:
                self.state[param]["momentum_buffer"] = torch.full_like(param, known[0].sum().item())
        return super().step(closure)


class TakesParametersTwice(Momentum):
    def add_param_group(self, param_group):
        self.param_groups.append({**self.defaults, **param_group, "params": list(param_group["params"])})


class CopiesLr(Momentum):
    def __init__(self, params, lr=0.01, **options):
        super().__init__(params, lr=float(lr), **options)


class KeepsItsFirstLr(Momentum):
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = 0.125
        return super().step(closure)


class ReplacesTensorLr(Momentum):
    """Each step makes a number of ``lr``: the next fill of the tensor is not seen."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = float(group["lr"])
        return super().step(closure)


class LoadsAnything(Momentum):
    def load_state_dict(self, state_dict):
        self.state.clear()


class IgnoresMaximize(Momentum):
    def __init__(self, params, maximize=False, **options):
        super().__init__(params, **options)


class ScalesGradients(Momentum):
    def step(self, closure=None):
        loss = super().step(closure)
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)
        return loss


class KeepsGradients(Momentum):
    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none=False)


class CallsHooksTwice(Momentum):
    """Overriding ``step`` is enough: torch wraps both this one and the base's."""

    def step(self, closure=None):
        return super().step(closure)


class StepsOnInfinity(Momentum):
    _step_supports_amp_scaling = True


class KeepsStateElsewhere(Momentum):
    """The momentum is no part of ``state``, so nothing that saves or copies state carries it."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.hidden = {}

    def step(self, closure=None):
        for param in self.parameters():
            if param in self.hidden:
                self.state[param]["momentum_buffer"] = self.hidden[param]
        loss = super().step(closure)
        for param in self.parameters():
            if param.grad is not None:
                self.hidden[param] = self.state.pop(param)["momentum_buffer"]
        return loss


class SavesItsClass(Momentum):
    """What loads with weights_only is tensors and builtins."""

    def state_dict(self):
        return {**super().state_dict(), "class": Momentum}


class KeepsWideState(Momentum):
    """fp32 momentum and integer codes of bf16 parameters, which torch's load_state_dict casts."""

    def step(self, closure=None):
        for param in self.parameters():
            if param.grad is not None and not self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)
                self.state[param]["codes"] = torch.arange(3, dtype=torch.uint8)
        return super().step(closure)


class PicklesAnotherLr(Momentum):
    def __getstate__(self):
        state = super().__getstate__()
        state["param_groups"] = [{**group, "lr": 0.0} for group in state["param_groups"]]
        return state


class SkipsHooks(Momentum):
    def state_dict(self):
        hooks, self._optimizer_state_dict_post_hooks = self._optimizer_state_dict_post_hooks, {}
        try:
            return super().state_dict()
        finally:
            self._optimizer_state_dict_post_hooks = hooks


class StepsWithoutLr(Momentum):
    """Decoupled decay that forgets the learning rate: the step of get_optimizer_state_dict moves parameters."""

    def step(self, closure=None):
        for param in self.parameters():
            if param.grad is not None:
                param.data.mul_(0.99)
        return super().step(closure)


class RefusesDTensors(Momentum):
    def step(self, closure=None):
        for param in self.parameters():
            if type(param.data) is not torch.Tensor:
                param.data.add_(1.0)
        return super().step(closure)


class CountsInASlot(Momentum):
    """A counter outside of ``__dict__``, which a subclass that shares the ``__dict__`` does not see."""

    __slots__ = ("count",)

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.count = 0

    def __repr__(self):
        return f"{super().__repr__()} after {self.count} steps"


class Renamed(Momentum):
    pass


Renamed.__name__ = "Forgotten"

FAULTS = {
    "closure": ForgetsTheLoss,
    "none_gradients": DecaysWithoutGradient,
    "named_parameters": ForgetsNames,
    "param_groups": ReadsOneGroup,
    "add_param_group": LateParametersInheritMomentum,
    "tensor_lr": CopiesLr,
    "schedulers": KeepsItsFirstLr,
    "schedulers_of_tensor_lr": ReplacesTensorLr,
    "maximize": IgnoresMaximize,
    "gradients_unchanged": ScalesGradients,
    "zero_grad": KeepsGradients,
    "step_hooks": CallsHooksTwice,
    "grad_scaler": StepsOnInfinity,
    "state_dict_saved_and_loaded": SavesItsClass,
    "state_dict_deep_copied": KeepsStateElsewhere,
    "state_dtype": KeepsWideState,
    "foreign_state_dict": LoadsAnything,
    "copies_and_pickles": PicklesAnotherLr,
    "state_dict_hooks": SkipsHooks,
    "distributed_state_dict": StepsWithoutLr,
    "fsdp2": RefusesDTensors,
    "accelerate_prepare": KeepsWideState,
    "lightning_subclass": CountsInASlot,
    "construction_by_name": Renamed,
}


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_catches_a_broken_optimizer(check):
    case = OptimizerCase("broken", FAULTS[check], {"lr": 0.01})
    with pytest.raises(ContractFailure, match=f"broken fails the check '{check}'"):
        run_check(case, check)


def test_a_parameter_in_two_groups_is_caught():
    with pytest.raises(ContractFailure, match="in a group already could be added again"):
        run_check(OptimizerCase("broken", TakesParametersTwice, {"lr": 0.01}), "add_param_group")


def test_low_bit_state_is_compared_by_its_codes():
    x = torch.randn(64)
    assert_same({"q": quantize(x, INT8)}, {"q": quantize(x, INT8)}, "state")
    with pytest.raises(AssertionError, match=r"state\['q'\]\.codes differs by up to"):
        assert_same({"q": quantize(x.flip(0), INT8)}, {"q": quantize(x, INT8)}, "state")
    with pytest.raises(AssertionError, match=r"state is a Tensor, not LowBitTensor"):
        assert_same(x, quantize(x, INT8), "state")


class Average(OptimizerModule):
    def __init__(self, param):
        self.mean, self.steps = torch.zeros_like(param, dtype=torch.float32), 0


class KeepsObjects(Momentum):
    """Momentum with a running mean of each parameter, and hooks that save it."""

    def __init__(self, params, lr=0.01, **options):
        super().__init__(params, lr=lr, **options)
        attach_state_dict_hooks(self)

    def step(self, closure=None):
        loss = super().step(closure)
        for param in self.parameters():
            if param.grad is not None:
                average = self.state[param].setdefault("average", Average(param))
                average.steps += 1
                average.mean.lerp_(param.detach().float(), 1 / average.steps)
        return loss


def test_objects_in_the_state_are_compared_by_their_states():
    for check in ("closure", "state_dict_saved_and_loaded", "state_dtype", "distributed_state_dict"):
        run_check(OptimizerCase("objects", KeepsObjects, {"lr": 0.01}), check)
    param = torch.zeros(2)
    assert_same(Average(param), Average(param), "the average")
    other = Average(param)
    other.mean += 1
    with pytest.raises(AssertionError, match=r"^the average\['mean'\] differs by up to 1$"):
        assert_same(other, Average(param), "the average")
    with pytest.raises(AssertionError, match="the average is a dict, not a Average"):
        assert_same(other.state_dict(), Average(param), "the average")


def test_the_unbroken_base_passes():
    for check in CHECKS:
        run_check(OptimizerCase("momentum", Momentum, {"lr": 0.01}), check)


def test_every_scheduler_of_torch_is_in_the_table():
    known = {name for name in torch.optim.lr_scheduler.__all__ if name != "LRScheduler"}
    assert known <= set(all_schedulers(ADAMW))


def test_a_skip_names_a_check_and_a_reason():
    for skip in ({"no_such_check": "because"}, {"closure": ""}):
        with pytest.raises(ValueError, match="name a check of CHECKS and a reason"):
            contract([OptimizerCase("case", Momentum, skip=skip)])


def test_a_case_may_need_ranks():
    run_check(OptimizerCase("in ranks", Momentum, {"lr": 0.01}, world_size=2), "closure")
    with pytest.raises(AssertionError, match="in ranks fails the check 'closure'"):
        run_check(OptimizerCase("in ranks", ForgetsTheLoss, {"lr": 0.01}, world_size=2), "closure")
