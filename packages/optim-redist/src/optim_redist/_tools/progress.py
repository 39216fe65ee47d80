"""A progress bar on stderr; plain lines, one every few seconds, where stderr is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TextIO, TypeVar

T = TypeVar("T")


def progress(items: Sequence[T], label: str, *, stream: TextIO | None = None, every: float = 5.0) -> Iterator[T]:
    """Yield the items while a bar shows how many are done and how long the rest will take."""
    out = stream or sys.stderr
    live = out.isatty()
    started = shown = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        last = done == len(items)
        if last or now - shown >= (0.1 if live else every):
            shown = now
            left = (now - started) / done * (len(items) - done)
            bar = "#" * (24 * done // len(items))
            text = f"{label} [{bar:<24}] {done}/{len(items)}, {now - started:.0f} s, {left:.0f} s left"
            out.write(f"\r{text}\x1b[K" + ("\n" if last else "") if live else text + "\n")
            out.flush()
