"""What plain torch updates in an AdamW step, and whether it still fits its states when a step begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optim_kernels._impl import PLAIN_TYPES
from optim_kernels._optimizers.adamw_state import why_unfit_state
from optim_kernels._optimizers.fitting import refuse, why_not_written
from optim_kernels._optimizers.private_state import KnownStates
from optim_kernels._tensor_lists import KnownKinds

_PLAIN_TYPES = frozenset(PLAIN_TYPES)
Group = dict[str, Any]
State = dict[str, Any]


class TorchPart(NamedTuple):
    """A group, parameters of it that plain torch updates, none of them twice, and their numbers among all."""

    group: Group
    indices: list[int]
    params: list[Tensor]


class TorchStep(NamedTuple):
    """One step of a `TorchPart`, with its parameters' gradients and states."""

    group: Group
    indices: list[int]
    params: list[Tensor]
    grads: list[Tensor]
    states: list[State]


class TorchParts:
    """All that plain torch updates, part by part."""

    def __init__(self, parts: Sequence[TorchPart], states: Mapping[Tensor, State]) -> None:
        self._parts, self._states_of = parts, [[states[param] for param in part.params] for part in parts]
        self._groups = [group for group, _, params in parts for _ in params]
        self._indices = [index for part in parts for index in part.indices]
        self._params = [param for part in parts for param in part.params]
        self._states = list(chain.from_iterable(self._states_of))
        # a step reads their tensors anew, so it does not matter where they are; those of another kind it converts
        self.states = KnownStates(self._states, with_addresses=False)
        self._known_given = KnownKinds(with_shapes=True)
        # the kinds of parameters and gradients that were last found to fit each other, and the states
        self._fitting: list[Any] | None = None

    def __len__(self) -> int:
        return len(self._parts)

    def steps(self, grads: Sequence[Tensor | None]) -> list[TorchStep]:
        """A step of each part, with those of all gradients that are its own: its parameters all have one."""
        found = ([grad for index in part.indices if (grad := grads[index]) is not None] for part in self._parts)
        return [TorchStep(*part, own, states) for part, own, states in zip(self._parts, found, self._states_of)]

    def refuse_unfit(self, grads: list[Tensor | None], names: Callable[[], Mapping[Tensor, str]]) -> None:
        """Raise ``ValueError``, by name, for a parameter that plain torch cannot update.

        They are looked at only if parameters or gradients have other shapes, strides, dtypes or devices than in the
        step before; that states have not is for `states` to say.
        """
        if not self._parts:
            return
        own = [grads[index] for index in self._indices]
        given: list[Any] = [*self._params, *own]
        # what wraps tensors is asked about in every step, since its own shape need not be that of what is here
        kinds = self._known_given.of(given) if _PLAIN_TYPES.issuperset(map(type, given)) else None
        if kinds is not None and kinds is self._fitting:
            return
        for group, param, grad, state in zip(self._groups, self._params, own, self._states):
            assert grad is not None
            reason = why_unfit_state(param, grad, group, state) or why_not_written(param, state)
            if reason is not None:
                refuse(reason, names()[param])
        self._fitting = kinds

    def have_dense_gradients(self) -> bool:
        """Whether the parameters have gradients now, and dense ones."""
        grads = (param.grad for param in self._params)
        return all(grad is not None and grad.layout is torch.strided for grad in grads)
