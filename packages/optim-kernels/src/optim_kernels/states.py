"""States of parameters for other packages' optimizers, and groups as state dicts hold them, whatever the update.

`KnownStates` tells whether states are still those that a step was prepared for, `FollowedWrites` brings fp32 masters up
to what others have written to their parameters. Whatever makes tensors that are written to later, states and buckets,
runs `out_of_inference_mode`.
"""

from optim_kernels._optimizers.base import ELEMENTWISE_KEYS
from optim_kernels._optimizers.fitting import check_loaded
from optim_kernels._optimizers.followed_writes import FollowedWrites, can_be_followed
from optim_kernels._optimizers.inference import out_of_inference_mode
from optim_kernels._optimizers.plain_options import make_groups_plain, with_dtypes
from optim_kernels._optimizers.private_state import KnownStates
from optim_kernels._optimizers.storage import MASTER_KEYS, MasterWeights, master_of

__all__ = [
    "ELEMENTWISE_KEYS",
    "MASTER_KEYS",
    "FollowedWrites",
    "KnownStates",
    "MasterWeights",
    "can_be_followed",
    "check_loaded",
    "make_groups_plain",
    "master_of",
    "out_of_inference_mode",
    "with_dtypes",
]
