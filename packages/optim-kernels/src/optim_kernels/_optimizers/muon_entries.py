"""What a Muon step needs of each parameter: gradient, state in the group's formats, and how they are matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optim_kernels._dtensors import is_dtensor, is_wrapper, local, spread_as
from optim_kernels._graphs import is_capturing
from optim_kernels._optimizers.fitting import refuse, what_is_missing, why_no_master, why_no_numbers, why_unfit
from optim_kernels._optimizers.inference import out_of_inference_mode
from optim_kernels._optimizers.muon_options import check_choices, check_param, ns_config_of, rule_of
from optim_kernels._optimizers.muon_views import view_of
from optim_kernels._optimizers.storage import (
    MASTERS,
    drop_other_masters,
    master_of,
    masters_to_keep,
    missing_master,
    new_count,
)
from optim_kernels.functional._muon_checks import check_kernels, num_second_moments
from optim_kernels.functional.muon import muon_, new_second_moment
from optim_kernels.reference.muon import wide_dtype
from optim_utils.param_groups import MatrixView


def init_state(
    param: Tensor, view: MatrixView, group: Mapping[str, Any], state: dict[str, Any], *, grad: Tensor | None = None
) -> None:
    """Create what ``state`` lacks for the group's options, laid out as the parameter is, and convert what it has.

    Args:
        grad: the gradient, spread as the parameter is, whose dtype a momentum without a dtype of its own has; without
            a gradient it has the parameter's.
    """
    convert_state(param, group, state)
    if "momentum_buffer" not in state:
        like = param if grad is None else grad
        # a wrapper may store parameters in a way that cannot hold a momentum
        laid_out_as = like if is_wrapper(param) else _plain(param)
        state["momentum_buffer"] = torch.zeros_like(
            laid_out_as, dtype=group["momentum_dtype"] or like.dtype, memory_format=torch.preserve_format
        )
    if group["beta2"] is not None and "second_momentum_buffer" not in state:
        state["second_momentum_buffer"] = new_second_moment(param, view)
    state.update(missing_master(param, group, state))
    drop_other_masters(group, state)
    if group["stochastic_rounding"]:
        # on the device, because a captured step counts too
        if "step" not in state:
            state["step"] = new_count(param.device)
        # in fp32, as the kernels count it up: a user may have cast whole states
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=param.device)


def convert_state(param: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Bring the momentum in ``state`` into the group's format, and drop masters that the group does not need."""
    dtype = group["momentum_dtype"]
    if dtype is not None and "momentum_buffer" in state:
        state["momentum_buffer"] = state["momentum_buffer"].to(dtype)
    masters = masters_to_keep(param, group["master_weights"], state)
    for key in MASTERS:
        state.pop(key, None)
    state.update(masters)


def convert_loaded_state(param: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Bring a loaded ``state`` into the group's formats, laid out as the parameter is."""
    convert_state(param, group, state)
    if "second_momentum_buffer" in state:
        state["second_momentum_buffer"] = state["second_momentum_buffer"].to(wide_dtype(param)).contiguous()
    if not is_wrapper(param):
        strides = torch.empty_like(param, device="meta").stride()
        for key in ("momentum_buffer", *MASTERS):
            if key in state and state[key].stride() != strides:
                state[key] = torch.empty_like(_plain(param), dtype=state[key].dtype).copy_(state[key])


def gradient_of(param: Tensor, group: Mapping[str, Any], name: str) -> Tensor | None:
    """The gradient to use, spread as the parameter is; ``None`` to skip the parameter; never allocates ``.grad``."""
    grad = param.grad
    if grad is None:
        # zeros would move a frozen parameter by its momentum, and decay it
        if not param.requires_grad:
            return None
        if group["missing_grad"] == "raise":
            raise RuntimeError(f"{name} has no gradient; pass missing_grad='skip' or 'zero' to allow that")
        return torch.zeros_like(param) if group["missing_grad"] == "zero" else None
    if grad.is_sparse:
        raise RuntimeError(f"Muon does not support sparse gradients, got one for {name}; densify it: p.grad.to_dense()")
    return spread_as(grad, param)


@dataclass(frozen=True, slots=True)
class MuonEntry:
    """What one parameter's step needs; DTensors that a rank holds whole stand here as local tensors."""

    param: Tensor
    grad: Tensor
    state: dict[str, Any]
    view: MatrixView
    index: int  # among the parameters of all groups: it chooses the bits of stochastic rounding
    name: str | None = None  # for errors


@out_of_inference_mode
def entries_of(
    group: Mapping[str, Any],
    state: Mapping[Tensor, dict[str, Any]],
    names: Mapping[Tensor, str],
    indices: Mapping[Tensor, int],
) -> list[MuonEntry]:
    """The entries of the group's parameters that are updated in this step; state that they lack is created.

    The user may replace options, parameters and states between steps, so they are read and checked anew. ``names`` and
    ``indices`` hold the parameters of all groups; see `MuonEntry` for the latter.
    """
    check_choices(group)
    used = ("momentum_buffer", *MASTERS, *_counts(group))
    entries = []
    for place, p in enumerate(group["params"]):
        grad = gradient_of(p, group, names[p])
        if grad is None:
            continue
        check_param(p, group, names[p])
        view = view_of(p, group, place, names[p])
        refuse(why_unfit(p, grad, state.get(p, {}), used), names[p])
        check_state_in_capture(p, state, names[p])
        init_state(p, view, group, state[p], grad=grad)
        if group["impl"] == "triton":
            check_kernels(grad, state[p]["momentum_buffer"], ns_config_of(group), names[p])
        if group["beta2"] is not None:
            _check_second_moment(state[p]["second_momentum_buffer"], p, view, names[p])
        if not is_wrapper(p):
            entries.append(MuonEntry(p, grad, state[p], view, indices[p], names[p]))
        else:
            values = {key: _whole(value, f"{key} of {names[p]}") for key, value in state[p].items()}
            whole, whole_grad = _whole(p, names[p]), _whole(grad, names[p])
            entries.append(MuonEntry(whole, whole_grad, values, view, indices[p], names[p]))
    return entries


def check_state_in_capture(param: Tensor, state: Mapping[Tensor, dict[str, Any]], name: str) -> None:
    """Raise ``RuntimeError`` where a captured step would make a state, which every replay would make anew."""
    if is_capturing(param.device) and not state.get(param):
        raise RuntimeError(
            f"a step is being captured into a CUDA graph, but {name} has no state yet, and every replay would make it "
            "anew; run a step before the capture"
        )


def _counts(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of the counts of steps in states of the group."""
    return ("step",) if group["stochastic_rounding"] else ()


def check_state(param: Tensor, view: MatrixView, group: Mapping[str, Any], state: Mapping[str, Any], name: str) -> None:
    """Raise ``ValueError`` unless a step of the group can update the parameter of this name, and its state."""
    with_moment = group["beta2"] is not None
    needed = ("momentum_buffer", *_counts(group), *["second_momentum_buffer"] * with_moment)
    used = ("momentum_buffer", *MASTERS, *_counts(group))
    refuse(what_is_missing(state, needed) or why_unfit(param, param, state, used) or why_no_master(state), name)
    if with_moment:
        _check_second_moment(state["second_momentum_buffer"], param, view, name)


def explained_entry(param: Tensor, view: MatrixView, place: int, state: Mapping[str, Any]) -> MuonEntry:
    """The entry that a step would make; a gradient or momentum that is not there yet is taken to be like the parameter.

    The local part of a DTensor is taken for a whole matrix, which it is if `entries_of` accepts it.
    """
    values = {key: local(value) for key, value in {"momentum_buffer": param, **state}.items()}
    here = local(param)
    grad = param if param.grad is None else param.grad
    own_view = view if here.shape == param.shape else MatrixView.identity(here.shape)
    return MuonEntry(here, local(grad), values, own_view, place)


def _check_second_moment(moment: Any, param: Tensor, view: MatrixView, name: str) -> None:
    refuse(why_no_numbers("second_momentum_buffer", moment, param), name)
    size, device = num_second_moments(view), local(param).device
    if moment.numel() != size or local(moment).device != device:
        raise ValueError(
            f"the second_momentum_buffer of {name} has {moment.numel()} elements on {moment.device}, but its matrices "
            f"{view.describe()} need {size} on {device}; delete it from the state to start anew"
        )


def step_entries(
    group: Mapping[str, Any],
    entries: Sequence[MuonEntry],
    *,
    clip_factor: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """One Muon step on ``entries`` by `functional.muon_`."""
    if not entries or (found_inf is not None and bool(found_inf.item())):
        return
    rule, states = rule_of(group), [entry.state for entry in entries]
    random = group["stochastic_rounding"]
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
        beta2=0.0 if group["beta2"] is None else group["beta2"],
        row_equilibrate=rule.row_equilibrate,
        renormalize=rule.renormalize,
        cautious=rule.cautious,
        maximize=rule.maximize,
        views=[entry.view for entry in entries],
        masters=[master_of(state) for state in states],
        clip_factor=clip_factor,
        grad_scale=grad_scale,
        stochastic_rounding=random,
        seed=group["seed"],
        steps=[int(state["step"]) + 1 for state in states] if random else None,
        indices=[entry.index for entry in entries] if random else None,
        impl=group["impl"],
    )
    # only now, since `muon_` may refuse the step
    for state in states if random else ():
        state["step"] += 1


def _plain(param: Tensor) -> Tensor:
    """The parameter as a tensor of torch's own class, so that those made like it are such tensors, too."""
    return param.detach().as_subclass(Tensor)


def _whole(tensor: Tensor, name: str) -> Tensor:
    """The local tensor of a DTensor that this rank holds whole; other tensors as they are."""
    if not is_dtensor(tensor):
        return tensor
    here: Tensor = local(tensor)
    if here.shape != tensor.shape:
        raise RuntimeError(
            f"{name} is a DTensor of shape {tuple(tensor.shape)} of which this rank holds {tuple(here.shape)}; Muon "
            "needs whole matrices: use optim_dist.TritonDistMuon"
        )
    return here
