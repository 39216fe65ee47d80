"""What an optimizer says of its step: one line in the log where plain torch updates, and tables for ``explain()``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from torch.optim import Optimizer

_logger = logging.getLogger(__name__)


def log_fallback(optimizer: Optimizer, reasons: Iterable[str]) -> None:
    """Log in one line why plain torch updates parameters; ``explain()`` says which."""
    distinct = sorted(set(reasons))
    if distinct:
        _logger.info("%s uses plain torch where %s; see explain()", type(optimizer).__name__, "; ".join(distinct))


def launches_line(count: int) -> str:
    """The line of ``explain()`` that counts the launches of a step."""
    return f"{count} launch{'es' * (count != 1)} a step"


def text_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, footer: Sequence[str]) -> str:
    """An aligned plain-text table, one line a row, then the lines of ``footer``."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, *footer])
