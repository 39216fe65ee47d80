"""A cache of the most recently used keys that threads may share without a lock."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

Key = tuple[Any, ...]
Found = TypeVar("Found")


class Recent(Generic[Found]):
    """The values of the most recently used keys.

    There are two generations of ``size / 2`` keys each. When the newer one is full, it becomes the older one. The keys
    of the older one are forgotten at the next such change unless they are used before. A key of the newer one takes
    one plain look-up. Threads that change generations at the same time at worst forget too many keys.
    """

    def __init__(self, size: int) -> None:
        self._half = size // 2
        self._newer: dict[Key, Found] = {}
        self._older: dict[Key, Found] = {}

    def __len__(self) -> int:
        return len({**self._older, **self._newer})

    def find(self, key: Key) -> Found | None:
        """The value of the key, None if it is unknown or forgotten."""
        found = self._newer.get(key)
        if found is None:
            found = self._older.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: Key, made: Found) -> None:
        """Store a value; if the newer generation is full, forget the older one."""
        if len(self._newer) >= self._half:
            self._older, self._newer = self._newer, {}
        self._newer[key] = made

    def clear(self) -> None:
        """Forget everything."""
        self._older, self._newer = {}, {}
