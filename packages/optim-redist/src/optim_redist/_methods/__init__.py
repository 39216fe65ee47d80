"""The ways to redistribute a tensor: each makes a candidate that ``planners`` costs and ``planning`` chooses from."""
