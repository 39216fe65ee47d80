"""Planning an update of nested dicts of parameter states to loaded values.

Like `LoadPlan`, with other rules: an object with a ``load_state_dict`` loads itself, and a value that is neither such
an object nor a tensor nor a dict is replaced. Objects whose attributes are their state are planned by `LoadPlan`'s own
rules.
"""

from __future__ import annotations

import cmath
from collections.abc import Mapping
from numbers import Integral, Number, Real
from typing import Any

import torch
from torch import Tensor

from optim_utils._state.load_plan import ALWAYS_REFUSED, LoadPlan, copied
from optim_utils._state.load_report import LoadReport, StateLoadError, describe
from optim_utils._state.paths import Path
from optim_utils._state.walk import SEQUENCES, Stateful, entries_by_key, has_content
from optim_utils.low_bit import LowBitTensor


class UpdatePlan(LoadPlan):
    """What an update of nested dicts will write; ``missing_keys`` are the last keys on the missing paths."""

    def __init__(self) -> None:
        super().__init__()
        self.missing_keys: list[Any] = []
        self.objects = LoadPlan()

    def update(self) -> LoadReport:
        """Write everything, or raise `StateLoadError` and write nothing.

        The caller judges missing and unexpected entries and, inside of objects, wrong types and dtypes: an object loads
        what fits.
        """
        # in one go, as what is loaded may be live elsewhere
        self.objects.fills += self.fills
        self.fills = []
        refused = self.objects.rehearse_own_loads(strict=False)
        report = LoadReport.of(self.issues + self.objects.issues)
        refused |= bool(LoadReport.of(self.issues).mismatched)
        if refused or any(issue.kind in ALWAYS_REFUSED for issue in self.objects.issues):
            raise StateLoadError.refuse(report)
        self.write()
        self.objects.write()
        self.perform_last_loads()
        self.objects.perform_last_loads()
        return report

    def add(self, live: object, loaded: object, path: Path) -> Any:
        if isinstance(live, LowBitTensor):
            return self._add_low_bit(live, loaded, path)
        if isinstance(live, Tensor):
            if live.ndim == 0 and isinstance(loaded, Number):
                return self._add_number(live, loaded, path)
            return self._add_tensor(live, loaded, path)
        if isinstance(live, Stateful):
            if isinstance(loaded, Mapping):
                return self.objects.add(live, loaded, path)
            # nothing of the object fits
            return self._kept(live, loaded, path, "type")
        if isinstance(live, dict):
            entries = entries_by_key(loaded, live)
            if entries is None:
                return self._kept(live, loaded, path, "type")
            self._add_entries(live, entries, path)
            return live
        self._note_loaded(path, live, loaded)
        if callable(load := getattr(live, "load_state_dict", None)):
            self.last_loads.append((path, lambda: load(loaded)))
            return live
        return copied(loaded, path)

    def _add_number(self, live: Tensor, loaded: Number, path: Path) -> Tensor:
        number = _as_tensor(loaded, live.dtype)
        if number is None:
            self._note(path, "dtype", describe(live), f"{type(loaded).__name__} that it cannot hold")
            return live
        return self._add_tensor(live, number, path)

    def note_missing(self, live: object, path: Path) -> None:
        if _has_something_to_fill(live):
            self.missing_keys.append(path[-1])
            self._note(path, "missing", expected=describe(live))


def _has_something_to_fill(live: object) -> bool:
    if isinstance(live, dict):
        return any(map(_has_something_to_fill, live.values()))
    if isinstance(live, Stateful):
        return has_content(live, store_non_tensors=True)
    return not isinstance(live, SEQUENCES) or len(live) > 0


def _as_tensor(number: Any, dtype: torch.dtype) -> Tensor | None:
    """The number in ``dtype``, rounded at most; None if it would be truncated, wrap around or become infinite."""
    # int < float < complex: a number must not be of a later kind than the tensor
    kind = 0 if isinstance(number, Integral) else 1 if isinstance(number, Real) else 2
    if kind > dtype.is_floating_point + 2 * dtype.is_complex:
        return None
    try:
        tensor = torch.tensor(number, dtype=dtype, device="cpu")
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    held = tensor.item()
    if dtype.is_floating_point or dtype.is_complex:
        return None if cmath.isfinite(number) and not cmath.isfinite(held) else tensor
    return tensor if held == number else None
