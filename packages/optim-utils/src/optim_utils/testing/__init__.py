"""What the tests of every optim package share: ranks on one machine, the optimizer contract, documents that run.

It is shipped, so that a package tested alone needs nothing but what it declares, and so that users can put their own
optimizer through the same contract. It imports no test framework.
"""

from optim_utils.testing.contract import CHECKS, ContractFailure, OptimizerCase, contract, run_check
from optim_utils.testing.ranks import RankFailure, run_ranks
from optim_utils.testing.readme import run_readme

__all__ = [
    "CHECKS",
    "ContractFailure",
    "OptimizerCase",
    "RankFailure",
    "contract",
    "run_check",
    "run_ranks",
    "run_readme",
]
