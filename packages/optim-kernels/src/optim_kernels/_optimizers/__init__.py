"""What the optimizer classes are made of: groups, state, routes of update. No kernel code."""
