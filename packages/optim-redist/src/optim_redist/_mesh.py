"""A grid of ranks with axes that may have names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from operator import index
from typing import Any

from optim_redist._tools.files import undamaged
from optim_redist._tools.lazy import lazy
from optim_redist.errors import LayoutError

Axis = int | str

# Every rank is listed, and planning takes some 15 µs for each.
_MOST_RANKS = 2**20

_is_word = re.compile(r"\w(?:[\w -]*\w)?").fullmatch


def int_tuple(values: int | Iterable[int], what: str) -> tuple[int, ...]:
    try:
        found = (values,) if isinstance(values, int) else tuple(values)
    except TypeError:
        raise LayoutError(f"{what} must be integers, got {values!r}") from None
    for value in found:
        if not isinstance(value, int) or isinstance(value, bool):
            raise LayoutError(f"{what} must be integers, got {value!r} in {found!r}")
    return found


def as_shape(shape: Iterable[int]) -> tuple[int, ...]:
    """The sizes as a tuple, which may still hold what is no size."""
    try:
        return tuple(shape)
    except TypeError:
        raise LayoutError(f"shape must be a sequence of sizes, got {shape!r}") from None


@lru_cache(maxsize=256)
def grid_points(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The points of a grid, row-major."""
    return tuple(product(*map(range, sizes)))


@lru_cache(maxsize=4096)
def coordinates(sizes: tuple[int, ...], axes: tuple[int, ...]) -> list[int]:
    """For every point of a grid, in row-major order, its linear coordinate on ``axes``, major to minor."""
    steps, step = [0] * len(sizes), 1
    for axis in reversed(axes):
        steps[axis] = step
        step *= sizes[axis]
    found = [0]  # coordinates on the axes after the current one
    for n, step in zip(reversed(sizes), reversed(steps)):
        found = [digit + inner for digit in range(0, n * step, step) for inner in found] if step else found * n
    return found


def _flat(values: Iterable[Any]) -> list[int]:
    found: list[int] = []
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool):
            found.append(value)
        elif isinstance(value, Iterable) and not isinstance(value, str):
            found += _flat(value)
        else:
            raise LayoutError(f"ranks are integers, in lists of any depth, got {value!r} of {type(value).__name__}")
    return found


@dataclass(frozen=True, init=False)
class Mesh:
    """A grid of global ranks, row-major: the last axis varies fastest.

    ``Mesh(8)``, ``Mesh((4, 2), names=("x", "y"))``, ``Mesh((2, 2), ranks=[[0, 4], [1, 5]])``. Without ``ranks`` the
    grid is numbered 0, 1, 2, …
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...] | None
    ranks: tuple[int, ...]
    is_ascending: bool = field(repr=False, compare=False)  # whether ranks ascend in grid order
    _hash: int = field(repr=False, compare=False)

    def __init__(
        self,
        sizes: int | Sequence[int],
        names: Sequence[str] | None = None,
        ranks: Sequence[Any] | None = None,
    ) -> None:
        shape = int_tuple(sizes, "mesh sizes")
        if any(size < 1 for size in shape):
            raise LayoutError(f"every mesh axis needs at least one rank, got sizes {shape}")
        total = prod(shape)
        if total > _MOST_RANKS:
            raise LayoutError(f"a mesh has {_MOST_RANKS} ranks at most, got sizes {shape}, which are {total}")
        if names is not None:
            names = tuple(names) if isinstance(names, Iterable) else (names,)
            if not all(isinstance(name, str) for name in names):
                raise LayoutError(f"names of mesh axes are texts, one for each of {len(shape)}, got {names}")
            if len(names) != len(shape) or len(set(names)) != len(names):
                raise LayoutError(f"a mesh of {len(shape)} axes needs as many different names, got {names}")
        # arrays and tensors give their values as lists
        listed: Any = getattr(ranks, "tolist", lambda: ranks)()
        order = tuple(range(total)) if listed is None else tuple(_flat([listed]))
        if len(order) != total or len(set(order)) != total or min(order, default=0) < 0:
            raise LayoutError(f"a mesh of sizes {shape} needs {total} different ranks >= 0, got {order}")
        # meshes are in the keys of every cache, so their hash is computed once
        ascending = ranks is None or list(order) == sorted(order)
        vars(self).update(sizes=shape, names=names, ranks=order, is_ascending=ascending, _hash=hash((shape, order)))

    @classmethod
    def ascending(cls, sizes: tuple[int, ...], ranks: tuple[int, ...]) -> Mesh:
        """The mesh of these sizes over ranks that ascend; nothing is checked."""
        made = cls.__new__(cls)
        vars(made).update(sizes=sizes, names=None, ranks=ranks, is_ascending=True, _hash=hash((sizes, ranks)))
        return made

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # not by its attributes, since a hash may differ in another process
        return Mesh, (self.sizes, self.names, self.ranks)

    def __eq__(self, other: object) -> bool:
        # names are for people: they change nothing that a rank holds
        if not isinstance(other, Mesh):
            return NotImplemented
        return self is other or (self.sizes == other.sizes and self.ranks == other.ranks)

    @property
    def num_axes(self) -> int:
        return len(self.sizes)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @lazy
    def coordinates(self) -> dict[int, tuple[int, ...]]:
        """The grid coordinates of every rank, in grid order."""
        return dict(zip(self.ranks, grid_points(self.sizes)))

    def axis(self, axis: Axis) -> int:
        """The number of an axis given by number or name."""
        if isinstance(axis, str):
            if self.names is None or axis not in self.names:
                unnamed = f"{self.num_axes} axes have numbers, from 0, and no names"
                known = f"axes are {self.names}" if self.names else unnamed
                raise LayoutError(f"the mesh has no axis {axis!r}; its {known}")
            return self.names.index(axis)
        try:
            if isinstance(axis, bool):
                raise TypeError("True and False are no axes")
            number = index(axis)
        except TypeError:
            hint = f", a class: write {axis.__name__}(…)" if isinstance(axis, type) else ""
            raise LayoutError(f"a mesh axis is a number or a name, got {axis!r}{hint}") from None
        if not 0 <= number < self.num_axes:
            raise LayoutError(f"mesh axis {number} is outside a mesh of {self.num_axes} axes")
        return number

    @lazy
    def axis_names(self) -> tuple[str, ...]:
        """The axes' names in texts; their numbers if a name has a character that separates names there."""
        if self.names is not None and all(map(_is_word, self.names)):
            return self.names
        return tuple(map(str, range(len(self.sizes))))

    def __str__(self) -> str:
        sizes = (
            f"{name}={size}" if self.names else str(size)
            for name, size in zip(self.names or [""] * self.num_axes, self.sizes)
        )
        shown = "" if self.ranks == tuple(range(self.num_ranks)) else f" ranks={list(self.ranks)}"
        return f"[{','.join(sizes)}]{shown}"

    def to_json(self) -> dict[str, Any]:
        numbered = self.ranks == tuple(range(self.num_ranks))
        return {
            "sizes": list(self.sizes),
            "names": None if self.names is None else list(self.names),
            "ranks": None if numbered else list(self.ranks),
        }

    @classmethod
    @undamaged("the JSON of a mesh", LayoutError)
    def from_json(cls, data: Mapping[str, Any]) -> Mesh:
        return cls(data["sizes"], data.get("names"), data.get("ranks"))
