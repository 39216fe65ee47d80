"""Which part of an object is state: which values are stored, which containers are entered, under which keys.

A dict is entered by its keys, every other container by position: 0, 1, 2, …
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from optim_utils._state.paths import encode_path
from optim_utils.block_info import BlockInfo

if TYPE_CHECKING:
    from typing_extensions import TypeIs

# containers that are entered by position; namedtuples and torch.Size are tuples
SEQUENCES = (list, tuple, set, frozenset, deque)

# live things that a checkpoint cannot hold: they belong to the process, not to the state
_NEVER_STORED: tuple[type, ...] = (BlockInfo, nn.Module, torch.optim.Optimizer, torch.Generator)
if torch.distributed.is_available():
    from torch.distributed.device_mesh import DeviceMesh

    _NEVER_STORED += (torch.distributed.ProcessGroup, DeviceMesh)


def is_never_stored(value: object) -> bool:
    """Whether ``value`` (neither tensor nor container) is left out of every state."""
    return isinstance(value, _NEVER_STORED) or callable(value)


class Stateful:
    """An object whose own attributes are its state."""

    # names of attributes that are not state
    non_state_attributes: ClassVar[Collection[str]] = ()

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if isinstance(cls.non_state_attributes, str):
            # `in` would find every letter and substring of it
            raise TypeError(
                f"non_state_attributes of {cls.__name__} must be a collection of names, got the string "
                f"{cls.non_state_attributes!r}; write ({cls.non_state_attributes!r},)"
            )

    def state_attributes(self) -> Iterator[tuple[str, Any]]:
        """The attributes in order: those of ``__dict__``, then the filled ``__slots__``, base classes first."""
        for name, value in getattr(self, "__dict__", {}).items():
            if name not in self.non_state_attributes:
                yield name, value
        for name in _slots(type(self)):
            if name not in self.non_state_attributes and hasattr(self, name):
                yield name, getattr(self, name)

    def own_load_state_dict(self) -> Callable[..., object] | None:
        """The method by which the object loads itself; None if it is loaded attribute by attribute."""
        return None


def set_attribute(owner: Stateful, name: str, value: object) -> None:
    """Put ``value`` where `Stateful.state_attributes` finds the attribute, past properties and ``__setattr__``.

    They are the class's ways to change an object; restoring one must not change a value again, or refuse it.
    """
    if name in vars(owner):
        # an attribute of the object may have the name of a property of its class, which `object` would call
        vars(owner)[name] = value
    else:
        object.__setattr__(owner, name, value)


def _slots(cls: type) -> tuple[str, ...]:
    """The attribute names of all ``__slots__`` of a class, private ones in the form that Python gives them."""
    names = []
    for base in reversed(cls.__mro__):
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in dict.fromkeys(names) if name not in ("__dict__", "__weakref__"))


def entries_by_position(loaded: object) -> dict[Any, Any] | None:
    """The loaded counterpart of a sequence as a dict by position, ``"0"`` counting as 0; None if it is no container."""
    if isinstance(loaded, Mapping):
        positions = {int(key) for key in loaded if isinstance(key, str) and key.isdecimal()}
        return entries_by_key(loaded, positions)
    if isinstance(loaded, SEQUENCES):
        return dict(enumerate(loaded))
    return None


def entries_by_key(loaded: object, live_keys: Iterable[Any]) -> dict[Any, Any] | None:
    """The loaded counterpart of a dict with the keys ``live_keys``, where an int key also matches its string.

    If both forms are there, they are merged, and the value under the string wins: ``torch.distributed.checkpoint``
    fills tensors in place, under the int, but puts the numbers that it loads under the string. Where all live keys are
    ints and all loaded ones strings, as in a flat state, those of other ints are ints too: the dict may have grown.
    None if ``loaded`` is no mapping.
    """
    if not isinstance(loaded, Mapping):
        return None
    keys = set(live_keys)
    renamed = {str(key): key for key in keys if type(key) is int and str(key) not in keys}
    if keys and len(renamed) == len(keys) and all(type(name) is str for name in loaded):
        renamed |= {name: int(name) for name in loaded if _is_int(name)}
    entries: dict[Any, Any] = {}
    # in the loaded order, which a dict of plain values takes over
    for name, value in loaded.items():
        key = renamed.get(name, name)
        if key not in entries:
            entries[key] = value
        elif name in renamed:
            entries[key] = _merged(entries[key], value)
        else:
            entries[key] = _merged(value, entries[key])
    return entries


_is_int = re.compile("0|-?[1-9][0-9]*").fullmatch


def _merged(old: object, new: object) -> Any:
    """``new``; where both are dicts, also the entries that only ``old`` has."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    return {**old, **{key: _merged(old[key], value) if key in old else value for key, value in new.items()}}


def rebuild(live: Any, items: list[Any]) -> Any:
    """A container of the type of ``live`` that holds ``items``."""
    if hasattr(live, "_make"):
        return live._make(items)
    if isinstance(live, deque):
        return type(live)(items, live.maxlen)
    return type(live)(items)


def is_plain(value: object) -> bool:
    """Whether ``value`` is stored as one piece and is no tensor."""
    return not isinstance(value, (Tensor, Stateful, dict, *SEQUENCES)) and not is_never_stored(value)


def is_low_bit_form(value: object) -> TypeIs[Mapping[Any, Any]]:
    """Whether ``value`` is the form of a `LowBitTensor` in a state: see `optim_utils.low_bit.to_plain`."""
    return isinstance(value, Mapping) and {"codes", "scale", "format"} <= value.keys()


def has_content(value: object, *, store_non_tensors: bool) -> bool:
    """Whether the state of ``value`` has any entry; checkpoint formats drop containers that have none."""
    if isinstance(value, Tensor):
        return True
    items = items_of(value)
    if items is None:
        # None holds nothing that could be lost, and torch's flat form of a state cannot hold it
        return store_non_tensors and value is not None and not is_never_stored(value)
    return any(has_content(child, store_non_tensors=store_non_tensors) for _, child in items)


def refuse_cycles(root: object) -> None:
    """Raise ValueError if ``root`` contains something that contains itself: a walk ends only with Python's stack."""
    path: list[Any] = []
    # the containers on the way from `root` to the walk's position, with the items that each has left
    way = {id(root): iter(items_of(root) or ())}
    while way:
        for key, child in way[next(reversed(way))]:
            items = items_of(child)
            if items is None:
                continue
            path.append(key)
            if id(child) in way:
                back = path[list(way).index(id(child)) :]
                raise ValueError(
                    f"the state of a {type(child).__name__} leads back to it by {encode_path(back)}; leave the way "
                    "back out of the state: name its attribute in the non_state_attributes of its class"
                )
            way[id(child)] = iter(items)
            break
        else:
            way.popitem()
            del path[-1:]


def items_of(value: object) -> Iterable[tuple[Any, Any]] | None:
    """The keys and values of ``value`` if it is a container or object that is entered, else None."""
    if isinstance(value, Stateful):
        return value.state_attributes()
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, SEQUENCES) else None
