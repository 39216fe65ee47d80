"""TritonAdamW beside torch.optim.AdamW through random sequences of what users do to an optimizer between steps."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from random_tensors import laid_out, random
from state_machines import try_sequences
from torch import nn

from optim_kernels import TritonAdamW

pytest.importorskip("triton")

SHAPES = [(), (0,), (1,), (5,), (4, 3), (2, 3, 2, 5), (17, 31)]
ARMS: list[Callable[..., torch.optim.Optimizer]] = [
    torch.optim.AdamW,
    partial(TritonAdamW, impl="torch"),
    partial(TritonAdamW, impl="triton"),
]

seeds = st.integers(0, 2**31)
shapes = st.sampled_from(SHAPES)
# what a group may be told to do from now on
changes = st.one_of(
    st.tuples(st.just("lr"), st.sampled_from([0.0, 1e-3, 0.1])),
    st.tuples(st.just("weight_decay"), st.sampled_from([0.0, 0.3])),
    st.tuples(st.just("betas"), st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.99)])),
    st.tuples(st.just("eps"), st.sampled_from([1e-8, 1e-3])),
    st.tuples(st.just("maximize"), st.booleans()),
    st.tuples(st.just("amsgrad"), st.just(False)),
)


@dataclass
class Arm:
    """One optimizer and its parameters, in the order of its groups."""

    make: Callable[..., torch.optim.Optimizer]
    optimizer: torch.optim.Optimizer

    @property
    def params(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def remade(self, params: list[nn.Parameter] | None = None) -> torch.optim.Optimizer:
        """A new optimizer of this kind over groups of the same sizes."""
        rest = iter(self.params if params is None else params)
        groups = [{"params": [next(rest) for _ in group["params"]]} for group in self.optimizer.param_groups]
        return self.make(groups)


class Sequences(RuleBasedStateMachine):
    """Every rule is done to all arms alike; after each they must agree."""

    arms: list[Arm]

    @initialize(
        first=st.lists(shapes, min_size=1, max_size=3),
        options=st.fixed_dictionaries({"amsgrad": st.booleans(), "maximize": st.booleans()}),
        seed=seeds,
    )
    def build(self, first: list[tuple[int, ...]], options: dict[str, Any], seed: int) -> None:
        self.arms = [
            Arm(make, make([nn.Parameter(random(s, seed + i)) for i, s in enumerate(first)], lr=0.01, **options))
            for make in ARMS
        ]

    @rule(
        kinds=st.lists(st.sampled_from(["new", "kept", "none", "transposed", "gaps", "expanded"]), min_size=1),
        seed=seeds,
    )
    def step(self, kinds: list[str], seed: int) -> None:
        for arm in self.arms:
            for i, p in enumerate(arm.params):
                kind = kinds[i % len(kinds)]
                if kind == "none":
                    p.grad = None
                elif kind == "kept" and p.grad is not None:
                    p.grad = p.grad.contiguous().mul_(0.5)
                else:
                    p.grad = laid_out(random(tuple(p.shape), seed + i), kind)
            arm.optimizer.step()

    @rule(change=changes, which=st.integers(0, 9))
    def tell_a_group(self, change: tuple[str, Any], which: int) -> None:
        name, value = change
        for arm in self.arms:
            groups = arm.optimizer.param_groups
            groups[which % len(groups)][name] = value

    @rule(shape=shapes, lr=st.sampled_from([0.02, 0.2]), seed=seeds)
    def add_a_group(self, shape: tuple[int, ...], lr: float, seed: int) -> None:
        for arm in self.arms:
            arm.optimizer.add_param_group({"params": [nn.Parameter(random(shape, seed))], "lr": lr})

    @rule(which=st.integers(0, 9), shape=shapes, seed=seeds)
    def exchange_a_parameter(self, which: int, shape: tuple[int, ...], seed: int) -> None:
        for arm in self.arms:
            group = arm.optimizer.param_groups[which % len(arm.optimizer.param_groups)]
            place = which % len(group["params"])
            arm.optimizer.state.pop(group["params"][place], None)
            group["params"][place] = nn.Parameter(random(shape, seed))

    @rule(which=st.integers(0, 9))
    def forget_a_state(self, which: int) -> None:
        for arm in self.arms:
            arm.optimizer.state.pop(arm.params[which % len(arm.params)], None)

    @rule(whose=st.sampled_from(["parameters", "states", "exchanged states"]))
    def move(self, whose: str) -> None:
        """Elsewhere in memory, as by ``.to(device)`` there and back."""
        for arm in self.arms:
            for p in arm.params:
                state = arm.optimizer.state.get(p, {})
                if whose == "parameters":
                    p.data = p.data.clone()
                for key, value in state.items():
                    if whose == "states":
                        value.data = value.data.clone()
                    elif whose == "exchanged states":
                        state[key] = value.clone()

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        for arm in self.arms:
            arm.optimizer.zero_grad(set_to_none)

    @rule()
    def resume(self) -> None:
        """From a file, by a new optimizer."""
        for arm in self.arms:
            file = io.BytesIO()
            torch.save(arm.optimizer.state_dict(), file)
            file.seek(0)
            optimizer = arm.remade()
            optimizer.load_state_dict(torch.load(file, weights_only=True))
            arm.optimizer = optimizer

    @rule()
    def swap_states(self) -> None:
        """Ours go on from torch's, torch's from the first of ours."""
        torchs, first, _ = (arm.optimizer.state_dict() for arm in self.arms)
        for arm, theirs in zip(self.arms, (first, torchs, torchs)):
            optimizer = arm.remade()
            # tensors of a state dict are taken over, not copied
            optimizer.load_state_dict(copy.deepcopy(theirs))
            arm.optimizer = optimizer

    @rule()
    def copy(self) -> None:
        for arm in self.arms:
            arm.optimizer = copy.deepcopy(arm.optimizer)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "arms"):
            return
        torchs, *others = self.arms
        for arm in others:
            for p, q in zip(arm.params, torchs.params, strict=True):
                torch.testing.assert_close(p, q, rtol=5e-5, atol=1e-6)
                # a look that the optimizer does not learn of: once asked for its state, it checks that state every step
                ours, theirs = (dict(vars(each.optimizer)["state"].get(x, {})) for each, x in ((arm, p), (torchs, q)))
                assert ours.keys() == theirs.keys()
                for key, value in theirs.items():
                    torch.testing.assert_close(ours[key].cpu(), value.cpu(), rtol=5e-5, atol=1e-6)


@pytest.mark.slow
def test_sequences() -> None:
    try_sequences(Sequences, examples=20, steps=12)


@pytest.mark.nightly
def test_many_sequences() -> None:
    try_sequences(Sequences, examples=200, steps=30)
