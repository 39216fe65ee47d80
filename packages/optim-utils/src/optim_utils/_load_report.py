"""What a load did, entry by entry, and the error that carries it when the load was refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Literal

from optim_utils._paths import Path, encode_path

Kind = Literal["loaded", "missing", "unexpected", "type", "shape", "dtype", "device", "cast"]


@dataclass(frozen=True, slots=True)
class LoadIssue:
    """One entry of a state: where it is (as a key of `flatten`), what became of it, what was there and what came."""

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
        mismatched: entries of another type, shape, dtype or on no device, which kept their old value.
        cast: the loaded entries that were converted from another floating-point dtype.
    """

    loaded: tuple[LoadIssue, ...] = ()
    missing: tuple[LoadIssue, ...] = ()
    unexpected: tuple[LoadIssue, ...] = ()
    mismatched: tuple[LoadIssue, ...] = ()
    cast: tuple[LoadIssue, ...] = ()

    def __add__(self, other: LoadReport) -> LoadReport:
        return LoadReport(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

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
        names = ("loaded", "missing", "unexpected", "mismatched", "cast")
        lines = [", ".join(f"{len(getattr(self, name))} {name}" for name in names)]
        issues = self.problems + self.cast
        if issues:
            rows = [("path", "kind", "expected", "found")]
            rows += [(issue.path, issue.kind, issue.expected, issue.found) for issue in issues]
            widths = [max(map(len, column)) for column in zip(*rows)]
            lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join(lines)


class StateLoadError(RuntimeError):
    """A load that was refused before anything was written; ``report`` holds all of its problems."""

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


@dataclass
class ReportBuilder:
    """Collects the issues of a load while it is planned."""

    loaded: list[LoadIssue] = field(default_factory=list)
    missing: list[LoadIssue] = field(default_factory=list)
    unexpected: list[LoadIssue] = field(default_factory=list)
    mismatched: list[LoadIssue] = field(default_factory=list)
    cast: list[LoadIssue] = field(default_factory=list)

    def add(self, path: Path, kind: Kind, expected: str = "nothing", found: str = "nothing") -> None:
        """Note that the entry at ``path`` is of ``kind``; a cast entry counts as loaded too."""
        issue = LoadIssue(encode_path(path), kind, expected, found)
        if kind == "loaded":
            self.loaded.append(issue)
        elif kind == "cast":
            self.loaded.append(issue)
            self.cast.append(issue)
        elif kind == "missing":
            self.missing.append(issue)
        elif kind == "unexpected":
            self.unexpected.append(issue)
        else:
            self.mismatched.append(issue)

    def build(self) -> LoadReport:
        return LoadReport(
            tuple(self.loaded), tuple(self.missing), tuple(self.unexpected), tuple(self.mismatched), tuple(self.cast)
        )
