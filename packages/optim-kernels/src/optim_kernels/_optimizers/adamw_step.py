"""The kernels' part of an AdamW step of an optimizer: parameters of all its groups, planned once, one launch a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from optim_kernels._dtensors import is_dtensor, local
from optim_kernels._optimizers.adamw_options import check_adamw_scalars
from optim_kernels._optimizers.adamw_parts import Group, State, TorchPart, TorchParts
from optim_kernels._optimizers.followed_writes import can_be_followed
from optim_kernels._optimizers.private_state import KnownStates
from optim_kernels._optimizers.storage import master_of
from optim_kernels._options import check_scalar_tensors
from optim_kernels._tensor_lists import KnownAddresses, KnownKinds, TensorList
from optim_kernels.functional.adamw_plan import AdamWPlan
from optim_kernels.reference.adamw import AdamWScalars


class AdamWStep:
    """A plan over given parameters, their states and their groups' hyperparameters.

    Args:
        groups: all groups of the optimizer.
        params, states, grads: what is updated.
        members: for each parameter the number of its group.
        places: for each its number among all parameters of the optimizer: the key of its random bits, with the group's
            seed.
        starts: for parts of parameters the element at which each begins, from which its random bits are counted.
        names: of the parameters, for errors.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        params: list[Tensor],
        states: list[State],
        grads: Sequence[Tensor | None],
        *,
        members: Sequence[int],
        places: Sequence[int],
        starts: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.plan = AdamWPlan()
        self._params = params
        # the plan's tables hold the addresses of the tensors in them
        self.states = KnownStates(states)
        self.has_dtensors = any(map(is_dtensor, params))
        self._kinds = KnownKinds()
        self._grad_dtypes = [grad.dtype for grad in grads if grad is not None]
        self._addresses = KnownAddresses(self._here(params))
        own_groups = [groups[number] for number in members]
        self.plan.prepare(
            [local(param) for param in params],
            [local(grad) for grad in grads],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            steps=[state["step"] for state in states],
            max_exp_avg_sqs=[
                local(state["max_exp_avg_sq"]) if group.get("amsgrad") else None
                for group, state in zip(own_groups, states)
            ],
            masters=[local(master_of(state)) for state in states],
            groups=members,
            stochastic_rounding=[bool(group.get("stochastic_rounding")) for group in own_groups],
            seed=[group.get("seed", 0) for group in own_groups],
            indices=places,
            starts=starts,
            names=names,
        )
        # `states` knows them without keeping them
        self.plan.let_go()

    def is_for(self, params: list[Tensor]) -> bool:
        """Whether these parameters have the addresses and kinds that the plan has."""
        return self._addresses.are_those_of(self._here(params))

    def look_at(self, grads: list[Tensor]) -> TensorList:
        """This step's gradients, as both the norm and the update take them."""
        return TensorList(self._here(grads), self._kinds)

    def _here(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(map(local, tensors)) if self.has_dtensors else tensors

    def fits(self, grads: TensorList) -> bool:
        """Whether these gradients are of the dtypes that the plan is for."""
        return bool(grads.kinds[0] == self._grad_dtypes)

    def run(
        self,
        groups: Sequence[Group],
        grads: TensorList,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        clip_factor: Tensor | None = None,
    ) -> None:
        """One step, with the hyperparameters that the groups have now."""
        self.get_ready(groups, grads, grad_scale=grad_scale, found_inf=found_inf, clip_factor=clip_factor)
        self.launch()

    def get_ready(
        self,
        groups: Sequence[Group],
        grads: TensorList,
        *,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        clip_factor: Tensor | None,
    ) -> None:
        """The part of ``run`` that may raise, before anything is launched."""
        check_scalar_tensors(grad_scale=grad_scale, found_inf=found_inf, clip_factor=clip_factor)
        try:
            scalars = [
                AdamWScalars(
                    group["lr"], beta1, beta2, group["eps"], group["weight_decay"], group.get("maximize", False)
                )
                for group in groups
                for beta1, beta2 in [group["betas"]]
            ]
            self.plan.get_ready(grads, scalars, grad_scale=grad_scale, found_inf=found_inf, clip_factor=clip_factor)
        except (TypeError, ValueError):
            # find the group whose betas are no pair, or a number that is none, by the options' own names
            for group in groups:
                check_adamw_scalars(group)
            raise

    def launch(self) -> None:
        """The rest of ``run``: the launches."""
        self.plan.run()
        self.count_as_written()

    def count_as_written(self) -> None:
        """Tell autograd of the step: it then refuses to differentiate through the overwritten values."""
        torch.autograd.graph.increment_version(self._params)


class PreparedStep:
    """What a step needs that depends on which parameters have gradients, and on where they and their states are.

    Args:
        params, grads: of all groups, one after another.
        indices: of those ``params`` that the kernels update; plain torch updates the others with gradients.
        options: returns those options of a group on which the prepared step depends.
        names: of all parameters, for errors.

    Attributes:
        with_torch: what plain torch updates.
        followed: the parameters with gradients that have an fp32 master and can be followed.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        params: list[Tensor],
        grads: list[Tensor | None],
        states: Mapping[Tensor, State],
        indices: list[int],
        *,
        options: Callable[[Group], Any],
        names: Mapping[Tensor, str],
    ) -> None:
        group_numbers = [number for number, group in enumerate(groups) for _ in group["params"]]
        self.kernels: AdamWStep | None = None
        if indices:
            chosen = [params[index] for index in indices]
            self.kernels = AdamWStep(
                groups,
                chosen,
                [states[param] for param in chosen],
                [grads[index] for index in indices],
                members=[group_numbers[index] for index in indices],
                places=indices,
                names=[names[param] for param in chosen],
            )
        with_kernels = set(indices)
        # A parameter that is twice in a group is updated twice, as by torch: the second time in another part, since a
        # part advances each count once.
        times: Counter[Tensor] = Counter()
        parts: dict[tuple[int, int], TorchPart] = {}
        for index, (number, param, grad) in enumerate(zip(group_numbers, params, grads)):
            if grad is not None and index not in with_kernels:
                part = parts.setdefault((number, times[param]), TorchPart(groups[number], [], []))
                times[param] += 1
                part.indices.append(index)
                part.params.append(param)
        self.with_torch = TorchParts(list(parts.values()), states)
        followed = [p for p, grad in zip(params, grads) if grad is not None and "master" in states[p]]
        self.followed = [*filter(can_be_followed, followed)]
        self._followed_states = [states[p] for p in self.followed]
        self._groups, self._sizes = list(groups), [len(group["params"]) for group in groups]
        self._of_group, self._options = options, list(map(options, groups))
        self._params, self._keys, self._states = params, list(states), list(states.values())
        self._types = list(map(type, grads))
        self._kernel_indices = None if len(indices) == len(grads) else indices

    def is_for(
        self,
        groups: Sequence[Group],
        params: list[Tensor],
        grads: list[Tensor | None],
        states: Mapping[Tensor, State] | None,
    ) -> bool:
        """Whether the same parameters of these groups have gradients, at the same addresses, and the same states.

        The user may replace groups, their options, parameters and states between steps, as with torch's optimizers.

        Args:
            states: ``None`` if nobody can have changed them.
        """
        try:
            return (
                list(map(type, grads)) == self._types
                and [len(group["params"]) for group in groups] == self._sizes
                and all(map(is_, groups, self._groups))
                and list(map(self._of_group, groups)) == self._options
                and all(map(is_, params, self._params))
                and (self.kernels is None or self.kernels.is_for(self._of_kernels(params)))
                and (states is None or self._has(states))
            )
        except (RuntimeError, ValueError):  # an option is an array or tensor now, which cannot be compared
            return False

    def _has(self, states: Mapping[Tensor, State]) -> bool:
        return (
            len(states) == len(self._states)
            and all(map(is_, states, self._keys))
            and all(map(is_, states.values(), self._states))
            and (not self.with_torch or self.with_torch.states.are_unchanged())
            and (self.kernels is None or self.kernels.states.are_unchanged())
        )

    @property
    def masters(self) -> list[Tensor]:
        """The masters of the followed parameters."""
        return [state["master"] for state in self._followed_states]

    def look_at(self, grads: list[Tensor | None]) -> TensorList:
        """The gradients of the parameters that the kernels update."""
        return TensorList([]) if self.kernels is None else self.kernels.look_at(self._of_kernels(grads))

    def fits(self, seen: TensorList) -> bool:
        """Whether the kernels, if any, are planned for gradients of these dtypes."""
        return self.kernels is None or self.kernels.fits(seen)

    def _of_kernels(self, tensors: list[Any]) -> list[Any]:
        return tensors if self._kernel_indices is None else [tensors[index] for index in self._kernel_indices]
