"""One optimizer for a whole model: matrices by Muon, everything else by AdamW, in one plan and one step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any, ClassVar, Unpack, cast

from optim_dist._optimizers.base import DistOptimizer
from optim_dist._optimizers.options import CommonOptions
from optim_dist._optimizers.shards import Route
from optim_dist.adamw import AdamWRoute
from optim_dist.muon import MuonRoute
from optim_dist.plan import RouteName
from optim_kernels.muon_groups import CURRENT_VARIANT, completed_group, muon_defaults


class TritonDistMuonAdamW(DistOptimizer):
    """Groups with ``kind="muon"`` or ``kind="adamw"``, each with the options of its kind.

    Args:
        param_groups: dicts with ``kind`` and ``params``. Options that they leave out have the defaults of
            ``optim_kernels.TritonMuonAdamW``; keys that they add are kept.
        variant: the variant of Muon groups that name none; a name of ``optim_kernels.VARIANTS``.
        maximize: climb instead of descend, in groups without this option.
        options: what every optimizer of this package accepts; see ``optim_dist.Options``.
    """

    _routes: ClassVar[Mapping[RouteName, Route]] = {"muon": MuonRoute(), "adamw": AdamWRoute()}
    _group_options: ClassVar[Set[str]] = {*muon_defaults("torch"), "betas", "amsgrad", "state_dtype"}

    _maximize: bool = False  # the constructor's argument

    def __init__(
        self,
        param_groups: Iterable[dict[str, Any]],
        *,
        variant: str | None = None,
        maximize: bool = False,
        **options: Unpack[CommonOptions],
    ) -> None:
        self._variant, self._maximize = variant or CURRENT_VARIANT, maximize
        super().__init__(param_groups, {"maximize": maximize}, options)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_variant": self._variant, "_maximize": self._maximize}

    def _completed(self, group: dict[str, Any]) -> dict[str, Any]:
        # programs put other ``defaults`` in place of these, as nanochat's optimizers have none
        maximize = self.defaults.get("maximize", self._maximize)
        group = completed_group(group, variant=self._variant, maximize=maximize)
        return {"amsgrad": False, **group} if group["kind"] == "adamw" else group

    def _route_name(self, group: dict[str, Any]) -> RouteName:
        return cast(RouteName, group.get("kind"))  # whoever looks it up refuses others
