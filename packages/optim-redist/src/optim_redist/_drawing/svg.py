"""Pictures as SVG, written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from optim_redist._drawing.grids import Grid, hue, label, span
from optim_redist.units import format_bytes

_CELL, _GAP, _FONT = 26, 28, 11  # pixels


def _colour(rank: int) -> str:
    return f"hsl({hue(rank):.0f} 55% 70%)"


class Drawing:
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
        wide = max([_CELL, *(7 * len(label(cell.ranks)) + 8 for cell in grid.cells)])
        left, top = left + 40, top + _GAP + (16 if grid.title else 0)
        if grid.title:
            self.text(left, top - 22, grid.title, "start")
        for number, piece in enumerate(grid.column_pieces):
            self.text(left + (number + 0.5) * wide, top - 6, span(piece))
        for number, piece in enumerate(grid.row_pieces):
            self.text(left - 6, top + (number + 0.5) * _CELL + 4, span(piece), "end")
        for number, cell in enumerate(grid.cells):
            row, column = divmod(number, len(grid.column_pieces))
            fill = _colour(cell.ranks[0]) if cell.ranks else "white"
            title = f"[{span(cell.rows)}, {span(cell.columns)}] on ranks {', '.join(map(str, cell.ranks))}"
            self.box(left + column * wide, top + row * _CELL, wide, _CELL, fill, label(cell.ranks), title)
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


def layout_drawing(grids: Sequence[Grid]) -> str:
    """Grids below one another."""
    drawing = Drawing()
    for grid in grids:
        drawing.grid(grid, 0, drawing.height)
    return drawing.finish()


def plan_drawing(
    layouts: Sequence[tuple[str, Sequence[Grid]]], ranks: Sequence[int], sent: Mapping[tuple[int, int], int]
) -> str:
    """The layouts from source to target on the left, ranks with arrows in the middle, the heat map on the right."""
    largest = max(sent.values(), default=1)
    drawing = Drawing()
    right = bottom = 0.0
    for title, grids in layouts:
        drawing.text(10, bottom + 16, title, "start")
        left, top = 0.0, bottom + 16
        for grid in grids:
            left, low = drawing.grid(grid, left, top)
            right, bottom = max(right, left), max(bottom, low)
        bottom += 10
    left = max(right, float(drawing.width)) + 50
    step = 30
    drawing.text(left, 16, "sends", "middle")
    drawing.text(left + 160, 16, "receives", "middle")
    for row, rank in enumerate(ranks):
        for x in (left, left + 160):
            drawing.box(x - 16, 28 + row * step, 32, 20, _colour(rank), str(rank), f"rank {rank}")
    for (sender, receiver), size in sorted(sent.items()):
        drawing.arrow(
            left + 18,
            38 + ranks.index(sender) * step,
            left + 142,
            38 + ranks.index(receiver) * step,
            0.6 + 5 * size / largest,
            f"{sender} → {receiver}: {format_bytes(size)}",
        )
    _heat_map(drawing, ranks, sent, left + 220)
    return drawing.finish()


def _heat_map(drawing: Drawing, ranks: Sequence[int], sent: Mapping[tuple[int, int], int], left: float) -> None:
    largest = max(sent.values(), default=1)
    drawing.text(left, 16, "bytes from (rows) to (columns)", "start")
    for row, sender in enumerate(ranks):
        drawing.text(left + 14, 62 + row * 20, str(sender), "end")
        drawing.text(left + 28 + row * 20, 44, str(sender))
        for column, receiver in enumerate(ranks):
            size = sent.get((sender, receiver), 0)
            fill = f"hsl(210 70% {97 - 57 * size / largest:.0f}%)" if size else "white"
            title = f"{sender} → {receiver}: {format_bytes(size)}"
            drawing.box(left + 18 + column * 20, 48 + row * 20, 20, 20, fill, "", title)
