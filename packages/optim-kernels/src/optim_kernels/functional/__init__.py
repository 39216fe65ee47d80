"""The updates as functions over lists of tensors, which may be views into flat buffers: what distributed code calls.

What is where:

    adamw adamw_plan                              AdamW, and what it keeps from step to step:
    _adamw_tensor _adamw_launch                   a parameter with its state, the tables and kernel of a launch,
    _adamw_scalars _adamw_tuning                  hyperparameters, sizes of chunks
    muon muon_plan                                Muon, and what it keeps from step to step:
    _muon_checks _muon_matrices                   what it asks of its lists, parameters as matrices,
    _muon_batch_plan                              the step of many matrices,
    _muon_families _muon_tables _muon_inputs      how they are sorted, what stays of a step, what changes,
    _muon_launches _muon_products _muon_chains    its launches, of single products, of all products in one,
    _muon_workspace _muon_explain                 its memory, and what is said of it
    muon_elements _element_launch                 Muon's elementwise parts alone
    slices                                        the sum of slices
    _lists _device_scalars                        checks of lists, numbers that are tensors
"""

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
