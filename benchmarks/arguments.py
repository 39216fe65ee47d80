"""What command lines of several benchmarks are made of."""

from __future__ import annotations

import argparse


class RequestError(ValueError):
    """What the command line asks for cannot be done; the text says why, and what to do."""


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option for a file of the rows."""
    parser.add_argument("--json", help="write rows, machine and versions to this file")


def count(text: str) -> int:
    """A whole number from 1 on: a size, or how many of something."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)
