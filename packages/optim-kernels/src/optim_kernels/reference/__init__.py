"""The updates in plain torch, in any floating dtype: the definition that kernels are tested against.

No formula of an update is written anywhere else, except in the kernels.
"""

from optim_kernels.reference.adamw import adamw_, adamw_update
from optim_kernels.reference.clip import clip_factor, sum_of_squares, total_norm
from optim_kernels.reference.muon import muon_
from optim_kernels.reference.newton_schulz import newton_schulz
from optim_kernels.reference.storage import gradient_scale

__all__ = [
    "adamw_",
    "adamw_update",
    "clip_factor",
    "gradient_scale",
    "muon_",
    "newton_schulz",
    "sum_of_squares",
    "total_norm",
]
