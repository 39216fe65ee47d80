"""AdamW parameter groups for other packages' optimizers: the state of a parameter in a group's formats."""

from optim_kernels._optimizers.adamw_state import MOMENT_DTYPES, init_state
from optim_kernels._optimizers.followed_writes import FollowedWrites, can_be_followed

__all__ = ["MOMENT_DTYPES", "FollowedWrites", "can_be_followed", "init_state"]
