"""optim-dist."""
