"""A progress bar on stderr; plain lines, one every few seconds, where stderr is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

_EVERY = 5.0  # seconds

T = TypeVar("T")


def progress(items: Sequence[T], label: str) -> Iterator[T]:
    """Yield the items while a bar shows how many are done and how long the rest will take."""
    out = sys.stderr
    live = out.isatty()
    started = shown = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        last = done == len(items)
        if last or now - shown >= (0.1 if live else _EVERY):
            shown = now
            left = (now - started) / done * (len(items) - done)
            bar = "#" * (24 * done // len(items))
            text = f"{label} [{bar:<24}] {done}/{len(items)}, {now - started:.0f} s, {left:.0f} s left"
            out.write(f"\r{text}\x1b[K" + ("\n" if last else "") if live else text + "\n")
            out.flush()
