"""``zip`` for a dict of iterables: rows as dicts.

    {"x": [1, 2], "y": "ab"}  ->  {"x": 1, "y": "a"}, {"x": 2, "y": "b"}

Unlike ``zip(strict=True)`` it asks every iterable for its next item before it complains, so that the error can say
which of them were too short and which too long.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

__all__ = ["DictZipIterator"]

T = TypeVar("T")


class DictZipIterator(Iterator[dict[str, T]], Generic[T]):
    """Iterate over several named iterables at once.

    Args:
        data: the iterables; keys and their order are taken over at construction.
        eager: compare lengths at construction, of the iterables that have one, instead of when the shortest ends.

    Raises:
        TypeError: at construction, if ``data`` is no mapping or a value is not iterable.
        ValueError: if the lengths differ, or if one iterator object is given under two keys (each row would take two
            of its items). After any error the iterator is finished.
    """

    def __init__(self, data: Mapping[str, Iterable[T]], *, eager: bool = False) -> None:
        if not isinstance(data, Mapping):
            raise TypeError(f"data has to be a mapping of names to iterables, got a {type(data).__name__}")
        lengths = {key: length for key, values in data.items() if (length := _length_of(values)) is not None}
        if eager:
            shortest = min(lengths.values(), default=0)
            self._check_lengths([key for key in lengths if lengths[key] == shortest], list(lengths))
        # the number of rows still to come, known only if every iterable knows its length
        self._rows_left = min(lengths.values()) if lengths and len(lengths) == len(data) else None
        self._iterators = [(key, _iterator_of(key, values)) for key, values in data.items()]
        self._refuse_shared_iterators()

    def __iter__(self) -> "DictZipIterator[T]":
        return self

    def __next__(self) -> dict[str, T]:
        row: dict[str, T] = {}
        try:
            for key, iterator in self._iterators:
                row[key] = next(iterator)
        except StopIteration:
            self._finish(row)
        except BaseException:
            # some iterators have moved on and some have not: rows would be out of step from here
            self._iterators = []
            raise
        if not row:
            raise StopIteration
        if self._rows_left is not None:
            self._rows_left -= 1
        return row

    def __length_hint__(self) -> int:
        if not self._iterators:
            return 0
        return NotImplemented if self._rows_left is None else max(self._rows_left, 0)

    def _finish(self, row: dict[str, T]) -> None:
        """End the iteration: ``row`` holds the items of the iterators before the first exhausted one."""
        iterators, self._iterators = self._iterators, []
        exhausted = [iterators[len(row)][0]]
        for key, iterator in iterators[len(row) + 1 :]:
            try:
                next(iterator)
            except StopIteration:
                exhausted.append(key)
        self._check_lengths(exhausted, [key for key, _ in iterators])
        raise StopIteration

    @staticmethod
    def _check_lengths(exhausted: list[str], keys: list[str]) -> None:
        active = [key for key in keys if key not in exhausted]
        if active:
            raise ValueError(f"Iterators have different lengths. Exhausted: {exhausted}, Still active: {active}")

    def _refuse_shared_iterators(self) -> None:
        first_key: dict[int, str] = {}
        for key, iterator in self._iterators:
            other = first_key.setdefault(id(iterator), key)
            if other != key:
                raise ValueError(f"{other!r} and {key!r} hold the same iterator; give each its own, or a list")


def _length_of(values: Any) -> int | None:
    """How many items there are, None if that is not known in advance."""
    try:
        return len(values)
    except (TypeError, NotImplementedError, OverflowError):
        # wrappers of streams (torch's DataLoader, progress bars) have a `__len__` that raises; a range may be too long
        return None


def _iterator_of(key: str, values: Iterable[T]) -> Iterator[T]:
    try:
        return iter(values)
    except TypeError as error:
        error.add_note(f"the value of {key!r} is a {type(values).__name__}")
        raise
