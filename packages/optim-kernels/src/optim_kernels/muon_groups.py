"""Muon parameter groups for other packages' optimizers: options, their checks, and the step of a list of parameters.

A group is torch's dict of hyperparameters. A `MuonPlanner` steps groups with `MuonEntry`s, in grouped launches where
the kernels run. `make_groups_plain` and `with_dtypes` are those of `states`.
"""

from optim_kernels._newton_schulz.config import Tiles
from optim_kernels._optimizers.kinds import CURRENT_VARIANT, completed_group, muon_defaults
from optim_kernels._optimizers.muon_entries import MuonEntry, check_state, init_state
from optim_kernels._optimizers.muon_options import (
    check_choices,
    check_group,
    check_muon_scalars,
    check_param,
    given_options,
    ns_config_of,
    rule_of,
    variant_options,
)
from optim_kernels._optimizers.muon_planner import MuonPlanner
from optim_kernels._optimizers.muon_steady import KnownOptions
from optim_kernels._optimizers.muon_views import view_of
from optim_kernels.functional._muon_workspace import Workspace, workspace_for
from optim_kernels.states import make_groups_plain, with_dtypes

__all__ = [
    "CURRENT_VARIANT",
    "KnownOptions",
    "MuonEntry",
    "MuonPlanner",
    "Tiles",
    "Workspace",
    "check_choices",
    "check_group",
    "check_muon_scalars",
    "check_param",
    "check_state",
    "completed_group",
    "given_options",
    "init_state",
    "make_groups_plain",
    "muon_defaults",
    "ns_config_of",
    "rule_of",
    "variant_options",
    "view_of",
    "with_dtypes",
    "workspace_for",
]
