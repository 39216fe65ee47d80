"""Pictures of layouts and plans: plain text, SVG written by hand, or a matplotlib figure.

A layout is drawn as a grid of cells, one for each pair of indices of two dimensions, labelled with the ranks that own
it; neighbouring indices with the same owners are drawn as one. Of a third dimension every piece is a grid of its own.
A plan is drawn as its source and its target with arrows between the ranks, as wide as what they carry, and the table
of what every rank sends to every other.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from optim_redist.errors import LayoutError
from optim_redist.index_sets import intervals
from optim_redist.plan_text import align, format_bytes, traffic

if TYPE_CHECKING:
    from optim_redist.layout import Layout
    from optim_redist.planning import Plan

PictureFormat = Literal["ascii", "svg", "matplotlib"]

_CELL, _GAP, _FONT = 26, 28, 11  # pixels
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


def layout_picture(
    layout: Layout, shape: Sequence[int], dims: Sequence[int] = (0, 1), fmt: PictureFormat = "ascii"
) -> Any:
    """Which ranks own which cell of two dimensions; the pieces of the others are drawn one by one.

    Returns:
        text for "ascii" and "svg", a ``matplotlib.figure.Figure`` for "matplotlib".
    """
    _check(fmt)
    grids = _grids(layout, shape, dims)
    if fmt == "ascii":
        return "\n\n".join(_grid_text(grid) for grid in grids)
    if fmt == "svg":
        drawing = _Drawing()
        for grid in grids:
            drawing.grid(grid, 0, drawing.height)
        return drawing.finish()
    figure = _figure()
    axes = figure.subplots(1, len(grids), squeeze=False)[0]
    for ax, grid in zip(axes, grids):
        _draw_grid(ax, grid)
    return figure


def plan_picture(plan: Plan, fmt: PictureFormat = "ascii") -> Any:
    """Source and target, and what goes from rank to rank."""
    _check(fmt)
    pairs = traffic(plan)
    ranks = sorted({*plan.src.mesh.ranks, *plan.dst.mesh.ranks})
    if fmt == "ascii":
        parts = [f"source {plan.src}", layout_picture(plan.src, plan.shape)]
        parts += [f"target {plan.dst}", layout_picture(plan.dst, plan.shape), _heat_text(plan, ranks)]
        return "\n\n".join(parts)
    if fmt == "svg":
        return _plan_svg(plan, ranks)
    figure = _figure()
    left, right, heat = figure.subplots(1, 3)
    _draw_grid(left, _grids(plan.src, plan.shape)[0], "source")
    _draw_grid(right, _grids(plan.dst, plan.shape)[0], "target")
    table = [[pairs.get((sender, receiver), 0) * plan.itemsize for receiver in ranks] for sender in ranks]
    shown = heat.imshow(table, cmap="viridis")
    heat.set(title="bytes", xlabel="to rank", ylabel="from rank")
    heat.set_xticks(range(len(ranks)), [str(rank) for rank in ranks])
    heat.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
    figure.colorbar(shown, ax=heat)
    return figure


def _check(fmt: str) -> None:
    if fmt not in ("ascii", "svg", "matplotlib"):
        raise LayoutError(f"fmt is ascii, svg or matplotlib, got {fmt!r}")


# -- what there is to draw


def _pieces(layout: Layout, shape: Sequence[int], tensor_dim: int) -> list[tuple[int, int]]:
    """The maximal intervals of a dimension whose indices have the same owners."""
    ends = {0, shape[tensor_dim]}
    for held in layout.index_sets(shape)[tensor_dim]:
        for start, stop in intervals(held):
            ends |= {start, stop}
    return list(pairwise(sorted(ends)))


def _grids(layout: Layout, shape: Sequence[int], dims: Sequence[int] = (0, 1)) -> list[Grid]:
    layout.check_shape(shape)
    shown = [tensor_dim for tensor_dim in dims if tensor_dim < len(shape)]
    if len(dims) != 2 or len(set(dims)) != 2 or min(dims) < 0:
        raise LayoutError(f"dims names two different tensor dimensions, got {tuple(dims)}")
    pieces = [_pieces(layout, shape, tensor_dim) for tensor_dim in range(len(shape))]
    # a tensor of fewer than two dimensions is drawn as one row
    rows = pieces[shown[0]] if len(shown) == 2 else [(0, 1)]
    columns = pieces[shown[-1]] if shown else [(0, 1)]
    others = [tensor_dim for tensor_dim in range(len(shape)) if tensor_dim not in shown]
    slices = list(product(*(pieces[tensor_dim] for tensor_dim in others)))
    if max(len(rows), len(columns), len(slices)) > _MAX_PIECES:
        raise LayoutError(
            f"a picture of {len(rows)}×{len(columns)} pieces in {len(slices)} slices is too large to read (at most "
            f"{_MAX_PIECES} each); choose a smaller shape or larger blocks"
        )
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
        title = ", ".join(f"dim {tensor_dim} = {_span(piece)}" for tensor_dim, piece in zip(others, chosen))
        grids.append(Grid(title, rows, columns, cells))
    return grids


def _span(piece: tuple[int, int]) -> str:
    start, stop = piece
    return str(start) if stop == start + 1 else f"{start}..{stop - 1}"


def _label(ranks: Sequence[int], most: int = 6) -> str:
    """Ranks as text, runs of them shortened."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks[:most])) + (",…" if len(ranks) > most else "")


# -- text


def _grid_text(grid: Grid) -> str:
    """Cells between lines, row and column indices outside."""
    labels = [_label(cell.ranks) or "·" for cell in grid.cells]
    width = max(map(len, [*labels, *map(_span, grid.column_pieces)]))
    margin = max(len(_span(piece)) for piece in grid.row_pieces)
    per_row = len(grid.column_pieces)
    line = " " * margin + " +" + ("-" * (width + 2) + "+") * per_row
    text = [
        " " * margin + "  " + " ".join(_span(piece).center(width + 2) for piece in grid.column_pieces).rstrip(),
        line,
    ]
    for number, piece in enumerate(grid.row_pieces):
        row = labels[number * per_row : (number + 1) * per_row]
        text.append(f"{_span(piece).rjust(margin)} | " + " | ".join(label.center(width) for label in row) + " |")
        text.append(line)
    return "\n".join([f"{grid.title}:", *text] if grid.title else text)


def _heat_text(plan: Plan, ranks: Sequence[int]) -> str:
    """Bytes from every rank to every other, a dot for none."""
    pairs = traffic(plan)
    if not pairs:
        return "nothing goes from rank to rank"
    rows = [["from\\to", *map(str, ranks), "sends"]]
    for sender in ranks:
        sizes = [pairs.get((sender, receiver), 0) for receiver in ranks]
        cells = [format_bytes(size * plan.itemsize) if size else "·" for size in sizes]
        rows.append([str(sender), *cells, format_bytes(sum(sizes) * plan.itemsize)])
    received = [sum(pairs.get((sender, receiver), 0) for sender in ranks) for receiver in ranks]
    rows.append(["receives", *(format_bytes(size * plan.itemsize) for size in received), ""])
    return align(rows, right=range(1, len(ranks) + 2))


# -- SVG


def _colour(rank: int, strength: float = 1.0) -> str:
    """A colour of its own for every rank: hues a golden angle apart."""
    return f"hsl({rank * 137.508 % 360:.0f} 55% {95 - 25 * strength:.0f}%)"


class _Drawing:
    """SVG elements, and the size they have grown to."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.width = self.height = 0

    def _grow(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, round(x)), max(self.height, round(y))

    def text(self, x: float, y: float, text: str, anchor: str = "middle") -> None:
        self.parts.append(f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>')
        self._grow(x + 7 * len(text), y + 4)

    def box(self, x: float, y: float, width: float, height: float, fill: str, label: str, title: str) -> None:
        self.parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" fill="{fill}" stroke="#555">'
            f"<title>{escape(title)}</title></rect>"
        )
        self._grow(x + width, y + height)
        if label:
            self.text(x + width / 2, y + height / 2 + 4, label)

    def arrow(self, x0: float, y0: float, x1: float, y1: float, width: float, title: str) -> None:
        self.parts.append(
            f'<line x1="{x0:.0f}" y1="{y0:.0f}" x2="{x1:.0f}" y2="{y1:.0f}" stroke="#345" stroke-opacity="0.45" '
            f'stroke-width="{width:.1f}" marker-end="url(#head)"><title>{escape(title)}</title></line>'
        )
        self._grow(max(x0, x1), max(y0, y1))

    def grid(self, grid: Grid, left: float, top: float) -> tuple[float, float]:
        """Draw the cells of a grid; returns its lower right corner."""
        wide = max([_CELL, *(7 * len(_label(cell.ranks)) + 8 for cell in grid.cells)])
        left, top = left + 40, top + _GAP + (16 if grid.title else 0)
        if grid.title:
            self.text(left, top - 22, grid.title, "start")
        for number, piece in enumerate(grid.column_pieces):
            self.text(left + (number + 0.5) * wide, top - 6, _span(piece))
        for number, piece in enumerate(grid.row_pieces):
            self.text(left - 6, top + (number + 0.5) * _CELL + 4, _span(piece), "end")
        for number, cell in enumerate(grid.cells):
            row, column = divmod(number, len(grid.column_pieces))
            fill = _colour(cell.ranks[0]) if cell.ranks else "white"
            title = f"[{_span(cell.rows)}, {_span(cell.columns)}] on ranks {', '.join(map(str, cell.ranks))}"
            self.box(left + column * wide, top + row * _CELL, wide, _CELL, fill, _label(cell.ranks), title)
        return left + len(grid.column_pieces) * wide, top + len(grid.row_pieces) * _CELL

    def finish(self) -> str:
        size = (
            f'width="{self.width + 10}" height="{self.height + 10}" viewBox="0 0 {self.width + 10} {self.height + 10}"'
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="{_FONT}">'
            '<defs><marker id="head" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="5" markerHeight="5" '
            'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 L6 3 L0 6 z" fill="#345"/></marker></defs>'
        )
        return "\n".join([head, *self.parts, "</svg>"]) + "\n"


def _plan_svg(plan: Plan, ranks: Sequence[int]) -> str:
    """Source over target on the left, ranks with arrows in the middle, the heat map on the right."""
    pairs = traffic(plan)
    largest = max(pairs.values(), default=1)
    drawing = _Drawing()
    drawing.text(10, 16, f"source {plan.src}", "start")
    right, bottom = drawing.grid(_grids(plan.src, plan.shape)[0], 0, 16)
    drawing.text(10, bottom + 26, f"target {plan.dst}", "start")
    far, _ = drawing.grid(_grids(plan.dst, plan.shape)[0], 0, bottom + 26)
    left = max(right, far, float(drawing.width)) + 50
    step = 30
    drawing.text(left, 16, "sends", "middle")
    drawing.text(left + 160, 16, "receives", "middle")
    for row, rank in enumerate(ranks):
        for x in (left, left + 160):
            drawing.box(x - 16, 28 + row * step, 32, 20, _colour(rank), str(rank), f"rank {rank}")
    for (sender, receiver), size in sorted(pairs.items()):
        drawing.arrow(
            left + 18,
            38 + ranks.index(sender) * step,
            left + 142,
            38 + ranks.index(receiver) * step,
            0.6 + 5 * size / largest,
            f"{sender} → {receiver}: {format_bytes(size * plan.itemsize)}",
        )
    _heat_svg(drawing, plan, ranks, left + 220)
    return drawing.finish()


def _heat_svg(drawing: _Drawing, plan: Plan, ranks: Sequence[int], left: float) -> None:
    pairs = traffic(plan)
    largest = max(pairs.values(), default=1)
    drawing.text(left, 16, "bytes from (rows) to (columns)", "start")
    for row, sender in enumerate(ranks):
        drawing.text(left + 14, 62 + row * 20, str(sender), "end")
        drawing.text(left + 28 + row * 20, 44, str(sender))
        for column, receiver in enumerate(ranks):
            size = pairs.get((sender, receiver), 0)
            fill = f"hsl(210 70% {97 - 57 * size / largest:.0f}%)" if size else "white"
            title = f"{sender} → {receiver}: {format_bytes(size * plan.itemsize)}"
            drawing.box(left + 18 + column * 20, 48 + row * 20, 20, 20, fill, "", title)


# -- matplotlib


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LayoutError('pictures with fmt="matplotlib" need matplotlib: pip install optim-redist[plots]') from error
    return Figure(figsize=(9, 3.2), layout="constrained")


def _draw_grid(ax: Any, grid: Grid, title: str = "") -> None:
    from matplotlib.patches import Rectangle

    rows, columns = len(grid.row_pieces), len(grid.column_pieces)
    for cell, (row, column) in zip(grid.cells, product(range(rows), range(columns))):
        hue = (cell.ranks[0] * 137.508 % 360) / 360 if cell.ranks else 0.0
        ax.add_patch(Rectangle((column, row), 1, 1, facecolor=_rgb(hue), edgecolor="0.3"))
        ax.text(column + 0.5, row + 0.5, _label(cell.ranks), ha="center", va="center", fontsize=7)
    ax.set(xlim=(0, columns), ylim=(rows, 0), title=title or grid.title)
    ax.set_xticks([column + 0.5 for column in range(columns)], map(_span, grid.column_pieces))
    ax.set_yticks([row + 0.5 for row in range(rows)], map(_span, grid.row_pieces))


def _rgb(hue: float) -> tuple[float, float, float]:
    from colorsys import hls_to_rgb

    return hls_to_rgb(hue, 0.75, 0.55)
