"""Muon parameter groups: options and their checks, published variants, what a step needs of each parameter.

`TritonMuon` and `TritonMuonAdamW` share this. An optimizer's group is the torch dict of hyperparameters; here it is
read as a `MuonRule`, an `NSConfig` and one `MatrixView` a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from optim_kernels._adamw_state import MOMENT_DTYPES, missing_master
from optim_kernels._coefficients import COEFFICIENTS
from optim_kernels._impl import check_impl
from optim_kernels.functional.muon import muon_, new_second_moment
from optim_kernels.orthogonalization import NSConfig
from optim_kernels.reference.muon import MuonRule
from optim_utils.param_groups import MatrixView

MissingGrad = Literal["skip", "zero", "raise"]
MasterWeights = Literal["fp32", "split16"]
KELLER = COEFFICIENTS["keller"][0]

# torch.optim.Muon's options, its order and defaults.
TORCH_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": KELLER,
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": None,
}
OUR_DEFAULTS: dict[str, Any] = {
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
DEFAULTS: dict[str, Any] = {**TORCH_DEFAULTS, **OUR_DEFAULTS}

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
    if name not in VARIANTS:
        raise ValueError(f"unknown variant {name!r}; choose one of {sorted(VARIANTS)}")
    return dict(VARIANTS[name])


def rule_of(group: Mapping[str, Any]) -> MuonRule:
    """The group's choices that enter the formulas of `reference.muon`."""
    return _rule(*(group[key] for key in _RULE_KEYS))


def ns_config_of(group: Mapping[str, Any]) -> NSConfig:
    """The group's orthogonalisation."""
    return _ns_config(*(_hashable(group[key]) for key in _NS_KEYS))


_RULE_KEYS = ("nesterov", "adjust_lr_fn", "row_equilibrate", "renormalize", "cautious", "maximize")
_NS_KEYS = ("ns_coefficients", "ns_steps", "ns_method", "ns_dtype", "ns_restarts", "norm_scale", "eps", "eps_mode")


@lru_cache(maxsize=256)
def _rule(
    nesterov: bool, scale: Any, row_equilibrate: bool, renormalize: bool, cautious: bool, maximize: bool
) -> MuonRule:
    return MuonRule(
        nesterov=nesterov,
        scale=scale or "original",
        row_equilibrate=row_equilibrate,
        renormalize=renormalize,
        cautious=cautious,
        maximize=maximize,
    )


@lru_cache(maxsize=256)
def _ns_config(*values: Any) -> NSConfig:
    names = ("coefficients", "steps", "method", "dtype", "restarts", "norm_scale", "eps", "eps_mode")
    return NSConfig(**dict(zip(names, values, strict=True)))


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for options that torch.optim.Muon refuses, in its words, or that ours cannot take."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not float(lr) >= 0.0:
        raise ValueError(f"Learning rate should be >= 0 but is: {lr}")
    if not group["momentum"] >= 0.0:
        raise ValueError(f"momentum should be >= 0 but is: {group['momentum']}")
    if not group["weight_decay"] >= 0.0:
        raise ValueError(f"weight decay should be >= 0 but is: {group['weight_decay']}")
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw", "keller", "none"):
        raise ValueError(f"Adjust learning rate function {group['adjust_lr_fn']} is not supported")
    beta2 = group["beta2"]
    if beta2 is not None and not 0.0 <= beta2 < 1.0:
        raise ValueError(f"beta2 should be None or in [0, 1) but is: {beta2}")
    if group["nd"] not in (None, "batch", "flatten", "convolution"):
        raise ValueError(f"nd must be None, 'batch', 'flatten' or 'convolution', got {group['nd']!r}")
    if group["missing_grad"] not in get_args(MissingGrad):
        raise ValueError(f"missing_grad must be one of {get_args(MissingGrad)}, got {group['missing_grad']!r}")
    if group["master_weights"] not in (None, *get_args(MasterWeights)):
        raise ValueError(f"master_weights must be None, 'fp32' or 'split16', got {group['master_weights']!r}")
    if group["views"] is not None and len(group["views"]) != len(group["params"]):
        raise ValueError(f"views has {len(group['views'])} entries for {len(group['params'])} parameters")
    if group["momentum_dtype"] not in (None, *MOMENT_DTYPES):
        raise ValueError(f"momentum_dtype must be None or one of {MOMENT_DTYPES}, got {group['momentum_dtype']!r}")
    check_impl(group["impl"])
    rule_of(group)
    ns_config_of(group)


def check_param(param: Tensor, group: Mapping[str, Any], name: str) -> None:
    """Raise where ``param`` cannot be updated by Muon with the group's options."""
    if torch.is_complex(param):
        raise RuntimeError(f"Muon does not support complex parameters, got {name} of dtype {param.dtype}")
    masters = {None: None, "fp32": (torch.float16, torch.bfloat16), "split16": (torch.bfloat16,)}
    allowed = masters[group["master_weights"]]
    if allowed is not None and param.dtype not in allowed:
        raise ValueError(
            f"master_weights={group['master_weights']!r} is for {allowed} parameters, {name} is {param.dtype}"
        )


def view_of(param: Tensor, group: Mapping[str, Any], index: int, name: str) -> MatrixView:
    """How parameter ``index`` of the group is read as matrices."""
    view = group["views"][index] if group["views"] is not None else None
    if view is not None:
        if group["split_rows"] is not None:
            raise ValueError(f"{name} has both a view and split_rows={group['split_rows']}; the view can say it all")
        if tuple(view.shape) != tuple(param.shape):
            raise ValueError(f"the view of {name} is of shape {view.shape}, the parameter is {tuple(param.shape)}")
        return view
    shape, nd = tuple(param.shape), group["nd"]
    if len(shape) < 2:
        raise ValueError(f"Muon takes matrices, got {name} of shape {shape}; give it to AdamW")
    if len(shape) > 3 and nd is None:
        raise ValueError(
            f"Muon only supports 2D parameters and batches of them, whereas {name} has size {shape}; choose "
            "nd='flatten' (out, the rest) or nd='batch' (the last two dimensions)"
        )
    least = {"flatten": 3, "convolution": 4}.get(nd or "", len(shape) + 1)
    matrix_shape = (shape[0], prod(shape[1:])) if len(shape) >= least else ()
    return _split_view(shape, matrix_shape, group["split_rows"], name)


def _split_view(shape: tuple[int, ...], matrix_shape: tuple[int, ...], split_rows: Any, name: str) -> MatrixView:
    rows = (matrix_shape or shape)[-2]
    if split_rows is None:
        return MatrixView(shape=shape, matrix_shape=matrix_shape)
    if isinstance(split_rows, int):
        if split_rows < 1 or rows % split_rows:
            raise ValueError(f"the {rows} rows of {name} do not divide into blocks of split_rows={split_rows}")
        return MatrixView(shape=shape, matrix_shape=matrix_shape, num_heads=(rows // split_rows,))
    if sum(split_rows) != rows:
        raise ValueError(f"split_rows={tuple(split_rows)} does not add up to the {rows} rows of {name}")
    return MatrixView(shape=shape, matrix_shape=matrix_shape, split=tuple(split_rows))


def init_state(param: Tensor, view: MatrixView, group: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Create what ``state`` lacks for the group's options."""
    if "momentum_buffer" not in state:
        like = param if param.grad is None else param.grad
        state["momentum_buffer"] = torch.zeros_like(
            like, dtype=group["momentum_dtype"] or like.dtype, memory_format=torch.preserve_format
        )
    if group["beta2"] is not None and "second_momentum_buffer" not in state:
        state["second_momentum_buffer"] = new_second_moment(param, view)
    state.update(missing_master(param, group, state))
    if group["stochastic_rounding"]:
        # on the device, for a captured step counts too
        state["step"] = state.get("step", torch.zeros((), dtype=torch.float32)).to(param.device)


def gradient_of(param: Tensor, group: Mapping[str, Any], name: str) -> Tensor | None:
    """The gradient to use, ``None`` where the parameter is skipped; never allocates ``.grad``."""
    grad = param.grad
    if grad is None:
        if group["missing_grad"] == "raise":
            raise RuntimeError(f"{name} has no gradient; pass missing_grad='skip' or 'zero' to allow that")
        return torch.zeros_like(param) if group["missing_grad"] == "zero" else None
    if grad.is_sparse:
        raise RuntimeError(f"Muon does not support sparse gradients, got one for {name}; densify it: p.grad.to_dense()")
    return grad


@dataclass(frozen=True, slots=True)
class MuonEntry:
    """What one parameter's step needs; DTensors that a rank holds whole are their local tensors here."""

    param: Tensor
    grad: Tensor
    state: dict[str, Any]
    view: MatrixView
    index: int


def entries_of(
    group: Mapping[str, Any],
    state: Mapping[Tensor, dict[str, Any]],
    views: Mapping[Tensor, MatrixView],
    names: Mapping[Tensor, str],
) -> list[MuonEntry]:
    """The group's parameters that are updated in this step; state that they lack is created."""
    entries = []
    for index, p in enumerate(group["params"]):
        grad = gradient_of(p, group, names[p])
        if grad is None:
            continue
        init_state(p, views[p], group, state[p])
        if type(p) is torch.nn.Parameter or type(p) is Tensor:
            entries.append(MuonEntry(p, grad, state[p], views[p], index))
        else:
            local = {key: _local(value, f"{key} of {names[p]}") for key, value in state[p].items()}
            entries.append(MuonEntry(_local(p, names[p]), _local(grad, names[p]), local, views[p], index))
    return entries


def step_entries(
    group: Mapping[str, Any],
    entries: Sequence[MuonEntry],
    *,
    clip_factor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One Muon step on ``entries`` by `functional.muon_`."""
    if not entries or (found_inf is not None and bool(found_inf.item())):
        return
    rule, states = rule_of(group), [entry.state for entry in entries]
    random = group["stochastic_rounding"]
    if random:
        for state in states:
            state["step"] += 1
    muon_(
        [entry.param for entry in entries],
        [entry.grad for entry in entries],
        [state["momentum_buffer"] for state in states],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        nesterov=rule.nesterov,
        ns=ns_config_of(group),
        scale=rule.scale,
        second_moments=[state["second_momentum_buffer"] for state in states] if group["beta2"] is not None else None,
        beta2=group["beta2"] or 0.0,
        row_equilibrate=rule.row_equilibrate,
        renormalize=rule.renormalize,
        cautious=rule.cautious,
        maximize=rule.maximize,
        views=[entry.view for entry in entries],
        masters=[state.get("master", state.get("master_low")) for state in states],
        clip_factor=clip_factor,
        grad_scale=grad_scale,
        stochastic_rounding=random,
        seed=group["seed"],
        steps=[int(state["step"]) for state in states] if random else None,
        indices=[entry.index for entry in entries] if random else None,
        impl=group["impl"],
    )


def _local(tensor: Tensor, name: str) -> Tensor:
    """The storage of a DTensor that one rank holds whole; other tensors as they are."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    if local.shape != tensor.shape:
        raise RuntimeError(
            f"{name} is a DTensor of shape {tuple(tensor.shape)} of which this rank holds {tuple(local.shape)}; Muon "
            "needs whole matrices: use optim_dist.TritonDistMuon"
        )
    return local
