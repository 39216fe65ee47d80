"""What updates a parameter of ``TritonAdamW``, the kernels or plain torch, and the table that says so."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from optim_kernels._dtensors import is_wrapper, local
from optim_kernels._impl import KERNEL_DTYPES, why_not_triton
from optim_kernels._memory import why_not_in_place
from optim_kernels._optimizers.adamw_state import bytes_per_element, moment_dtypes, stored_dtypes

NOT_YET_THERE = "not yet there: its lazy module has seen no input"
EXPLAIN_HEADER = ("parameter", "shape", "path", "notes", "p", "g", "m", "v", "master", "B/elt")


def why_not_kernels(param: Tensor, group: dict[str, Any]) -> str | None:
    """What keeps the kernels from updating ``param``, in a few words; ``None`` if they do."""
    if group["impl"] == "torch":
        return "impl='torch'"
    if group["differentiable"]:
        return "differentiable=True"
    if group["fused"] is False:
        return "fused=False"
    if group["foreach"]:
        return "foreach=True"
    own = local(param)
    if group["impl"] == "auto" and not group["fused"] and not own.is_cuda:
        return f"it is on {own.device.type}"
    reason = why_not_triton(own)
    if reason is None and is_wrapper(own):
        reason = f"it is a {type(own).__name__}, which has no memory of its own"
    reason = reason or why_not_in_place(own)
    if reason is None and not {*KERNEL_DTYPES, torch.uint8}.issuperset(moment_dtypes(param, group["state_dtype"])):
        return "the kernels take moments in fp32, fp16, bf16 and 8-bit codes"
    return reason


def step_device(param: Tensor, group: dict[str, Any]) -> torch.device:
    """Where the step count of ``param`` lives: on its device if a kernel or a graph reads it, else on the CPU."""
    on_device = group["capturable"] or group["fused"] or why_not_kernels(param, group) is None
    return param.device if on_device else torch.device("cpu")


def explain_row(name: str, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> tuple[object, ...]:
    """A parameter's row of ``TritonAdamW.explain``; see ``EXPLAIN_HEADER``."""
    if is_lazy(param):
        return (name, "", "", NOT_YET_THERE, _short(param.dtype), *[""] * 5)
    reason = why_not_kernels(param, group)
    dtypes = stored_dtypes(param, group, state)
    notes = [reason] if reason is not None else []
    if dtypes["exp_avg_sq"] == torch.float16:
        notes.append(f"fp16 second moment: stays zero where |g| < {_lost_below(group['betas'][1]):.1e}")
    if dtypes["exp_avg_sq"] == torch.bfloat16 and not group["stochastic_rounding"]:
        notes.append("bf16 second moment rounded to nearest: stops falling at beta2 > 0.996")
    return (
        name,
        tuple(param.shape),
        "triton" if reason is None else "torch",
        "; ".join(notes),
        *(_short(dtypes[key]) for key in ("param", "grad", "exp_avg", "exp_avg_sq", "master")),
        f"{bytes_per_element(dtypes, amsgrad=group['amsgrad']):g}",
    )


def _lost_below(beta2: float | Tensor) -> float:
    """The |g| up to which (1 - beta2) g² rounds to zero in fp16, as half the smallest number, 2**-25, and less do."""
    rest = 1 - float(beta2)
    return (2.0**-25 / rest) ** 0.5 if rest > 0 else math.inf


def _short(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")
