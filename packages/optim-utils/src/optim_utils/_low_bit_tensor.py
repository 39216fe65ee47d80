"""Where files of version 0.3 look for what rebuilds their low-bit tensors."""

from optim_utils.low_bit import rebuild_low_bit_tensor

__all__ = ["rebuild_low_bit_tensor"]
