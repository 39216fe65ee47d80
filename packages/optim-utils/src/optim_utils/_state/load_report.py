"""The report of a load, entry by entry, without any contents; the error that carries the report of a refused load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from optim_utils._state.paths import Path, encode_path, join_paths

Kind = Literal["loaded", "missing", "unexpected", "type", "shape", "dtype", "device", "memory", "cast"]


@dataclass(frozen=True, slots=True)
class LoadIssue:
    """One entry of a state: its place (a key of `flatten`), what became of it, what was expected and what was found."""

    path: str
    kind: Kind
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The entries of a load, each in the tuples that it belongs to.

    Attributes:
        loaded: entries that were taken over (or would have been, in a refused load).
        missing: entries of the object that the state does not have.
        unexpected: entries of the state that the object does not have.
        mismatched: entries of another type, shape or dtype, without memory on one side (meta), or whose memory cannot
            be written; they kept their old values.
        cast: the loaded entries that were converted from another floating-point dtype.
    """

    loaded: tuple[LoadIssue, ...] = ()
    missing: tuple[LoadIssue, ...] = ()
    unexpected: tuple[LoadIssue, ...] = ()
    mismatched: tuple[LoadIssue, ...] = ()
    cast: tuple[LoadIssue, ...] = ()

    @classmethod
    def of(cls, issues: Iterable[LoadIssue]) -> LoadReport:
        """The report on ``issues``, in their order."""
        lists: dict[str, list[LoadIssue]] = {entry.name: [] for entry in fields(cls)}
        for issue in issues:
            lists[issue.kind if issue.kind in lists else "mismatched"].append(issue)
            if issue.kind == "cast":
                lists["loaded"].append(issue)
        return cls(**{name: tuple(listed) for name, listed in lists.items()})

    def inside(self, path: Path) -> list[LoadIssue]:
        """The issues of this report, with the paths that they have if its object is at ``path`` of a larger one."""
        return [replace(issue, path=join_paths(path, issue.path)) for issue in self.loaded + self.problems]

    @property
    def problems(self) -> tuple[LoadIssue, ...]:
        """Everything that was not taken over as it came."""
        return self.missing + self.unexpected + self.mismatched

    @property
    def ok(self) -> bool:
        """Whether the object and the state had the same entries, and each could be taken over."""
        return not self.problems

    def __str__(self) -> str:
        """A line of counts, then a table of every entry that was not simply loaded."""
        lines = [", ".join(f"{len(getattr(self, entry.name))} {entry.name}" for entry in fields(self))]
        issues = self.problems + self.cast
        if issues:
            rows = [("path", "kind", "expected", "found")]
            rows += [(issue.path, issue.kind, issue.expected, issue.found) for issue in issues]
            widths = [max(map(len, column)) for column in zip(*rows)]
            lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join(lines)


class StateLoadError(RuntimeError):
    """A load that was refused, before anything was written unless its text says otherwise.

    ``report`` holds all of its problems.
    """

    def __init__(self, message: str, report: LoadReport) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type[StateLoadError], tuple[str, LoadReport]]:
        return type(self), (str(self), self.report)

    @classmethod
    def refuse(cls, report: LoadReport) -> StateLoadError:
        """The error for a report with problems, whose text is the report's table."""
        kinds = Counter(issue.kind for issue in report.problems)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        return cls(f"refused to load a state ({counts}); nothing was changed\n{report}", report)

    @classmethod
    def too_late(cls, report: LoadReport, path: Path) -> StateLoadError:
        """The error for an object that took a state in the rehearsal and refuses it after others have been written."""
        return cls(
            f"the object at {encode_path(path)} refused its state after others had been written\n{report}", report
        )


def in_words(issue: LoadIssue) -> str:
    """An issue as a line of a log."""
    return f"{issue.kind} {issue.path}: expected {issue.expected}, found {issue.found}"


def describe(value: object) -> str:
    """What a value is, for reports: its type, shape and dtype, never its contents."""
    if isinstance(value, Tensor):
        name = "Tensor" if isinstance(value, torch.nn.Parameter) else type(value).__name__
        device = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{device}"
    if isinstance(value, dict | list | tuple | set):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def describe_both(live: object, loaded: object) -> tuple[str, str]:
    """`describe` of each, computed only once if they are alike, as most are."""
    expected = describe(live)
    if type(live) is not type(loaded):
        return expected, describe(loaded)
    if isinstance(live, Tensor) and isinstance(loaded, Tensor):
        alike = live.shape == loaded.shape and live.dtype == loaded.dtype and live.device == loaded.device
    else:
        alike = not isinstance(live, dict | list | tuple | set)
    return expected, expected if alike else describe(loaded)
