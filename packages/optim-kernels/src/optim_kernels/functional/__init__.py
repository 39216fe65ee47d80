"""The updates as functions over lists of tensors, which may be views into flat buffers: what distributed code calls."""

from optim_kernels.functional.adamw import adamw_
from optim_kernels.functional.adamw_plan import AdamWPlan
from optim_kernels.functional.muon import apply_muon_update_, muon_, muon_update, new_second_moment
from optim_kernels.functional.muon_elements import MuonMomenta, MuonUpdates
from optim_kernels.functional.muon_plan import MuonPlan
from optim_kernels.functional.slices import sum_slices

__all__ = [
    "AdamWPlan",
    "MuonMomenta",
    "MuonPlan",
    "MuonUpdates",
    "adamw_",
    "apply_muon_update_",
    "muon_",
    "muon_update",
    "new_second_moment",
    "sum_slices",
]
