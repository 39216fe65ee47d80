"""TritonMuonAdamW through random sequences of what training does: schedules, scalers, clipping, freezing, checkpoints.

Beside the optimizer stands what its user was promised (`muon_model`): groups begin with the defaults written down here,
which are nanochat's and Keller Jordan's, and a step moves them in float64. Everything but a step leaves numbers as they
are.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from muon_machine import BesideAnOptimizer, same
from muon_model import Known, value_of
from promises import ADAMW, ROUTED, SCHEDULES, VARIANTS, Block
from random_tensors import DEVICE, NUMPY_MAY_WARN, random
from state_machines import try_sequences
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from optim_kernels import TritonAdamW, TritonMuon, TritonMuonAdamW
from optim_utils.param_groups import Rule, route_parameters

pytest.importorskip("triton")

MATRICES = [(4, 6), (4, 6), (6, 4), (3, 3), (1, 5), (2, 3, 4)]
VECTORS = [(), (5,), (4, 3), (0,), (2, 3, 2)]
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16]
# Further options of Muon groups of bf16 parameters.
STORAGES: list[dict[str, Any]] = [
    {},
    {},
    {"master_weights": "fp32"},
    {"master_weights": "split16", "momentum_dtype": torch.float32},
    {"stochastic_rounding": True, "seed": 3},
]

seeds = st.integers(0, 2**31)
which = st.integers(0, 9)
learning_rates = st.sampled_from([None, 0.0, 0.05, "tensor"])
muon_changes = {
    "lr": learning_rates,
    "weight_decay": st.sampled_from([0.0, 0.3]),
    "momentum": st.sampled_from([0.0, 0.85, 0.95]),
    "beta2": st.sampled_from([None, 0.5, 0.9]),
    "cautious": st.booleans(),
    "maximize": st.booleans(),
    "missing_grad": st.sampled_from(["skip", "zero"]),
    "impl": st.sampled_from(["auto", "torch", "triton"]),
}
adamw_changes = {
    "lr": learning_rates,
    "weight_decay": st.sampled_from([0.0, 0.3]),
    "betas": st.sampled_from([(0.9, 0.95), (0.0, 0.5), [0.8, 0.99]]),
    "eps": st.sampled_from([1e-10, 1e-3]),
    "maximize": st.booleans(),
    "impl": st.sampled_from(["auto", "torch", "triton"]),
}
changes = st.sampled_from(sorted(muon_changes.keys() | adamw_changes.keys())).flatmap(
    lambda name: st.tuples(st.just(name), {**muon_changes, **adamw_changes}[name])
)
new_groups = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["muon", "muon", "adamw"]),
        "shapes": st.lists(which, min_size=1, max_size=3),
        "alike": st.booleans(),
        "dtype": st.sampled_from([*DTYPES, torch.float64]),
        "storage": st.sampled_from(STORAGES),
        "variant": st.sampled_from([None, None, *VARIANTS]),
        "lr": learning_rates,
        "seed": seeds,
    }
)
gradients = st.lists(st.sampled_from(["new", "new", "kept", "none", "transposed", "half"]), min_size=1, max_size=3)


def saved_and_read(content: Any, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


class Training(BesideAnOptimizer):
    """Every rule is done to the optimizer, and to what is known of it; after each they must agree."""

    optimizer: TritonMuonAdamW

    @initialize(
        impl=st.sampled_from(["auto", "torch", "triton"]),
        use_muon=st.booleans(),
        routed=st.booleans(),
        max_norm=st.sampled_from([None, None, 0.5]),
        capturable=st.booleans(),
        first=st.lists(new_groups, min_size=1, max_size=2),
    )
    def build(
        self,
        impl: str,
        use_muon: bool,
        routed: bool,
        max_norm: float | None,
        capturable: bool,
        first: list[dict[str, Any]],
    ) -> None:
        self.impl, self.use_muon, self.max_norm, self.capturable = impl, use_muon, max_norm, capturable
        self.named, self.num_made = routed, 0
        self.schedule: Any = None
        self.groups = []
        given = [self.group(**options) for options in first] + (self.routed() if routed else [])
        self.optimizer = self.made(given)
        for group, options in zip(self.optimizer.param_groups, given, strict=True):
            self.know_what_was_promised(group, options)

    def made(self, groups: list[dict[str, Any]]) -> TritonMuonAdamW:
        options: dict[str, Any] = {"max_norm": self.max_norm, "capturable": self.capturable, "impl": self.impl}
        return TritonMuonAdamW([dict(group) for group in groups], **options)

    def group(
        self,
        kind: str,
        shapes: list[int],
        alike: bool,
        dtype: torch.dtype,
        storage: dict[str, Any],
        variant: str | None,
        lr: Any,
        seed: int,
    ) -> dict[str, Any]:
        """What a user passes for a group."""
        if dtype == torch.float64 and self.impl == "triton":
            dtype = torch.float32
        choice = MATRICES if kind == "muon" else VECTORS
        places = [shapes[0]] * len(shapes) if alike else shapes
        params = [nn.Parameter(random(choice[i % len(choice)], seed + n, dtype)) for n, i in enumerate(places)]
        names = [f"{self.num_made + n}" for n in range(len(params))]
        self.num_made += len(params)
        group: dict[str, Any] = {"params": list(zip(names, params)) if self.named else params}
        group |= {"use_muon": kind == "muon"} if self.use_muon else {"kind": kind}
        if lr is not None:
            group["lr"] = torch.tensor(0.05) if lr == "tensor" else lr
        if kind == "muon":
            group |= {"ns_dtype": torch.float32, **(storage if dtype == torch.bfloat16 else {})}
            group |= {} if variant is None else {"variant": variant}
            # every further one enlarges what 16-bit momentum has lost
            group |= {"ns_steps": 1} if dtype.itemsize == 2 else {}
        return group

    def routed(self) -> list[dict[str, Any]]:
        """Groups of a model."""
        model = Block().to(DEVICE)
        for i, p in enumerate(model.parameters()):
            p.data.copy_(random(p.shape, i))
        rule_of_heads = Rule("wqkv.weight", split=(4, 2, 2), num_heads=2)
        table = route_parameters(model, [rule_of_heads])
        sizes = {route.name: list(route.view.shapes) for route in table.to("muon") if route.view is not None}
        assert sizes == ROUTED
        # one, for so many shapes take the interpreter long
        muon = {"ns_dtype": torch.float32, "ns_steps": 1}
        return table.param_groups(muon=muon, embedding={"lr": 0.1}, vector={"betas": (0.8, 0.9)})

    def know_what_was_promised(self, group: dict[str, Any], given: dict[str, Any]) -> None:
        if given.get("kind", "muon" if given.get("use_muon") else "adamw") == "adamw":
            promised = {**ADAMW, "kind": "adamw"}
        else:
            published = "keller" if "use_muon" in given else "nanochat-2026-07"
            promised = {**VARIANTS[given.get("variant", published)], "kind": "muon"}
        own = {key: value for key, value in given.items() if key not in ("params", "param_names")}
        self.know({**promised, "impl": self.impl, "max_norm": self.max_norm, **own, "params": group["params"]})

    def factor_of_clipping(self, scale: float = 1.0) -> float:
        """That of ``max_norm``, when ``grad_norm`` has been looked at."""
        grads = [p.grad.double() for _, _, p in self.pairs() if p.grad is not None]
        if self.max_norm is not None and grads:
            norm = torch.stack([grad.norm() for grad in grads]).norm() / scale
            assert self.optimizer.grad_norm is not None
            torch.testing.assert_close(self.optimizer.grad_norm.double(), norm, rtol=1e-5, atol=1e-12)
        return self.clipped(scale)

    def give(self, kinds: list[str], seed: int) -> None:
        super().give(kinds, seed)
        for _, _, p in self.pairs():
            if not p.requires_grad:
                p.grad = None

    def watched(self, step: Callable[[], Any]) -> Any:
        """The result of a step, which only reads the gradients."""
        grads = [p.grad for _, _, p in self.pairs() if p.grad is not None]
        before, versions = [grad.clone() for grad in grads], [grad._version for grad in grads]
        result = step()
        assert all(torch.equal(grad, old) for grad, old in zip(grads, before, strict=True))
        assert versions == [grad._version for grad in grads]
        return result

    @rule(
        kinds=gradients,
        seed=seeds,
        clip=st.sampled_from([None, "before", "factor"]),
        through_closure=st.booleans(),
    )
    def step(self, kinds: list[str], seed: int, clip: str | None, through_closure: bool) -> None:
        self.give(kinds, seed)
        factor = None
        if clip == "before":
            for _, _, p in self.pairs():
                p.grad = None if p.grad is None else p.grad.contiguous()
            nn.utils.clip_grad_norm_([p for _, _, p in self.pairs()], 0.25)
        elif clip == "factor":
            factor = torch.tensor(0.25, device=DEVICE)

        def closure() -> float:
            assert torch.is_grad_enabled()
            return 7.0

        given = closure if through_closure else None
        loss = self.watched(lambda: self.optimizer.step(given, clip_factor=factor))
        assert loss == (7.0 if through_closure else None)
        self.follow(self.factor_of_clipping() if factor is None else 0.25)

    @rule(seed=seeds, count=st.integers(1, 3))
    def train(self, seed: int, count: int) -> None:
        """Steps like one another."""
        for i in range(count):
            self.give(["new"], seed + i)
            self.optimizer.step()
            self.follow(self.factor_of_clipping())
            self.agree()

    @rule(seed=seeds, unscale=st.booleans(), overflow=st.booleans(), number=which)
    def step_with_a_scaler(self, seed: int, unscale: bool, overflow: bool, number: int) -> None:
        self.give(["new"], seed)
        given = [p for _, _, p in self.pairs() if p.grad is not None]
        filled = [p for p in given if p.numel()]
        unscale = unscale and not any(p.grad is not None and p.grad.dtype == torch.float16 for p in given)
        overflow = overflow and bool(filled)
        has_bf16 = any(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in given)
        if not given or (has_bf16 and DEVICE == "cuda"):  # for which torch's scaler has no kernel
            return
        scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
        scaler.scale(torch.ones((), device=DEVICE))
        for p in given:
            p.grad = p.grad * 4
        if overflow:
            filled[number % len(filled)].grad.view(-1)[0] = float("inf")
        if unscale:
            scaler.unscale_(self.optimizer)
        self.watched(lambda: scaler.step(self.optimizer))
        scaler.update()
        if overflow:
            self.nothing_happened()
            self.optimizer.zero_grad()
        else:
            scale = 1.0 if unscale else 4.0
            self.follow(self.factor_of_clipping(scale) / scale)

    @rule(seed=seeds)
    def step_with_hooks(self, seed: int) -> None:
        """One that halves the gradients in front, one that cuts the parameters behind."""

        def halve(*_: Any) -> None:
            for _, _, p in self.pairs():
                p.grad = None if p.grad is None else p.grad * 0.5

        called = []
        handles = [
            self.optimizer.register_step_pre_hook(halve),
            self.optimizer.register_step_post_hook(lambda *_: called.append(1)),
        ]
        self.give(["new"], seed)
        self.optimizer.step()
        for handle in handles:
            handle.remove()
        assert called == [1]
        self.follow(self.factor_of_clipping())

    @rule(progress=st.sampled_from([0.0, 0.3, 1.0]))
    def follow_nanochats_schedules(self, progress: float) -> None:
        self.schedule = None
        for known, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            if isinstance(group["lr"], Tensor):
                continue
            group.setdefault("initial_lr", group["lr"])
            known.options["initial_lr"] = group["initial_lr"]
            self.tell(known, group, "lr", group["initial_lr"] * (1 - progress))
            if known.is_muon:
                self.tell(known, group, "momentum", (1 - progress) * 0.85 + progress * 0.95)
                self.tell(known, group, "weight_decay", 0.2 * (1 - progress))

    @rule(name=st.sampled_from(sorted(SCHEDULES)))
    def schedule_learning_rates(self, name: str) -> None:
        """As torch does for an optimizer of its own with the same learning rates."""
        keys = ("lr", "initial_lr", "swa_lr", "max_lr", "min_lr", "base_lr")
        groups = [{key: group[key] for key in keys if key in group} for group in self.optimizer.param_groups]
        groups = [{"params": [nn.Parameter(torch.zeros(1))], **copy.deepcopy(group)} for group in groups]
        beside = torch.optim.SGD(groups)
        self.schedule = None, beside
        with_schedule = [SCHEDULES[name](optimizer) for optimizer in (self.optimizer, beside)]
        self.schedule = with_schedule, beside
        self.take_learning_rates()

    def take_learning_rates(self) -> None:
        for known, group, other in zip(
            self.groups, self.optimizer.param_groups, self.schedule[1].param_groups, strict=True
        ):
            assert same(group["lr"], other["lr"])
            for key in other.keys() & {"lr", "initial_lr"}:
                known.options[key] = copy.deepcopy(other[key])

    @precondition(lambda self: self.schedule is not None)
    @rule(seed=seeds, count=st.integers(1, 3), loss=st.sampled_from([1.0, 2.0]))
    def train_by_the_schedule(self, seed: int, count: int, loss: float) -> None:
        for i in range(count):
            self.train(seed + i, 1)
            self.schedule[1].step()
            for schedule in self.schedule[0]:
                is_plateau = isinstance(schedule, schedulers.ReduceLROnPlateau)
                schedule.step(*([loss] if is_plateau else []))
            self.take_learning_rates()

    @rule(change=changes, number=which)
    def tell_a_group(self, change: tuple[str, Any], number: int) -> None:
        name, value = change
        known, group = self.chosen(number)
        if name not in (muon_changes if known.is_muon else adamw_changes) or (name == "lr" and value is None):
            return
        if name == "lr":
            self.schedule = None
        if name == "lr" and isinstance(group["lr"], Tensor):
            group["lr"].fill_(0.03 if value == "tensor" else value)
            known.options["lr"] = group["lr"].clone()
            return
        if name == "impl" and value == "triton" and any(p.dtype == torch.float64 for p in group["params"]):
            return
        self.tell(known, group, name, torch.tensor(0.03) if value == "tensor" else value)

    @rule(number=which)
    def freeze_or_thaw(self, number: int) -> None:
        *_, p = self.one(number)
        p.requires_grad_(not p.requires_grad)
        p.grad = None

    @rule(options=new_groups)
    def add_a_group(self, options: dict[str, Any]) -> None:
        self.schedule = None
        group = self.group(**options)
        self.optimizer.add_param_group(group)
        self.know_what_was_promised(self.optimizer.param_groups[-1], group)

    @rule(number=which)
    def remove_a_group(self, number: int) -> None:
        self.schedule = None
        if len(self.groups) > 1:
            i = number % len(self.groups)
            for p in self.optimizer.param_groups[i]["params"]:
                self.optimizer.state.pop(p, None)
            del self.groups[i], self.optimizer.param_groups[i]

    @rule(number=which, seed=seeds, with_state=st.booleans())
    def exchange_a_parameter(self, number: int, seed: int, with_state: bool) -> None:
        """For another; the state may go along."""
        known, group = self.chosen(number)
        place = number % len(known.members)
        old = group["params"][place]
        new = group["params"][place] = nn.Parameter(torch.empty_like(old).copy_(random(old.shape, seed, old.dtype)))
        state = self.optimizer.state.pop(old, None)
        member = known.members[place]
        if with_state and state and not {"master", "master_low"} & state.keys():
            self.optimizer.state[new] = state
            member.value = value_of(new, {})
        else:
            known.members[place] = Known(value_of(new, {}))

    @rule(how=st.sampled_from(["clear", "exchange"]))
    def forget_all_states(self, how: str) -> None:
        if how == "clear":
            self.optimizer.state.clear()
        else:
            self.optimizer.state = defaultdict(dict)
        for _, known, p in self.pairs():
            known.state, known.value = {}, value_of(p, {})

    @rule(number=which, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    def convert_a_group(self, number: int, dtype: torch.dtype) -> None:
        """As by ``module.to(dtype)``; states stay as they are."""
        known, group = self.chosen(number)
        stored = known.options.get("master_weights") or known.options.get("stochastic_rounding")
        if stored or (dtype == torch.float64 and group["impl"] == "triton"):
            return
        if known.is_muon and dtype == torch.bfloat16:
            self.tell(known, group, "ns_steps", 1)
        for member, p in zip(known.members, group["params"], strict=True):
            p.grad = None
            p.data = p.data.to(dtype)
            member.value = value_of(p, {})

    @rule(whose=st.sampled_from(["parameters", "states"]))
    def move(self, whose: str) -> None:
        """To the CPU and back, or elsewhere in memory."""
        for _, _, p in self.pairs():
            if whose == "parameters":
                p.data = p.data.cpu().clone().to(DEVICE)
            for value in self.optimizer.state.get(p, {}).values() if whose == "states" else ():
                value.data = value.data.cpu().clone().to(DEVICE)

    @rule(weights_only=st.booleans(), same_optimizer=st.booleans(), layout=st.sampled_from(["separate", "nanochat"]))
    def resume(self, weights_only: bool, same_optimizer: bool, layout: Any) -> None:
        """From a file."""
        can_stack = all(self.stacks(group["params"]) for group in self.muon_groups())
        if layout == "nanochat" and not can_stack:
            with pytest.raises(ValueError, match="layout='nanochat' stacks"):
                self.optimizer.state_dict(layout=layout)
            return
        content = self.optimizer.state_dict(layout=layout)
        if layout == "nanochat":
            self.check_nanochats_layout(content)
        content = saved_and_read(content, weights_only)
        if not same_optimizer:
            self.schedule = None
            self.optimizer = self.remade()
        self.optimizer.load_state_dict(content)

    def remade(self) -> TritonMuonAdamW:
        """A new optimizer over the groups, with what a checkpoint does not decide."""
        own = ("kind", "views", "impl", "momentum_dtype", "master_weights", "nd")
        groups = [
            {"params": group["params"], **{key: known.options[key] for key in own if key in known.options}}
            for known, group in zip(self.groups, self.optimizer.param_groups, strict=True)
        ]
        return self.made(groups)

    def muon_groups(self) -> Iterator[dict[str, Any]]:
        return (group for known, group in zip(self.groups, self.optimizer.param_groups) if known.is_muon)

    def stacks(self, params: Sequence[Tensor]) -> bool:
        """Whether nanochat could have the states of these parameters in one, or there are none."""
        states = [self.optimizer.state.get(p) or {} for p in params]
        kinds = {tuple((key, value.dtype, value.shape) for key, value in sorted(each.items())) for each in states}
        return not any(states) or (len(kinds) == 1 and params[0].ndim == 2)

    def check_nanochats_layout(self, content: dict[str, Any]) -> None:
        for group, saved in zip(self.optimizer.param_groups, content["param_groups"], strict=True):
            first, *others = saved["params"]
            states = [self.optimizer.state.get(p) or {} for p in group["params"]]
            if group["kind"] == "adamw":
                counts = [content["state"][i]["step"] for i in saved["params"] if i in content["state"]]
                assert all(type(count) is int for count in counts)
            elif states[0]:
                assert not {*others} & content["state"].keys()
                for key, value in content["state"][first].items():
                    assert torch.equal(value, torch.stack([state[key] for state in states]))

    @rule(seed=seeds)
    def train_in_two_optimizers(self, seed: int) -> None:
        """Muon's groups and AdamW's each in a class of their own for a step, and back."""
        self.schedule = None
        for known, _, p in self.pairs():
            # where AdamW is torch's own, its arithmetic and its moments are in the parameter's dtype
            moment = self.optimizer.state.get(p, {}).get("exp_avg", p)
            if not known.is_muon and (p.dtype.itemsize == 2 or moment.dtype != p.dtype):
                return
        whole = self.optimizer.state_dict()
        groups = self.optimizer.param_groups
        # the whole one has clipped, and torch's capturable is for devices
        other: dict[str, Any] = {"max_norm": None, "capturable": False}
        parts: list[tuple[torch.optim.Optimizer, list[int]]] = []
        for kind, make in (("muon", TritonMuon), ("adamw", TritonAdamW)):
            numbers = [i for i, group in enumerate(groups) if group["kind"] == kind]
            if numbers:
                parts.append((make([{**groups[i], **other} for i in numbers]), numbers))
        self.give(["new"], seed)
        factor = torch.tensor(self.clipped(1.0), device=DEVICE)
        for part, numbers in parts:
            mine = [whole["param_groups"][i] for i in numbers]
            states = {i: whole["state"][i] for group in mine for i in group["params"] if i in whole["state"]}
            saved = [{**group, **other} for group in mine]
            part.load_state_dict({"state": states, "param_groups": saved})
            part.step(clip_factor=factor)
            result = part.state_dict()
            ids = [i for group in mine for i in group["params"]]
            renumbered = {ids[i]: state for i, state in result["state"].items()}
            whole["state"] = {i: each for i, each in whole["state"].items() if i not in ids} | renumbered
        self.optimizer.load_state_dict(whole)
        self.follow(float(factor))

    @rule(how=st.sampled_from([copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))]))
    def copy(self, how: Any) -> None:
        self.schedule = None
        self.optimizer = how(self.optimizer)

    @rule()
    def explain(self) -> None:
        lines = self.optimizer.explain().split("\n")
        assert len(lines) >= 2 + len(list(self.pairs()))

    @invariant()
    def go_on(self) -> None:
        """What went wrong shows at once, or in the next step."""
        if hasattr(self, "groups"):
            self.agree()


pytestmark = NUMPY_MAY_WARN


@pytest.mark.slow
def test_sequences() -> None:
    try_sequences(Training, examples=6, steps=6)


@pytest.mark.nightly
def test_many_sequences() -> None:
    try_sequences(Training, examples=200, steps=20)
