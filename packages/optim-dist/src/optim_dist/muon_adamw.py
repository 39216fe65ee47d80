"""One optimizer for a whole model: matrices by Muon, everything else by AdamW, in one plan and one step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Unpack

from optim_dist._optimizers.base import DistOptimizer
from optim_dist._optimizers.options import CommonOptions
from optim_dist._optimizers.shards import Route
from optim_dist.adamw import AdamWRoute, check_adamw
from optim_dist.muon import MuonRoute, check_muon_group, muon_options, muon_views
from optim_dist.plan import RouteName
from optim_utils.param_groups import MatrixView

HEAD = "nanochat-2026-07"
ADAMW_DEFAULTS: dict[str, Any] = {
    "lr": 3e-4,
    "betas": (0.9, 0.95),
    "eps": 1e-10,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
}


class TritonDistMuonAdamW(DistOptimizer):
    """Groups with ``kind="muon"`` or ``kind="adamw"``, each with the options of its route.

    Args:
        param_groups: dicts with ``kind`` and ``params``. Options that they leave out have the defaults of
            ``optim_kernels.TritonMuonAdamW``; keys that they add are kept.
        variant: the variant of Muon groups that name none; a name of ``optim_kernels.VARIANTS``.
        maximize: climb instead of descend, in groups without this option.
        options: what every optimizer of this package accepts; see ``optim_dist.Options``.
    """

    _routes: ClassVar[Mapping[RouteName, Route]] = {"muon": MuonRoute(), "adamw": AdamWRoute()}

    def __init__(
        self,
        param_groups: Iterable[dict[str, Any]],
        *,
        variant: str | None = None,
        maximize: bool = False,
        **options: Unpack[CommonOptions],
    ) -> None:
        self._variant = variant or HEAD
        super().__init__(param_groups, {"maximize": maximize}, options)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_variant": self._variant}

    def _completed(self, group: dict[str, Any]) -> dict[str, Any]:
        kind = group.get("kind", {True: "muon", False: "adamw"}.get(group.get("use_muon", ...)))
        if kind not in self._routes:
            raise ValueError(
                f"each group needs kind='muon' or 'adamw' (or use_muon), got kind={kind!r}; "
                "optim_utils.route_parameters(model).param_groups() makes such groups"
            )
        if kind == "adamw":
            options = ADAMW_DEFAULTS
        else:
            published = "keller" if "use_muon" in group else self._variant
            options = muon_options(group.get("variant", published))
        return {**options, "maximize": self.defaults["maximize"], **group, "kind": kind}

    def _check_group(self, group: dict[str, Any]) -> None:
        if group["kind"] == "muon":
            check_muon_group(group)
        else:
            check_adamw(group)

    def _route_name(self, group: dict[str, Any]) -> RouteName:
        kind: RouteName = group["kind"]
        return kind

    def _views(self, group: dict[str, Any]) -> Sequence[MatrixView | None]:
        return muon_views(group) if group["kind"] == "muon" else super()._views(group)
