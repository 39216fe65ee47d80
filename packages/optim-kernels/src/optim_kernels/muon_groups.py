"""Muon parameter groups for optimizers built on `functional`: options, their checks, and what they mean.

A group is torch's dict of hyperparameters; these functions read it as `functional.muon_`'s arguments.
"""

from optim_kernels._muon_groups import (
    DEFAULTS,
    check_group,
    check_param,
    init_state,
    ns_config_of,
    rule_of,
    variant_options,
    view_of,
)

__all__ = [
    "DEFAULTS",
    "check_group",
    "check_param",
    "init_state",
    "ns_config_of",
    "rule_of",
    "variant_options",
    "view_of",
]
