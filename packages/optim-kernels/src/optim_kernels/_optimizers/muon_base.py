"""What `TritonMuon` and `TritonMuonAdamW` share: their steps of Muon groups, and views in and out of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from optim_kernels._dtensors import note_shards_were_written
from optim_kernels._optimizers.base import Change
from optim_kernels._optimizers.muon_entries import convert_loaded_state, entries_of
from optim_kernels._optimizers.muon_options import DEFAULTS, check_muon_group
from optim_kernels._optimizers.muon_planner import MuonPlanner
from optim_kernels._optimizers.plain_options import make_groups_plain
from optim_kernels._optimizers.private_state import PrivateState
from optim_kernels.functional._muon_workspace import workspace_for
from optim_utils.param_groups import MatrixView

if TYPE_CHECKING:
    from optim_kernels.functional._muon_batch_plan import MuonBatchPlan


class MuonOptimizer(PrivateState, Optimizer):
    """What optimizers with Muon groups share: views of parameters as matrices, in and out of checkpoints."""

    _own_options = ("momentum_dtype", "master_weights", "impl")
    # The grouped launches: derived from groups and state, never saved.
    _planner: MuonPlanner
    _ns_workspace_mb: float | None = None
    # The parameters of all groups when they were last sorted into launches.
    _sorted: Set[Tensor] = frozenset()

    def _make_planner(self, ns_workspace_mb: float | None) -> None:
        self._planner = MuonPlanner(workspace=workspace_for(ns_workspace_mb))
        self._ns_workspace_mb = ns_workspace_mb

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_planner" in self.__dict__:
            self._planner.forget()
        else:
            self._make_planner(self._ns_workspace_mb)
        names = self._parameter_names()
        for group in self.param_groups:
            if self._is_muon(group):
                for key, value in DEFAULTS.items():
                    group.setdefault(key, value)
                check_muon_group(group, names, loaded=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ns_workspace_mb": self._ns_workspace_mb}

    def plans(self) -> list[MuonBatchPlan]:
        """The grouped launches that the latest steps used; empty where plain torch does all."""
        return self._planner.plans

    def _is_muon(self, group: dict[str, Any]) -> bool:
        return True

    def _step_muon(self, groups: list[dict[str, Any]], **scaling: Tensor | None) -> None:
        """One step of Muon groups; ``scaling``: clip_factor, grad_scale, found_inf."""
        with_masters = [group for group in groups if group["master_weights"] == "fp32"]
        followed = self._with_masters(with_masters)
        if followed:
            self._writes.follow(followed, followed, [self._own_state[p]["master"] for p in followed])
        if not self._planner.repeat(groups, self._state_to_check(), **scaling):
            names = self._parameter_names()
            # plans hold their parameters, which may have left the groups
            if not self._sorted <= names.keys():
                self._planner.forget()
            self._sorted = set(names)
            indices = dict(zip(names, count()))
            entries = [(group, entries_of(group, self._own_state, names, indices)) for group in groups]
            self._planner.step(entries, state=self._own_state, **scaling)
            params = list(names)
            note_shards_were_written(params[entry.index] for _, members in entries for entry in members)
            self._log_fallbacks(self._planner.fallbacks)
        if with_masters:
            self._writes.note_step(self._with_masters(with_masters))

    def _needed_state(self, group: dict[str, Any]) -> Sequence[str]:
        return ("momentum_buffer",) if self._is_muon(group) else super()._needed_state(group)

    def _place_state(self, param: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """The loaded state in the group's formats; the next step makes a master that is missing."""
        state = super()._place_state(param, group, saved)
        if self._is_muon(group):
            convert_loaded_state(param, group, state)
        return state

    def _state_dict(self, *changes: Change) -> dict[str, Any]:
        """With views and dtypes in plain form, so that it loads with ``weights_only=True``."""
        return super()._state_dict(lambda _, content: make_groups_plain(content), *changes)

    def _merged_group(self, index: int, mine: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """The saved group, completed from ours, with our views; raises if it was saved with other views."""
        merged = super()._merged_group(index, mine, saved)
        if mine.get("views") is not None:
            merged["views"] = mine["views"]
        if saved.get("views") is not None:
            loaded = _views_of(saved["views"], f"param_groups[{index}]")
            if loaded != list(mine.get("views") or [None] * len(loaded)):
                raise ValueError(
                    f"param_groups[{index}] was saved with views {loaded}, this optimizer has {mine.get('views')}; "
                    "construct it with the views of the checkpoint"
                )
        return merged


def _views_of(saved: object, place: str) -> list[MatrixView | None]:
    """The views of a loaded group; they may be in plain form."""
    if isinstance(saved, str) or not isinstance(saved, Sequence):
        raise ValueError(f"the loaded views of {place} must be a list, got {saved!r}")
    try:
        return [view if view is None or isinstance(view, MatrixView) else MatrixView.from_plain(view) for view in saved]
    except ValueError as error:
        raise ValueError(f"the loaded views of {place} cannot be read: {error}") from error
