"""Helpers for state dicts: which tensors a state has, their memory layout, and their form in state dicts.

A rank's ``state_dict()`` has torch's form; over several ranks its tensors are the parts that the rank owns, and a
``plan`` entry says which plan they fit (``loaded_state``, ``interchange``). ``whole_state`` puts all parts together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optim_dist._optimizers.layouts import local
from optim_dist.plan import Plan
from optim_dist.planning import contiguous_stride
from optim_kernels.multi_tensor import is_dense
from optim_kernels.states import ELEMENTWISE_KEYS
from optim_utils.low_bit import LowBitTensor, from_plain

# attributes of torch's optimizers
_LOAD_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
# `optim_utils.attach_state_dict_hooks` replaces this method by one that counts on a hook of its own
_REGISTER = "register_load_state_dict_pre_hook"


def stamped(state_dict: dict[str, Any], plan: Plan, rank: int) -> dict[str, Any]:
    """``state_dict`` with the plan that it fits; unchanged if no plan cuts the state."""
    if plan.world_size > 1 and plan.buckets:
        state_dict["plan"] = {"hash": plan.plain_hash, "world_size": plan.world_size, "rank": rank}
    return state_dict


def packed_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups as in torch's state dict, with numbers for parameters, whatever hooks of the user's make of that."""
    numbers = count()
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups]


@contextmanager
def without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Leave out hooks of the user's on a load: what is loaded is no content of ``state_dict()``, which these know."""
    attributes = vars(optimizer)
    hidden = {name: attributes.pop(name) for name in (*_LOAD_HOOKS, _REGISTER) if name in attributes}
    attributes.update({name: OrderedDict() for name in _LOAD_HOOKS})
    try:
        yield
    finally:
        attributes.update(hidden)


def check_tensors(state: Mapping[str, Any], name: str) -> None:
    """Refuse entries of a parameter's state that are no tensors with names, which alone ranks can put together."""
    for key, value in state.items():
        if not isinstance(key, str):
            raise ValueError(
                f"the state of {name} has an entry {key!r}, but names are texts where it is saved and moved between "
                "ranks; rename it, or keep it in the group"
            )
        if not isinstance(value, Tensor):
            raise ValueError(
                f"the state of {name} has {key}={value!r}, but can be saved and moved between ranks only if it holds "
                "tensors alone; make it one, or keep it in the group"
            )


def check_keys(state: Mapping[str, Tensor], name: str) -> None:
    """Refuse a user's own entries in a state of which several ranks have parts."""
    for key in state.keys() - {"step", *ELEMENTWISE_KEYS}:
        raise ValueError(
            f"the state of {name} has {key}, of which nobody knows how the parts of ranks belong together; delete it, "
            "or keep it elsewhere (in the group, say)"
        )


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in memory order, ``[numel]``."""
    return tensor.as_strided((tensor.numel(),), (1,))


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Strides of a copy without gaps: the tensor's own, or row-major if those leave gaps, as they may on one rank."""
    return tensor.stride() if is_dense(tensor) else contiguous_stride(tuple(tensor.shape))


def nbytes(value: object) -> int:
    """Bytes that a value of a state takes on this rank: a DTensor's local part, 8-bit codes and their scales."""
    if isinstance(value, LowBitTensor):
        return value.codes.nbytes + value.scale.nbytes
    return local(value).nbytes if isinstance(value, Tensor) else 0


def as_numbers(value: object) -> Any:
    """The numbers that 8-bit codes, or their plain form, stand for; anything else unchanged."""
    if isinstance(value, dict) and {"codes", "scale", "format"} <= value.keys():
        value = from_plain(value)
    return value.dequantize() if isinstance(value, LowBitTensor) else value


def make_codes_numbers(state_dict: dict[str, Any]) -> None:
    """Replace 8-bit moments by the fp32 numbers they stand for; ``init_state`` makes the same codes of these."""
    state_dict["state"] = {
        # what is no dict is refused by its parameter's name later
        number: {key: as_numbers(value) for key, value in state.items()} if isinstance(state, Mapping) else state
        for number, state in state_dict["state"].items()
    }
