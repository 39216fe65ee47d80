"""For tests of training: what groups begin with, which matrices a model has, and schedules of learning rates.

The options are those of nanochat's and Keller Jordan's optimizers, written down once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

PLAIN: dict[str, Any] = {
    "nesterov": True,
    "ns_steps": 5,
    "eps_mode": "add",
    "lr": 0.02,
    "momentum": 0.95,
    "weight_decay": 0.0,
    "maximize": False,
    "split_rows": None,
    "views": None,
    "momentum_dtype": None,
    "master_weights": None,
    "stochastic_rounding": False,
}
NANOCHAT: dict[str, Any] = {
    **PLAIN,
    "ns_coefficients": "polar_express",
    "norm_scale": 1.01,
    "eps": 1e-6,
    "beta2": 0.9,
    "row_equilibrate": True,
    "renormalize": True,
    "cautious": True,
    "adjust_lr_fn": None,
    "nd": None,
    "missing_grad": "skip",
}
KELLER: dict[str, Any] = {
    **PLAIN,
    "ns_coefficients": (3.4445, -4.775, 2.0315),
    "norm_scale": 1.0,
    "eps": 1e-7,
    "beta2": None,
    "row_equilibrate": False,
    "renormalize": False,
    "cautious": False,
    "adjust_lr_fn": "keller",
    "nd": "convolution",
    "missing_grad": "zero",
}
VARIANTS = {"nanochat-2026-07": NANOCHAT, "keller": KELLER}
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0, "maximize": False}

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda t: 1 / (1 + t)),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda t: 0.9),
    "step": lambda o: schedulers.StepLR(o, 2, 0.5),
    "milestones": lambda o: schedulers.MultiStepLR(o, [1, 3], 0.5),
    "constant": lambda o: schedulers.ConstantLR(o, 0.5, 2),
    "linear": lambda o: schedulers.LinearLR(o, 0.25, 1.0, 3),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 4, 1e-3),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 4, 2.0),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "cycles": lambda o: schedulers.CyclicLR(o, 1e-3, 0.1, 2, cycle_momentum=False),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 0.1, 50, cycle_momentum=False),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "sequence": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.25, 1.0, 2), schedulers.CosineAnnealingLR(o, 4)], [2]
    ),
    "chain": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 2), schedulers.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=2),
}


class Conv1D(nn.Module):
    """transformers' linear layer, whose weight is stored (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 12))


class Block(nn.Module):
    """What routing has to tell apart, in small."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 4)
        self.c_attn = Conv1D()
        self.wqkv = nn.Linear(4, 8, bias=False)
        self.ln_1 = nn.LayerNorm(4)
        self.stem = nn.Conv1d(3, 5, 2)
        self.conv = nn.Conv2d(6, 4, (1, 2), groups=2)
        self.last = nn.Conv2d(5, 3, 2, bias=False).to(memory_format=torch.channels_last)
        self.up = nn.ConvTranspose1d(5, 4, 2, bias=False)
        self.experts = nn.ParameterDict(
            {"gate_up_proj": nn.Parameter(torch.zeros(2, 6, 4)), "down_proj": nn.Parameter(torch.zeros(2, 4, 3))}
        )
        self.lm_head = nn.Linear(4, 7, bias=False)


# Which of them are matrices, and of which sizes.
ROUTED = {
    "c_attn.weight": [(4, 4)] * 3,
    "wqkv.weight": [(2, 2, 4), (1, 2, 4), (1, 2, 4)],
    "conv.weight": [(2, 2, 6)],
    "last.weight": [(3, 20)],
    "up.weight": [(8, 5)],
    "experts.gate_up_proj": [(2, 3, 4)] * 2,
    "experts.down_proj": [(2, 4, 3)],
}
