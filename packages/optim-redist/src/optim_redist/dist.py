"""The notebook's namespace of distributions: ``tc.dist.MultiAxisDist``."""

from optim_redist.multi_axis import MultiAxisDist

__all__ = ["MultiAxisDist"]
