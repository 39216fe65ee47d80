"""What every benchmark writes: the machine, versions, date and command, a table, JSON for machines, and a picture.

report = Report("AdamW step")
report.add(list="d20", what="ours", ms=1.92, note="graph")
report.publish(path)          # heading, table and clocks on stdout; the same rows in a file, if there is a path
report.save_plot(path, value="ms", labels=["what"], group="list")
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("optim-utils", "optim-kernels", "optim-redist", "optim-dist", "triton", "numpy")


def versions() -> dict[str, str]:
    """Versions of what figures depend on, and the commit; what cannot be found is left out."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            found[package] = _version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if commit := _said(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]):
        found["commit"] = commit
    return found


def _version(package: str) -> str:
    """Of what is imported from this checkout the checkout's own: an installer notes that of the day it ran, or none."""
    spec = find_spec(package.replace("-", "_"))
    if spec is not None and spec.origin is not None and ROOT / "packages" in Path(spec.origin).resolve().parents:
        project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
        return str(project["version"])
    return importlib.metadata.version(package)


def command() -> str:
    """The command that repeats this process, with torchrun where that has started it."""
    ranks, nodes = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("GROUP_WORLD_SIZE", "1")
    launcher = ["python"]
    if ranks is not None:
        launcher = ["torchrun", *(["--nnodes", nodes] if nodes != "1" else []), "--nproc-per-node", ranks]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name] if spec is not None else [sys.argv[0]]
    return shlex.join([*launcher, *program, *sys.argv[1:]])


def machine() -> dict[str, Any]:
    """The processor and, where there are some, the GPUs with their driver."""
    facts: dict[str, Any] = {"cpu": _cpu_name(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "sms": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            **clocks("driver_version"),
        }
    return facts


def clocks(fields: str = "clocks.sm,clocks.mem,power.draw,temperature.gpu") -> dict[str, str]:
    """What nvidia-smi says of the first GPU at this moment; empty where it cannot be asked."""
    answer = _said(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"])
    return dict(zip(fields.split(","), (value.strip() for value in answer.split(",")), strict=True)) if answer else {}


def _said(program: Sequence[str]) -> str:
    """What a program prints; nothing if there is none, or it fails."""
    try:
        return subprocess.run(program, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


class Report:
    """Rows of one benchmark together with what is needed to repeat it."""

    def __init__(self, title: str, *, note: str = "", announce: bool = True) -> None:
        self.title = title
        self.note = note
        self.command = command()
        self.date = datetime.now(UTC).isoformat(timespec="seconds")
        self.rows: list[Row] = []
        self._announce = announce

    def add(self, **row: Any) -> None:
        """Append a row, and say it on stderr; columns appear in the order in which they are first used."""
        self.rows.append(row)
        if self._announce:
            print("  ".join(f"{key} {_text(value)}" for key, value in row.items()), file=sys.stderr, flush=True)

    def heading(self) -> str:
        """Title, command, date, machine and versions, a line each, and the note if there is one."""
        facts = ", ".join(f"{key} {value}" for key, value in machine().items())
        packages = ", ".join(f"{key} {value}" for key, value in versions().items())
        lines = [self.title, f"$ {self.command}", f"{self.date}; {facts}", packages, self.note]
        return "\n".join(filter(None, lines))

    def table(self) -> str:
        """The rows as an aligned text table: numbers with four significant digits, to the right."""
        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        cells = [[_text(row.get(column)) for column in columns] for row in self.rows]
        widths = [max(len(column), *(len(row[i]) for row in cells)) for i, column in enumerate(columns)]
        numeric = [any(isinstance(row.get(column), int | float) for row in self.rows) for column in columns]
        lines = [columns, ["-" * width for width in widths], *cells]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(line, widths, numeric)
            ).rstrip()
            for line in lines
        )

    def show(self) -> None:
        """Print heading and table, and behind them the clocks that a GPU has at the end."""
        print(f"{self.heading()}\n\n{self.table()}\n", flush=True)
        if now := clocks():
            print(", ".join(f"{key} {value}" for key, value in now.items()), flush=True)

    def publish(self, path: str | Path | None) -> None:
        """Show the report, and write the rows to a file that was asked for."""
        self.show()
        if path:
            self.save_json(path)

    def save_json(self, path: str | Path) -> None:
        """Write the rows with machine, versions, command, date and clocks."""
        content = {
            "title": self.title,
            "command": self.command,
            "date": self.date,
            "machine": machine(),
            "versions": versions(),
            "note": self.note,
            "clocks": clocks(),
            "rows": self.rows,
        }
        _prepared(path).write_text(json.dumps(content, indent=1, default=str) + "\n")

    def save_plot(self, path: str | Path, *, value: str, labels: Sequence[str], group: str | None = None) -> None:
        """Draw ``value`` as horizontal bars named by the columns ``labels``, one panel for each value of ``group``."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        rows = [row for row in self.rows if isinstance(row.get(value), int | float)]
        panels = list(dict.fromkeys(row.get(group) if group else self.title for row in rows))
        bars = [[row for row in rows if not group or row.get(group) == panel] for panel in panels]
        heights = [0.6 + 0.28 * len(panel) for panel in bars]
        figure, axes = pyplot.subplots(
            len(panels), 1, figsize=(8, sum(heights) + 0.6), squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for axis, panel, panel_rows in zip(axes[:, 0], panels, bars):
            names = [" ".join(_text(row.get(label)) for label in labels) for row in panel_rows]
            container = axis.barh(range(len(names)), [row[value] for row in panel_rows], color="#4477aa")
            axis.bar_label(container, fmt="%.4g", padding=3)
            axis.set_yticks(range(len(names)), names)
            axis.invert_yaxis()
            if group:
                axis.set_title(str(panel), fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
        axes[-1, 0].set_xlabel(value)
        figure.suptitle(self.title)
        figure.tight_layout()
        figure.savefig(_prepared(path), dpi=150)
        pyplot.close(figure)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _prepared(path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
