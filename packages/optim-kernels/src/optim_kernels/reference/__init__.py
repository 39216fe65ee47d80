"""The updates in plain torch, in any floating dtype: the truth that kernels and tests agree with.

No formula of this package is written anywhere else, except in the kernels.
"""

from optim_kernels.reference.adamw import adamw_, adamw_update
from optim_kernels.reference.clip import clip_factor, sum_of_squares, total_norm
from optim_kernels.reference.muon import muon_
from optim_kernels.reference.newton_schulz import newton_schulz

__all__ = ["adamw_", "adamw_update", "clip_factor", "muon_", "newton_schulz", "sum_of_squares", "total_norm"]
