"""Nested dicts to flat ones and back: by exact JSON paths, or by dotted names.

Nothing here is recursive: states nest as deep as models do, and Python's stack does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from optim_utils._state.paths import SequenceItem, decode_path, encode_item, encode_path

_MARKS: dict[type, str] = {list: "l", tuple: "t"}


def flatten(input_dict: dict[Any, Any], *, sequences: bool = False) -> dict[str, Any]:
    """The leaves of nested dicts, the same objects in the same order, keyed by the JSON of their paths.

    Keys may be str, int, float, bool and None, and keep their type. An empty dict is a leaf, so that it is not lost.

    Args:
        input_dict: the nested dicts.
        sequences: also enter lists and tuples (exactly these types); their items are ``["l", i]`` and ``["t", i]``.

    Raises:
        TypeError: for a key of another type, with its path, and for what is no dict.
        ValueError: for a dict that contains itself, and for a dict with two NaNs among its keys.
    """
    _check_type("input_dict", input_dict, dict)
    flat: dict[str, Any] = {}
    for _, encoded, leaf in _leaves(input_dict, sequences):
        flat[f"[{', '.join(encoded)}]"] = leaf
    return flat


def unflatten(flattened_dict: Mapping[str, Any]) -> dict[Any, Any]:
    """The nested dict that `flatten` made ``flattened_dict`` from.

    Raises:
        ValueError: for a key that is no path, and for two keys of which one leads through the leaf of the other.
    """
    _check_type("flattened_dict", flattened_dict, Mapping)
    nested = _Nested()
    for key, leaf in flattened_dict.items():
        nested.insert(decode_path(key), leaf, key)
    return nested.finish()


def to_dotted(state: dict[Any, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """The leaves of nested dicts by the dotted names of ``torch.distributed.checkpoint``, and the path of each name.

    Raises:
        ValueError: if two paths have one name, as those of the keys 0 and "0", or of ``{"a.b": 1, "a": {"b": 2}}``; for
            what `flatten` refuses.
    """
    _check_type("state", state, dict)
    dotted: dict[str, Any] = {}
    mapping: dict[str, tuple[Any, ...]] = {}
    for path, _, leaf in _leaves(state, sequences=False):
        name = ".".join(map(str, path))
        if name in mapping:
            raise ValueError(f"{encode_path(mapping[name])} and {encode_path(path)} have the same name {name!r}")
        dotted[name] = leaf
        mapping[name] = tuple(path)
    return dotted, mapping


def from_dotted(dotted: Mapping[str, Any], mapping: Mapping[str, tuple[Any, ...]]) -> dict[Any, Any]:
    """The nested dict that `to_dotted` made ``dotted`` and ``mapping`` from.

    Raises:
        ValueError: for a name of which the mapping has no path.
    """
    _check_type("dotted", dotted, Mapping)
    _check_type("mapping", mapping, Mapping)
    nested = _Nested()
    for name, leaf in dotted.items():
        if name not in mapping:
            raise ValueError(f"the mapping has no path for the name {name!r}")
        path = mapping[name]
        # JSON makes lists of tuples; a string would be taken for one key per letter
        if not isinstance(path, tuple | list) or not path:
            raise ValueError(f"the path of the name {name!r} has to be a tuple of at least one key, got {path!r}")
        nested.insert(list(path), leaf, name)
    return nested.finish()


def _check_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} has to be a dict, got a {type(value).__name__}")


def _leaves(root: dict[Any, Any], sequences: bool) -> Iterator[tuple[list[Any], list[str], Any]]:
    """Each leaf with its path and the JSON of each item of it; the two lists are reused, so copy what you keep."""
    path: list[Any] = []
    encoded: list[str] = []
    # one entry for every container that is being walked: its remaining items, and which object it is
    stack: list[Iterator[tuple[Any, Any]]] = [iter(root.items())]
    active: list[int] = [id(root)]
    entered = {id(root)}
    # the containers being walked in which a NaN was a key: only its identity tells it from another NaN
    with_nan: set[int] = set()
    while stack:
        for item, value in stack[-1]:
            path.append(item)
            try:
                encoded.append(encode_item(item))
            except TypeError as error:
                raise TypeError(f"{error}, at {encode_path(path)}") from None
            if item != item:
                if active[-1] in with_nan:
                    raise ValueError(f"two keys have the path {encode_path(path)}")
                with_nan.add(active[-1])
            children = _children(value, sequences)
            if children is not None:
                if id(value) in entered:
                    raise ValueError(f"the container at {encode_path(path)} contains itself")
                stack.append(iter(children))
                active.append(id(value))
                entered.add(id(value))
                break
            yield path, encoded, value
            path.pop()
            encoded.pop()
        else:
            stack.pop()
            left = active.pop()
            entered.remove(left)
            with_nan.discard(left)
            if stack:
                path.pop()
                encoded.pop()


def _children(value: object, sequences: bool) -> Iterable[tuple[Any, Any]] | None:
    """What is in a container, or None for a leaf. An empty container is a leaf."""
    if isinstance(value, dict):
        return value.items() or None
    # exact types: a namedtuple or a torch.Size would come back as a plain tuple
    if sequences and isinstance(value, list | tuple) and type(value) in _MARKS:
        mark = _MARKS[type(value)]
        return [(SequenceItem(mark, i), item) for i, item in enumerate(value)] or None
    return None


class _Nested:
    """A nested dict that grows path by path, and knows which of its dicts are its own and which are leaves."""

    def __init__(self) -> None:
        self._root: dict[Any, Any] = {}
        # for each dict of our own: the key that it was made for, and the kind of its items ("l", "t", or "" for keys)
        self._made: dict[int, tuple[str, str]] = {id(self._root): ("", "")}
        # dicts that have to become lists or tuples, with where they are; outer ones first
        self._sequences: list[tuple[dict[Any, Any], Any, str]] = []

    def insert(self, path: list[Any], leaf: object, key: str) -> None:
        """Put ``leaf`` at the end of ``path``; ``key`` is the name of the path in errors."""
        node = self._root
        last = len(path) - 1
        for depth, item in enumerate(path):
            kind = item.mark if type(item) is SequenceItem else ""
            made_for, node_kind = self._made[id(node)]
            if kind != node_kind:
                raise ValueError(
                    f"{key!r} and {made_for!r} do not agree on whether {encode_path(path[:depth])} is a dict"
                )
            if depth == last:
                if item in node:
                    other, _ = self._made.get(id(node[item]), (encode_path(path), ""))
                    raise ValueError(f"{key!r} and {other!r} put two values in one place")
                node[item] = leaf
            elif item in node:
                child = node[item]
                if id(child) not in self._made:
                    raise ValueError(f"{key!r} leads through the value of {encode_path(path[: depth + 1])!r}")
                node = child
            else:
                node = self._make(node, item, path[depth + 1], key)

    def _make(self, parent: dict[Any, Any], item: object, next_item: object, key: str) -> dict[Any, Any]:
        node: dict[Any, Any] = {}
        parent[item] = node
        kind = next_item.mark if type(next_item) is SequenceItem else ""
        self._made[id(node)] = (key, kind)
        if kind:
            self._sequences.append((parent, item, key))
        return node

    def finish(self) -> dict[Any, Any]:
        """The dict, with its sequences made: inner ones first, so that none changes after it was put into another."""
        for parent, item, key in reversed(self._sequences):
            node = parent[item]
            kind = self._made[id(node)][1]
            items = [node[kind, i] for i in range(len(node)) if (kind, i) in node]
            if len(items) != len(node):
                raise ValueError(f"the sequence that {key!r} leads through has gaps: {sorted(i for _, i in node)}")
            parent[item] = items if kind == "l" else tuple(items)
        return self._root
