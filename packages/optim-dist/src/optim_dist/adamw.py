"""AdamW over ranks: each updates the element ranges that it owns (formula: ``optim_kernels.reference.adamw``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from optim_dist._optimizer import DistOptimizer
from optim_dist._options import CommonOptions, Options
from optim_dist._shards import Item, Route, Shard, StepContext
from optim_dist.plan import RouteName
from optim_kernels.functional import AdamWPlan, adamw_


class AdamWRoute:
    """The elementwise update: any range of any parameter, all groups in one call."""

    def create_state(self, shard: Shard, group: dict[str, Any]) -> dict[str, Any]:
        """Moments in the dtype of the parameter, a step count on its device."""
        state = {
            "step": torch.zeros((), dtype=torch.float32, device=shard.value.device),
            "exp_avg": torch.zeros_like(shard.like),
            "exp_avg_sq": torch.zeros_like(shard.like),
        }
        if group.get("amsgrad"):
            state["max_exp_avg_sq"] = torch.zeros_like(shard.like)
        return state

    def update(self, items: Sequence[Item], context: StepContext, cache: dict[Any, Any]) -> None:
        # amsgrad has a tensor more, so that groups with and without it are two calls
        for amsgrad in (False, True):
            chosen = [item for item in items if bool(item.group.get("amsgrad")) is amsgrad]
            if chosen:
                self._update(chosen, context, amsgrad, cache.setdefault(amsgrad, AdamWPlan()))

    def _update(self, items: Sequence[Item], context: StepContext, amsgrad: bool, plan: AdamWPlan) -> None:
        adamw_(
            [item.shard.value for item in items],
            [item.shard.grad for item in items],
            [item.state["exp_avg"] for item in items],
            [item.state["exp_avg_sq"] for item in items],
            steps=[item.state["step"] for item in items],
            lr=[item.group["lr"] for item in items],
            betas=[tuple(item.group["betas"]) for item in items],
            eps=[item.group["eps"] for item in items],
            weight_decay=[item.group["weight_decay"] for item in items],
            maximize=[bool(item.group.get("maximize")) for item in items],
            max_exp_avg_sqs=[item.state["max_exp_avg_sq"] for item in items] if amsgrad else None,
            grad_scale=context.grad_scale,
            found_inf=context.found_inf,
            clip_factor=context.factor,
            indices=[item.shard.listed for item in items],
            starts=[item.shard.start for item in items],
            present=[context.count(item.shard) for item in items],
            plan=plan,
        )


class TritonDistAdamW(DistOptimizer):
    """``torch.optim.AdamW`` whose gradients, states and update are shared out over ranks, element by element.

    Args:
        params: parameters, ``(name, parameter)`` pairs or group dicts.
        options: what every optimizer of this package accepts; see ``optim_dist.Options``.
    """

    _routes: ClassVar[Mapping[RouteName, Route]] = {"adamw": AdamWRoute()}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        **options: Unpack[CommonOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        super().__init__(params, defaults, Options(**options))

    def _check_group(self, group: dict[str, Any]) -> None:
        check_adamw(group["lr"], group["betas"], group["eps"], group["weight_decay"])

    def _route_name(self, group: dict[str, Any]) -> RouteName:
        return "adamw"


def check_adamw(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> None:
    """Refuse hyperparameters as torch does."""
    if not isinstance(lr, Tensor) and not lr >= 0:
        raise ValueError(f"Invalid learning rate: {lr}")
    for place, beta in enumerate(betas):
        if not isinstance(beta, Tensor) and not 0 <= beta < 1:
            raise ValueError(f"Invalid beta parameter at index {place}: {beta}")
    if not eps >= 0:
        raise ValueError(f"Invalid epsilon value: {eps}")
    if not weight_decay >= 0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")
