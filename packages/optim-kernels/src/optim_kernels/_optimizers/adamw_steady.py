"""Take an AdamW step that launches what the one before did, by looking at no more than that takes.

From step to step a training loop changes gradients, and often a learning rate. Whatever else decides what kernels are
given is compared with what it was; if any of it differs, the step takes the long way, by `adamw_step.prepared_for`,
which finds out what has become of it, or what is wrong with it. What counts here is how much is called, since the host
has to bring all of that into its caches in each step, which takes it longer than the comparisons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch import Tensor

from optim_kernels._gradient_norm import GradientNorms
from optim_kernels._optimizers.adamw_parts import Group, State
from optim_kernels._optimizers.adamw_step import PreparedStep
from optim_kernels._optimizers.followed_writes import FollowedWrites
from optim_kernels._options import are_numbers
from optim_kernels._tensor_lists import TensorList
from optim_kernels.reference.adamw import AdamWScalars

_params, _grad = itemgetter("params"), attrgetter("grad")
_clipping = itemgetter("max_norm", "norm_type")
_numbers = itemgetter("lr", "betas", "eps", "weight_decay", "maximize")


class SteadyStep:
    """What a step launched, for as long as the next ones launch the same.

    Args:
        prepared: the step, all of it by kernels, on tensors that are no DTensors.
        seen: its gradients.
        norms, writes: the optimizer's own.
        factor: which the norm has left for the kernels, where the groups clip by one.

    Attributes:
        norm: of the gradients of the latest step, where the groups clip by it.
    """

    norm: Tensor | None = None
    # the hyperparameters that the kernels are ready for; ``None`` if that is not known
    _numbers: list[tuple[Any, ...]] | None = None

    def __init__(
        self,
        groups: Sequence[Group],
        prepared: PreparedStep,
        seen: TensorList,
        *,
        norms: GradientNorms,
        writes: FollowedWrites,
        factor: Tensor | None,
    ) -> None:
        assert prepared.kernels is not None
        self._prepared, self._kernels = prepared, prepared.kernels
        self._norms, self._writes = norms, writes
        self._clipping = list(chain.from_iterable(map(_clipping, groups)))
        self._note(groups, seen, factor)

    def _note(self, groups: Sequence[Group], seen: TensorList, factor: Tensor | None) -> None:
        """Take note of what the kernels are ready for."""
        plan, numbers = self._kernels.plan, list(map(_numbers, groups))
        # of the gradients no more, or their memory would stay taken
        self._addresses, self._kinds, self._factor = seen.addresses, seen.kinds, factor
        self._launches = plan.launches_again()
        self._numbers = numbers if _are_fixed(numbers) and not plan.num_copied else None

    def take(self, groups: Sequence[Group], states: Mapping[Tensor, State] | None) -> bool:
        """Take the step if it is like the one before; else return False, with nothing done.

        Args:
            states: ``None`` if nobody can have changed them.
        """
        prepared = self._prepared
        params = list(chain.from_iterable(map(_params, groups)))
        grads = list(map(_grad, params))
        if not prepared.is_for(groups, params, grads, states):
            return False
        if not all(map(is_, chain.from_iterable(map(_clipping, groups)), self._clipping)):
            return False
        try:
            seen = prepared.look_at(grads)
        except RuntimeError:  # a gradient that has become sparse has no address
            return False
        if seen.kinds is not self._kinds:
            return False
        factor = None
        max_norm, norm_type = self._clipping[:2]
        if max_norm is not None:
            self.norm, factor = self._norms.norm_and_factor(seen, norm_type, max_norm)
        if prepared.followed:
            self._writes.follow(prepared.followed, prepared.followed, prepared.masters)
        self._get_ready(groups, seen, factor)
        for launch in self._launches:
            launch()
        self._kernels.count_as_written()
        if prepared.followed:
            self._writes.note_step(prepared.followed)
        return True

    def _get_ready(self, groups: Sequence[Group], seen: TensorList, factor: Tensor | None) -> None:
        """Give the kernels what has changed of hyperparameters, gradients' addresses and the clip factor's."""
        plan, numbers, known = self._kernels.plan, list(map(_numbers, groups)), self._numbers
        are_alike = (
            known is not None
            and plan.launches_again() is self._launches
            and seen.addresses == self._addresses
            and factor is self._factor
        )
        if are_alike and all(map(is_, chain.from_iterable(numbers), chain.from_iterable(known or ()))):
            return
        # forget the old ones first: what fails midway, or is interrupted, may leave the kernels ready for either
        self._numbers = None
        if are_alike and _are_fixed(numbers):
            plan.renumber([AdamWScalars(lr, *betas, *others) for lr, betas, *others in numbers])
            self._launches = plan.launches_again()
            self._numbers = numbers
        else:
            self._kernels.get_ready(groups, seen, grad_scale=None, found_inf=None, clip_factor=factor)
            self._note(groups, seen, factor)


def _are_fixed(numbers: list[tuple[Any, ...]]) -> bool:
    """Whether groups' hyperparameters stay as they are while they are the same objects, unlike a list or a tensor."""
    return all(
        type(betas) is tuple and len(betas) == 2 and are_numbers((lr, *betas, *others))
        for lr, betas, *others in numbers
    )
