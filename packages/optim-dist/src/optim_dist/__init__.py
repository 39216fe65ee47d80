"""Data-parallel AdamW and Muon on ``torch.distributed``: each rank updates its part; any shape, any number of ranks."""

from optim_dist import checkpoint, elastic
from optim_dist._optimizers.options import CommonOptions, Options
from optim_dist.adamw import TritonDistAdamW
from optim_dist.clip import clip_grad_norm_
from optim_dist.muon import TritonDistMuon
from optim_dist.muon_adamw import TritonDistMuonAdamW
from optim_dist.plan import Plan
from optim_dist.planning import make_plan

__all__ = [
    "CommonOptions",
    "Options",
    "Plan",
    "TritonDistAdamW",
    "TritonDistMuon",
    "TritonDistMuonAdamW",
    "checkpoint",
    "clip_grad_norm_",
    "elastic",
    "make_plan",
]
