"""A state machine with an optimizer, and beside it what its user knows of that (`muon_model`)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from muon_model import Group, Known, value_of
from random_tensors import laid_out, random
from torch import Tensor, nn

from optim_kernels import TritonMuon, TritonMuonAdamW


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return type(one) is type(other) and torch.equal(one, other)
    return bool(one == other)


class BesideAnOptimizer(RuleBasedStateMachine):
    """Rules do to the optimizer, and to what is known of it, the same."""

    optimizer: TritonMuon | TritonMuonAdamW
    groups: list[Group]
    max_norm: float | None = None

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none)
        for _, _, p in self.pairs():
            assert p.grad is None or not (set_to_none or p.grad.any())

    def know(self, group: dict[str, Any]) -> None:
        """Take note of a group that was added."""
        options = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
        self.groups.append(Group(options, [Known(value_of(p, {})) for p in group["params"]]))

    def pairs(self) -> Iterator[tuple[Group, Known, nn.Parameter]]:
        for known, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            for member, p in zip(known.members, group["params"], strict=True):
                yield known, member, p

    def one(self, number: int) -> tuple[Group, Known, nn.Parameter]:
        pairs = list(self.pairs())
        return pairs[number % len(pairs)]

    def chosen(self, number: int) -> tuple[Group, dict[str, Any]]:
        i = number % len(self.groups)
        return self.groups[i], self.optimizer.param_groups[i]

    def forget(self, known: Known, p: nn.Parameter, *keys: str) -> None:
        """Delete the state of a parameter, or what of it is named."""
        for state in (known.state, self.optimizer.state.get(p, {})):
            for key in keys or list(state):
                state.pop(key, None)
        if not keys:
            self.optimizer.state.pop(p, None)

    def give(self, kinds: list[str], seed: int) -> None:
        """Gradients, of these kinds in turn."""
        for i, (_, _, p) in enumerate(self.pairs()):
            kind = kinds[i % len(kinds)]
            if kind == "none":
                p.grad = None
            elif kind == "kept" and p.grad is not None:
                p.grad = p.grad.contiguous().mul_(0.5)
            elif kind == "half" and hasattr(p, "grad_dtype"):
                p.grad_dtype = None
                p.grad = random(p.shape, seed + i, torch.bfloat16)
            else:
                p.grad = laid_out(random(p.shape, seed + i, p.dtype), kind)

    def follow(self, factor: float = 1.0) -> None:
        """The step that the optimizer should have done."""
        for known, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            known.step(group["params"], factor)

    def clipped(self, scale: float) -> float:
        """The factor of ``max_norm``."""
        grads = [p.grad.double() for _, _, p in self.pairs() if p.grad is not None]
        if self.max_norm is None or not grads:
            return 1.0
        norm = float(torch.stack([grad.norm() for grad in grads]).norm()) / scale
        return min(1.0, self.max_norm / (norm + 1e-6))

    def nothing_happened(self) -> None:
        for group, known, p in self.pairs():
            known.note_new_states(p.dtype, self.optimizer.state.get(p, {}), group.options)

    def tell(self, known: Group, group: dict[str, Any], name: str, value: Any) -> None:
        group[name], known.options[name] = value, copy.deepcopy(value)

    def restart_variance(self, known: Group, group: dict[str, Any]) -> None:
        for member, p in zip(known.members, group["params"]):
            self.forget(member, p, "second_momentum_buffer")

    def overwrite(self, known: Known, p: nn.Parameter, seed: int) -> None:
        with torch.no_grad():
            p.copy_(random(p.shape, seed, p.dtype))
        self.forget(known, p)
        known.value = value_of(p, {})

    def agree(self) -> None:
        for known, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            for name, value in known.options.items():
                assert same(group[name], value), f"{name} is {group[name]}, was told {value}"
        for known, member, p in self.pairs():
            member.compare(p, self.optimizer.state.get(p, {}), known.options)
        assert {*self.optimizer.state} <= {p for _, _, p in self.pairs()}
