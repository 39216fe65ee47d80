"""Per-parameter multipliers of a group's learning rate and weight decay.

    learning rate of p   group lr · p.lr_mul
    weight decay of p    group weight_decay · p.wd_mul          both 1 where p has no such attribute

They are read before every step, as a group's own hyperparameters are. A learning rate that is a tensor is multiplied on
its device into memory that stays the same: plans and captured graphs that hold its address stay valid, and a replayed
graph multiplies the tensor's value of that time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from optim_dist._optimizers.entries import Entry

# the attribute of a parameter: the hyperparameter of its group that it multiplies
ATTRIBUTES: Mapping[str, str] = {"lr_mul": "lr", "wd_mul": "weight_decay"}

Pair = tuple[float, float]  # lr_mul, wd_mul


def multipliers_of(parameter: Tensor) -> Pair:
    """The parameter's multipliers, 1 where it has none."""
    return getattr(parameter, "lr_mul", 1.0), getattr(parameter, "wd_mul", 1.0)


def multiplier_faults(name: str, parameter: Tensor) -> list[str]:
    """What is wrong with the parameter's multipliers; empty if nothing is."""
    return [
        f"{name}: its {key} is {value!r}; give it a number of at least 0, or delete the attribute"
        for key, value in zip(ATTRIBUTES, multipliers_of(parameter))
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < math.inf
    ]


def given_multipliers(entries: Iterable[Entry]) -> dict[str, Pair]:
    """Multipliers keyed by parameter name, of parameters with one that is not 1."""
    found = {entry.name: multipliers_of(entry.parameter) for entry in entries}
    return {name: (float(lr), float(wd)) for name, (lr, wd) in found.items() if (lr, wd) != (1, 1)}


class ScaledGroups:
    """The groups of one optimizer as parameters with multipliers see them."""

    def __init__(self) -> None:
        self._pairs: list[Pair] = []
        self._of_entry: dict[int, Pair] = {}  # keyed by plan index, where one is not 1
        # the same objects in every step, so that what was planned for a group stays valid
        self._groups: dict[tuple[int, Pair], dict[str, Any]] = {}
        self._products: dict[tuple[int, Pair, str], Tensor] = {}

    def follow(self, entries: Sequence[Entry]) -> None:
        """Read every parameter's multipliers.

        Raises:
            ValueError: naming multipliers that are no valid numbers by now, before anything has changed.
        """
        # `multipliers_of` inlined, to save a call for each parameter
        pairs = [(getattr(p, "lr_mul", 1.0), getattr(p, "wd_mul", 1.0)) for p in [e.parameter for e in entries]]
        if pairs == self._pairs:
            return
        if faults := [fault for e in entries for fault in multiplier_faults(e.name, e.parameter)]:
            raise ValueError("multipliers that cannot be followed:\n  " + "\n  ".join(faults))
        self._pairs = pairs
        self._of_entry = {i: (float(lr), float(wd)) for i, (lr, wd) in enumerate(pairs) if (lr, wd) != (1, 1)}
        wanted = {(entries[index].group, pair) for index, pair in self._of_entry.items()}
        self._groups = {key: self._groups.get(key, {}) for key in sorted(wanted)}
        self._products = {key: value for key, value in self._products.items() if key[:2] in wanted}

    @property
    def multipliers(self) -> object:
        """An object that is replaced by another when ``follow`` finds other multipliers."""
        return self._pairs

    def refresh(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over the groups' present hyperparameters; once a step."""
        for key, scaled in self._groups.items():
            number, pair = key
            scaled.clear()
            scaled.update(groups[number])
            for name, factor in zip(ATTRIBUTES.values(), pair):
                scaled[name] = self._times((*key, name), scaled[name], factor)

    def of(self, index: int, number: int, group: dict[str, Any]) -> dict[str, Any]:
        """``group``, whose number is ``number``, as parameter ``index`` of the plan sees it: with its multipliers."""
        pair = self._of_entry.get(index)
        return group if pair is None else self._groups[number, pair]

    def _times(self, key: tuple[int, Pair, str], value: float | Tensor, factor: float) -> float | Tensor:
        if factor == 1:
            return value
        if not isinstance(value, Tensor):
            return value * factor
        product, dtype = self._products.get(key), torch.result_type(value, factor)
        if product is None or (product.dtype, product.device) != (dtype, value.device):
            product = self._products[key] = torch.empty_like(value.detach(), dtype=dtype)
        return torch.mul(value.detach(), factor, out=product)
