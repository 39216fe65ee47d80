"""AdamW and Muon on one device at the speed of its memory and tensor cores, as ``torch.optim`` classes and functions.

Kernels are in Triton; every update also exists in plain torch (``optim_kernels.reference``), which runs where Triton
cannot. Importing this package needs no Triton.
"""

from optim_kernels import functional, reference
from optim_kernels.adamw import TritonAdamW
from optim_kernels.clip import (
    clip_factor,
    clip_grad_norm_,
    clip_grads_with_norm_,
    compute_global_grad_norm,
    get_total_norm,
    sum_of_squares,
)
from optim_kernels.muon import VARIANTS, TritonMuon
from optim_kernels.muon_adamw import TritonMuonAdamW
from optim_kernels.orthogonalization import COEFFICIENTS, NSConfig, newton_schulz

__all__ = [
    "TritonAdamW",
    "COEFFICIENTS",
    "NSConfig",
    "TritonMuon",
    "TritonMuonAdamW",
    "VARIANTS",
    "clip_factor",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "compute_global_grad_norm",
    "functional",
    "get_total_norm",
    "newton_schulz",
    "reference",
    "sum_of_squares",
]
