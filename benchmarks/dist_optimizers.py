"""What the distributed benchmarks step: our optimizers over ranks, and torch's of one process, set alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from optim_dist import TritonDistAdamW, TritonDistMuonAdamW

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0, "variant": "torch"}


def our_optimizer(matrices: Sequence[Tensor], others: Sequence[Tensor], **options: Any) -> Any:
    """Muon for the matrices, if there are any, and AdamW for the others, in one optimizer."""
    if not matrices:
        return TritonDistAdamW(others, **ADAMW, **options)
    groups = [{"kind": "muon", "params": matrices, **MUON}, {"kind": "adamw", "params": others, **ADAMW}]
    return TritonDistMuonAdamW(groups, **options)


def torch_optimizers(matrices: Sequence[Tensor], others: Sequence[Tensor]) -> list[torch.optim.Optimizer]:
    """The same as two optimizers of torch's, AdamW fused on GPUs."""
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, **ADAMW, fused=others[0].is_cuda)]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=MUON["lr"], weight_decay=MUON["weight_decay"]))
    return optimizers
