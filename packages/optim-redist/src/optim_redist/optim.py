"""The notebook's namespace of redistributors and cost models: ``tc.optim.MemoryConstrainedRedist`` and its kin."""

from optim_redist.collective_costs import Cost, CostModel, IdealLowerBoundsCM, TextbookCM
from optim_redist.redistributors import MemoryConstrainedRedist, NaiveGathererRedist, OptimalRedist, Redistributor

__all__ = [
    "Cost",
    "CostModel",
    "IdealLowerBoundsCM",
    "MemoryConstrainedRedist",
    "NaiveGathererRedist",
    "OptimalRedist",
    "Redistributor",
    "TextbookCM",
]
