"""The updates as functions over lists of tensors, which may be views into flat buffers: what distributed code calls."""

from optim_kernels.functional.adamw import adamw_

__all__ = ["adamw_"]
