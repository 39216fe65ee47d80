"""The two arms of the comparison: this project's Muon + AdamW, and ``torch.optim.AdamW``.

Each is tuned as well as the other: ``--sweep`` trains both at half, once and twice the learning rate in ``TUNED``,
which is the best of the three. Both see the same batches, schedule, initial weights and weight decay of zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from optim_dist import TritonDistMuonAdamW, checkpoint
from optim_utils import route_parameters


@dataclass(frozen=True)
class Rates:
    """Learning rates of a model: of Muon, of the AdamW beside it (embedding, head, norms), of the reference's AdamW."""

    muon: float
    beside_muon: float
    adamw: float


TUNED = {
    "tiny": Rates(muon=0.02, beside_muon=0.02, adamw=0.02),
    "small": Rates(muon=0.02, beside_muon=0.02, adamw=0.02),
    "d12": Rates(muon=0.02, beside_muon=2e-3, adamw=1e-3),
    "d20": Rates(muon=0.02, beside_muon=2e-3, adamw=1e-3),
}
#: What ``--sweep`` multiplies a tuned learning rate by; 1 is best of the three, for each arm.
SWEEP = (0.5, 1.0, 2.0)
BETAS = (0.9, 0.95)
EPS = 1e-10
KEPT = 2  # newest checkpoints of an arm


class Arm(Protocol):
    """A model with its optimizer, and how the two are saved and restored."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def save(self, folder: Path, step: int, extra: dict[str, Any]) -> None: ...
    def load(self, path: Path) -> dict[str, Any]: ...


@dataclass
class MuonArm:
    """Hidden matrices by Muon, the rest by AdamW, states and reduced gradients split over the ranks (ZeRO-2)."""

    model: nn.Module
    optimizer: TritonDistMuonAdamW

    @classmethod
    def build(cls, model: nn.Module, lr: float, beside_muon: float) -> MuonArm:
        groups = route_parameters(model).param_groups(
            muon={"lr": lr, "weight_decay": 0.0},
            adamw={"lr": beside_muon, "betas": BETAS, "eps": EPS, "weight_decay": 0.0},
        )
        return cls(model, TritonDistMuonAdamW(groups, model=model, accumulation_steps=1))

    def save(self, folder: Path, step: int, extra: dict[str, Any]) -> None:
        checkpoint.save(folder / f"step-{step:06d}", self.model, self.optimizer, extra=extra, keep=KEPT)

    def load(self, path: Path) -> dict[str, Any]:
        return checkpoint.load(path, self.model, self.optimizer)


@dataclass
class AdamWArm:
    """The reference: every rank holds the whole state; gradients are averaged by DistributedDataParallel."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def build(cls, model: nn.Module, lr: float) -> AdamWArm:
        fused = next(model.parameters()).is_cuda
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, eps=EPS, weight_decay=0.0, fused=fused)
        return cls(DistributedDataParallel(model) if dist.is_initialized() else model, optimizer)

    def save(self, folder: Path, step: int, extra: dict[str, Any]) -> None:
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        content = {"model": self._bare.state_dict(), "optimizer": self.optimizer.state_dict(), "extra": extra}
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / "unfinished"
        torch.save(content, unfinished)
        unfinished.rename(folder / f"step-{step:06d}")
        for path in sorted(folder.glob("step-*"))[:-KEPT]:
            path.unlink()

    def load(self, path: Path) -> dict[str, Any]:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            self._bare.load_state_dict(content["model"])
            self.optimizer.load_state_dict(content["optimizer"])
            return content["extra"]
        except Exception as error:  # of many kinds, as the file may have anything in it
            raise checkpoint.CheckpointError(path, [f"{type(error).__name__}: {error}"]) from error

    @property
    def _bare(self) -> nn.Module:
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model


def build_arm(name: str, model: nn.Module, lr: float, *, beside_muon: float) -> Arm:
    """The arm called ``muon`` or ``adamw`` over a freshly initialised ``model``."""
    if name == "muon":
        return MuonArm.build(model, lr, beside_muon)
    if name == "adamw":
        return AdamWArm.build(model, lr)
    raise ValueError(f"unknown arm {name!r}; known: muon, adamw")


def newest_checkpoint(name: str, folder: Path) -> Path | None:
    """What the arm called ``name`` can go on from in ``folder``."""
    return checkpoint.latest(folder) if name == "muon" else max(folder.glob("step-*"), default=None)
