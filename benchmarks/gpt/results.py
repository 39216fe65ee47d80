"""What the main job leaves: a table on the terminal, a PNG of the curves, a JSON with everything."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpt.training import History


@dataclass
class Result:
    """One finished arm."""

    arm: str
    title: str
    lr: float
    history: History

    @property
    def final_validation_loss(self) -> float:
        return self.history.validation[-1][1]

    @property
    def optimizer_ms(self) -> float:
        """Of the median step: the first one compiles kernels."""
        return statistics.median(self.history.optimizer_ms)

    @property
    def optimizer_share(self) -> float:
        """Of the median step's time."""
        return self.optimizer_ms / statistics.median(self.history.step_ms)

    def row(self) -> list[str]:
        history = self.history
        return [
            self.title,
            f"{self.lr:g}",
            f"{self.final_validation_loss:.3f}",
            f"{history.seconds:.1f} s",
            f"{self.optimizer_ms:.2f} ms",
            f"{100 * self.optimizer_share:.1f} %",
            f"{history.peak_bytes / 2**20:.0f} MiB" if history.peak_bytes else "not known",
        ]


HEADER = ["optimizer", "lr", "validation loss", "time", "optimizer / step", "optimizer share", "peak memory"]


def write_json(path: Path, results: list[Result], about: dict[str, Any]) -> None:
    """Everything of the run, machine and settings included, in one file."""
    content = {
        "format": "train_gpt/1",
        **about,
        "results": [
            {"arm": r.arm, "title": r.title, "lr": r.lr, "final_validation_loss": r.final_validation_loss}
            | asdict(r.history)
            for r in results
        ],
    }
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(json.dumps(content, indent=1))
    unfinished.replace(path)


def draw_curves(path: Path, results: list[Result], title: str) -> None:
    """Training loss (thin, smoothed over ten steps) and validation loss (dots) of every result."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for result in results:
        smooth = _moving_mean(result.history.train_loss, 10)
        (line,) = axes.plot(range(1, len(smooth) + 1), smooth, linewidth=1, alpha=0.7)
        steps, losses = zip(*result.history.validation, strict=True)
        label = f"{result.title}, lr {result.lr:g}: {losses[-1]:.3f}"
        axes.plot(steps, losses, "o-", color=line.get_color(), label=label)
    axes.set(title=title, xlabel="step", ylabel="loss, nats a byte (line: training, dots: validation)")
    axes.grid(alpha=0.3)
    axes.legend()
    unfinished = path.with_name(f".{path.name}")
    figure.savefig(unfinished, dpi=130)
    unfinished.replace(path)
    plt.close(figure)


def _moving_mean(values: list[float], window: int) -> list[float]:
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(window, i + 1) for i in range(len(values))]
