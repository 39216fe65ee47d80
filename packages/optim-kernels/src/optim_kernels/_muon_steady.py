"""A step like the one before: what has to be looked at to know that, and no more.

From step to step a training loop changes gradients and hyperparameters. Everything else that decides what the plans do
(options, which parameters have gradients, the tensors of parameters and state) is compared here with what it was, by
identity where that is enough. It costs a fraction of a microsecond a parameter, where sorting them anew costs ten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optim_kernels._muon_groups import DEFAULTS, MuonEntry

if TYPE_CHECKING:
    from optim_kernels.functional.muon_plan import MuonPlan

# Read anew in every step; beta2 only as long as it stays None, or stays a number.
HYPERPARAMETERS = ("lr", "weight_decay", "momentum", "beta2")
OPTIONS = tuple(key for key in DEFAULTS if key not in HYPERPARAMETERS)

Groups = Sequence[Mapping[str, Any]]
State = Mapping[Tensor, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Member:
    """A parameter that a plan updates, with what its tables were built from."""

    param: Tensor
    address: int
    state: dict[str, Any]
    tensors: tuple[tuple[str, Any], ...]
    dtype: torch.dtype
    stride: tuple[int, ...]


class SteadyStep:
    """What the latest step did, for as long as the next ones are the same.

    Args:
        batches: the plans that did all of it, each with its groups and its entries in the plan's order.

    Attributes:
        plans: the plans, with the groups whose hyperparameters they take.
    """

    def __init__(
        self,
        groups: Groups,
        state: State,
        batches: Sequence[tuple[MuonPlan, Groups, Sequence[MuonEntry]]],
    ) -> None:
        self._groups = list(groups)
        self._options = [_options_of(group) for group in groups]
        self._states = list(state.values())
        self.plans = [(plan, its_groups) for plan, its_groups, _ in batches]
        self._members = [[_member(entry) for entry in entries] for _, _, entries in batches]
        updated = {id(member.param) for members in self._members for member in members}
        self._skipped = [p for group in groups for p in group["params"] if id(p) not in updated]
        self._num_params = [len(group["params"]) for group in groups]

    def gradients(self, groups: Groups, state: State) -> list[list[Tensor]] | None:
        """Each plan's gradients, if nothing but them and hyperparameters has changed; else ``None``."""
        if any(group is not known for group, known in zip_longest(groups, self._groups)):
            return None
        if any(_options_of(group) != options for group, options in zip(groups, self._options)):
            return None
        if any(len(group["params"]) != number for group, number in zip(groups, self._num_params)):
            return None
        if any(values is not known for values, known in zip_longest(state.values(), self._states)):
            return None
        if any(p.grad is not None for p in self._skipped):
            return None
        found = []
        for members in self._members:
            grads = []
            for member in members:
                grad = member.param.grad
                if grad is None or grad.dtype != member.dtype or grad.stride() != member.stride:
                    return None
                if member.param.data_ptr() != member.address:
                    return None
                values = member.state
                for key, tensor in member.tensors:
                    if values.get(key) is not tensor:
                        return None
                grads.append(grad)
            found.append(grads)
        return found


def _member(entry: MuonEntry) -> _Member:
    tensors = tuple((key, value) for key, value in entry.state.items() if isinstance(value, Tensor))
    address = entry.param.data_ptr()
    return _Member(entry.param, address, entry.state, tensors, entry.grad.dtype, entry.grad.stride())


def _options_of(group: Mapping[str, Any]) -> list[Any]:
    return [group["beta2"] is None, *(group[key] for key in OPTIONS)]
