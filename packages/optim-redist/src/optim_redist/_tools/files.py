"""Reading the JSON files of this package, with errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from optim_redist.errors import RedistError

Made = TypeVar("Made")

# evaluating the texts of annotations takes longer than all else here
_types_of: Callable[[Any], dict[str, Any]] = cache(get_type_hints)
_WORDS: dict[Any, str] = {
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    str: "a text",
    NoneType: "null",
    tuple[int, ...]: "a list of whole numbers",
}


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RedistError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise RedistError(f"{path}: an object of this package, got a JSON {type(data).__name__}")
    return data


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Make errors over a file's content name the file."""
    try:
        with undamaged(str(path)):
            yield
    except RedistError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


@contextmanager
def undamaged(what: str, kind: type[RedistError] = RedistError) -> Iterator[None]:
    """Make errors over missing or mistyped content a ``RedistError`` of this kind, which says of what it is."""
    try:
        yield
    except RedistError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise kind(f"{what} is damaged: {type(error).__name__}: {error}") from error


def check_object(data: object, what: str, kind: type[RedistError] = RedistError) -> None:
    """Raise a ``RedistError`` of this kind for JSON that is no object, but its text, for example."""
    if not isinstance(data, Mapping):
        raise kind(f"{what} is made of a dict, as json.loads makes it of a text, got {data!r}")


def record(kind: type[Made], fields: Mapping[str, Any]) -> Made:
    """``kind(**fields)``, a named tuple or a dataclass, of fields that are of the types it declares.

    Raises:
        RedistError: for one that is of another type: a text among the numbers, for example.
    """
    hints = _types_of(kind)
    for name, value in fields.items():
        hint = hints.get(name, object)
        if not _is_of(value, hint):
            options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
            words = " or ".join(_WORDS.get(option, str(option)) for option in options)
            raise RedistError(f"{kind.__name__}.{name} is {words}, got {value!r}")
    return kind(**fields)


def _is_of(value: Any, hint: Any) -> bool:
    if isinstance(hint, UnionType):
        return any(_is_of(value, option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_is_of(each, get_args(hint)[0]) for each in value)
    if isinstance(value, bool):
        return hint in (bool, object)
    return isinstance(value, (int, float) if hint is float else hint)
