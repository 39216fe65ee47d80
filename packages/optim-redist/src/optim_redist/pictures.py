"""Pictures of layouts and plans: plain text, SVG, or a matplotlib figure, which saves itself as PNG.

A layout is drawn as a grid of cells, one for each pair of indices of two dimensions, labelled with the ranks that own
it; neighbouring indices with the same owners are drawn as one piece. Each piece of a third dimension gets a grid of its
own. A plan is drawn as its source, the layout after each of its stages, and a table of what every rank sends to every
other; SVG also has arrows between the ranks, whose width shows how much they carry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from optim_redist._drawing.grids import Grid, grids_of, label, span
from optim_redist.errors import LayoutError, RedistError
from optim_redist.units import align, format_bytes

if TYPE_CHECKING:
    from optim_redist.layout import Layout

PictureFormat = Literal["ascii", "svg", "matplotlib"]


def layout_picture(
    layout: Layout, shape: Sequence[int], dims: Sequence[int] = (0, 1), fmt: PictureFormat = "ascii"
) -> Any:
    """Which ranks own which cell of two dimensions: one grid for each combination of pieces of the other dimensions.

    Returns:
        text for "ascii" and "svg", a ``matplotlib.figure.Figure`` for "matplotlib".
    """
    _check(fmt)
    grids = grids_of(layout, shape, dims)
    if fmt == "ascii":
        return _grids_text(grids)
    if fmt == "svg":
        from optim_redist._drawing.svg import layout_drawing

        return layout_drawing(grids)
    from optim_redist._drawing.figures import layout_figure

    return layout_figure(grids)


def plan_picture(
    layouts: Sequence[tuple[str, Layout]],
    shape: Sequence[int],
    ranks: Sequence[int],
    sent: Mapping[tuple[int, int], int],
    fmt: PictureFormat = "ascii",
) -> Any:
    """A plan's source, the layout after each stage, and the bytes from rank to rank.

    Args:
        layouts: (title, layout) pairs, the first one titled "source".
        sent: bytes by (sender, receiver).
    """
    _check(fmt)
    drawn = [(f"{title} {layout}", grids_of(layout, shape)) for title, layout in layouts]
    if fmt == "svg":
        from optim_redist._drawing.svg import plan_drawing

        return plan_drawing(drawn, ranks, sent)
    if fmt == "matplotlib":
        from optim_redist._drawing.figures import plan_figure

        return plan_figure(drawn, ranks, sent)
    parts = [part for title, grids in drawn for part in (title, _grids_text(grids))]
    return "\n\n".join([*parts, _heat_text(ranks, sent)])


def save_picture(draw: Callable[[PictureFormat], Any], path: Path) -> None:
    """Write what ``draw`` returns to ``path``: SVG if it ends in .svg, else a format of matplotlib such as .png."""
    if path.suffix == ".svg":
        path.write_text(draw("svg"), encoding="utf-8")
    else:
        figure = draw("matplotlib")
        known = figure.canvas.get_supported_filetypes()
        if path.suffix[1:] not in known:
            raise RedistError(f"pictures are written as {sorted(known)}, got {path.name!r}")
        figure.savefig(path)


def _check(fmt: str) -> None:
    if fmt not in ("ascii", "svg", "matplotlib"):
        raise LayoutError(f"fmt is ascii, svg or matplotlib, got {fmt!r}")


def _grids_text(grids: Sequence[Grid]) -> str:
    return "\n\n".join(map(_grid_text, grids))


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


def _heat_text(ranks: Sequence[int], sent: Mapping[tuple[int, int], int]) -> str:
    """Bytes from every rank to every other, a dot for none."""
    if not sent:
        return "nothing goes from rank to rank"
    rows = [["from\\to", *map(str, ranks), "sends"]]
    for sender in ranks:
        sizes = [sent.get((sender, receiver), 0) for receiver in ranks]
        rows.append([str(sender), *(format_bytes(size) if size else "·" for size in sizes), format_bytes(sum(sizes))])
    received = [sum(sent.get((sender, receiver), 0) for sender in ranks) for receiver in ranks]
    rows.append(["receives", *map(format_bytes, received), ""])
    return align(rows, right=range(1, len(ranks) + 2))
