"""Muon over ranks: each orthogonalizes the matrices that it owns (formula: ``optim_kernels.reference.muon``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from optim_dist._optimizers.base import DistOptimizer
from optim_dist._optimizers.construction import name_in_group
from optim_dist._optimizers.options import CommonOptions
from optim_dist._optimizers.shards import Item, Route, Shard, StepContext, takes_zeros
from optim_dist.plan import RouteName
from optim_kernels.muon_groups import (
    MuonEntry,
    MuonPlanner,
    check_group,
    check_param,
    check_state,
    given_options,
    init_state,
    muon_defaults,
    view_of,
)
from optim_utils.param_groups import MatrixView


class MuonRoute:
    """The update of whole matrices, a bucket at a time; a group's options and views decide what a matrix is."""

    def check_group(self, group: dict[str, Any], *, stepped: bool) -> None:
        check_group(group, loaded=stepped)
        for place, parameter in enumerate(group["params"]):
            check_param(parameter, group, name_in_group(group, place))

    def views(self, group: dict[str, Any]) -> Sequence[MatrixView]:
        return [
            view_of(parameter, group, place, name_in_group(group, place))
            for place, parameter in enumerate(group["params"])
        ]

    def block(self, parameter: Tensor, group: Mapping[str, Any]) -> int:
        return 1

    def complete_state(self, shard: Shard, group: dict[str, Any], state: dict[str, Any]) -> None:
        init_state(shard.like.detach(), _view(shard), group, state)

    def check_state(self, shard: Shard, group: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        check_state(shard.like, _view(shard), group, state, shard.name)

    def encode_state(self, shard: Shard, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise AssertionError("momentum has no codes")

    def update(self, items: Sequence[Item], context: StepContext, cache: dict[Any, Any]) -> None:
        if "planner" not in cache:
            cache["planner"] = context.new_planner()
        planner: MuonPlanner = cache["planner"]
        scalars: dict[str, Any] = {
            "clip_factor": context.factor,
            "grad_scale": context.grad_scale,
            "found_inf": context.found_inf,
        }
        if context.may_repeat and cache.get("latest") is items and planner.again(**scalars):
            return
        # keyed by ``id`` of the group: a parameter with multipliers has another copy of its group
        by_group: dict[int, tuple[dict[str, Any], list[MuonEntry]]] = {}
        for item in items:
            if not is_missing(item, context):
                shard = item.shard
                entry = MuonEntry(
                    shard.value, shard.gradient_or_zeros, item.state, _view(shard), shard.number, shard.name
                )
                by_group.setdefault(id(item.group), (item.group, []))[1].append(entry)
        planner.step(list(by_group.values()), **scalars)
        cache["latest"] = items if context.may_repeat else None

    def forget(self, cache: dict[Any, Any]) -> None:
        cache.pop("latest", None)
        if "planner" in cache:
            # the planner itself stays: it keeps memory that CUDA graphs of the caller read
            cache["planner"].forget()


# The constructor's arguments that are options of a group, with their defaults.
ARGUMENTS: Mapping[str, Any] = {
    "lr": 0.02,
    "momentum": 0.95,
    "nesterov": True,
    "ns_steps": 5,
    "weight_decay": 0.0,
    "maximize": False,
}


class TritonDistMuon(DistOptimizer):
    """Muon for matrices: gradients reduced to their owners, orthogonalized there, and gathered from there.

    Args:
        params: matrices ``[..., m, n]``, ``(name, parameter)`` pairs or group dicts; a group may hold mixed shapes.
        variant: a name of ``optim_kernels.VARIANTS``; by default ``"nanochat-2025"``, or ``"nanochat-2026-01"`` if
            ``beta2`` is given. It does not change the defaults of this signature (``lr``, ``momentum``,
            ``weight_decay``, ...). A group may name another variant, and any single option. What such a group leaves
            out is taken from its variant, options of this signature included, unless the constructor was given another
            value than the default (an ``lr``, say).
        lr, momentum, nesterov, ns_steps, beta2, weight_decay, maximize: as in ``optim_kernels.TritonMuon``.
        options: what every optimizer of this package accepts; see ``optim_dist.Options``.
    """

    _routes: ClassVar[Mapping[RouteName, Route]] = {"muon": MuonRoute()}
    _group_options: ClassVar[Set[str]] = muon_defaults("torch").keys()

    _beta2: float | None = None  # the constructor's argument; ``defaults`` may have the variant's

    def __init__(
        self,
        params: ParamsT | Mapping[str, Tensor],
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        ns_steps: int = 5,
        beta2: float | None = None,
        weight_decay: float = 0.0,
        maximize: bool = False,
        variant: str | None = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        variant = variant or ("nanochat-2025" if beta2 is None else "nanochat-2026-01")
        defaults: dict[str, Any] = {"variant": variant}
        defaults |= {"lr": lr, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        defaults |= {"weight_decay": weight_decay, "maximize": maximize}
        if beta2 is not None:
            self._beta2 = defaults["beta2"] = beta2
        super().__init__(params, defaults, options)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_beta2": self._beta2}

    def _completed_defaults(self, defaults: dict[str, Any]) -> dict[str, Any]:
        given = dict(defaults)
        return {**muon_defaults(given.pop("variant")), **given}

    def _completed(self, group: dict[str, Any]) -> dict[str, Any]:
        if "variant" not in group:
            return group
        given = given_options(self.defaults, ARGUMENTS)
        if self._beta2 is not None:
            given["beta2"] = self._beta2
        return {**muon_defaults(group["variant"]), **given, **group}


def is_missing(item: Item, context: StepContext) -> bool:
    """Whether no rank has a gradient for the matrix and the group does not take a missing gradient for zeros.

    Reads a counter on the host, which waits for the device, but only if this rank itself has no gradient.
    """
    if takes_zeros(item.shard, item.group):
        return False
    count = context.count(item.shard)
    return item.shard.gradient is None if count is None else count.item() == 0


def _view(shard: Shard) -> MatrixView:
    return shard.view or MatrixView.identity(shard.like.shape)
