"""What plain torch updates in an AdamW step, and whether it still fits its states when a step begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optim_kernels._impl import PLAIN_TYPES
from optim_kernels._optimizers.fitting import refuse
from optim_kernels.multi_tensor import KnownKinds

_PLAIN_TYPES = frozenset(PLAIN_TYPES)
Group = dict[str, Any]
State = dict[str, Any]


class TorchPart(NamedTuple):
    """A group, parameters of it that plain torch updates, none of them twice, and their numbers among all."""

    group: Group
    indices: list[int]
    params: list[Tensor]


class TorchParts:
    """All that plain torch updates, part by part."""

    def __init__(self, parts: Sequence[TorchPart], states: Mapping[Tensor, State]) -> None:
        self._parts = parts
        self._states = [states[param] for part in parts for param in part.params]
        # They may move in memory; but another tensor in the place of one may need to be converted, or followed. None is
        # kept alive, so another one may get the id of one that is gone; if it is of the same kind, it does as well.
        self._contents = [state.values() for state in self._states]
        held = self._held()
        self._ids, self._own_kinds = list(map(id, held)), KnownKinds(with_shapes=True)
        self._kinds_held = _kinds_of(held, self._own_kinds)
        self._known_kinds = KnownKinds(with_shapes=True)
        # the kinds of tensors that were last found to fit each other
        self._fitting: list[Any] | None = None

    def __iter__(self) -> Iterator[TorchPart]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def hold_the_same(self) -> bool:
        """Whether the states hold the same objects as before."""
        held = self._held()
        return list(map(id, held)) == self._ids and _kinds_of(held, self._own_kinds) == self._kinds_held

    def refuse_unfit(
        self,
        grads: list[Tensor | None],
        why_unfit: Callable[[Tensor, Tensor, Group, State], str | None],
        names: Callable[[], Mapping[Tensor, str]],
    ) -> None:
        """Raise ``ValueError``, by name, for a parameter that plain torch cannot update.

        Args:
            why_unfit: what is wrong with a parameter, its gradient and its state in a group; asked only if these are of
                other shapes, strides, dtypes or devices than in the step before.
        """
        if not self._parts:
            return
        own = [(group, param, grads[index]) for group, *both in self._parts for index, param in zip(*both)]
        tensors = [*(param for _, param, _ in own), *(grad for *_, grad in own), *self._held()]
        kinds = _kinds_of(tensors, self._known_kinds)
        if kinds is not None and kinds is self._fitting:
            return
        for (group, param, grad), state in zip(own, self._states):
            assert grad is not None
            reason = why_unfit(param, grad, group, state)
            if reason is not None:
                refuse(reason, names()[param])
        self._fitting = kinds

    def have_dense_gradients(self) -> bool:
        """Whether the parameters have gradients now, and dense ones."""
        grads = (param.grad for part in self._parts for param in part.params)
        return all(grad is not None and grad.layout is torch.strided for grad in grads)

    def _held(self) -> list[Any]:
        return list(chain.from_iterable(self._contents))


def _kinds_of(values: list[Any], known: KnownKinds) -> list[Any] | None:
    """The kinds of the tensors among these, the same object as long as they stay; ``None`` for unusual classes."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return known.of(tensors) if set(map(type, tensors)) <= _PLAIN_TYPES else None
