"""optim-utils."""
