"""The training loop: one arm, one learning rate, from the first step or from a checkpoint, one rank or many.

The global batch of a step is a function of the step alone, and rank r takes rows r, r + W, r + 2W, …; so any number
of ranks trains on the same data and the loss curves agree up to the order of the sums.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.arguments import RequestError
from benchmarks.gpt.arms import Arm, build_arm, newest_checkpoint
from benchmarks.gpt.clock import Stopwatch, peak_memory_bytes, reset_peak_memory
from benchmarks.gpt.data import Corpus
from benchmarks.gpt.model import GPT, GPTConfig, next_byte_loss


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run. Sizes are global: per step, over all ranks."""

    config: GPTConfig
    steps: int
    batch_size: int
    context: int
    seed: int
    warmup_steps: int
    max_norm: float
    beside_muon: float  # learning rate of the AdamW beside Muon
    device: torch.device
    dtype: torch.dtype
    eval_every: int
    eval_batches: int
    save_every: int

    def what_decides_the_curve(self) -> dict[str, Any]:
        """Plain values that a resumed run must share with the one it goes on with."""
        names = (
            "steps",
            "batch_size",
            "context",
            "seed",
            "warmup_steps",
            "max_norm",
            "beside_muon",
            "eval_every",
            "eval_batches",
        )
        return asdict(self.config) | {name: getattr(self, name) for name in names} | {"dtype": str(self.dtype)}


@dataclass
class History:
    """What a run leaves behind; plain numbers, so that it travels inside a checkpoint."""

    train_loss: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)
    validation: list[list[float]] = field(default_factory=list)  # [step, loss]
    seconds: float = 0.0
    optimizer_seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def step(self) -> int:
        return len(self.train_loss)


#: Called after every step with the history so far, tokens per second and the step's optimizer milliseconds.
Progress = Callable[[History, float, float], None]


def train(
    arm_name: str,
    lr: float,
    settings: Settings,
    corpus: Corpus,
    *,
    checkpoints: Path,
    resume: bool = False,
    stop_at: int | None = None,
    progress: Progress = lambda history, tokens_per_second, optimizer_ms: None,
) -> History:
    """Train to ``settings.steps`` (or to ``stop_at``, saving there) and return the history of the whole run."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    curve = settings.what_decides_the_curve() | {"lr": lr, "text": corpus.fingerprint()}
    torch.manual_seed(settings.seed)
    model = GPT(settings.config).to(settings.device)
    arm = build_arm(arm_name, model, lr, beside_muon=settings.beside_muon)
    saved = newest_checkpoint(arm_name, checkpoints) if resume else None
    history = History() if saved is None else _restore(arm, saved, curve)
    validation = corpus.validation_batches(
        num_batches=settings.eval_batches, batch_size=settings.batch_size, context=settings.context
    )
    for group in arm.optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    reset_peak_memory(settings.device)
    last_step = settings.steps if stop_at is None else min(stop_at, settings.steps)
    while history.step < last_step:
        step = history.step
        began = time.perf_counter()
        inputs, targets = corpus.batch(
            step, batch_size=settings.batch_size, context=settings.context, seed=settings.seed
        )
        _set_learning_rate(arm.optimizer, step, settings)
        loss, optimizer_ms = _step(arm, inputs[rank::world_size], targets[rank::world_size], settings)
        history.train_loss.append(_mean_over_ranks(loss))
        took = time.perf_counter() - began
        history.seconds += took
        history.step_ms.append(1e3 * took)
        history.optimizer_ms.append(optimizer_ms())
        history.optimizer_seconds += history.optimizer_ms[-1] / 1e3
        history.peak_bytes = max(history.peak_bytes, peak_memory_bytes(settings.device))
        if history.step % settings.eval_every == 0 or history.step == settings.steps:
            loss = evaluate(arm.model, validation, settings, rank, world_size)
            history.validation.append([float(history.step), loss])
        if history.step % settings.save_every == 0 or history.step == last_step:
            arm.save(checkpoints, history.step, {"history": vars(history), "curve": curve})
        progress(history, settings.batch_size * settings.context / took, history.optimizer_ms[-1])
    return history


def _restore(arm: Arm, checkpoint: Path, curve: dict[str, Any]) -> History:
    saved = arm.load(checkpoint)
    try:
        then, history = saved["curve"], History(**saved["history"])
    except (KeyError, TypeError) as error:
        raise RequestError(
            f"{checkpoint} is not of this version of the program: {type(error).__name__}: {error}; leave out --resume"
        ) from error
    differing = [
        f"{name} was {value}, now {curve.get(name)}" for name, value in then.items() if value != curve.get(name)
    ]
    if differing:
        raise RequestError(
            f"{checkpoint.parent} belongs to another run: {', '.join(differing)}; give the same settings, or leave out "
            "--resume"
        )
    return history


def _step(arm: Arm, inputs: Tensor, targets: Tensor, settings: Settings) -> tuple[Tensor, Callable[[], float]]:
    """Forward, backward, clip and update; the loss, and how long clip and update took (ms, asked for later)."""
    inputs, targets = inputs.to(settings.device), targets.to(settings.device)
    with _autocast(settings):
        loss = next_byte_loss(arm.model, inputs, targets)
    loss.backward()
    watch = Stopwatch(settings.device)
    with watch:
        if hasattr(arm.optimizer, "clip_grad_norm_"):
            arm.optimizer.clip_grad_norm_(settings.max_norm)
        else:
            nn.utils.clip_grad_norm_(arm.model.parameters(), settings.max_norm)
        arm.optimizer.step()
        arm.optimizer.zero_grad(set_to_none=True)
    return loss.detach(), watch.milliseconds


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], settings: Settings, rank: int, world_size: int
) -> float:
    """Mean validation loss, nats a byte; every rank takes its share of each batch."""
    total = torch.zeros((), device=settings.device)
    for inputs, targets in batches:
        inputs, targets = (t[rank::world_size].to(settings.device) for t in (inputs, targets))
        with _autocast(settings):
            total += next_byte_loss(model, inputs, targets)
    return _mean_over_ranks(total / len(batches))


def _set_learning_rate(optimizer: torch.optim.Optimizer, step: int, settings: Settings) -> None:
    """Linear warm-up, then constant, then linear decay to zero over the last half."""
    warmup = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    decay = min(1.0, 2.0 * (settings.steps - step) / settings.steps)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * warmup * decay


def _mean_over_ranks(value: Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return float(value)


def _autocast(settings: Settings) -> contextlib.AbstractContextManager[Any]:
    if settings.dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(settings.device.type, dtype=settings.dtype)
