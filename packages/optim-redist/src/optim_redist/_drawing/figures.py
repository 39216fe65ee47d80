"""Pictures as figures of matplotlib, which an extra installs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from colorsys import hls_to_rgb
from itertools import product
from typing import Any

from optim_redist._drawing.grids import Grid, hue, label, span
from optim_redist.errors import LayoutError


def layout_figure(grids: Sequence[Grid]) -> Any:
    """Grids beside one another."""
    figure = _figure_of(9)
    axes = figure.subplots(1, len(grids), squeeze=False)[0]
    for ax, grid in zip(axes, grids):
        _draw_grid(ax, grid, grid.title)
    return figure


def plan_figure(
    layouts: Sequence[tuple[str, Sequence[Grid]]], ranks: Sequence[int], sent: Mapping[tuple[int, int], int]
) -> Any:
    """The first slice of every layout from source to target, and the bytes from rank to rank."""
    figure = _figure_of(3 * (len(layouts) + 1))
    *places, heat = figure.subplots(1, len(layouts) + 1)
    for ax, (title, grids) in zip(places, layouts):
        _draw_grid(ax, grids[0], title)
    table = [[sent.get((sender, receiver), 0) for receiver in ranks] for sender in ranks]
    shown = heat.imshow(table, cmap="viridis")
    heat.set(title="bytes", xlabel="to rank", ylabel="from rank")
    heat.set_xticks(range(len(ranks)), [str(rank) for rank in ranks])
    heat.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
    figure.colorbar(shown, ax=heat)
    return figure


def _figure_of(width: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LayoutError('pictures with fmt="matplotlib" need matplotlib: pip install optim-redist[plots]') from error
    return Figure(figsize=(width, 3.2), layout="constrained")


def _draw_grid(ax: Any, grid: Grid, title: str) -> None:
    from matplotlib.patches import Rectangle

    rows, columns = len(grid.row_pieces), len(grid.column_pieces)
    for cell, (row, column) in zip(grid.cells, product(range(rows), range(columns))):
        colour = hls_to_rgb(hue(cell.ranks[0]) / 360, 0.75, 0.55) if cell.ranks else "white"
        ax.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="0.3"))
        ax.text(column + 0.5, row + 0.5, label(cell.ranks), ha="center", va="center", fontsize=7)
    ax.set(xlim=(0, columns), ylim=(rows, 0), title=title)
    ax.set_xticks([column + 0.5 for column in range(columns)], map(span, grid.column_pieces))
    ax.set_yticks([row + 0.5 for row in range(rows)], map(span, grid.row_pieces))
