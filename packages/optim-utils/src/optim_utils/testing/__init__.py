"""What the tests of every optim package share: ranks on one machine, the optimizer contract, documents that run.

It is shipped, so that a package tested alone needs nothing but what it declares, and so that users can put their own
optimizer through the same contract. It imports no test framework.
"""

from optim_utils.testing.ranks import RankFailure, run_ranks

__all__ = ["RankFailure", "run_ranks"]
