"""A state that nobody but its optimizer has had in hands: it is still as the last step left it.

Tables on the device hold the addresses of the tensors of a state, and a user may change any of these between two steps:
``state[key] = other``, ``tensor.data = other``. Only the tensors themselves tell, and to ask all of them is up to half
of what a step takes on the host. But whoever changes them has got them from ``optimizer.state``: as long as nobody has
read that, there is nothing to ask. ``state_dict()`` gives away other tensors over the same memory, and
``load_state_dict`` takes over such.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import is_, methodcaller
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optim_kernels._dtensors import is_dtensor, local
from optim_kernels._optimizers.base import StatefulOptimizer
from optim_kernels.functional._adamw_tensor import with_memory
from optim_kernels.multi_tensor import KnownPlaces

_to_local = methodcaller("to_local")


class Access:
    """Whether the state is the optimizer's alone.

    An object, and always the same, for wrappers of optimizers copy what these have as attributes, and give away the
    state in their place.
    """

    is_private = False


class KnownStates:
    """What states of parameters hold, and where it lies: to be asked about once somebody has read them."""

    def __init__(self, states: Iterable[Mapping[str, Any]]) -> None:
        # views of the states tell what these hold later
        self._contents = [state.values() for state in states]
        self._held = list(chain.from_iterable(self._contents))
        # what is here of a DTensor may become another tensor; steps are without gradients, where `to_local` gives that
        self._spread = [value for value in self._held if is_dtensor(value)]
        self._here = list(map(local, self._spread))
        self._stored = list(chain.from_iterable(map(with_memory, map(local, self._held))))
        self._places = KnownPlaces(self._stored)

    def are_unchanged(self) -> bool:
        """Whether they hold what they held, and that lies in memory where, and as, it did."""
        held = list(chain.from_iterable(self._contents))
        return (
            len(held) == len(self._held)
            and all(map(is_, held, self._held))
            and all(map(is_, map(_to_local, self._spread), self._here))
            and self._places.are_those_of(self._stored)
        )


class PrivateState(StatefulOptimizer):
    """An optimizer that knows whether anybody else has seen its state; itself it reads ``_own_state``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._access = Access()
        super().__init__(*args, **kwargs)
        self._access.is_private = True

    @property
    def state(self) -> Any:
        """The state of each parameter, as in torch; whoever has read this may change it at any time from then on."""
        if "state" not in self.__dict__:
            # wrappers that pretend to be of this class ask the optimizer itself then
            raise AttributeError(f"{type(self).__name__} has no state")
        self._access.is_private = False
        return self._own_state

    @state.setter
    def state(self, state: Any) -> None:
        self._access.is_private = False
        self.__dict__["state"] = state

    @property
    def _own_state(self) -> Any:
        return self.__dict__["state"]

    def _state_to_check(self) -> Any:
        """The state if somebody may have changed it since the last step, ``None`` if it is as that left it."""
        return None if self._access.is_private else self._own_state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._access = self.__dict__.get("_access", Access())
        super().__setstate__(state)
        # what this is made of may belong to another optimizer: copy.copy
        self._access.is_private = False

    def state_dict(self) -> dict[str, Any]:
        """As torch's, but with tensors of its own, which share the memory of the state's.

        Who wants to give that memory back for a while does it by way of ``state``.
        """
        is_private = False

        def before(_: Optimizer) -> None:
            nonlocal is_private
            is_private = self._access.is_private

        def after(_: Optimizer, content: dict[str, Any]) -> None:
            self._access.is_private = is_private
            content["state"] = {key: _aliases(state) for key, state in content["state"].items()}

        # torch reads the state between the two; hooks of the user's, who may read it too, come before and after
        with self.register_state_dict_pre_hook(before), self.register_state_dict_post_hook(after, prepend=True):
            return super().state_dict()

    def _put_back(self, loaded: dict[str, Any]) -> None:
        super()._put_back(loaded)
        # from here on all of it is new
        for _, param in self._parameters():
            if param in self._own_state:
                self._own_state[param] = _aliases(self._own_state[param])
        self._access.is_private = True


def _aliases(state: Any) -> Any:
    """The state of a parameter in other tensors that share its memory."""
    if isinstance(state, dict):
        return {key: _aliases(value) for key, value in state.items()}
    # a state with a graph (differentiable=True) is no kernel's
    return state.detach() if isinstance(state, Tensor) and not state.requires_grad else state
