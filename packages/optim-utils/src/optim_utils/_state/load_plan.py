"""Planning a load before anything is written, so that a refused load changes nothing.

The plan walks the live object, never the loaded state: the live object decides what can be loaded. It collects what has
to be written and what does not fit; only then is the report judged and, if it passes, the writing done.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import MemberDescriptorType
from typing import Any, TypeVar

import torch
from torch import Tensor

from optim_utils._state.load_report import Kind, LoadIssue, LoadReport, StateLoadError, describe, describe_both
from optim_utils._state.own_load import OwnLoad, storages_of
from optim_utils._state.paths import Path, encode_path
from optim_utils._state.tensor_fill import (
    fill_all,
    find_mismatch,
    fits_dtype,
    sharded_like,
    storage_key,
    why_unwritable,
)
from optim_utils._state.walk import (
    SEQUENCES,
    Stateful,
    entries_by_key,
    entries_by_position,
    has_content,
    is_low_bit_form,
    is_never_stored,
    is_plain,
    rebuild,
    refuse_cycles,
    set_attribute,
)
from optim_utils.low_bit import LowBitTensor, from_plain

T = TypeVar("T")

# even if not strict: no value is broadcast, or copied from or to a meta tensor, or into memory that cannot be written
ALWAYS_REFUSED: tuple[Kind, ...] = ("shape", "device", "memory")


class LoadPlan:
    """What a load into live objects will write, and the report on it.

    Args:
        store_non_tensors: whether plain values are loaded too; otherwise they stay.
        cast: whether a floating-point tensor is converted to the live dtype; otherwise one of another dtype is refused.
        assign: whether a loaded tensor is put where there is no memory to fill: for None, a meta tensor, a missing
            attribute or key, or behind the end of a list.
    """

    def __init__(self, *, store_non_tensors: bool = True, cast: bool = True, assign: bool = False) -> None:
        self.store_non_tensors = store_non_tensors
        self.cast = cast
        self.assign = assign
        # the device that assigned tensors are moved to, except 0-dim ones; None leaves them where they are
        self.device: torch.device | None = None
        self.issues: list[LoadIssue] = []
        self.fills: list[tuple[Tensor, Tensor]] = []
        self.writes: list[Callable[[], object]] = []
        self.own_loads: list[OwnLoad] = []
        # own loads, once they are rehearsed; in an `UpdatePlan` also loads by objects that cannot be rehearsed
        self.last_loads: list[tuple[Path, Callable[[], object]]] = []

    def run(self, *, strict: bool) -> LoadReport:
        """Write everything, or raise `StateLoadError` and write nothing."""
        report = self.check(strict=strict)
        self.write()
        self.perform_last_loads()
        return report

    def check(self, *, strict: bool) -> LoadReport:
        """The report, or `StateLoadError`: for any problem if ``strict``, else for those that are always refused."""
        refused = self.rehearse_own_loads(strict=strict)
        report = LoadReport.of(self.issues)
        if refused or any(strict or issue.kind in ALWAYS_REFUSED for issue in report.problems):
            raise StateLoadError.refuse(report)
        return report

    def rehearse_own_loads(self, *, strict: bool) -> bool:
        """Add what own loads would report, and plan them as last loads; return whether an object would refuse."""
        options = {
            "store_non_tensors": self.store_non_tensors,
            "strict": strict,
            "cast": self.cast,
            "assign": self.assign,
        }
        any_refused = False
        written = {storage_key(live) for live, _ in self.fills}
        for load in self.own_loads:
            reports, refused = load.rehearse(options)
            for report in reports:
                self.issues += report.inside(load.path)
            if not reports:
                self._note_loaded(load.path, load.live, load.loaded)
            any_refused |= refused
            self.last_loads.append((load.path, partial(load.lasting(written).perform, options)))
            written |= storages_of(load.live)
        return any_refused

    def write(self) -> None:
        """Write what was planned."""
        fill_all(self.fills)
        for write in self.writes:
            write()

    def perform_last_loads(self) -> None:
        """Let objects load themselves: last, because what they do is unknown and may fail."""
        for path, load in self.last_loads:
            try:
                load()
            except StateLoadError as error:
                # the error's own text may say that nothing was changed
                raise StateLoadError.too_late(error.report, path) from error
            except Exception as error:
                error.add_note(f"raised by the load_state_dict at {encode_path(path)}, after others had been written")
                raise

    # Each of the following methods plans one kind of live value and returns what is to stand in its place: the value
    # itself if it is filled in place, or a new object.

    def add_object(self, live: Stateful, loaded: object, path: Path) -> Stateful:
        if not isinstance(loaded, Mapping):
            return self._kept(live, loaded, path, "type")
        entries = dict(loaded)
        try:
            for name, old in live.state_attributes():
                if name in entries:
                    new = self.add(old, entries.pop(name), (*path, name))
                    if new is not old:
                        self.writes.append(partial(set_attribute, live, name, new))
                else:
                    self.note_missing(old, (*path, name))
        except RecursionError:
            refuse_cycles(live)
            raise
        for name, value in entries.items():
            tensor = self._taken_over(value) if _is_free(live, name) else None
            if tensor is not None:
                self._note_loaded((*path, name), None, tensor)
                self.writes.append(partial(set_attribute, live, name, tensor))
            else:
                self._note_unexpected((*path, name), value)
        return live

    def add(self, live: object, loaded: object, path: Path) -> Any:
        """Plan any value."""
        if isinstance(live, LowBitTensor):
            return self._add_low_bit(live, loaded, path)
        if isinstance(live, Tensor):
            return self._add_tensor(live, loaded, path)
        if isinstance(live, Stateful):
            return self._add_stateful(live, loaded, path)
        if isinstance(live, dict):
            return self._add_dict(live, loaded, path)
        if isinstance(live, SEQUENCES):
            return self._add_sequence(live, loaded, path)
        if is_never_stored(live):
            self._note_unexpected(path, loaded)
            return live
        return self._add_plain(live, loaded, path) if self.store_non_tensors else live

    def _add_stateful(self, live: Stateful, loaded: object, path: Path) -> Stateful:
        if live.own_load_state_dict() is None:
            return self.add_object(live, loaded, path)
        if not isinstance(loaded, Mapping):
            return self._kept(live, loaded, path, "type")
        self.own_loads.append(OwnLoad(live, loaded, path))
        return live

    def _add_low_bit(self, live: LowBitTensor, loaded: object, path: Path) -> LowBitTensor:
        """Codes and scales are filled as they are: they are never cast, nor decoded on the way."""
        if not isinstance(loaded, LowBitTensor):
            if not isinstance(loaded, Mapping):
                return self._kept(live, loaded, path, "type")
            try:
                loaded = from_plain(dict(loaded), live.fmt)
            except ValueError as error:
                self._note(path, "type", expected=describe(live), found=str(error))
                return live
        if live.shape != loaded.shape or live.fmt != loaded.fmt:
            return self._kept(live, loaded, path, "shape" if live.shape != loaded.shape else "type")
        pairs = [
            (mine, other) for mine, other in zip(live.parts, loaded.parts) if mine is not None and other is not None
        ]
        if any(mine.is_meta != other.is_meta for mine, other in pairs):
            if self.assign and live.is_meta and not any(other.is_meta for _, other in pairs):
                self._note_loaded(path, live, loaded)
                return loaded
            return self._kept(live, loaded, path, "device")
        if all(self._is_writable(mine, other, path) for mine, other in pairs):
            self._note_loaded(path, live, loaded)
            self.fills += pairs
        return live

    def _add_tensor(self, live: Tensor, loaded: object, path: Path) -> Tensor:
        # a low-bit tensor is never decoded on the way
        if not isinstance(loaded, Tensor) or isinstance(loaded, LowBitTensor):
            return self._kept(live, loaded, path, "type")
        mismatch = find_mismatch(live, loaded, cast=self.cast)
        if mismatch == "device" and live.is_meta and self.assign:
            if not fits_dtype(live, loaded, cast=self.cast):
                return self._kept(live, loaded, path, "dtype")
            self._note_loaded(path, live, loaded)
            loaded = sharded_like(live, loaded)
            is_parameter = isinstance(live, torch.nn.Parameter)
            return torch.nn.Parameter(loaded, requires_grad=live.requires_grad) if is_parameter else loaded
        if mismatch is not None:
            return self._kept(live, loaded, path, mismatch)
        if self._is_writable(live, loaded, path):
            self._note(path, "loaded" if live.dtype == loaded.dtype else "cast", *describe_both(live, loaded))
            self.fills.append((live, loaded))
        return live

    def _is_writable(self, live: Tensor, loaded: Tensor, path: Path) -> bool:
        reason = why_unwritable(live, loaded)
        if reason is not None:
            self._note(path, "memory", expected=describe(live), found=reason)
        return reason is None

    def _add_dict(self, live: dict[Any, Any], loaded: object, path: Path) -> dict[Any, Any]:
        entries = entries_by_key(loaded, live)
        if entries is None:
            return self._kept(live, loaded, path, "type")
        if all(map(is_plain, live.values())) and all(map(is_plain, entries.values())):
            if self.store_non_tensors:
                self._note_loaded(path, live, loaded)
                new = copied(entries, path)
                self.writes += [live.clear, lambda: live.update(new)]
            return live
        self._add_entries(live, entries, path)
        return live

    def _add_entries(self, live: dict[Any, Any], entries: dict[Any, Any], path: Path) -> None:
        for key, old in live.items():
            if key in entries:
                new = self.add(old, entries.pop(key), (*path, key))
                if new is not old:
                    self.writes.append(partial(live.__setitem__, key, new))
            else:
                self.note_missing(old, (*path, key))
        for key, value in entries.items():
            tensor = self._taken_over(value)
            if tensor is not None:
                self._note_loaded((*path, key), None, tensor)
                self.writes.append(partial(live.__setitem__, key, tensor))
            else:
                self._note_unexpected((*path, key), value)

    def _add_sequence(self, live: Any, loaded: object, path: Path) -> Any:
        entries = entries_by_position(loaded)
        if entries is None:
            return self._kept(live, loaded, path, "type")
        items = list(live)
        in_order = [entries[position] for position in range(len(entries)) if position in entries]
        if len(in_order) == len(entries) and all(map(is_plain, items)) and all(map(is_plain, in_order)):
            return self._replace_sequence(live, in_order, loaded, path)
        for position, old in enumerate(items):
            if position in entries:
                items[position] = self.add(old, entries.pop(position), (*path, position))
            else:
                self.note_missing(old, (*path, position))
        self._append_taken_over(live, items, entries, path)
        for position, value in entries.items():
            self._note_unexpected((*path, position), value)
        return rebuild(live, items)

    def _append_taken_over(self, live: object, items: list[Any], entries: dict[Any, Any], path: Path) -> None:
        """Move the tensors that continue ``items`` from ``entries`` to its end: a history may have been longer."""
        # a namedtuple has as many items as names, a set has no order, and a full deque would drop its first items
        room = len(items) + len(entries) if isinstance(live, list) or type(live) is tuple else len(items)
        if isinstance(live, deque):
            room = len(items) + len(entries) if live.maxlen is None else live.maxlen
        while len(items) < room and (tensor := self._taken_over(entries.get(len(items)))) is not None:
            self._note_loaded((*path, len(items)), None, tensor)
            del entries[len(items)]
            items.append(tensor)

    def _replace_sequence(self, live: object, items: list[Any], loaded: object, path: Path) -> Any:
        if not self.store_non_tensors:
            return live
        try:
            new = rebuild(live, copy.deepcopy(items))
        except (TypeError, ValueError):
            # a namedtuple of another length, a torch.Size of strings, an unhashable item of a set
            return self._kept(live, loaded, path, "type")
        self._note_loaded(path, live, loaded)
        return new

    def _add_plain(self, live: object, loaded: object, path: Path) -> Any:
        if type(live) is type(loaded):
            self._note_loaded(path, live, loaded)
            return copied(loaded, path)
        if type(live) in (int, float) and isinstance(loaded, Tensor) and not loaded.is_meta:
            number = _exact_number(type(live), loaded)
            if number is not None:
                self._note_loaded(path, live, loaded)
                return number
        tensor = self._taken_over(loaded) if live is None else None
        if tensor is not None:
            self._note_loaded(path, live, tensor)
            return tensor
        return self._kept(live, loaded, path, "type")

    def _taken_over(self, loaded: object) -> Tensor | None:
        """``loaded`` as the tensor to put where there was none; None if it is no tensor, or without ``assign``."""
        if not self.assign:
            return None
        tensor = loaded if isinstance(loaded, Tensor) else None
        if is_low_bit_form(loaded):
            # after a cast or reshape since it was saved, it is no low-bit tensor any more
            with suppress(ValueError):
                tensor = from_plain(dict(loaded))
        if tensor is None or self.device is None:
            return tensor
        # a low-bit tensor is no step count, and its scales have a dimension
        return tensor.to(self.device) if tensor.ndim or isinstance(tensor, LowBitTensor) else tensor

    def _note(self, path: Path, kind: Kind, expected: str = "nothing", found: str = "nothing") -> None:
        self.issues.append(LoadIssue(encode_path(path), kind, expected, found))

    def _note_loaded(self, path: Path, live: object, loaded: object) -> None:
        self._note(path, "loaded", *describe_both(live, loaded))

    def note_missing(self, live: object, path: Path) -> None:
        if has_content(live, store_non_tensors=self.store_non_tensors):
            self._note(path, "missing", expected=describe(live))

    def _note_unexpected(self, path: Path, loaded: object) -> None:
        if self.store_non_tensors or has_content(loaded, store_non_tensors=False):
            self._note(path, "unexpected", found=describe(loaded))

    def _kept(self, live: T, loaded: object, path: Path, kind: Kind) -> T:
        """``live``, which stays as it is, since ``loaded`` does not fit."""
        own = isinstance(live, Stateful) and isinstance(loaded, Stateful)
        self._note(path, kind, describe(live), describe(loaded) + (" itself, not its state" if own else ""))
        return live


def copied(loaded: object, path: Path) -> Any:
    """A deep copy of a plain value; the error of one that has none, such as a lock, says where it is."""
    try:
        return copy.deepcopy(loaded)
    except Exception as error:
        error.add_note(f"raised while the value loaded for {encode_path(path)} was copied")
        raise


def _is_free(live: Stateful, name: object) -> bool:
    """Whether a tensor can become the attribute ``name`` that ``live`` lacks: no method or property has that name."""
    if not isinstance(name, str) or name in live.non_state_attributes:
        return False
    of_class = next((vars(base)[name] for base in type(live).__mro__ if name in vars(base)), None)
    return of_class is None or isinstance(of_class, Tensor | MemberDescriptorType)


def _exact_number(kind: type, loaded: Tensor) -> int | float | None:
    """The 0-dim tensor as an int or float, or None if it has another shape or would change its value."""
    if loaded.ndim or loaded.is_complex() or loaded.dtype == torch.bool:
        return None
    value = loaded.item()
    if value != value:  # NaN is exact as a float, and no int
        return value if kind is float else None
    try:
        number = kind(value)
    except OverflowError:  # infinity as an int
        return None
    return number if number == value else None
