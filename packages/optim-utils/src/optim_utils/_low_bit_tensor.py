"""Where files that version 0.3 saved look for the function that rebuilds their low-bit tensors."""

from optim_utils.low_bit import rebuild_low_bit_tensor

__all__ = ["rebuild_low_bit_tensor"]
