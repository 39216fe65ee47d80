"""Lists in errors, which may be long."""

from __future__ import annotations

from collections.abc import Sequence


def listed(texts: Sequence[str], most: int) -> str:
    """The first ``most`` of ``texts``, and how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more
