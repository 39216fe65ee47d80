"""The grids that a picture of a layout shows: cells of two dimensions with the ranks that own them, slice by slice.

Neighbouring indices with the same owners form one piece; every piece of a third dimension gets a grid of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import TYPE_CHECKING, NamedTuple

from optim_redist._mesh import int_tuple
from optim_redist.errors import LayoutError
from optim_redist.index_sets import intervals

if TYPE_CHECKING:
    from optim_redist.layout import Layout

_MAX_PIECES = 64


class Cell(NamedTuple):
    """A rectangle of the grid with one set of owners."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    ranks: tuple[int, ...]


class Grid(NamedTuple):
    """One slice of a tensor: its cells row by row, and what it is a slice of."""

    title: str
    row_pieces: list[tuple[int, int]]
    column_pieces: list[tuple[int, int]]
    cells: list[Cell]


def _pieces(layout: Layout, shape: Sequence[int], tensor_dim: int) -> list[tuple[int, int]]:
    """The maximal intervals of a dimension whose indices have the same owners."""
    ends = {0, shape[tensor_dim]}
    for held in layout.index_sets(shape)[tensor_dim]:
        # a cyclic dimension may have too many intervals to list before it is refused
        most = max((run.repeats for run in held), default=0)
        if most > _MAX_PIECES:
            raise LayoutError(_too_large(f"{most} pieces on one rank of dimension {tensor_dim}"))
        for start, stop in intervals(held):
            ends |= {start, stop}
    return list(pairwise(sorted(ends)))


def _too_large(what: str) -> str:
    most = f"at most {_MAX_PIECES} each"
    return f"a picture of {what} is too large to read ({most}); choose a smaller shape or larger blocks"


def grids_of(layout: Layout, shape: Sequence[int], dims: Sequence[int] = (0, 1)) -> list[Grid]:
    """A grid for each piece of the dimensions that are not shown.

    Raises:
        LayoutError: if there is nothing to draw, or too much.
    """
    layout.check_shape(shape)
    if 0 in shape:
        raise LayoutError(f"a tensor of shape {tuple(shape)} has no elements to draw")
    # of a tensor of fewer than two dimensions, the ones that it lacks may be named, too
    num_dims = max(2, len(shape))
    dims = int_tuple(dims, "dims")
    if len(dims) != 2 or len(set(dims)) != 2 or not all(0 <= tensor_dim < num_dims for tensor_dim in dims):
        raise LayoutError(f"dims names two different dimensions of the tensor's {len(shape)}, from 0 on, got {dims}")
    shown = [tensor_dim for tensor_dim in dims if tensor_dim < len(shape)]
    pieces = [_pieces(layout, shape, tensor_dim) for tensor_dim in range(len(shape))]
    # a tensor of fewer than two dimensions is drawn as one row
    rows = pieces[shown[0]] if len(shown) == 2 else [(0, 1)]
    columns = pieces[shown[-1]] if shown else [(0, 1)]
    others = [tensor_dim for tensor_dim in range(len(shape)) if tensor_dim not in shown]
    slices = list(product(*(pieces[tensor_dim] for tensor_dim in others)))
    if max(len(rows), len(columns), len(slices)) > _MAX_PIECES:
        raise LayoutError(_too_large(f"{len(rows)}×{len(columns)} pieces in {len(slices)} slices"))
    owned = {rank: layout.indices(shape, rank) for rank in layout.mesh.ranks}

    def owners(point: dict[int, int]) -> tuple[int, ...]:
        return tuple(
            sorted(
                rank
                for rank, held in owned.items()
                if all(any(a <= i < b for a, b in intervals(held[tensor_dim])) for tensor_dim, i in point.items())
            )
        )

    grids = []
    for chosen in slices:
        point = {tensor_dim: start for tensor_dim, (start, _) in zip(others, chosen)}
        cells = []
        for row, column in product(rows, columns):
            here = dict(point)
            if len(shown) == 2:
                here[shown[0]] = row[0]
            if shown:
                here[shown[-1]] = column[0]
            cells.append(Cell(row, column, owners(here)))
        title = ", ".join(f"dim {tensor_dim} = {span(piece)}" for tensor_dim, piece in zip(others, chosen))
        grids.append(Grid(title, rows, columns, cells))
    return grids


def hue(rank: int) -> float:
    """The hue of a rank's colour in degrees, a golden angle apart from those of its neighbours."""
    return rank * 137.508 % 360


def span(piece: tuple[int, int]) -> str:
    start, stop = piece
    return str(start) if stop == start + 1 else f"{start}..{stop - 1}"


def label(ranks: Sequence[int]) -> str:
    """Ranks as text, runs of them shortened, six at most."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks[:6])) + (",…" if len(ranks) > 6 else "")
