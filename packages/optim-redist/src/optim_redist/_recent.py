"""Caches that keep what was used last, and that threads may share without a lock."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

Key = tuple[Any, ...]
Found = TypeVar("Found")


class Recent(Generic[Found]):
    """What was made for the keys used last.

    There are two generations of ``size / 2`` keys each. A full one becomes the older one, whose keys are forgotten with
    the next change of generations unless they are used meanwhile. A key of the newer one is found by a plain look-up,
    and of threads that change generations at once none does worse than to forget too much.
    """

    def __init__(self, size: int) -> None:
        self._half = size // 2
        self._newer: dict[Key, Found] = {}
        self._older: dict[Key, Found] = {}

    def __len__(self) -> int:
        return len({**self._older, **self._newer})

    def find(self, key: Key) -> Found | None:
        """What was made for the key, None if that is unknown or forgotten."""
        found = self._newer.get(key)
        if found is None:
            found = self._older.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: Key, made: Found) -> None:
        """Remember it, and forget what was not used for long if there is too much."""
        if len(self._newer) >= self._half:
            self._older, self._newer = self._newer, {}
        self._newer[key] = made

    def clear(self) -> None:
        """Forget everything."""
        self._older, self._newer = {}, {}
