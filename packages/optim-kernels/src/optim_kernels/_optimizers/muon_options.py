"""Muon parameter groups: options and their checks, and the published variants.

`TritonMuon` and `TritonMuonAdamW` share this. An optimizer's group is the torch dict of hyperparameters; here it is
read as a `MuonRule`, an `NSConfig` and one `MatrixView` a parameter (`muon_views`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from optim_kernels._impl import check_impl
from optim_kernels._newton_schulz.coefficients import COEFFICIENTS
from optim_kernels._newton_schulz.config import NSConfig, config_of, values_of
from optim_kernels._optimizers.muon_views import view_of
from optim_kernels._optimizers.storage import MOMENT_DTYPES, check_dtype, check_master, check_master_weights
from optim_kernels._options import (
    are_numbers,
    check_python_numbers,
    check_scalars,
    check_seed,
    check_switches,
    check_values,
    is_one_of,
)
from optim_kernels.reference.muon import MuonRule, ScaleRule

MissingGrad = Literal["skip", "zero", "raise"]
KELLER = COEFFICIENTS["keller"][0]

DEFAULTS: dict[str, Any] = {
    # torch.optim.Muon's, in its order
    "lr": 1e-3,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": KELLER,
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": None,
    # ours
    "ns_method": "auto",
    "ns_dtype": None,
    "ns_restarts": None,
    "norm_scale": 1.0,
    "eps_mode": "clamp",
    "nd": None,
    "split_rows": None,
    "views": None,
    "missing_grad": "skip",
    "beta2": None,
    "row_equilibrate": False,
    "renormalize": False,
    "cautious": False,
    "momentum_dtype": None,
    "master_weights": None,
    "stochastic_rounding": False,
    "seed": 0,
    "maximize": False,
    "capturable": False,
    "impl": "auto",
}
# Read anew in every step; beta2 only as long as it stays None, or stays a number.
HYPERPARAMETERS = ("lr", "weight_decay", "momentum", "beta2")

_KELLER: dict[str, Any] = {
    **DEFAULTS,
    "lr": 0.02,
    "weight_decay": 0.0,
    "eps_mode": "add",
    "adjust_lr_fn": "keller",
    "nd": "convolution",
    "missing_grad": "zero",
}
_NANOCHAT_2025: dict[str, Any] = {
    **DEFAULTS,
    "lr": 0.02,
    "weight_decay": 0.0,
    "eps_mode": "add",
    "missing_grad": "raise",
}
_NANOCHAT_2026: dict[str, Any] = {
    **_NANOCHAT_2025,
    "ns_coefficients": "polar_express",
    "eps": 1e-6,
    "beta2": 0.95,
    "cautious": True,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "torch": DEFAULTS,
    "keller": _KELLER,
    "nanochat-2025": _NANOCHAT_2025,
    "nanochat-2026-01": {**_NANOCHAT_2026, "norm_scale": 1.02},
    "nanochat-2026-03": {**_NANOCHAT_2026, "norm_scale": 1.01},
    "nanochat-2026-07": {
        **_NANOCHAT_2026,
        "norm_scale": 1.01,
        "beta2": 0.9,
        "row_equilibrate": True,
        "renormalize": True,
    },
}
"""Option sets of published implementations; a group may name one as ``variant``, and override single options."""


def variant_options(name: str) -> dict[str, Any]:
    """The options of a published variant."""
    if not is_one_of(name, (*VARIANTS,)):
        raise ValueError(f"unknown variant {name!r}; choose one of {sorted(VARIANTS)}")
    return dict(VARIANTS[name])


def given_options(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Those ``arguments`` of a constructor that differ from its ``defaults``."""
    return {
        key: arguments[key]
        for key, value in defaults.items()
        if key in arguments and (isinstance(arguments[key], Tensor) or arguments[key] != value)
    }


def rule_of(group: Mapping[str, Any]) -> MuonRule:
    """The group's choices that enter the formulas of `reference.muon`."""
    return _rule(*(group[key] for key in _RULE_KEYS))


def ns_config_of(group: Mapping[str, Any]) -> NSConfig:
    """The group's orthogonalization."""
    return config_of(*values_of(*map(group.__getitem__, _NS_KEYS)))


_ADJUST_LR_FNS = (None, *get_args(ScaleRule))
_SWITCHES = tuple(key for key, value in DEFAULTS.items() if isinstance(value, bool))
_RULE_KEYS = ("nesterov", "adjust_lr_fn", "row_equilibrate", "renormalize", "cautious", "maximize")
# in the order of the fields of `NSConfig`
_NS_KEYS = ("ns_coefficients", "ns_steps", "ns_method", "ns_dtype", "ns_restarts", "norm_scale", "eps", "eps_mode")


@lru_cache(maxsize=256)
def _rule(*options: Any) -> MuonRule:
    given = dict(zip(_RULE_KEYS, options, strict=True))
    return MuonRule(scale=given.pop("adjust_lr_fn") or "original", **given)


def check_group(group: Mapping[str, Any], *, loaded: bool = False) -> None:
    """Raise ``ValueError`` for options that torch.optim.Muon refuses, in its words, or that ours cannot take.

    Args:
        loaded: whether schedules may have changed lr, momentum and weight_decay; as in a step, these may then be
            negative, as the lr is that ``LinearLR`` ends with in place of 0 (-4e-19, say).
    """
    _check_ranges(group, least=-math.inf if loaded else 0.0)
    check_choices(group)


def _check_ranges(group: Mapping[str, Any], *, least: float) -> None:
    check_muon_scalars(group)
    if not group["lr"] >= least:
        raise ValueError(f"Learning rate should be >= 0 but is: {group['lr']}")
    if not group["momentum"] >= least:
        raise ValueError(f"momentum should be >= 0 but is: {group['momentum']}")
    if not group["weight_decay"] >= least:
        raise ValueError(f"weight decay should be >= 0 but is: {group['weight_decay']}")
    beta2 = group["beta2"]
    if isinstance(beta2, Tensor):
        _check_beta2(beta2.item())


def check_muon_scalars(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """The group's hyperparameters, in the order of ``HYPERPARAMETERS``, with 0 for a ``beta2`` that is None.

    Raises where one is not a number, or has no value, and for a number ``beta2`` with which no step can be taken.
    Values of tensors are not read. Fast for Python numbers, as every step calls it.
    """
    beta2 = group["beta2"]
    scalars = (group["lr"], group["weight_decay"], group["momentum"], 0.0 if beta2 is None else beta2)
    if not are_numbers(scalars):
        numbers = dict(zip(HYPERPARAMETERS, scalars))
        check_scalars(**numbers)
        check_values(group["params"], **numbers)
    else:
        check_python_numbers(HYPERPARAMETERS, scalars)
    _check_beta2(scalars[-1])
    return scalars


def _check_beta2(beta2: Any) -> None:
    if not isinstance(beta2, Tensor) and not 0.0 <= beta2 < 1.0:
        raise ValueError(f"beta2 should be None or in [0, 1) but is: {beta2}")


def check_choices(group: Mapping[str, Any]) -> None:
    """`check_group` without the ranges of numbers, which for tensors on the device cost a synchronisation."""
    check_muon_scalars(group)
    check_switches(**{option: group[option] for option in _SWITCHES})
    if not is_one_of(group["adjust_lr_fn"], _ADJUST_LR_FNS):
        raise ValueError(
            f"Adjust learning rate function {group['adjust_lr_fn']} is not supported; choose one of {_ADJUST_LR_FNS}"
        )
    if not is_one_of(group["nd"], (None, "batch", "flatten", "convolution")):
        raise ValueError(f"nd must be None, 'batch', 'flatten' or 'convolution', got {group['nd']!r}")
    if not is_one_of(group["missing_grad"], get_args(MissingGrad)):
        raise ValueError(f"missing_grad must be one of {get_args(MissingGrad)}, got {group['missing_grad']!r}")
    check_master_weights(group["master_weights"])
    views = group["views"]
    if views is not None and (isinstance(views, str) or not isinstance(views, Sequence)):
        raise TypeError(f"views must be None or a list with a MatrixView or None for each parameter, got {views!r}")
    if views is not None and len(views) != len(group["params"]):
        raise ValueError(f"views has {len(views)} entries for {len(group['params'])} parameters")
    if not is_one_of(group["momentum_dtype"], (None, *MOMENT_DTYPES)):
        raise ValueError(f"momentum_dtype must be None or one of {MOMENT_DTYPES}, got {group['momentum_dtype']!r}")
    check_impl(group["impl"])
    check_seed(group["seed"])
    rule_of(group)
    ns_config_of(group)


def check_param(param: Tensor, group: Mapping[str, Any], name: str) -> None:
    """Raise where ``param`` cannot be updated by Muon with the group's options."""
    if is_lazy(param):
        raise ValueError(f"Muon takes matrices, but the shape of {name} is not known yet; run its lazy module first")
    if torch.is_complex(param):
        raise RuntimeError(
            f"Muon does not support complex parameters, got {name} of dtype {param.dtype}; give it to AdamW"
        )
    if param.is_nested:
        raise ValueError(f"Muon takes matrices, but {name} is a nested tensor; give it each matrix as a parameter")
    check_dtype(param, name)
    check_master(param, name, group["master_weights"])


def check_muon_group(group: Mapping[str, Any], names: Mapping[Tensor, str], *, loaded: bool = False) -> None:
    """Raise where Muon cannot take the group's options or one of its parameters; ``loaded`` as in `check_group`."""
    check_group(group, loaded=loaded)
    for index, param in enumerate(group["params"]):
        check_param(param, group, names[param])
        view_of(param, group, index, names[param])
