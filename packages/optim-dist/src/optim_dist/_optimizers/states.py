"""The words of state dicts: which tensors a state has, how they lie, and what stands for them where others read them.

A rank's ``state_dict()`` has torch's form; over several ranks its tensors are the parts that the rank owns, and a
``plan`` entry says which plan they fit (``loaded_state``, ``interchange``). All parts together are in ``whole_state``.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optim_dist._optimizers.construction import local
from optim_dist._reduction.storage import is_dense
from optim_dist.plan import Plan
from optim_dist.planning import contiguous_stride
from optim_kernels.muon_groups import with_dtype_names
from optim_utils.low_bit import LowBitTensor, from_plain

# state tensors with an element for each of the parameter's
WHOLE_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master", "master_low")


def stamped(state_dict: dict[str, Any], plan: Plan, rank: int) -> dict[str, Any]:
    """``state_dict`` with the plan it fits; as it is where no state is cut by a plan."""
    if plan.world_size > 1 and plan.buckets:
        state_dict["plan"] = {"hash": plan.hash, "world_size": plan.world_size, "rank": rank}
    return state_dict


def listed_parameters(optimizer: Optimizer) -> dict[int, int]:
    """The number of every parameter in torch's state dict."""
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return {id(parameter): place for place, parameter in enumerate(parameters)}


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as they lie, ``[numel]``."""
    return tensor.as_strided((tensor.numel(),), (1,))


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """How a copy without gaps lies: as ``tensor`` does, or row by row if that leaves some, as one rank's may."""
    return tensor.stride() if is_dense(tensor) else contiguous_stride(tuple(tensor.shape))


def nbytes(value: Any) -> int:
    """What a value of a state takes here: of a DTensor its local part, of 8-bit codes those and their scales."""
    if isinstance(value, LowBitTensor):
        return value.codes.nbytes + value.scale.nbytes
    return local(value).nbytes if isinstance(value, Tensor) else 0


def as_numbers(value: Any) -> Any:
    """What 8-bit codes, or their plain form, stand for; anything else as it is."""
    if isinstance(value, dict) and {"codes", "scale", "format"} <= value.keys():
        value = from_plain(value)
    return value.dequantize() if isinstance(value, LowBitTensor) else value


def make_codes_numbers(state_dict: dict[str, Any]) -> None:
    """Write 8-bit moments as the fp32 numbers that they stand for, of which ``init_state`` makes the same codes."""
    state_dict["state"] = {
        number: {key: as_numbers(value) for key, value in state.items()}
        for number, state in state_dict["state"].items()
    }


def make_groups_plain(state_dict: dict[str, Any]) -> None:
    """Write ``MatrixView``s and dtypes as builtins: ``weights_only=True`` loads them, torch's gathers take them."""
    state_dict["param_groups"] = [with_dtype_names(group) for group in state_dict["param_groups"]]
    for group in state_dict["param_groups"]:
        if group.get("views") is not None:
            group["views"] = [None if view is None else view.to_plain() for view in group["views"]]
