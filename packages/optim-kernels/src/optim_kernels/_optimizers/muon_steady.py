"""A step like the one before: what has to be looked at to know that, and no more.

From step to step a training loop changes gradients and hyperparameters. Everything else that decides what the plans do
(options, which parameters have gradients, the tensors of parameters and state) is compared here with what it was, by
identity where that is enough. It costs a fraction of a microsecond a parameter, where sorting them anew costs ten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor

from optim_kernels._optimizers.muon_entries import MuonEntry
from optim_kernels._optimizers.muon_groups import DEFAULTS

if TYPE_CHECKING:
    from optim_kernels.functional.muon_plan import MuonPlan

# Read anew in every step; beta2 only as long as it stays None, or stays a number.
HYPERPARAMETERS = ("lr", "weight_decay", "momentum", "beta2")
OPTIONS = tuple(key for key in DEFAULTS if key not in HYPERPARAMETERS)

Groups = Sequence[Mapping[str, Any]]
State = Mapping[Tensor, dict[str, Any]]


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
        self._options = [list(map(_kept, _options_of(group))) for group in groups]
        self._states = list(state.values())
        self.plans = [(plan, its_groups) for plan, its_groups, _ in batches]
        self._updated = [_Updated(entries) for _, _, entries in batches]
        updated = {id(entry.param) for _, _, entries in batches for entry in entries}
        self._skipped = [p for group in groups for p in group["params"] if id(p) not in updated]
        # what a group does about a missing gradient it does once they are unfrozen
        self._frozen = [p for p in self._skipped if not p.requires_grad]
        self._params = [list(group["params"]) for group in groups]

    def gradients(self, groups: Groups, state: State) -> list[list[Tensor]] | None:
        """Each plan's gradients, if nothing but them and hyperparameters has changed; else ``None``."""
        if any(group is not known for group, known in zip_longest(groups, self._groups)):
            return None
        if any(_options_of(group) != options for group, options in zip(groups, self._options)):
            return None
        for group, params in zip(groups, self._params):
            if len(group["params"]) != len(params) or not all(map(is_, group["params"], params)):
                return None
        if any(p.grad is not None for p in self._skipped) or any(p.requires_grad for p in self._frozen):
            return None
        if len(state) != len(self._states) or not all(map(is_, state.values(), self._states)):
            return None
        found = []
        for updated in self._updated:
            grads = updated.gradients()
            if grads is None:
                return None
            found.append(grads)
        return found


class _Updated:
    """The parameters of one plan, in its order, with what its tables were built from."""

    def __init__(self, entries: Sequence[MuonEntry]) -> None:
        self._params = [entry.param for entry in entries]
        self._addresses = [p.data_ptr() for p in self._params]
        # ``p.data = p.data.t()`` and ``p.data = p.data[:4]`` leave the address
        self._shapes, self._layouts = list(map(_size, self._params)), list(map(_stride, self._params))
        self._types = [type(entry.grad) for entry in entries]
        self._dtypes = [entry.grad.dtype for entry in entries]
        # where all are contiguous, that is asked for instead: their shapes are the parameters', and it costs less
        self._contiguous = all(entry.grad.is_contiguous() for entry in entries)
        self._strides = [entry.grad.stride() for entry in entries]
        held = [(entry.state, key) for entry in entries for key in entry.state if isinstance(entry.state[key], Tensor)]
        self._states, self._keys = [values for values, _ in held], [key for _, key in held]
        self._tensors = [values[key] for values, key in held]
        self._places = list(map(_data_ptr, self._tensors))

    def gradients(self) -> list[Tensor] | None:
        """Their gradients, if those have the known layouts and all else is as it was."""
        given = [grad for p in self._params if (grad := p.grad) is not None]
        if list(map(type, given)) != self._types or [grad.dtype for grad in given] != self._dtypes:
            return None
        if any(map(_is_neg, given)):
            return None
        if not (all(map(_is_contiguous, given)) if self._contiguous else list(map(_stride, given)) == self._strides):
            return None
        if list(map(_data_ptr, self._params)) != self._addresses:
            return None
        if list(map(_size, self._params)) != self._shapes or list(map(_stride, self._params)) != self._layouts:
            return None
        if not all(map(is_, map(dict.get, self._states, self._keys), self._tensors)):
            return None
        # their ``.data`` may have been replaced
        if list(map(_data_ptr, self._tensors)) != self._places:
            return None
        return given


_data_ptr, _is_contiguous, _size, _stride = Tensor.data_ptr, Tensor.is_contiguous, Tensor.size, Tensor.stride
_is_neg = Tensor.is_neg


def _options_of(group: Mapping[str, Any]) -> list[Any]:
    return [group["beta2"] is None, *(group[key] for key in OPTIONS)]


def _kept(value: Any) -> Any:
    """The option as it is now: the user may write to a list."""
    return type(value)(map(_kept, value)) if type(value) in (list, tuple) else value
