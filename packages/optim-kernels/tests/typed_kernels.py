"""What type checkers see of the public functions: checked by the session ``typecheck``, not run."""

from __future__ import annotations

from typing import assert_type

from torch import Tensor, nn

from optim_kernels import TritonAdamW, TritonMuon, clip_grad_norm_, newton_schulz
from optim_kernels.functional import sum_slices


def optimizers(model: nn.Module) -> TritonAdamW:
    TritonMuon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
    TritonAdamW(model.named_parameters(), stochastic_rounding="no")  # type: ignore[arg-type]
    return TritonAdamW(model.parameters(), lr=1e-3, state_dtype="int8", max_norm=1.0)


def functions(x: Tensor, model: nn.Module) -> None:
    assert_type(newton_schulz(x), Tensor)
    assert_type(newton_schulz([x, x]), list[Tensor])
    assert_type(clip_grad_norm_(model.parameters(), 1.0), Tensor)
    assert_type(sum_slices([x, x], x), Tensor)
