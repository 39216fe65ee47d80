"""Recognise a step like the one before, by looking at no more than that takes.

From step to step a training loop changes gradients and hyperparameters. Everything else that decides what the plans do
(options, which parameters have gradients, the tensors of parameters and state) is compared here with what it was, by
identity where that is enough. It costs a fraction of a microsecond a parameter; sorting parameters anew costs ten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from optim_kernels._optimizers.muon_entries import MuonEntry
from optim_kernels._optimizers.muon_options import DEFAULTS, HYPERPARAMETERS
from optim_kernels._optimizers.private_state import KnownStates
from optim_kernels._tensor_lists import KnownAddresses, KnownKinds

if TYPE_CHECKING:
    from optim_kernels.functional._muon_batch_plan import MuonBatchPlan

_options = itemgetter(*(key for key in DEFAULTS if key not in HYPERPARAMETERS))
_grad = attrgetter("grad")

Groups = Sequence[Mapping[str, Any]]
State = Mapping[Tensor, dict[str, Any]]


class KnownOptions:
    """The options of groups but for hyperparameters, to tell whether the same groups still have them."""

    def __init__(self, groups: Groups) -> None:
        self._groups = list(groups)
        self._options = [tuple(map(_kept, _options_of(group))) for group in groups]

    def are_unchanged(self) -> bool:
        """Whether the groups still have these options."""
        try:
            return list(map(_options_of, self._groups)) == self._options
        except (RuntimeError, ValueError):  # one is an array or tensor now, which cannot be compared
            return False


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
        batches: Sequence[tuple[MuonBatchPlan, Groups, Sequence[MuonEntry]]],
    ) -> None:
        self._groups = list(groups)
        self._options = KnownOptions(groups)
        self._states = list(state.values())
        self._held = KnownStates(state[entry.param] for _, _, entries in batches for entry in entries)
        self.plans = [(plan, its_groups) for plan, its_groups, _ in batches]
        self._updated = [_Updated(entries) for _, _, entries in batches]
        updated = {id(entry.param) for _, _, entries in batches for entry in entries}
        self._skipped = [p for group in groups for p in group["params"] if id(p) not in updated]
        # once one is unfrozen, the group's ``missing_grad`` applies to it
        self._frozen = [p for p in self._skipped if not p.requires_grad]
        self._params = [list(group["params"]) for group in groups]

    def gradients(self, groups: Groups, state: State | None) -> list[list[Tensor]] | None:
        """Each plan's gradients, if nothing but gradients and hyperparameters has changed; else ``None``.

        Args:
            state: ``None`` if nobody can have changed it.
        """
        if len(groups) != len(self._groups) or not all(map(is_, groups, self._groups)):
            return None
        if not self._options.are_unchanged():
            return None
        for group, params in zip(groups, self._params):
            if len(group["params"]) != len(params) or not all(map(is_, group["params"], params)):
                return None
        if any(p.grad is not None for p in self._skipped) or any(p.requires_grad for p in self._frozen):
            return None
        if state is not None and not self._has_its(state):
            return None
        found = []
        for updated in self._updated:
            grads = updated.gradients()
            if grads is None:
                return None
            found.append(grads)
        return found

    def _has_its(self, state: State) -> bool:
        """Whether ``state`` has the same dicts as then, and they hold the same tensors."""
        return (
            len(state) == len(self._states)
            and all(map(is_, state.values(), self._states))
            and self._held.are_unchanged()
        )


class _Updated:
    """The parameters of one plan, in its order, with what its tables were built from."""

    def __init__(self, entries: Sequence[MuonEntry]) -> None:
        self._params, grads = [entry.param for entry in entries], [entry.grad for entry in entries]
        self._addresses = KnownAddresses(self._params)
        self._types = list(map(type, grads))
        self._known = KnownKinds(with_shapes=True)
        self._kinds = self._known.of(grads)

    def gradients(self) -> list[Tensor] | None:
        """The parameters' gradients, if these have the layout of before and the parameters have not moved."""
        given = list(map(_grad, self._params))
        # types first: there may be no gradient, and wrappers may refuse to say how they are laid out
        if list(map(type, given)) != self._types or self._known.of(given) != self._kinds:
            return None
        return given if self._addresses.are_those_of(self._params) else None


def _options_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return (group["beta2"] is None, *_options(group))


def _kept(value: Any) -> Any:
    """The option with its lists copied, because the user may write to them."""
    return type(value)(map(_kept, value)) if type(value) in (list, tuple) else value
