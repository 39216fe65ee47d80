"""What command lines of several benchmarks are made of."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number from 1 on: a size, or how many of something."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)
