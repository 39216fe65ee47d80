"""What type checkers see of the public functions: checked by the session ``typecheck``, not run."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from optim_dist import TritonDistAdamW, TritonDistMuon, checkpoint
from optim_dist.reducers import for_fsdp


def optimizers(model: nn.Module) -> TritonDistAdamW:
    TritonDistMuon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
    TritonDistAdamW(dict(model.named_parameters()))
    TritonDistAdamW([{"params": list(model.parameters()), "lr": 1e-3}], max_norm=1.0)
    TritonDistAdamW(model)  # type: ignore[arg-type]
    TritonDistMuon(3)  # type: ignore[arg-type]
    return TritonDistAdamW(model.named_parameters(), lr=3e-4)


def steps(model: nn.Module, optimizer: TritonDistAdamW) -> None:
    assert_type(optimizer.clip_grad_norm_(1.0), Tensor)
    assert_type(checkpoint.save("a", model, optimizer), Path)
    assert_type(checkpoint.save("b", model, optimizer, async_=True), checkpoint.Saving)
    assert_type(checkpoint.latest("."), Path | None)


def sharded(model: FSDPModule) -> None:
    model.set_custom_reduce_scatter(for_fsdp())
