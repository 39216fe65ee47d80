"""Pictures of layouts and plans: plain text, SVG, or a matplotlib figure, which saves itself as PNG.

A layout is drawn as a grid of cells, one for each pair of indices of two dimensions, labelled with the ranks that own
it; neighbouring indices with the same owners are drawn as one. Of a third dimension every piece is a grid of its own.
A plan is drawn as its source and the layout after each of its stages, with arrows between the ranks, as wide as what
they carry, and the table of what every rank sends to every other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from optim_redist._drawing.grids import Grid, grids_of, label, span
from optim_redist.errors import LayoutError, RedistError
from optim_redist.plan_text import align, traffic
from optim_redist.units import format_bytes

if TYPE_CHECKING:
    from optim_redist.layout import Layout
    from optim_redist.plans import Plan

PictureFormat = Literal["ascii", "svg", "matplotlib"]


def layout_picture(
    layout: Layout, shape: Sequence[int], dims: Sequence[int] = (0, 1), fmt: PictureFormat = "ascii"
) -> Any:
    """Which ranks own which cell of two dimensions; the pieces of the others are drawn one by one.

    Returns:
        text for "ascii" and "svg", a ``matplotlib.figure.Figure`` for "matplotlib".
    """
    _check(fmt)
    grids = grids_of(layout, shape, dims)
    if fmt == "ascii":
        return "\n\n".join(_grid_text(grid) for grid in grids)
    if fmt == "svg":
        from optim_redist._drawing.svg import Drawing

        drawing = Drawing()
        for grid in grids:
            drawing.grid(grid, 0, drawing.height)
        return drawing.finish()
    from optim_redist._drawing.figures import draw_grid, figure_of

    figure = figure_of(9, 3.2)
    axes = figure.subplots(1, len(grids), squeeze=False)[0]
    for ax, grid in zip(axes, grids):
        draw_grid(ax, grid)
    return figure


def plan_picture(plan: Plan, fmt: PictureFormat = "ascii") -> Any:
    """The source, the layout after each stage, and what goes from rank to rank."""
    _check(fmt)
    ranks = sorted({*plan.src.mesh.ranks, *plan.dst.mesh.ranks})
    layouts = [("source", plan.src)]
    layouts += [(f"after {stage.op}", stage.dst) for stage in plan.stages[:-1]]
    layouts.append(("target", plan.dst))
    if fmt == "svg":
        from optim_redist._drawing.svg import plan_drawing

        return plan_drawing(plan, layouts, ranks)
    if fmt == "matplotlib":
        from optim_redist._drawing.figures import plan_figure

        return plan_figure(plan, layouts, ranks)
    parts = [part for title, layout in layouts for part in (f"{title} {layout}", layout_picture(layout, plan.shape))]
    return "\n\n".join([*parts, _heat_text(plan, ranks)])


def save_picture(plan: Plan, path: Path) -> None:
    """Write the picture of a plan to a file whose name ends in .svg, or as matplotlib knows it, such as .png."""
    if path.suffix == ".svg":
        path.write_text(plan_picture(plan, "svg"), encoding="utf-8")
    else:
        figure = plan_picture(plan, "matplotlib")
        known = figure.canvas.get_supported_filetypes()
        if path.suffix[1:] not in known:
            raise RedistError(f"pictures are written as {sorted(known)}, got {path.name!r}")
        figure.savefig(path)


def _check(fmt: str) -> None:
    if fmt not in ("ascii", "svg", "matplotlib"):
        raise LayoutError(f"fmt is ascii, svg or matplotlib, got {fmt!r}")


def _grid_text(grid: Grid) -> str:
    """Cells between lines, row and column indices outside."""
    labels = [label(cell.ranks) or "·" for cell in grid.cells]
    width = max(map(len, [*labels, *map(span, grid.column_pieces)]))
    margin = max(len(span(piece)) for piece in grid.row_pieces)
    per_row = len(grid.column_pieces)
    line = " " * margin + " +" + ("-" * (width + 2) + "+") * per_row
    text = [
        " " * margin + "  " + " ".join(span(piece).center(width + 2) for piece in grid.column_pieces).rstrip(),
        line,
    ]
    for number, piece in enumerate(grid.row_pieces):
        row = labels[number * per_row : (number + 1) * per_row]
        text.append(f"{span(piece).rjust(margin)} | " + " | ".join(label.center(width) for label in row) + " |")
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
