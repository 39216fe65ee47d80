"""Whether gradient and state still belong to their parameter when a step begins.

A user may replace any of them between two steps: ``param.data = longer``, ``state["exp_avg"] = other``. torch's
operators notice that in the middle of a step, when other parameters have moved, or broadcast; so a step looks first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from optim_kernels._dtensors import local
from optim_kernels._memory import has_overlaps
from optim_kernels._optimizers.storage import MASTERS, MOMENT_DTYPES
from optim_kernels.functional._lists import description
from optim_utils.low_bit import LowBitTensor

# what 8-bit AdamW stores in codes
_MAY_BE_CODES = ("exp_avg", "exp_avg_sq")
# what states may have in the plain form of codes
_MAY_BE_SAVED_CODES = (*_MAY_BE_CODES, "max_exp_avg_sq")
# what steps write beside the parameter; a user may keep more in a state
_WRITTEN = ("step", *_MAY_BE_SAVED_CODES, "momentum_buffer", "second_momentum_buffer", *MASTERS)
# stands for what a state lacks, since None is a value that it may have
_MISSING = object()


def why_unfit(param: Tensor, grad: Tensor, state: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """What keeps a step from updating ``param`` and what ``state`` has under ``keys``; ``None`` if nothing does.

    Every step in plain torch asks this of every parameter, so words are made only where something is wrong.

    Args:
        keys: what the step uses of the state: its count, ``"step"``, and entries of the parameter's shape. Those that
            ``state`` lacks are skipped.
    """
    own, grad = local(param), local(grad)
    shape, device = own.shape, own.device
    if own.dtype not in MOMENT_DTYPES and not own.is_complex():
        return f"it is {own.dtype}; freeze it (requires_grad=False, no .grad), or convert it to one of {MOMENT_DTYPES}"
    if has_overlaps(own):
        return (
            f"{description(own)}, it has several elements at one place in memory; give it memory of its own: "
            "param.data = param.data.clone(memory_format=torch.contiguous_format)"
        )
    if grad.shape != shape or grad.device != device:
        return f"its gradient is {_place(grad)}, but it is {_place(own)}; call zero_grad() where a parameter changes"
    if not (grad.is_complex() if own.is_complex() else grad.is_floating_point()):
        return f"its gradient is {grad.dtype}, but it is {own.dtype}; convert the gradient"
    for key in keys:
        value = state.get(key, _MISSING)
        if value is _MISSING:
            continue
        if key == "step":
            if not _is_count(value) or _lacks_numbers(value, own):
                return f"its step must be a 0-d tensor that counts steps, got {_words(value)}; torch.tensor(0.0) does"
            continue
        reason = why_no_numbers(key, value, own)
        if reason is not None:
            return reason
        here = local(value)
        if here.shape != shape or here.device != device:
            return (
                f"its {key} is {_place(here)}, but it is {_place(own)}; convert it, or delete its state to start anew"
            )
    return None


def why_no_numbers(key: str, value: object, param: Tensor) -> str | None:
    """What keeps a step from reading and writing numbers in an entry of the state of ``param``, whatever its shape."""
    if not isinstance(value, Tensor):
        return f"its {key} must be a tensor, got {value!r}; delete its state to start anew"
    here = local(value)
    if here.layout != torch.strided:
        return f"its {key} must be dense, got {here.layout}; give its to_dense()"
    if isinstance(here, LowBitTensor) and key not in _MAY_BE_CODES:
        return f"its {key} must be plain numbers, got codes of {here.fmt.code}; give its dequantize()"
    if has_overlaps(here):
        return f"its {key}, {description(here)}, has several elements at one place; give its contiguous()"
    if key not in MASTERS and not (here.is_floating_point() or (param.is_complex() and here.is_complex())):
        return f"its {key} must be of a floating dtype, got {here.dtype}; convert it"
    return None


def why_not_written(param: Tensor, state: Mapping[str, Any]) -> str | None:
    """What keeps plain torch from writing the parameter and this state; ``None`` if nothing does."""
    if torch.is_inference_mode_enabled():
        return None
    written = {"it": param} | {f"its {key}": state[key] for key in _WRITTEN if key in state}
    for what, value in written.items():
        if isinstance(value, Tensor) and value.is_inference():
            return f"{what} was made in inference mode, outside of which it cannot be written; give its clone()"
    return None


def what_is_missing(state: Mapping[str, Any], needed: Sequence[str]) -> str | None:
    """What a step reads and a state lacks, in words; ``None`` if it has all."""
    missing = [key for key in needed if key not in state]
    if not missing:
        return None
    return (
        f"its state has {list(state)}, but needs {' and '.join(missing)} too; add what is missing, or delete the "
        "state to start anew"
    )


def why_no_master(state: Mapping[str, Any]) -> str | None:
    """Which master was cast, as part of a whole state perhaps, and so lost what it is for; ``None`` if none was."""
    for key, dtype in MASTERS.items():
        if key in state and state[key].dtype != dtype:
            return f"its {key} must be {dtype}, got {state[key].dtype}; delete it, and the next step makes it anew"
    return None


def refuse(reason: str | None, name: str) -> None:
    """Raise ``ValueError`` if there is a reason why the parameter of this name cannot be updated."""
    if reason is not None:
        raise ValueError(f"{name} cannot be updated: {reason}")


def check_form(content: object) -> None:
    """Raise ``ValueError`` unless this has the form of an optimizer's state dict, which no other part of a file has."""
    if not isinstance(content, Mapping) or not {"state", "param_groups"} <= content.keys():
        found = f"one of {list(content)[:8]}" if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise ValueError(
            "load_state_dict takes what an optimizer's state_dict() returns, a dict of state and param_groups, got "
            f"{found}; give that part of the checkpoint"
        )
    if not isinstance(content["state"], Mapping):
        raise ValueError(f"the loaded state must be a dict of parameters' states, got {content['state']!r}")
    groups = content["param_groups"]
    if not isinstance(groups, list | tuple):
        raise ValueError(f"the loaded param_groups must be a list of dicts, got {groups!r}")
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            shown = {"params": group.get("params")} if isinstance(group, Mapping) else group
            raise ValueError(
                f"the loaded param_groups[{number}] must be a dict with a list of numbers as params, got {shown!r}"
            )


def check_loaded(saved: object, param: Tensor, keys: Sequence[str], name: str) -> None:
    """Raise ``ValueError`` unless a loaded state has numbers under those of ``keys`` that it has, and a step count.

    Values in the plain form of `optim_utils.low_bit` check themselves where they are read.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"the loaded state of {name} must be a dict, got {saved!r}")
    for key in keys:
        value, of = saved.get(key), f"the loaded {key} of {name}"
        if key not in saved or (isinstance(value, Mapping) and key in _MAY_BE_SAVED_CODES):
            continue
        if not isinstance(value, Tensor):
            raise ValueError(f"{of} must be a tensor, got a {type(value).__name__}")
        are_numbers = param.is_complex() if value.is_complex() else value.is_floating_point() or key in MASTERS
        if value.layout != torch.strided or not are_numbers:
            raise ValueError(f"{of} must be dense numbers like the parameter's, got {value.dtype} in {value.layout}")
        own = local(value)
        if _has_other_codes(own) and type(own) is not type(local(param)):
            raise ValueError(f"{of} must be plain numbers, got a {type(own).__name__}; load its dequantize()")
        if value.is_meta and not param.is_meta:
            raise ValueError(f"{of} has no values: it is on meta; load the checkpoint on another device")
    if "step" in saved:
        step, of = saved["step"], f"the loaded step of {name}"
        if not _is_count(step) or _lacks_numbers(step, param):
            raise ValueError(f"{of} must be a 0-d tensor that counts steps, got {_words(step)}")
        # not from a GPU, which would be waited for
        if not (isinstance(step, Tensor) and step.device.type != "cpu") and not float(step) >= 0:
            raise ValueError(f"{of} must be a number of steps, got {float(step)}")


def _has_other_codes(value: Tensor) -> bool:
    """Whether these are another library's codes of numbers, such as torchao's, which no step here decodes."""
    return type(value).dequantize is not Tensor.dequantize and not isinstance(value, LowBitTensor)


def _is_count(step: object) -> bool:
    """Whether this counts the steps of one parameter: a number, or a tensor of one."""
    return step.numel() == 1 if isinstance(step, Tensor) else isinstance(step, Real)


def _lacks_numbers(value: object, param: Tensor) -> bool:
    """Whether this is a tensor whose numbers a step of ``param`` cannot read where they are."""
    if not isinstance(value, Tensor):
        return False
    is_elsewhere = value.is_meta and not param.is_meta
    return value.layout != torch.strided or isinstance(value, LowBitTensor) or value.is_complex() or is_elsewhere


def _words(value: object) -> str:
    return description(value) if isinstance(value, Tensor) else repr(value)


def _place(tensor: Tensor) -> str:
    return f"of shape {tuple(tensor.shape)} on {tensor.device}"
