"""State in and out: per rank at an equal plan, and whole in torch's one-process form.

A rank's ``state_dict()`` has torch's form; over several ranks its tensors are the parts that the rank owns, and a
``plan`` entry says which plan they fit. ``full_state_dict`` puts the parts of all ranks together, piece by piece, and
``cut_full_state_dict`` makes parts of them again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from optim_dist._optimizers.construction import Entry, layout_of, local
from optim_dist._optimizers.live import LiveOptimizer
from optim_dist._optimizers.shards import Shard
from optim_dist._reduction.collectives import Communicator
from optim_dist.plan import ParameterSpec, Plan, RouteName
from optim_kernels.muon_groups import with_dtype_names, with_dtypes
from optim_redist import Layout, Mesh, redistribute_local
from optim_redist.index_sets import intervals
from optim_utils.low_bit import LowBitTensor, from_plain
from optim_utils.param_groups import MatrixView

# state tensors with an element for each of the parameter's
WHOLE_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master", "master_low")

# what each kind of update cannot go on without, where there is a state at all
NEEDED_KEYS: Mapping[RouteName, tuple[str, ...]] = {
    "adamw": ("step", "exp_avg", "exp_avg_sq"),
    "muon": ("momentum_buffer",),
}
_KINDS: Mapping[RouteName, str] = {"adamw": "AdamW", "muon": "Muon"}

# of a group what belongs to the optimizer that loads: a loaded state is brought into its formats
OWN_OPTIONS = ("views", "momentum_dtype", "state_dtype", "master_weights", "impl")

OTHER_VIEWS = (
    "was saved with other views of its matrices than this optimizer has; build it with the views of the saved one"
)


def stamped(state_dict: dict[str, Any], plan: Plan, rank: int) -> dict[str, Any]:
    """``state_dict`` with the plan it fits; as it is where no state is cut by a plan."""
    if plan.world_size > 1 and plan.buckets:
        state_dict["plan"] = {"hash": plan.hash, "world_size": plan.world_size, "rank": rank}
    return state_dict


def check_stamp(state_dict: dict[str, Any], plan: Plan, rank: int) -> None:
    """Refuse a state of another plan or rank before anything is written."""
    stamp = state_dict.get("plan")
    if stamp is None:
        return
    if stamp["hash"] != plan.hash or stamp["rank"] != rank:
        raise ValueError(
            f"this state is of rank {stamp['rank']} of {stamp['world_size']}, plan {stamp['hash'][:12]}; "
            f"this is rank {rank} of {plan.world_size}, plan {plan.hash[:12]}. "
            "optim_dist.checkpoint loads at any number of ranks, and so does the state_dict() of one rank if all have "
            "called consolidate_state_dict() before it"
        )


def check_states(optimizer: LiveOptimizer, state_dict: dict[str, Any]) -> None:
    """Refuse states of another kind of update, of other shapes, and of DTensors what lies otherwise than these do.

    Of what is in buckets there are parts, which fit if their plan does.
    """
    saved_ids = [*chain.from_iterable(group["params"] for group in state_dict["param_groups"])]
    listed = listed_parameters(optimizer)
    for entry in optimizer.entries:
        parameter, place = entry.parameter, listed[id(entry.parameter)]
        # torch's own error says so if there are fewer
        state = state_dict["state"].get(saved_ids[place], {}) if place < len(saved_ids) else {}
        if fault := lacking(state, entry):
            raise ValueError(fault)
        is_cut = isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1
        if not is_cut and optimizer.communicator.world_size > 1:
            continue
        for key, value in state.items():
            if key not in WHOLE_KEYS or not isinstance(value, Tensor):
                continue
            if is_cut and not isinstance(value, DTensor):
                raise ValueError(
                    f"{key} of a DTensor of shape {tuple(parameter.shape)} is a plain tensor of shape "
                    f"{tuple(value.shape)}; load_full_state_dict() takes over a one-process state"
                )
            fault = _fault_of(value, parameter)
            if fault:
                raise ValueError(f"the {key} to load of {entry.name} {fault}")


def lacking(state: Mapping[str, Any], entry: Entry) -> str:
    """What is said of a state that another kind of optimizer has saved; empty of one that can be gone on with."""
    missing = [key for key in NEEDED_KEYS[entry.route] if key not in state]
    if not state or not missing:
        return ""
    return (
        f"the state to load of {entry.name} has {', '.join(sorted(state))}, but {_KINDS[entry.route]} needs "
        f"{' and '.join(missing)}; load the state of an optimizer of this kind"
    )


def _fault_of(value: Tensor, parameter: Tensor) -> str:
    """Why ``value`` cannot be the state of ``parameter``; empty if it can."""
    if value.shape != parameter.shape:
        return f"has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}"
    if not isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return ""
    if value.placements == parameter.placements and value.device_mesh == parameter.device_mesh:
        return ""
    if layout_of(value).slices(value.shape) == layout_of(parameter).slices(value.shape):
        return ""
    return (
        f"lies as {value.placements} of {value.device_mesh}, its parameter as {parameter.placements} of "
        f"{parameter.device_mesh}; optim_dist.checkpoint, torch.distributed.checkpoint and load_full_state_dict() load "
        "any layout"
    )


def adapted(optimizer: LiveOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``state_dict`` with complete groups, and numbers for the 8-bit codes of ``optim_kernels.TritonAdamW``.

    Raises:
        ValueError: for an empty one, and for groups that cannot be taken over.
    """
    if not state_dict:
        raise ValueError(
            "the state is empty: full_state_dict() gives it to the first rank alone; broadcast it, for every rank "
            "passes the same to load_full_state_dict()"
        )
    adapted = {**_with_complete_groups(optimizer, state_dict)}
    make_codes_numbers(adapted)
    return adapted


def make_codes_numbers(state_dict: dict[str, Any]) -> None:
    """Write 8-bit moments as the fp32 numbers that they stand for, of which ``init_state`` makes the same codes."""
    state_dict["state"] = {
        number: {key: as_numbers(value) for key, value in state.items()}
        for number, state in state_dict["state"].items()
    }


def as_numbers(value: Any) -> Any:
    """What 8-bit codes, or their plain form, stand for; anything else as it is."""
    if isinstance(value, dict) and {"codes", "scale", "format"} <= value.keys():
        value = from_plain(value)
    return value.dequantize() if isinstance(value, LowBitTensor) else value


def nbytes(value: Any) -> int:
    """What a value of a state takes here: of a DTensor its local part, of 8-bit codes those and their scales."""
    if isinstance(value, LowBitTensor):
        return value.codes.nbytes + value.scale.nbytes
    return local(value).nbytes if isinstance(value, Tensor) else 0


def make_groups_plain(state_dict: dict[str, Any]) -> None:
    """Write ``MatrixView``s and dtypes as builtins: ``weights_only=True`` loads them, torch's gathers take them."""
    state_dict["param_groups"] = [with_dtype_names(group) for group in state_dict["param_groups"]]
    for group in state_dict["param_groups"]:
        if group.get("views") is not None:
            group["views"] = [None if view is None else view.to_plain() for view in group["views"]]


def _with_complete_groups(optimizer: LiveOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Saved groups with our values for options that they lack, with our storage, and with our views if they fit."""
    saved_groups, mine = state_dict["param_groups"], optimizer.param_groups
    if len(saved_groups) != len(mine):
        return state_dict  # torch's own error says so
    completed = []
    for number, (group, saved) in enumerate(zip(mine, map(with_dtypes, saved_groups))):
        kept = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if fault := optimizer.group_fault(number, saved):
            raise ValueError(f"group {number} {fault}")
        completed.append({**kept, **{key: value for key, value in saved.items() if key not in OWN_OPTIONS}})
    return {**state_dict, "param_groups": completed}


def has_other_views(saved: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Whether a saved group reads its parameters as other matrices than ``mine`` does."""
    return saved.get("views") is not None and [_view(view) for view in saved["views"]] != mine.get("views")


def _view(saved: Any) -> MatrixView | None:
    return saved if saved is None or isinstance(saved, MatrixView) else MatrixView.from_plain(saved)


@contextmanager
def dtypes_kept(optimizer: LiveOptimizer) -> Iterator[None]:
    """While torch loads a state: put back what it casts to the parameters' dtype (pytorch#43706), as they lie.

    In 8-bit codes where groups have these.
    """
    loaded: dict[str, Any] = {}

    # user hooks may replace the dict and run before this one
    def remember(_: Optimizer, state_dict: dict[str, Any]) -> None:
        loaded.update(state_dict)

    def put_back(_: Optimizer) -> None:
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        saved_ids = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        for parameter, saved_id in zip(parameters, saved_ids, strict=True):
            if saved_id in loaded["state"]:
                saved = loaded["state"][saved_id]
                optimizer.state[parameter] = {key: _placed(key, value, parameter) for key, value in saved.items()}
        for shard in optimizer.shards():
            optimizer.encode_state(shard)

    handles = [
        optimizer.register_load_state_dict_pre_hook(remember),
        optimizer.register_load_state_dict_post_hook(put_back, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def full_state_dict(
    optimizer: LiveOptimizer, shards: Sequence[Shard], communicator: Communicator, to: int = 0
) -> dict[str, Any]:
    """One-process state on the CPU of chunk ``to``'s owner, each piece sent once by its own; ``{}`` elsewhere."""
    plan, mine = optimizer.plan, {shard.index: optimizer.kept_state(shard) for shard in shards}
    described = communicator.gather_json({str(index): _described(state) for index, state in mine.items()})
    listed = listed_parameters(optimizer)
    # copies of tensors in groups too: schedulers change an lr in place
    groups = copy.deepcopy(Optimizer.state_dict(optimizer)["param_groups"])
    states: dict[int, dict[str, Tensor | None]] = {}
    for index, (spec, entry) in enumerate(zip(plan.parameters, optimizer.entries)):
        if spec.sharding:
            layout = optimizer.layouts[index]
            whole = {key: on_one_rank(value, layout, communicator, to) for key, value in mine[index].items()}
        else:
            whole = {}
            for key, (dtype, shape) in described[plan.ranges(index)[0].rank].get(str(index), {}).items():
                part, kind = mine.get(index, {}).get(key), getattr(torch, dtype)
                whole[key] = _broadcast(part, plan, index, shape, kind, communicator, to, key in WHOLE_KEYS)
        if whole and communicator.rank == to:
            states[listed[id(entry.parameter)]] = whole
    full = {"state": states, "param_groups": groups}
    make_groups_plain(full)
    return full if communicator.rank == to else {}


def _described(state: dict[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    """The dtype and shape of each tensor, as JSON may hold them."""
    return {key: (str(value.dtype).removeprefix("torch."), list(value.shape)) for key, value in state.items()}


def _broadcast(
    mine: Tensor | None,
    plan: Plan,
    index: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    communicator: Communicator,
    to: int,
    lies_alike: bool,
) -> Tensor | None:
    """A whole state tensor on the CPU of one rank, each piece from its owner; ``mine`` is this rank's.

    ``lies_alike``: whether it has the parameter's strides.
    """
    spec, pieces = plan.parameters[index], plan.ranges(index)
    in_pieces = spec.route == "adamw" and bool(shape) and plan.world_size > 1
    parts = []
    for piece in pieces if in_pieces else pieces[:1]:
        numel = piece.stop - piece.start if in_pieces else prod(shape)
        part = torch.empty(numel, dtype=dtype, device=communicator.device)
        if piece.rank == communicator.rank:
            assert mine is not None, "owners have what they described"
            # parts lie as their parameter does, whole tensors however they were made or loaded
            found = as_numbers(local(mine))
            part.copy_(in_memory_order(found) if in_pieces else found.reshape(-1))
        communicator.broadcast_(part, piece.rank)
        if communicator.rank == to:
            parts.append(part.cpu())
    if communicator.rank != to:
        return None
    value = torch.cat(parts)
    if in_pieces:
        return value.as_strided(spec.shape, spec.stride)
    value = value.view(shape)
    return torch.empty_strided(spec.shape, spec.stride, dtype=dtype).copy_(value) if lies_alike else value


def on_one_rank(value: Tensor, layout: Layout, communicator: Communicator, to: int = 0) -> Tensor | None:
    """A DTensor whole on the CPU of chunk ``to``'s owner, None elsewhere; what every rank has whole needs no exchange.

    Of a DTensor on some of the ranks, whose replicas others hold, those who hold it have to call.
    """
    target, ranks = communicator.ranks[to], layout.mesh.ranks
    if isinstance(value, DTensor):
        is_everywhere = len(ranks) == communicator.world_size
        there = Layout(Mesh(1, ranks=[target if target in ranks else ranks[0]]), [None] * value.ndim)
        group = communicator.group if is_everywhere else None
        value = redistribute_local(local(value), value.shape, layout, there, group=group)
    # a copy also where it is on the CPU already: the next step changes it
    return value.to("cpu", copy=True) if communicator.rank == to else None


def cut_full_state_dict(
    optimizer: LiveOptimizer, state_dict: dict[str, Any], shards: Sequence[Shard]
) -> dict[str, Any]:
    """A one-process state as this rank's ``state_dict()`` would have it; every rank cuts its parts out of the same."""
    listed = listed_parameters(optimizer)
    # of all parameters, so that every rank refuses what one does
    problems = [
        f"{entry.name}.{key}: shape {tuple(value.shape)}, expected {spec.shape}"
        for spec, entry in zip(optimizer.plan.parameters, optimizer.entries)
        for key, value in state_dict["state"].get(listed[id(entry.parameter)], {}).items()
        if key in WHOLE_KEYS and tuple(value.shape) != spec.shape
    ]
    found = [lacking(state_dict["state"].get(listed[id(entry.parameter)], {}), entry) for entry in optimizer.entries]
    problems += filter(None, found)
    if problems:
        raise ValueError("a state that does not fit:\n  " + "\n  ".join(problems))
    parts: dict[int, dict[str, Any]] = {}
    for shard in shards:
        place = listed[id(shard.parameter)]
        spec = optimizer.plan.parameters[shard.index]
        for key, value in state_dict["state"].get(place, {}).items():
            parts.setdefault(place, {})[key] = cut(value, spec, shard) if key in WHOLE_KEYS else value
    stamp = stamped({}, optimizer.plan, optimizer.communicator.rank)
    return {"state": parts, "param_groups": state_dict["param_groups"], **stamp}


def cut(value: Tensor, spec: ParameterSpec, shard: Shard) -> Tensor:
    """The part of a whole state tensor that belongs to a shard."""
    if isinstance(shard.parameter, DTensor):
        return cut_like(value, shard.parameter)
    if tuple(shard.value.shape) == spec.shape:
        return value
    strided = torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device).copy_(value)
    return in_memory_order(strided)[shard.start : shard.stop].clone()


def cut_like(value: Tensor, parameter: DTensor) -> DTensor:
    """A whole tensor, the same on every rank, as a DTensor that lies as ``parameter`` does."""
    mesh = parameter.device_mesh
    part = value
    for dim, held in enumerate(layout_of(parameter).indices(parameter.shape, mesh.get_rank())):
        pieces = [part.narrow(dim, start, stop - start) for start, stop in intervals(held)]
        part = torch.cat(pieces, dim) if pieces else part.narrow(dim, 0, 0)
    return as_parameter_lies(part.to(parameter.device).contiguous(), parameter)


def as_parameter_lies(part: Tensor, parameter: DTensor) -> DTensor:
    """A rank's part as a DTensor that lies as ``parameter`` does."""
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(part, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as they lie, ``[numel]``."""
    return tensor.as_strided((tensor.numel(),), (1,))


def listed_parameters(optimizer: Optimizer) -> dict[int, int]:
    """The number of every parameter in torch's state dict."""
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return {id(parameter): place for place, parameter in enumerate(parameters)}


def _placed(key: str, value: Any, parameter: Tensor) -> Any:
    """A copy on the parameter's device, laid out as new state is: the kernels read memory, whatever was loaded."""
    if key == "step" and isinstance(value, int | float):
        # torch before 1.12 counted by numbers
        return torch.tensor(float(value), dtype=torch.float32, device=parameter.device)
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().to(parameter.device, copy=True)
    if isinstance(value, DTensor) or isinstance(parameter, DTensor):
        return copied
    if key not in WHOLE_KEYS:
        return copied.contiguous()
    if copied.shape != parameter.shape or copied.stride() == torch.empty_like(parameter, device="meta").stride():
        return copied
    return torch.empty_like(parameter, dtype=copied.dtype).copy_(copied)
