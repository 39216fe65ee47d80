"""Objects that load themselves: each is tried on a copy first, so that a refusal comes before anything is written.

What an overridden ``load_state_dict`` does is unknown: it may rename old entries, or keep another form of state. So
what fits is not guessed from the object's attributes; instead the method is called with a copy of the object and of its
state.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from optim_utils._state.load_report import LoadReport, StateLoadError
from optim_utils._state.paths import Path, encode_path
from optim_utils._state.tensor_fill import is_expanded, storage_key
from optim_utils._state.walk import SEQUENCES, Stateful, is_never_stored, items_of, rebuild, set_attribute
from optim_utils.low_bit import LowBitTensor

# while an object loads itself as a part of an outer load: the list for its reports, which the outer load judges
_REPORTS: ContextVar[list[LoadReport] | None] = ContextVar("reports", default=None)


def hand_over(report: LoadReport) -> bool:
    """Give ``report`` to the load that this one is a part of; return False if there is no such load."""
    reports = _REPORTS.get()
    if reports is None:
        return False
    reports.append(report)
    return True


@dataclass(frozen=True)
class OwnLoad:
    """A load of ``loaded`` into ``live``, at ``path`` of the whole, by the object's own method."""

    live: Stateful
    loaded: Mapping[Any, Any]
    path: Path

    def rehearse(self, options: dict[str, bool]) -> tuple[list[LoadReport], bool]:
        """What the load would report, and whether the object would refuse it; nothing is changed."""
        reports: list[LoadReport] = []
        try:
            self._load(_copied(self.live), _copied(self.loaded), options, reports)
        except StateLoadError as error:
            return [*reports, error.report], True
        except Exception as error:
            error.add_note(
                f"raised by the load_state_dict of the {type(self.live).__name__} at {encode_path(self.path)}, "
                "tried on a copy; nothing was changed"
            )
            raise
        return reports, False

    def lasting(self, written: set[int]) -> OwnLoad:
        """This load; of a copy, if tensors that it loads are in the storages ``written`` before it."""
        return self if written.isdisjoint(storages_of(self.loaded)) else replace(self, loaded=_copied(self.loaded))

    def perform(self, options: dict[str, bool]) -> None:
        """Load."""
        self._load(self.live, self.loaded, options, [])

    @staticmethod
    def _load(live: Stateful, loaded: Mapping[Any, Any], options: dict[str, bool], reports: list[LoadReport]) -> None:
        load = live.own_load_state_dict()
        assert load is not None
        # an override need not know every option
        parameters = inspect.signature(load).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        taken = {name: value for name, value in options.items() if takes_all or name in parameters}
        token = _REPORTS.set(reports)
        try:
            load(loaded, **taken)
        finally:
            _REPORTS.reset(token)


def storages_of(value: object) -> set[int]:
    """The storages of all tensors in ``value``."""
    if isinstance(value, LowBitTensor):
        return {storage_key(part) for part in value.parts if part is not None}
    if isinstance(value, Tensor):
        return {storage_key(value)}
    # what is loaded may be any mapping
    items = value.items() if isinstance(value, Mapping) else items_of(value) or ()
    return set().union(*(storages_of(child) for _, child in items))


def _copied(value: object) -> Any:
    """A copy with tensors and containers of its own; what belongs to the process is shared."""
    if isinstance(value, Tensor):
        clone = _cloned(value)
        return nn.Parameter(clone, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else clone
    if isinstance(value, Stateful):
        twin = copy.copy(value)
        for name, child in value.state_attributes():
            set_attribute(twin, name, _copied(child))
        return twin
    if isinstance(value, Mapping):
        # a dict keeps its type, and a defaultdict its factory
        entries = copy.copy(value) if isinstance(value, dict) else {}
        entries.update({key: _copied(item) for key, item in value.items()})
        return entries
    if isinstance(value, SEQUENCES):
        return rebuild(value, [_copied(item) for item in value])
    if is_never_stored(value):
        return value
    try:
        return copy.deepcopy(value)
    except (TypeError, copy.Error, pickle.PicklingError):
        # a lock or a file, for example: no load could bring one either
        return value


def _cloned(tensor: Tensor) -> Tensor:
    """A clone that can be written only where ``tensor`` can: not if it is expanded, or of inference mode."""
    if isinstance(tensor, LowBitTensor):
        return tensor.with_parts(_cloned)
    with torch.inference_mode(tensor.is_inference()):
        elements = tensor.detach()
        if is_expanded(elements):
            for dim, stride in enumerate(elements.stride()):
                elements = elements if stride else elements.narrow(dim, 0, 1)
            return elements.clone().expand(tensor.shape)
        return elements.clone()
