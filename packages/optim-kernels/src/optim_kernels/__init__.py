"""optim-kernels."""
