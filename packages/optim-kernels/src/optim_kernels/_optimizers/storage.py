"""How AdamW and Muon store parameters: their dtypes, master weights beside 16-bit parameters, step counts.

By ``master_weights`` the state of a parameter has

    "fp32"      master: its fp32 value, of which the parameter is the rounding
    "split16"   master_low: the int16 that the bf16 parameter lacks to be an fp32 number (optim_utils.rounding)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from optim_kernels._dtensors import local, placed_like
from optim_kernels._options import is_one_of
from optim_utils.rounding import join_master, split_master

MasterWeights = Literal["fp32", "split16"] | None
MASTERS = {"master": torch.float32, "master_low": torch.int16}
# entries of a state that complete a 16-bit parameter
MASTER_KEYS = frozenset(MASTERS)
OWN_MASTER = {None: None, "fp32": "master", "split16": "master_low"}
_HALF = (torch.float16, torch.bfloat16)
MOMENT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_master_weights(choice: object) -> None:
    """Raise ``ValueError`` unless this is a kind of master weights, or None."""
    if not is_one_of(choice, (*OWN_MASTER,)):
        raise ValueError(f"master_weights must be None, 'fp32' or 'split16', got {choice!r}")


def check_master(param: Tensor, name: str, master_weights: MasterWeights) -> None:
    """Raise ``ValueError`` unless a parameter of this dtype can have such a master."""
    allowed = {"fp32": _HALF, "split16": (torch.bfloat16,)}.get(master_weights or "")
    if allowed is not None and param.dtype not in allowed:
        raise ValueError(
            f"master_weights={master_weights!r} is for {' or '.join(map(str, allowed))} parameters, but {name} is "
            f"{param.dtype}; put it in a group with master_weights=None"
        )


def check_dtype(param: Tensor, name: str) -> None:
    """Raise ``ValueError`` for a parameter that has or will have gradients, in a dtype that is not computed in.

    Those are integers and 8-bit floats; frozen parameters may have any dtype, as quantised weights with adapters do.
    """
    if param.dtype not in MOMENT_DTYPES and (param.requires_grad or param.grad is not None):
        raise ValueError(
            f"parameters are updated in one of {MOMENT_DTYPES}, but {name} is {param.dtype}; freeze it "
            "(requires_grad=False, no .grad) or leave it out"
        )


def new_count(device: torch.device) -> Tensor:
    """A step count of 0."""
    if device.type == "cpu":
        # a fake tensor that is made so knows its value, which the host reads
        return torch.tensor(0.0, dtype=torch.float32, device=device)
    return torch.zeros((), dtype=torch.float32, device=device)


def master_of(state: Mapping[str, Any]) -> Tensor | None:
    """The master in a state, fp32 or the low half of one; ``None`` if there is none."""
    master: Tensor | None = state.get("master", state.get("master_low"))
    return master


def missing_master(param: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The master that the group asks for and the state lacks, from the parameter and any master of the other kind."""
    own = OWN_MASTER[group["master_weights"]]
    if own is None or own in state:
        return {}
    # the local part, since a DTensor cannot be viewed in another dtype
    value = local(param.detach())
    made = torch.empty_like(value, dtype=MASTERS[own], memory_format=torch.preserve_format)
    if own == "master":
        made.copy_(join_master(value, local(state["master_low"])) if "master_low" in state else value)
    elif "master" in state:
        made.copy_(_low_half(value, local(state["master"])))
    else:
        made.zero_()
    return {own: placed_like(made, param)}


def drop_other_masters(group: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Remove all masters but the one that the group asks for."""
    for key in MASTERS.keys() - {OWN_MASTER[group["master_weights"]]}:
        state.pop(key, None)


def masters_to_keep(param: Tensor, master_weights: MasterWeights, saved: dict[str, Any]) -> dict[str, Tensor]:
    """The saved master, if the group wants any.

    A master of the other kind is kept as it is: the next step converts it (`missing_master`), since that takes the
    parameter as it is then.
    """
    own = OWN_MASTER[master_weights]
    if own is None:
        return {}
    kinds = [own] if own in saved else MASTERS.keys() & saved.keys()
    return {key: saved[key].to(device=param.device, dtype=MASTERS[key]) for key in kinds}


def _low_half(value: Tensor, master: Tensor) -> Tensor:
    """The low half of an fp32 master beside the bf16 ``value`` that it was rounded to.

    split16 rounds ties away from zero, but a step with an fp32 master rounds them to even. Where the latter rounded a
    tie down, the low half would be 2**15, one more than an int16 can hold, so 2**15 - 1 is taken.
    """
    away, low = split_master(master)
    went_down = (low == -(2**15)) & (value.view(torch.int16) == away.view(torch.int16) - 1)
    return torch.where(went_down, 2**15 - 1, low)
