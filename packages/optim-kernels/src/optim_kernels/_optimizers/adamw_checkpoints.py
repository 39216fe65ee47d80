"""What state dicts of ``TritonAdamW`` hold: as it loads them itself, and as torch's AdamW does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optim_kernels._optimizers.adamw_state import MOMENTS, as_float
from optim_kernels._optimizers.plain_options import with_dtype_names
from optim_utils.low_bit import LowBitTensor, to_plain

# The options that torch's class lacks.
_OURS = frozenset({"state_dtype", "master_weights", "stochastic_rounding", "seed", "max_norm", "norm_type", "impl"})


def as_saved(_: Optimizer, content: dict[str, Any]) -> None:
    """Put codes and dtypes into plain form, and step counts where torch's state dict has them."""
    content["param_groups"] = [with_dtype_names(group) for group in content["param_groups"]]
    # the user may keep other entries beside the parameters'
    content["state"] = dict(content["state"])
    for group in content["param_groups"]:
        on_device = group["capturable"] or group["fused"]
        for key in group["params"]:
            if key in content["state"]:
                state = content["state"][key] = _plain_state(content["state"][key])
                if "step" in state and not on_device:
                    state["step"] = _count(state)


def as_torchs(optimizer: Optimizer, content: dict[str, Any]) -> None:
    """Reduce to floats of the parameters' dtypes, and to torch's options."""
    params = dict(enumerate(param for group in optimizer.param_groups for param in group["params"]))
    content["state"] = {
        key: _torch_state(params[key], value) if key in params else value
        for key, value in content["state"].items()
        if value or key not in params
    }
    content["param_groups"] = [
        {name: value for name, value in group.items() if name not in _OURS} for group in content["param_groups"]
    ]


def _torch_state(param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """The state as ``torch.optim.AdamW`` keeps it for this parameter: floats of the parameter's dtype."""
    moments = {key: as_float(state[key]).to(param.dtype) for key in MOMENTS if key in state}
    return {"step": _count(state).clone()} | moments if "step" in state else moments


def _count(state: dict[str, Any]) -> Tensor:
    """The step count on the CPU; a user may have put a number there."""
    return torch.as_tensor(state["step"], dtype=torch.float32, device="cpu")


def _plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """The state as a checkpoint keeps it: codes and scales as tensors of their own."""
    return {key: to_plain(value) if isinstance(value, LowBitTensor) else value for key, value in state.items()}
