"""AdamW parameter groups for other packages' optimizers: the state of a parameter in a group's formats."""

from optim_kernels._optimizers.adamw_state import init_state

__all__ = ["init_state"]
