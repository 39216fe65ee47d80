"""AdamW parameter groups for other packages' optimizers: the state of a parameter in a group's formats."""

from optim_kernels._optimizers.adamw_state import MOMENT_DTYPES, init_state

__all__ = ["MOMENT_DTYPES", "init_state"]
