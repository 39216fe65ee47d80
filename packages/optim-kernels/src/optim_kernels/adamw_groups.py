"""AdamW parameter groups for other packages' optimizers: the state of a parameter in a group's formats, and steps.

An `AdamWStep` is a step of the kernels that can be repeated: on the same tensors, with the hyperparameters that the
groups have at that time. What Muon's states need, too, is in `states`, and here as well for code that imports it so.
"""

from optim_kernels._optimizers.adamw_codes import has_codes
from optim_kernels._optimizers.adamw_options import StateDtype, check_adamw_ranges, check_adamw_scalars, check_group
from optim_kernels._optimizers.adamw_state import check_state, init_state
from optim_kernels._optimizers.adamw_step import AdamWStep
from optim_kernels.functional._adamw_tensor import CODE_BLOCK
from optim_kernels.states import (
    ELEMENTWISE_KEYS,
    MASTER_KEYS,
    FollowedWrites,
    KnownStates,
    MasterWeights,
    can_be_followed,
    master_of,
    out_of_inference_mode,
)

__all__ = [
    "CODE_BLOCK",
    "ELEMENTWISE_KEYS",
    "MASTER_KEYS",
    "AdamWStep",
    "FollowedWrites",
    "KnownStates",
    "MasterWeights",
    "StateDtype",
    "can_be_followed",
    "check_adamw_ranges",
    "check_adamw_scalars",
    "check_group",
    "check_state",
    "has_codes",
    "init_state",
    "master_of",
    "out_of_inference_mode",
]
