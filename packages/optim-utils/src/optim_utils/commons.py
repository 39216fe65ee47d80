"""Two small things that configuration code keeps needing: the concrete subclasses of a class, and batches."""

from abc import ABC
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from optim_utils._arguments import integer, iterated

__all__ = ["batched", "get_all_non_abstract_subclasses"]

T = TypeVar("T")


# to type checkers a class is what makes instances: given as `type[T]`, mypy refuses the abstract ones this is made for
def get_all_non_abstract_subclasses(cls: Callable[..., T]) -> list[type[T]]:
    """The concrete classes among ``cls`` and its live subclasses, depth-first in the order of their definition.

    A class counts as abstract if abstract methods are left in it, or if it names ``ABC`` itself among its bases: that
    is how a base class without abstract methods says that nobody should build it. A class that is reached by several
    ways (a diamond) appears once, where it is met first.
    """
    # to ask for the subclasses of these two is a mistake: they are all classes, or all metaclasses, of the process
    if not isinstance(cls, type) or cls is object or cls is type:
        raise TypeError(f"cls has to be a class other than object and type, got {cls!r}")
    found: list[type[T]] = []
    seen: set[type] = set()
    waiting: list[type[T]] = [cls]
    while waiting:
        candidate = waiting.pop()
        if candidate in seen:
            continue
        seen.add(candidate)
        if not getattr(candidate, "__abstractmethods__", None) and ABC not in candidate.__bases__:
            found.append(candidate)
        waiting.extend(reversed(_children(candidate)))
    return found


def _children(cls: type[T]) -> list[type[T]]:
    """The direct subclasses of ``cls`` in the order of their definition.

    ``@dataclass(slots=True)`` returns a new class. The original class, which nothing uses any more, stays among the
    subclasses until it is garbage collected. Both classes have the same dict of fields, and only the later one counts.
    """
    # works for metaclasses too, whose `cls.__subclasses__` is unbound
    classes = type.__subclasses__(cls)
    fields = [vars(child).get("__dataclass_fields__", child) for child in classes]
    latest = dict(zip(map(id, fields), classes))
    return [child for child, own in zip(classes, fields) if latest[id(own)] is child]


def batched(iterable: Iterable[T], n: int, *, strict: bool = False) -> Iterator[tuple[T, ...]]:
    """Yield the items of ``iterable`` in tuples of ``n``; the last one may be shorter, unless ``strict``.

    Lazy: it works on infinite iterables, and like any generator checks its arguments at the first ``next``.
    """
    size = integer(n, "n")
    if size < 1:
        raise ValueError(f"{n=} must be at least one")
    iterator = iterated(iterable, "iterable")
    while batch := tuple(islice(iterator, size)):
        if strict and len(batch) < size:
            raise ValueError(f"the last batch has {len(batch)} items instead of {n=}")
        yield batch
