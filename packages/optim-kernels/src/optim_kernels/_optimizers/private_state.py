"""Optimizers that know whether their state is private: if nobody else has read it, it is as the last step left it.

Tables on the device hold the addresses of a state's tensors, and a user may change any of these tensors between two
steps: ``state[key] = other``, ``tensor.data = other``. Finding that out means checking all tensors, which takes up to
half of a step's time on the host. But a user gets the tensors from ``optimizer.state`` alone: as long as nobody has
read that, nothing has to be checked. ``state_dict()`` hands out other tensors over the same memory, and
``load_state_dict`` stores such tensors too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from itertools import chain
from threading import RLock
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from optim_kernels._dtensors import local
from optim_kernels._impl import PLAIN_TYPES
from optim_kernels._optimizers.base import Change, StatefulOptimizer
from optim_kernels._tensor_lists import KnownKinds
from optim_kernels.functional._adamw_tensor import with_memory

T = TypeVar("T")


class Shared:
    """What wrappers of an optimizer share with it, although they copy its attributes: an object that is never replaced.

    Attributes:
        owner: returns that optimizer; a copy has none.
        is_private: whether only the optimizer has read its state, which wrappers hand out, too.
        saving: held while a state dict is made by hooks, which torch goes through and another thread would change.
        grad_norm: of the latest step that clipped by it.
    """

    is_private = False
    grad_norm: Tensor | None = None

    def __init__(self, owner: PrivateState | None = None) -> None:
        self.saving = RLock()
        self.owner: Callable[[], PrivateState | None] = (lambda: None) if owner is None else ref(owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return Shared, ()


def of_its_own(method: Callable[[Any], T]) -> Callable[[Any], T]:
    """A method that the optimizer answers itself where a wrapper is asked, whose copies of attributes may be old."""

    @wraps(method)
    def call(self: PrivateState) -> T:
        # the owner of what `self` shares is `self`, or an optimizer whose class `self` pretends to be of
        return method(self._shared.owner() or self)

    return call


class KnownStates:
    """What states hold under which keys, to be compared once somebody has read them.

    No tensor is kept alive: programs move states to the host between steps, to have their memory meanwhile. So this
    looks at keys, addresses and kinds, which are all that launches know, not at which objects they are of.

    Args:
        with_addresses: whether alike tensors in other memory are others. To a step that reads them anew they are not.
    """

    def __init__(self, states: Iterable[Mapping[str, Any]], *, with_addresses: bool = True) -> None:
        self._states, self._with_addresses = list(states), with_addresses
        # live views, which show what the states hold later
        self._contents = [state.values() for state in self._states]
        values = self._values()
        self._are_plain = all(type(value) in PLAIN_TYPES and value.layout is torch.strided for value in values)
        self._known_kinds = KnownKinds(with_shapes=True)
        self._keys, self._seen = self._own_keys(), self._look_at(values)

    def are_unchanged(self) -> bool:
        """Whether the states hold tensors of the same kinds, at the same addresses, under the same keys as before."""
        try:
            return self._own_keys() == self._keys and self._look_at(self._values()) == self._seen
        except (RuntimeError, TypeError):  # what has become sparse, or is no tensor any more, has no address
            return False

    def _own_keys(self) -> list[str]:
        return list(chain.from_iterable(self._states))

    def _values(self) -> list[Any]:
        return list(chain.from_iterable(self._contents))

    def _look_at(self, values: list[Any]) -> tuple[list[Any], list[Any]]:
        """Addresses, or else types, and the kinds of what has memory: a DTensor's local part, codes and scales."""
        stored = values if self._are_plain else list(chain.from_iterable(map(with_memory, map(local, values))))
        first = map(Tensor.data_ptr, stored) if self._with_addresses else map(type, values)
        return list(first), self._known_kinds.of(stored)


class PrivateState(StatefulOptimizer):
    """An optimizer that knows whether anybody else has read its state; its own code reads ``_own_state``."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._shared = Shared(self)
        super().__init__(*args, **kwargs)
        self._shared.is_private = True

    @property
    def state(self) -> Any:
        """The state of each parameter, as in torch; whoever has read this may change it at any time from then on."""
        state = self._own_state
        self._shared.is_private = False
        return state

    @state.setter
    def state(self, state: object) -> None:
        self._shared.is_private = False
        self.__dict__["state"] = state

    def _state_to_check(self) -> Any:
        """The state if somebody may have changed it since the last step, ``None`` if it is as that step left it."""
        return None if self._shared.is_private else self._own_state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_shared" not in self.__dict__:
            self._shared = Shared(self)
        super().__setstate__(state)
        # after copy.copy the state belongs to another optimizer too
        self._shared.is_private = False

    def state_dict(self) -> dict[str, Any]:
        """A state dict as torch's, but with other tensor objects, which share the memory of the state's tensors.

        Masters of parameters that others have written to are copies that have followed them.

        To free that memory for a while, go by way of ``state``.
        """
        return self._state_dict()

    def _state_dict(self, *changes: Change) -> dict[str, Any]:
        is_private = False

        def before(_: Optimizer) -> None:
            nonlocal is_private
            is_private = self._shared.is_private

        def after(_: Optimizer, content: dict[str, Any]) -> None:
            self._shared.is_private = is_private
            content["state"] = {key: _aliases(state) for key, state in content["state"].items()}

        # torch reads the state between these two hooks; the user's hooks, which may read it too, run before and after
        with self._shared.saving, self.register_state_dict_pre_hook(before):
            return super()._state_dict(after, *changes)

    def _put_back(self, loaded: dict[str, Any]) -> None:
        super()._put_back(loaded)
        # from here on all tensor objects are new, so nobody else has them
        for _, param in self._parameters():
            if param in self._own_state:
                self._own_state[param] = _aliases(self._own_state[param])
        self._shared.is_private = True


def _aliases(state: object) -> Any:
    """The state of a parameter in other tensors that share its memory."""
    if isinstance(state, dict):
        return {key: _aliases(value) for key, value in state.items()}
    # a state with an autograd graph (differentiable=True) is never read by kernels
    return state.detach() if isinstance(state, Tensor) and not state.requires_grad else state
