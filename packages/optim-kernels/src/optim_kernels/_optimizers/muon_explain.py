"""The rows of ``explain()`` for Muon parameters: how they are matrices, by which iteration, and what computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optim_kernels._optimizers.muon_batches import why_not_grouped
from optim_kernels._optimizers.muon_entries import explained_entry
from optim_kernels._optimizers.muon_options import ns_config_of
from optim_kernels._optimizers.muon_views import view_of

if TYPE_CHECKING:
    from optim_kernels.functional._muon_batch_plan import MuonBatchPlan

HEADER = ("parameter", "shape", "matrices", "method", "path", "reason", "tiles", "Gflop")


def tiles_of(plans: Sequence[MuonBatchPlan]) -> dict[int, str]:
    """The tiles of every parameter that grouped launches update, keyed by the parameter's id."""
    return {param: words for plan in plans for param, words in plan.tiles.items()}


def explain_row(
    name: str, place: int, group: dict[str, Any], state: Mapping[Tensor, dict[str, Any]], tiles: Mapping[int, str]
) -> list[object]:
    """The row of ``explain()`` for the Muon parameter at ``place`` in its group."""
    param = group["params"][place]
    view = view_of(param, group, place, name)
    config = ns_config_of(group).of(param)
    methods = sorted({config.method_for(min(shape[-2:]), max(shape[-2:])) for shape in view.shapes})
    reason = why_not_grouped(explained_entry(param, view, place, state.get(param) or {}), group)
    flops = sum(config.flops(*shape[-2:]) * shape[:-2].numel() for shape in map(torch.Size, view.shapes))
    return [
        name,
        tuple(param.shape),
        view.describe(),
        "+".join(methods),
        "triton" if reason is None else "torch",
        reason or "",
        tiles.get(id(param), "") if reason is None else "",
        f"{flops / 1e9:.3g}",
    ]
