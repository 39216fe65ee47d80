"""Reading the JSON files of this package, with errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optim_redist.errors import RedistError


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
