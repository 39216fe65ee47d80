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
from optim_kernels._optimizers.storage import MASTERS
from optim_kernels.functional._lists import description, has_overlaps


def check_fit(param: Tensor, grad: Tensor, state: Mapping[str, Any], keys: Sequence[str], name: str) -> None:
    """Raise ``ValueError`` unless a step can update ``param`` and what ``state`` has under ``keys``.

    Args:
        keys: what the step uses of the state: its count, ``"step"``, and entries of the parameter's shape. Those that
            ``state`` lacks are skipped.
    """
    own = local(param)
    if has_overlaps(own):
        raise ValueError(
            f"{name}, {description(own)}, has several elements at one place in memory, so it cannot be updated; give "
            "it memory of its own: param.data = param.data.clone(memory_format=torch.contiguous_format)"
        )
    _check_like(own, local(grad), f"the gradient of {name}", "call zero_grad() where a parameter changes")
    for key in keys:
        if key not in state:
            continue
        value, of = state[key], f"{key} of {name}"
        if key == "step":
            _check_count(value, of)
        elif not isinstance(value, Tensor):
            raise ValueError(f"{of} must be a tensor, got {value!r}; delete the state of this parameter to start anew")
        else:
            here = local(value)
            _check_like(own, here, of, "convert it, or delete the state of this parameter to start anew")
            if has_overlaps(here):
                raise ValueError(f"{of}, {description(here)}, has several elements at one place; give its contiguous()")
            if key not in MASTERS and not (value.is_floating_point() or (own.is_complex() and value.is_complex())):
                raise ValueError(f"{of} must be of a floating dtype, got {value.dtype}; convert it")


def check_all_there(state: Mapping[str, Any], needed: Sequence[str], name: str) -> None:
    """Raise ``ValueError`` where a state lacks what a step reads."""
    missing = [key for key in needed if key not in state]
    if missing:
        raise ValueError(
            f"the state of {name} has {sorted(state)}, but needs {' and '.join(missing)} too; add what is missing, or "
            "delete the state to start anew"
        )


def check_loaded(saved: Any, param: Tensor, keys: Sequence[str], name: str) -> None:
    """Raise ``ValueError`` unless a loaded state has numbers under those of ``keys`` that it has, and a step count.

    Values in the plain form of `optim_utils.low_bit` check themselves where they are read.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"the loaded state of {name} must be a dict, got {saved!r}")
    for key in keys:
        value, of = saved.get(key), f"the loaded {key} of {name}"
        if key not in saved or isinstance(value, Mapping):
            continue
        if not isinstance(value, Tensor):
            raise ValueError(f"{of} must be a tensor, got a {type(value).__name__}")
        if value.layout != torch.strided or (value.is_complex() and not param.is_complex()):
            raise ValueError(f"{of} must be dense numbers like the parameter's, got {value.dtype} in {value.layout}")
        if value.is_meta and not param.is_meta:
            raise ValueError(f"{of} has no values: it is on meta; load the checkpoint on another device")
    if "step" in saved:
        step, of = saved["step"], f"the loaded step of {name}"
        _check_count(step, of)
        # not from a GPU, which would be waited for
        if not (isinstance(step, Tensor) and step.device.type != "cpu") and not float(step) >= 0:
            raise ValueError(f"{of} must be a number of steps, got {float(step)}")


def check_masters_kept(state: Mapping[str, Any], name: str) -> None:
    """Raise ``ValueError`` for a master that was cast, as part of a whole state perhaps, and so lost what it is for."""
    for key, dtype in MASTERS.items():
        if key in state and state[key].dtype != dtype:
            raise ValueError(
                f"{key} of {name} must be {dtype}, got {state[key].dtype}; delete it, and the next step makes it anew"
            )


def _check_count(step: Any, of: str) -> None:
    if not (step.numel() == 1 if isinstance(step, Tensor) else isinstance(step, Real)):
        got = description(step) if isinstance(step, Tensor) else repr(step)
        raise ValueError(f"{of} must be a 0-d tensor that counts steps, got {got}; torch.tensor(0.0) counts anew")


def _check_like(param: Tensor, value: Tensor, of: str, remedy: str) -> None:
    if value.shape != param.shape or value.device != param.device:
        raise ValueError(
            f"{of} is of shape {tuple(value.shape)} on {value.device}, but the parameter of shape "
            f"{tuple(param.shape)} on {param.device}; {remedy}"
        )
