"""How ``TritonAdamW`` stores the state of a parameter, and states from other optimizers; for masters see `storage`.

    state_dtype       exp_avg, exp_avg_sq (max_exp_avg_sq like the latter)
    None              the parameter's dtype, as torch
    one dtype, or a pair (first, second), where None is the parameter's
    "int8"            CUBIC8 and QUINTIC8_UNSIGNED of optim_utils.low_bit, an fp32 scale for 256 codes;
                      fp32 for parameters under 4096 elements, and for max_exp_avg_sq

States are loaded from torch's AdamW or from any of these formats into any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from optim_kernels._dtensors import is_dtensor
from optim_kernels._optimizers.adamw_codes import FORMATS, encoded, has_codes
from optim_kernels._optimizers.adamw_options import StateDtype
from optim_kernels._optimizers.fitting import refuse, what_is_missing, why_no_master, why_unfit
from optim_kernels._optimizers.storage import (
    MASTERS,
    OWN_MASTER,
    drop_other_masters,
    masters_to_keep,
    missing_master,
    new_count,
)
from optim_kernels.functional._adamw_tensor import stored_dtype
from optim_kernels.functional._lists import Layout
from optim_utils.low_bit import LowBitTensor, from_plain, quantize

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
NEEDED = ("step", "exp_avg", "exp_avg_sq")


def moment_dtypes(param: Tensor, state_dtype: StateDtype) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of the first and the second moment of ``param``; ``torch.uint8`` stands for 8-bit codes."""
    if state_dtype is None:
        return param.dtype, param.dtype
    if state_dtype == "int8":
        dtype = torch.uint8 if has_codes(param) else torch.float32
        return dtype, dtype
    first, second = state_dtype if isinstance(state_dtype, tuple) else (state_dtype, state_dtype)
    return first or param.dtype, second or param.dtype


def stored_dtypes(param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, torch.dtype | None]:
    """The dtypes of a parameter, its gradient and its state, as they are or, before its first step, will be."""
    first, second = moment_dtypes(param, group["state_dtype"])
    master = OWN_MASTER[group["master_weights"]]
    return {
        "param": param.dtype,
        "grad": param.dtype if param.grad is None else param.grad.dtype,
        "exp_avg": stored_dtype(state["exp_avg"]) if "exp_avg" in state else first,
        "exp_avg_sq": stored_dtype(state["exp_avg_sq"]) if "exp_avg_sq" in state else second,
        "master": None if master is None else MASTERS[master],
    }


def bytes_per_element(dtypes: dict[str, torch.dtype | None], *, amsgrad: bool) -> float:
    """Bytes that a step moves for one element: everything read and written once, the gradient only read."""
    sizes = {key: 0 if dtype is None else dtype.itemsize for key, dtype in dtypes.items()}
    # beside an fp32 master the parameter is only written
    param = sizes["param"] * (1 if dtypes["master"] == torch.float32 else 2)
    codes = dtypes["exp_avg_sq"] == torch.uint8
    moments = sizes["exp_avg"] + sizes["exp_avg_sq"] + (8 / 256 if codes else 0)
    if amsgrad:
        moments += 4 if codes else sizes["exp_avg_sq"]
    return param + sizes["grad"] + 2 * moments + 2 * sizes["master"]


def zero_state(
    param: Tensor, group: dict[str, Any], *, step_device: torch.device, whole: Tensor | None = None
) -> dict[str, Any]:
    """The state of a parameter that has not been stepped; ``whole``: the parameter of which ``param`` is a part."""
    state: dict[str, Any] = {"step": new_count(step_device)}
    for key, dtype in _dtypes(param if whole is None else whole, group).items():
        if key == "max_exp_avg_sq" and not group["amsgrad"]:
            continue
        float_dtype = torch.float32 if dtype == torch.uint8 else dtype
        zeros = torch.zeros_like(param, dtype=float_dtype, memory_format=torch.preserve_format)
        state[key] = quantize(zeros, FORMATS[key]) if dtype == torch.uint8 else zeros
    return state


def converted_state(
    param: Tensor,
    group: dict[str, Any],
    saved: dict[str, Any],
    *,
    step_device: torch.device,
    whole: Tensor | None = None,
) -> dict[str, Any]:
    """A loaded state, of torch's AdamW or of ours in any format, in the format of this group.

    ``whole`` is the parameter of which ``param`` is a part, if it is one. Like torch, a group without ``amsgrad`` keeps
    a saved maximum, because it may want it again.
    """
    dtypes = _dtypes(param if whole is None else whole, group)
    state: dict[str, Any] = {}
    for key, value in saved.items():
        if key == "step":
            state[key] = torch.as_tensor(value, dtype=torch.float32, device=step_device).reshape(()).clone()
        elif key in dtypes:
            state[key] = _converted_moment(param, key, value, dtypes[key])
        elif key not in (*MASTERS, *MOMENTS):
            state[key] = value
    if group["amsgrad"] and "max_exp_avg_sq" not in state:
        state["max_exp_avg_sq"] = as_float(state["exp_avg_sq"]).to(dtypes["max_exp_avg_sq"], copy=True)
    return state | masters_to_keep(param, group["master_weights"], saved)


def init_state(param: Tensor, group: dict[str, Any], state: dict[str, Any], *, whole: Tensor | None = None) -> None:
    """Create what ``state`` lacks for the group's options, laid out as the parameter is, and convert what it has.

    Args:
        whole: the parameter of which ``param`` is a part, beginning at a multiple of ``CODE_BLOCK`` elements: the state
            is then the same part of the whole parameter's state, in the same formats and with the same bits.
    """
    is_complete = state.keys() >= {*NEEDED}
    made = {} if is_complete else zero_state(param, group, step_device=param.device, whole=whole)
    converted = converted_state(param, group, {**made, **state}, step_device=param.device, whole=whole)
    state.clear()
    state.update(converted | missing_master(param, group, converted))
    drop_other_masters(group, state)


def as_float(moment: Tensor) -> Tensor:
    """A moment as a tensor of numbers, whatever it is stored as."""
    return moment.dequantize() if isinstance(moment, LowBitTensor) else moment


def _dtypes(param: Tensor, group: dict[str, Any]) -> dict[str, torch.dtype]:
    """The dtype of each moment; 8-bit codes cannot hold a running maximum, which would round up and never fall."""
    first, second = moment_dtypes(param, group["state_dtype"])
    maximum = torch.float32 if second == torch.uint8 else second
    return {"exp_avg": first, "exp_avg_sq": second, "max_exp_avg_sq": maximum}


def _converted_moment(param: Tensor, key: str, value: Any, dtype: torch.dtype) -> Tensor:
    """A loaded moment, also one in plain form, on the parameter's device and in ``dtype``."""
    moment: Tensor = (from_plain(value) if isinstance(value, dict) else value).to(param.device)
    if moment.shape != param.shape:
        raise ValueError(f"the loaded {key} has shape {tuple(moment.shape)}, its parameter {tuple(param.shape)}")
    if dtype != torch.uint8:
        return as_float(moment).to(dtype)
    if isinstance(moment, LowBitTensor) and moment.fmt == FORMATS[key]:
        return moment
    return encoded(as_float(moment).float(), FORMATS[key])


def laid_out(param: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies, in the parameter's order in memory, of state tensors in another order (``channels_last``, say)."""
    return {
        key: torch.empty_like(param, dtype=value.dtype).copy_(value)
        for key, value in state.items()
        if key in (*MOMENTS, *MASTERS)
        and not (isinstance(value, LowBitTensor) or is_dtensor(value))
        and value.shape == param.shape
        and value.device == param.device
        and not Layout.of(param).is_that_of(value)
    }


def why_unfit_state(param: Tensor, grad: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    """What keeps a step of the group from updating the parameter and this state; ``None`` if nothing does."""
    used = ("step", *MOMENTS) if group.get("amsgrad") else NEEDED
    if group.get("master_weights") is None:
        return what_is_missing(state, used) or why_unfit(param, grad, state, used)
    return what_is_missing(state, used) or why_unfit(param, grad, state, (*used, *MASTERS)) or why_no_master(state)


def check_state(param: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], name: str) -> None:
    """Raise ``ValueError`` unless a step of the group can update the parameter of this name, and its state."""
    refuse(why_unfit_state(param, param, group, state), name)
