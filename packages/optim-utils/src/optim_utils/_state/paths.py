"""Where a value sits in a nested state, as one string: the JSON list of the keys on the way to it.

    state["bar"]["_thl"][0]   ->   '["bar", "_thl", 0]'

JSON keeps apart what ``str`` would merge: the keys 1, 1.0, True and "1" stay four different keys.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import NamedTuple

from torch import Tensor

Key = str | int | float | bool | None


class SequenceItem(NamedTuple):
    """An item of a list ("l") or a tuple ("t"); a type of its own, because a plain tuple may be a dict's key."""

    mark: str
    position: int


Path = Sequence[Key | SequenceItem]

_KEY_TYPES = (str, int, float, bool, type(None))


def encode_item(item: object) -> str:
    """The JSON of one item of a path.

    Raises:
        TypeError: if it is a key that JSON would bring back as something else.
    """
    # exact types: a subclass (an IntEnum, numpy's str_) would come back as its base
    if type(item) is str:
        encoded = encode_basestring_ascii(item)
        # two surrogates in a row, which no text read from UTF-8 has, come back as the one character that they encode
        if not item.isascii() and json.loads(encoded) != item:
            raise TypeError(f"keys of a state have to come back from JSON, which joins the surrogates of {item!r}")
        return encoded
    if type(item) is int:
        return int.__repr__(item)
    if type(item) in _KEY_TYPES or type(item) is SequenceItem:
        return json.dumps(item)
    raise TypeError(f"keys of a state have to be str, int, float, bool or None, got {_in_words(item)}")


def _in_words(key: object) -> str:
    """What a key is that JSON cannot hold; of a tensor no contents."""
    name = type(key).__name__
    return f"{name} of shape {tuple(key.shape)}" if isinstance(key, Tensor) else f"{key!r} ({name})"


def encode_path(path: Path) -> str:
    """The key of ``path``; keys that JSON cannot hold are shown in words, so that errors can name any path."""
    parts = []
    for item in path:
        try:
            parts.append(encode_item(item))
        except TypeError:
            parts.append(json.dumps(_in_words(item)))
    return "[" + ", ".join(parts) + "]"


def join_paths(outer: Path, inner: str) -> str:
    """The key of the entry that has the key ``inner`` inside of the container at ``outer``."""
    items = [encode_path(outer)[1:-1], inner[1:-1]]
    return f"[{', '.join(filter(None, items))}]"


def decode_path(key: object) -> list[Key | SequenceItem]:
    """The path that a key of `flatten` stands for.

    Raises:
        ValueError: if it is not the JSON of a non-empty list of keys.
    """
    try:
        items = json.loads(key) if isinstance(key, str) else None
    except (ValueError, RecursionError):
        items = None
    if not isinstance(items, list) or not items:
        raise ValueError(f"a key of a flattened state has to be a non-empty JSON list, got {key!r}")
    for position, item in enumerate(items):
        if isinstance(item, list) and len(item) == 2 and item[0] in ("l", "t") and type(item[1]) is int:
            items[position] = SequenceItem(item[0], item[1])
        elif type(item) not in _KEY_TYPES:
            raise ValueError(f"item {position} of the flattened key {key!r} is neither a key nor a sequence item")
    return items
