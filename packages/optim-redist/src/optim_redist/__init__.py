"""optim-redist."""
