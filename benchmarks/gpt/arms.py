"""The two arms of the comparison: this project's Muon + AdamW, and ``torch.optim.AdamW``.

Each is tuned as well as the other: ``--sweep`` trains both at three learning rates, and the defaults in ``TUNED`` are
the best of such a sweep. Both arms see the same batches, schedule, initial weights and weight decay of zero.
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

#: Learning rates by model and arm; for ``muon`` that of the matrices (the rest uses ``ADAMW_LR_BESIDE_MUON``).
TUNED = {
    "tiny": {"muon": 0.02, "adamw": 3e-3},
    "small": {"muon": 0.02, "adamw": 3e-3},
    "d12": {"muon": 0.02, "adamw": 1e-3},
    "d20": {"muon": 0.02, "adamw": 6e-4},
}
SWEEP = {"muon": (0.01, 0.02, 0.04), "adamw": (1e-3, 3e-3, 1e-2)}
ADAMW_LR_BESIDE_MUON = 3e-3
BETAS = (0.9, 0.95)
EPS = 1e-10


class Arm(Protocol):
    """A model with its optimizer, and how the two are saved and restored."""

    title: str
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def save(self, path: Path, extra: dict[str, Any]) -> None: ...
    def load(self, path: Path) -> dict[str, Any]: ...


@dataclass
class MuonArm:
    """Hidden matrices by Muon, the rest by AdamW, states and reduced gradients split over the ranks (ZeRO-2)."""

    model: nn.Module
    optimizer: TritonDistMuonAdamW
    title: str = "Muon + AdamW (optim-dist)"

    @classmethod
    def build(cls, model: nn.Module, lr: float, **options: Any) -> MuonArm:
        groups = route_parameters(model).param_groups(
            muon={"lr": lr, "weight_decay": 0.0},
            adamw={"lr": ADAMW_LR_BESIDE_MUON, "betas": BETAS, "eps": EPS, "weight_decay": 0.0},
        )
        return cls(model, TritonDistMuonAdamW(groups, model=model, accumulation_steps=1, **options))

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        checkpoint.save(path, self.model, self.optimizer, extra=extra)

    def load(self, path: Path) -> dict[str, Any]:
        return checkpoint.load(path, self.model, self.optimizer)


@dataclass
class AdamWArm:
    """The reference: every rank holds the whole state; gradients are averaged by DistributedDataParallel."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    title: str = "AdamW (torch.optim)"

    @classmethod
    def build(cls, model: nn.Module, lr: float) -> AdamWArm:
        fused = next(model.parameters()).is_cuda
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, eps=EPS, weight_decay=0.0, fused=fused)
        return cls(DistributedDataParallel(model) if dist.is_initialized() else model, optimizer)

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        content = {"model": self._bare.state_dict(), "optimizer": self.optimizer.state_dict(), "extra": extra}
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        torch.save(content, unfinished)
        unfinished.rename(path)

    def load(self, path: Path) -> dict[str, Any]:
        content = torch.load(path, map_location="cpu", weights_only=True)
        self._bare.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        return content["extra"]

    @property
    def _bare(self) -> nn.Module:
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model


def build_arm(name: str, model: nn.Module, lr: float) -> Arm:
    """The arm called ``muon`` or ``adamw`` over a freshly initialised ``model``."""
    if name == "muon":
        return MuonArm.build(model, lr)
    if name == "adamw":
        return AdamWArm.build(model, lr)
    raise ValueError(f"unknown arm {name!r}; known: muon, adamw")
