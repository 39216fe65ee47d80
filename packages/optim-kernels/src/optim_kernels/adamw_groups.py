"""AdamW parameter groups for other packages' optimizers: the state of a parameter in a group's formats, and steps.

An `AdamWStep` is a step of the kernels that can be repeated: on the same tensors, with the hyperparameters that the
groups have at that time. `KnownStates` tells whether states are still those that the step was made for.

Muon's states need some of this, too: `ELEMENTWISE_KEYS`, `master_of` and `MASTER_KEYS`, `FollowedWrites`, `KnownStates`
and, for whatever makes tensors that are written to later, `out_of_inference_mode`.
"""

from optim_kernels._optimizers.adamw_codes import has_codes
from optim_kernels._optimizers.adamw_options import StateDtype, check_group
from optim_kernels._optimizers.adamw_state import init_state
from optim_kernels._optimizers.adamw_step import AdamWStep
from optim_kernels._optimizers.base import ELEMENTWISE_KEYS
from optim_kernels._optimizers.followed_writes import FollowedWrites, can_be_followed
from optim_kernels._optimizers.inference import out_of_inference_mode
from optim_kernels._optimizers.private_state import KnownStates
from optim_kernels._optimizers.storage import MASTER_KEYS, MasterWeights, master_of
from optim_kernels.functional._adamw_tensor import CODE_BLOCK

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
    "check_group",
    "has_codes",
    "init_state",
    "master_of",
    "out_of_inference_mode",
]
