"""Bytes, seconds and tables as people write them."""

from __future__ import annotations

from collections.abc import Sequence

from optim_redist.errors import RedistError

_MOST_DIGITS = 4000  # Python refuses to read more than 4300
_FOUR_DIGITS = 999.5  # from here on a number rounds to 1000, which three digits write as 1e+03


def format_bytes(size: float) -> str:
    """``size`` bytes with three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < _FOUR_DIGITS:
            return f"{size:.3g} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1024
    return f"{size:.3g} TiB"


def parse_bytes(text: str) -> int:
    """Bytes from 4096, 64KiB or 1.5GiB; KB, MB, GB and TB are decimal."""
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", 1):
        units |= {f"{letter}iB": 1024**power, f"{letter}B": 1000**power}
    digits = text.rstrip("BiKMGT")
    try:
        return round(float(digits) * units[text[len(digits) :].strip()])
    except (ValueError, KeyError, OverflowError):
        raise RedistError(f"a size is written 4096, 64KiB or 2GiB, got {text!r}") from None


def is_count(text: str) -> bool:
    """Whether the text is a whole number, of no more digits than Python reads."""
    return text.isdecimal() and len(text) <= _MOST_DIGITS


def format_seconds(seconds: float) -> str:
    """A time with three digits, from microseconds to seconds; whole seconds from 1000 on."""
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < _FOUR_DIGITS:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < _FOUR_DIGITS else f"{seconds:.0f} s"


def align(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Rows as a table: columns as wide as their widest cell, those in ``right`` flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(w) if column in right else cell.ljust(w) for column, (cell, w) in enumerate(zip(row, widths))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
