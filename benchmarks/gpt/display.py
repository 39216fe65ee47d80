"""The terminal: a live bar where there is a terminal, a line every tenth of the run where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Column, Table

from benchmarks.gpt.training import History, Progress


class Display:
    """Prints on the first rank, and nowhere else."""

    def __init__(self, *, enabled: bool) -> None:
        self._live = enabled and sys.stdout.isatty()
        self._console = Console(quiet=not enabled, width=None if self._live else 140)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def table(self, header: list[str], rows: list[list[str]]) -> None:
        """The rows as a table, in which no word is broken, or as lines where the terminal is too narrow for that."""
        columns = list(zip(header, *rows))
        widths = [max(len(word) for text in column for word in text.split()) for column in columns]
        room = self._console.width - sum(widths) - 3 * len(widths) - 1  # beside borders and spaces
        if room < 0:
            for row in rows:
                self.note(", ".join(f"{name} {text}" for name, text in zip(header, row)))
            return
        for k, column in reversed(list(enumerate(columns))):  # numbers and units in one line rather than titles
            more = min(room, max(map(len, column)) - widths[k])
            widths[k], room = widths[k] + more, room - more
        table = Table(*(Column(name, width=width) for name, width in zip(header, widths)))
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    @contextmanager
    def progress(self, title: str, steps: int) -> Iterator[Progress]:
        """A callback for the training loop that shows loss, tokens per second and optimizer milliseconds."""
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"), TimeRemainingColumn(),
        )  # fmt: skip
        with RichProgress(*columns, console=self._console, disable=not self._live) as bar:
            task = bar.add_task(title, total=steps, figures="")

            def show(history: History, tokens_per_second: float, optimizer_ms: float) -> None:
                figures = (
                    f"loss {history.train_loss[-1]:.3f}  {tokens_per_second:,.0f} tok/s  opt {optimizer_ms:.2f} ms"
                )
                bar.update(task, completed=history.step, figures=figures)
                if not self._live and history.step % max(1, steps // 10) == 0:
                    self.note(f"{title}  {history.step}/{steps}  {figures}")

            yield show
